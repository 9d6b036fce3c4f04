"""The optimizer steps of a round. A gradient is a sum over the rows of the whole step divided by their number."""

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mdiff_core import policies, registry
from mdiff_core.contracts import Family, Loss
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.jobs import UpdateJob
from mdiff_core.policy import TrainedPolicies
from mdiff_core.train import ema, optim, shard, state
from mdiff_core.train.drift import Drift
from mdiff_core.train.model import TrainedModel, build, own_weights
from mdiff_core.train.precision import GradScaler
from mdiff_core.train.rows import Conditions, Microbatch, Reader, Step, plan
from mdiff_core.types import Cells, PolicyVersion


@dataclass(slots=True)
class Sums:
    """Sums over the rows of a step, on the device; nothing waits for them until the step ends."""

    _totals: dict[str, Tensor] = field(default_factory=dict)
    _losses: list[tuple[Microbatch, Tensor]] = field(default_factory=list)

    def add(self, batch: Microbatch, cells: Cells) -> None:
        """Rows of weight 0 count as nothing."""
        counted = batch.weight > 0
        bad = counted & ~torch.isfinite(cells.loss)
        for name, value in {"loss": cells.loss, "_bad": bad, **cells.metrics}.items():
            total = torch.where(counted, value.detach().double(), 0.0).sum()
            self._totals[name] = self._totals[name] + total if name in self._totals else total
        self._losses.append((batch, bad))

    def means(self, rows: int) -> dict[str, float]:
        """Over the step's rows on all ranks; BadSetting names the rows whose loss is not finite. Collective."""
        found = dict(zip(self._totals, shard.reduced(torch.stack(list(self._totals.values())), "sum"), strict=True))
        if found.pop("_bad"):
            own = [
                name
                for batch, bad in self._losses
                for name, is_bad in zip(batch.names, bad.tolist(), strict=True)
                if is_bad
            ]
            names = [name for part in shard.from_all(own) for name in part]
            raise BadSetting(
                f"loss: not finite for {len(names)} of {rows} rows ({', '.join(names[:5])}); nothing was trained. "
                f"Look at those samples, lower train.lr or use a wider train.precision"
            )
        return {name: total / rows for name, total in found.items()}


class Trainer:
    """A model with its optimizer: `train` takes a round's rows, `save` leaves the policy and the state after it.

    Every method is collective: all ranks call it together, and it is the same for one rank and for many.
    """

    def __init__(self, job: UpdateJob, policy: PolicyVersion, folder: Path, mesh: DeviceMesh) -> None:
        """Continue `policy` with the train state in `folder`; BadSetting or BadArtifact when they do not fit the job."""
        family: Family = registry.make("family", job.model.family)
        self._loss: Loss = registry.make("loss", job.loss)
        self._job, self._policy, self._device = job, policy, shard.device_of(mesh)
        self._model: TrainedModel = build(job, family, policy, mesh, self._loss.needs.policies)
        self._policies = TrainedPolicies(
            self._model.transformer,
            family,
            registry.make("kernel", job.sampling.kernel),
            self._loss.needs.policies,
            live=self._model.live,
            frozen=self._model.frozen,
        )
        self._weights = list(self._model.parameters.values())
        self._optimizer = optim.adamw(self._weights, job.train)
        self._state = self._restored(folder)
        self._scaler = GradScaler.of(job.train.precision, self._state.scaler)
        self._average = self._averaged()

    def train(self, pairs: Path, round: int) -> dict[str, float]:
        """Take the optimizer steps of `round`; metrics are means over its steps, the drift is that of the first one."""
        started = time.monotonic()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._job = self._job.model_copy(update={"round": round})
        steps = plan(pairs, self._job, self._state.position, self._loss)
        reader = Reader(
            conditions=Conditions(pairs, self._device, exact=self._job.train.precision == "fp32"),
            device=self._device,
            size=self._job.train.microbatch,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
        )
        found = [self._step(reader, step, Drift() if step is steps[0] else None) for step in shown(steps, round)]
        self._state = replace(self._state, position=self._state.position + self._job.train.batch * len(steps))
        return (
            summary(found)
            | self._follow_old()
            | {
                "rows": float(sum(len(step.rows) for step in steps)),
                "optimizer_steps": float(len(steps)),
                "seconds": time.monotonic() - started,
                "peak_memory_gb": peak_memory(self._device) / 2**30,
            }
        )

    def save(self, out_policy: Path, out_state: Path) -> PolicyVersion:
        """Write the policy, then the state that belongs to it, on rank 0; the next `train` continues from them."""
        live = shard.gathered(self._model.parameters)
        averages: dict[Literal["ema", "old"], Mapping[str, Tensor]] = {}
        if self._job.train.ema:
            averages["ema"] = shard.gathered(self._average)
        if self._job.train.old:
            averages["old"] = shard.gathered(self._model.copies["old"])
        made = self._write(out_policy, live, averages) if dist.get_rank() == 0 else None
        self._policy = shard.from_all(made)[0]
        self._state = replace(self._state, policy=self._policy.checksum, scaler=self._scaler.saved())
        tensors = optim.moments_of(self._optimizer, self._model.parameters)
        state.write(out_state, self._state, tensors | self._start())
        dist.barrier()
        return self._policy

    def _step(self, reader: Reader, step: Step, drift: Drift | None) -> dict[str, float]:
        """One optimizer step; `drift` is given on the round's first."""
        sums = Sums()
        share = reader.world * self._scaler.scale / len(step.rows)  # FSDP averages over ranks, a sum is wanted
        for batch in reader.microbatches(step):
            shard.sync_gradients(self._model.transformer, batch.last or self._job.train.method == "full")
            self._policies.live.density = None
            cells = self._loss(self._policies, batch.rows)
            torch.autograd.backward(share * (cells.loss * batch.weight).sum())
            sums.add(batch, cells)
            if drift is not None:
                drift.add(self._policies.live, batch)
        metrics = sums.means(len(step.rows))
        if drift is not None:
            metrics |= drift.finish(self._job, self._policy, self._policies.live, self._model.transformer)
        return metrics | self._apply()

    def _apply(self) -> dict[str, float]:
        """Clip, step, average; or skip, when fp16 gradients overflowed."""
        scale, taken = self._scaler.scale, self._state.steps
        norm = optim.gradient_norm(self._weights).item() / scale
        finite = math.isfinite(norm)
        if not finite and not self._scaler.enabled:
            raise BadSetting(
                f"train: gradient norm is {norm} at optimizer step {taken} though every loss is finite; "
                f"lower train.lr or use a wider train.precision than '{self._job.train.precision}'"
            )
        self._scaler.settle(finite)
        rate = optim.learning_rate(self._job.train, taken)
        if finite:
            optim.scale_gradients(self._weights, min(1.0, self._job.train.clip_norm / (norm + 1e-6)) / scale)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            if self._job.train.ema and ema.is_due(self._job.train.ema, taken):
                ema.follow(self._average, self._model.parameters, ema.decay_at(self._job.train.ema, taken))
            self._state = replace(self._state, steps=taken + 1)
        self._optimizer.zero_grad(set_to_none=True)
        return {"lr": rate, "skipped_steps": float(not finite)} | ({"grad_norm": norm} if finite else {})

    def _restored(self, folder: Path) -> state.TrainState:
        """Read the state and give the optimizer (and the start policy) its tensors."""
        saved = state.read(folder)
        if saved.policy not in ("", self._policy.checksum):
            raise BadArtifact(
                f"{folder}: this train state belongs to the policy with checksum {saved.policy[:12]}, not to "
                f"{self._policy.version} ({self._policy.checksum[:12]}); give the two of one update, or an empty state"
            )
        stored = state.names(folder, saved)
        wanted = {
            f"{moment}.{name}": torch.zeros_like(value.detach())
            for moment in optim.MOMENTS
            for name, value in self._model.parameters.items()
            if f"{moment}.{name}" in stored
        }
        state.load(folder, saved, wanted | (self._start() if saved.policy else {}))
        optim.restore_moments(self._optimizer, self._model.parameters, wanted, saved.steps)
        return saved

    def _follow_old(self) -> dict[str, float]:
        """Move the old policy, if there is one, after the round; by how much it stayed is told when it is an average."""
        if "old" not in self._model.copies:
            return {}
        decay = ema.old_decay_at(self._job.train.old, self._state.steps)
        ema.follow(self._model.copies["old"], self._model.parameters, decay)
        return {"old_decay": decay} if self._job.train.old else {}

    def _start(self) -> dict[str, Tensor]:
        """The frozen start policy's weights by their name in the state; nothing when the loss does not need them."""
        return {f"start.{name}": value.detach() for name, value in self._model.copies.get("start", {}).items()}

    def _averaged(self) -> Mapping[str, Tensor]:
        """The EMA as the policy holds it; one that starts now is the weights."""
        if "ema" in self._model.copies:
            return self._model.copies["ema"]
        if not self._job.train.ema:
            return {}
        found = own_weights(self._job, self._policy, "ema")
        if not found:
            return ema.copies(self._model.parameters)
        return {name: shard.like(found[name], value) for name, value in self._model.parameters.items()}

    def _write(self, folder: Path, live: Mapping[str, Tensor], averages: policies.Averages) -> PolicyVersion:
        version, train = f"{self._job.round + 1:05d}", self._job.train
        if train.method == "full":
            return policies.write_full(folder, tensors=live, averages=averages, parent=self._policy, version=version)
        return policies.write_lora(
            folder,
            tensors=live,
            averages=averages,
            rank=train.lora.rank,
            alpha=train.lora.alpha,
            targets=self._model.targets,
            parent=self._policy,
            version=version,
        )


def summary(found: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps that have the metric; skipped steps are counted, the last learning rate is kept."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    values = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
    means = {name: math.fsum(some) / len(some) for name, some in values.items()}
    return means | ({"lr": found[-1]["lr"], "skipped_steps": math.fsum(values["skipped_steps"])} if found else {})


def shown(steps: list[Step], round: int) -> Iterator[Step]:
    """The steps, with a progress bar on rank 0's terminal if there is one."""
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        yield from steps
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(steps, description=f"update, round {round}", console=Console(stderr=True), transient=True)


def peak_memory(device: torch.device) -> float:
    """Bytes: of tensors on the GPU since `train` began, or of the whole process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
