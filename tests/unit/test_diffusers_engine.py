"""The in-process engine: what it draws, what it records, and that training can repeat it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mdiff_core import policies, seeds
from mdiff_core.compilation import DEVICE, on_device
from mdiff_core.engines.diffusers import DiffusersEngine, DiffusersOptions
from mdiff_core.errors import BadSetting, EngineFailed
from mdiff_core.fleet.actor import make_kernel
from mdiff_core.guidance import guided_velocity
from mdiff_core.sampler import condition_key, draw_noise, latent_steps
from mdiff_core.types import Condition, Conditioning, PolicyVersion, Prompt, Request, SamplingPlan, Trajectory
from tests.policies_made import FAMILY, base_policy, lora_policy

CPU = torch.device("cpu")


def plan(
    guidance: float = 1.0, sde_steps: tuple[int, ...] = (1, 2), steps: int = 4, kernel: str = "flow_sde"
) -> SamplingPlan:
    return SamplingPlan(
        width=64, height=64, frames=1, steps=steps, guidance=guidance, negative="a blue star", kernel=kernel,
        kernel_options={}, sde_steps=sde_steps,
    )  # fmt: skip


def request(number: int, samples: int, how: SamplingPlan) -> Request:
    return Request(
        prompt=Prompt(id=f"p{number}", text=f"{('one', 'two', 'three')[number]} red circles", metadata={}), group=f"g{number}",
        indices=tuple(range(samples)), seeds=tuple(seeds.derive(number, index) for index in range(samples)), plan=how,
    )  # fmt: skip


def engine_of(model: Path, **options: Any) -> DiffusersEngine:
    return DiffusersEngine(
        DiffusersOptions(**options),
        family=FAMILY,
        model=str(model),
        dtype=torch.float32,
        device=CPU,
        kernels=make_kernel,
    )


@pytest.fixture(scope="module")
def engine(tiny_sd3: Path) -> DiffusersEngine:
    return engine_of(tiny_sd3)


@pytest.fixture(scope="module")
def base(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    return base_policy(tmp_path_factory.mktemp("base"), tiny_sd3)


@pytest.fixture(scope="module")
def lora(tiny_sd3: Path, base: PolicyVersion, tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    return lora_policy(tmp_path_factory.mktemp("lora"), tiny_sd3, base, ema=True)


def generated(engine: DiffusersEngine, requests: Sequence[Request]) -> tuple[list[Trajectory], dict[str, Condition]]:
    conditions: dict[str, Condition] = {}
    found = []
    for trajectory, fresh in engine.generate(requests):
        assert not set(fresh) & set(conditions)
        conditions.update(fresh)
        found.append(trajectory)
    return found, conditions


def recomputed(
    transformer: nn.Module, trajectory: Trajectory, cell: int, conditions: Mapping[str, Condition], how: SamplingPlan
) -> torch.Tensor:
    """Log-prob of a recorded cell as a trainer sees it: alone in its batch, from the tables' columns."""

    def row(key: str) -> Condition:
        return {name: value[None] for name, value in conditions[key].items()} if key else {}

    step = trajectory.sde_steps[cell]
    at = trajectory.latent_steps.index(step)
    x, x_next = trajectory.latents[at][None], trajectory.latents[at + 1][None]
    sigma, sigma_next, ceiling = (trajectory.sigmas[[k]] for k in (step, step + 1, 1))
    conditioning = Conditioning(
        positive=row(trajectory.condition), negative=row(trajectory.negative), guidance=trajectory.guidance
    )
    kernel = make_kernel(how.kernel, how.kernel_options)
    with torch.no_grad():
        v = guided_velocity(FAMILY, transformer, x, sigma, conditioning)
    return kernel.log_prob(x_next, kernel.moments(x, v, sigma, sigma_next, ceiling))[0]


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("kind", ["base", "lora"])
def test_training_repeats_every_recorded_step(
    engine: DiffusersEngine, tiny_sd3: Path, base: PolicyVersion, lora: PolicyVersion, kind: str, guidance: float
) -> None:
    policy, how = {"base": base, "lora": lora}[kind], plan(guidance, sde_steps=(0, 1, 2, 3, 4), steps=5)
    assert engine.load(policy) == policies.checksum_of(policy)
    found, conditions = generated(engine, [request(0, 3, how), request(1, 2, how)])
    transformer = FAMILY.transformer(str(tiny_sd3), torch.float32, CPU)
    policies.apply_to(transformer, policy)
    drift = [
        abs(float(recomputed(transformer, trajectory, cell, conditions, how) - trajectory.log_probs[cell]))
        for trajectory in found
        for cell in range(5)
    ]
    assert len(drift) == 25
    assert max(drift) < 1e-5  # the same code in float32; only the batch size differs


def test_policies_differ_and_come_back(engine: DiffusersEngine, base: PolicyVersion, lora: PolicyVersion) -> None:
    def latents(policy: PolicyVersion, weights: policies.Weights = "live") -> torch.Tensor:
        engine.load(policy, weights)
        return generated(engine, [request(0, 1, plan())])[0][0].clean

    first, second, averaged = latents(base), latents(lora), latents(lora, "ema")
    assert not torch.allclose(first, second, atol=1e-2) and not torch.allclose(second, averaged, atol=1e-2)
    assert torch.equal(latents(base), first)
    assert torch.equal(latents(lora), second)


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(engine: DiffusersEngine, base: PolicyVersion) -> None:
    engine.load(base)
    together, _ = generated(engine, [request(0, 3, plan(2.0)), request(1, 2, plan(2.0))])
    alone, _ = generated(engine, [request(1, 2, plan(2.0))])
    for a, b in zip(together[3:], alone, strict=True):
        assert a.sample == b.sample
        # matrix products are blocked differently for another batch size, and five steps amplify it
        torch.testing.assert_close(a.latents, b.latents, rtol=1e-3, atol=1e-4)
        assert np.abs(a.frames.astype(int) - b.frames.astype(int)).max() <= 1
    again, _ = generated(engine, [request(0, 3, plan(2.0)), request(1, 2, plan(2.0))])
    assert all(
        torch.equal(a.clean, b.clean) and torch.equal(a.log_probs, b.log_probs)
        for a, b in zip(together, again, strict=True)
    )


def test_two_batches_at_once_are_the_same_bits_as_one_after_the_other(
    engine: DiffusersEngine, base: PolicyVersion
) -> None:
    batches = [[request(0, 2, plan(2.0))], [request(1, 2, plan(2.0))]]
    engine.load(base)
    apart = [generated(engine, batch) for batch in batches]
    engine.load(base)
    with ThreadPoolExecutor(engine.batches_at_once) as pool:
        together = list(pool.map(lambda batch: generated(engine, batch), batches))
    for (alone, _), (beside, _) in zip(apart, together, strict=True):
        assert all(torch.equal(a.clean, b.clean) for a, b in zip(alone, beside, strict=True))
    negative = condition_key("a blue star")
    assert sum(negative in fresh for _, fresh in together) == 1  # handed out once, by whoever came first


def test_the_order_of_batches_decides_no_bit(tiny_sd3: Path, base: PolicyVersion) -> None:
    """Batches that share texts, at engines that met them in other orders: a text is the same whatever was encoded beside it."""
    batches = [
        [request(0, 2, plan(2.0)), request(1, 1, plan(2.0))],
        [request(1, 1, plan(2.0)), request(2, 2, plan(2.0))],
    ]
    found = []
    for order in ((0, 1), (1, 0)):
        one = engine_of(tiny_sd3)
        one.load(base)
        drawn = {number: generated(one, batches[number]) for number in order}
        found.append(({t.sample: t for t in drawn[0][0]}, drawn[0][1] | drawn[1][1]))
    (first, texts), (second, others) = found
    assert all(torch.equal(first[name].latents, second[name].latents) for name in first)
    assert texts.keys() == others.keys()
    assert all(torch.equal(texts[key][name], others[key][name]) for key in texts for name in texts[key])


def test_noise_of_a_row_is_its_seeds_alone() -> None:
    both, one = draw_noise([7, 8], (1, 3), (2, 4)), draw_noise([8], (3,), (2, 4))
    assert both.shape == (3, 2, 2, 4)
    assert torch.equal(both[0, 1], one[0, 0]) and torch.equal(both[2, 1], one[1, 0])
    assert len({row.sum().item() for row in both.flatten(0, 1)}) == 6


def test_records_say_what_was_asked_and_own_their_memory(engine: DiffusersEngine, base: PolicyVersion) -> None:
    engine.load(base)
    how = plan(4.5)
    found, conditions = generated(engine, [request(0, 2, how), request(1, 1, how)])
    sigmas = FAMILY.sigmas(engine._model, steps=4, width=64, height=64)
    assert [t.sample for t in found] == ["g0/0", "g0/1", "g1/0"]
    for trajectory in found:
        assert trajectory.policy == base.version and trajectory.weights == base.checksum
        assert trajectory.sigmas.dtype is torch.float32 and torch.equal(trajectory.sigmas, sigmas)
        assert trajectory.sde_steps == (1, 2) and trajectory.latent_steps == (1, 2, 3)
        assert trajectory.latents.shape == (3, 16, 8, 8) and trajectory.log_probs.shape == (2,)
        assert trajectory.frames.shape == (1, 64, 64, 3) and trajectory.frames.dtype == np.uint8
        assert trajectory.condition == condition_key(trajectory.prompt.text)
        assert trajectory.negative == condition_key("a blue star")
        for tensor in (trajectory.latents, trajectory.log_probs, trajectory.clean):
            assert tensor.dtype is torch.float32 and tensor.untyped_storage().nbytes() == tensor.nbytes
    assert set(conditions) == {t.condition for t in found} | {condition_key("a blue star")}


def test_the_last_recorded_latent_is_the_final_one(engine: DiffusersEngine, base: PolicyVersion) -> None:
    engine.load(base)
    found, _ = generated(engine, [request(0, 1, plan(sde_steps=(3,)))])
    assert found[0].latent_steps == (3, 4)
    assert torch.equal(found[0].latents[-1], found[0].clean)


def test_without_trained_steps_nothing_is_recorded(engine: DiffusersEngine, base: PolicyVersion) -> None:
    engine.load(base)
    found, _ = generated(engine, [request(0, 2, plan(sde_steps=(), kernel="ode"))])
    assert found[0].latents.shape == (0, 16, 8, 8) and found[0].log_probs.shape == (0,)
    assert found[0].negative == ""


def test_latent_steps() -> None:
    assert latent_steps((0, 1, 5)) == (0, 1, 2, 5, 6)
    assert latent_steps(()) == ()


def test_a_text_is_encoded_once_and_sent_once_per_policy(
    engine: DiffusersEngine, base: PolicyVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encoder = engine._encoder

    def counting(texts: Sequence[str]) -> list[Condition]:
        seen.extend(texts)
        return encoder(texts)

    monkeypatch.setattr(engine, "_encoder", counting)
    engine._texts.clear()
    engine.load(base)
    assert len(generated(engine, [request(0, 2, plan(3.0)), request(1, 1, plan(3.0))])[1]) == 3
    assert len(generated(engine, [request(0, 1, plan(3.0)), request(2, 1, plan(3.0))])[1]) == 1
    assert len(seen) == len(set(seen)) == 4
    engine.load(base)  # a new round writes a new table
    assert len(generated(engine, [request(0, 2, plan(3.0))])[1]) == 2
    assert len(seen) == 4


def test_frames_do_not_depend_on_how_many_are_decoded_at_once(
    engine: DiffusersEngine, tiny_sd3: Path, base: PolicyVersion
) -> None:
    engine.load(base)
    one = engine_of(tiny_sd3, vae_batch=1)
    one.load(base)
    pairs = zip(generated(engine, [request(0, 3, plan())])[0], generated(one, [request(0, 3, plan())])[0], strict=True)
    assert all(np.abs(a.frames.astype(int) - b.frames.astype(int)).max() <= 1 for a, b in pairs)


def test_compile_reaches_every_block_and_keeps_their_names(tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled.append(self))
    engine = engine_of(tiny_sd3, compile=True)
    assert engine._transformer is not None and compiled == list(FAMILY.blocks(engine._transformer))
    compiled.clear()
    assert compiled == list(engine_of(tiny_sd3, compile_vae=True)._vae.networks())


def test_threads_are_set(tiny_sd3: Path) -> None:
    before = torch.get_num_threads()
    try:
        engine_of(tiny_sd3, threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_wrong_use_is_refused(tiny_sd3: Path, base: PolicyVersion) -> None:
    engine = engine_of(tiny_sd3)
    with pytest.raises(EngineFailed, match="without a policy"):
        generated(engine, [request(0, 1, plan())])
    engine.load(base)
    with pytest.raises(BadSetting, match="different sampling plans"):
        generated(engine, [request(0, 1, plan()), request(1, 1, plan(2.0))])
    engine.close()
    engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        engine.load(base)


def test_the_number_of_threads_is_the_engine_s_whoever_drew_before(tiny_sd3: Path, base: PolicyVersion) -> None:
    """Sums have other last bits with another number, and the device's thread is one for all engines of a process."""
    before = torch.get_num_threads()
    engine = engine_of(tiny_sd3, threads=1)
    torch.set_num_threads(before)
    on_device(2, torch.get_num_threads)
    engine.load(base)
    assert DEVICE.submit(torch.get_num_threads).result() == 1
    on_device(2, torch.get_num_threads)
    generated(engine, [request(0, 1, plan())])
    assert DEVICE.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == before
