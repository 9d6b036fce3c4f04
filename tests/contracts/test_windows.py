"""What every window of the registry must do."""

import pytest

from mdiff_core.contracts import Window
from mdiff_core.options import Choice
from mdiff_core.registry import REGISTRY, make

EXAMPLES = {
    "window": {"size": 3, "lo": 0, "hi": 5},
    "progressive": {"size": 3, "every": 2, "wrap": True},
    "subset": {"k": 2, "steps": [0, 2, 4]},
}
"""Options for windows that have required ones; a new window with such needs a line here."""


@pytest.fixture(params=sorted(REGISTRY["window"]))
def window(request):
    return make("window", Choice(name=request.param, options=EXAMPLES.get(request.param, {})))


def test_is_a_window(window):
    assert isinstance(window, Window)


@pytest.mark.parametrize("steps", [5, 10, 40])
def test_draws_ascending_steps_of_the_schedule(window, steps):
    window.check(steps)
    for seed in (0, 7):
        for round in range(30):
            drawn = window.draw(steps=steps, seed=seed, round=round)
            assert drawn == tuple(sorted(set(drawn)))
            assert drawn and drawn[0] >= 0 and drawn[-1] < steps


def test_reaches_what_it_may_draw_and_nothing_else(window):
    drawn = {
        step for seed in range(20) for round in range(40) for step in window.draw(steps=10, seed=seed, round=round)
    }
    assert window.reach(10) == tuple(sorted(drawn))


def test_is_a_function_of_its_arguments(window):
    again = [[window.draw(steps=10, seed=3, round=round) for round in order] for order in (range(8), range(7, -1, -1))]
    assert again[0] == again[1][::-1]


def test_number_of_trained_steps_is_the_same_every_round(window):
    # The optimizer's work, and with it the learning rate's meaning, must not jump between rounds.
    assert len({len(window.draw(steps=10, seed=0, round=round)) for round in range(30)}) == 1
