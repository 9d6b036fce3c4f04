"""How fast, and in how much memory, a round of trajectories becomes training rows.

`python benchmarks/pairs.py [--trajectories N] [--folder DIR]` makes a trajectories table of SD3.5-medium latents
(16x64x64 float32, 10 steps, window 2, frames of 512 px), and prints, in one run and for the same bytes out:
mdiff's pair stage; a sequential write; and a list of dicts given to torch.save (nothing of its source in the page
cache). Each runs in a process of its own and times include fsync. Needs 3 MB of disk a trajectory, given back after,
and for torch.save 1.1 MB of memory a trajectory.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

LATENT, STEPS, WINDOW, GROUP = (16, 64, 64), 10, (1, 2), 24
FRAMES = (1, 512, 512, 3)
MIB = 2**20


class Memory:
    """Peak resident memory of this process, by kind, watched every 5 ms."""

    def __init__(self) -> None:
        self.peak = {"VmRSS": 0, "RssAnon": 0, "RssFile": 0}
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.look()
            time.sleep(0.005)

    def look(self) -> dict[str, int]:
        """Peaks so far, in bytes; the kernel's own high-water mark included."""
        text = Path("/proc/self/status").read_text()
        found = dict(re.findall(r"^(VmHWM|VmRSS|RssAnon|RssFile):\s+(\d+) kB", text, re.MULTILINE))
        for name in self.peak:
            self.peak[name] = max(self.peak[name], int(found[name]) * 1024)
        self.peak["VmRSS"] = max(self.peak["VmRSS"], int(found["VmHWM"]) * 1024)
        return self.peak


def synthesise(folder: Path, trajectories: int) -> None:
    """Tables as the rollout and score stages write them; latents and pixels are cut from one pool of noise."""
    import numpy as np
    import torch

    from mdiff_core import tables
    from mdiff_core.sigmas import flow_match_sigmas
    from mdiff_core.types import Prompt, Scored, Trajectory

    size, recorded = int(np.prod(LATENT)), (*WINDOW, WINDOW[-1] + 1)
    pool = torch.randn(64 * size, generator=torch.Generator().manual_seed(0))
    pixels = np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8)
    totals = np.random.default_rng(1).random(trajectories)
    scores = []
    with tables.trajectory_writer(folder) as writer:
        for i in range(trajectories):
            sample, group, at = f"g{i // GROUP}/{i % GROUP}", f"g{i // GROUP}", i * 997 % (32 * size)
            row = Trajectory(
                sample=sample,
                group=group,
                index=i % GROUP,
                prompt=Prompt(id=group, text="a sign that says hello", metadata={}),
                seed=i,
                policy="v0",
                weights="",
                condition="prompt",
                negative="",
                guidance=1.0,
                sigmas=flow_match_sigmas(STEPS, 3.0),
                sde_steps=WINDOW,
                latent_steps=recorded,
                latents=pool[at : at + len(recorded) * size].reshape(len(recorded), *LATENT),
                log_probs=torch.zeros(len(WINDOW)),
                clean=pool[at + size : at + 2 * size].reshape(LATENT),
                frames=pixels[at : at + int(np.prod(FRAMES))].reshape(FRAMES),
            )
            writer.add(row)
            total = float(totals[i])
            verdict = {"total": total, "error": "", "kept": True, "in_baseline": True, "reason": ""}
            scores.append(Scored(sample=sample, group=group, rewards={"r": total}, **verdict))
    with tables.condition_writer(folder) as conditions:
        conditions.add("prompt", {"prompt_embeds": torch.zeros(333, 4096, dtype=torch.bfloat16)})
    tables.write_scores(folder, scores)


def convert(source: Path, target: Path) -> None:
    """mdiff's pair stage, two optimizer steps."""
    from mdiff_core.jobs import PairJob
    from mdiff_core.settings import Advantage
    from mdiff_core.stages import pair

    names: dict[str, Any] = {"rows": "transitions", "combine": "sum", "weights": (1.0,), "rewards": ("r",)}
    pair.run(PairJob(**names, advantage=Advantage(), updates=2, seed=0, round=0), source, source, target)


def raw(size: int, target: Path) -> None:
    """`size` bytes to one file, the same 32 MiB over and over."""
    block = memoryview(os.urandom(32 * MIB))
    with open(target / "raw", "wb", buffering=0) as file:
        while size:
            size -= file.write(block[: min(size, len(block))])
        os.fsync(file.fileno())


def plain(source: Path, target: Path) -> None:
    """The rows as dicts of tensors in one list, and torch.save."""
    import torch

    from mdiff_core import tables

    rows = []
    for row in tables.read_trajectories(source):
        for w, step in enumerate(row.sde_steps):
            m = row.latent_steps.index(step)
            pair = {"x": row.latents[m].clone(), "x_next": row.latents[m + 1].clone()}
            text = {
                "sample": row.sample,
                "group": row.group,
                "condition": row.condition,
                "step": step,
                "seed": row.seed,
            }
            rows.append(
                pair | text | {"sigmas": row.sigmas[step : step + 2].clone(), "log_prob": row.log_probs[w].clone()}
            )
    with open(target / "rows.pt", "wb") as file:
        torch.save(rows, file)
        file.flush()
        os.fsync(file.fileno())


PHASES: dict[str, Callable[..., None]] = {"synthesise": synthesise, "convert": convert, "raw": raw, "plain": plain}


def phase(name: str, *arguments: str | int) -> None:
    """In the process of one phase: do it, and write seconds and memory as JSON."""
    import numpy  # noqa: F401 - importing is not what is timed
    import torch

    from mdiff_core.stages import pair  # noqa: F401

    torch.set_num_threads(1)
    memory, started, busy = Memory(), time.monotonic(), time.process_time()
    imported = memory.look()["VmRSS"]
    PHASES[name](*(Path(a) if isinstance(a, str) else a for a in arguments))
    found = {"seconds": time.monotonic() - started, "cpu": time.process_time() - busy, "imported": imported}
    sys.stdout.write(json.dumps(found | memory.look()) + "\n")


def measure(name: str, *arguments: Path | int, target: Path | None = None) -> dict[str, float]:
    """Run a phase by itself on a quiet disk; bytes are those it left in `target`, which is then emptied."""
    os.sync()
    if target is not None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
    given = json.dumps([name, *(a if isinstance(a, int) else str(a) for a in arguments)])
    done = subprocess.run([sys.executable, __file__, "--phase", given], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    if target is not None:
        found["bytes"] = sum(path.stat().st_size for path in target.iterdir() if path.stat().st_nlink == 1)
        shutil.rmtree(target)
    return found


def forget(folder: Path) -> None:
    """Take the folder's files out of the page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def bare_interpreter() -> int:
    """Resident bytes of a Python that has imported nothing."""
    code = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout) * 1024


def benchmark(folder: Path, trajectories: int, plain_trajectories: int) -> str:
    """The table, as Markdown."""
    source, few, target = folder / "source", folder / "few", folder / "target"
    synthesis = measure("synthesise", source, trajectories)
    inputs = sum(path.stat().st_size for path in source.iterdir())
    converted = [measure("convert", source, target, target=target)]
    size = int(converted[0]["bytes"])
    # there and back again, so that neither way always meets the memory that the other left behind
    raws = [measure("raw", size, target, target=target) for _ in range(2)]
    converted.append(measure("convert", source, target, target=target))
    forget(source)
    cold = measure("convert", source, target, target=target)
    if plain_trajectories < trajectories:
        shutil.rmtree(source)
        measure("synthesise", few, plain_trajectories)
        source = few
    forget(source)
    saved = measure("plain", source, target, target=target)
    rows = [
        ("pair stage", trajectories, converted[0]),
        ("sequential write of the same bytes", trajectories, raws[0]),
        ("sequential write, again", trajectories, raws[1]),
        ("pair stage, again", trajectories, converted[1]),
        ("pair stage, nothing in the page cache", trajectories, cold),
        ("list of dicts, torch.save", plain_trajectories, saved),
    ]
    bare = bare_interpreter()
    lines = [
        f"{trajectories} trajectories, {inputs / 1e9:.2f} GB read from (made at {rate(synthesis | {'bytes': inputs}):.0f} MB/s)",
        "",
        "| way | trajectories | GB out | s | CPU s | MB/s | peak RSS, MiB | above bare Python | anonymous | file-mapped |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(line(*row, bare) for row in rows),
        "",
        f"Bare Python {bare / MIB:.0f} MiB, with torch and the stage imported {cold['imported'] / MIB:.0f} MiB.",
        f"Rate of the pair stage / rate of the sequential write: {ratio(converted, raws):.0%} (both runs summed),"
        f" {ratio([cold], raws):.0%} with nothing in the page cache.",
    ]
    return "\n".join(lines)


def rate(found: dict[str, float]) -> float:
    """MB (10^6 bytes) a second."""
    return found["bytes"] / found["seconds"] / 1e6


def ratio(ours: list[dict[str, float]], raws: list[dict[str, float]]) -> float:
    """Mean seconds of the plain writes over ours, for the same bytes."""
    return mean(found["seconds"] for found in raws) / mean(found["seconds"] for found in ours)


def line(name: str, trajectories: int, found: dict[str, float], bare: int) -> str:
    """A row of the table."""
    memory = [found["VmRSS"], found["VmRSS"] - bare, found["RssAnon"], found["RssFile"]]
    cells = [f"{found['bytes'] / 1e9:.2f}", f"{found['seconds']:.1f}", f"{found['cpu']:.1f}", f"{rate(found):.0f}"]
    return f"| {name} | {trajectories} | {' | '.join(cells + [f'{value / MIB:.0f}' for value in memory])} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--plain-trajectories", type=int, help="fewer for torch.save, which holds them all in memory")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.phase:
        phase(*json.loads(given.phase))
        return
    with tempfile.TemporaryDirectory(prefix="bench-pairs-", dir=given.folder) as folder:
        plain_trajectories = min(given.plain_trajectories or given.trajectories, given.trajectories)
        table = benchmark(Path(folder).absolute(), given.trajectories, plain_trajectories)
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "pyarrow", "torch"))
    sys.stdout.write(f"{table}\nPython {platform.python_version()}, {packages}; {os.cpu_count()} cores.\n")


if __name__ == "__main__":
    main()
