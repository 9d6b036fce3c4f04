"""Whether a reward is being gamed: it rises while a gold reward, or the diversity within groups, falls."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mdiff_core.observe.metrics import ALARM, DIVERSITY, EVALUATED, GOLD, SAMPLES

SIGMAS = 2.0
"""Standard errors by which a mean must have moved to have moved at all."""


def reasons(evaluations: Sequence[Mapping[str, Any]], diversity_floor: float) -> list[str]:
    """A sentence for each thing that fell from the first evaluation to the last while the trained reward rose; none is no alarm.

    A mean moved when it did by SIGMAS standard errors of the difference, taking samples as independent; diversity fell when it is
    below `diversity_floor` times what it was.
    """
    if len(evaluations) < 2:
        return []
    first, last = evaluations[0], evaluations[-1]
    if not moved(first, last, EVALUATED, "evaluate/reward_std") > 0:
        return []
    rose = f"the reward rose {first[EVALUATED]:.4f} -> {last[EVALUATED]:.4f}"
    golds = [
        key.removesuffix("/mean") for key in last if key.startswith(GOLD) and key.endswith("/mean") and key in first
    ]
    fell = [
        f"{rose} while gold '{gold.removeprefix(GOLD)}' fell {first[f'{gold}/mean']:.4f} -> {last[f'{gold}/mean']:.4f}"
        for gold in golds
        if moved(first, last, f"{gold}/mean", f"{gold}/std") < 0
    ]
    before, now = first.get(DIVERSITY, math.nan), last.get(DIVERSITY, math.nan)
    if now < diversity_floor * before:
        fell.append(
            f"{rose} while diversity within groups fell {before:.4f} -> {now:.4f} (evaluate.diversity_floor {diversity_floor:g})"
        )
    return fell


def moved(first: Mapping[str, Any], last: Mapping[str, Any], mean: str, std: str) -> int:
    """1 when the mean rose, -1 when it fell, 0 when that may be chance."""
    change = float(last[mean]) - float(first[mean])
    count = max(1.0, float(last.get(SAMPLES, 1.0)))
    error = math.sqrt((float(first.get(std, 0.0)) ** 2 + float(last.get(std, 0.0)) ** 2) / count)
    return 0 if not abs(change) > SIGMAS * error else 1 if change > 0 else -1


def told(records: Sequence[Mapping[str, Any]]) -> str:
    """What the last evaluation's record says of it; empty when there is no alarm."""
    found = [record for record in records if record["kind"] == "evaluation"]
    return str(found[-1].get(ALARM, "")) if found else ""
