"""Resume is equality: what was stopped and continued has the bits of what never was."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mdiff_core import policies
from mdiff_core.errors import BadArtifact
from mdiff_core.jobs import UpdateJob
from mdiff_core.options import Choice
from mdiff_core.settings import Ema, Old
from mdiff_core.train import shard, state
from mdiff_core.train.loop import Trainer
from tests import train_world as world

ROUNDS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"ema": Ema(decay=0.5), "schedule": "cosine", "total_steps": 20, "warmup_steps": 3},
    "full": {"method": "full", "lr": 1e-4, "ema": Ema(every=2)},
    "fp16": {"precision": "fp16", "ema": Ema()},
    "old": {"loss": Choice(name="with_old"), "epochs": 2, "old": Old(slope=0.1), "ema": Ema(warmup=False)},
    "old_full": {"loss": Choice(name="with_old"), "method": "full", "lr": 1e-4, "old": Old(flat=1, slope=0.3)},
    "kl_start": {"loss": Choice(name="flow_grpo", options={"beta": 1.0, "kl_against": "start"})},
    "kl_ema": {"loss": Choice(name="flow_grpo", options={"beta": 1.0, "kl_against": "ema"}), "ema": Ema()},
    "kl_ema_full": {
        "loss": Choice(name="flow_grpo", options={"beta": 1.0, "kl_against": "ema"}),
        "ema": Ema(every=2),
        "method": "full",
        "lr": 1e-4,
    },
    "nft": {
        "loss": Choice(name="nft", options={"kl": 1e-2, "guided": True}),
        "old": Old(flat=2, slope=0.1),
        "ema": Ema(decay=0.5),
    },
    "nft_full": {
        "loss": Choice(name="nft", options={"kl": 1e-2, "kl_against": "start", "guided": True}),
        "old": Old(slope=0.1),
        "ema": Ema(every=2),
        "method": "full",
        "lr": 1e-4,
    },
    "grpo_guard": {"loss": Choice(name="grpo_guard", options={"clip": 0.1}), "epochs": 2},
    "dpo": {"loss": Choice(name="dpo"), "ema": Ema()},
    "sft": {"loss": Choice(name="sft"), "batch": 6, "updates_per_round": 2},
}


def never_stopped(folder: Path, one: UpdateJob, pairs: list[Path]) -> None:
    """All rounds by one Trainer, which keeps everything in memory."""
    policy, empty = world.start(folder, one)
    with shard.all_ranks(torch.device("cpu")) as mesh:
        trainer = Trainer(one, policies.open_policy(policy), empty, mesh)
        for number, rows in enumerate(pairs):
            trainer.train(rows, number)
            trainer.save(folder / f"policy-{number}", folder / f"state-{number}")


@pytest.mark.parametrize("name", SETTINGS)
def test_stopped_after_every_round_is_bit_for_bit_never_stopped(tmp_path: Path, name: str) -> None:
    one = world.job(**SETTINGS[name])
    sizes = (20,) if name == "sft" else (13, 10)
    pairs = [
        world.draw_pairs(tmp_path / f"pairs-{number}", world.of_round(one, number), sizes=sizes)
        for number in range(ROUNDS)
    ]
    never_stopped(tmp_path / "whole", one, pairs)
    world.rounds(tmp_path / "stopped", one, pairs)
    for number in range(ROUNDS):
        for part in (f"policy-{number}", f"state-{number}"):
            assert world.folder_bytes(tmp_path / "whole" / part) == world.folder_bytes(tmp_path / "stopped" / part)
    assert len({policies.open_policy(tmp_path / "whole" / f"policy-{n}").checksum for n in range(ROUNDS)}) == ROUNDS


def test_without_its_state_a_run_would_end_elsewhere(tmp_path: Path) -> None:
    one = world.job()
    pairs = [world.draw_pairs(tmp_path / "pairs", one)] * 2
    world.rounds(tmp_path / "run", one, pairs)
    _, empty = world.start(tmp_path / "fresh", one)
    out = tmp_path / "policy", tmp_path / "state"
    world.train(world.of_round(one, 1), pairs[1], tmp_path / "run" / "policy-0", empty, *out)
    assert world.largest_gap(world.weights(out[0]), world.weights(tmp_path / "run" / "policy-1")) > 1e-5


SCRIPT = """
import sys
from tests import train_world as world
from mdiff_core.jobs import UpdateJob
from pathlib import Path
world.train(UpdateJob.from_json(sys.argv[1]), *map(Path, sys.argv[2:]))
"""


NFT = {"guided": True, "kl": 1e-2}


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        (Choice(name="killed", options={"calls": 5}), {}),
        (Choice(name="killed_nft", options={"calls": 11, **NFT}), {"old": Old(flat=0, slope=0.1)}),
    ],
    ids=["flow_grpo", "nft"],
)
def test_killed_in_the_optimizer_loop_and_run_again(tmp_path: Path, loss: Choice, changes: dict[str, Any]) -> None:
    one = world.of_round(world.job(loss=loss, ema=Ema(), **changes), 1)  # killed within the second of two steps
    pairs = world.draw_pairs(tmp_path / "pairs", one)
    world.rounds(tmp_path / "whole", one, [pairs] * 2)
    before = tmp_path / "whole" / "policy-0", tmp_path / "whole" / "state-0"
    out = tmp_path / "made-policy", tmp_path / "made-state"
    command = [sys.executable, "-c", SCRIPT, one.to_json(), *map(str, (pairs, *before, *out))]
    killed = subprocess.run(command, env={**os.environ, "MDIFF_TEST_KILL": "1"}, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    for folder, opened in ((out[0], policies.open_policy), (out[1], state.read)):
        with pytest.raises(BadArtifact):
            opened(folder)
    world.train(one, pairs, *before, *out)
    for made, part in zip(out, ("policy-1", "state-1"), strict=True):
        assert world.folder_bytes(made) == world.folder_bytes(tmp_path / "whole" / part)


@pytest.mark.parametrize("at", ["policy.json", "state.json", "state-00000.safetensors", "adapter_model.safetensors"])
def test_a_write_that_stops_half_way_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    one = world.job()
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(4,))
    policy, empty = world.start(tmp_path, one)
    out = tmp_path / "made-policy", tmp_path / "made-state"
    replace, fsync = os.replace, os.fsync

    def stopping_replace(source: str, target: str) -> None:
        if Path(target).name == at:
            raise KeyboardInterrupt
        replace(source, target)

    def stopping_sync(file: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{file}")).name == at:
            raise KeyboardInterrupt
        fsync(file)

    monkeypatch.setattr(os, "replace", stopping_replace)
    monkeypatch.setattr(os, "fsync", stopping_sync)
    with pytest.raises(KeyboardInterrupt):
        world.train(one, pairs, policy, empty, *out)
    with pytest.raises(BadArtifact, match=r"no state\.json"):
        state.read(out[1])
    if not at.startswith("state"):
        with pytest.raises(BadArtifact, match=r"no policy\.json"):
            policies.open_policy(out[0])


def test_nothing_is_unpickled_from_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = world.job(ema=Ema())
    pairs = world.draw_pairs(tmp_path / "pairs", one)
    world.rounds(tmp_path / "run", one, [pairs])

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refused)
    before = tmp_path / "run"
    with shard.all_ranks(torch.device("cpu")) as mesh:
        Trainer(one, policies.open_policy(before / "policy-0"), before / "state-0", mesh)


def spoilt_json(folder: Path, **changes: object) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda folder: (folder / "state.json").unlink(), r"no state\.json"),
        (lambda folder: (folder / "state.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "state.json").write_text("[]"), "cannot be read"),
        (lambda folder: spoilt_json(folder, format=9), "not of format 1"),
        (lambda folder: spoilt_json(folder, colour="red"), "cannot be read"),
        (lambda folder: (folder / "state-00000.safetensors").unlink(), "missing or changed"),
        (lambda folder: (folder / "state-00000.safetensors").write_bytes(b"x" * 99), "missing or changed"),
    ],
)
def test_a_spoilt_state_is_refused(tmp_path: Path, spoil: Callable[[Path], object], word: str) -> None:
    one = world.job()
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(4,))
    world.rounds(tmp_path / "run", one, [pairs])
    before = tmp_path / "run"
    spoil(before / "state-0")
    with pytest.raises(BadArtifact, match=word):
        world.train(one, pairs, before / "policy-0", before / "state-0", tmp_path / "policy", tmp_path / "state")


def test_a_state_goes_with_the_policy_it_was_saved_with(tmp_path: Path) -> None:
    one = world.job()
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(4,))
    world.rounds(tmp_path / "run", one, [pairs] * 2)
    before, out = tmp_path / "run", (tmp_path / "policy", tmp_path / "state")
    with pytest.raises(BadArtifact, match="belongs to the policy with checksum"):
        world.train(one, pairs, before / "policy-1", before / "state-0", *out)
    without = world.job(loss=Choice(name="flow_grpo", options={"beta": 0.04, "kl_against": "start"}))
    with pytest.raises(BadArtifact, match=r"train state of another model or method, see start\.blocks"):
        world.train(without, pairs, before / "policy-1", before / "state-1", *out)
