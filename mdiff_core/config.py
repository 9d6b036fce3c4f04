"""A recipe's name and dotted overrides become the one RunConfig of a run.

`python -m mdiff_core.config RECIPE [a.b=c ...]` checks and prints it; `--reference` prints docs/settings.md.
"""

import hashlib
import json
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from mdiff_core import overrides as dotted
from mdiff_core import recipes
from mdiff_core.errors import BadSetting, MdiffError
from mdiff_core.registry import nearest
from mdiff_core.settings import RunConfig

RECIPES: tuple[str, ...] = tuple(sorted(module.name for module in pkgutil.iter_modules(recipes.__path__)))
"""Names of the modules in `mdiff_core/recipes`."""

USAGE = "usage: python -m mdiff_core.config RECIPE [a.b=c ...] | --reference"

BESIDE_THE_RESULT = {"rounds", "target_reward", "store", "name", "hardware"}
"""Settings that say when, where and how fast, but not what: a run goes on under the same name when they change."""


def recipe(name: str) -> RunConfig:
    """The settings of `mdiff_core/recipes/<name>.py`; BadSetting names the nearest recipe when there is none."""
    if name not in RECIPES:
        raise BadSetting(f"recipe: '{name}' is not a known recipe; {nearest(name, RECIPES)}")
    found: RunConfig = vars(import_module(f"{recipes.__name__}.{name}"))["RECIPE"]
    return found


def load(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe with `a.b=c` overrides laid over it, later ones last. Nothing is checked across settings: see `checks.check`."""
    tree = dotted.lay_over(RunConfig, recipe(name).model_dump(mode="json"), overrides)
    try:
        config = RunConfig.from_json(json.dumps(tree))
    except ValidationError as error:
        raise BadSetting(dotted.sentence(error, RunConfig)) from None
    if config.recipe != name:
        raise BadSetting(f"recipe: '{config.recipe}' cannot be an override; start from that recipe instead of '{name}'")
    return config


def digest(settings: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """8 hex digits of what decides the result: the settings (a RunConfig as JSON values), and `inputs` (role to artifact's
    address or key) in place of the prompt files' names."""
    tree = {name: value for name, value in settings.items() if name not in BESIDE_THE_RESULT}
    tree["prompts"] = {"per_round": settings["prompts"]["per_round"]}
    keys = {role: uri.rpartition("/")[2] for role, uri in inputs.items()}
    return hashlib.sha256(json.dumps([tree, keys], sort_keys=True).encode()).hexdigest()[:8]


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0, or 1 after one sentence on stderr."""
    # These pull in the plug-ins and with them torch, which whoever only loads a recipe should not wait for.
    from mdiff_core import checks, reference

    if list(arguments) == ["--reference"]:
        sys.stdout.write(reference.page())
        return 0
    if not arguments or arguments[0].startswith("-"):
        sys.stderr.write(f"{USAGE}\nrecipes: {', '.join(RECIPES)}\n")
        return 1
    try:
        config = load(arguments[0], arguments[1:])
        checks.check(config)
    except MdiffError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(config.model_dump_json(indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
