"""Which samples train. A filter sees columns and gives a reason per sample; `apply` runs a recipe's list of them."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, JsonValue, model_validator

from mdiff_core import own_code
from mdiff_core.contracts import Filter
from mdiff_core.errors import BadSetting
from mdiff_core.options import Options
from mdiff_core.types import ScoreColumns, Scored


def apply(
    filters: Sequence[tuple[str, Filter]],
    scored: Sequence[Scored],
    *,
    fingerprint: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
) -> list[Scored]:
    """Run `filters` (name, filter) in order; a sample that one drops gets "name: why" and is not judged again.

    A later filter still sees a dropped sample that stayed in the baseline, because the group's spread includes it.
    """
    verdicts = list(scored)
    for name, judge in filters:
        seen = [i for i, row in enumerate(verdicts) if row.kept or row.in_baseline]
        table = ScoreColumns(
            sample=[verdicts[i].sample for i in seen],
            group=[verdicts[i].group for i in seen],
            total=np.array([verdicts[i].total for i in seen], np.float64),
            fingerprint=[fingerprint[i] for i in seen],
            metadata=[metadata[i] for i in seen],
        )
        for i, why in zip(seen, judge(table), strict=True):
            if why and verdicts[i].kept:
                verdicts[i] = replace(verdicts[i], kept=False, in_baseline=judge.in_baseline, reason=f"{name}: {why}")
    return verdicts


def enough(scored: Sequence[Scored], groups: int) -> list[Scored]:
    """Leave the kept groups beyond the first `groups` by id out of training: they were drawn in case filters dropped others."""
    surplus, why = set(groups_kept(scored)[groups:]), f"surplus: {groups} groups are enough (prompts.per_round)"
    return [replace(row, kept=False, reason=why) if row.kept and row.group in surplus else row for row in scored]


def groups_kept(scored: Sequence[Scored]) -> list[str]:
    """Ids, in order, of the groups of which a sample trains."""
    return sorted({row.group for row in scored if row.kept})


def rows_by(keys: Iterable[Hashable]) -> list[list[int]]:
    """Positions of the rows that share a key."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        found[key].append(i)
    return list(found.values())


def finite(table: ScoreColumns, rows: list[int]) -> np.ndarray:
    """Totals of `rows` that are not missing."""
    totals = table.total[rows]
    found: np.ndarray = totals[np.isfinite(totals)]
    return found


class NoSpreadOptions(Options):
    """When a group has nothing to tell apart."""

    at_most: float = Field(default=0.0, ge=0)
    """Largest difference between a group's best and worst that counts as no spread."""
    in_baseline: bool = True
    """Whether the group still counts in the batch's mean and std."""


class NoSpread:
    """Drops groups whose rewards are all equal: their advantages are 0."""

    Options = NoSpreadOptions

    def __init__(self, options: NoSpreadOptions) -> None:
        self.at_most = options.at_most
        self.in_baseline = options.in_baseline

    def __call__(self, table: ScoreColumns) -> list[str]:
        """The same reason for each sample of such a group."""
        reasons = [""] * len(table.sample)
        for rows in rows_by(table.group):
            totals = finite(table, rows)
            if not totals.size:
                why = "no sample of the group has a reward"
            elif totals.max() - totals.min() <= self.at_most:
                why = f"the group's rewards lie within {totals.max() - totals.min():g}"
            else:
                continue
            for i in rows:
                reasons[i] = why
        return reasons


class DuplicatesOptions(Options):
    """What becomes of equal pictures."""

    keep: Literal["one", "none"] = "one"
    """Whether one of them stays."""
    in_baseline: bool = False
    """Whether the dropped ones still count in their group's mean and std."""


class Duplicates:
    """Drops samples of a group whose frames are equal to the last bit."""

    Options = DuplicatesOptions

    def __init__(self, options: DuplicatesOptions) -> None:
        self.keep = options.keep
        self.in_baseline = options.in_baseline

    def __call__(self, table: ScoreColumns) -> list[str]:
        """The sample with the smallest id stays, wherever it stands."""
        reasons = [""] * len(table.sample)
        for rows in rows_by(zip(table.group, table.fingerprint, strict=True)):
            first, *others = sorted(rows, key=lambda i: table.sample[i])
            for i in others:
                reasons[i] = f"same frames as {table.sample[first]}"
            if others and self.keep == "none":
                reasons[first] = f"same frames as {table.sample[others[0]]}"
        return reasons


class ScoreRangeOptions(Options):
    """Which totals train."""

    low: float | None = None
    """Smallest that stays; none sets no limit."""
    high: float | None = None
    """Largest that stays; none sets no limit."""
    of: Literal["sample", "group"] = "sample"
    """sample: each by its own total; group: all of a group by its mean, to pass over prompts too hard or too easy."""
    in_baseline: bool = False
    """Whether the dropped ones still count in the mean and std."""

    @model_validator(mode="after")
    def _some_range(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("score_range without low and high keeps everything; give one of them")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"score_range low {self.low} is above high {self.high}, which keeps nothing; swap them")
        return self


class ScoreRange:
    """Drops samples, or groups, whose total is outside [low, high]; a missing total is left to `on_missing`."""

    Options = ScoreRangeOptions

    def __init__(self, options: ScoreRangeOptions) -> None:
        self.low = -np.inf if options.low is None else options.low
        self.high = np.inf if options.high is None else options.high
        self.of = options.of
        self.in_baseline = options.in_baseline

    def __call__(self, table: ScoreColumns) -> list[str]:
        """By sample, or the same reason for a whole group."""
        if self.of == "sample":
            return [self.judge("reward", float(total)) for total in table.total]
        reasons = [""] * len(table.sample)
        for rows in rows_by(table.group):
            totals = np.sort(finite(table, rows))
            why = self.judge("mean reward of the group", float(totals.mean())) if totals.size else ""
            for i in rows:
                reasons[i] = why
        return reasons

    def judge(self, what: str, score: float) -> str:
        """Why `score` is out of range; empty when it is not."""
        if score < self.low:
            return f"{what} {score:g} is below {self.low:g}"
        if score > self.high:
            return f"{what} {score:g} is above {self.high:g}"
        return ""


class MetadataOptions(Options):
    """Which prompts train."""

    key: str
    """Metadata field looked at."""
    values: tuple[JsonValue, ...] = (True,)
    """A sample stays when its field is one of these; numbers and booleans are told apart."""
    missing: Literal["keep", "drop"] = "drop"
    """What becomes of samples without the field."""
    in_baseline: bool = False
    """Whether the dropped ones still count in the mean and std."""


class Metadata:
    """Drops samples by a field of their prompt's metadata."""

    Options = MetadataOptions

    def __init__(self, options: MetadataOptions) -> None:
        self.options = options
        self.in_baseline = options.in_baseline

    def __call__(self, table: ScoreColumns) -> list[str]:
        """Each sample by its own metadata."""
        return [self.judge(metadata) for metadata in table.metadata]

    def judge(self, metadata: Mapping[str, Any]) -> str:
        """Why a sample with this metadata does not train; empty when it does."""
        key = self.options.key
        if key not in metadata:
            return f"no metadata field '{key}'" if self.options.missing == "drop" else ""
        value = metadata[key]
        # True == 1 in Python; in a prompt file they are different answers.
        kept = any(
            value == wanted and isinstance(value, bool) == isinstance(wanted, bool) for wanted in self.options.values
        )
        return "" if kept else f"metadata field '{key}' is {value!r}"


class PythonFilterOptions(Options):
    """Which function."""

    function: str
    """module:function, called as f(table, **arguments) with ScoreColumns; returns one reason a sample, empty to keep it. The module must
    be allowed by the environment variable MDIFF_MODULES."""
    arguments: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of the function."""
    in_baseline: bool = False
    """Whether the dropped ones still count in the mean and std."""


class PythonFilter:
    """Drops what a function of yours drops."""

    Options = PythonFilterOptions

    def __init__(self, options: PythonFilterOptions) -> None:
        self.options = options
        self.in_baseline = options.in_baseline

    def __call__(self, table: ScoreColumns) -> list[str]:
        """What the function says; BadSetting when that is not one text a sample."""
        found = own_code.function(self.options.function)(table, **self.options.arguments)
        if not isinstance(found, list | tuple) or len(found) != len(table.sample):
            raise BadSetting(
                f"score.filters: {self.options.function} must return a list of {len(table.sample)} reasons, and returned {str(found)[:60]}"
            )
        if not all(isinstance(why, str) for why in found):
            raise BadSetting(f"score.filters: {self.options.function} must return texts, empty to keep a sample")
        return list(found)
