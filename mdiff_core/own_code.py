"""Functions of the user's that settings name: only from modules that whoever runs the machine has allowed."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mdiff_core.errors import BadSetting

ALLOWED = "MDIFF_MODULES"
"""Environment variable: names of modules and packages, comma between. Settings may come from a form in a browser, and a name in them
must not be enough to call anything that can be imported."""


def function(name: str) -> Callable[..., Any]:
    """The function `module:function`; BadSetting when its module is not allowed or has no such function."""
    module, _, attribute = name.partition(":")
    if not module or not attribute.isidentifier():
        raise BadSetting(
            f"function: '{name}' is not of the form module:function; write for example my_rewards:sharpness"
        )
    allowed = [entry.strip() for entry in os.environ.get(ALLOWED, "").split(",") if entry.strip()]
    if not any(module == entry or module.startswith(f"{entry}.") for entry in allowed):
        known = ", ".join(allowed) or "none"
        raise BadSetting(
            f"function: '{name}' is in module '{module}', which is not allowed here (allowed: {known}); "
            f"set {ALLOWED}={module} on every machine of the run"
        )
    try:
        found = vars(import_module(module)).get(attribute)
    except (ImportError, SyntaxError) as error:
        raise BadSetting(
            f"function: '{name}' cannot be imported ({error}); repair the module, or put it into the image"
        ) from error
    except Exception as error:
        raise BadSetting(
            f"function: module '{module}' raised {type(error).__name__} when it was imported ({error}); repair it"
        ) from error
    if not callable(found):
        raise BadSetting(f"function: module '{module}' has no function '{attribute}'; name one that it has")
    checked: Callable[..., Any] = found
    return checked
