"""Text embeddings an engine has seen, and which of them it has already handed out."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock

from mdiff_core.sampler import condition_key
from mdiff_core.types import Condition

KEPT = 512
"""Texts remembered, so that the next round's prompts need not be asked for again."""


class Texts:
    """By text; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[str, Condition] = OrderedDict()
        self._sent: set[str] = set()

    def missing(self, texts: Sequence[str], negative: str | None) -> list[tuple[str, bool]]:
        """Prompts that have to be asked for, and whether with the negative text (None without guidance), which one of them brings."""
        with self._lock:
            keys = {condition_key(text): text for text in texts}
            missing = [text for key, text in keys.items() if key not in self._known]
            for key in keys.keys() & self._known.keys():
                self._known.move_to_end(key)
            lacking = negative is not None and condition_key(negative) not in self._known
            if lacking and not missing:
                missing = [texts[0]]
            return [(text, lacking and number == 0) for number, text in enumerate(missing)]

    def remember(self, found: Mapping[str, Condition]) -> None:
        """Embeddings by text."""
        with self._lock:
            for text, condition in found.items():
                self._known[condition_key(text)] = condition
            while len(self._known) > KEPT:
                self._known.popitem(last=False)

    def fresh(self, text: str, negative: str | None) -> dict[str, Condition]:
        """What of the two was not handed out since `forget_sent`, by key."""
        with self._lock:
            keys = [condition_key(one) for one in (text, negative) if one is not None]
            fresh = {key: self._known[key] for key in keys if key not in self._sent}
            self._sent.update(fresh)
            if negative is not None:
                self._known.move_to_end(keys[-1])
        return fresh

    def forget_sent(self) -> None:
        """Nothing counts as handed out any more."""
        with self._lock:
            self._sent.clear()
