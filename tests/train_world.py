"""A family of a few hundred weights, rows drawn from it by a real kernel, and ways to train on them in some processes."""

import hashlib
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from mdiff_core import policies, registry, tables
from mdiff_core.contracts import Policies
from mdiff_core.errors import BadSetting, DriftExceeded
from mdiff_core.guidance import guided_velocity
from mdiff_core.jobs import UpdateJob
from mdiff_core.losses.flow_grpo import FlowGRPO, FlowGRPOOptions
from mdiff_core.losses.nft import NFT, NFTOptions
from mdiff_core.options import Choice, Options
from mdiff_core.sde import row_mean
from mdiff_core.settings import Model, Sampling, Train
from mdiff_core.sigmas import flow_match_sigmas
from mdiff_core.stages import update
from mdiff_core.train.state import empty_state
from mdiff_core.types import Cells, Condition, Conditioning, Needs, Transitions

FAMILY = "stand_in"
LATENT = (2, 4, 4)
WIDTH = 16


class NoOptions(Options):
    """Nothing to set."""


class Block(nn.Module):
    """Two projections, a norm and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.to_out(torch.tanh(self.to_q(self.norm(x))))


class Net(nn.Module):
    """Latent, time and text in, velocity out."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards = nn.Linear(math.prod(LATENT), WIDTH)
        self.text = nn.Linear(6, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.outwards = nn.Linear(WIDTH, math.prod(LATENT))

    @property
    def dtype(self) -> torch.dtype:
        return self.inwards.weight.dtype

    def forward(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        hidden = self.inwards(x.flatten(1)) + self.text(text) + self.time(sigma.to(x.dtype)[:, None])
        for block in self.blocks:
            hidden = block(hidden)
        return self.outwards(hidden).reshape(x.shape)


class StandIn:
    """A family whose model path is any name: the weights follow from it."""

    Options: ClassVar[type[Options]] = NoOptions
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_out")

    def __init__(self, options: NoOptions) -> None:
        self.options = options

    def digest(self, model: str) -> str:
        return hashlib.sha256(model.encode()).hexdigest()

    def transformer(self, model: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(model))
            net = Net()
        return net.to(device, dtype).eval().requires_grad_(False)

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        return list(transformer.get_submodule("blocks").children())

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        dtype = transformer.dtype
        return transformer(x.to(dtype), sigma, condition["text"].to(dtype)).float()


class WithOldOptions(FlowGRPOOptions):
    """Those of flow_grpo."""


class WithOld(FlowGRPO):
    """flow_grpo, and how far the live policy is from the old one."""

    Options = WithOldOptions

    @property
    def needs(self) -> Needs:
        return Needs(policies=super().needs.policies | {"old"})

    def __call__(self, policies: Policies, rows: Transitions) -> Cells:
        cells = super().__call__(policies, rows)
        gap = policies.live.transition(rows).mean - policies.frozen("old").transition(rows).mean
        return Cells(loss=cells.loss, metrics=dict(cells.metrics) | {"old_gap": row_mean(gap.detach().abs())})


class Dies:
    """A loss until its process is killed, as by a machine that goes away; without MDIFF_TEST_KILL, the loss."""

    def __call__(self, policies: Policies, rows: Any) -> Cells:
        self.options = self.options.model_copy(update={"calls": self.options.calls - 1})
        if self.options.calls < 0 and "MDIFF_TEST_KILL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(policies, rows)


class KilledOptions(FlowGRPOOptions):
    """When to die."""

    calls: int
    """Micro-batches to let pass."""


class Killed(Dies, FlowGRPO):
    """flow_grpo."""

    Options = KilledOptions


class KilledNFTOptions(NFTOptions):
    """When to die."""

    calls: int
    """Micro-batches to let pass."""


class KilledNFT(Dies, NFT):
    """nft."""

    Options = KilledNFTOptions


registry.REGISTRY["family"][FAMILY] = "tests.train_world:StandIn"
registry.REGISTRY["loss"] |= {
    "with_old": "tests.train_world:WithOld",
    "killed": "tests.train_world:Killed",
    "killed_nft": "tests.train_world:KilledNFT",
}

TRAIN = Train(lr=1e-3, precision="fp32", microbatch=4, updates_per_round=2, drift_limit=1.0)
"""The rows of every round are drawn from the base here, so that all rounds but the first drift."""
LORA = TRAIN.lora.model_copy(update={"rank": 2, "alpha": 4.0})


def job(
    train: Train | None = None, loss: Choice | None = None, model: Model | None = None, **changes: Any
) -> UpdateJob:
    """LoRA of rank 2 with flow_grpo on the stand-in, unless told otherwise; `changes` are of the train settings."""
    settings = (train or TRAIN).model_copy(update={"lora": LORA} | changes)
    return UpdateJob(
        model=model or Model(path="tiny", family=Choice(name=FAMILY), dtype="float32"),
        sampling=Sampling(
            width=32, height=32, steps=4, guidance=2.0, kernel=Choice(name="flow_sde", options={"eta": 0.7})
        ),
        loss=loss or Choice(name="flow_grpo", options={"clip": 1e-4, "beta": 0.04}),
        train=settings,
        seed=7,
        round=0,
    )


def of_round(one: UpdateJob, round: int) -> UpdateJob:
    return one.model_copy(update={"round": round})


def start(folder: Path, one: UpdateJob) -> tuple[Path, Path]:
    """Policy and state of step 0."""
    family = registry.make("family", one.model.family)
    policies.base_version(folder / "policy", base=one.model.path, base_digest=family.digest(one.model.path))
    empty_state(folder / "state")
    return folder / "policy", folder / "state"


def draw_pairs(
    folder: Path,
    one: UpdateJob,
    *,
    sizes: Sequence[int] = (13, 10),
    shape: Sequence[int] = LATENT,
    conditions: Mapping[str, Condition] | None = None,
    off_by: float = 0.0,
    bad_row: int = -1,
    transformer: nn.Module | None = None,
) -> Path:
    """Rows of one table per size, sampled from the base by the job's kernel; `off_by` is added to the log-probs.

    The advantage of `bad_row` is not a number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    conditions = conditions or texts()
    with tables.condition_writer(folder) as writer:
        for key, condition in conditions.items():
            writer.add(key, condition)
    family = registry.make("family", one.model.family)
    kernel = registry.make("kernel", one.sampling.kernel)
    net = transformer or family.transformer(one.model.path, torch.float32, torch.device("cpu"))
    sigmas = flow_match_sigmas(one.sampling.steps, 3.0)
    generator = torch.Generator().manual_seed(one.round)
    for number, size in enumerate(sizes):
        step = torch.arange(size) % (one.sampling.steps - 1)
        x, noise = (torch.randn(size, *shape, generator=generator) for _ in range(2))
        advantage = torch.randn(size, generator=generator)
        keys = [list(conditions)[i % (len(conditions) - 1)] for i in range(size)]
        guided = one.sampling.guidance > 1
        conditioning = Conditioning(
            positive=stacked([conditions[key] for key in keys]),
            negative=stacked([conditions["negative"]] * size) if guided else {},
            guidance=one.sampling.guidance,
        )
        with torch.no_grad():
            v = guided_velocity(family, net, x, sigmas[step], conditioning)
        moments = kernel.moments(x, v, sigmas[step], sigmas[step + 1], sigmas[1].expand(size))
        x_next = kernel.step(x, moments, noise)
        shared = {
            "sample": [f"g{i // 4}/{i % 4}" for i in range(size)],
            "group": [f"g{i // 4}" for i in range(size)],
            "advantage": torch.where(torch.arange(size) == bad_row, torch.nan, advantage).numpy(),
            "condition": keys,
            "negative": ["negative" if guided else ""] * size,
            "guidance": np.full(size, one.sampling.guidance, dtype=np.float32),
            "seed": np.arange(size, dtype=np.int64) + 1000 * number,
        }
        steps = {
            "step": step.numpy().astype(np.int32),
            "sigma": sigmas[step].numpy(),
            "sigma_next": sigmas[step + 1].numpy(),
            "sigma_ceiling": np.full(size, float(sigmas[1]), dtype=np.float32),
            "x": x.numpy(),
            "x_next": x_next.numpy(),
            "log_prob": kernel.log_prob(x_next, moments).numpy() + np.float32(off_by),
        }
        drawn = {"sigmas": sigmas.expand(size, -1).numpy()}
        kinds = {
            "transitions": steps,
            "clean": {"x0": x.numpy()},
            "samples": drawn | {"x0": x.numpy()},
            "preferences": drawn | {"better": x.numpy(), "worse": x_next.numpy()},
        }
        kind = registry.find("loss", one.loss.name).rows
        with tables.row_writer(folder, number, kind) as rows:
            rows.add_batch(shared | kinds[kind])
    return folder


def texts() -> dict[str, Condition]:
    """Three texts and the negative one, which comes last."""
    generator = torch.Generator().manual_seed(3)
    return {name: {"text": torch.randn(6, generator=generator)} for name in ("a", "b", "c", "negative")}


def stacked(conditions: Sequence[Condition]) -> Condition:
    return {name: torch.stack([one[name] for one in conditions]) for name in conditions[0]}


def rounds(folder: Path, one: UpdateJob, pairs: Sequence[Path]) -> list[dict[str, float]]:
    """Train on one pairs folder after the other, from step 0; leaves `policy-N` and `state-N`, returns the metrics."""
    policy, state = start(folder, one)
    found = []
    for number, rows in enumerate(pairs):
        out = folder / f"policy-{number}", folder / f"state-{number}"
        found.append(train(of_round(one, number), rows, policy, state, *out))
        policy, state = out
    return found


def train(one: UpdateJob, pairs: Path, policy: Path, state: Path, *out: Path) -> dict[str, float]:
    """The update stage, in this process."""
    return update.run(one, pairs, policy, state, *out)


def train_in_parallel(
    world: int,
    cases: Mapping[Path, tuple[UpdateJob, Sequence[Path]]],
    failing: Mapping[str, tuple[UpdateJob, Path]],
) -> None:
    """`rounds` of every case (by its folder) in `world` processes, all in one start of them, which takes long.

    Then the failing ones (by what every rank's message must have), from the first case's start.
    """
    sent = [(str(folder), one.to_json(), [str(path) for path in pairs]) for folder, (one, pairs) in cases.items()]
    refused = [(word, one.to_json(), str(pairs)) for word, (one, pairs) in failing.items()]
    together(world, _rounds, next(iter(cases)).parent, (sent, refused))


def _rounds(sent: Sequence[tuple[str, str, Sequence[str]]], refused: Sequence[tuple[str, str, str]]) -> None:
    first = Path(sent[0][0])
    for word, job_json, rows in refused:
        try:
            out = first / "refused", first / "refused"
            update.run(UpdateJob.from_json(job_json), Path(rows), first / "policy", first / "state", *out)
        except (DriftExceeded, BadSetting) as error:
            assert word in str(error), str(error)
        else:
            raise AssertionError(f"no error with {word}")
    for folder, job_json, pairs in sent:
        one, root = UpdateJob.from_json(job_json), Path(folder)
        policy, state = root / "policy", root / "state"
        for number, rows in enumerate(pairs):
            out = root / f"policy-{number}", root / f"state-{number}"
            update.run(of_round(one, number), Path(rows), policy, state, *out)
            policy, state = out


def together(world: int, work: Callable[..., None], folder: Path, arguments: tuple[Any, ...]) -> None:
    """Run `work` on every rank of a gloo group; whatever happens, no process is left behind."""
    store = folder / f"rendezvous-{len(list(folder.iterdir()))}"
    context = mp.spawn(_rank, (world, str(store), work, arguments), nprocs=world, join=False)
    try:
        while not context.join(timeout=120):
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _rank(rank: int, world: int, store: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        work(*arguments)
    finally:
        dist.destroy_process_group()


def weights(policy: Path, which: policies.Weights = "live") -> dict[str, Tensor]:
    return policies.tensors(policies.open_policy(policy), which)


def largest_gap(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
