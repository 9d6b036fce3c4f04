"""Text embeddings an engine has seen, and which of them it has already handed out."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock

from mdiff_core.sampler import condition_key
from mdiff_core.types import Condition

KEPT = 512
"""Texts remembered, so that the next round's prompts need not be asked for again."""


def negative_key(text: str) -> str:
    """Key of the negative text's row: not that of a prompt of the same words, which SGLang encodes at another length."""
    return f"{condition_key(text)}-negative"


def keys_of(texts: Sequence[str], negative: str | None) -> list[str]:
    """Of the prompts' texts, and of the negative one if there is guidance."""
    return [*map(condition_key, texts), *([] if negative is None else [negative_key(negative)])]


class Texts:
    """By text; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[str, Condition] = OrderedDict()
        self._sent: set[str] = set()

    def known(self, texts: Sequence[str], negative: str | None) -> dict[str, Condition]:
        """Those remembered of the prompts and the negative text, by key: the caller's own, which no other call can push out."""
        with self._lock:
            keys = keys_of(texts, negative)
            found = {key: self._known[key] for key in keys if key in self._known}
            for key in found:
                self._known.move_to_end(key)
        return found

    def remember(self, found: Mapping[str, Condition]) -> None:
        """Embeddings by key; the least recently used are forgotten."""
        with self._lock:
            for key, condition in found.items():
                self._known[key] = condition
                self._known.move_to_end(key)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)

    def fresh(self, held: Mapping[str, Condition], text: str, negative: str | None) -> dict[str, Condition]:
        """What of the two was not handed out since `forget_sent`, by key, from what the caller holds."""
        with self._lock:
            fresh = {key: held[key] for key in keys_of([text], negative) if key not in self._sent}
            self._sent.update(fresh)
        return fresh

    def forget_sent(self) -> None:
        """Nothing counts as handed out any more."""
        with self._lock:
            self._sent.clear()


def lacking(held: Mapping[str, Condition], texts: Sequence[str], negative: str | None) -> list[bool]:
    """For each prompt whether its samples should bring conditions: its own are not held, or the negative text's (None
    without guidance), which come with any. A text that comes twice brings them once."""
    bring = [condition_key(text) not in held and text not in texts[:i] for i, text in enumerate(texts)]
    if negative is not None and negative_key(negative) not in held:
        bring[0] = True
    return bring
