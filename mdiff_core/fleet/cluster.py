"""The Ray that engines run on: the one that is there, or a small local one."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

NAMESPACE = "mdiff"
"""Ray's, of engines that outlive a fleet."""
CLOSE_SECONDS = 10.0
"""For an engine to end what it started, before it is ended itself."""
OBJECT_STORE_BYTES = 2**30
"""Of a local Ray; trajectories only pass through, a few batches at a time."""

LOCAL = {
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # workers without a GPU keep the driver's CUDA_VISIBLE_DEVICES
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of a replaced engine's other batches, which were drawn by another
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else a driver under `uv run` builds an environment per worker
}


def ray_environment() -> Mapping[str, str]:
    """What Ray must find in the environment before it is first imported, where it is to run on this machine alone."""
    return LOCAL


def is_up() -> bool:
    """Whether this process is on a Ray; imports nothing to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


@contextmanager
def local_ray() -> Iterator[bool]:
    """The Ray in use, or one for as long as the block lasts; yields whether it is ours and so ends with the block.

    With RAY_ADDRESS set that cluster is joined; otherwise a local one is started, without dashboard and worker logs.
    """
    if "RAY_ADDRESS" not in os.environ:
        os.environ.update({name: value for name, value in LOCAL.items() if name not in os.environ})
    import ray

    if ray.is_initialized():
        yield False
        return
    handler = signal.getsignal(signal.SIGTERM)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**quiet)
    else:
        cpus = len(os.sched_getaffinity(0))
        ray.init(
            address="local", include_dashboard=False, num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES, **quiet
        )
    try:
        yield True
    finally:
        _close_kept()
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray put its own in place


def _close_kept() -> None:
    """Let engines that fleets have kept end what they started, as servers and their files."""
    import ray

    kept = [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE
    ]
    closing = [ray.get_actor(name, namespace=NAMESPACE).close.remote() for name in kept]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
