"""Do engine and trainer mean the same by a log-prob? Measured on a round's first step, before any weight changed."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mdiff_core import registry
from mdiff_core.errors import DriftExceeded
from mdiff_core.jobs import UpdateJob
from mdiff_core.policy import ModelPolicy
from mdiff_core.train.diagnosis import cause_of
from mdiff_core.train.rows import Microbatch
from mdiff_core.train.shard import from_all, reduced
from mdiff_core.types import PolicyVersion, Transitions

DTYPE_OF = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(slots=True)
class Drift:
    """Collects |log-prob of trainer - of engine| per row of this rank, on the device."""

    _parts: list[tuple[Microbatch, Tensor, Tensor]] = field(default_factory=list)
    """Micro-batch, difference [B], counted [B]."""

    def add(self, live: ModelPolicy, batch: Microbatch) -> None:
        """After the loss ran on `batch`; only if the loss itself asked for no log-prob is one computed here."""
        rows = batch.rows
        if not isinstance(rows, Transitions):
            return
        if live.density is None:
            with torch.no_grad():
                live.log_prob(rows.x_next, live.transition(rows))
        density = live.density
        assert density is not None
        counted = density.noisy & (batch.weight > 0)
        self._parts.append((batch, torch.where(counted, (density.log_prob - rows.log_prob).abs(), 0.0), counted))

    def finish(
        self, job: UpdateJob, policy: PolicyVersion, live: ModelPolicy, transformer: nn.Module
    ) -> dict[str, float]:
        """drift_max, drift_mean and, when the loss clips, drift_over_clip; empty for rows without log-probs. Collective.

        DriftExceeded, on every rank, past `train.drift_limit`.
        """
        if not self._parts:
            return {}
        differences = torch.cat([difference for _, difference, _ in self._parts]).double()
        counted = torch.cat([counted for _, _, counted in self._parts])
        total, rows = reduced(torch.stack([differences.sum(), counted.sum().double()]), "sum")
        (most,) = reduced(differences.max().reshape(1), "max")
        found = {"drift_max": most, "drift_mean": total / max(rows, 1)}
        clip = registry.options("loss", job.loss).model_dump().get("clip")
        if clip is not None:
            found["drift_over_clip"] = most / clip
        if not most <= job.train.drift_limit:
            seen = self._rows()
            worst = self._parts[seen[0]["part"]][0]
            raise DriftExceeded(message(job, policy, found, seen, cause_of(job, policy, live, transformer, worst)))
        return found

    def _rows(self) -> list[dict[str, Any]]:
        """Every rank's rows with their drift, the worst first."""
        own = [
            {
                "sample": name,
                "drift": drift,
                "sigma": sigma,
                "sigma_next": after,
                "guidance": batch.rows.conditioning.guidance,
                "part": part,
            }
            for part, (batch, difference, _) in enumerate(self._parts)
            if isinstance(batch.rows, Transitions)
            for name, drift, sigma, after in zip(
                batch.names, difference.tolist(), batch.rows.sigma.tolist(), batch.rows.sigma_next.tolist(), strict=True
            )
        ]
        rows = [row for part in from_all(own) for row in part]
        return sorted(rows, key=lambda row: -row["drift"] if row["drift"] == row["drift"] else -torch.inf)


def message(
    job: UpdateJob, policy: PolicyVersion, found: dict[str, float], rows: list[dict[str, Any]], cause: str
) -> str:
    """What is known of a drift past the limit, and the likeliest cause; without a diagnosed one, what its shape suggests."""
    worst = rows[0]
    above = [row["sigma"] for row in rows if not row["drift"] <= job.train.drift_limit]
    over = f", {found['drift_over_clip']:.3g} times the loss's clip" if "drift_over_clip" in found else ""
    if DTYPE_OF[job.train.precision] != job.model.dtype:
        cause = (
            f"dtype: train.precision='{job.train.precision}' is not model.dtype='{job.model.dtype}': make them the same"
        )
    elif not cause and len(above) > len(rows) / 2:
        cause = "most rows are off, as when the engine drew with other weights: compare the checksum with its log"
    elif not cause:
        cause = (
            "few rows are off, as from rounding where sigma is small: narrow sampling.window or raise train.drift_limit"
        )
    return (
        f"train.drift_limit: log-probs of engine and trainer differ by {found['drift_max']:.3g} (mean {found['drift_mean']:.3g}"
        f"{over}) on the first step of round {job.round}, the limit is {job.train.drift_limit:.3g}. Worst is sample "
        f"{worst['sample']} at sigma {worst['sigma']:.5f} -> {worst['sigma_next']:.5f}; {len(above)} of {len(rows)} rows are over it, "
        f"sigma {min(above):.5f} to {max(above):.5f}; guidance {worst['guidance']:g}, model {job.model.dtype}, training "
        f"{job.train.precision}, policy {policy.version} ({policy.kind}, checksum {policy.checksum[:12]}). Likely cause: {cause}"
    )
