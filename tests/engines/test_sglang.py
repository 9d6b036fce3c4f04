"""The real SGLang server on a CPU: it draws what mdiff's own sampler draws, training repeats it, and weights arrive to the bit."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mdiff_core import config, jobs, policies, seeds, tables
from mdiff_core import prompts as prompt_files
from mdiff_core.engines.sglang.answers import decode, frames_of
from mdiff_core.engines.sglang.engine import ROLLOUT, SGLangEngine
from mdiff_core.engines.sglang.options import SGLangOptions, command_line, environment
from mdiff_core.engines.sglang.requests import sampling_body
from mdiff_core.engines.sglang.server import Server
from mdiff_core.engines.sglang.texts import Texts
from mdiff_core.engines.sglang.weights import FromFiles, FromTensors, Sync, Update, deliver_folder, digest
from mdiff_core.errors import EngineFailed
from mdiff_core.fleet import inside
from mdiff_core.fleet.actor import make_kernel
from mdiff_core.policies import Adapter
from mdiff_core.sampler import Sampler
from mdiff_core.settings import RunConfig
from mdiff_core.stages import pair, rollout, score, update
from mdiff_core.train.state import empty_state
from mdiff_core.types import Conditioning, PolicyVersion, Prompt, Request, SamplingPlan
from tests.policies_made import FAMILY, base_policy, lora_policy

pytestmark = pytest.mark.sglang
CPU = torch.device("cpu")
STEPS = 5
ALL = tuple(range(STEPS))
NEGATIVE = "a blue star"


@pytest.fixture(scope="module")
def base(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    return base_policy(tmp_path_factory.mktemp("base"), tiny_sd3)


@pytest.fixture(scope="module")
def lora(tiny_sd3: Path, base: PolicyVersion, tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    """With a scale of 1.5, which is not the rounding-free power of two."""
    return lora_policy(tmp_path_factory.mktemp("lora"), tiny_sd3, base, alpha=6.0)


@pytest.fixture(scope="module")
def transformer(tiny_sd3: Path) -> nn.Module:
    return FAMILY.transformer(str(tiny_sd3), torch.float32, CPU)


def request(
    sde_steps: tuple[int, ...], guidance: float = 1.0, kernel: str = "flow_sde", samples: int = 1, text: str = "two green squares",
) -> Request:  # fmt: skip
    plan = SamplingPlan(
        width=64, height=64, frames=1, steps=STEPS, guidance=guidance, negative=NEGATIVE, kernel=kernel,
        kernel_options={}, sde_steps=sde_steps,
    )  # fmt: skip
    drawn = tuple(seeds.derive("parity", index) for index in range(samples))
    prompt = Prompt(id="p", text=text, metadata={})
    return Request(prompt=prompt, group="g", indices=tuple(range(samples)), seeds=drawn, plan=plan)


@pytest.mark.parametrize("asked", [
    request(ALL), request((1, 2), 4.5), request((0, 1, 2, 3), 4.5, "cps"), request((), kernel="ode"),
    request((1, 2), 4.5, text=NEGATIVE),
], ids=["all", "guidance", "cps", "ode", "the negative text as prompt"])  # fmt: skip
def test_it_draws_what_mdiff_s_sampler_draws_from_the_same_noise(
    sglang_engine: SGLangEngine, tiny_sd3: Path, base: PolicyVersion, lora: PolicyVersion, transformer: nn.Module,
    asked: Request,
) -> None:  # fmt: skip
    """A seed's generator gives the first latent, then each stochastic step's noise; what rounding adds up to is below 1e-4."""
    plan = asked.plan
    codec = FAMILY.decoder(str(tiny_sd3), torch.float32, CPU)
    shape = codec.latent_shape(width=64, height=64, frames=1)
    generator = torch.Generator().manual_seed(asked.seeds[0])
    noise = torch.stack([torch.randn(1, *shape, generator=generator) for _ in range(1 + len(plan.sde_steps))])
    sampler = Sampler(
        family=FAMILY, transformer=transformer, kernel=make_kernel(plan.kernel, {}), ode=make_kernel("ode", {})
    )
    for policy in (base, lora):
        sglang_engine.load(policy)
        policies.apply_to(transformer, policy)
        ((theirs, conditions),) = sglang_engine.generate([asked])
        texts = {key: {name: value[None] for name, value in one.items()} for key, one in conditions.items()}
        negative = texts.get(theirs.negative, {})
        conditioning = Conditioning(positive=texts[theirs.condition], negative=negative, guidance=plan.guidance)
        ours = sampler.draw(theirs.sigmas, plan.sde_steps, conditioning, noise)
        assert torch.allclose(ours.clean[0], theirs.clean, atol=1e-4)
        assert torch.allclose(ours.latents[0], theirs.latents, atol=1e-4)
        assert torch.allclose(ours.log_probs[0], theirs.log_probs, atol=1e-5)
        apart = np.abs(codec.decode(ours.clean)[0].astype(int) - theirs.frames.astype(int))
        assert apart.max() <= 1


def test_evaluation_gives_the_pictures_of_rollout_false(sglang_engine: SGLangEngine, base: PolicyVersion) -> None:
    """To the bit: asked for as a rollout of the ode, because only that tells latents and sigmas."""
    sglang_engine.load(base)
    asked = request((), samples=2)
    assert sglang_engine._server is not None
    body = sampling_body(asked, FAMILY.serving(), 0.0, (), "cpu") | {"rollout": False}
    plain = decode(sglang_engine._server.post(ROLLOUT, body, 60.0))
    for entry, (trajectory, _) in zip(plain, sglang_engine.generate([asked]), strict=True):
        assert entry["dit_trajectory"] is None
        assert np.array_equal(frames_of(entry["generated_output"]), trajectory.frames)


def test_texts_are_embedded_as_the_diffusers_engine_does(
    sglang_engine: SGLangEngine, tiny_sd3: Path, base: PolicyVersion
) -> None:
    """One sample or several, of which the first brings them; with guidance the negative text's too, cut at another length."""
    (ours,) = FAMILY.encoder(str(tiny_sd3), torch.float32, CPU)(["two green squares"])
    for samples, guidance in ((1, 1.0), (3, 1.0), (3, 4.5)):
        sglang_engine._texts = Texts()
        sglang_engine.load(base)
        (trajectory, conditions), *others = sglang_engine.generate([request((1,), guidance, samples=samples)])
        assert not any(fresh for _, fresh in others)
        assert conditions.keys() == {trajectory.condition, trajectory.negative} - {""}
        theirs = conditions[trajectory.condition]
        assert theirs.keys() == ours.keys()
        assert all(torch.allclose(theirs[name], ours[name], atol=1e-5) for name in ours)


def test_an_answer_has_its_text_s_conditions_once_and_only_when_asked(sglang_engine: SGLangEngine) -> None:
    assert sglang_engine._server is not None
    for asked in (True, False):
        body = sampling_body(request((1,), 4.5, samples=3), FAMILY.serving(), 0.7, (1, 2), "cpu", conditions=asked)
        entries = decode(sglang_engine._server.post(ROLLOUT, body, 60.0))
        assert [entry["denoising_env"] is not None for entry in entries] == [asked, False, False]


def held(transformer: nn.Module, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a server that once had a LoRA holds: each linear layer wrapped, the adapter's matrices in it."""
    wrapped = {name for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)}

    def name_of(name: str) -> str:
        layer, _, part = name.rpartition(".")
        return f"{layer}.base_layer.{part}" if layer in wrapped else name

    weights = {name_of(name): value for name, value in transformer.state_dict().items()}
    return weights | {name.removesuffix(".weight"): value for name, value in found.items()}


def checksum(weights: Mapping[str, Tensor]) -> str:
    """As SGLang makes it, of names and bytes."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(name.encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def asked_checksum(server: Server) -> str:
    return str(json.loads(server.post("/get_weights_checksum", {"module_names": ["transformer"]}, 60.0))["transformer"])


def update_of(policy: PolicyVersion) -> Update:
    adapter = policies.adapter_of(policy) if policy.kind == "lora" else None
    return Update(name=policy.checksum[:24], tensors=policies.tensors(policy), adapter=adapter, file=None)


@pytest.mark.parametrize("way", [FromFiles, FromTensors])
def test_a_lora_arrives_to_the_bit_and_goes_without_a_trace(
    sglang_engine: SGLangEngine, base: PolicyVersion, lora: PolicyVersion, transformer: nn.Module, way: type[Sync]
) -> None:
    sglang_engine.load(lora)  # so that the layers are wrapped, whichever test came first
    sglang_engine.load(base)
    server = sglang_engine._server
    assert server is not None
    sync: Sync = FromFiles(server) if way is FromFiles else FromTensors(server, CPU)
    sync.deliver(update_of(lora))
    policies.apply_to(transformer, lora)
    assert asked_checksum(server) == checksum(held(transformer, policies.tensors(lora)))
    (merged, _), *_ = sglang_engine.generate([request((1, 2))])
    sync.withdraw()
    (plain, _), *_ = sglang_engine.generate([request((1, 2))])
    sglang_engine.load(base)
    (again, _), *_ = sglang_engine.generate([request((1, 2))])
    assert torch.equal(plain.clean, again.clean) and not torch.equal(plain.clean, merged.clean)


@pytest.mark.parametrize("way", [FromFiles, FromTensors])
def test_a_lora_that_matches_fewer_layers_than_it_says_is_an_error(
    sglang_engine: SGLangEngine, lora: PolicyVersion, way: type[Sync]
) -> None:
    server = sglang_engine._server
    assert server is not None
    update = update_of(lora)
    odd = {
        name.replace("blocks.0.attn.to_q", "blocks.0.attn.to_nothing"): value for name, value in update.tensors.items()
    }
    sync: Sync = FromFiles(server) if way is FromFiles else FromTensors(server, CPU)
    with pytest.raises(EngineFailed, match=r"not all \d+ tensors .*to_nothing"):
        sync.deliver(replace(update, name="odd", tensors=odd))
    sglang_engine.load(lora)  # takes the place of what did arrive


@pytest.fixture(scope="module")
def merged_server(
    tiny_sd3: Path, lora: PolicyVersion, transformer: nn.Module, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Started on a model whose transformer already has the LoRA merged in."""
    folder = tmp_path_factory.mktemp("merged") / "model"
    shutil.copytree(tiny_sd3, folder)
    policies.apply_to(transformer, lora)
    weights = {name: value.contiguous() for name, value in transformer.state_dict().items()}
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    options = SGLangOptions()
    line = command_line(options, FAMILY.serving(), str(folder), torch.float32, False)
    server = Server(line, environment(options, str(folder), False), 300.0)
    yield server
    server.close()


def test_a_server_has_the_same_weights_whether_started_on_them_or_given_them(
    merged_server: Server, sglang_engine: SGLangEngine, tiny_sd3: Path, lora: PolicyVersion, transformer: nn.Module
) -> None:
    policies.apply_to(transformer, lora)
    merged = {name: value.clone() for name, value in transformer.state_dict().items()}
    started = asked_checksum(merged_server)
    assert started == checksum(merged)
    sglang_engine.load(lora)
    wrapped = held(transformer, {})
    body = {"target_module": "transformer", "expected_named_tensors_sha256": {n: digest(v) for n, v in wrapped.items()}}
    assert sglang_engine._server is not None
    assert b'"success":true' in sglang_engine._server.post("/update_weights_from_tensor_checker", body, 60.0)
    for way in (FromFiles(merged_server), FromTensors(merged_server, CPU)):
        other = {name: value * 2 for name, value in merged.items()}
        way.deliver(Update(name="other", tensors=other, adapter=None, file=None))
        assert asked_checksum(merged_server) == checksum(other) != started
        way.deliver(Update(name="merged", tensors=merged, adapter=None, file=None))
        assert asked_checksum(merged_server) == started
    deliver_folder(merged_server, str(tiny_sd3))
    FromTensors(merged_server, CPU).deliver(update_of(lora))  # full weights that were taken back stand in no LoRA's way
    assert asked_checksum(merged_server) == checksum(held(transformer, policies.tensors(lora)))


def settings(model: Path, guidance: float) -> RunConfig:
    return config.load("shapes_flow_grpo", [
        f"model.path={model}", "rollout.engine.name=sglang", "rollout.engines=0", "rollout.group_size=4", "rollout.batch=8",
        "prompts.per_round=2",
        f"sampling.guidance={guidance}", "sampling.steps=5", 'score.rewards=[{"name": "jpeg_compressibility"}]', "score.filters=[]",
        "train.lora.rank=4", "train.lr=1e-2", "train.drift_limit=1e-5",
    ])  # fmt: skip


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_trainer_repeats_its_log_probs_before_and_after_a_sync(
    sglang_engine: SGLangEngine, tiny_sd3: Path, base: PolicyVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guidance: float,
) -> None:  # fmt: skip
    """Two rounds through the stages; the drift gate is at 1e-5, which is rounding in float32."""
    run = settings(tiny_sd3, guidance)
    monkeypatch.setattr(inside, "make_engine", lambda *settings: sglang_engine)
    monkeypatch.setattr(sglang_engine, "close", lambda: None)  # others use it too
    prompt_files.write(tmp_path / "train.jsonl", prompt_files.read(run.prompts.train))
    empty_state(tmp_path / "state0")
    policy = base.path
    for index in range(2):
        drawn, scores, rows = (tmp_path / f"{name}{index}" for name in ("drawn", "scores", "rows"))
        rollout.run(jobs.rollout_job(run, index), tmp_path, policy, drawn)
        score.run(jobs.score_job(run), drawn, scores)
        pair.run(jobs.pair_job(run, index, "transitions"), drawn, scores, rows)
        made, state = tmp_path / f"policy{index}", tmp_path / f"state{index + 1}"
        metrics = update.run(jobs.update_job(run, index), rows, policy, tmp_path / f"state{index}", made, state)
        assert metrics["drift_max"] < 1e-5 and metrics["rows"] == 8 * len(
            next(iter(tables.read_trajectories(drawn))).sde_steps
        )
        policy = made
    assert policies.open_policy(policy).kind == "lora"


def test_the_same_tensors_at_another_scale_are_another_policy(
    sglang_engine: SGLangEngine, base: PolicyVersion, transformer: nn.Module, tiny_sd3: Path, tmp_path: Path
) -> None:
    """6.5 is no whole number, to which the server would cut alpha."""
    assert sglang_engine._server is not None
    for alpha in (4.0, 6.5, 6.0):
        policy = lora_policy(tmp_path / str(alpha), tiny_sd3, base, alpha=alpha)
        assert policies.adapter_of(policy) == Adapter(rank=4, alpha=alpha)
        sglang_engine.load(policy)
        policies.apply_to(transformer, policy)
        assert asked_checksum(sglang_engine._server) == checksum(held(transformer, policies.tensors(policy)))
