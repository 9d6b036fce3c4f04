"""Rows of a benchmark as they are measured, kept in a file where several commands make one table; and peaks of memory."""

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

GUARD = b"mdiff_core.engines.sglang.guard"
"""In the command line of what starts a server: it leaves its parent, and so the tree of processes."""
TICK_SECONDS = 0.25


class Rows:
    """(case, what, value), printed at once; `numbers` are for later rows to compare with."""

    def __init__(self, file: Path | None) -> None:
        """With a file, rows and numbers of earlier commands are in it, and stay."""
        self._file = file
        kept = json.loads(file.read_text()) if file and file.is_file() else {"rows": [], "numbers": {}}
        self.rows: list[list[str]] = kept["rows"]
        self.numbers: dict[str, float] = kept["numbers"]

    def add(self, case: str, what: str, value: str) -> None:
        """A row, in place of an earlier one of that name."""
        self.rows = [row for row in self.rows if row[:2] != [case, what]] + [[case, what, value]]
        self.save()
        tell(f"{case}: {what}: {value}")

    def save(self) -> None:
        """Into the file, so that a command that is cut short leaves what it had."""
        if self._file:
            self._file.write_text(json.dumps({"rows": self.rows, "numbers": self.numbers}, indent=1))

    def table(self) -> str:
        """As Markdown."""
        return "| case | what | value |\n|---|---|---|\n" + "".join(f"| {' | '.join(row)} |\n" for row in self.rows)


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def timed(work: Callable[[], Any]) -> float:
    """Seconds, the GPU's queue included."""
    started = time.monotonic()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


class Peak:
    """Most memory in use while the `with` block lasts: of the GPU by whatever process, of the host by ours."""

    def __enter__(self) -> Self:
        self.gpu = self.host = 0.0
        self._ended = threading.Event()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what an earlier block left to PyTorch is not this one's
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.gpu, self.host = max(self.gpu, gpu_bytes()), max(self.host, host_bytes())
            if self._ended.wait(TICK_SECONDS):
                return

    def __str__(self) -> str:
        return f"{self.gpu / 2**30:.1f} GPU, {self.host / 2**30:.1f} host"


def gpu_bytes() -> float:
    """In use on the GPU, by all processes."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def host_bytes() -> float:
    """Of this process, what it started and servers; memory that several share is counted once."""
    children: dict[int, list[int]] = {}
    roots = [int(Path("/proc/self").resolve().name)]
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
                if GUARD in (folder / "cmdline").read_bytes():
                    roots.append(int(folder.name))
    found: set[int] = set()
    while roots:
        pid = roots.pop()
        if pid not in found:
            found.add(pid)
            roots.extend(children.get(pid, ()))
    return sum(map(share, found))


def share(pid: int) -> float:
    """Bytes of a process, its part of what it shares."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(line.split()[1]) * 1024
    return 0.0
