"""Rewards over finished samples: batches in, one `Scored` per sample out."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from mdiff_core import advantages, registry
from mdiff_core.contracts import Reward
from mdiff_core.errors import BadSetting, MissingReward, RewardFailed
from mdiff_core.options import Choice
from mdiff_core.settings import Score
from mdiff_core.types import Scored, Trajectory

WAY_OUT = "repair the reward, or set score.on_missing=mask to train without such samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Scores with what else filters look at, aligned."""

    scored: Sequence[Scored]
    fingerprint: Sequence[str]
    """Digest of each sample's frames."""
    metadata: Sequence[Mapping[str, Any]]
    """Of each sample's prompt."""


def score(samples: Iterable[Trajectory], settings: Score) -> Sheet:
    """Every reward of every sample, and their combination; frames are held `settings.batch` samples at a time.

    A reward fails a sample by raising RewardFailed or by a number that is not finite. With `on_missing="raise"`
    that is a MissingReward; with `mask` the sample's total is NaN, `error` says why, and it neither trains nor
    counts in the baseline.
    """
    rewards: dict[str, Reward] = {
        term.name: registry.make("reward", Choice(name=term.name, options=term.options)) for term in settings.rewards
    }
    ids: list[tuple[str, str]] = []
    fingerprint: list[str] = []
    metadata: list[Mapping[str, Any]] = []
    values: dict[str, list[float]] = {name: [] for name in rewards}
    errors: list[str] = []
    for batch in _batched(samples, settings.batch):
        ids += [(sample.sample, sample.group) for sample in batch]
        fingerprint += [hashlib.sha256(np.ascontiguousarray(sample.frames).data).hexdigest() for sample in batch]
        metadata += [sample.prompt.metadata for sample in batch]
        whys = [""] * len(batch)
        for name, reward in rewards.items():
            found, failures = _measure(name, reward, batch, settings.on_missing)
            values[name] += found
            whys = ["; ".join(filter(None, pair)) for pair in zip(whys, failures, strict=True)]
        errors += whys
    if not ids:
        raise BadSetting("score: no samples to score; run the rollout that makes them first")
    return Sheet(scored=_scored(ids, values, errors, settings), fingerprint=fingerprint, metadata=metadata)


def metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean and std of the total and mean of each reward, over all samples that have them; how many lack one."""
    found = {f"reward/{name}/mean": _finite([row.rewards[name] for row in scored]) for name in scored[0].rewards}
    total = _finite([row.total for row in scored])
    summary = {name: float(values.mean()) for name, values in found.items() if values.size}
    if total.size:
        summary |= {"reward/mean": float(total.mean()), "reward/std": float(total.std())}
        summary |= {"reward/min": float(total.min()), "reward/max": float(total.max())}
    return summary | {"reward/missing": float(len(scored) - total.size)}


def _finite(values: Sequence[float]) -> np.ndarray:
    array = np.array(values, np.float64)
    finite: np.ndarray = array[np.isfinite(array)]
    return finite


def _batched(samples: Iterable[Trajectory], size: int) -> Iterator[list[Trajectory]]:
    stream = iter(samples)
    while batch := list(islice(stream, size)):
        yield batch


def _measure(name: str, reward: Reward, batch: Sequence[Trajectory], missing: str) -> tuple[list[float], list[str]]:
    """The reward of each sample, NaN where it failed, and why."""
    try:
        values = reward(np.stack([sample.frames for sample in batch]), [sample.prompt for sample in batch])
    except RewardFailed as error:
        if missing == "raise":
            first, last = batch[0].sample, batch[-1].sample
            raise RewardFailed(
                f"reward '{name}' failed on samples '{first}' to '{last}': {error}; {WAY_OUT}"
            ) from error
        if len(batch) == 1:
            return [np.nan], [f"{name}: {error}"]
        # one broken sample must not cost the others theirs
        alone = [_measure(name, reward, [sample], missing) for sample in batch]
        return [value for values, _ in alone for value in values], [why for _, whys in alone for why in whys]
    numbers = _numbers(name, values, len(batch))
    whys = ["" if np.isfinite(value) else f"{name}: {value} is not a finite number" for value in numbers]
    for sample, why in zip(batch, whys, strict=True):
        if why and missing == "raise":
            raise MissingReward(f"sample '{sample.sample}': reward {why}; {WAY_OUT}")
    return [value if np.isfinite(value) else np.nan for value in numbers], whys


def _numbers(name: str, values: np.ndarray, samples: int) -> list[float]:
    values = np.asarray(values)
    if values.shape != (samples,) or values.dtype.kind not in "fiub":
        raise RewardFailed(
            f"reward '{name}' returned {values.dtype} {values.shape} for {samples} samples; it must return one number each"
        )
    numbers: list[float] = values.astype(np.float64).tolist()
    return numbers


def _scored(
    ids: Sequence[tuple[str, str]], values: Mapping[str, Sequence[float]], errors: Sequence[str], settings: Score
) -> list[Scored]:
    names, weights = list(values), [term.weight for term in settings.rewards]
    table = np.array([values[name] for name in names], np.float64).T
    totals = advantages.total(table, weights, settings.combine)
    return [
        Scored(
            sample=sample,
            group=group,
            rewards=dict(zip(names, row.tolist(), strict=True)),
            total=float(total),
            error=error,
            kept=not error,
            in_baseline=not error,
            reason=f"missing: {error}" if error else "",
        )
        for (sample, group), row, total, error in zip(ids, table, totals, errors, strict=True)
    ]
