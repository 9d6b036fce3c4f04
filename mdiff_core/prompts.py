"""Prompt files, and which prompts a round asks for."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mdiff_core import seeds
from mdiff_core.artifacts import write_durably
from mdiff_core.errors import BadSetting
from mdiff_core.types import Prompt

KEYS = ("id", "input", "metadata")
"""Of a JSONL line; only `input` is required, and `id` is there in files that `write` made."""


TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"
"""Files of the prompts artifact."""
REWARDS = "rewards"
"""Metadata field that says which of the recipe's rewards judge a prompt."""
GENEVAL_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
"""Kinds of GenEval prompts (arXiv 2310.11513); their lines have `tag`, `include`, `prompt` and at times `exclude`."""


def read(path: str | Path) -> list[Prompt]:
    """The prompts of a .jsonl or .txt file, blank lines skipped.

    A JSONL line is mdiff's (`input`, optional `metadata`) or GenEval's metadata as Flow-GRPO publishes them, which become the
    prompt's metadata; a text line is a prompt, as in Flow-GRPO's OCR and PickScore sets. BadSetting with file and line when
    the file is missing, empty, not UTF-8, or a line is no prompt.
    """
    return [prompt for _, prompt in numbered(path)]


def numbered(path: str | Path) -> list[tuple[int, Prompt]]:
    """The same with the line of each, from 1."""
    path = Path(path)
    if path.suffix not in (".jsonl", ".txt"):
        raise BadSetting(f"prompts: '{path}' is neither .jsonl nor .txt; rename it to what it holds")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise BadSetting(f"prompts: '{path}' cannot be read ({error.strerror}); give a prompt file") from error
    except UnicodeDecodeError as error:
        raise BadSetting(f"prompts: '{path}' is not UTF-8 (at byte {error.start}); save it as UTF-8") from error
    parse = _from_json if path.suffix == ".jsonl" else _from_text
    found = [
        (number, parse(line.strip(), number, f"{path}:{number}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise BadSetting(f"prompts: '{path}' has no prompts; write one a line")
    _check_ids([prompt for _, prompt in found], path)
    return found


def set_file(name: str) -> str:
    """File of an evaluation's further set in the prompts artifact."""
    return f"held_out-{name}.jsonl"


def write(path: Path, prompts: Sequence[Prompt]) -> None:
    """A JSONL file that `read` gives back as it was, ids included."""
    lines = [
        json.dumps({"id": prompt.id, "input": prompt.text, "metadata": dict(prompt.metadata)}, ensure_ascii=False)
        for prompt in prompts
    ]
    write_durably(path, "".join(f"{line}\n" for line in lines).encode())


def judges(prompt: Prompt, rewards: Sequence[str]) -> tuple[str, ...]:
    """Which of the recipe's rewards judge the prompt: those that its metadata list under `rewards`, else all.

    BadSetting when the list is none, or names one that the recipe has not.
    """
    chosen = prompt.metadata.get(REWARDS)
    if chosen is None:
        return tuple(rewards)
    if not isinstance(chosen, list) or not chosen:
        raise BadSetting(
            f"metadata field '{REWARDS}' is {chosen!r}; list rewards of the recipe, or leave it out for all"
        )
    for name in chosen:
        if name not in rewards:
            raise BadSetting(f"metadata field '{REWARDS}' names {name!r}; the recipe has {', '.join(rewards)}")
    return tuple(name for name in rewards if name in chosen)


def draw(prompts: Sequence[Prompt], *, per_round: int, round: int, seed: int) -> list[tuple[str, Prompt]]:
    """The round's (group id, prompt) pairs: positions round * per_round and on of an endless stream.

    The stream is one shuffled pass over all prompts after another, so position is all there is to resume. A prompt
    met twice in a round (more asked for than there are) makes two groups.
    """
    if not prompts:
        raise BadSetting("prompts: none to draw from; give a prompt file that has some")
    start = round * per_round
    chosen = _stream(prompts, seed, start)
    return [(f"r{round:05d}-{i:05d}-{prompt.id}", prompt) for i, prompt in enumerate(islice(chosen, per_round))]


def _stream(prompts: Sequence[Prompt], seed: int, position: int) -> Iterator[Prompt]:
    epoch, skip = divmod(position, len(prompts))
    while True:
        # sorting by a hash, unlike a library's shuffle, is the same in every version of everything
        order = sorted(prompts, key=lambda prompt: seeds.derive("prompts", seed, epoch, prompt.id))
        yield from order[skip:]
        epoch, skip = epoch + 1, 0


def _from_text(line: str, number: int, where: str) -> Prompt:
    return Prompt(id=_id_of(number, line), text=line, metadata={})


def _from_json(line: str, number: int, where: str) -> Prompt:
    try:
        found: Any = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise BadSetting(f"{where}: not JSON ({error.msg}, column {error.colno}); write one object a line") from error
    except (ValueError, RecursionError) as error:  # half a character, a number of 5,000 digits, brackets without end
        raise BadSetting(f"{where}: cannot be used ({str(error)[:80]}); write plain text and numbers") from error
    if not isinstance(found, dict):
        raise BadSetting(f'{where}: {line[:40]!r} is not an object; write {{"input": "the text"}}')
    if "input" not in found and {"tag", "include", "prompt"} <= found.keys():
        return _from_geneval(found, number, where)
    unknown = sorted(found.keys() - set(KEYS))
    if unknown:
        raise BadSetting(f"{where}: unknown key '{unknown[0]}'; put all but {', '.join(KEYS)} in `metadata`")
    text, metadata = found.get("input"), found.get("metadata", {})
    if not isinstance(text, str) or not text.strip():
        raise BadSetting(f"{where}: `input` is {text!r}; it must be the prompt's text")
    if not isinstance(metadata, dict):
        raise BadSetting(f"{where}: `metadata` is {metadata!r}; it must be an object")
    name = found.get("id", _id_of(number, text))
    if not isinstance(name, str) or not name:
        raise BadSetting(f"{where}: `id` is {name!r}; it must be a name, or left out")
    return Prompt(id=name, text=text, metadata=metadata)


def _from_geneval(found: dict[str, Any], number: int, where: str) -> Prompt:
    text, tag = found["prompt"], found["tag"]
    if not isinstance(text, str) or not text.strip():
        raise BadSetting(f"{where}: `prompt` is {text!r}; it must be the prompt's text")
    if tag not in GENEVAL_TAGS:
        raise BadSetting(f"{where}: `tag` is {tag!r}; GenEval's are {', '.join(GENEVAL_TAGS)}")
    for key in ("include", "exclude"):
        objects = found.get(key, [])
        if (
            not isinstance(objects, list)
            or not all(_is_object(one) for one in objects)
            or (key, objects) == ("include", [])
        ):
            raise BadSetting(f'{where}: `{key}` is {objects!r}; write objects such as {{"class": "bench", "count": 1}}')
    metadata = {key: value for key, value in found.items() if key != "prompt"}
    return Prompt(id=_id_of(number, text), text=text, metadata=metadata)


def _is_object(found: Any) -> bool:
    """Whether it is one of GenEval's objects: a class, and how many of it, a whole number from 1."""
    if not isinstance(found, dict) or not found.get("class") or not isinstance(found["class"], str):
        return False
    count = found.get("count")
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1


def _id_of(number: int, text: str) -> str:
    return f"{number:06d}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _check_ids(prompts: Sequence[Prompt], path: Path) -> None:
    seen = set[str]()
    for prompt in prompts:
        if prompt.id in seen:
            raise BadSetting(f"prompts: '{path}' has the id '{prompt.id}' twice; ids must differ, or be left out")
        seen.add(prompt.id)
