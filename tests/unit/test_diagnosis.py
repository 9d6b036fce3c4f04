"""The drift gate says what is wrong: each thing is broken on purpose in what the rollout drew, or in the trainer's model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mdiff_core import policies, registry
from mdiff_core.errors import DriftExceeded
from mdiff_core.jobs import UpdateJob
from mdiff_core.options import Choice
from mdiff_core.settings import Model
from tests import train_world as world

CPU = torch.device("cpu")


class Engine(nn.Module):
    """The stand-in's network, called in another way than the trainer calls it. The batch is the negative half, then the positive."""

    def __init__(self, net: nn.Module, call: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.call = net, call
        self.dtype = torch.float32

    def forward(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        return self.call(self.net, x, sigma, text)


def swapped(net: nn.Module, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    return torch.cat(net(x, sigma, text).chunk(2)[::-1])


def unguided(net: nn.Module, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    return torch.cat([net(x, sigma, text).chunk(2)[1]] * 2)


def neighbours(net: nn.Module, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    negative, positive = text.chunk(2)
    return net(x, sigma, torch.cat((negative, positive.roll(1, 0))))


def timed(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]:
    return lambda net, x, sigma, text: net(x, change(sigma), text)


def in_bfloat16(net: nn.Module, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(x, sigma, text).float()


class Shaped(world.StandIn):
    """A model that computes otherwise in batches of more than one row with its negative."""

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return super().velocity(transformer, x, sigma, condition) * (1.05 if len(x) > 2 else 1.0)


def diagnosis(one: UpdateJob, folder: Path, pairs: Path, policy: Path | None = None) -> str:
    start, state = world.start(folder / "start", one)
    with pytest.raises(DriftExceeded) as caught:
        world.train(one, pairs, policy or start, state, folder / "p", folder / "s")
    return str(caught.value).partition("Likely cause: ")[2]


def strict(**changes: Any) -> UpdateJob:
    return world.job(drift_limit=1e-5, microbatch=16, **changes)


@pytest.mark.parametrize(("call", "words"), [
    (swapped, "conditioning: the engine exchanges both texts"),
    (unguided, "conditioning: the engine draws without guidance"),
    (neighbours, "conditioning: rows have their neighbours' texts"),
    (timed(lambda sigma: (sigma * 1000).round() / 1000), "schedule: the engine tells its model whole timesteps"),
    (timed(lambda sigma: (sigma * 1000).floor() / 1000), "schedule: the engine tells its model timesteps cut to integers"),
    (timed(lambda sigma: sigma.bfloat16().float()), "schedule: the engine tells its model sigmas in bfloat16"),
    (in_bfloat16, "dtype: torch.bfloat16 in place of train.precision='fp32'"),
])  # fmt: skip
def test_what_the_engine_did_otherwise_is_named(
    tmp_path: Path, call: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor], words: str
) -> None:
    one = strict()
    net = registry.make("family", one.model.family).transformer(one.model.path, torch.float32, CPU)
    pairs = world.draw_pairs(tmp_path / "pairs", one, transformer=Engine(net, call))
    assert diagnosis(one, tmp_path, pairs).startswith(words)


def test_a_model_that_depends_on_the_batch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.REGISTRY["family"], "shaped", "tests.unit.test_diagnosis:Shaped")
    pairs = world.draw_pairs(tmp_path / "pairs", strict())
    one = strict(model=Model(path="tiny", family=Choice(name="shaped"), dtype="float32"))
    assert diagnosis(one, tmp_path, pairs).startswith("batch geometry: rows agree one by one")


@pytest.mark.parametrize(("scale", "words"), [
    (0.0, "adapter scale: the engine draws without the adapter"),
    (1.0, "adapter scale: the engine draws as if alpha were rank (scale 1, not 2)"),
    (4.0, "adapter scale: the engine draws with alpha 4 not divided by rank 2"),
])  # fmt: skip
def test_another_adapter_scale_is_named(tmp_path: Path, scale: float, words: str) -> None:
    """A LoRA of rank 2 and alpha 4, merged by an engine with another factor."""
    one = strict(lr=1e-1)
    world.rounds(tmp_path / "first", world.job(lr=1e-1), [world.draw_pairs(tmp_path / "drawn", one)])
    policy = policies.open_policy(tmp_path / "first" / "policy-0")
    net = registry.make("family", one.model.family).transformer(one.model.path, torch.float32, CPU)
    found = policies.tensors(policy)
    with torch.no_grad():
        for target in policy.targets:
            a, b = (found[f"{target}.lora_{side}.weight"] for side in "AB")
            net.get_parameter(f"{target}.weight").add_(b @ a, alpha=scale)
    pairs = world.draw_pairs(tmp_path / "pairs", one, transformer=net)
    state = tmp_path / "first" / "state-0"
    with pytest.raises(DriftExceeded) as caught:
        world.train(one, pairs, policy.path, state, tmp_path / "p", tmp_path / "s")
    assert str(caught.value).partition("Likely cause: ")[2].startswith(words)


def test_a_difference_that_nothing_explains_is_put_down_to_its_shape(tmp_path: Path) -> None:
    one = strict()
    pairs = world.draw_pairs(tmp_path / "pairs", one, off_by=0.05)
    assert diagnosis(one, tmp_path, pairs).startswith("most rows are off")
