"""The policies a loss is given are the ones it means: the live one trains, the others are what they were."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdiff_core import policies, registry
from mdiff_core.errors import BadSetting
from mdiff_core.guidance import guided_velocity
from mdiff_core.options import Choice
from mdiff_core.policy import TrainedPolicies
from mdiff_core.train import rows, shard
from mdiff_core.train.model import TrainedModel, build
from mdiff_core.types import Transitions
from tests import train_world as world

CPU = torch.device("cpu")
FAMILY = registry.make("family", Choice(name=world.FAMILY))
KERNEL = registry.make("kernel", Choice(name="flow_sde", options={"eta": 0.7}))
ALL = frozenset({"reference", "start", "old", "ema"})


@pytest.fixture
def mesh() -> Iterator[Any]:
    with shard.all_ranks(CPU) as found:
        yield found


@pytest.fixture
def transitions(tmp_path: Path) -> Transitions:
    one = world.job()
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(5,))
    conditions = rows.Conditions(pairs, CPU, exact=True)
    reader = rows.Reader(conditions=conditions, device=CPU, size=8, rank=0, world=1)
    (batch,) = reader.microbatches(rows.plan(pairs, one, 0, registry.make("loss", one.loss))[0])
    assert isinstance(batch.rows, Transitions)
    return batch.rows


def trained(tmp_path: Path, mesh: Any, method: str) -> tuple[TrainedModel, TrainedPolicies]:
    """A model whose live weights have moved since its start."""
    one = world.job(method=method)
    policy, _ = world.start(tmp_path, one)
    model = build(one, FAMILY, policies.open_policy(policy), mesh, ALL)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.add_(0.05)
    views = {"live": model.live, "frozen": model.frozen}
    return model, TrainedPolicies(model.transformer, FAMILY, KERNEL, ALL, **views)


def base_velocity(transitions: Transitions) -> Tensor:
    net = FAMILY.transformer("tiny", torch.float32, CPU)
    with torch.no_grad():
        return guided_velocity(FAMILY, net, transitions.x, transitions.sigma, transitions.conditioning)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_others_are_the_base_and_only_the_live_one_has_gradient(
    tmp_path: Path, mesh: Any, transitions: Transitions, method: str
) -> None:
    model, three = trained(tmp_path, mesh, method)
    x, sigma, conditioning = transitions.x, transitions.sigma, transitions.conditioning
    velocities = {name: three.frozen(name).velocity(x, sigma, conditioning) for name in sorted(ALL)}
    velocities["live"] = three.live.velocity(x, sigma, conditioning)
    base = base_velocity(transitions)
    assert torch.equal(velocities["reference"], base)
    for name in ALL:  # a LoRA with B = 0 adds zeros
        torch.testing.assert_close(velocities[name], base, rtol=1e-6, atol=1e-6)
    assert (velocities["live"] - base).abs().max() > 1e-2
    assert [name for name, value in velocities.items() if value.requires_grad] == ["live"]
    velocities["live"].square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters.values())
    assert set(model.copies) == ALL - {"reference"}
    assert all(parameter.grad is None for copy in model.copies.values() for parameter in copy.values())


@pytest.mark.parametrize("method", ["lora", "full"])
def test_gradients_are_the_same_with_and_without_a_look_at_the_others_in_between(
    tmp_path: Path, mesh: Any, transitions: Transitions, method: str
) -> None:
    model, three = trained(tmp_path, mesh, method)

    def gradients(*, look: bool) -> list[Tensor]:
        model.transformer.zero_grad()
        if look:
            three.frozen("reference").transition(transitions)
        mean = three.live.transition(transitions).mean
        if look:
            for name in sorted(ALL):
                three.frozen(name).transition(transitions)
        mean.square().mean().backward()
        return [parameter.grad.full_tensor().clone() for parameter in model.parameters.values()]

    alone = gradients(look=False)
    for beside in (gradients(look=True), gradients(look=True)):
        assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


def test_log_probs_are_the_kernels_and_are_kept_for_the_drift(transitions: Transitions) -> None:
    net = FAMILY.transformer("tiny", torch.float32, CPU)
    live = TrainedPolicies(net, FAMILY, KERNEL, frozenset()).live
    moments = live.transition(transitions)
    found = live.log_prob(transitions.x_next, moments)
    assert torch.equal(found, KERNEL.log_prob(transitions.x_next, moments))
    torch.testing.assert_close(found, transitions.log_prob, rtol=0, atol=1e-5)  # drawn by the same kernel code
    assert live.density is not None and torch.equal(live.density.log_prob, found)
    live.log_prob(transitions.x, moments)
    assert torch.equal(live.density.log_prob, found)


def test_a_policy_that_was_not_declared_is_not_given_out() -> None:
    net = FAMILY.transformer("tiny", torch.float32, CPU)
    only_live = TrainedPolicies(net, FAMILY, KERNEL, frozenset(), frozen={"old": lambda: pytest.fail("used")})
    for name in ALL:
        with pytest.raises(BadSetting, match=rf"asked for policy '{name}', which its `needs` lack"):
            only_live.frozen(name)
    with pytest.raises(BadSetting, match="needs the reference policy, which this model does not offer"):
        TrainedPolicies(net, FAMILY, KERNEL, frozenset({"reference"}))
