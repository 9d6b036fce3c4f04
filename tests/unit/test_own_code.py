"""A user's functions run when their module is allowed, and never otherwise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdiff_core import own_code
from mdiff_core.errors import BadSetting, RewardFailed
from mdiff_core.options import Choice
from mdiff_core.registry import make
from mdiff_core.types import Prompt

FRAMES = np.stack([np.full((1, 4, 4, 3), 51 * i, np.uint8) for i in (3, 1, 2)])
PROMPTS = [Prompt(id=str(i), text="grey", metadata={}) for i in range(3)]


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(own_code.ALLOWED, "some.other, tests.own_rewards")


def reward(function: str, **options: Any) -> Any:
    return make("reward", Choice(name="python", options={"function": f"tests.own_rewards:{function}", **options}))


def test_a_function_gets_frames_prompts_and_arguments() -> None:
    assert reward("brightness")(FRAMES, PROMPTS) == pytest.approx([0.6, 0.2, 0.4])
    assert reward("brightness", arguments={"scale": 10.0})(FRAMES, PROMPTS) == pytest.approx([6, 2, 4])


def test_a_function_may_compare_a_group() -> None:
    found = reward("rank", groupwise=True)
    assert found.groupwise and found(FRAMES, PROMPTS).tolist() == [2, 0, 1]


def test_what_it_returns_is_checked() -> None:
    with pytest.raises(RewardFailed, match=r"own_rewards:nonsense returned <U4 \(3,\) for 3 samples"):
        reward("nonsense")(FRAMES, PROMPTS)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("os:system", "module 'os', which is not allowed here"),
        ("tests.own_rewards_evil:f", "not allowed"),
        ("tests:f", "not allowed"),
        ("some.other:f", "cannot be imported"),
        ("tests.own_rewards:absent", "has no function 'absent'"),
        ("tests.own_rewards:NOT_A_FUNCTION", "has no function"),
        ("tests.own_rewards", "not of the form"),
        ("tests.own_rewards:a.b", "not of the form"),
    ],
)
def test_other_code_is_refused_when_prompts_are_checked(function: str, why: str) -> None:
    found = make("reward", Choice(name="python", options={"function": function}))
    with pytest.raises(BadSetting, match=why):
        found.check(PROMPTS[0])


def test_nothing_is_allowed_unless_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(own_code.ALLOWED)
    with pytest.raises(BadSetting, match=r"\(allowed: none\); set MDIFF_MODULES=tests.own_rewards on every machine"):
        own_code.function("tests.own_rewards:brightness")


@pytest.mark.parametrize("raised", ["1 / 0", "raise RuntimeError('no licence')", "import json; json.loads('{')"])
def test_a_module_that_raises_anything_is_a_sentence(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text(raised)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(own_code.ALLOWED, "broken_rewards")
    with pytest.raises(BadSetting, match=r"module 'broken_rewards' raised \w+ when it was imported .* repair it"):
        own_code.function("broken_rewards:f")
