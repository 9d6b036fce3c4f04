"""The update stage: what it refuses, what it measures before a weight moves, what it leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from mdiff_core import policies
from mdiff_core.errors import BadArtifact, BadSetting, DriftExceeded
from mdiff_core.options import Choice
from mdiff_core.settings import Ema, Model
from tests import train_world as world


def once(folder: Path, pairs: Path, **changes: Any) -> dict[str, float]:
    (metrics,) = world.rounds(folder, world.job(**changes), [pairs])
    return metrics


def test_it_leaves_the_next_policy_with_its_lineage(tmp_path: Path) -> None:
    one = world.job(ema=Ema())
    pairs = world.draw_pairs(tmp_path / "pairs", one)
    first, second = world.rounds(tmp_path / "run", one, [pairs] * 2)
    made = [policies.open_policy(tmp_path / "run" / f"policy-{number}") for number in range(2)]
    start = policies.open_policy(tmp_path / "run" / "policy")
    assert [policy.parent for policy in made] == [start.version, made[0].version]
    assert [policy.version for policy in made] == [f"0000{n + 1}-{p.checksum[:8]}" for n, p in enumerate(made)]
    assert made[0].targets == tuple(sorted(f"blocks.{n}.{name}" for n in range(3) for name in ("to_q", "to_out")))
    assert policies.has(made[1], "ema")
    assert first["rows"] == 23
    assert first["optimizer_steps"] == 2
    needed = {"loss", "grad_norm", "lr", "drift_max", "drift_mean", "skipped_steps", "seconds", "peak_memory_gb", "kl"}
    assert needed <= set(first) == set(second)
    assert all(isinstance(value, float) for value in first.values())


def test_two_runs_with_one_seed_leave_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    pairs = world.draw_pairs(tmp_path / "pairs", world.job())
    for name in ("a", "b"):
        once(tmp_path / name, pairs, ema=Ema())
    for part in ("policy-0", "state-0"):
        assert world.folder_bytes(tmp_path / "a" / part) == world.folder_bytes(tmp_path / "b" / part)
    other = world.job().model_copy(update={"seed": 8})
    world.rounds(tmp_path / "c", other, [pairs])
    checksums = {policies.open_policy(tmp_path / name / "policy-0").checksum for name in "abc"}
    assert len(checksums) == 2


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_same_kernel_code_drifts_by_rounding_only(tmp_path: Path, guidance: float) -> None:
    one = world.job()
    one = one.model_copy(update={"sampling": one.sampling.model_copy(update={"guidance": guidance})})
    pairs = world.draw_pairs(tmp_path / "pairs", one)
    (metrics,) = world.rounds(tmp_path / "run", one, [pairs])
    assert metrics["drift_max"] < 1e-5
    assert metrics["drift_mean"] <= metrics["drift_max"]
    assert metrics["drift_over_clip"] == pytest.approx(metrics["drift_max"] / 1e-4)


@pytest.mark.parametrize("loss", ["flow_grpo", "grpo_guard", "dppo", "awm"])
@pytest.mark.parametrize("kernel", ["flow_sde", "cps", "dance_sde"])
def test_on_the_first_step_of_a_round_every_ratio_is_one(tmp_path: Path, loss: str, kernel: str) -> None:
    options = {"guided": True} if loss == "awm" else {}
    one = world.job(loss=Choice(name=loss, options=options), updates_per_round=1)
    one = one.model_copy(update={"sampling": one.sampling.model_copy(update={"kernel": Choice(name=kernel)})})
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(40,))
    (metrics,) = world.rounds(tmp_path / "run", one, [pairs])
    # A LoRA with B = 0 adds zeros, and the kernel's code is the same: what differs is how a batch is vectorised.
    assert metrics["abs_log_ratio"] < 1e-6 and abs(metrics["ratio"] - 1) < 1e-6
    assert metrics["clip_fraction"] == 0


def test_drift_past_the_limit_stops_before_a_weight_moves_and_says_why(tmp_path: Path) -> None:
    pairs = world.draw_pairs(tmp_path / "pairs", world.job(), off_by=0.05)
    with pytest.raises(DriftExceeded) as caught:
        once(tmp_path / "run", pairs, drift_limit=0.01)
    message = str(caught.value)
    for part in (
        "train.drift_limit",
        "differ by 0.05",
        "the limit is 0.01",
        "13 of 13 rows",
        "sigma 0.60215 to 1.00000",
        "guidance 2",
        "model float32, training fp32",
        "policy 00000-",
        "times the loss's clip",
        "other weights",
    ):
        assert part in message
    assert not (tmp_path / "run" / "policy-0").exists()
    with pytest.raises(DriftExceeded, match=r"train\.precision='bf16' is not model\.dtype='float32'"):
        once(tmp_path / "bf16", pairs, drift_limit=0.01, precision="bf16")
    assert once(tmp_path / "wide", pairs, drift_limit=0.1)["drift_max"] == pytest.approx(0.05, abs=1e-4)


def test_a_loss_that_is_not_finite_names_its_rows_and_trains_nothing(tmp_path: Path) -> None:
    pairs = world.draw_pairs(tmp_path / "pairs", world.job(), sizes=(9,), bad_row=7)
    with pytest.raises(BadSetting, match=r"not finite for 1 of 9 rows \(g1/3\); nothing was trained"):
        once(tmp_path / "run", pairs)
    assert not (tmp_path / "run" / "policy-0").exists()


def test_the_old_policy_is_the_one_the_round_began_with(tmp_path: Path) -> None:
    one = world.job(loss=Choice(name="with_old"))
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(6,))
    for method in ("lora", "full"):
        settings = world.job(loss=Choice(name="with_old"), method=method, lr=1e-3)
        first, second = world.rounds(tmp_path / method, settings, [pairs] * 2)
        assert first["old_gap"] == pytest.approx(0, abs=1e-7)
        assert second["old_gap"] == pytest.approx(0, abs=1e-7)
    apart = world.draw_pairs(tmp_path / "apart", one, sizes=(6, 6))
    assert world.rounds(tmp_path / "apart-run", one, [apart])[0]["old_gap"] > 1e-6


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"method": "full"}, r"train\.method: 'full' cannot continue policy .* of kind lora; set train\.method='lora'"),
        ({"lora": {"rank": 4}}, r"train\.lora\.rank: 4, but the start policy .* has 2; set train\.lora\.rank=2"),
        ({"lora": {"alpha": 8.0}}, r"train\.lora\.alpha: 8\.0, but the start policy .* has 4\.0"),
        ({"lora": {"targets": ("to_q",)}}, r"train\.lora\.targets: the recipe adapts 3 layers, the start policy .* 6"),
        ({"lora": {"targets": ("to_w",)}}, r"train\.lora\.targets: 'to_w' matches no layer"),
    ],
)
def test_a_policy_that_the_recipe_cannot_continue_is_refused(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    pairs = world.draw_pairs(tmp_path / "pairs", world.job())
    once(tmp_path / "run", pairs)
    settings = dict(changes)
    if "lora" in settings:
        settings["lora"] = world.LORA.model_copy(update=settings["lora"])
    before, run = tmp_path / "run", tmp_path / "again"
    with pytest.raises(BadSetting, match=word):
        world.train(
            world.job(**settings), pairs, before / "policy-0", before / "state-0", run / "policy", run / "state"
        )
    assert not run.exists()


def test_full_weights_are_not_continued_by_a_lora_but_by_full_fine_tuning(tmp_path: Path) -> None:
    one = world.job(method="full", lr=1e-4)
    pairs = world.draw_pairs(tmp_path / "pairs", one)
    world.rounds(tmp_path / "run", one, [pairs] * 2)
    made = policies.open_policy(tmp_path / "run" / "policy-1")
    assert (made.kind, made.targets) == ("full", ())
    with pytest.raises(BadSetting, match=r"'lora' cannot continue policy .* of kind full"):
        world.train(
            world.job(), pairs, made.path, tmp_path / "run" / "state-1", tmp_path / "policy", tmp_path / "state"
        )


def test_a_policy_of_another_base_is_refused(tmp_path: Path) -> None:
    pairs = world.draw_pairs(tmp_path / "pairs", world.job())
    once(tmp_path / "run", pairs)
    before = tmp_path / "run"
    other = world.job(model=Model(path="another", family=Choice(name=world.FAMILY), dtype="float32"))
    with pytest.raises(BadArtifact, match=r"was trained from tiny .* set model\.path to that base"):
        world.train(other, pairs, before / "policy-0", before / "state-0", tmp_path / "policy", tmp_path / "state")


def test_a_lora_may_start_from_a_policy_with_an_empty_state(tmp_path: Path) -> None:
    pairs = world.draw_pairs(tmp_path / "pairs", world.job())
    once(tmp_path / "run", pairs)
    _, empty = world.start(tmp_path / "fresh", world.job())
    out = tmp_path / "policy", tmp_path / "state"
    world.train(world.job(), pairs, tmp_path / "run" / "policy-0", empty, *out)
    assert json.loads((tmp_path / "state" / "state.json").read_text())["steps"] == 2
    gap = world.largest_gap(world.weights(tmp_path / "policy"), world.weights(tmp_path / "run" / "policy-0"))
    assert 0 < gap < 0.01
