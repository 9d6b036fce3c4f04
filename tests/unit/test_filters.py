import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mdiff_core.advantages import compute
from mdiff_core.errors import BadSetting
from mdiff_core.filters import (
    Duplicates,
    DuplicatesOptions,
    Metadata,
    MetadataOptions,
    NoSpread,
    NoSpreadOptions,
    PythonFilter,
    PythonFilterOptions,
    ScoreRange,
    ScoreRangeOptions,
    apply,
    enough,
)
from mdiff_core.settings import Advantage
from mdiff_core.types import ScoreColumns, Scored
from tests import own_rewards


def scored(*rows):
    """From (group, total) pairs; samples are numbered within their group."""
    made, count = [], {}
    for group, total in rows:
        index = count[group] = count.get(group, -1) + 1
        made.append(
            Scored(
                sample=f"{group}/{index}",
                group=group,
                rewards={"r": total},
                total=total,
                error="",
                kept=True,
                in_baseline=True,
                reason="",
            )
        )
    return made


def run(rows, *filters, fingerprint=None, metadata=None):
    named = [(f"filter{i}", one) for i, one in enumerate(filters)]
    return apply(
        named,
        rows,
        fingerprint=fingerprint or [row.sample for row in rows],
        metadata=metadata or [{} for _ in rows],
    )


def kept(rows):
    return [row.sample for row in rows if row.kept]


def no_spread(**options):
    return NoSpread(NoSpreadOptions(**options))


def score_range(**options):
    return ScoreRange(ScoreRangeOptions(**options))


class TestNoSpread:
    def test_drops_the_whole_group_and_says_why(self):
        got = run(scored(("a", 1.0), ("b", 0.0), ("a", 1.0), ("b", 1.0)), no_spread())
        assert kept(got) == ["b/0", "b/1"]
        assert got[0].reason == got[2].reason == "filter0: the group's rewards lie within 0"
        assert got[0].in_baseline

    def test_group_of_one_has_no_spread(self):
        assert kept(run(scored(("a", 1.0)), no_spread())) == []

    def test_equal_float32_rewards_have_no_spread(self):
        value = float(np.float32(0.8988382879679935))
        assert kept(run(scored(*[("a", value)] * 12), no_spread())) == []

    def test_at_most_is_included(self):
        rows = scored(("a", 0.0), ("a", 0.25), ("b", 0.0), ("b", 0.5))
        assert kept(run(rows, no_spread(at_most=0.25))) == ["b/0", "b/1"]

    def test_missing_rewards_are_no_spread(self):
        rows = scored(
            ("a", math.nan), ("a", 1.0), ("b", math.nan), ("b", math.nan), ("c", math.nan), ("c", 1), ("c", 2)
        )
        got = run(rows, no_spread())
        assert kept(got) == ["c/0", "c/1", "c/2"]
        assert got[2].reason == "filter0: no sample of the group has a reward"

    def test_spread_counts_dropped_samples_that_stay_in_the_baseline(self):
        # b/0's advantage comes from its distance to b/1, trained or not.
        rows = scored(("b", 0.0), ("b", 9.0))
        assert kept(run(rows, score_range(high=5.0, in_baseline=True), no_spread())) == ["b/0"]
        assert kept(run(rows, score_range(high=5.0, in_baseline=False), no_spread())) == []


class TestDuplicates:
    def test_one_of_each_picture_stays(self):
        rows = scored(("a", 0.0), ("a", 0.0), ("a", 1.0))
        got = run(rows, Duplicates(DuplicatesOptions()), fingerprint=["x", "x", "y"])
        assert kept(got) == ["a/0", "a/2"]
        assert got[1].reason == "filter0: same frames as a/0"
        assert not got[1].in_baseline

    def test_or_none(self):
        rows = scored(("a", 0.0), ("a", 0.0), ("a", 1.0))
        got = run(rows, Duplicates(DuplicatesOptions(keep="none")), fingerprint=["x", "x", "y"])
        assert kept(got) == ["a/2"]
        assert got[0].reason == "filter0: same frames as a/1"

    def test_equal_pictures_of_two_groups_stay(self):
        rows = scored(("a", 0.0), ("b", 0.0))
        assert kept(run(rows, Duplicates(DuplicatesOptions()), fingerprint=["x", "x"])) == ["a/0", "b/0"]


class TestScoreRange:
    def test_both_ends_stay(self):
        rows = scored(("a", 0.0), ("a", 0.1), ("a", 0.5), ("a", 0.9), ("a", 1.0))
        got = run(rows, score_range(low=0.1, high=0.9))
        assert kept(got) == ["a/1", "a/2", "a/3"]
        assert got[0].reason == "filter0: reward 0 is below 0.1"
        assert got[4].reason == "filter0: reward 1 is above 0.9"
        assert not got[0].in_baseline

    def test_by_group(self):
        rows = scored(("easy", 1.0), ("easy", 0.9), ("fair", 1.0), ("fair", 0.0), ("hard", 0.0), ("hard", 0.0))
        got = run(rows, score_range(low=0.1, high=0.9, of="group"))
        assert kept(got) == ["fair/0", "fair/1"]
        assert got[0].reason == "filter0: mean reward of the group 0.95 is above 0.9"

    @pytest.mark.parametrize("of", ["sample", "group"])
    def test_a_missing_reward_is_not_out_of_range(self, of):
        rows = scored(("a", math.nan), ("b", 0.5), ("b", math.nan))
        assert kept(run(rows, score_range(low=0.0, of=of))) == ["a/0", "b/0", "b/1"]

    @pytest.mark.parametrize("options", [{}, {"low": 2.0, "high": 1.0}])
    def test_senseless_ranges_are_refused(self, options):
        with pytest.raises(ValidationError, match="score_range"):
            ScoreRangeOptions(**options)


class TestMetadata:
    ROWS = scored(("a", 0.0), ("b", 0.0), ("c", 0.0), ("d", 0.0))
    METADATA = ({"train": True}, {"train": False}, {}, {"train": 1})

    def test_samples_whose_field_is_not_listed_are_dropped(self):
        got = run(self.ROWS, Metadata(MetadataOptions(key="train")), metadata=self.METADATA)
        assert kept(got) == ["a/0"]
        assert got[1].reason == "filter0: metadata field 'train' is False"
        assert got[2].reason == "filter0: no metadata field 'train'"

    def test_missing_fields_may_stay(self):
        judge = Metadata(MetadataOptions(key="train", values=(False, 1), missing="keep"))
        assert kept(run(self.ROWS, judge, metadata=self.METADATA)) == ["b/0", "c/0", "d/0"]

    def test_options_read_from_a_recipe(self):
        options = MetadataOptions.from_json('{"key": "level", "values": ["easy", 2, [1]]}')
        judge = Metadata(options)
        assert [judge.judge({"level": level}) == "" for level in ("easy", "hard", 2, [1])] == [True, False, True, True]


class TestEnough:
    def test_the_first_groups_by_id_train_and_the_others_count_in_the_baseline(self):
        rows = scored(("c", 0.0), ("a", 0.0), ("b", 1.0), ("a", 1.0), ("c", 1.0), ("b", 0.0))
        got = enough(rows, 2)
        assert kept(got) == ["a/0", "b/0", "a/1", "b/1"]
        assert got[0].reason == "surplus: 2 groups are enough (prompts.per_round)" and got[0].in_baseline
        assert enough(rows, 3) == enough(rows, 9) == rows

    def test_groups_without_spread_are_made_up_for(self):
        rows = scored(("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 1.0), ("c", 0.0), ("c", 1.0), ("d", 0.0), ("d", 1.0))
        got = enough(run(rows, no_spread()), 2)
        assert kept(got) == ["b/0", "b/1", "c/0", "c/1"]
        assert [row.reason.partition(":")[0] for row in got if not row.kept] == ["filter0"] * 2 + ["surplus"] * 2


class TestPython:
    @pytest.fixture(autouse=True)
    def allowed(self, monkeypatch):
        monkeypatch.setenv("MDIFF_MODULES", "tests.own_rewards")

    def test_a_function_of_the_users_drops_with_its_reason(self):
        options = PythonFilterOptions(
            function="tests.own_rewards:odd", arguments={"word": "not even"}, in_baseline=True
        )
        got = run(scored(("a", 0.0), ("a", 1.0)), PythonFilter(options))
        assert kept(got) == ["a/0"] and got[1].reason == "filter0: not even" and got[1].in_baseline

    def test_what_it_returns_is_checked(self, monkeypatch):
        for found, why in ((["x"], "a list of 2 reasons"), ([None, ""], "must return texts"), ("xy", "a list of 2")):
            monkeypatch.setattr(own_rewards, "odd", lambda table, found=found: found)
            with pytest.raises(BadSetting, match=why):
                run(scored(("a", 0.0), ("a", 1.0)), PythonFilter(PythonFilterOptions(function="tests.own_rewards:odd")))


class TestApply:
    def test_the_first_filter_that_drops_a_sample_gives_the_reason(self):
        rows = scored(("a", 0.0), ("a", 5.0))
        got = run(rows, score_range(low=1.0, in_baseline=True), score_range(low=3.0))
        assert got[0].reason.startswith("filter0: ") and got[0].in_baseline
        assert got[1] == rows[1]

    def test_what_leaves_the_baseline_is_not_seen_again(self):
        seen = []

        class Spy:
            in_baseline = False

            def __call__(self, table):
                seen.append(list(table.sample))
                return [""] * len(table.sample)

        rows = scored(("a", 0.0), ("a", 5.0), ("a", 9.0))
        run(rows, score_range(low=1.0), score_range(high=8.0, in_baseline=True), Spy())
        assert seen == [["a/1", "a/2"]]

    def test_no_filters_keep_everything(self):
        rows = scored(("a", 0.0), ("b", 1.0))
        assert run(rows) == rows

    def test_no_rows(self):
        assert run([], no_spread(), score_range(low=0.0), Duplicates(DuplicatesOptions())) == []

    def test_advantages_follow_the_baseline(self):
        rows = scored(("a", 0.0), ("a", 1.0), ("a", 50.0))
        for in_baseline, wanted in ((False, 0.99980004), (True, (1 - 17) / (np.std([0, 1, 50]) + 1e-4))):
            got = run(rows, score_range(high=10.0, in_baseline=in_baseline))
            baseline = [row.in_baseline for row in got]
            advantages = compute([row.total for row in got], ["a"] * 3, options=Advantage(), in_baseline=baseline)
            assert advantages[1] == pytest.approx(wanted, abs=5e-9)

    @given(
        data=st.data(),
        rows=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0, math.nan])), max_size=12),
    )
    def test_order_of_rows_changes_nothing(self, data, rows):
        table = scored(*rows)
        prints = data.draw(st.lists(st.sampled_from("xyz"), min_size=len(rows), max_size=len(rows)))
        order = data.draw(st.permutations(range(len(rows))))
        filters = [Duplicates(DuplicatesOptions()), score_range(high=0.9, of="group"), no_spread()]
        before = run(table, *filters, fingerprint=prints)
        after = run([table[i] for i in order], *filters, fingerprint=[prints[i] for i in order])
        verdicts = [(row.sample, row.kept, row.in_baseline, row.reason) for row in before]
        assert [verdicts[i] for i in order] == [(row.sample, row.kept, row.in_baseline, row.reason) for row in after]


def test_score_columns_are_what_a_filter_gets():
    table = ScoreColumns(sample=["a/0"], group=["a"], total=np.zeros(1), fingerprint=["x"], metadata=[{}])
    assert no_spread()(table) == ["the group's rewards lie within 0"]
