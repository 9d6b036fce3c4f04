"""Everything stages hand to each other in bulk: Arrow IPC files, written shard by shard, read through memory maps.

The only reader and writer of Arrow. A table is a folder's `<name>-NNNNN.arrow`; name and version are in its schema
and checked on reading, and a table that is not whole cannot be read: BadArtifact either way. A full disk is a
BadSetting that names the file.
"""

from mdiff_core.tables.rows import KINDS, RowTable, RowWriter, row_writer
from mdiff_core.tables.samples import (
    ConditionWriter,
    TrajectoryWriter,
    condition_writer,
    copy_conditions,
    count,
    read_conditions,
    read_scores,
    read_trajectories,
    trajectory_batches,
    trajectory_writer,
    write_scores,
)

__all__ = [
    "KINDS",
    "ConditionWriter",
    "RowTable",
    "RowWriter",
    "TrajectoryWriter",
    "condition_writer",
    "copy_conditions",
    "count",
    "read_conditions",
    "read_scores",
    "read_trajectories",
    "row_writer",
    "trajectory_batches",
    "trajectory_writer",
    "write_scores",
]
