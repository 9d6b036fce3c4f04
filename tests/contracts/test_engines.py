"""What every registered engine must do, on the tiny SD3; one that needs more to start says how in `STARTED`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdiff_core import policies, registry, seeds
from mdiff_core.contracts import Engine
from mdiff_core.fleet.actor import make_engine, make_kernel
from mdiff_core.generation import Inspector
from mdiff_core.guidance import guided_velocity
from mdiff_core.options import Choice, Options
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Condition, Conditioning, PolicyVersion, Prompt, Request, SamplingPlan, Trajectory
from tests.policies_made import FAMILY, base_policy, lora_policy


def in_process(name: str, model: Path) -> Engine:
    settings = Model(path=str(model), family=Choice(name="sd3", options={"max_sequence_length": 16}), dtype="float32")
    return make_engine(Rollout(group_size=1, engine=Choice(name=name)), settings)


STARTED: dict[str, Callable[[str, Path], Engine]] = {"diffusers": in_process}
SHARED = {"sglang": "sglang_engine"}
"""Fixtures of engines that take long to start, and so are everybody's."""
MARKS = {"sglang": pytest.mark.sglang}
NAMES = [pytest.param(name, marks=MARKS.get(name, ())) for name in sorted(registry.REGISTRY["engine"])]


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest, tiny_sd3: Path) -> Iterator[Engine]:
    if request.param in SHARED:
        yield request.getfixturevalue(SHARED[request.param])
        return
    assert request.param in STARTED, f"say in STARTED how engine '{request.param}' is started on a CPU"
    made = STARTED[request.param](request.param, tiny_sd3)
    yield made
    made.close()
    made.close()


@pytest.fixture(scope="module")
def base(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    return base_policy(tmp_path_factory.mktemp("base"), tiny_sd3)


@pytest.fixture(scope="module")
def lora(tiny_sd3: Path, base: PolicyVersion, tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    return lora_policy(tmp_path_factory.mktemp("lora"), tiny_sd3, base)


def requests(guidance: float = 4.5, sde_steps: tuple[int, ...] = (1, 2)) -> list[Request]:
    plan = SamplingPlan(
        width=64, height=64, frames=1, steps=5, guidance=guidance, negative="", kernel="flow_sde", kernel_options={"eta": 0.7},
        sde_steps=sde_steps,
    )  # fmt: skip
    return [
        Request(
            prompt=Prompt(id=text, text=text, metadata={}), group=f"g-{text}", indices=(0, 1),
            seeds=tuple(seeds.derive(text, index) for index in (0, 1)), plan=plan,
        )
        for text in ("a red circle", "two blue squares")
    ]  # fmt: skip


def generated(engine: Engine, asked: list[Request]) -> tuple[list[Trajectory], dict[str, Condition]]:
    conditions: dict[str, Condition] = {}
    found = []
    for trajectory, fresh in engine.generate(asked):
        conditions.update(fresh)
        found.append(trajectory)
    return found, conditions


def test_it_is_an_engine_with_options(engine: Any) -> None:
    assert isinstance(engine, Engine) and issubclass(engine.Options, Options)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("sde_steps", [(), (1, 2), (0, 1, 2, 3, 4)], ids=str)
def test_it_returns_what_was_asked_for(
    engine: Engine, base: PolicyVersion, tiny_sd3: Path, guidance: float, sde_steps: tuple[int, ...]
) -> None:
    assert engine.load(base) == base.checksum
    asked = requests(guidance, sde_steps)
    inspector = Inspector(asked, FAMILY.sigmas(str(tiny_sd3), steps=5, width=64, height=64), base)
    found, conditions = generated(engine, asked)
    for key in conditions:
        inspector.add_condition(key)
    for trajectory in found:
        inspector.check(trajectory)
    inspector.finish()


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_its_log_probs_are_the_trainers(
    engine: Engine, base: PolicyVersion, lora: PolicyVersion, tiny_sd3: Path, guidance: float
) -> None:
    transformer = FAMILY.transformer(str(tiny_sd3), torch.float32, torch.device("cpu"))
    for policy in (base, lora):
        engine.load(policy)
        policies.apply_to(transformer, policy)
        found, conditions = generated(engine, requests(guidance))
        assert max(drift(transformer, trajectory, conditions) for trajectory in found) < 1e-5


def drift(transformer: torch.nn.Module, trajectory: Trajectory, conditions: dict[str, Condition]) -> float:
    """Largest difference of a recorded log-prob from the trainer's, all trained steps as one batch."""
    steps = list(trajectory.sde_steps)
    at = [trajectory.latent_steps.index(step) for step in steps]
    x, x_next = trajectory.latents[at], trajectory.latents[[m + 1 for m in at]]
    sigma, sigma_next = trajectory.sigmas[steps], trajectory.sigmas[[step + 1 for step in steps]]

    def rows(key: str) -> Condition:
        return {name: value.expand(len(steps), *value.shape) for name, value in conditions[key].items()} if key else {}

    conditioning = Conditioning(
        positive=rows(trajectory.condition), negative=rows(trajectory.negative), guidance=trajectory.guidance
    )
    with torch.no_grad():
        v = guided_velocity(FAMILY, transformer, x, sigma, conditioning)
    kernel = make_kernel("flow_sde", {"eta": 0.7})
    moments = kernel.moments(x, v, sigma, sigma_next, trajectory.sigmas[1].expand(len(steps)))
    return float((kernel.log_prob(x_next, moments) - trajectory.log_probs).abs().max())


def test_the_same_request_is_answered_the_same(engine: Engine, base: PolicyVersion, lora: PolicyVersion) -> None:
    engine.load(base)
    first, _ = generated(engine, requests())
    engine.load(lora)
    other, _ = generated(engine, requests())
    engine.load(base)
    again, _ = generated(engine, requests())
    for a, b, c in zip(first, again, other, strict=True):
        assert (
            torch.equal(a.clean, b.clean)
            and torch.equal(a.log_probs, b.log_probs)
            and np.array_equal(a.frames, b.frames)
        )
        assert not torch.equal(a.clean, c.clean)


def test_conditions_are_sent_again_after_a_load_and_not_before(engine: Engine, base: PolicyVersion) -> None:
    engine.load(base)
    assert len(generated(engine, requests(4.5))[1]) == 3
    assert len(generated(engine, requests(4.5))[1]) == 0
    engine.load(base)
    assert len(generated(engine, requests(4.5))[1]) == 3
