"""The only place where Flyte's handles meet folders: unwrap, run a stage unless its result exists, wrap."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from flytekit import FlyteContextManager, HashMethod
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory

from mdiff_core import artifacts
from mdiff_core.artifacts import Production
from mdiff_core.errors import EngineFailed, RewardUnavailable
from mdiff_core.policies import open_policy
from tasks.local import is_local

Folders = Mapping[str, Path]
"""By role."""
Metrics = Mapping[str, Any]
Run = Callable[[Folders, Folders], Metrics]
"""(inputs, folders to fill) -> metrics."""

DOWNLOADS = Path(tempfile.gettempdir()) / "mdiff-artifacts"


def uri_of(handle: FlyteDirectory) -> str:
    """Where the artifact is, without fetching it."""
    return str(handle.remote_source or handle.path)


def content_key(handle: FlyteDirectory) -> str:
    """`<role>/<key>`: what Flyte's cache compares, so that a result counts as the same wherever its store is."""
    return "/".join(uri_of(handle).rstrip("/").split("/")[-2:])


Artifact = Annotated[FlyteDirectory, HashMethod(content_key)]


def handle_of(uri: str) -> FlyteDirectory:
    """A handle that stays at `uri`: nothing is copied."""
    return FlyteDirectory(path=uri, remote_directory=False)


def default_store() -> str:
    """`runs` here, the execution's raw-output prefix on a cluster."""
    return "runs" if is_local() else str(FlyteContextManager.current_context().file_access.raw_output_prefix)


def fetch(handle: FlyteDirectory) -> Path:
    """The artifact's files on this machine."""
    return artifacts.localize(uri_of(handle), DOWNLOADS)


def planned(
    store: str, stage: str, version: str, job: str, inputs: Mapping[str, FlyteDirectory], roles: tuple[str, ...]
) -> Production:
    """What the stage will make, and whether it is there."""
    uris = {role: uri_of(handle) for role, handle in inputs.items()}
    return artifacts.production(store, stage, version, job, uris, roles)


def produce(made: Production, inputs: Mapping[str, FlyteDirectory], run: Run) -> list[FlyteDirectory]:
    """The stage's outputs in the order of its roles, made in this process unless they exist."""
    if not made.done:
        artifacts.produce(made, run, {role: fetch(handle) for role, handle in inputs.items()})
    return [handle_of(uri) for uri in made.uris.values()]


def lineage(folder: Path) -> Metrics:
    """Of the policy in `folder`: what a record of the run says of it."""
    policy = open_policy(folder, verify=False)
    return {"policy": policy.version, "parent": policy.parent, "checksum": policy.checksum}


@contextmanager
def retryable() -> Iterator[None]:
    """Errors of machines, which Flyte should try again, told apart from errors of settings, which it should not."""
    import torch

    infrastructure = (
        EngineFailed,
        RewardUnavailable,
        ConnectionError,
        torch.OutOfMemoryError,
        torch.distributed.DistBackendError,
    )
    try:
        yield
    except infrastructure as error:
        raise FlyteRecoverableException(f"{type(error).__name__}: {error}") from error
