"""What a run on one's own machine needs: one Ray for the whole run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flytekit import FlyteContextManager

from mdiff_core import fleet


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
    # Flyte's plugin calls init again for each task, which Ray would tell of every time.
    logging.getLogger("ray._private.worker").setLevel(logging.WARNING)
    with fleet.local_ray():
        yield
