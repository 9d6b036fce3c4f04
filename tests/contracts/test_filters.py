"""What every filter of the registry must do."""

import math

import numpy as np
import pytest

from mdiff_core.contracts import Filter
from mdiff_core.options import Choice
from mdiff_core.registry import REGISTRY, make
from mdiff_core.types import ScoreColumns

EXAMPLES = {
    "score_range": {"low": 0.1},
    "metadata": {"key": "level", "values": ["easy"]},
    "python": {"function": "tests.own_rewards:odd"},
}
"""Options for filters that have required ones; a new filter with such needs a line here."""

ROWS = [
    ("a/0", "a", 0.0, "p", {"level": "easy"}),
    ("a/1", "a", 0.0, "p", {"level": "easy"}),
    ("b/0", "b", 0.0, "q", {"level": "hard"}),
    ("b/1", "b", 1.0, "r", {"level": "hard"}),
    ("c/0", "c", math.nan, "s", {}),
    ("c/1", "c", 0.5, "t", {}),
    ("d/0", "d", 0.3, "u", {"level": "easy"}),
    ("d/1", "d", 0.7, "v", {"level": "easy"}),
]


@pytest.fixture(params=sorted(REGISTRY["filter"]))
def judge(request, monkeypatch):
    monkeypatch.setenv("MDIFF_MODULES", "tests.own_rewards")
    return make("filter", Choice(name=request.param, options=EXAMPLES.get(request.param, {})))


def table(rows):
    sample, group, total, fingerprint, metadata = zip(*rows, strict=True) if rows else ((),) * 5
    return ScoreColumns(sample=sample, group=group, total=np.array(total), fingerprint=fingerprint, metadata=metadata)


def test_is_a_filter(judge):
    assert isinstance(judge, Filter)
    assert judge.in_baseline in (True, False)


def test_gives_one_reason_a_sample_and_drops_some_but_not_all(judge):
    reasons = judge(table(ROWS))
    assert len(reasons) == len(ROWS)
    assert all(isinstance(reason, str) for reason in reasons)
    assert any(reasons) and not all(reasons)


def test_never_looks_at_position(judge):
    straight = dict(zip([row[0] for row in ROWS], judge(table(ROWS)), strict=True))
    mixed = ROWS[::-2] + ROWS[::2]
    assert len(mixed) == len(ROWS)
    assert dict(zip([row[0] for row in mixed], judge(table(mixed)), strict=True)) == straight


def test_groups_do_not_touch_each_other(judge):
    alone = [reason for group in "abcd" for reason in judge(table([row for row in ROWS if row[1] == group]))]
    assert alone == judge(table(ROWS))


def test_no_rows_no_reasons(judge):
    assert judge(table([])) == []
