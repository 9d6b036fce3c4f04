"""An engine in the stage's own process: no Ray, no other process, nothing restarted."""

import atexit
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from mdiff_core.contracts import Engine
from mdiff_core.errors import EngineFailed, MdiffError
from mdiff_core.fleet.actor import make_engine
from mdiff_core.fleet.progress import Progress
from mdiff_core.policies import Weights, checksum_of, open_policy
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Condition, Request, Trajectory

Batch = tuple[list[Trajectory], dict[str, Condition]]
_kept: dict[tuple[str, str], Engine] = {}
"""The engine that `rollout.keep_engines` leaves for the next stage of this process, by the settings that make it."""


class Inside:
    """What Fleet is to engines on Ray, for one engine here; see Fleet."""

    def __init__(self, rollout: Rollout, model: Model, policy: Path, weights: Weights = "live") -> None:
        """BadArtifact when `policy` is not a whole policy."""
        self._rollout, self._model, self._weights = rollout, model, weights
        self._policy = open_policy(policy)
        self._made_of = (f"{rollout.engine.to_json()} {rollout.gpus_per_engine}", model.to_json())
        self._engine: Engine | None = None
        self._images, self._seconds, self._start_seconds = 0, 0.0, 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Those of a Fleet; nothing idles and nothing is restarted."""
        rate = self._images / self._seconds if self._seconds else 0.0
        measured = {"images": self._images, "seconds": self._seconds, "images_per_s": rate}
        return measured | {"idle_s": 0.0, "start_seconds": self._start_seconds, "restarts": 0}

    def __enter__(self) -> Self:
        """EngineFailed when the engine loads other weights than it was told to."""
        started = time.monotonic()
        self._engine = _kept.pop(self._made_of, None)
        close_kept()  # those of other settings hold what ours needs
        self._engine = self._engine or made(self._rollout, self._model)
        loaded, wanted = self._engine.load(self._policy, self._weights), checksum_of(self._policy, self._weights)
        if loaded != wanted:
            self._engine.close()
            raise EngineFailed(
                f"the engine loaded weights {loaded[:12]}, not the {self._weights} ones of policy "
                f"{self._policy.version}, {wanted[:12]}; run the rollout again"
            )
        self._start_seconds = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._engine is not None
        if self._rollout.keep_engines and error is None:
            _kept[self._made_of] = self._engine
        else:
            self._engine.close()
        self._engine = None

    def stream(
        self, batches: Sequence[Sequence[Request]]
    ) -> Iterator[tuple[int, list[Trajectory], dict[str, Condition]]]:
        """(batch index, its trajectories, conditions not sent before) in batch order; the engine draws on while one is used."""
        engine = self._engine
        assert engine is not None
        images = sum(len(request.seeds) for batch in batches for request in batch)
        waiting, out = iter(enumerate(batches)), deque[Future[Batch]]()
        with Progress(images) as progress, ThreadPoolExecutor(engine.batches_at_once) as pool:

            def send(count: int) -> None:
                out.extend(pool.submit(drawn, engine, batch, at) for at, batch in islice(waiting, count))

            send(engine.batches_at_once + 1)
            for position in range(len(batches)):
                try:
                    trajectories, conditions = out.popleft().result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
                send(1)
                progress.add(len(trajectories))
                yield position, trajectories, conditions
        self._images += progress.done
        self._seconds += progress.seconds


def made(rollout: Rollout, model: Model) -> Engine:
    """A new engine; EngineFailed for what the device does to it."""
    try:
        return make_engine(rollout, model)
    except RuntimeError as error:
        if isinstance(error, MdiffError):
            raise
        raise EngineFailed(f"the engine could not be made ({error}); see to that, or draw elsewhere") from error


def drawn(engine: Engine, batch: Sequence[Request], position: int) -> Batch:
    """One batch; EngineFailed for what the device or the network does to it."""
    trajectories: list[Trajectory] = []
    conditions: dict[str, Condition] = {}
    try:
        for trajectory, fresh in engine.generate(batch):
            trajectories.append(trajectory)
            conditions.update(fresh)
    except (RuntimeError, OSError, MemoryError) as error:
        if isinstance(error, MdiffError):
            raise
        raise EngineFailed(
            f"the engine failed ({type(error).__name__}: {error}) while drawing batch {position}; run the rollout again, "
            "with a smaller rollout.batch if memory ran out"
        ) from error
    return trajectories, conditions


@atexit.register
def close_kept() -> None:
    """End engines that were kept for a stage that did not come."""
    while _kept:
        _kept.popitem()[1].close()
