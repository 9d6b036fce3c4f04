"""The settings reference, generated from the models: `python -m mdiff_core.config --reference > docs/settings.md`."""

import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mdiff_core.options import Choice, Options
from mdiff_core.overrides import bare
from mdiff_core.registry import REGISTRY, find
from mdiff_core.settings import RunConfig

HEAD = """# Settings

Every setting of a run, by the dotted path that an override uses (`train.lr=1e-4`). A run starts from a recipe
(`mdiff_core/recipes/`); `python -m mdiff_core.config RECIPE [a.b=c ...]` prints the result. Values are JSON, or plain text.

This page is generated: `python -m mdiff_core.config --reference > docs/settings.md`.
"""

ROW_HEAD = "| setting | type | default | meaning |\n|---|---|---|---|\n"


WORDS = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true/false",
    "JsonValue": "any value",
}
"""Of the plain types."""
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <="}


def page() -> str:
    """Markdown: the settings tree, then the options of every plug-in by slot."""
    parts = [HEAD, "\n## The run\n\n", ROW_HEAD, *rows(RunConfig, "")]
    for name, field in RunConfig.model_fields.items():
        inner = bare(field.annotation)
        if is_group(inner):
            parts += [f"\n## {name}\n\n{about(inner)}\n\n", ROW_HEAD, *rows(inner, f"{name}.", deep=True)]
    parts.append("\n## Plug-ins\n\nA choice is a `name` and the `options` of that name.\n")
    for slot, names in REGISTRY.items():
        parts.append(f"\n### {slot}\n")
        for name in names:
            plugin = find(slot, name)
            parts.append(f"\n**`{name}`**: {about(plugin)}\n")
            if plugin.Options.model_fields:
                parts += ["\n", ROW_HEAD.replace("setting", "option"), *rows(plugin.Options, "")]
    return "".join(parts)


def rows(model: type[BaseModel], prefix: str, deep: bool = False) -> Iterator[str]:
    """A table row per value; `deep` goes into the groups below."""
    for name, field in model.model_fields.items():
        inner = bare(field.annotation)
        if get_origin(inner) is tuple and is_group(get_args(inner)[0]):
            yield row(f"{prefix}{name}", field)
            yield from rows(get_args(inner)[0], f"{prefix}{name}.0.", deep)
        elif not is_group(inner):
            yield row(f"{prefix}{name}", field)
        elif deep:
            yield from rows(inner, f"{prefix}{name}.", deep)


def row(path: str, field: FieldInfo) -> str:
    """One line of a table."""
    meaning = (field.description or "").replace("\n", " ").replace("|", "\\|")
    return f"| `{path}` | {spell(field)} | {default(field)} | {meaning} |\n"


def is_group(kind: Any) -> bool:
    """Whether a setting holds settings of its own; a plug-in choice counts as one value."""
    return isinstance(kind, type) and issubclass(kind, Options) and not issubclass(kind, Choice)


def spell(field: FieldInfo) -> str:
    """Type and bounds in words."""
    limits = [
        spell_limit(name, value) for part in field.metadata for name, value in limits_of(part) if value is not None
    ]
    return " ".join([spell_type(field.annotation), ", ".join(limits)]).strip()


def limits_of(part: Any) -> Iterator[tuple[str, Any]]:
    """What a part of a field's metadata asks of the value, by name."""
    for name in ("pattern", *SIGNS):
        if hasattr(part, name):
            yield name, getattr(part, name)


def spell_limit(name: str, value: Any) -> str:
    """`>= 1`, or the pattern as code in a table's cell."""
    bar = "\\|"
    return f"pattern `{value.replace('|', bar)}`" if name == "pattern" else f"{SIGNS[name]} {value}"


def spell_type(kind: Any) -> str:
    """`float`, `text`, `one of a, b`, `list of ...`."""
    inner = bare(kind)
    if inner is not kind:
        return f"{spell_type(inner)} or null"
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        return (
            f"list of {spell_type(arguments[0])}"
            if arguments[-1] is ...
            else f"list of {len(arguments)} {spell_type(arguments[0])}"
        )
    if get_origin(kind) is dict:
        return "object"
    if arguments:
        return "one of " + ", ".join(f"`{argument}`" for argument in arguments)
    if isinstance(kind, type) and issubclass(kind, Choice):
        return "name and options"
    return WORDS[kind.__name__] if kind.__name__ in WORDS else str(kind.__name__)


def default(field: FieldInfo) -> str:
    """As JSON; empty when a value must be given."""
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True) or {}
    if isinstance(value, tuple):
        value = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in value]
    return f"`{json.dumps(value)}`"


def about(thing: type) -> str:
    """First line of the docstring."""
    return (thing.__doc__ or "").strip().split("\n")[0]
