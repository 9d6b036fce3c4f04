"""The rewards of a recipe in one process: a batch of samples to scores, asking again what fails."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdiff_core import prompts, registry
from mdiff_core.contracts import Reward
from mdiff_core.errors import MdiffError, PartlyFailed, RewardFailed, RewardUnavailable
from mdiff_core.options import Choice
from mdiff_core.settings import RewardTerm
from mdiff_core.settings import Score as Settings
from mdiff_core.types import Measured, Shot

LOG = logging.getLogger("mdiff.score")
PATIENCE_SECONDS = 60.0
"""Most that a server's own wish for a pause is heeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one call said of its samples."""

    values: list[float]
    reasons: list[str]
    """Empty where there is a value."""
    blames: bool = False
    """Whether one sample may have cost all others their scores."""
    unavailable: bool = False
    wait: float = 0.0
    """Seconds to leave the reward alone."""


class Panel:
    """Every reward of the recipe, made once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.rewards = made(settings.rewards)

    def measure(self, shots: Sequence[Shot]) -> Measured:
        """Each reward of each sample that it judges. With a groupwise reward, `shots` must be whole groups."""
        started = time.monotonic()
        asked = asked_of(shots, tuple(self.rewards))
        values = {name: [np.nan] * len(shots) for name in self.rewards}
        reasons = {name: [""] * len(shots) for name in self.rewards}
        retries, unavailable = dict.fromkeys(self.rewards, 0), set[str]()
        for name, reward in self.rewards.items():
            for rows in parts(shots, asked[name], reward.groupwise):
                answer, again = self._insist(name, reward, [shots[i] for i in rows])
                retries[name] += again
                if answer.unavailable:
                    unavailable.add(name)
                for i, value, reason in zip(rows, answer.values, answer.reasons, strict=True):
                    values[name][i], reasons[name][i] = value, reason
        return Measured(
            values=values,
            asked=asked,
            reasons=reasons,
            unavailable=frozenset(unavailable),
            retries=retries,
            seconds=time.monotonic() - started,
        )

    def _insist(self, name: str, reward: Reward, shots: Sequence[Shot]) -> tuple[_Answer, int]:
        """The last word on each sample, and how often the reward was asked again."""
        values, reasons = [np.nan] * len(shots), [""] * len(shots)

        def ask(rows: Sequence[int]) -> _Answer:
            answer = asked_once(reward, [shots[i] for i in rows])
            for i, value, reason in zip(rows, answer.values, answer.reasons, strict=True):
                values[i], reasons[i] = value, reason
            return answer

        everyone = left = list(range(len(shots)))
        answer, attempt = ask(left), 1
        while (left := [i for i in left if reasons[i]]) and attempt < self._settings.attempts:
            LOG.warning("reward '%s', attempt %d, %d samples: %s", name, attempt, len(left), reasons[left[0]])
            time.sleep(max(self._settings.backoff_s * 2 ** (attempt - 1), min(answer.wait, PATIENCE_SECONDS)))
            left = everyone if reward.groupwise else left
            answer, attempt = ask(left), attempt + 1
        if answer.blames and len(left) > 1 and not reward.groupwise:
            # one broken sample must not cost the others theirs
            answer = [ask([i]) for i in left][-1]
        return _Answer(values=values, reasons=reasons, unavailable=answer.unavailable), attempt - 1


def made(terms: Sequence[RewardTerm]) -> dict[str, Reward]:
    """The rewards by name."""
    return {term.name: registry.make("reward", Choice(name=term.name, options=term.options)) for term in terms}


def asked_of(shots: Sequence[Shot], names: Sequence[str]) -> dict[str, list[bool]]:
    """By reward: whether it judges each sample."""
    chosen = [set(prompts.judges(shot.prompt, names)) for shot in shots]
    return {name: [name in some for some in chosen] for name in names}


def nothing(shots: Sequence[Shot], names: Sequence[str], why: str, retries: int) -> Measured:
    """The word on a batch whose process never answered."""
    asked = asked_of(shots, names)
    return Measured(
        values={name: [np.nan] * len(shots) for name in names},
        asked=asked,
        reasons={name: [why if yes else "" for yes in asked[name]] for name in names},
        unavailable=frozenset(names),
        retries=dict.fromkeys(names, retries),
        seconds=0.0,
    )


def parts(shots: Sequence[Shot], asked: Sequence[bool], groupwise: bool) -> Iterator[list[int]]:
    """Rows of each call: all that are asked for, or those of one group."""
    rows = [i for i, yes in enumerate(asked) if yes]
    if not groupwise:
        if rows:
            yield rows
        return
    for group in dict.fromkeys(shots[i].group for i in rows):
        yield [i for i in rows if shots[i].group == group]


def asked_once(reward: Reward, shots: Sequence[Shot]) -> _Answer:
    """One call; whatever goes wrong, but a wrong setting, becomes a reason."""
    count = len(shots)
    try:
        values = numbers(called(reward, shots), count)
    except PartlyFailed as error:
        return _Answer(values=error.values, reasons=error.reasons, wait=error.retry_after)
    except RewardUnavailable as error:
        nothing, why = [np.nan] * count, [str(error)] * count
        return _Answer(values=nothing, reasons=why, unavailable=True, wait=error.retry_after)
    except RewardFailed as error:
        return _Answer(values=[np.nan] * count, reasons=[str(error)] * count, blames=True)
    reasons = ["" if np.isfinite(value) else f"{value} is not a finite number" for value in values]
    return _Answer(values=[value if np.isfinite(value) else np.nan for value in values], reasons=reasons)


def called(reward: Reward, shots: Sequence[Shot]) -> Any:
    """What the reward returns; RewardFailed for whatever its code raises."""
    try:
        return reward(np.stack([shot.frames for shot in shots]), [shot.prompt for shot in shots])
    except MdiffError:
        raise
    except Exception as error:
        raise RewardFailed(f"{type(error).__name__}: {error}") from error


def numbers(values: Any, count: int) -> list[float]:
    """One float a sample; RewardFailed for anything else."""
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype.kind not in "fiub":
        raise RewardFailed(f"returned {array.dtype} {array.shape} for {count} samples; it must return one number each")
    found: list[float] = array.astype(np.float64).tolist()
    return found
