"""The SGLang engine against a stand-in server that answers wrongly on purpose: nothing wrong gets through."""

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mdiff_core import seeds
from mdiff_core.engines.sglang import serve
from mdiff_core.engines.sglang import server as server_module
from mdiff_core.engines.sglang.engine import SGLangEngine
from mdiff_core.engines.sglang.guard import LOG
from mdiff_core.engines.sglang.once import KEPT, first_rows, remembered, with_first_sample
from mdiff_core.engines.sglang.options import SGLangOptions, command_line, environment
from mdiff_core.engines.sglang.processes import free_ports
from mdiff_core.engines.sglang.requests import noise_level
from mdiff_core.engines.sglang.serve import is_block
from mdiff_core.engines.sglang.texts import KEPT as TEXTS_KEPT
from mdiff_core.engines.sglang.texts import Texts, lacking, negative_key
from mdiff_core.engines.sglang.weights import BUCKET_BYTES, Update, alpha_and_strength, buckets
from mdiff_core.errors import BadSetting, EngineFailed
from mdiff_core.fleet.actor import make_kernel
from mdiff_core.policies import Adapter
from mdiff_core.sampler import condition_key
from mdiff_core.types import PolicyVersion, Prompt, Request, SamplingPlan
from tests.policies_made import FAMILY, base_policy

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
MODEL = str(ROOT / "assets" / "shapes_sd3")


def plan(guidance: float = 1.0, kernel: str = "flow_sde") -> SamplingPlan:
    return SamplingPlan(
        width=64, height=64, frames=1, steps=4, guidance=guidance, negative="", kernel=kernel, kernel_options={},
        sde_steps=(1, 2),
    )  # fmt: skip


def request(samples: int = 2, how: SamplingPlan | None = None) -> Request:
    return Request(
        prompt=Prompt(id="p", text="a red circle", metadata={}), group="g", indices=tuple(range(samples)),
        seeds=tuple(seeds.derive(index) for index in range(samples)), plan=how or plan(),
    )  # fmt: skip


@pytest.fixture
def deed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File whose word the fake obeys; logs that errors name stay beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(server_module, "SERVE", (sys.executable, str(ROOT / "tests" / "fake_sglang.py")))
    monkeypatch.setenv("FAKE_SGLANG_DEED", str(tmp_path / "deed"))
    return tmp_path / "deed"


Make = Callable[..., SGLangEngine]


@pytest.fixture
def make(deed: Path) -> Iterator[Make]:
    made: list[SGLangEngine] = []

    def engine(answer_seconds: float = 60.0, start_seconds: float = 60.0) -> SGLangEngine:
        options = SGLangOptions(answer_seconds=answer_seconds, start_seconds=start_seconds)
        parts = {"model": MODEL, "dtype": torch.float32, "device": CPU, "kernels": make_kernel}
        made.append(SGLangEngine(options, family=FAMILY, **parts))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@pytest.fixture
def base(tmp_path: Path) -> PolicyVersion:
    return base_policy(tmp_path / "base", Path(MODEL))


WRONG = {
    "swapped": "does not start from the noise of its seed",
    "cloned": "does not start from the noise of its seed",
    "one missing": "asked for 2 samples, the answer holds 1",
    "other seed": "the answer's seed is",
    "other sigmas": "drawn with sigmas .* the family's are",
    "nan latents": "latents hold numbers that are not finite",
    "nan log-probs": "rollout_log_probs hold numbers that are not finite",
    "no trajectory": "the answer has no latents",
    "truncated body": "broke off .*IncompleteRead",
    "garbage": "is not msgpack with safetensors",
    "http 500": "answered 500 .*out of memory",
    "die": "broke off|processes .* ended",
    "hang": r"did not answer within 5 s \(rollout.engine.options.answer_seconds\)",
}


def test_no_wrong_answer_gets_through_and_each_error_shows_the_log(make: Make, deed: Path, base: PolicyVersion) -> None:
    """One fake server per way of ending, one for all that leave it alive."""
    engine = make(answer_seconds=5.0)
    engine.load(base)
    assert len(list(engine.generate([request()]))) == 2
    for word, complaint in WRONG.items():
        deed.write_text(word)
        with pytest.raises(EngineFailed, match=complaint) as caught:
            list(engine.generate([request(), request()]))
        assert f"{LOG} ends with:\nthe fake is starting" in str(caught.value), word
        assert not deed.exists(), f"nobody asked the fake to do '{word}'"
        if word in ("truncated body", "http 500", "die"):  # the server was ended with it
            engine = make(answer_seconds=5.0)
            engine.load(base)


def test_a_request_that_the_server_calls_invalid_is_a_setting_to_change(
    make: Make, deed: Path, base: PolicyVersion
) -> None:
    engine = make()
    engine.load(base)
    deed.write_text("http 400")
    with pytest.raises(BadSetting, match=r"refused the request .*no such width"):
        list(engine.generate([request()]))


@pytest.mark.parametrize(("word", "seconds", "complaint"), [
    ("die at start", 60.0, "ended. Log .* ends with:\nthe fake is starting\ncannot load the model: no such file"),
    ("never healthy", 3.0, r"not healthy within 3 s \(rollout.engine.options.start_seconds\). Log .* ends with:\nthe fake"),
])  # fmt: skip
def test_a_server_that_does_not_come_up_is_an_error_within_the_deadline(
    make: Make, deed: Path, word: str, seconds: float, complaint: str
) -> None:
    deed.write_text(word)
    started = time.monotonic()
    with pytest.raises(EngineFailed, match=complaint):
        make(start_seconds=seconds)
    assert time.monotonic() - started < 30


def test_nothing_of_a_closed_engine_is_left(make: Make, base: PolicyVersion) -> None:
    engine = make()
    assert engine._server is not None
    folder, port, group = engine._server.folder, engine._server._port, engine._server.pid
    engine.close()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with pytest.raises(EngineFailed, match="it was closed"):
        engine.load(base)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_stopped_or_killed_server_leaves_nothing_either(make: Make, number: signal.Signals) -> None:
    engine = make()
    assert engine._server is not None
    group = engine._server.pid
    os.killpg(group, number)
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_ports_are_free_and_different() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8


def test_what_sglang_lacks_is_refused_before_anything_starts() -> None:
    options = SGLangOptions()
    SGLangEngine.check(options, family=FAMILY, kernel="cps", gpus=0.0)
    with pytest.raises(BadSetting, match="'dance_sde' is not one that SGLang draws; use one of flow_sde, cps, ode"):
        SGLangEngine.check(options, family=FAMILY, kernel="dance_sde", gpus=0.0)
    with pytest.raises(BadSetting, match=r"gpus_per_engine: 2, but .* ask for 4 GPUs"):
        SGLangEngine.check(SGLangOptions(ulysses=2, cfg_parallel=True), family=FAMILY, kernel="cps", gpus=2.0)
    SGLangEngine.check(options, family=FAMILY, kernel="cps", gpus=0.5)  # two engines may share a GPU
    with pytest.raises(BadSetting, match=r"gpus_per_engine: 0.5, but .* ask for 2 GPUs"):
        SGLangEngine.check(SGLangOptions(ulysses=2), family=FAMILY, kernel="cps", gpus=0.5)


def test_blocks_are_what_is_compiled_apart() -> None:
    names = ("transformer_blocks.0", "blocks.11", "transformer_blocks", "transformer_blocks.0.attn", "pos_embed.proj")
    assert [name for name in names if is_block(name, nn.Module())] == ["transformer_blocks.0", "blocks.11"]


def test_a_revision_of_the_hub_is_fetched_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, revision: f"/cache/{name}/{revision}")
    line = " ".join(command_line(SGLangOptions(), FAMILY.serving(), "someone/sd3@v2", torch.float32, False))
    assert "--model-path /cache/someone/sd3/v2 " in line


def test_options_reach_the_command_line() -> None:
    options = SGLangOptions(tensor_parallel=2, compile="blocks", attention="torch_sdpa", vae_dtype="bfloat16")
    line = " ".join(command_line(options, FAMILY.serving(), MODEL, torch.bfloat16, True))
    for part in (
        "--num-gpus 2", "--tp-size 2", "--sp-degree 1", "--enable-torch-compile true --regional-compile true",
        "--attention-backend torch_sdpa", "--dit-precision bf16", "--vae-precision bf16",
        "--text-encoder-precisions bf16 bf16 bf16", "--trust-remote-code false",
    ):  # fmt: skip
        assert part in line
    assert environment(options, MODEL, True)["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES"] == "0"
    assert environment(SGLangOptions(), MODEL, True)["TORCHDYNAMO_DISABLE"] == "1"


def test_the_vae_alone_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile does nothing to what is asked for with TORCHDYNAMO_DISABLE, so it is lifted for the VAE."""
    options = SGLangOptions(compile="vae")
    given = environment(options, MODEL, True)
    assert "--enable-torch-compile true --regional-compile false" in " ".join(
        command_line(options, FAMILY.serving(), MODEL, torch.bfloat16, True)
    )
    assert given["TORCHDYNAMO_DISABLE"] == "1" and given["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES"] == "0"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    seen: list[str | None] = []
    monkeypatch.setattr(
        serve, "compile_unless_disabled", lambda: seen.append(os.environ.get("TORCHDYNAMO_DISABLE")), raising=False
    )
    serve.compile_anyway()
    assert seen == [None] and os.environ["TORCHDYNAMO_DISABLE"] == "1"


def test_a_text_is_encoded_once_until_others_push_it_out() -> None:
    class Stage:
        def __init__(self) -> None:
            self.asked: list[tuple[Any, ...]] = []

        def encode(self, text: str | list[str], server_args: object, **options: Any) -> tuple[list[Any], ...]:
            self.asked.append((text, options))
            return [f"of {text}"], []

    encode, stage = remembered(Stage.encode), Stage()
    first = encode(stage, "a", None, encoder_index=[0, 1], max_length=8)
    first[0].append("somebody's own")
    assert encode(stage, "a", None, max_length=8, encoder_index=[0, 1]) == (["of a"], [])
    assert len(stage.asked) == 1
    encode(stage, "a", None, encoder_index=[0, 1], max_length=9)
    encode(stage, ["a"], None, encoder_index=[0, 1], max_length=8)
    assert len(stage.asked) == 3, "other options, or a list, are other questions"
    for number in range(KEPT):
        encode(stage, str(number), None)
    encode(stage, "a", None, encoder_index=[0, 1], max_length=8)
    assert len(stage.asked) == 4 + KEPT
    encode(Stage(), "a", None, encoder_index=[0, 1], max_length=8)
    assert len(stage.asked) == 4 + KEPT, "of its own stage"


@pytest.mark.parametrize(("kernel", "eta"), [("flow_sde", 0.7), ("cps", 0.8), ("ode", 0.0)])
def test_a_kernel_s_default_noise_reaches_the_server(kernel: str, eta: float) -> None:
    assert noise_level(make_kernel(kernel, {}), plan(kernel=kernel)) == eta


@pytest.mark.parametrize("alpha", [1.0, 4.0, 24.5, 0.5])
def test_the_scale_survives_a_server_that_cuts_alpha_to_a_whole_number(alpha: float) -> None:
    whole, strength = alpha_and_strength(Adapter(rank=8, alpha=alpha))
    assert whole == int(whole) >= 1 and strength * whole / 8 == pytest.approx(alpha / 8, rel=1e-15)


def test_buckets_are_bounded_and_keep_the_halves_of_a_layer_together() -> None:
    half = torch.empty(BUCKET_BYTES // 8 // 4, device="meta")
    names = [f"block.{n}.lora_{side}.weight" for n in range(6) for side in "AB"]
    update = Update(name="u", tensors=dict.fromkeys(names, half), adapter=Adapter(rank=1, alpha=1.0), file=None)
    parts = list(buckets(update))
    assert [len(part) for part in parts] == [8, 4]
    assert all({f"{name[:-1]}A", f"{name[:-1]}B"} <= set(part) for part in parts for name in part)


def test_what_samples_share_is_of_the_first_one() -> None:
    shared, scalar = torch.rand(7, 4), torch.tensor(4.5)
    given = {"embeds": [torch.arange(6.0).reshape(3, 2)], "rotary": shared, "guidance": scalar, "lengths": (3, None)}
    found = first_rows(given, 3)
    assert torch.equal(found["embeds"][0], torch.tensor([[0.0, 1.0]]))
    assert found["rotary"] is shared and found["guidance"] is scalar and found["lengths"] == (3, None)


@dataclass
class Whole:
    denoising_env: Any = None
    dit_trajectory: Any = None


def test_conditions_come_with_sample_0_alone() -> None:
    def part(whole: Whole, sample: int, samples: int) -> Whole:
        return Whole(*((value and f"{value} {sample} of {samples}") for value in vars(whole).values()))

    once, whole = with_first_sample(part), Whole(denoising_env="env", dit_trajectory="latents")
    assert [once(whole, sample, 2) for sample in (0, 1)] == [
        Whole(denoising_env="env 0 of 1", dit_trajectory="latents 0 of 2"),
        Whole(denoising_env=None, dit_trajectory="latents 1 of 2"),
    ]
    assert once(Whole(dit_trajectory="latents"), 1, 2) == Whole(dit_trajectory="latents 1 of 2")


def test_a_text_s_conditions_are_asked_for_until_they_are_known() -> None:
    known = {"text": torch.zeros(1)}
    assert lacking({}, ["a", "b", "a"], None) == [True, True, False]
    held = {condition_key(text): known for text in ("a", "b")}
    assert lacking(held, ["a", "b"], None) == [False, False]
    assert lacking(held, ["a", "b"], "no") == [True, False], "the negative text comes with any prompt"
    held[negative_key("no")] = known
    assert lacking(held, ["b", "c"], "no") == [False, True]


def test_a_prompt_of_the_negative_text_has_conditions_of_its_own() -> None:
    # SGLang pads a prompt's text and the negative one to different lengths.
    assert lacking({negative_key(""): {}}, [""], "") == [True]
    assert Texts().fresh({condition_key(""): {}, negative_key(""): {}}, "", "").keys() == {
        condition_key(""),
        negative_key(""),
    }


def test_texts_in_use_outlive_their_being_forgotten() -> None:
    texts, known = Texts(), {"text": torch.zeros(1)}
    texts.remember({negative_key("no"): known})
    texts.remember({condition_key(str(n)): known for n in range(TEXTS_KEPT - 1)})
    held = texts.known(["0"], "no")
    texts.remember({condition_key(f"new {n}"): known for n in range(TEXTS_KEPT)})
    assert texts.known(["0"], "no") == {}, "no more than TEXTS_KEPT are remembered"
    assert set(texts.fresh(held, "0", "no")) == {condition_key("0"), negative_key("no")}


def test_a_text_remembered_again_is_not_the_next_to_be_forgotten() -> None:
    texts, known = Texts(), {"text": torch.zeros(1)}
    keys = [negative_key("no"), *(condition_key(str(n)) for n in range(TEXTS_KEPT - 1))]
    for key in (*keys, negative_key("no"), condition_key("new")):
        texts.remember({key: known})
    assert set(texts.known(["0"], "no")) == {negative_key("no")}
