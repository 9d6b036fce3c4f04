"""What a server's processes send each other."""

import pickle
from dataclasses import dataclass

import pytest
import torch

from mdiff_core.engines.sglang.transport import dumps


@dataclass
class Answer:
    """As SGLang's, tensors among other things."""

    output: torch.Tensor
    latents: list[torch.Tensor]
    seed: int


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 3, 4),
        torch.rand(2, 3).bfloat16(),
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.arange(4) > 1,
        torch.rand(3, 4).t(),
        torch.rand(4, 5)[1:, ::2],
    ],
    ids=["float32", "bfloat16", "scalar", "empty", "bool", "transposed", "strided"],
)
def test_a_tensor_comes_back_as_it_was(tensor: torch.Tensor) -> None:
    found = pickle.loads(dumps({"tensor": tensor}))["tensor"]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor)


def test_an_answer_comes_back_as_it_was() -> None:
    sent = Answer(output=torch.rand(2, 3, 8, 8), latents=[torch.rand(4), torch.rand(5)], seed=7)
    found = pickle.loads(dumps(sent))
    assert found.seed == 7
    assert torch.equal(found.output, sent.output)
    assert all(torch.equal(one, other) for one, other in zip(found.latents, sent.latents, strict=True))


def test_pickling_adds_little_to_the_bytes() -> None:
    """A view of a big tensor takes its own bytes along, not those of all."""
    assert len(dumps(torch.zeros(1000, 1000)[:10])) < 2 * 10 * 1000 * 4


def test_what_comes_back_can_be_written_to() -> None:
    pickle.loads(dumps(torch.zeros(3))).add_(1)
