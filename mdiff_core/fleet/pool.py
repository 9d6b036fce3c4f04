"""Rewards as Ray actors: batches of samples there, scores back in order, whatever happens to a process."""

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from mdiff_core.errors import MdiffError, RewardUnavailable
from mdiff_core.fleet.cluster import local_ray
from mdiff_core.own_code import ALLOWED
from mdiff_core.panel import Panel, nothing
from mdiff_core.settings import Score
from mdiff_core.types import Measured, Shot

LOG = logging.getLogger("mdiff.score")
IN_FLIGHT = 2
"""Batches a worker has at a time: the one it scores, and the next, so that it never waits for us."""
AHEAD = 8
"""Batches per worker that may be handed in and not be out again: bounds the memory that frames take."""
START_SECONDS = 600.0
"""Longest that a worker's process may take to start."""
TICK_SECONDS = 0.1
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait must sleep, or engines on the same CPUs slow down."""
KEPT = "mdiff-rewards"
"""Ray's namespace of workers that outlive a pool."""


class PanelActor:
    """A panel in a process of its own."""

    def __init__(self, settings: str, threads: int) -> None:
        """`settings` is a Score as JSON; `threads` CPU threads for networks."""
        import torch

        torch.set_num_threads(threads)
        self._panel = Panel(Score.from_json(settings))

    def ready(self) -> bool:
        """Returns once the process is up."""
        return True

    def measure(self, shots: Sequence[Shot]) -> Measured:
        """One batch."""
        return self._panel.measure(shots)


@dataclass(slots=True, kw_only=True)
class _Job:
    """A batch on its way."""

    shots: Sequence[Shot]
    tries: int = 0
    """Times that a worker died or hung over it."""
    measured: Measured | None = None


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A place for an actor; the actor in it may be replaced."""

    actor: Any
    tasks: deque[tuple[Any, _Job | None]]
    """What it is doing, in order: reference and batch; no batch while it starts."""
    since: float
    """When it began with the first of them."""
    shared: bool
    """Whether it may be left for the next pool."""


class RewardPool:
    """The recipe's rewards in `workers` processes, for as long as the `with` block lasts or, with `keep_workers`, Ray does."""

    def __init__(self, settings: Score) -> None:
        self._settings = settings
        self._stack = ExitStack()
        self._workers: list[_Worker] = []
        self._queue, self._waiting = deque[_Job](), deque[_Job]()
        self._restarts, self._busy, self._entered = 0, 0.0, 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Workers, restarts, seconds that they scored, and seconds that they had nothing to do, all workers together."""
        alive = (time.monotonic() - self._entered) * len(self._workers)
        counts = {"workers": len(self._workers), "restarts": self._restarts}
        return {**counts, "busy_s": self._busy, "idle_s": max(0.0, alive - self._busy)}

    def __enter__(self) -> Self:
        ours = self._stack.enter_context(local_ray())
        try:
            shared = self._settings.keep_workers and not ours
            self._end_others(shared)
            self._workers = [
                self._start(self._name(number) if shared else "") for number in range(self._settings.workers)
            ]
        except BaseException:
            self._stack.close()
            raise
        self._entered = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        try:
            for worker in self._workers:
                if error or worker.tasks or not worker.shared:
                    ray.kill(worker.actor)
        finally:
            self._workers = []
            self._stack.close()

    def stream(self, batches: Iterable[Sequence[Shot]]) -> Iterator[tuple[Sequence[Shot], Measured]]:
        """Each batch with its scores, in order, as they come."""
        for batch in batches:
            self.submit(batch)
            yield from self.finished()
        yield from self.rest()

    def submit(self, batch: Sequence[Shot]) -> None:
        """Hand in a batch; waits while too many are under way."""
        job = _Job(shots=batch)
        self._queue.append(job)
        self._waiting.append(job)
        self._feed()
        while sum(job.measured is None for job in self._queue) > AHEAD * len(self._workers):
            self._collect(TICK_SECONDS)

    def finished(self) -> Iterator[tuple[Sequence[Shot], Measured]]:
        """The batches that are done, in the order they were handed in; does not wait."""
        self._collect(0.0)
        while self._queue and self._queue[0].measured is not None:
            job = self._queue.popleft()
            assert job.measured is not None
            yield job.shots, job.measured

    def rest(self) -> Iterator[tuple[Sequence[Shot], Measured]]:
        """All that was handed in and is not out yet, in order."""
        while self._queue:
            yield from self.finished()
            if self._queue:
                self._collect(TICK_SECONDS)

    def _start(self, name: str = "") -> _Worker:
        """A new worker, or the one of that name that an earlier pool left."""
        import ray

        # no CPUs of Ray's count: engines have taken them all, and scoring must go on beside them
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self._settings.gpus_per_worker, "max_restarts": 0}
        options |= {"scheduling_strategy": "SPREAD", "runtime_env": {"env_vars": self._environment()}}
        if name:
            options |= {"name": name, "namespace": KEPT, "lifetime": "detached", "get_if_exists": True}
        made = ray.remote(PanelActor).options(**options).remote(self._settings.to_json(), self._threads())
        tasks = deque[tuple[Any, _Job | None]]([(made.ready.remote(), None)])
        return _Worker(actor=made, tasks=tasks, since=time.monotonic(), shared=bool(name))

    def _threads(self) -> int:
        cpus = len(os.sched_getaffinity(0))
        return 1 if self._settings.stream else max(1, cpus // self._settings.workers)

    def _environment(self) -> dict[str, str]:
        found = ENVIRONMENT | {name: os.environ[name] for name in (ALLOWED,) if name in os.environ}
        if not self._settings.gpus_per_worker:
            found["CUDA_VISIBLE_DEVICES"] = ""  # else `device: auto` would find the engines' GPUs
        return found

    def _name(self, number: int) -> str:
        """Of a worker that may be kept: the same for settings that make the same worker."""
        made_of = (self._settings.to_json(), self._threads(), sorted(self._environment().items()))
        return f"rewards-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}-{number}"

    def _end_others(self, shared: bool) -> None:
        """End workers that pools of other settings have kept: they hold memory, and GPUs that ours may need."""
        import ray

        ours = {self._name(number) for number in range(self._settings.workers)} if shared else set()
        for kept in ray.util.list_named_actors(all_namespaces=True):
            if kept["namespace"] == KEPT and kept["name"] not in ours:
                ray.kill(ray.get_actor(kept["name"], namespace=KEPT))

    def _feed(self) -> None:
        """Hand out what waits, one to each worker that is up before a second to any."""
        for depth in range(1, IN_FLIGHT + 1):
            for worker in self._workers:
                # one that is starting gets none: if it died over it at once, it would look as if it had died of starting
                up = not any(job is None for _, job in worker.tasks)
                if up and self._waiting and len(worker.tasks) < depth:
                    self._send(worker, self._waiting.popleft())

    def _send(self, worker: _Worker, job: _Job) -> None:
        if not worker.tasks:
            worker.since = time.monotonic()
        worker.tasks.append((worker.actor.measure.remote(job.shots), job))

    def _collect(self, wait: float) -> None:
        """Take what is done within `wait` seconds; replace workers that died or are overdue."""
        import ray

        heads = [worker.tasks[0][0] for worker in self._workers if worker.tasks]
        if not heads:
            return
        ready, _ = ray.wait(heads, timeout=wait)
        for worker in self._workers:
            if worker.tasks and worker.tasks[0][0] in ready:
                self._take(worker)
            elif worker.tasks:
                limit = self._settings.timeout_s if worker.tasks[0][1] else START_SECONDS
                if time.monotonic() - worker.since > limit:
                    self._replace(worker, f"gave no answer within {limit:g} s (score.timeout_s)")
        self._feed()

    def _take(self, worker: _Worker) -> None:
        """The result of what the worker was doing."""
        import ray

        ref, job = worker.tasks[0]
        try:
            found = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MdiffError):
                raise error.cause from error
            raise  # a fault in the code, which another process would have too
        except ray.exceptions.RayError as error:
            self._replace(worker, f"died ({str(error).splitlines()[0]})")
            return
        worker.tasks.popleft()
        worker.since = time.monotonic()
        if job:
            job.measured = found
            self._busy += found.seconds

    def _replace(self, worker: _Worker, why: str) -> None:
        """A new process in the place; the batch that the old one was at is tried again, or given up."""
        import ray

        ray.kill(worker.actor)
        job = worker.tasks[0][1]
        owed = [task for _, task in worker.tasks if task]
        if job is None and not worker.shared:  # else it may have been dead when it was found
            raise RewardUnavailable(f"a reward process {why} while it started; look at its log, or give it more memory")
        if job:
            job.tries += 1
            LOG.warning("a reward process %s over a batch of %d samples, time %d", why, len(job.shots), job.tries)
        if job and job.tries >= self._settings.attempts:
            names = [term.name for term in self._settings.rewards]
            job.measured = nothing(job.shots, names, f"the reward's process {why}, {job.tries} times", job.tries - 1)
            owed.remove(job)
        self._restarts += 1
        self._waiting.extendleft(reversed(owed))
        new = self._start()
        worker.actor, worker.tasks, worker.since, worker.shared = new.actor, new.tasks, new.since, new.shared
