"""What an optimizer step is: one gradient, however many micro-batches, processes or files its rows came in."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdiff_core import policies, registry, tables
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.jobs import UpdateJob
from mdiff_core.options import Choice
from mdiff_core.policy import TrainedPolicies
from mdiff_core.settings import Ema, Model, Old
from mdiff_core.tables import RowTable
from mdiff_core.train import ema, lora, optim, rows, shard
from mdiff_core.train.loop import summary
from mdiff_core.train.precision import GradScaler
from tests import train_world as world
from tests.train_world import Net

SFT = Choice(name="sft")
RATIO, CLEAN_LOSS = (registry.make("loss", choice) for choice in (Choice(name="flow_grpo"), SFT))
CLEAN = {"loss": SFT, "batch": 6, "updates_per_round": 3}
CPU = torch.device("cpu")
SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 10,
    "out_channels": 4,
    "pos_embed_max_size": 8,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}


def real_sd3(folder: Path) -> tuple[UpdateJob, Path]:
    """A job on a random SD3Transformer2DModel, and rows drawn from it."""
    from diffusers import SD3Transformer2DModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        SD3Transformer2DModel(**SD3).save_pretrained(folder / "sd3" / "transformer")
    one = world.job(model=Model(path=str(folder / "sd3"), family=Choice(name="sd3"), dtype="float32"))
    generator = torch.Generator().manual_seed(1)
    conditions = {
        name: {
            "encoder_hidden_states": torch.randn(5, 12, generator=generator),
            "pooled_projections": torch.randn(10, generator=generator),
        }
        for name in ("a", "b", "negative")
    }
    return one, world.draw_pairs(folder / "sd3-rows", one, sizes=(5, 3), shape=(4, 8, 8), conditions=conditions)


LOSSES: dict[str, dict[str, Any]] = {
    "awm": {"kl": 0.1, "kl_against": "start", "guided": True},
    "dpo": {"beta": 10.0, "guided": True},
    "dppo": {"beta": 0.04},
    "flow_grpo": {"beta": 0.04},
    "grpo_guard": {"clip": 0.1, "beta": 0.04, "kl_against": "ema"},
    "nft": {"kl": 0.1, "guided": True},
}
"""Every loss of RL, with as many policies as it may need."""


def of_loss(name: str, **changes: Any) -> dict[str, Any]:
    """Changes to the usual job."""
    old = {"old": Old(slope=0.1)} if name == "nft" else {}
    return {"loss": Choice(name=name, options=LOSSES[name]), "ema": Ema()} | old | changes


CASES = ("lora", "full", "sft", "starved", "real_sd3", *(f"loss_{name}" for name in LOSSES), "nft_full")


def cases(folder: Path) -> dict[str, tuple[UpdateJob, list[Path]]]:
    """Jobs and the rows of two rounds each."""
    one, clean = world.job(), world.job(**CLEAN)
    ratio = [world.draw_pairs(folder / f"ratio-{number}", world.of_round(one, number)) for number in range(2)]
    samples = world.draw_pairs(folder / "samples", clean, sizes=(20,))
    few = world.draw_pairs(folder / "few", one, sizes=(5, 1))
    sd3, drawn = real_sd3(folder)
    by_loss = {f"loss_{name}": world.job(**of_loss(name)) for name in LOSSES}
    by_loss["nft_full"] = world.job(**of_loss("nft", method="full", lr=1e-4))
    rows_of = {
        name: [world.draw_pairs(folder / f"{name}-rows", each, sizes=(5, 4))] * 2 for name, each in by_loss.items()
    }
    return {
        **{name: (each, rows_of[name]) for name, each in by_loss.items()},
        "lora": (one, ratio),
        "full": (world.job(method="full", lr=1e-4, ema=Ema()), ratio),
        "sft": (clean, [samples] * 2),
        "starved": (world.job(microbatch=2), [few]),  # ranks of 3 and 2 rows, then of 1 and none
        "real_sd3": (sd3, [drawn]),
    }


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Each case's folder after training in one process and in two."""
    folder = tmp_path_factory.mktemp("one-and-two")
    found, parallel = {}, {}
    for name, (one, pairs) in cases(folder).items():
        found[name] = folder / f"{name}-1", folder / f"{name}-2"
        world.rounds(found[name][0], one, pairs)
        world.start(found[name][1], one)
        parallel[found[name][1]] = one, pairs
    # Adam's moments and the weights of one process, continued by two.
    found["crossed"] = folder / "lora-1", folder / "crossed"
    for part in ("policy", "state"):
        shutil.copytree(folder / "lora-1" / f"{part}-0", folder / "crossed" / part)
    parallel[folder / "crossed"] = world.job(), [folder / "ratio-1"]
    world.train_in_parallel(2, parallel, failing(folder))
    return found


def failing(folder: Path) -> dict[str, tuple[UpdateJob, Path]]:
    """What both ranks must refuse, though only one has the row: else the other would wait for it for ever."""
    drift = world.draw_pairs(folder / "drift", world.job(), off_by=0.05)
    odd = world.draw_pairs(folder / "odd", world.job(), bad_row=12)
    return {
        "13 of 13 rows are over it": (world.job(drift_limit=0.01), drift),
        "not finite for 1 of 13 rows (g3/0)": (world.job(), odd),
    }


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_weights_of_one(one_and_two: dict[str, tuple[Path, Path]], name: str) -> None:
    one, two = one_and_two[name]
    last = max(path.name for path in one.glob("policy-*"))
    moved = world.largest_gap(world.weights(one / last), world.weights(one / "policy-0")) if last != "policy-0" else 1
    assert moved > 1e-5
    # Float32 sums over ranks in another order; lr bounds what Adam makes of it.
    assert world.largest_gap(world.weights(one / last), world.weights(two / last)) < 1e-6
    for average in ("ema", "old"):
        if policies.has(policies.open_policy(one / last), average):
            assert world.largest_gap(world.weights(one / last, average), world.weights(two / last, average)) < 1e-6


def test_two_processes_continue_what_one_began(one_and_two: dict[str, tuple[Path, Path]]) -> None:
    one, two = one_and_two["crossed"]
    assert world.largest_gap(world.weights(one / "policy-1"), world.weights(two / "policy-0")) < 1e-6
    assert world.largest_gap(world.weights(one / "policy-1"), world.weights(one / "policy-0")) > 1e-5


@pytest.mark.parametrize(
    "changes",
    [{}, {"method": "full", "lr": 1e-4}, CLEAN, *(of_loss(name) for name in LOSSES)],
    ids=["lora", "full", "sft", *LOSSES],
)
def test_the_size_of_a_microbatch_does_not_matter(tmp_path: Path, changes: dict[str, Any]) -> None:
    pairs = world.draw_pairs(tmp_path / "pairs", world.job(**changes), sizes=(20,) if changes is CLEAN else (13, 10))
    made = []
    for size in (1, 3, 64):
        world.rounds(tmp_path / str(size), world.job(**changes, microbatch=size), [pairs])
        made.append(world.weights(tmp_path / str(size) / "policy-0"))
    assert max(world.largest_gap(made[0], other) for other in made[1:]) < 1e-6


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_rows_does_not_matter(tmp_path: Path, name: str) -> None:
    one = world.job(**of_loss(name))
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(13,))
    (tmp_path / "turned").mkdir()
    columns = RowTable(pairs, 0).take(np.arange(13))
    with tables.row_writer(tmp_path / "turned", 0, registry.find("loss", name).rows) as writer:
        for row in reversed(range(13)):
            writer.add_batch({name: column[row : row + 1] for name, column in columns.items()})
    tables.copy_conditions(pairs, tmp_path / "turned")
    world.rounds(tmp_path / "a", one, [pairs])
    world.rounds(tmp_path / "b", one, [tmp_path / "turned"])
    made = [world.weights(tmp_path / name / "policy-0") for name in "ab"]
    assert world.largest_gap(*made) < 1e-6


def test_checkpointing_changes_memory_only(tmp_path: Path) -> None:
    for name, one in (("off", world.job()), ("on", world.job(checkpointing=True))):
        pairs = world.draw_pairs(tmp_path / f"pairs-{name}", one)
        world.rounds(tmp_path / name, one, [pairs])
    off, on = (world.folder_bytes(tmp_path / name / "policy-0") for name in ("off", "on"))
    assert off == on


@pytest.mark.parametrize("clip_norm", [1e3, 1e-2])
def test_a_step_is_what_plain_torch_makes_of_the_mean_over_rows(tmp_path: Path, clip_norm: float) -> None:
    one = world.job(method="full", updates_per_round=1, clip_norm=clip_norm, weight_decay=0.1)
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(13,))
    (metrics,) = world.rounds(tmp_path / "run", one, [pairs])
    family, kernel = registry.make("family", one.model.family), registry.make("kernel", one.sampling.kernel)
    loss = registry.make("loss", one.loss)
    net, base = (family.transformer("tiny", torch.float32, CPU) for _ in range(2))
    net.requires_grad_(True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=one.train.lr, weight_decay=0.1)
    frozen = {"reference": lambda: _kept(base)}
    reader = rows.Reader(conditions=rows.Conditions(pairs, CPU, exact=True), device=CPU, size=64, rank=0, world=1)
    (batch,) = reader.microbatches(rows.plan(pairs, one, 0, RATIO)[0])
    cells = loss(TrainedPolicies(net, family, kernel, loss.needs.policies, frozen=frozen), batch.rows)
    cells.loss.mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
    optimizer.step()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert metrics["loss"] == pytest.approx(float(cells.loss.detach().mean()), rel=1e-5)
    plain = {name: value.detach() for name, value in net.named_parameters()}
    assert world.largest_gap(world.weights(tmp_path / "run" / "policy-0"), plain) < 1e-6


class _kept:
    """A view that does nothing."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def __enter__(self) -> Net:
        return self.net

    def __exit__(self, *_: object) -> None:
        return None


def test_learning_rates() -> None:
    train = world.TRAIN.model_copy(update={"lr": 1.0, "warmup_steps": 4, "total_steps": 12})
    by_schedule = {
        name: [optim.learning_rate(train.model_copy(update={"schedule": name}), step) for step in (0, 3, 4, 8, 12, 99)]
        for name in ("constant", "linear", "cosine")
    }
    assert by_schedule["constant"] == [0.25, 1, 1, 1, 1, 1]
    assert by_schedule["linear"] == [0.25, 1, 1, 0.5, 0, 0]
    assert by_schedule["cosine"] == pytest.approx([0.25, 1, 1, 0.5, 0, 0])
    with pytest.raises(BadSetting, match=r"train\.total_steps: 3 leaves the cosine schedule no steps"):
        optim.learning_rate(train.model_copy(update={"schedule": "cosine", "total_steps": 3}), 4)


def test_the_average_follows_fast_at_first_and_by_its_decay_later() -> None:
    settings = Ema(decay=0.9, every=2)
    assert [ema.decay_at(settings, step) for step in (0, 8, 10_000)] == [0.1, 0.5, 0.9]
    assert [ema.is_due(settings, step) for step in range(4)] == [False, True, False, True]
    assert ema.decay_at(Ema(decay=0.9, warmup=False), 0) == 0.9
    live = {"w": torch.tensor([1.0, 2.0])}
    average = ema.copies(live)
    live["w"].fill_(4.0)
    ema.follow(average, live, decay=0.75)
    assert average["w"].tolist() == [1.75, 2.5]


@pytest.mark.parametrize(
    ("old", "decays"),
    [
        (None, [0, 0, 0, 0]),
        (Old(flat=0, slope=0.001, most=0.5), [0, 0.075, 0.1, 0.5]),
        (Old(flat=75, slope=0.0075, most=0.999), [0, 0, 0.1875, 0.999]),
    ],
)
def test_the_published_decays_of_the_old_policy(old: Old | None, decays: list[float]) -> None:
    assert [ema.old_decay_at(old, step) for step in (0, 75, 100, 10_000)] == pytest.approx(decays)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_old_policies_of_a_run_are_the_recurrence_over_its_rounds(tmp_path: Path, method: str) -> None:
    old = Old(flat=2, slope=0.1, most=0.3)
    one = world.job(loss=Choice(name="with_old"), old=old, method=method)
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(6, 6))
    found = world.rounds(tmp_path / "run", one, [pairs] * 4)
    run = [tmp_path / "run" / f"policy-{number}" for number in range(4)]
    name = "blocks.0.to_q.weight" if method == "full" else "blocks.0.to_q.lora_B.weight"
    average = torch.zeros(())
    for policy, decay in zip(run, [0.0, 0.2, 0.3, 0.3], strict=True):  # after 2, 4, 6 and 8 optimizer steps
        average = decay * average + (1 - decay) * world.weights(policy)[name]
        torch.testing.assert_close(world.weights(policy, "old")[name], average, rtol=1e-6, atol=1e-9)
    assert world.largest_gap(world.weights(run[0]), world.weights(run[0], "old")) == 0
    assert all(metrics["old_gap"] > 0 for metrics in found)
    assert [metrics["old_decay"] for metrics in found] == pytest.approx([0.0, 0.2, 0.3, 0.3])


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_frozen_start_policy_is_what_the_run_started_from(tmp_path: Path, method: str) -> None:
    against = {name: {"clip": 0.9, "beta": 1.0, "kl_against": name} for name in ("start", "reference")}
    one = {name: world.job(method=method, loss=Choice(name="flow_grpo", options=o)) for name, o in against.items()}
    pairs = world.draw_pairs(tmp_path / "pairs", one["start"], sizes=(6,))
    from_base = {name: world.rounds(tmp_path / name, job, [pairs] * 2) for name, job in one.items()}
    for a, b in zip(from_base["start"], from_base["reference"], strict=True):
        assert a["kl"] == pytest.approx(b["kl"], rel=1e-4, abs=1e-9)
    _, empty = world.start(tmp_path / "fresh", one["start"])
    again = tmp_path / "again"
    policy, state, found = tmp_path / "start" / "policy-1", empty, []
    for number in range(2):
        out = again / f"policy-{number}", again / f"state-{number}"
        found.append(world.train(world.of_round(one["start"], number), pairs, policy, state, *out)["kl"])
        policy, state = out
    assert found[0] < 1e-9 < found[1]  # measured before the first step, and after it


def test_an_old_policy_of_an_earlier_run_is_not_taken_for_what_drew_this_one(tmp_path: Path) -> None:
    first = world.job(loss=Choice(name="with_old"), old=Old(slope=0.1, most=0.9))
    pairs = world.draw_pairs(tmp_path / "pairs", first, sizes=(6,))
    world.rounds(tmp_path / "first", first, [pairs] * 3)
    start, (_, empty) = tmp_path / "first" / "policy-2", world.start(tmp_path / "empty", first)
    assert world.largest_gap(world.weights(start), world.weights(start, "old")) > 1e-4
    for name, changes, gap in (("without", {}, False), ("with", {"old": Old()}, True)):
        one = world.job(loss=Choice(name="with_old"), **changes)
        found = world.train(one, pairs, start, empty, tmp_path / name / "policy", tmp_path / name / "state")
        assert (found["old_gap"] > 1e-6) == gap
        assert policies.has(policies.open_policy(tmp_path / name / "policy"), "old") == gap


def test_the_averages_of_a_run_are_the_recurrence_over_its_weights(tmp_path: Path) -> None:
    one = world.job(ema=Ema(decay=0.15), updates_per_round=1)
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(9,))
    world.rounds(tmp_path / "run", one, [pairs] * 3)
    live = [world.weights(tmp_path / "run" / f"policy-{number}") for number in range(3)]
    name = "blocks.0.to_q.lora_B.weight"
    average = torch.zeros_like(live[0][name])  # B starts at zero
    for number, decay in enumerate([0.1, 0.15, 0.15]):
        average = decay * average + (1 - decay) * live[number][name]
        found = world.weights(tmp_path / "run" / f"policy-{number}", "ema")[name]
        torch.testing.assert_close(found, average, rtol=1e-6, atol=1e-9)


def test_the_loss_scale_halves_on_overflow_and_grows_after_2000_steps() -> None:
    scaler = GradScaler.of("fp16", None)
    scaler.settle(finite=False)
    assert (scaler.scale, scaler.streak) == (2.0**15, 0)
    again = GradScaler.of("fp16", scaler.saved())
    for _ in range(2000):
        again.settle(finite=True)
    assert (again.scale, again.streak) == (2.0**16, 0)
    other = GradScaler.of("bf16", None)
    other.settle(finite=True)
    assert (other.scale, other.saved()) == (1.0, None)
    with pytest.raises(BadSetting, match="overflow at every loss scale"):
        for _ in range(40):
            again.settle(finite=False)


def test_fp16_skips_a_step_that_overflows_and_remembers_the_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.job(precision="fp16", updates_per_round=1, ema=Ema())
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(8,))
    monkeypatch.setattr(GradScaler, "START", 2.0**24)
    before, *rest = world.rounds(tmp_path / "run", one, [pairs] * 12)
    assert (before["skipped_steps"], before["lr"]) == (1, one.train.lr)
    assert "grad_norm" not in before
    name = "blocks.1.to_q.lora_B.weight"
    assert not world.weights(tmp_path / "run" / "policy-0")[name].any()
    assert '"scale": 8388608.0' in (tmp_path / "run" / "state-0" / "state.json").read_text()
    assert '"steps": 0' in (tmp_path / "run" / "state-0" / "state.json").read_text()
    assert rest[-1]["skipped_steps"] == 0
    assert world.weights(tmp_path / "run" / "policy-11")[name].any()


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_computes_about_the_same_and_keeps_float32_weights(
    tmp_path: Path, precision: str, method: str
) -> None:
    pairs = world.draw_pairs(tmp_path / "pairs", world.job())
    metrics = {}
    for name in ("fp32", precision):
        wide = Choice(name="flow_grpo", options={"clip": 0.5, "beta": 0.04})  # rounding alone stops no gradient
        one = world.job(precision=name, method=method, lr=1e-4, drift_limit=1.0, loss=wide)
        (metrics[name],) = world.rounds(tmp_path / name, one, [pairs])
    assert all(value.dtype == torch.float32 for value in world.weights(tmp_path / precision / "policy-0").values())
    # 8 and 11 bits of mantissa against 24: a gradient norm agrees to a few percent.
    assert metrics[precision]["grad_norm"] == pytest.approx(metrics["fp32"]["grad_norm"], rel=0.1)
    assert 0 < metrics[precision]["drift_max"] < 0.1


@pytest.fixture
def mesh() -> Iterator[Any]:
    with shard.all_ranks(CPU) as found:
        yield found


def test_shards_come_together_as_they_were_cut(mesh: Any) -> None:
    net = registry.make("family", Choice(name=world.FAMILY)).transformer("tiny", torch.float32, CPU)
    before = {name: value.clone() for name, value in net.named_parameters()}
    shard.shard(net, list(net.blocks), mesh, torch.float32)
    cut = dict(net.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in shard.gathered(cut).items())
    again = {name: shard.like(value, cut[name]) for name, value in before.items()}
    assert all(torch.equal(value, before[name]) for name, value in shard.gathered(again).items())


def test_a_group_that_was_there_before_is_left_alone(mesh: Any) -> None:
    with shard.all_ranks(CPU):
        pass
    assert torch.distributed.is_initialized()


def test_drawn_rows_are_each_row_once_an_epoch_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    one = world.job(**CLEAN)
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(9,))
    taken = rows.plan(pairs, one, 0, CLEAN_LOSS) + rows.plan(pairs, one, 18, CLEAN_LOSS)
    assert [len(step.rows) for step in taken] == [6] * 6
    assert np.bincount(np.concatenate([step.rows for step in taken])).tolist() == [4] * 9
    (longer,) = [rows.plan(pairs, world.job(**CLEAN | {"updates_per_round": 6}), 0, CLEAN_LOSS)]
    assert all(np.array_equal(a.rows, b.rows) and a.noise == b.noise for a, b in zip(taken, longer, strict=True))
    other = rows.plan(pairs, one.model_copy(update={"seed": 8}), 0, CLEAN_LOSS)
    assert any(not np.array_equal(a.rows, b.rows) for a, b in zip(taken, other, strict=False))


def test_a_sample_is_visited_at_that_share_of_its_schedule_each_sigma_once(tmp_path: Path) -> None:
    one = world.job(**of_loss("nft"), updates_per_round=1, epochs=2)
    one = one.model_copy(update={"sampling": one.sampling.model_copy(update={"steps": 10})})
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(3,))
    recorded = RowTable(pairs, 0).take(np.arange(1))["sigmas"][0]
    found = []
    for step in rows.plan(pairs, one, 0, registry.make("loss", one.loss)):
        assert len(step.rows) == 3 * 9  # int(10 * .99)
        reader = rows.Reader(conditions=rows.Conditions(pairs, CPU, exact=True), device=CPU, size=4, rank=0, world=1)
        batches = list(reader.microbatches(step))
        by_sample: dict[str, list[float]] = {}
        for batch in batches:
            for name, sigma in zip(batch.names, batch.rows.sigma.tolist(), strict=True):
                by_sample.setdefault(name, []).append(sigma)
        assert all(len({*each}) == 9 and {*each} < {*recorded[:-1].tolist()} for each in by_sample.values())
        assert len({tuple(each) for each in by_sample.values()}) == 3  # each in an order of its own
        found += [int(seed) for batch in batches for seed in batch.rows.seed]
    assert len({*found}) == 2 * 27


def test_a_row_has_other_noise_at_every_visit_and_the_same_in_every_microbatch(tmp_path: Path) -> None:
    one = world.job(loss=SFT, epochs=2, updates_per_round=1)
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(5,))
    first, second = rows.plan(pairs, one, 0, CLEAN_LOSS)

    def seeds_of(step: rows.Step, size: int) -> list[int]:
        conditions = rows.Conditions(pairs, CPU, exact=True)
        reader = rows.Reader(conditions=conditions, device=CPU, size=size, rank=0, world=1)
        return [int(seed) for batch in reader.microbatches(step) for seed in batch.rows.seed]

    assert seeds_of(first, 2) == seeds_of(first, 5)
    assert len({*seeds_of(first, 2), *seeds_of(second, 2)}) == 10


@pytest.mark.parametrize(("size", "world_size", "rows_in_all"), [(2, 3, 7), (4, 2, 1), (8, 4, 9)])
def test_ranks_share_the_rows_and_all_make_as_many_passes(
    tmp_path: Path, size: int, world_size: int, rows_in_all: int
) -> None:
    one = world.job()
    pairs = world.draw_pairs(tmp_path / "pairs", one, sizes=(rows_in_all,))
    (step,) = rows.plan(pairs, one, 0, RATIO)
    by_rank = []
    for rank in range(world_size):
        conditions = rows.Conditions(pairs, CPU, exact=True)
        reader = rows.Reader(conditions=conditions, device=CPU, size=size, rank=rank, world=world_size)
        by_rank.append(list(reader.microbatches(step)))
    assert len({len(batches) for batches in by_rank}) == 1
    assert all([batch.last for batch in batches] == [False] * (len(batches) - 1) + [True] for batches in by_rank)
    counted = [
        int(seed)
        for batches in by_rank
        for batch in batches
        for seed, weight in zip(batch.rows.seed, batch.weight, strict=True)
        if weight
    ]
    assert sorted(counted) == list(range(rows_in_all))


def test_rows_a_job_cannot_train_on_are_refused(tmp_path: Path) -> None:
    pairs = world.draw_pairs(tmp_path / "pairs", world.job())
    with pytest.raises(BadSetting, match=r"'sft' trains on clean rows, but .* holds transitions"):
        rows.plan(pairs, world.job(loss=SFT), 0, CLEAN_LOSS)
    with pytest.raises(BadSetting, match=r"train\.batch: 4 draws from one table, .* has 2; set train\.batch=0"):
        rows.plan(pairs, world.job(batch=4), 0, RATIO)
    one = world.job()
    columns = RowTable(pairs, 0).take(np.arange(4))
    (tmp_path / "mixed").mkdir()
    with tables.row_writer(tmp_path / "mixed", 0, "transitions") as writer:
        writer.add_batch(columns | {"guidance": np.array([1, 2, 2, 2], dtype=np.float32)})
        writer.add_batch(columns | {"condition": ["lost"] * 4})
    tables.copy_conditions(pairs, tmp_path / "mixed")
    conditions = rows.Conditions(tmp_path / "mixed", CPU, exact=True)
    batches = rows.Reader(conditions=conditions, device=CPU, size=4, rank=0, world=1)
    with pytest.raises(BadArtifact, match=r"guidance \[1\.0, 2\.0\] in one step"):
        list(batches.microbatches(rows.plan(tmp_path / "mixed", one, 0, RATIO)[0]))
    only = rows.Step(
        table=RowTable(tmp_path / "mixed", 0), rows=np.arange(4, 8), visits=np.zeros(4, np.int64), noise=()
    )
    with pytest.raises(BadArtifact, match="no condition 'lost'"):
        list(batches.microbatches(only))


def test_first_adapter_weights_follow_from_seed_and_name_alone() -> None:
    def first(seed: int, init: str = "gaussian") -> dict[str, torch.Tensor]:
        net = Net()
        settings = world.LORA.model_copy(update={"init": init, "rank": 8})
        targets = lora.targets_of(net, ("to_q", "to_out"))
        before = torch.random.get_rng_state()
        lora.inject(net, settings, targets)
        parameters = lora.parameters_of(net, targets)
        lora.start(parameters, settings, seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        return {name: value.detach() for name, value in parameters.items()}

    one, again, other, spread = first(1), first(1), first(2), first(1, "default")
    assert all(torch.equal(value, again[name]) for name, value in one.items())
    assert not any(value.any() for name, value in one.items() if "lora_B" in name)
    a = torch.cat([value.flatten() for name, value in one.items() if "lora_A" in name])
    assert not torch.equal(a, torch.cat([value.flatten() for name, value in other.items() if "lora_A" in name]))
    assert float(a.std()) == pytest.approx(1 / 8, rel=0.1)  # 768 draws
    uniform = torch.cat([value.flatten() for name, value in spread.items() if "lora_A" in name])
    assert float(uniform.abs().max()) <= 1 / math.sqrt(16)
    assert float(uniform.std()) == pytest.approx(1 / math.sqrt(16 * 3), rel=0.1)


def test_targets_are_whole_names_and_a_wrong_one_is_said_with_the_nearest() -> None:
    assert lora.targets_of(Net(), ("blocks.1.to_q", "to_out")) == (
        "blocks.0.to_out",
        "blocks.1.to_out",
        "blocks.1.to_q",
        "blocks.2.to_out",
    )
    with pytest.raises(
        BadSetting, match=r"train\.lora\.targets: 'to_qq' matches no layer of the model; did you mean 'to_q'"
    ):
        lora.targets_of(Net(), ("to_qq",))
    with pytest.raises(BadSetting, match=r"'norm' matches blocks\.0\.norm, which is not linear"):
        lora.targets_of(Net(), ("norm",))


def test_metrics_are_means_over_steps_that_have_them() -> None:
    steps = [
        {"loss": 1.0, "lr": 0.1, "skipped_steps": 1.0, "drift_max": 0.5},
        {"loss": 3.0, "lr": 0.2, "skipped_steps": 0.0, "grad_norm": 4.0},
    ]
    expected = {"loss": 2.0, "lr": 0.2, "skipped_steps": 1.0, "drift_max": 0.5, "grad_norm": 4.0}
    assert summary(steps) == expected
    assert summary([]) == {}
