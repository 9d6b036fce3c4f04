"""The alarm: a reward that rises while gold or diversity falls, and nothing else."""

import math
from typing import Any

import numpy as np
import pytest

from mdiff_core import diversity
from mdiff_core.observe import alarm, metrics


def evaluation(
    reward: float, gold: float | None = None, diverse: float | None = None, **changes: Any
) -> dict[str, Any]:
    """Of 100 samples with standard deviation 0.2: a mean's standard error is 0.02, that of a difference 0.028."""
    found: dict[str, Any] = {
        "kind": "evaluation",
        metrics.EVALUATED: reward,
        "evaluate/reward_std": 0.2,
        metrics.SAMPLES: 100.0,
    }
    if gold is not None:
        found |= {"evaluate/gold/clip/mean": gold, "evaluate/gold/clip/std": 0.2}
    if diverse is not None:
        found[metrics.DIVERSITY] = diverse
    return found | changes


@pytest.mark.parametrize(
    ("before", "after", "raised"),
    [
        (evaluation(0.5, 0.5, 0.2), evaluation(0.8, 0.6, 0.2), ""),
        (evaluation(0.5, 0.5, 0.2), evaluation(0.8, 0.3, 0.2), "gold 'clip' fell 0.5000 -> 0.3000"),
        (evaluation(0.5, 0.5, 0.2), evaluation(0.8, 0.5, 0.09), "diversity within groups fell 0.2000 -> 0.0900"),
        # falls without a rise, a fall and a rise within chance, a smaller loss of diversity than allowed
        (evaluation(0.5, 0.5, 0.2), evaluation(0.5, 0.3, 0.01), ""),
        (evaluation(0.5, 0.5, 0.2), evaluation(0.3, 0.3, 0.01), ""),
        (evaluation(0.5, 0.5, 0.2), evaluation(0.8, 0.45, 0.2), ""),
        (evaluation(0.5, 0.5, 0.2), evaluation(0.55, 0.1, 0.01), ""),
        (evaluation(0.5, 0.5, 0.2), evaluation(0.8, 0.5, 0.11), ""),
        # no gold, no groups of two
        (evaluation(0.5), evaluation(0.9), ""),
        (evaluation(0.5, diverse=math.nan), evaluation(0.9, diverse=math.nan), ""),
    ],
)
def test_when_it_is_raised(before: dict[str, Any], after: dict[str, Any], raised: str) -> None:
    found = alarm.reasons([before, evaluation(0.0, 9.0, 9.0), after], 0.5)
    assert bool(found) == bool(raised)
    if raised:
        assert raised in found[0] and "the reward rose 0.5000 -> 0.8000" in found[0]


def test_each_thing_that_fell_is_said() -> None:
    found = alarm.reasons([evaluation(0.5, 0.5, 0.2), evaluation(0.8, 0.3, 0.0)], 0.5)
    assert len(found) == 2


def test_one_evaluation_is_no_comparison() -> None:
    assert alarm.reasons([evaluation(0.5, 0.5, 0.2)], 0.5) == []


def test_diversity_of_equal_samples_is_0_and_grows_with_their_differences() -> None:
    made = np.random.default_rng(0)
    noise = [made.integers(0, 256, (1, 48, 40, 3), np.uint8) for _ in range(4)]
    flat = [np.full((1, 48, 40, 3), value, np.uint8) for value in (0, 255)]
    of = {name: [diversity.sketch(one) for one in some] for name, some in {"noise": noise, "flat": flat}.items()}
    assert diversity.within({"a": [of["noise"][0]] * 3}) == 0.0
    assert diversity.within({"a": of["flat"]}) == pytest.approx(1.0)
    # cells are means of 7.5 pixels, so noise between pictures is small beside a change of the whole picture
    assert 0 < diversity.within({"a": of["noise"]}) < 0.2
    assert diversity.within({"a": of["flat"], "b": [of["flat"][0]] * 2}) == pytest.approx(0.5)
    assert math.isnan(diversity.within({"a": of["flat"][:1]}))


def test_a_sketch_is_the_mean_colour_of_cells() -> None:
    frame = np.zeros((3, 32, 32, 3), np.uint8)
    frame[1, :2, :2] = (255, 0, 51)
    found = diversity.sketch(frame).reshape(diversity.SIDE, diversity.SIDE, 3)
    assert found[0, 0] == pytest.approx([1.0, 0.0, 0.2]) and found[0, 1].max() == 0 and found[1:].max() == 0
    assert diversity.sketch(np.full((1, 5, 7, 3), 255, np.uint8)) == pytest.approx(np.ones(16 * 16 * 3))
