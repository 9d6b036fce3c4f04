"""What is written is what is read, whole or not at all, in flat memory."""

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from mdiff_core import tables
from mdiff_core.errors import BadArtifact, BadSetting, Damaged
from mdiff_core.types import Condition, Prompt, Scored, Trajectory


def trajectory(number: int, *, steps: Sequence[int] = (1, 2), dtype: torch.dtype = torch.float32) -> Trajectory:
    draw = torch.Generator().manual_seed(number)
    latent_steps = sorted({k for step in steps for k in (step, step + 1)})
    return Trajectory(
        sample=f"g{number // 4}/{number % 4}",
        group=f"g{number // 4}",
        index=number % 4,
        prompt=Prompt(id=f"p{number}", text=f"Bär {number}", metadata={"count": number, "nested": {"a": [1, None]}}),
        seed=2**62 - 1 - number,
        policy="v3",
        weights="abc",
        condition="key",
        negative="",
        guidance=4.1,
        sigmas=torch.linspace(1, 0, 5),
        sde_steps=tuple(steps),
        latent_steps=tuple(latent_steps),
        latents=torch.randn(len(latent_steps), 4, 6, 5, generator=draw).to(dtype),
        log_probs=torch.randn(len(steps), generator=draw),
        clean=torch.randn(4, 6, 5, generator=draw).to(dtype),
        frames=np.random.default_rng(number).integers(0, 256, (1, 8, 8, 3), np.uint8),
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


def write(folder: Path, rows: Sequence[Trajectory], **options: int) -> Path:
    with tables.trajectory_writer(folder, **options) as writer:
        for row in rows:
            writer.add(row)
    return folder


def columns(rows: int, start: int = 0, kind: str = "transitions") -> dict[str, Any]:
    """Rows whose numbers all tell their position."""
    position = np.arange(start, start + rows)
    tensor = np.broadcast_to(position[:, None, None], (rows, 2, 3)).astype(np.float32)
    shared = {
        "sample": [f"s{i}" for i in position],
        "group": ["g"] * rows,
        "advantage": position.astype(np.float32),
        "condition": ["c"] * rows,
        "negative": [""] * rows,
        "guidance": np.ones(rows, np.float32),
        "seed": position,
    }
    if kind == "clean":
        return shared | {"x0": tensor}
    names = ("sigma", "sigma_next", "sigma_ceiling", "log_prob")
    numbers = {name: position.astype(np.float32) for name in names}
    return shared | numbers | {"step": position.astype(np.int32), "x": tensor, "x_next": tensor + 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("steps", [(1, 2), (0, 3), ()], ids=["window", "apart", "evaluation"])
def test_trajectories_come_back_equal(tmp_path: Path, dtype: torch.dtype, steps: tuple[int, ...]) -> None:
    """Bit for bit, in order, over several files; also with no trained step, so no latent at all."""
    written = [trajectory(number, steps=steps, dtype=dtype) for number in range(9)]
    with tables.trajectory_writer(tmp_path, shard_bytes=1) as writer:
        for row in written:
            writer.add(row)
            writer.flush()
    assert len(list(tmp_path.glob("trajectories-*.arrow"))) == 9
    read = list(tables.read_trajectories(tmp_path))
    assert tables.count(tmp_path, "trajectories") == len(read) == 9
    for a, b in zip(written, read, strict=True):
        assert all(same(getattr(a, field.name), getattr(b, field.name)) for field in fields(Trajectory))


def test_columns_come_as_views(tmp_path: Path) -> None:
    written = [trajectory(number) for number in range(5)]
    (batch,) = tables.trajectory_batches(write(tmp_path, written), ("sample", "latents", "sde_steps", "seed"))
    assert batch["sample"] == [row.sample for row in written]
    assert np.array_equal(batch["latents"], np.stack([row.latents.numpy() for row in written]))
    assert batch["latents"].base is not None, "on the memory map, not a copy"
    assert batch["seed"].tolist() == [row.seed for row in written]
    with pytest.raises(KeyError, match="no column 'latent'"):
        next(tables.trajectory_batches(tmp_path, ["latent"]))


def test_bfloat16_reaches_numpy_as_the_same_numbers(tmp_path: Path) -> None:
    written = [trajectory(number, dtype=torch.bfloat16) for number in range(3)]
    (batch,) = tables.trajectory_batches(write(tmp_path, written), ["clean"])
    assert batch["clean"].dtype == np.float32
    assert torch.equal(torch.from_numpy(batch["clean"]), torch.stack([row.clean.float() for row in written]))


def test_writing_to_what_was_read_changes_no_file(tmp_path: Path) -> None:
    write(tmp_path, [trajectory(0)])
    next(tables.read_trajectories(tmp_path)).clean.zero_()
    assert same(next(tables.read_trajectories(tmp_path)).clean, trajectory(0).clean)


def test_samples_of_one_table_are_shaped_alike(tmp_path: Path) -> None:
    other = replace(trajectory(1), clean=torch.zeros(4, 6, 6))
    with pytest.raises(BadSetting, match=r"g0/1: clean has shape \(4, 6, 6\), the table's is \(4, 6, 5\)"):
        write(tmp_path, [trajectory(0), other])
    assert list(tmp_path.iterdir()) == []


def test_conditions_are_kept_once_and_found_by_key(tmp_path: Path) -> None:
    conditions: dict[str, Condition] = {
        "cat": {"embeds": torch.randn(3, 4, dtype=torch.bfloat16), "mask": torch.tensor([True, False])},
        "dog": {"embeds": torch.randn(5, 4, dtype=torch.bfloat16), "mask": torch.tensor([True, True])},
        "": {"embeds": torch.zeros(3, 4, dtype=torch.bfloat16), "mask": torch.tensor([False, False])},
    }
    with tables.condition_writer(tmp_path) as writer:
        for key, condition in conditions.items():
            writer.add(key, condition)
        writer.add("cat", conditions["dog"])
    assert tables.count(tmp_path, "conditions") == 3
    (tmp_path / "copy").mkdir()
    tables.copy_conditions(tmp_path, tmp_path / "copy")
    for folder in (tmp_path, tmp_path / "copy"):
        read = tables.read_conditions(folder)
        assert list(read) == list(conditions)
        assert all(same(read[k][n], conditions[k][n]) for k in conditions for n in conditions[k])
    assert list(tables.read_conditions(tmp_path, ["dog"])) == ["dog"]
    with pytest.raises(BadArtifact, match="no condition 'bird'"):
        tables.read_conditions(tmp_path, ["dog", "bird"])


def test_scores_come_back_equal(tmp_path: Path) -> None:
    first = Scored(
        sample="g/0",
        group="g",
        rewards={"jpeg": -1.5, "shapes": 0.1},
        total=0.3,
        error="",
        kept=True,
        in_baseline=True,
        reason="",
    )
    second = replace(first, sample="g/1", kept=False, in_baseline=False, reason="duplicates: same as g/0")
    tables.write_scores(tmp_path, [first, second])
    assert tables.read_scores(tmp_path) == [first, second]


def test_a_missing_score_comes_back_missing(tmp_path: Path) -> None:
    row = Scored(
        sample="g/0",
        group="g",
        rewards={"r": float("nan")},
        total=float("nan"),
        error="r: broke",
        kept=False,
        in_baseline=False,
        reason="missing",
    )
    tables.write_scores(tmp_path, [row])
    (read,) = tables.read_scores(tmp_path)
    assert np.isnan(read.total) and np.isnan(read.rewards["r"]) and read.error == "r: broke"


def test_scores_have_the_same_rewards(tmp_path: Path) -> None:
    row = Scored(sample="a", group="g", rewards={"r": 1.0}, total=1.0, error="", kept=True, in_baseline=True, reason="")
    with pytest.raises(BadSetting, match="b: rewards"):
        tables.write_scores(tmp_path, [row, replace(row, sample="b", rewards={"q": 1.0})])


@pytest.mark.parametrize("kind", ["transitions", "clean"])
def test_any_rows_are_right(tmp_path: Path, kind: str) -> None:
    """Neighbours or far apart, across record batches and files alike."""
    with tables.row_writer(tmp_path, 0, kind, shard_bytes=2000) as writer:
        for start, rows in [(0, 3), (3, 1), (4, 5), (9, 2)]:
            writer.add_batch(columns(rows, start, kind))
    assert len(list(tmp_path.glob("rows-000-*.arrow"))) > 1
    table = tables.RowTable(tmp_path, 0)
    assert (table.kind, len(table)) == (kind, 11)
    for start in range(11):
        for stop in range(start + 1, 12):
            found, expected = table.take(np.arange(start, stop)), columns(stop - start, start, kind)
            assert set(found) == set(expected)
            assert all(same(found[name], expected[name]) for name in found)
    whole = columns(11, 0, kind)
    for apart in (np.array([0, 2, 3, 5, 10, 10]), np.array([4, 10, 0, 3, 4])):
        for name, column in table.take(apart).items():
            assert same(column, [whole[name][row] for row in apart] if isinstance(column, list) else whole[name][apart])
    for wrong in ([-1, 2], [], [5, 11]):
        with pytest.raises(IndexError):
            table.take(np.array(wrong, dtype=np.int64))


def test_neighbours_within_a_batch_are_not_copied(tmp_path: Path) -> None:
    with tables.row_writer(tmp_path, 0, "clean") as writer:
        writer.add_batch(columns(4, kind="clean"))
    table = tables.RowTable(tmp_path, 0)
    first, second = table.take(np.arange(3))["x0"], table.take(np.arange(1, 4))["x0"]
    assert np.shares_memory(first, second)


def test_rows_of_the_steps_are_counted(tmp_path: Path) -> None:
    for update in (0, 1, 3):
        with tables.row_writer(tmp_path, update, "clean") as writer:
            writer.add_batch(columns(1, kind="clean"))
    with pytest.raises(BadArtifact, match=r"\[0, 1, 3\]"):
        tables.RowTable.updates(tmp_path)
    with tables.row_writer(tmp_path, 2, "clean") as writer:
        writer.add_batch(columns(1, kind="clean"))
    assert tables.RowTable.updates(tmp_path) == 4
    with pytest.raises(BadArtifact):
        tables.RowTable(tmp_path, 4)


def test_rows_must_be_whole_and_alike(tmp_path: Path) -> None:
    short = columns(3) | {"sigma": np.zeros(2, np.float32)}
    missing = {name: column for name, column in columns(3).items() if name != "x_next"}
    with pytest.raises(BadSetting, match="different lengths"), tables.row_writer(tmp_path, 0, "transitions") as writer:
        writer.add_batch(short)
    with pytest.raises(BadArtifact, match="'x_next'"), tables.row_writer(tmp_path, 0, "transitions") as writer:
        writer.add_batch(missing)
    wide = columns(3) | {"x": np.zeros((3, 2, 4), np.float32)}
    with pytest.raises(BadSetting, match="different shapes"), tables.row_writer(tmp_path, 0, "transitions") as writer:
        writer.add_batch(columns(3))
        writer.add_batch(wide)
    assert list(tmp_path.iterdir()) == []


def test_an_unstorable_type_is_refused(tmp_path: Path) -> None:
    odd = columns(1, kind="clean") | {"x0": np.zeros((1, 2), np.complex64)}
    with pytest.raises(BadSetting, match="x0: complex64"), tables.row_writer(tmp_path, 0, "clean") as writer:
        writer.add_batch(odd)


def test_a_table_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), tables.trajectory_writer(tmp_path, shard_bytes=1) as writer:
        for number in range(3):
            writer.add(trajectory(number))
            writer.flush()
        assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"] * 3
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadArtifact, match=r"no trajectories-\*.arrow"):
        list(tables.read_trajectories(tmp_path))


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, 0.999])
def test_a_torn_file_is_refused(tmp_path: Path, keep: float) -> None:
    write(tmp_path, [trajectory(number) for number in range(4)])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(BadArtifact, match=r"trajectories-00000.arrow: not a whole Arrow file"):
        list(tables.read_trajectories(tmp_path))


def everything(folder: Path) -> list[Any]:
    """All that can be read of the folder's tables, as plain values."""
    found: list[Any] = []
    found += [[repr(row.prompt), row.sample, row.frames.tolist()] for row in tables.read_trajectories(folder)]
    names = tables.samples.TRAJECTORIES.columns
    for batch in tables.trajectory_batches(folder, names):
        found += [
            [name, batch[name].tolist() if isinstance(batch[name], np.ndarray) else batch[name]] for name in names
        ]
    for key, condition in tables.read_conditions(folder).items():
        found.append([key, {name: value.tolist() for name, value in condition.items()}])
    found += [repr(row) for row in tables.read_scores(folder)]
    table = tables.RowTable(folder, 0)
    rows = table.take(np.arange(len(table)))
    return [
        *found,
        {name: column.tolist() if isinstance(column, np.ndarray) else column for name, column in rows.items()},
    ]


def all_tables(folder: Path) -> Path:
    write(folder, [trajectory(number) for number in range(3)])
    with tables.condition_writer(folder) as conditions:
        conditions.add("key", {"embeds": torch.randn(3, 4).bfloat16()})
    verdict = {"total": 0.3, "error": "", "kept": True, "in_baseline": True, "reason": "none"}
    tables.write_scores(folder, [Scored(sample=f"g/{i}", group="g", rewards={"r": 0.1}, **verdict) for i in range(2)])
    with tables.row_writer(folder, 0, "transitions") as writer:
        writer.add_batch(columns(3))
    return folder


@pytest.mark.parametrize("stem", ["trajectories", "conditions", "scores", "rows-000"])
def test_a_flipped_byte_is_found_or_changes_nothing(tmp_path: Path, stem: str) -> None:
    """Anywhere in a file: what reads at all reads as it was written, and the rest is a sentence that names the file."""
    before = everything(all_tables(tmp_path))
    path = tmp_path / f"{stem}-00000.arrow"
    whole, found = path.read_bytes(), 0
    for position in range(0, len(whole), 13):
        torn = bytearray(whole)
        torn[position] ^= 1 << position % 8
        path.write_bytes(torn)
        try:
            assert everything(tmp_path) == before, position
        except BadArtifact as error:
            found += 1
            assert str(path) in str(error) and "run its stage again" in str(error)
            assert isinstance(error, Damaged) and error.path == path
    assert found > len(whole) / 13 / 4


def test_rows_that_are_not_taken_need_not_be_whole(tmp_path: Path) -> None:
    """A step that draws some rows reads those alone."""
    with tables.row_writer(tmp_path, 0, "clean") as writer:
        writer.add_batch(columns(4, kind="clean"))
    (path,) = tmp_path.iterdir()
    last = np.full((2, 3), 3, np.float32).tobytes()
    path.write_bytes(path.read_bytes().replace(last, last[:-1] + b"\x01"))
    table = tables.RowTable(tmp_path, 0)
    assert len(table.take(np.arange(3))["x0"]) == 3
    with pytest.raises(Damaged, match="column 'x0' is not as it was written"):
        table.take(np.array([1, 3]))


def test_a_table_from_before_there_were_digests_is_read(tmp_path: Path) -> None:
    write(tmp_path, [trajectory(0)])
    (path,) = tmp_path.iterdir()
    old = pa.ipc.open_file(path).read_all()
    metadata = {key: value for key, value in old.schema.metadata.items() if key != b"mdiff.digest"}
    with pa.ipc.new_file(str(path), old.schema.with_metadata(metadata)) as file:
        file.write_table(old.replace_schema_metadata(metadata))
    (row,) = tables.read_trajectories(tmp_path)
    assert same(row.frames, trajectory(0).frames)


def test_a_missing_shard_is_noticed(tmp_path: Path) -> None:
    with tables.trajectory_writer(tmp_path, shard_bytes=1) as writer:
        for number in range(3):
            writer.add(trajectory(number))
            writer.flush()
    (tmp_path / "trajectories-00001.arrow").unlink()
    with pytest.raises(BadArtifact, match=r"trajectories-00001.arrow is missing"):
        list(tables.read_trajectories(tmp_path))


def test_another_table_or_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [trajectory(0)])
    (tmp_path / "trajectories-00000.arrow").rename(tmp_path / "scores-00000.arrow")
    with pytest.raises(BadArtifact, match="holds table 'trajectories' version '1', not 'scores' version '1'"):
        tables.read_scores(tmp_path)
    stranger = pa.table({"sample": ["a"]})
    for metadata, says in [(None, "'none'"), ({"mdiff.table": "scores", "mdiff.version": "99"}, "version '99'")]:
        with pa.ipc.new_file(str(tmp_path / "scores-00000.arrow"), stranger.schema.with_metadata(metadata)) as file:
            file.write_table(stranger.replace_schema_metadata(metadata))
        with pytest.raises(BadArtifact, match=says):
            tables.read_scores(tmp_path)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    lacking = pa.table({"sample": ["a"]}).replace_schema_metadata({"mdiff.table": "scores", "mdiff.version": "1"})
    with pa.ipc.new_file(str(tmp_path / "scores-00000.arrow"), lacking.schema) as file:
        file.write_table(lacking)
    with pytest.raises(BadArtifact, match="without the column 'group'"):
        tables.read_scores(tmp_path)


FILL = """
import resource, sys
from pathlib import Path
import numpy as np
from mdiff_core import tables
from mdiff_core.errors import BadSetting
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
sys.path.insert(0, sys.argv[2])
from test_tables import trajectory
try:
    with tables.trajectory_writer(Path(sys.argv[1])) as writer:
        for number in range(500):
            writer.add(trajectory(number))
            if number % 10 == 0:
                writer.flush()
except BadSetting as error:
    print(error)
    sys.exit(3)
"""


def test_a_limit_on_file_size_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """The kernel's own limit, met in the middle of a record batch."""
    command = [sys.executable, "-c", FILL, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 3, done.stderr
    assert f"{tmp_path}/trajectories-00000.arrow: the disk is full" in done.stdout
    assert "MiB free" in done.stdout and "`store`" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 1 MiB of our own; skipped where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "mdiff-test", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_a_sentence_and_leaves_nothing(small_disk: Path) -> None:
    with (
        pytest.raises(BadSetting, match=r"trajectories-00000.arrow: the disk is full .* MiB free") as caught,
        tables.trajectory_writer(small_disk) as writer,
    ):
        for number in range(500):
            writer.add(trajectory(number))
            writer.flush()
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delayed allocation reports a full disk at fsync."""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadSetting, match="the disk is full"):
        write(tmp_path, [trajectory(0)])
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_the_disk_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:
        write(tmp_path / "file", [trajectory(0)])
    assert caught.value.errno == errno.EEXIST or caught.value.errno == errno.ENOTDIR


GROW = """
import sys
from pathlib import Path
import numpy as np
from mdiff_core import tables
sys.path.insert(0, sys.argv[2])
from test_tables import trajectory
from dataclasses import replace
import torch
row = replace(trajectory(0), latents=torch.zeros(3, 16, 64, 64), clean=torch.zeros(16, 64, 64))
folder, peak = Path(sys.argv[1]), 0.0
def look():  # own memory alone: how much of a mapped file is resident is the kernel's choice
    global peak
    peak = max(peak, int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) / 1024)
def write(count):
    with tables.trajectory_writer(folder, shard_bytes=100 * 2**20) as writer:
        for _ in range(count):
            writer.add(row)
            look()
def read():
    for batch in tables.trajectory_batches(folder, ["latents"]):
        batch["latents"].sum()
        look()
write(150); read(); few = peak
write(600); read(); print(peak - few)
"""


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """600 MiB written and read cost what 150 MiB did, where growth would cost 450 MiB.

    150 MiB allow for the batches that wait for the disk, of which a short run on a fast disk may meet none.
    """
    command = [sys.executable, "-c", GROW, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert float(done.stdout) < 150
