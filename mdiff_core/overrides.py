"""Dotted overrides (`train.lr=1e-4`) laid over a settings tree, and pydantic's complaints turned into sentences."""

import json
import types
from collections.abc import Iterator, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mdiff_core.errors import BadSetting
from mdiff_core.options import Options
from mdiff_core.registry import nearest

NOUNS = {
    "bool_type": "true or false",
    "dict_type": 'an object such as {"name": ...}',
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": 'an object such as {"name": ...}',
    "string_type": "text",
    "tuple_type": "a list",
}
"""pydantic's error type -> what was expected."""


def lay_over(model: type[Options], tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`tree` (JSON values, changed in place) with each `a.b=c` put in its place; BadSetting for a path that `model` does not have."""
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise BadSetting(f"overrides: '{override}' is not of the form a.b=c; write for example train.lr=1e-4")
        keys = path.strip().split(".")
        kind: Any = model
        node: Any = tree
        for depth, key in enumerate(keys):
            child = child_kind(model, kind, keys[: depth + 1], keys[depth + 1 :])
            place = position(node, key, keys[:depth])
            if depth == len(keys) - 1:
                value = parse(text, child)
                if key == "name" and is_choice(kind) and node.get("name") != value:
                    node["options"] = {}  # those of another plug-in mean nothing to this one
                put(node, place, value)
            else:
                node = descend(node, place, child)
            kind = child
    return tree


def child_kind(model: type[Options], kind: Any, path: Sequence[str], rest: Sequence[str] = ()) -> Any:
    """Annotation of the setting that the last key of `path` names inside `kind`; `rest` is what an override says after it."""
    *parents, key = path
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if key in kind.model_fields:
            return bare(kind.model_fields[key].annotation)
        raise BadSetting(f"{'.'.join([*path, *rest])}: no such setting; {hint(model, kind, path, rest)}")
    if get_origin(kind) is tuple and key.isdecimal():
        inner = get_args(kind)
        return bare(inner[min(int(key), len(inner) - 1)] if inner[-1] is not Ellipsis else inner[0])
    if get_origin(kind) is tuple:
        raise BadSetting(
            f"{'.'.join(path)}: {'.'.join(parents)} is a list, so its parts are numbers; write {'.'.join([*parents, '0'])}"
        )
    if kind is Any or get_origin(kind) is dict:
        return Any
    raise BadSetting(
        f"{'.'.join(path)}: {'.'.join(parents)} is one value and has no part '{key}'; write {'.'.join(parents)}=..."
    )


def is_choice(kind: Any) -> bool:
    """Whether a setting names a plug-in and holds its options."""
    return isinstance(kind, type) and issubclass(kind, BaseModel) and {"name", "options"} <= set(kind.model_fields)


def hint(model: type[Options], kind: type[BaseModel], path: Sequence[str], rest: Sequence[str] = ()) -> str:
    """The nearest setting by full dotted path: a sibling with a similar name, else the same name anywhere in the tree."""
    *parents, key = path
    guess = nearest(key, kind.model_fields)
    if guess.startswith("did you mean"):
        return f"did you mean '{'.'.join([*parents, guess.split(chr(39))[1], *rest])}'?"
    namesakes = [known for known in leaves(model) if known.rpartition(".")[2] == key]
    return f"did you mean '{namesakes[0]}'?" if namesakes else guess


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of every setting below `model`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = bare(field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}.")


def bare(annotation: Any) -> Any:
    """`X` of `X | None`; anything else unchanged."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    inner = [part for part in get_args(annotation) if part is not type(None)]
    return inner[0] if len(inner) == 1 else Any


def position(node: Any, key: str, parents: Sequence[str]) -> str | int:
    """`key` as an index into `node`; a list takes one past its end, to append."""
    if not isinstance(node, list):
        return key
    if int(key) > len(node):
        raise BadSetting(
            f"{'.'.join([*parents, key])}: {'.'.join(parents)} has {len(node)} entries; use 0 to {len(node)} (the last appends)"
        )
    return int(key)


def descend(node: Any, place: str | int, child: Any) -> Any:
    """The container at `place`, made when it is absent or null."""
    here = node.get(place) if isinstance(node, dict) else node[place] if place < len(node) else None  # type: ignore[operator]
    if not isinstance(here, dict | list):
        here = [] if get_origin(child) is tuple else {}
        put(node, place, here)
    return here


def put(node: Any, place: str | int, value: Any) -> None:
    """Set or append."""
    if isinstance(node, list) and place == len(node):
        node.append(value)
    else:
        node[place] = value


def parse(text: str, kind: Any) -> Any:
    """`text` as JSON, or as it stands when it is none or when plain text is wanted."""
    if kind is str and not text.startswith('"'):
        return text
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except ValueError:
        return text


def refuse_constant(name: str) -> None:
    """NaN and Infinity are not JSON; Python's reader would take them."""
    raise ValueError(name)


def sentence(error: ValidationError, model: type[Options], prefix: str = "") -> str:
    """The first complaint as field, value and way out; `prefix` is the path of `model` within the settings."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"]]
    path = ".".join([*([prefix] if prefix else []), *parts]) or "settings"
    kind, shown = first["type"], brief(first["input"])
    if kind == "extra_forbidden":
        return f"{path}: no such setting; {nearest_at(model, parts, prefix)}"
    if kind == "missing":
        return f"{path}: missing, and it has no default; give it a value"
    if kind == "literal_error":
        return f"{path}: {shown} is not one of {first['ctx']['expected']}; choose one of them"
    if kind == "value_error":
        said = str(first["ctx"]["error"])
        return f"{path}: {shown}{'' if said.startswith('is ') else ':'} {said}"
    if kind in NOUNS:
        return f"{path}: {shown} is not {NOUNS[kind]}; give {NOUNS[kind]}"
    rule = " ".join(first["msg"].split()[1:])
    return f"{path}: {shown} is out of range; it {rule}"


def nearest_at(model: type[Options], parts: Sequence[str], prefix: str) -> str:
    """The nearest name among the siblings of an unknown setting."""
    kind: Any = model
    for depth in range(len(parts) - 1):
        kind = child_kind(model, kind, parts[: depth + 1])
    return hint(kind, kind, [*([prefix] if prefix else []), *parts]) if kind.model_fields else "there are none to set"


def brief(value: Any) -> str:
    """A value as JSON, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
