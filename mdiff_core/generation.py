"""From requests to checked trajectories on disk: what rollout and evaluation share."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdiff_core import hub, policies, registry, tables
from mdiff_core.errors import BadSetting, EngineFailed
from mdiff_core.fleet import engines
from mdiff_core.policies import Weights
from mdiff_core.sampler import latent_steps
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import PolicyVersion, Request, Trajectory


def generate(
    waves: Iterable[Sequence[Request]],
    rollout: Rollout,
    model: Model,
    policy: Path,
    out: Path,
    weights: Weights = "live",
    seen: Callable[[Trajectory], object] = lambda trajectory: None,
) -> dict[str, Any]:
    """Writes `trajectories` and `conditions` of all requests, which share one plan; what the engines measured.

    A wave is asked for once all samples of the one before are written, with the engines still up.

    A policy that does not hold such `weights` (the first of a run) is drawn from with its live ones; the metrics say so.
    `seen` gets each sample as it is written, while the engines go on. EngineFailed when engines cannot finish or return
    something else than was asked for; BadArtifact for a policy of another base.
    """
    coming = iter(waves)
    requests = next(coming)
    family, plan = registry.make("family", model.family), requests[0].plan
    opened = policies.open_policy(policy, verify=False)  # the fleet verifies
    policies.check_base(opened, family.digest(model.path), hub.fingerprint(model.path, hub.TRAINED))
    weights = policies.held(opened, weights)
    checksum = policies.checksum_of(opened, weights)
    sigmas = family.sigmas(model.path, steps=plan.steps, width=plan.width, height=plan.height)
    inspector = Inspector(requests, sigmas, opened, checksum)
    with (
        engines(rollout, model, policy, weights) as fleet,
        tables.trajectory_writer(out) as rows,
        tables.condition_writer(out) as conditions,
    ):
        while requests:
            for _, trajectories, fresh in fleet.stream(list(batched(requests, rollout.batch))):
                for key, condition in fresh.items():
                    conditions.add(key, condition)
                    inspector.add_condition(key)
                for trajectory in trajectories:
                    inspector.check(trajectory)
                    rows.add(trajectory)
                    seen(trajectory)
            inspector.finish()
            requests = next(coming, ())
            inspector.ask(requests)
    return fleet.metrics | {"policy": opened.version, "weights": weights, "weights_checksum": checksum}


def batched(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    """The samples in order, `size` at a time, those of one group together as one request."""
    samples = [(request, i) for request in requests for i in range(len(request.seeds))]
    for start in range(0, len(samples), size):
        groups = groupby(samples[start : start + size], key=lambda sample: sample[0].group)
        yield [part([*members]) for _, members in groups]


def part(samples: Sequence[tuple[Request, int]]) -> Request:
    """A request for some samples of another one."""
    request, chosen = samples[0][0], [i for _, i in samples]
    return replace(
        request, indices=tuple(request.indices[i] for i in chosen), seeds=tuple(request.seeds[i] for i in chosen)
    )


def check_seeds(requests: Sequence[Request]) -> None:
    """BadSetting when two samples would be drawn from the same noise."""
    seen: dict[int, str] = {}
    for request in requests:
        for index, seed in zip(request.indices, request.seeds, strict=True):
            sample = f"{request.group}/{index}"
            if seed in seen:
                raise BadSetting(
                    f"seed: samples '{sample}' and '{seen[seed]}' have the same seed {seed}; change `seed`"
                )
            seen[seed] = sample


class Inspector:
    """Compares what engines return with what they were asked; anything else must not be trained on."""

    def __init__(self, requests: Sequence[Request], sigmas: Tensor, policy: PolicyVersion, checksum: str = "") -> None:
        """`sigmas` [T+1] float32 is the family's schedule for the requests' plan; `checksum` that of the weights to draw with,
        which a policy that holds no other need not be given."""
        self._sigmas, self._policy, self._plan = sigmas, policy, requests[0].plan
        self._checksum = checksum or policy.checksum
        self._asked: dict[str, tuple[Request, int, int]] = {}
        self._missing: dict[str, None] = {}
        self._latents: dict[bytes, str] = {}
        self._keys_needed: set[str] = set()
        self._keys: set[str] = set()
        self.ask(requests)

    def ask(self, requests: Sequence[Request]) -> None:
        """Note what more is to come."""
        more = {
            f"{request.group}/{index}": (request, index, seed)
            for request in requests
            for index, seed in zip(request.indices, request.seeds, strict=True)
        }
        self._asked |= more
        self._missing |= dict.fromkeys(more)

    def add_condition(self, key: str) -> None:
        """Note a condition that came."""
        self._keys.add(key)

    def check(self, trajectory: Trajectory) -> None:
        """EngineFailed with what is wrong about one sample."""
        wrong = self._wrong(trajectory)
        if wrong:
            raise EngineFailed(f"sample '{trajectory.sample}': {wrong}; run the rollout again, or use another engine")
        del self._missing[trajectory.sample]
        self._keys_needed.update(filter(None, (trajectory.condition, trajectory.negative)))

    def finish(self) -> None:
        """EngineFailed when samples or conditions did not come."""
        if self._missing:
            raise EngineFailed(
                f"{len(self._missing)} samples never came, such as '{next(iter(self._missing))}'; run the rollout again"
            )
        if absent := sorted(self._keys_needed - self._keys):
            raise EngineFailed(f"{len(absent)} conditions never came, such as '{absent[0]}'; run the rollout again")

    def _wrong(self, trajectory: Trajectory) -> str:
        """What is wrong, or nothing."""
        if trajectory.sample not in self._asked:
            return "nobody asked for it"
        if trajectory.sample not in self._missing:
            return "came twice"
        return self._echo(trajectory) or self._shape(trajectory) or self._numbers(trajectory)

    def _echo(self, trajectory: Trajectory) -> str:
        request, index, seed = self._asked[trajectory.sample]
        policy, plan = self._policy, self._plan
        told = {
            "group": (trajectory.group, request.group),
            "index": (trajectory.index, index),
            "prompt": (trajectory.prompt.id, request.prompt.id),
            "seed": (trajectory.seed, seed),
            "policy": (trajectory.policy, policy.version),
            "weights": (trajectory.weights, self._checksum),
            "guidance": (trajectory.guidance, plan.guidance),
            "sde_steps": (trajectory.sde_steps, plan.sde_steps),
            "latent_steps": (trajectory.latent_steps, latent_steps(plan.sde_steps)),
        }
        for name, (found, asked) in told.items():
            if found != asked:
                return f"the engine says {name} {found}, asked for was {asked}"
        if trajectory.sigmas.dtype != torch.float32 or not torch.equal(trajectory.sigmas, self._sigmas):
            return f"drawn with sigmas {_spell(trajectory.sigmas)}, the family's are {_spell(self._sigmas)}"
        return ""

    def _shape(self, trajectory: Trajectory) -> str:
        latent, plan = tuple(trajectory.clean.shape), self._plan
        shapes = {
            "latents": (tuple(trajectory.latents.shape), (len(trajectory.latent_steps), *latent)),
            "log_probs": (tuple(trajectory.log_probs.shape), (len(plan.sde_steps),)),
            "frames": (trajectory.frames.shape, (plan.frames, plan.height, plan.width, 3)),
        }
        for name, (found, asked) in shapes.items():
            if found != asked:
                return f"{name} have shape {found}, not {asked}"
        return ""

    def _numbers(self, trajectory: Trajectory) -> str:
        for name, values in (
            ("latents", trajectory.latents),
            ("log_probs", trajectory.log_probs),
            ("clean", trajectory.clean),
        ):
            if not bool(torch.isfinite(values).all()):
                return f"{name} hold numbers that are not finite"
        digest = hashlib.sha256(trajectory.clean.contiguous().numpy().tobytes()).digest()
        if digest in self._latents:
            return f"has the very latent of '{self._latents[digest]}', so one of the seeds was ignored"
        self._latents[digest] = trajectory.sample
        return ""


def _spell(sigmas: Tensor) -> str:
    return f"[{', '.join(f'{sigma:.8f}' for sigma in sigmas.tolist())}] ({sigmas.dtype})"
