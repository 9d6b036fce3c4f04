"""From scored trajectories to the rows of a round's optimizer steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mdiff_core import seeds
from mdiff_core.errors import BadArtifact

COLUMNS = {
    "transitions": (
        *("sample", "group", "condition", "negative", "guidance", "sigmas", "sde_steps", "latent_steps", "log_probs"),
        "latents",
    ),
    "clean": ("sample", "group", "condition", "negative", "guidance", "clean"),
    "samples": ("sample", "group", "condition", "negative", "guidance", "sigmas", "clean"),
    "preferences": ("sample", "group", "condition", "negative", "guidance", "sigmas", "clean"),
}
"""Kind of rows to the trajectory columns they are made of; the others are never read from disk."""


def split(groups: Mapping[str, int], *, updates: int, seed: int, round: int) -> dict[str, int]:
    """Group id to optimizer step, so that steps have as equal a number of rows as whole groups allow.

    `groups` holds each group's rows. Ties fall by a hash of (seed, round, group): neither file order nor
    alphabet decides which prompts train together. With fewer groups than steps, the last steps get none.
    """
    order = sorted(groups, key=lambda group: (-groups[group], seeds.derive("split", seed, round, group)))
    loads = [0] * updates
    steps: dict[str, int] = {}
    for group in order:
        steps[group] = loads.index(min(loads))
        loads[steps[group]] += groups[group]
    return steps


def extremes(samples: Sequence[str], groups: Sequence[str], advantage: Sequence[float]) -> set[str]:
    """The best and the worst sample of each group; nothing of a group whose advantages are all equal.

    Of several that are equally good the first by a hash of their name counts, whatever their order.
    """
    members: dict[str, list[tuple[float, int, str]]] = {}
    for sample, group, credit in zip(samples, groups, advantage, strict=True):
        members.setdefault(group, []).append((credit, seeds.derive("extremes", sample), sample))
    ends = [(min(some), max(some)) for some in members.values()]
    return {end[2] for pair in ends if pair[0][0] < pair[1][0] for end in pair}


class Maker:
    """Makes the rows of one optimizer step, batch after batch.

    Latents are gathered into memory that is used again from the second next batch on, when a table's writer is done
    with it: fresh memory for every batch would be page faults over all that is written.
    """

    def __init__(self, kind: str, *, seed: int, round: int) -> None:
        makers = {
            "transitions": self._transitions,
            "clean": self._clean,
            "samples": self._samples,
            "preferences": self._preferences,
        }
        self._columns = makers[kind]
        self._seed = (seed, round)
        self._memory: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {})
        self._waiting: dict[str, dict[str, Any]] = {}
        """Row of the first of a group's two samples, until the other comes."""

    def make(self, batch: Mapping[str, Any], chosen: Sequence[int], advantage: np.ndarray) -> dict[str, Any]:
        """Columns of the rows for n trajectories, `chosen` [n] of a batch of `COLUMNS[kind]`, advantage [n].

        A row's seed derives from (run seed, round, sample, step). BadArtifact when a trained step's latents are missing.
        Of preferences, rows come with the second sample of a group; a batch may have none.
        """
        self._memory = self._memory[::-1]
        return self._columns(batch, np.asarray(chosen, np.intp), advantage.astype(np.float32))

    def _transitions(self, batch: Mapping[str, Any], rows: np.ndarray, advantage: np.ndarray) -> dict[str, Any]:
        """One row per (sample, trained step), W a sample."""
        trained, recorded = batch["sde_steps"][rows], batch["latent_steps"][rows]
        samples = [batch["sample"][row] for row in rows]
        if not trained.size:
            raise BadArtifact(
                f"{samples[0]}: no trained step was recorded; draw the round with a window (sampling.window)"
            )
        sigmas = batch["sigmas"][rows].astype(np.float32, copy=False)
        x, x_next = (_positions(recorded, trained + offset, samples) for offset in (0, 1))
        latents = batch["latents"]
        flat = latents.reshape(-1, *latents.shape[2:])
        first = rows[:, None] * latents.shape[1]
        steps = trained.shape[1]
        names = [(sample, step) for sample, row in zip(samples, trained.tolist(), strict=True) for step in row]
        return self._shared(batch, np.repeat(rows, steps), np.repeat(advantage, steps), names) | {
            "step": trained.ravel().astype(np.int32, copy=False),
            "sigma": np.take_along_axis(sigmas, trained, 1).ravel(),
            "sigma_next": np.take_along_axis(sigmas, trained + 1, 1).ravel(),
            "sigma_ceiling": np.repeat(sigmas[:, 1], steps),
            "x": self._gather("x", flat, (first + x).ravel()),
            "x_next": self._gather("x_next", flat, (first + x_next).ravel()),
            "log_prob": batch["log_probs"][rows].ravel().astype(np.float32, copy=False),
        }

    def _clean(self, batch: Mapping[str, Any], rows: np.ndarray, advantage: np.ndarray) -> dict[str, Any]:
        """One row per sample: its final latent."""
        names = [(batch["sample"][row],) for row in rows]
        return self._shared(batch, rows, advantage, names) | {"x0": self._gather("x0", batch["clean"], rows)}

    def _samples(self, batch: Mapping[str, Any], rows: np.ndarray, advantage: np.ndarray) -> dict[str, Any]:
        """One row per sample: its final latent, and the schedule it was drawn with."""
        return self._clean(batch, rows, advantage) | {"sigmas": batch["sigmas"][rows].astype(np.float32, copy=False)}

    def _preferences(self, batch: Mapping[str, Any], rows: np.ndarray, advantage: np.ndarray) -> dict[str, Any]:
        """One row per group, named after its better sample; its advantage is by how much that is better."""
        columns = self._samples(batch, rows, advantage)
        complete = []
        for i, group in enumerate(columns["group"]):
            # The latent is copied, as the batch's memory is used again before the other sample may come.
            row = {name: np.copy(column[i]) if name == "x0" else column[i] for name, column in columns.items()}
            other = self._waiting.pop(group, None)
            if other is None:
                self._waiting[group] = row
                continue
            worse, better = sorted((row, other), key=lambda one: float(one["advantage"]))
            gap = {"advantage": better["advantage"] - worse["advantage"]}
            complete.append(better | gap | {"better": better["x0"], "worse": worse["x0"]})
        texts = ("sample", "group", "condition", "negative")
        return {
            name: [row[name] for row in complete] if name in texts else np.stack([row[name] for row in complete])
            for name in ((*texts, "guidance", "seed", "advantage", "sigmas", "better", "worse") if complete else ())
        }

    def _shared(
        self, batch: Mapping[str, Any], rows: np.ndarray, advantage: np.ndarray, names: Sequence[tuple[int | str, ...]]
    ) -> dict[str, Any]:
        text = {name: [batch[name][row] for row in rows] for name in ("sample", "group", "condition", "negative")}
        return text | {
            "advantage": advantage,
            "guidance": batch["guidance"][rows].astype(np.float32),
            "seed": np.array([seeds.derive("row", *self._seed, *name) for name in names], np.int64),
        }

    def _gather(self, name: str, source: np.ndarray, index: np.ndarray) -> np.ndarray:
        memory = self._memory[0].get(name)
        if memory is None or len(memory) < len(index) or memory.dtype != source.dtype:
            memory = self._memory[0][name] = np.empty((len(index), *source.shape[1:]), source.dtype)
        # indices are right by construction; numpy buffers the whole output unless told how to treat wrong ones
        return np.take(source, index, axis=0, out=memory[: len(index)], mode="clip")


def _positions(recorded: np.ndarray, wanted: np.ndarray, samples: Sequence[str]) -> np.ndarray:
    """[n, W] where the wanted steps stand among the recorded ones [n, M]."""
    hits = recorded[:, None, :] == wanted[:, :, None]
    missing = np.argwhere(~hits.any(-1))
    if len(missing):
        row, column = missing[0]
        raise BadArtifact(
            f"{samples[row]}: latent before step {wanted[row, column]} is needed and was not recorded (recorded:"
            f" {recorded[row].tolist()}); the engine must record steps k and k+1 of each trained step k"
        )
    positions: np.ndarray = hits.argmax(-1)
    return positions
