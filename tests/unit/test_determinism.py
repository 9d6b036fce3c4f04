"""Kernels that repeat themselves: when they are asked for, and that nothing of it is left behind."""

import os
from pathlib import Path

import pytest
import torch

from mdiff_core.determinism import deterministic
from mdiff_core.engines.diffusers import DiffusersEngine, DiffusersOptions
from mdiff_core.fleet.actor import make_kernel
from tests.policies_made import FAMILY


def state() -> tuple[bool, bool, bool]:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32, filled


def test_a_gpu_gets_repeatable_kernels_and_its_own_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = state()
    with pytest.raises(ValueError, match="stop"), deterministic(torch.device("cuda")):
        assert state() == (True, False, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        raise ValueError("stop")
    assert state() == before


@pytest.mark.parametrize(("device", "wanted"), [("cpu", True), ("cuda", False)])
def test_nothing_changes_where_nothing_has_to(device: str, wanted: bool) -> None:
    before = state()
    with deterministic(torch.device(device), wanted):
        assert state() == before


@pytest.mark.parametrize(
    ("dtype", "asked", "expected"),
    [
        (torch.float32, None, True),
        (torch.bfloat16, None, False),
        (torch.bfloat16, True, True),
        (torch.float32, False, False),
    ],
)
def test_an_engine_draws_so_in_float32_unless_told(
    tiny_sd3: Path, dtype: torch.dtype, asked: bool | None, expected: bool
) -> None:
    options, cpu = DiffusersOptions(deterministic=asked), torch.device("cpu")
    engine = DiffusersEngine(options, family=FAMILY, model=str(tiny_sd3), dtype=dtype, device=cpu, kernels=make_kernel)
    assert engine._repeatable is expected
    assert not torch.are_deterministic_algorithms_enabled()
