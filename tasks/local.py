"""What a run on one's own machine needs: one Ray for the whole run, and errors that a person reads."""

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from flytekit import FlyteContextManager

from mdiff_core import fleet
from mdiff_core.errors import MdiffError

TRACE = "MDIFF_TRACE"
"""Environment variable: keep the traces of errors that are said in a sentence."""


def is_local() -> bool:
    """Whether tasks run as plain calls on this machine."""
    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.is_local_execution()


@contextmanager
def local_ray() -> Iterator[None]:
    """One Ray for all that runs inside, ended afterwards; nothing on a cluster, where each job has its own."""
    if not is_local():
        yield
        return
    if "RAY_ADDRESS" not in os.environ and not fleet.is_up():
        say("starting Ray; engines load the model as soon as it is up")
    # Flyte's plugin calls init again for each task, which Ray would tell of every time.
    logging.getLogger("ray._private.worker").setLevel(logging.WARNING)
    with fleet.local_ray():
        yield


@contextmanager
def one_sentence() -> Iterator[None]:
    """Under pyflyte on this machine, an error of ours is the last line of the output, and nothing else is shown of it.

    For any exception but click's own, pyflyte prints a box with a trace before it; so that one is raised that only ends the command.
    """
    try:
        yield
    except Exception as error:
        cause = error if isinstance(error, MdiffError) else error.__cause__
        alone = is_local() and click.get_current_context(silent=True) is not None
        if not isinstance(cause, MdiffError) or not alone or os.environ.get(TRACE):
            raise
        sys.stderr.write(f"{sentence(cause)}\n")
        raise click.exceptions.Exit(1) from error


def sentence(error: MdiffError) -> str:
    """Without the names of tasks, which Flyte puts before it."""
    return re.sub(r"^(Error encountered while executing '[^']*':\s*)+", "", str(error))


def say(line: str) -> None:
    """To whoever watches the run."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
