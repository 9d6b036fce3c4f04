import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdiff_core.advantages import compute, total
from mdiff_core.errors import MissingReward
from mdiff_core.settings import Advantage

NEARLY_ONE = 0.99980004
"""(1 - .5) / (.5 + 1e-4), to the eight digits it is published with."""
EIGHT_DIGITS = 5e-9
GROUPS = ["a", "a", "b", "b", "c", "c"]
REWARDS = [0.0, 1.0, 0.0, 1.0, 10.0, 11.0]
EVERY_OPTION = [(mean, std) for mean in ("group", "batch") for std in ("group", "batch", "none")]


def options(mean="group", std="group", clamp=1e9):
    return Advantage(mean=mean, std=std, clamp=clamp)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=EIGHT_DIGITS)


batches = st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-10, 10)), min_size=1, max_size=24)


def plain(rewards, groups, mean, std):
    """The formula as it is written, one row at a time."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        own = np.array([r for r, g in zip(rewards, groups, strict=True) if g == group])
        centre = own if mean == "group" else np.array(rewards)
        width = own if std == "group" else np.array(rewards)
        divisor = 1.0 if std == "none" else width.std() + 1e-4
        out.append((reward - centre.mean()) / divisor)
    return np.array(out)


class TestGroupMeanAndStd:
    def test_two_rewards(self):
        got = compute([0.0, 1.0], ["g", "g"], options=options())
        assert got.dtype == np.float64
        close(got, [-NEARLY_ONE, NEARLY_ONE])

    def test_groups_are_ids_though_their_prompts_may_read_the_same(self):
        close(compute(REWARDS, GROUPS, options=options()), [-NEARLY_ONE, NEARLY_ONE] * 3)

    def test_groups_need_not_be_neighbours(self):
        mixed = [0, 2, 4, 1, 3, 5]
        got = compute([REWARDS[i] for i in mixed], [GROUPS[i] for i in mixed], options=options())
        close(got, [-NEARLY_ONE] * 3 + [NEARLY_ONE] * 3)

    def test_group_of_one_gets_zero(self):
        assert compute([3.7], ["g"], options=options()) == [0.0]

    @given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 40))
    def test_equal_rewards_get_exactly_zero(self, reward, size):
        assert not compute([reward] * size, ["g"] * size, options=options()).any()

    @pytest.mark.parametrize(("mean", "std"), EVERY_OPTION)
    def test_equal_float32_rewards_get_exactly_zero(self, mean, std):
        # Their naive mean in float32 or float64 is not the value itself.
        rewards = np.array([0.8988382879679935] * 12, np.float32)
        assert not compute(rewards, ["g"] * 12, options=options(mean, std)).any()

    def test_an_equal_group_gets_exactly_zero_beside_others(self):
        rewards = [*np.array([0.8988382879679935] * 12, np.float32), 0.0, 1.0]
        for std in ("group", "batch", "none"):
            got = compute(rewards, ["g"] * 12 + ["h"] * 2, options=options(std=std))
            assert not got[:12].any()
            assert got[12] < 0 < got[13]


class TestOptions:
    def test_batch_std(self):
        close(
            compute(REWARDS, GROUPS, options=options(std="batch")), np.tile([-0.5, 0.5], 3) / (np.std(REWARDS) + 1e-4)
        )

    def test_no_std_divides_by_nothing(self):
        close(compute(REWARDS, GROUPS, options=options(std="none")), np.tile([-0.5, 0.5], 3))

    def test_batch_mean(self):
        wanted = np.array(REWARDS) - np.mean(REWARDS)
        close(compute(REWARDS, GROUPS, options=options("batch", "none")), wanted)
        close(compute(REWARDS, GROUPS, options=options("batch", "batch")), wanted / (np.std(REWARDS) + 1e-4))

    def test_batch_mean_gives_single_samples_a_signal(self):
        got = compute([0.0, 1.0], ["a", "b"], options=options("batch", "batch"))
        close(got, [-NEARLY_ONE, NEARLY_ONE])

    def test_a_group_without_spread_is_not_blown_up_by_its_own_std(self):
        got = compute([1.0, 1.0, 0.0, 5.0], ["a", "a", "b", "b"], options=options("batch", "group"))
        assert not got[:2].any()

    def test_clamp(self):
        rewards = [0.0] * 99 + [1.0]
        got = compute(rewards, ["g"] * 100, options=options(clamp=5.0))
        assert got.max() == 5.0
        assert got.min() == pytest.approx(-0.1, abs=1e-2)

    def test_clamp_cuts_both_ways(self):
        assert compute([0.0] + [1.0] * 99, ["g"] * 100, options=options(clamp=5.0)).min() == -5.0

    @pytest.mark.parametrize(("mean", "std"), EVERY_OPTION)
    @given(batch=batches)
    def test_is_the_formula(self, mean, std, batch):
        groups, rewards = zip(*batch, strict=True)
        wanted = plain(rewards, groups, mean, std)
        if "group" in (mean, std):
            flat = [len({r for g, r in batch if g == group}) == 1 for group in groups]
            wanted = np.where(flat, 0.0, wanted)
        if len(set(rewards)) == 1:
            wanted = np.zeros(len(rewards))
        got = compute(rewards, groups, options=options(mean, std))
        # Rounding in a mean of values up to 10 is 1e-15, and dividing by at least 1e-4 makes it 1e-11.
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize(("mean", "std"), EVERY_OPTION)
    @given(batch=batches, data=st.data())
    def test_order_of_rows_changes_no_bit(self, mean, std, batch, data):
        order = data.draw(st.permutations(range(len(batch))))
        groups, rewards = zip(*batch, strict=True)
        before = compute(rewards, groups, options=options(mean, std))
        after = compute([rewards[i] for i in order], [groups[i] for i in order], options=options(mean, std))
        assert np.array_equal(before[list(order)], after)

    @given(batch=batches)
    def test_names_of_groups_change_no_bit(self, batch):
        groups, rewards = zip(*batch, strict=True)
        renamed = [{"a": "zz", "b": "y", "c": "10", "d": "9"}[group] for group in groups]
        before = compute(rewards, groups, options=options(std="batch"))
        assert np.array_equal(before, compute(rewards, renamed, options=options(std="batch")))

    @given(batch=batches)
    def test_group_advantages_sum_to_zero(self, batch):
        groups, rewards = zip(*batch, strict=True)
        got = compute(rewards, groups, options=options(std="batch"))
        for group in set(groups):
            assert got[[g == group for g in groups]].sum() == pytest.approx(0, abs=1e-9)

    def test_no_rows(self):
        assert compute([], [], options=options()).shape == (0,)


class TestBaseline:
    def test_a_row_outside_moves_neither_mean_nor_std_and_gets_zero(self):
        got = compute([0.0, 1.0, 50.0], ["g"] * 3, options=options(), in_baseline=[True, True, False])
        close(got, [-NEARLY_ONE, NEARLY_ONE, 0.0])

    def test_a_group_left_with_one_row_gets_zero(self):
        got = compute([0.0, 1.0], ["g"] * 2, options=options(), in_baseline=[True, False])
        assert not got.any()

    def test_batch_std_ignores_rows_outside(self):
        got = compute([0.0, 1.0, 9.0], ["a", "a", "b"], options=options(std="batch"), in_baseline=[True, True, False])
        close(got, [-NEARLY_ONE, NEARLY_ONE, 0.0])


class TestMissing:
    @pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
    def test_raise_names_sample_and_reward(self, hole):
        rewards = [[1.0, 2.0], [3.0, hole], [0.0, 1.0]]
        names = (["g/0", "g/1", "g/2"], ["ocr", "clip"])
        with pytest.raises(MissingReward, match=r"'clip' of sample 'g/1'.*score\.on_missing=mask"):
            compute(rewards, ["g"] * 3, options=options(), names=names)

    def test_raise_without_names_counts(self):
        with pytest.raises(MissingReward, match="sample 'number 1'"):
            compute([1.0, math.nan], ["g"] * 2, options=options())

    @pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
    def test_mask_leaves_the_others_to_the_finite_mean(self, hole):
        got = compute([0.0, hole, 1.0], ["g"] * 3, options=options(), on_missing="mask")
        close(got, [-NEARLY_ONE, 0.0, NEARLY_ONE])

    @pytest.mark.parametrize("combine", ["sum", "zscore", "gdpo"])
    def test_mask_with_several_rewards_zeroes_the_row(self, combine):
        rewards = [[0.0, 1.0], [5.0, math.nan], [1.0, 0.0], [2.0, 3.0]]
        got = compute(rewards, ["g"] * 4, options=options(), on_missing="mask", combine=combine)
        assert got[1] == 0.0
        assert np.isfinite(got).all() and got[3] > 0

    def test_a_group_without_any_reward_gets_zero(self):
        got = compute([math.nan, math.nan, 0.0, 1.0], ["a", "a", "b", "b"], options=options(), on_missing="mask")
        close(got, [0.0, 0.0, -NEARLY_ONE, NEARLY_ONE])


class TestSeveralRewards:
    REWARDS = ((0.0, 10.0), (1.0, 30.0), (1.0, 20.0), (4.0, 20.0))
    GROUPS = ("a", "a", "b", "b")

    def test_sum_is_of_weighted_raw_values(self):
        close(total(self.REWARDS, [1.0, 0.1]), [1.0, 4.0, 3.0, 6.0])
        got = compute(self.REWARDS, self.GROUPS, options=options(), weights=[1.0, 0.1])
        close(got, compute([1.0, 4.0, 3.0, 6.0], self.GROUPS, options=options()))

    def test_zscore_normalises_each_over_the_batch(self):
        one, two = np.array(self.REWARDS).T
        wanted = 2 * (one - 1.5) / (one.std() + 1e-4) - (two - 20) / (two.std() + 1e-4)
        close(total(self.REWARDS, [2.0, -1.0], "zscore"), wanted)
        got = compute(self.REWARDS, self.GROUPS, options=options(), weights=[2.0, -1.0], combine="zscore")
        close(got, compute(wanted, self.GROUPS, options=options()))

    def test_gdpo_sums_group_advantages_of_each(self):
        # One reward moves and the other does not in group b; in group a both agree, whatever their units.
        got = compute(self.REWARDS, self.GROUPS, options=options(), combine="gdpo")
        one, two = (compute(column, self.GROUPS, options=options()) for column in np.array(self.REWARDS).T)
        close(got, one + two)
        close(got[2:], one[2:])

    def test_gdpo_tells_apart_what_a_sum_makes_equal(self):
        # In group b both rewards are won, in group a one; the std of the sum hides that.
        rewards, groups = [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], ["a", "a", "b", "b"]
        np.testing.assert_allclose(compute(rewards, groups, options=options()), [-1, 1, -1, 1], atol=3e-4)
        got = compute(rewards, groups, options=options(), combine="gdpo")
        np.testing.assert_allclose(got, [-1, 1, -2, 2], atol=5e-4)

    def test_gdpo_clamps_the_sum_not_the_terms(self):
        rewards = [[0.0, 0.0]] * 99 + [[1.0, -1.0]]
        got = compute(rewards, ["g"] * 100, options=options(clamp=5.0), combine="gdpo")
        assert got[-1] == pytest.approx(0, abs=1e-9)

    @pytest.mark.parametrize("combine", ["sum", "zscore", "gdpo"])
    def test_one_reward_is_the_same_by_every_rule_up_to_scale(self, combine):
        got = compute([[0.0], [1.0]], ["g"] * 2, options=options(), combine=combine)
        # zscore divides by std + 1e-4 twice.
        np.testing.assert_allclose(got, [-NEARLY_ONE, NEARLY_ONE], atol=2e-4)

    def test_total_is_missing_where_a_component_is(self):
        for combine in ("sum", "zscore", "gdpo"):
            got = total([[0.0, math.inf], [1.0, 2.0], [2.0, 3.0]], [1.0, 0.0], combine)
            assert np.isnan(got[0]) and np.isfinite(got[1:]).all()

    def test_a_weight_too_few_is_an_error(self):
        with pytest.raises(ValueError, match="weights"):
            compute(self.REWARDS, self.GROUPS, options=options(), weights=[1.0])


class TestRewardsThatDoNotJudgeEverything:
    """Prompt a is judged by both rewards, prompt b by the second alone."""

    VALUES = ((0.0, 1.0), (1.0, 0.0), (math.nan, 0.0), (math.nan, 1.0))
    GROUPS = ("a", "a", "b", "b")

    def test_gdpo_takes_the_advantages_of_those_that_do(self):
        got = compute(
            self.VALUES, self.GROUPS, options=Advantage(), combine="gdpo", weights=[2.0, 1.0], on_missing="skip"
        )
        one = 0.99980004
        assert got == pytest.approx([-one, one, -one, one], abs=1e-8)
        masked = compute(self.VALUES, self.GROUPS, options=Advantage(), combine="gdpo", on_missing="mask")
        assert masked.tolist()[2:] == [0.0, 0.0]

    def test_a_row_that_none_judged_gets_none(self):
        got = compute(
            [(math.nan, math.nan), (0, 1)],
            ["a", "b"],
            options=Advantage(mean="batch"),
            combine="gdpo",
            on_missing="skip",
        )
        assert got[0] == 0.0

    def test_a_total_is_over_those_that_do_and_missing_stays_missing(self):
        values = np.array(self.VALUES)
        asked = np.array([[True, True], [True, True], [False, True], [False, True]])
        assert total(values, [2.0, 1.0], "sum", asked).tolist() == [1.0, 2.0, 0.0, 1.0]
        values[3, 1] = math.nan
        assert math.isnan(total(values, None, "sum", asked)[3])
