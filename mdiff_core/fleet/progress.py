"""How far a stream of images has come: a bar on a terminal, a line now and then in a log."""

import logging
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LOG = logging.getLogger("mdiff.rollout")
LOG_SECONDS = 10.0


class Progress:
    """Counts images; shows rate and time left."""

    def __init__(self, total: int) -> None:
        self.done = 0
        self._total = total
        self._started = self._logged = time.monotonic()
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.2f} images/s"),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
        self._task = self._bar.add_task("images", total=total, rate=0.0)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def add(self, images: int) -> None:
        """Count finished images."""
        self.done += images
        rate = self.done / self.seconds
        self._bar.update(self._task, advance=images, rate=rate)
        last = self.done == self._total
        if self._bar.disable and (last or time.monotonic() - self._logged >= LOG_SECONDS):
            self._logged = time.monotonic()
            left = (self._total - self.done) / rate
            LOG.info("%d of %d images, %.2f images/s, %.0f s left", self.done, self._total, rate, left)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
