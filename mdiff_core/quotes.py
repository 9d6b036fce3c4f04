"""The text that a prompt wants to see written: what stands in its quotes, whatever their kind."""

import re
import unicodedata

from mdiff_core.errors import BadSetting

PAIRS = {"“": "”", "„": "“”", "«": "»", "»": "«", "‹": "›", "「": "」", "『": "』", "＂": "＂", '"': '"'}
"""Opening quote -> what closes it. Single quotes are looked at only where there are none of these, as they are apostrophes too."""
SINGLE = re.compile(r"(?<!\w)['‘‚]([^'‘’‚]*)['’](?!\w)")


def quoted(text: str) -> list[str]:
    """What stands in quotes, in order, each part stripped; BadSetting for quotes that do not close or hold nothing."""
    parts, rest = [], text
    while opening := next((char for char in rest if char in PAIRS), ""):
        rest = rest.partition(opening)[2]
        ends = [rest.index(char) for char in PAIRS[opening] if char in rest]
        if not ends:
            raise BadSetting(f"the quote {opening} in {text!r} does not close; close it with {PAIRS[opening][-1]}")
        parts.append(rest[: min(ends)])
        rest = rest[min(ends) + 1 :]
    parts = [part.strip() for part in parts or SINGLE.findall(text)]
    if not all(parts):
        raise BadSetting(f"the quotes in {text!r} hold no text; write the wanted text into them")
    return parts


def plain(text: str) -> str:
    """Text as it is compared: NFKC, so that both forms of an accent are equal, no white space, no case."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def distance(one: str, other: str) -> int:
    """Levenshtein's: least number of characters to insert, delete or replace."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]
