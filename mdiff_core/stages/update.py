"""Train for one round: rows, policy and train state in, the next policy and train state out."""

from pathlib import Path

from mdiff_core import policies
from mdiff_core.jobs import UpdateJob

VERSION = "2"


def run(job: UpdateJob, pairs: Path, policy: Path, state: Path, out_policy: Path, out_state: Path) -> dict[str, float]:
    """Called on every rank; with one process no process group is needed. Rank 0 writes, all return the metrics.

    The artifacts that are read must be at the given paths on every node; those written are rank 0's.
    """
    # Imported here because they bring FSDP, for which whoever only wants VERSION should not have to wait.
    from mdiff_core.determinism import deterministic
    from mdiff_core.train import shard
    from mdiff_core.train.loop import Trainer

    start = policies.open_policy(policy)
    device = shard.own_device()
    with deterministic(device), shard.all_ranks(device) as mesh:
        trainer = Trainer(job, start, state, mesh)
        metrics = trainer.train(pairs, job.round)
        trainer.save(out_policy, out_state)
    return metrics
