"""Why engine and trainer disagree: the step is repeated with one thing at a time done otherwise, until they agree.

Every probe is the same number of forward passes on every rank, because FSDP gathers weights in each.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from mdiff_core.jobs import UpdateJob
from mdiff_core.policies import adapter_of
from mdiff_core.policy import ModelPolicy
from mdiff_core.train import lora
from mdiff_core.train.precision import COMPUTE
from mdiff_core.train.rows import Microbatch
from mdiff_core.train.shard import reduced
from mdiff_core.types import Conditioning, PolicyVersion, Transitions

TIMESTEPS = 1000
ALONE = 4
"""Rows that are repeated one by one."""
AGREES = 0.2
"""A probe names the cause when it leaves less than this share of the difference."""
ROUNDING = 5.0
"""A difference within this factor of what another number format makes is put down to that."""

TIMES: dict[str, Callable[[Transitions], Tensor]] = {
    "whole timesteps": lambda rows: (rows.sigma * TIMESTEPS).round() / TIMESTEPS,
    "timesteps cut to integers": lambda rows: (rows.sigma * TIMESTEPS).floor() / TIMESTEPS,
    "sigmas in bfloat16": lambda rows: rows.sigma.bfloat16().float(),
    "the next step's sigma": lambda rows: rows.sigma_next,
}
"""What an engine may tell its model instead of sigma."""

Velocity = Callable[[Transitions], Tensor]
"""The velocity of each row, [B, *latent] float32, under one supposition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A supposition about the engine."""

    cause: str
    """What to say when it holds: the thing, what the engine seems to do, what to look at."""
    velocity: Velocity
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    rows: int | None = None
    """Only so many of the micro-batch's rows."""


def cause_of(
    job: UpdateJob, policy: PolicyVersion, live: ModelPolicy, transformer: nn.Module, batch: Microbatch
) -> str:
    """The likeliest cause as a sentence, or nothing when no supposition makes the two agree. Collective."""
    found = [(_difference(live, probe, batch), probe.cause) for probe in probes(job, policy, live, transformer)]
    plain = Probe(cause="", velocity=partial(_velocity, live))
    now, alone = (_difference(live, replace(plain, rows=rows), batch) for rows in (None, ALONE))
    least, cause = min(found)
    reference = alone if cause.startswith("batch") else now
    if least < AGREES * reference:
        return f"{cause} (the mean difference falls from {reference:.3g} to {least:.3g})"
    return _number_format(job, live, batch, now)


def probes(job: UpdateJob, policy: PolicyVersion, live: ModelPolicy, transformer: nn.Module) -> Iterator[Probe]:
    """All suppositions that make sense for this job."""
    at = partial(_velocity, live)
    for name, time in TIMES.items():
        said = f"schedule: the engine tells its model {name}; compare how it makes timesteps of sigmas"
        yield Probe(cause=said, velocity=partial(_at_time, live, time))
    if job.sampling.guidance > 1:
        said = "conditioning: the engine {}; compare its guidance and negative text with the recorded ones"
        yield Probe(
            cause=said.format("draws without guidance"), velocity=lambda rows: at(rows, conditioning=_unguided(rows))
        )
        yield Probe(
            cause=said.format("exchanges both texts"), velocity=lambda rows: at(rows, conditioning=_exchanged(rows))
        )
    yield Probe(
        cause="conditioning: rows have their neighbours' texts; compare the keys of the conditions table with the prompts",
        velocity=lambda rows: at(rows, conditioning=_rolled(rows)),
    )
    yield Probe(
        cause="batch geometry: rows agree one by one; the model computes otherwise in larger batches, so compare attention "
        "backends, or set train.microbatch to the engine's batch",
        velocity=lambda rows: _one_by_one(live, rows),
        rows=ALONE,
    )
    if policy.kind == "lora":
        adapter = adapter_of(policy)
        factors = {
            "without the adapter": 0.0,
            f"with alpha {adapter.alpha:g} not divided by rank {adapter.rank}": float(adapter.rank),
        }
        factors |= (
            {f"as if alpha were rank (scale 1, not {adapter.scale:g})": 1 / adapter.scale} if adapter.scale != 1 else {}
        )
        for name, factor in factors.items():
            said = f"adapter scale: the engine draws {name}; look for the layers it adapted in its log"
            yield Probe(cause=said, velocity=at, around=partial(lora.scaled, transformer, factor))


def _velocity(
    live: ModelPolicy, rows: Transitions, *, sigma: Tensor | None = None, conditioning: Conditioning | None = None
) -> Tensor:
    return live.velocity(rows.x, rows.sigma if sigma is None else sigma, conditioning or rows.conditioning)


def _at_time(live: ModelPolicy, time: Callable[[Transitions], Tensor], rows: Transitions) -> Tensor:
    return _velocity(live, rows, sigma=time(rows))


@torch.no_grad()
def _difference(live: ModelPolicy, probe: Probe, batch: Microbatch) -> float:
    """Mean |log-prob under the supposition - of the engine| over the rows that have one, on all ranks."""
    assert isinstance(batch.rows, Transitions)
    rows = batch.rows if probe.rows is None else _some(batch.rows, probe.rows)
    weight = batch.weight[: len(rows.x)] if probe.rows is None else batch.weight[_first(len(batch.weight), probe.rows)]
    with probe.around():
        moments = live.moments(rows, probe.velocity(rows))
    counted = (moments.scale > 0) & (weight > 0)
    off = torch.where(counted, (live.log_prob(rows.x_next, moments) - rows.log_prob).abs(), 0.0).double()
    total, number = reduced(torch.stack([off.sum(), counted.sum().double()]), "sum")
    return total / max(number, 1)


def _number_format(job: UpdateJob, live: ModelPolicy, batch: Microbatch, now: float) -> str:
    """Whether the difference is what a coarser number format than the trainer's would make."""
    for dtype in (torch.bfloat16, torch.float16):
        if dtype == COMPUTE[job.train.precision] or (dtype, batch.weight.device.type) == (torch.float16, "cpu"):
            continue
        makes = _made_by(live, batch, dtype)
        if makes / ROUNDING < now < makes * ROUNDING:
            return (
                f"dtype: {dtype} in place of train.precision='{job.train.precision}' makes a difference of {makes:.3g} by "
                f"rounding, the one found is {now:.3g}; make the engine's precision and the trainer's the same"
            )
    return ""


@torch.no_grad()
def _made_by(live: ModelPolicy, batch: Microbatch, dtype: torch.dtype) -> float:
    """Mean |log-prob computed in `dtype` - as the trainer computes it|, on all ranks."""
    rows = batch.rows
    assert isinstance(rows, Transitions)
    plain = live.log_prob(rows.x_next, live.transition(rows))
    with torch.autocast(batch.weight.device.type, dtype):
        other = live.log_prob(rows.x_next, live.transition(rows))
    counted = (batch.weight > 0) & torch.isfinite(other - plain)
    off = torch.where(counted, (other - plain).abs(), 0.0).double()
    total, number = reduced(torch.stack([off.sum(), counted.sum().double()]), "sum")
    return total / max(number, 1)


def _one_by_one(live: ModelPolicy, rows: Transitions) -> Tensor:
    return torch.cat([_velocity(live, _some(rows, 1, start)) for start in range(len(rows.x))])


def _first(there: int, wanted: int, start: int = 0) -> list[int]:
    """Row numbers; from the beginning again where there are too few, so that every rank has as many."""
    return [(start + i) % there for i in range(wanted)]


def _some(rows: Transitions, wanted: int, start: int = 0) -> Transitions:
    chosen = _first(len(rows.x), wanted, start)
    both = rows.conditioning
    conditioning = Conditioning(
        positive={name: value[chosen] for name, value in both.positive.items()},
        negative={name: value[chosen] for name, value in both.negative.items()},
        guidance=both.guidance,
    )
    return replace(
        rows,
        x=rows.x[chosen],
        x_next=rows.x_next[chosen],
        sigma=rows.sigma[chosen],
        sigma_next=rows.sigma_next[chosen],
        sigma_ceiling=rows.sigma_ceiling[chosen],
        log_prob=rows.log_prob[chosen],
        advantage=rows.advantage[chosen],
        seed=rows.seed[chosen],
        conditioning=conditioning,
    )


def _unguided(rows: Transitions) -> Conditioning:
    return Conditioning(positive=rows.conditioning.positive, negative={}, guidance=1.0)


def _exchanged(rows: Transitions) -> Conditioning:
    both = rows.conditioning
    return Conditioning(positive=both.negative, negative=both.positive, guidance=both.guidance)


def _rolled(rows: Transitions) -> Conditioning:
    positive = {name: value.roll(1, 0) for name, value in rows.conditioning.positive.items()}
    return replace(rows.conditioning, positive=positive)
