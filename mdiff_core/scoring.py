"""Rewards over finished samples: batches in, one `Scored` per sample out, and what to do about scores that are missing."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mdiff_core import advantages, filters, registry
from mdiff_core.errors import BadArtifact, BadSetting, MissingReward, RewardFailed, RewardUnavailable
from mdiff_core.panel import Panel
from mdiff_core.settings import Score
from mdiff_core.types import Measured, Scored, Shot, Trajectory

WAY_OUT = "repair the reward, or set score.on_missing=mask to train without such samples"


class Measurer(Protocol):
    """Scores batches, here or elsewhere; batches come back in their order."""

    def stream(self, batches: Iterable[Sequence[Shot]]) -> Iterator[tuple[Sequence[Shot], Measured]]:
        """Each batch with what the rewards said of it."""
        ...


class Here:
    """The rewards in this process, one batch after another."""

    def __init__(self, settings: Score) -> None:
        self._panel = Panel(settings)

    def stream(self, batches: Iterable[Sequence[Shot]]) -> Iterator[tuple[Sequence[Shot], Measured]]:
        """Each batch with what the rewards said of it."""
        for batch in batches:
            yield batch, self._panel.measure(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Scores with what else filters look at, aligned."""

    scored: Sequence[Scored]
    fingerprint: Sequence[str]
    """Digest of each sample's frames."""
    metadata: Sequence[Mapping[str, Any]]
    """Of each sample's prompt."""
    metrics: Mapping[str, float]
    """`reward/*` of these samples."""


def score(samples: Iterable[Trajectory], settings: Score, measurer: Measurer | None = None) -> Sheet:
    """Every reward of every sample, and their combination; frames are held `settings.batch` samples at a time.

    A reward fails a sample by raising or by a number that is not finite, and is asked again. What fails at last is, with
    `on_missing="raise"`, a MissingReward, or RewardUnavailable where a server is at fault; with `mask` the sample's total is
    NaN, `error` says why, and it neither trains nor counts in the baseline. RewardFailed when a reward says nothing any more.
    """
    tally = Tally(settings)
    for batch, measured in (measurer or Here(settings)).stream(cut(map(shot, samples), settings)):
        tally.add(batch, measured)
    return tally.sheet()


def judged(sheet: Sheet, settings: Score) -> list[Scored]:
    """What the recipe's filters leave of these samples."""
    judges = [(choice.name, registry.make("filter", choice)) for choice in settings.filters]
    return filters.apply(judges, sheet.scored, fingerprint=sheet.fingerprint, metadata=sheet.metadata)


def shot(trajectory: Trajectory) -> Shot:
    """What the rewards see of it."""
    return Shot(sample=trajectory.sample, group=trajectory.group, prompt=trajectory.prompt, frames=trajectory.frames)


def digest(frames: np.ndarray) -> str:
    """sha256 of the pixels."""
    return hashlib.sha256(np.ascontiguousarray(frames).data).hexdigest()


class Batches:
    """Cuts a stream of samples into batches of `settings.batch`; where a reward compares a group's samples, of whole groups and at
    least as many."""

    def __init__(self, settings: Score) -> None:
        self._size = settings.batch
        self._whole = any(reward.groupwise for reward in Panel(settings).rewards.values())
        self._batch: list[Shot] = []
        self._groups, self._last = set[str](), ""

    def add(self, one: Shot) -> list[Shot]:
        """The batch that ends before this sample, or nothing; BadArtifact when a group that must be whole is in pieces."""
        together = one.group == self._last
        if self._whole and one.group in self._groups and not together:
            raise BadArtifact(f"trajectories: group '{one.group}' is not in one piece; run the rollout again")
        full = len(self._batch) >= self._size and not (self._whole and together)
        done = self.rest() if full else []
        self._groups.add(one.group)
        self._last = one.group
        self._batch.append(one)
        return done

    def rest(self) -> list[Shot]:
        """What is left."""
        done, self._batch = self._batch, []
        return done


def cut(shots: Iterable[Shot], settings: Score) -> Iterator[list[Shot]]:
    """All batches of a stream."""
    batches = Batches(settings)
    for one in shots:
        if done := batches.add(one):
            yield done
    if done := batches.rest():
        yield done


class Tally:
    """Collects what the rewards said, batch by batch, and stops when it is hopeless."""

    def __init__(self, settings: Score) -> None:
        self._settings = settings
        self._names = [term.name for term in settings.rewards]
        self._shots: list[tuple[str, str, Mapping[str, Any], str]] = []
        self._values: dict[str, list[float]] = {name: [] for name in self._names}
        self._asked: dict[str, list[bool]] = {name: [] for name in self._names}
        self._reasons: dict[str, list[str]] = {name: [] for name in self._names}
        self._silent, self._retries = Counter[str](), Counter[str]()
        self._seconds = 0.0

    def add(self, batch: Sequence[Shot], measured: Measured) -> None:
        """Take a batch's scores; see `score` for what it raises."""
        self._break(measured)
        if self._settings.on_missing == "raise":
            refuse(batch, measured)
        for one in batch:
            self._shots.append((one.sample, one.group, one.prompt.metadata, digest(one.frames)))
        for name in self._names:
            self._values[name] += measured.values[name]
            self._asked[name] += measured.asked[name]
            self._reasons[name] += measured.reasons[name]
        self._retries.update(measured.retries)
        self._seconds += measured.seconds

    def sheet(self) -> Sheet:
        """All that was added; BadSetting when nothing was."""
        if not self._shots:
            raise BadSetting("score: no samples to score; run the rollout that makes them first")
        scored = self._scored()
        return Sheet(
            scored=scored,
            fingerprint=[fingerprint for *_, fingerprint in self._shots],
            metadata=[metadata for _, _, metadata, _ in self._shots],
            metrics=summary(scored) | self._counts(),
        )

    def _break(self, measured: Measured) -> None:
        """Count batches from which a reward got nothing; RewardFailed at the limit."""
        for name in self._names:
            failed = [
                reason for reason, asked in zip(measured.reasons[name], measured.asked[name], strict=True) if asked
            ]
            if not failed:
                continue
            self._silent[name] = self._silent[name] + 1 if all(failed) else 0
            if self._settings.breaker and self._silent[name] >= self._settings.breaker:
                kind = RewardUnavailable if name in measured.unavailable else RewardFailed
                raise kind(
                    f"reward '{name}' gave no score in {self._silent[name]} batches in a row, so the round stops early "
                    f"(score.breaker); the last reason: {failed[-1]}"
                )

    def _counts(self) -> dict[str, float]:
        failed = {name: sum(map(bool, reasons)) for name, reasons in self._reasons.items()}
        counts = {f"reward/{name}/missing": float(number) for name, number in failed.items() if number}
        again = {f"reward/{name}/retries": float(number) for name, number in self._retries.items() if number}
        return counts | again | {"reward/seconds": self._seconds}

    def _scored(self) -> list[Scored]:
        table = np.array([self._values[name] for name in self._names], np.float64).T
        asked = np.array([self._asked[name] for name in self._names]).T
        weights = [term.weight for term in self._settings.rewards]
        totals = advantages.total(table, weights, self._settings.combine, asked)
        whys = [
            "; ".join(f"{name}: {reason}" for name, reason in zip(self._names, reasons, strict=True) if reason)
            for reasons in zip(*self._reasons.values(), strict=True)
        ]
        return [
            Scored(
                sample=sample,
                group=group,
                rewards=dict(zip(self._names, row.tolist(), strict=True)),
                total=float(total),
                error=error,
                kept=not error,
                in_baseline=not error,
                reason=f"missing: {error}" if error else "",
            )
            for (sample, group, _, _), row, total, error in zip(self._shots, table, totals, whys, strict=True)
        ]


def refuse(batch: Sequence[Shot], measured: Measured) -> None:
    """MissingReward, or RewardUnavailable, for the first score that a batch lacks."""
    for name, reasons in measured.reasons.items():
        lacking = [(one.sample, reason) for one, reason in zip(batch, reasons, strict=True) if reason]
        if lacking:
            (sample, reason), others = lacking[0], f" and {len(lacking) - 1} others" if len(lacking) > 1 else ""
            message = f"sample '{sample}'{others}: reward {name}: {reason}; {WAY_OUT}"
            raise RewardUnavailable(message) if name in measured.unavailable else MissingReward(message)


def summary(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean and std of the total and mean of each reward, over all samples that have them; how many lack one."""
    found = {f"reward/{name}/mean": finite([row.rewards[name] for row in scored]) for name in scored[0].rewards}
    total = finite([row.total for row in scored])
    means = {name: float(values.mean()) for name, values in found.items() if values.size}
    if total.size:
        means |= {"reward/mean": float(total.mean()), "reward/std": float(total.std())}
        means |= {"reward/min": float(total.min()), "reward/max": float(total.max())}
    return means | {"reward/missing": float(len(scored) - total.size)}


def finite(values: Sequence[float]) -> np.ndarray:
    """Those that are finite, float64."""
    array = np.array(values, np.float64)
    found: np.ndarray = array[np.isfinite(array)]
    return found
