from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mdiff_core.errors import BadSetting
from mdiff_core.windows import (
    All,
    AllOptions,
    Progressive,
    ProgressiveOptions,
    RandomWindow,
    Subset,
    SubsetOptions,
    WindowOptions,
)


def window(**options):
    return RandomWindow(WindowOptions(**options))


def progressive(**options):
    return Progressive(ProgressiveOptions(**options))


def subset(k, *steps):
    return Subset(SubsetOptions(k=k, steps=steps))


def even(counts, expected):
    """Chi-square below its mean + 5 standard deviations: a fair draw fails once in a million, and seeds are fixed."""
    chi2 = sum((count - expected) ** 2 / expected for count in counts)
    degrees = len(counts) - 1
    return chi2 < degrees + 5 * (2 * degrees) ** 0.5


def test_all_is_every_step():
    assert All(AllOptions()).draw(steps=4, seed=1, round=9) == (0, 1, 2, 3)


class TestRandomWindow:
    @given(lo=st.integers(0, 6), size=st.integers(1, 6), room=st.integers(0, 6), seed=st.integers(0, 2**31 - 1))
    def test_is_a_run_of_steps_within_its_range(self, lo, size, room, seed):
        hi = lo + size + room
        drawn = window(size=size, lo=lo, hi=hi).draw(steps=hi + 2, seed=seed, round=3)
        assert drawn == tuple(range(drawn[0], drawn[0] + size))
        assert lo <= drawn[0] and drawn[-1] < hi

    def test_start_is_uniform_with_both_ends_included(self):
        # Flow-GRPO-Fast: 3 steps of [0, 5) start at 0, 1 or 2.
        starts = Counter(window(size=3, lo=0, hi=5).draw(steps=10, seed=5, round=r)[0] for r in range(3000))
        assert sorted(starts) == [0, 1, 2]
        assert even(starts.values(), 1000)

    def test_range_defaults_to_the_schedule(self):
        starts = {window(size=2).draw(steps=4, seed=5, round=r)[0] for r in range(100)}
        assert starts == {0, 1, 2}

    def test_depends_on_seed_and_round_alone(self):
        def draws(seed):
            return [window(size=2, lo=0, hi=9).draw(steps=10, seed=seed, round=r) for r in range(20)]

        assert draws(1) == draws(1)
        assert draws(1) != draws(2)
        assert len(set(draws(1))) > 1

    @pytest.mark.parametrize(
        ("options", "steps", "said"),
        [
            ({"size": 4, "lo": 0, "hi": 3}, 10, r"options\.size: 4 .*\[0, 3\).* 3 at most"),
            ({"size": 5, "lo": 6}, 10, r"options\.size: 5 .*\[6, 10\).* 4 at most"),
            ({"size": 2, "lo": 0, "hi": 11}, 10, r"options\.hi: 11 .*10 at most"),
            ({"size": 1, "lo": 5, "hi": 5}, 10, r"options\.lo: 5 .*4 at most"),
            ({"size": 1, "lo": 10}, 10, r"options\.lo: 10 .*9 at most"),
        ],
    )
    def test_what_does_not_fit_is_refused_with_the_nearest_that_does(self, options, steps, said):
        for broken in (window(**options), progressive(**options)):
            with pytest.raises(BadSetting, match=said):
                broken.check(steps)
            with pytest.raises(BadSetting, match=said):
                broken.draw(steps=steps, seed=0, round=0)

    @pytest.mark.parametrize("options", [{"size": 0}, {"size": 1, "lo": -1}, {"size": 1, "hi": 0}])
    def test_senseless_numbers_are_refused_by_the_options(self, options):
        with pytest.raises(ValidationError):
            WindowOptions(**options)

    @pytest.mark.parametrize(("size", "lo", "hi"), [(3, 0, 3), (10, 0, 10), (1, 9, 10)])
    def test_a_window_as_wide_as_its_range_has_one_place(self, size, lo, hi):
        assert {window(size=size, lo=lo, hi=hi).draw(steps=10, seed=0, round=r)[0] for r in range(20)} == {lo}


class TestProgressive:
    def test_moves_every_n_rounds_and_stays_at_the_end(self):
        moving = progressive(size=2, lo=1, hi=5, every=2)
        starts = [moving.draw(steps=10, seed=0, round=r)[0] for r in range(10)]
        assert starts == [1, 1, 2, 2, 3, 3, 3, 3, 3, 3]

    def test_wraps_when_told_to(self):
        moving = progressive(size=2, hi=5, every=1, wrap=True)
        assert [moving.draw(steps=5, seed=0, round=r)[0] for r in range(6)] == [0, 1, 2, 3, 0, 1]

    @pytest.mark.parametrize("wrap", [False, True])
    def test_a_stride_that_does_not_divide_the_range_still_reaches_its_end(self, wrap):
        moving = progressive(size=1, hi=6, every=1, stride=2, wrap=wrap)
        starts = [moving.draw(steps=6, seed=0, round=r)[0] for r in range(5)]
        assert starts == [0, 2, 4, 5, 0 if wrap else 5]

    def test_a_window_as_wide_as_its_range_stays(self):
        moving = progressive(size=5, every=1, wrap=True)
        assert {moving.draw(steps=5, seed=0, round=r) for r in range(7)} == {(0, 1, 2, 3, 4)}


class TestSubset:
    def test_every_subset_is_equally_likely_and_ascending(self):
        steps = (7, 1, 4, 3)
        drawn = Counter(subset(2, *steps).draw(steps=8, seed=2, round=r) for r in range(3000))
        assert sorted(drawn) == sorted(combinations(sorted(steps), 2))
        assert even(drawn.values(), 500)

    def test_the_order_of_the_list_does_not_matter(self):
        for r in range(20):
            one, other = subset(2, 0, 3, 5), subset(2, 5, 0, 3)
            assert one.draw(steps=6, seed=1, round=r) == other.draw(steps=6, seed=1, round=r)

    def test_all_of_the_list(self):
        assert subset(3, 5, 0, 3).draw(steps=6, seed=1, round=0) == (0, 3, 5)

    @pytest.mark.parametrize(
        ("broken", "said"),
        [
            (subset(4, 0, 1, 2), r"options\.k: 4 .* 3 at most"),
            (subset(1, 0, 6), r"options\.steps: 6 .* 0 to 5"),
            (subset(1, -1, 2), r"options\.steps: -1 .* 0 to 5"),
            (subset(1, 2, 2, 3), r"options\.steps: 2 .* once"),
        ],
    )
    def test_what_cannot_be_drawn_is_refused(self, broken, said):
        with pytest.raises(BadSetting, match=said):
            broken.check(6)

    def test_an_empty_list_is_refused_by_the_options(self):
        with pytest.raises(ValidationError, match="steps"):
            SubsetOptions(k=1, steps=())
