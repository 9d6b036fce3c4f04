"""Arrow columns from and to arrays: text, numbers, and tensors of one fixed shape."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from mdiff_core.errors import BadSetting

Column = Sequence[str] | np.ndarray | Tensor
"""N texts, [N] numbers or [N, *shape] tensors."""

DTYPE = b"mdiff.dtype"
"""Key of the field metadata that says what numbers are when Arrow's type does not."""

STORED = {torch.bfloat16: torch.uint16, torch.bool: torch.uint8}
"""Types that Arrow lacks or packs, and the type of equal width whose bits stand in for them."""

NAMED = {str(dtype).encode(): dtype for dtype in STORED}


def encode(name: str, column: Column) -> tuple[pa.Field, pa.Array]:
    """The column as Arrow, sharing memory with a contiguous array."""
    if not isinstance(column, np.ndarray | Tensor):
        return pa.field(name, pa.string(), nullable=False), pa.array(column, pa.string())
    try:
        tensor = column if isinstance(column, Tensor) else torch.from_numpy(np.require(column, requirements="W"))
        stored = STORED.get(tensor.dtype)
        metadata = {DTYPE: str(tensor.dtype).encode()} if stored else None
        tensor = tensor.detach().cpu().contiguous()
        array = _numbers((tensor.view(stored) if stored else tensor).numpy())
    except (TypeError, pa.ArrowNotImplementedError) as error:
        raise BadSetting(f"{name}: {column.dtype} cannot be stored ({error}); use a real number type") from error
    return pa.field(name, array.type, nullable=False, metadata=metadata), array


def _numbers(values: np.ndarray) -> pa.Array:
    """[N] as a plain column, [N, *shape] as one of tensors; a dimension may be 0."""
    number = pa.from_numpy_dtype(values.dtype)
    flat = pa.Array.from_buffers(number, values.size, [None, pa.py_buffer(values)])
    if values.ndim == 1:
        return flat
    kind = pa.fixed_shape_tensor(number, values.shape[1:])
    storage = pa.Array.from_buffers(kind.storage_type, len(values), [None], children=[flat])
    return pa.ExtensionArray.from_storage(kind, storage)


def number_type(field: pa.Field) -> np.dtype:
    """Type of the stored numbers."""
    kind = field.type.value_type if isinstance(field.type, pa.FixedShapeTensorType) else field.type
    number: np.dtype = np.dtype(kind.to_pandas_dtype())
    return number


def shape_of(field: pa.Field) -> tuple[int, ...]:
    """Shape of one row; () for numbers."""
    return tuple(field.type.shape) if isinstance(field.type, pa.FixedShapeTensorType) else ()


def _meaning(field: pa.Field) -> torch.dtype | None:
    return NAMED.get((field.metadata or {}).get(DTYPE, b""))


def as_tensor(field: pa.Field, values: np.ndarray) -> Tensor:
    """A tensor on the same memory, in the type that was written."""
    kind = _meaning(field)
    tensor = torch.from_numpy(values)
    return tensor.view(kind) if kind else tensor


def as_numpy(field: pa.Field, values: np.ndarray) -> np.ndarray:
    """The array itself in the type that was written, but bfloat16, which numpy lacks, as an exact float32 copy."""
    kind = _meaning(field)
    if kind is torch.bfloat16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.view(np.bool_) if kind is torch.bool else values
