"""Batches of requests to engines and their trajectories back, in order, each exactly once, whatever happens to an engine."""

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mdiff_core import registry
from mdiff_core.errors import EngineFailed, MdiffError
from mdiff_core.fleet.actor import EngineActor, pack
from mdiff_core.fleet.cluster import CLOSE_SECONDS, NAMESPACE, local_ray
from mdiff_core.fleet.progress import LOG, LOG_SECONDS, Progress
from mdiff_core.policies import Weights, checksum_of, open_policy
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Condition, Request, Trajectory

IN_FLIGHT = 2
"""Batches an engine has at a time: the one it draws, and the next, so that it never waits for us."""
AHEAD = 4
"""Batches per engine that may be out or finished before the oldest one is back: bounds memory when an engine lags."""
CPU_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait must sleep: spinning ones slowed a CPU engine 30 times down when something else ran beside it."""
LOAD_SECONDS = 1800.0
"""Longest that starting an engine and loading a policy may take, tens of gigabytes from a shared disk included."""
TICK_SECONDS = 0.5

Batch = tuple[list[Trajectory], dict[str, Condition]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Something asked of an engine."""

    batch: int | None
    """None: load the policy."""
    ref: Any


@dataclass(slots=True, kw_only=True)
class _Slot:
    """A place for an engine; the engine in it may be replaced."""

    number: int
    actor: Any
    jobs: deque[_Job] = field(default_factory=deque)
    since: float = 0.0
    """When the first job became the one being worked on."""
    shared: bool
    """Whether the engine may stay for the next fleet."""


class Fleet:
    """The recipe's engines with one policy, for as long as the `with` block lasts."""

    def __init__(self, rollout: Rollout, model: Model, policy: Path, weights: Weights = "live") -> None:
        """BadArtifact when `policy` is not a whole policy."""
        self._rollout, self._model, self._weights = rollout, model, weights
        self._policy = open_policy(policy)
        self._checksum = checksum_of(self._policy, weights)
        self._stack = ExitStack()
        self._slots: list[_Slot] = []
        self._batches: Sequence[Sequence[Request]] = ()
        self._waiting: deque[int] = deque()
        self._restarts = 0
        self._images = 0
        self._entered = self._start_seconds = self._seconds = self._busy = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Images, seconds of drawing them, images_per_s, seconds that engines had nothing to draw (all together) meanwhile,
        seconds until the engines were up, restarts."""
        rate = self._images / self._seconds if self._seconds else 0.0
        return {
            "images": self._images,
            "seconds": self._seconds,
            "images_per_s": rate,
            "idle_s": max(0.0, self._seconds * self._rollout.engines - self._busy),
            "start_seconds": self._start_seconds,
            "restarts": self._restarts,
        }

    def __enter__(self) -> Self:
        import ray

        self._entered = time.monotonic()
        ours = self._stack.enter_context(local_ray())
        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            here = len(nodes) == 1 and nodes[0]["Resources"].get("CPU", 0) > 0  # else engines may be on other machines
            self._files = None if here else ray.put(pack(self._policy.path))
            self._cpus = _share(nodes, self._rollout.engines)
            self._end_others()
            shared = self._rollout.keep_engines and not ours
            self._slots = [self._start(number, shared) for number in range(self._rollout.engines)]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        try:
            ending = [slot for slot in self._slots if slot.jobs or error or not slot.shared]
            closing = [slot.actor.close.remote() for slot in ending if not slot.jobs]
            if closing and error is None:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
            for slot in ending:
                ray.kill(slot.actor)
        finally:
            self._slots = []
            self._stack.close()

    def stream(
        self, batches: Sequence[Sequence[Request]]
    ) -> Iterator[tuple[int, list[Trajectory], dict[str, Condition]]]:
        """(batch index, its trajectories, conditions not sent before) in batch order, as they come.

        EngineFailed when engines died, hung or erred more often than `rollout.restarts`.
        """
        self._batches = batches
        self._waiting = deque(range(len(batches)))
        finished, position = dict[int, Batch](), 0
        self._wait_for_one()  # the images' rate is theirs alone
        with Progress(sum(len(request.seeds) for batch in batches for request in batch)) as progress:
            while position < len(batches):
                self._feed(position + AHEAD * len(self._slots))
                for number, batch in self._collect():
                    finished[number] = batch
                    progress.add(len(batch[0]))
                while position in finished:
                    trajectories, conditions = finished.pop(position)
                    yield position, trajectories, conditions
                    position += 1
        self._images += progress.done
        self._seconds += progress.seconds

    def _wait_for_one(self) -> None:
        """Until an engine has its policy; says now and then that it takes long."""
        told = time.monotonic()
        while not self._start_seconds:
            list(self._collect())
            if time.monotonic() - told > LOG_SECONDS:
                told = time.monotonic()
                LOG.info("engines are starting, %.0f s so far, %d restarts", told - self._entered, self._restarts)

    def _start(self, number: int, shared: bool) -> _Slot:
        """A new engine, or with `shared` the one that an earlier fleet left; told to load the policy."""
        import ray

        settings = self._rollout.to_json(), self._model.to_json()
        threads = 0 if self._rollout.gpus_per_engine else int(self._cpus)
        options: dict[str, Any] = {"num_gpus": self._rollout.gpus_per_engine, "num_cpus": self._cpus, "max_restarts": 0}
        options["max_concurrency"] = registry.find("engine", self._rollout.engine.name).batches_at_once
        if not self._rollout.gpus_per_engine:
            options["runtime_env"] = {"env_vars": CPU_ENVIRONMENT}
        if shared:
            options |= {
                "name": self._name(number),
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
            }
        slot = _Slot(
            number=number, actor=ray.remote(EngineActor).options(**options).remote(*settings, threads), shared=shared
        )
        self._send(slot, None)
        return slot

    def _name(self, number: int) -> str:
        """Of an engine that may be kept: the same for settings that make the same engine."""
        made_of = (self._rollout.engine, self._rollout.gpus_per_engine, self._cpus, self._model)
        return f"engine-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}-{number}"

    def _end_others(self) -> None:
        """End engines that fleets of other settings have kept: they hold what ours need."""
        import ray

        ours = {self._name(number) for number in range(self._rollout.engines)} if self._rollout.keep_engines else set()
        for kept in ray.util.list_named_actors(all_namespaces=True):
            if kept["namespace"] == NAMESPACE and kept["name"] not in ours:
                ray.kill(ray.get_actor(kept["name"], namespace=NAMESPACE))

    def _send(self, slot: _Slot, batch: int | None) -> None:
        if not slot.jobs:
            slot.since = time.monotonic()
        if batch is None:
            ref = slot.actor.load.remote(str(self._policy.path.absolute()), self._weights, self._files)
        else:
            ref = slot.actor.generate.remote(self._batches[batch])
        slot.jobs.append(_Job(batch=batch, ref=ref))

    def _feed(self, limit: int) -> None:
        """Hand out batches below `limit`, one to each engine that has its policy before a second to any."""
        for depth in range(1, IN_FLIGHT + 1):
            for slot in self._slots:
                ready = len(slot.jobs) < depth and not any(job.batch is None for job in slot.jobs)
                if ready and self._waiting and self._waiting[0] < limit:
                    self._send(slot, self._waiting.popleft())

    def _collect(self) -> Iterator[tuple[int, Batch]]:
        """What finished within a tick; engines that failed or are overdue are replaced."""
        import ray

        heads = {slot.jobs[0].ref: slot for slot in self._slots if slot.jobs}
        ready, _ = ray.wait(list(heads), timeout=min(TICK_SECONDS, self._rollout.timeout_s))
        for ref in ready:
            slot = heads[ref]
            result = self._result(slot, slot.jobs[0])
            if result is not None:
                yield result
        for slot in self._slots:
            if slot.jobs and slot.jobs[0].ref not in ready:
                limit = LOAD_SECONDS if slot.jobs[0].batch is None else self._rollout.timeout_s
                if time.monotonic() - slot.since > limit:
                    self._replace(slot, f"did not answer within {limit:g} s")

    def _result(self, slot: _Slot, job: _Job) -> tuple[int, Batch] | None:
        """The finished job's batch; None for a loaded policy, or after replacing an engine that failed."""
        import ray

        try:
            value = ray.get(job.ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MdiffError) and not isinstance(cause, EngineFailed):
                raise cause from error
            if not isinstance(cause, RuntimeError | OSError | MemoryError):
                raise  # a fault in the code, which another engine would have too
            self._replace(slot, f"failed ({type(cause).__name__}: {cause})")
            return None
        except ray.exceptions.RayError as error:
            self._replace(slot, f"died ({str(error).splitlines()[0]})")
            return None
        slot.jobs.popleft()
        began, slot.since = slot.since, time.monotonic()
        if job.batch is not None:
            self._busy += slot.since - began
            return job.batch, value
        self._start_seconds = self._start_seconds or time.monotonic() - self._entered
        if value != self._checksum:
            raise EngineFailed(
                f"engine {slot.number} loaded weights {value[:12]}, not the {self._weights} ones of policy "
                f"{self._policy.version}, {self._checksum[:12]}; run the rollout again"
            )
        return None

    def _replace(self, slot: _Slot, why: str) -> None:
        """A new engine in the slot, told to load the policy; whoever is free first draws what the old one owed."""
        import ray

        doing = "loading the policy" if slot.jobs[0].batch is None else f"drawing batch {slot.jobs[0].batch}"
        if self._restarts >= self._rollout.restarts:
            raise EngineFailed(
                f"engine {slot.number} {why} while {doing}, after {self._restarts} restarts (rollout.restarts); run the "
                "rollout again, with a smaller rollout.batch if memory ran out or a longer rollout.timeout_s if it was slow"
            )
        self._restarts += 1
        ray.kill(slot.actor)
        self._waiting.extendleft(sorted((job.batch for job in slot.jobs if job.batch is not None), reverse=True))
        new = self._start(slot.number, shared=False)
        slot.actor, slot.jobs, slot.since, slot.shared = new.actor, new.jobs, new.since, False


def _share(nodes: Sequence[dict[str, Any]], engines: int) -> float:
    """CPUs for each engine: an equal part of all, whole when more than one, and no more than a machine has."""
    cpus = [float(node["Resources"].get("CPU", 0)) for node in nodes]
    share = min(sum(cpus) / engines, max(cpus))
    return float(int(share)) if share >= 1 else share
