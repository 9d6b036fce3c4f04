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

    def lacking(self, texts: Sequence[str], negative: str | None) -> list[bool]:
        """For each prompt whether its samples should bring conditions: its own are unknown, or the negative text's (None
        without guidance), which come with any. A text that comes twice brings them once."""
        with self._lock:
            for text in texts:
                if (key := condition_key(text)) in self._known:
                    self._known.move_to_end(key)
            bring = [condition_key(text) not in self._known and text not in texts[:i] for i, text in enumerate(texts)]
            if negative is not None and condition_key(negative) not in self._known:
                bring[0] = True
            return bring

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
