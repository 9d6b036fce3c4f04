"""From rewards to advantages, in float64, by group id. No result depends on the order of rows, to the last bit."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdiff_core.errors import MissingReward

EPSILON = 1e-4
"""Added to every standard deviation, as in Flow-GRPO."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Normalisation(Protocol):
    """`settings.Advantage`."""

    @property
    def mean(self) -> str:
        """group | batch: what is subtracted."""
        ...

    @property
    def std(self) -> str:
        """group | batch | none (Dr.GRPO): what is divided by."""
        ...

    @property
    def clamp(self) -> float:
        """Advantages are cut to +-clamp."""
        ...


def compute(
    rewards: ArrayLike,
    groups: Sequence[str],
    *,
    options: Normalisation,
    in_baseline: Sequence[bool] | Bools | None = None,
    on_missing: str = "raise",
    combine: str = "sum",
    weights: Sequence[float] | None = None,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Floats:
    """[N] advantages of `rewards` [N] or [N, R]: A = (r - mean)/(std + 1e-4), population std, cut to +-clamp.

    Exactly 0 where the rewards that a mean or std is taken over are all equal (so also in a group of one), and for
    rows outside the baseline, which are not trained. A non-finite reward raises MissingReward, or with
    `on_missing="mask"` gives its row 0 and leaves the others to the finite rewards; `skip` leaves out that reward alone,
    for prompts that not all rewards judge. `combine` is `sum` | `zscore` |
    `gdpo` (per-reward advantages, summed; arXiv 2601.05242); `names` (samples, rewards) is for the error message.
    """
    values, weight = columns(rewards, weights)
    missing = ~np.isfinite(values)
    if on_missing == "raise" and missing.any():
        refuse(values, missing, names)
    counts = np.ones(len(values), bool) if in_baseline is None else np.asarray(in_baseline, bool)
    index = np.unique(np.asarray(groups, dtype=str), return_inverse=True)[1]
    terms = values if combine == "gdpo" else total(values, weight, combine)[:, None]
    factors = weight if combine == "gdpo" else np.ones(1)
    advantage = np.zeros(len(values))
    for term, factor in zip(terms.T, factors, strict=True):
        advantage += factor * normalised(term, index, counts & np.isfinite(term), options)
    lost = missing.all(axis=1) if on_missing == "skip" else missing.any(axis=1)
    advantage[~counts | lost] = 0.0
    clipped: Floats = np.clip(advantage, -options.clamp, options.clamp)
    return clipped


def total(
    rewards: ArrayLike,
    weights: Sequence[float] | Floats | None = None,
    combine: str = "sum",
    asked: Bools | None = None,
) -> Floats:
    """[N] one number per sample from [N] or [N, R]: weighted raw rewards, or with `zscore` weighted batch z-scores.

    NaN where a component is missing; the others are normalised over the finite ones. Components outside `asked` [N, R] do
    not count. `gdpo` has no combined reward
    of its own, so that its total, for curves and filters, is the weighted sum.
    """
    values, weight = columns(rewards, weights)
    values = np.where(np.isfinite(values), values, np.nan)
    if combine == "zscore":
        values = np.stack([zscore(column) for column in values.T], axis=1)
    if asked is not None:
        values = np.where(asked, values, 0.0)
    summed: Floats = (values * weight).sum(axis=1)
    return summed


def zscore(values: Floats) -> Floats:
    """One reward normalised over the batch, as advantages are; NaN stays NaN."""
    batch, finite = np.zeros(len(values), np.intp), np.isfinite(values)
    return np.where(finite, scale(centred(values, batch, finite), values, batch, finite), np.nan)


def columns(rewards: ArrayLike, weights: Sequence[float] | Floats | None) -> tuple[Floats, Floats]:
    """Rewards as [N, R] and weights as [R], 1 when not given; float64."""
    values = np.asarray(rewards, np.float64)
    values = values[:, None] if values.ndim == 1 else values
    weight = np.ones(values.shape[1]) if weights is None else np.asarray(weights, np.float64)
    if weight.shape != (values.shape[1],):
        raise ValueError(f"weights: {weight.size} given for {values.shape[1]} rewards; give one each")
    return values, weight


def refuse(values: Floats, missing: Bools, names: tuple[Sequence[str], Sequence[str]] | None) -> None:
    """MissingReward for the first missing reward, with its sample and name."""
    row, column = (int(i) for i in np.argwhere(missing)[0])
    sample, reward = (names[0][row], names[1][column]) if names else (f"number {row}", f"number {column}")
    lacking = int(missing.any(axis=1).sum())
    raise MissingReward(
        f"reward '{reward}' of sample '{sample}' is {values[row, column]} ({lacking} of {len(values)} lack one); "
        f"repair the reward, or set score.on_missing=mask to train without those samples"
    )


def normalised(values: Floats, index: NDArray[np.intp], counts: Bools, options: Normalisation) -> Floats:
    """Advantages of one reward, unclamped; `counts` tells which rows make the mean and std, and only they get any."""
    batch = np.zeros_like(index)
    difference = centred(values, index if options.mean == "group" else batch, counts)
    if options.std == "none":
        return difference
    return scale(difference, values, index if options.std == "group" else batch, counts)


def centred(values: Floats, index: NDArray[np.intp], counts: Bools) -> Floats:
    """values - mean of their set, 0 in sets without spread and where `counts` is False."""
    mean, _, spread = statistics(values, index, counts)
    return np.where(counts & spread[index], values - mean[index], 0.0)


def scale(difference: Floats, values: Floats, index: NDArray[np.intp], counts: Bools) -> Floats:
    """difference / (std of their set + epsilon), 0 in sets without spread and where `counts` is False."""
    _, std, spread = statistics(values, index, counts)
    return np.where(counts & spread[index], difference / (std[index] + EPSILON), 0.0)


def statistics(values: Floats, index: NDArray[np.intp], counts: Bools) -> tuple[Floats, Floats, Bools]:
    """Mean, population std and whether any two values differ, per set.

    Sums run in sorted order, so that the order of rows cannot change a bit.
    """
    size = int(index.max(initial=-1)) + 1
    order = np.lexsort((values, index))
    order = order[counts[order]]
    sorted_values, sets = values[order], index[order]
    number = np.maximum(np.bincount(sets, minlength=size), 1)
    mean = np.bincount(sets, sorted_values, size) / number
    std = np.sqrt(np.bincount(sets, (sorted_values - mean[sets]) ** 2, size) / number)
    spread = np.zeros(size, bool)
    spread[sets[1:][(sets[1:] == sets[:-1]) & (sorted_values[1:] != sorted_values[:-1])]] = True
    return mean, std, spread
