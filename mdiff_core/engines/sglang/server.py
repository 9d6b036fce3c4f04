"""One SGLang server: started, waited for, asked and ended. Every error names its log and quotes the last lines."""

import http.client
import json
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mdiff_core.engines.sglang.guard import LOG as LOG_NAME
from mdiff_core.engines.sglang.processes import HOST, alive, free_ports, import_path, workers
from mdiff_core.errors import BadSetting, EngineFailed

LOG = logging.getLogger("mdiff.rollout")
TAIL_LINES = 12
TAIL_WIDTH = 300
TAIL_BYTES = 16_384
PROGRESS_SECONDS = 15.0
END_SECONDS = 20.0
"""For the guard to end the server; it needs half of that for one that does not answer any more."""
PROBE_SECONDS = 5.0
SERVE = (sys.executable, "-m", "mdiff_core.engines.sglang.serve", "serve")
STARTS = 3
"""Tries to start, each with other ports: one may be taken between finding it free and using it."""
PORT_TAKEN = re.compile(r"port \d+ is unavailable|address already in use|EADDRINUSE", re.IGNORECASE)


class Server:
    """A running server; made only once it is healthy."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], start_seconds: float) -> None:
        """`arguments` of `sglang serve` but host and ports. EngineFailed when it is not healthy within `start_seconds`."""
        self._guard: subprocess.Popen[str] | None = None
        """What started the guard; its pipes are the guard's now."""
        deadline = time.monotonic() + start_seconds
        for attempt in range(STARTS):
            self._launch(arguments, environment)
            try:
                self._wait(deadline, start_seconds)
                return
            except EngineFailed:
                lost = bool(PORT_TAKEN.search(self._tail()))
                self._end(clean=lost and attempt + 1 < STARTS)
                if not lost or attempt + 1 == STARTS:
                    raise
            except BaseException:
                self._end(clean=True)
                raise

    @property
    def folder(self) -> Path:
        """Of files that live as long as the server; its log is there."""
        return self._folder

    @property
    def pid(self) -> int:
        """The server's first process and the id of its group."""
        return self._pid

    def post(self, path: str, body: Mapping[str, Any], seconds: float) -> bytes:
        """The whole answer; BadSetting when the server calls the request invalid, EngineFailed for all else that is not 200."""
        code, answer = self._ask("POST", path, body, seconds)
        if code == http.client.BAD_REQUEST or code == http.client.UNPROCESSABLE_ENTITY:
            raise BadSetting(f"sglang engine: {path} refused the request ({answer[:500].decode(errors='replace')})")
        if code != http.client.OK:
            raise self.failed(f"{path} answered {code} ({answer[:500].decode(errors='replace')})")
        return answer

    def check(self) -> None:
        """EngineFailed when the server or one of its workers is gone."""
        gone = sorted(pid for pid in self._workers if not alive(pid))
        if self._guard is None or _ended(self._guard, 0.0) or gone:
            raise self.failed(f"its processes {gone or [self._pid]} ended")

    def failed(self, what: str) -> EngineFailed:
        """The error to raise: what happened, where the log is and how it ends."""
        return EngineFailed(f"sglang engine: {what}. Log {self._folder / LOG_NAME} ends with:\n{self._tail()}")

    def close(self) -> None:
        """End the server and its workers and remove its files; safe to call twice."""
        self._end(clean=True)

    def abandon(self) -> None:
        """End it and keep the log."""
        self._end(clean=False)

    def _launch(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mdiff-sglang-"))
        (self._folder / "tmp").mkdir()
        self._workers: frozenset[int] = frozenset()
        self._port, scheduler, master = free_ports(3)
        places = ("--host", HOST, "--port", self._port, "--scheduler-port", scheduler, "--master-port", master)
        command = (*SERVE, *arguments, *map(str, places), "--strict-ports", "true")
        self._guard = subprocess.Popen(
            (sys.executable, "-m", "mdiff_core.engines.sglang.guard", str(self._folder), *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": import_path(), "TMPDIR": str(self._folder / "tmp"), **environment},
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        self._guard.wait()
        told = self._guard.stdout.readline().split()
        if len(told) != 2:
            raise self.failed("its guard did not start, for a reason written on this process's stderr")
        self._guard_pid, self._pid = map(int, told)

    def _wait(self, deadline: float, seconds: float) -> None:
        started = told = time.monotonic()
        while True:
            self.check()
            with suppress(OSError, http.client.HTTPException):
                if self._ask("GET", "/health", None, PROBE_SECONDS)[0] == http.client.OK:
                    break
            now = time.monotonic()
            if now > deadline:
                raise self.failed(f"not healthy within {seconds:g} s (rollout.engine.options.start_seconds)")
            if now - told > PROGRESS_SECONDS:
                told = now
                LOG.info(
                    "sglang engine starts, %.0f s so far: %s", now - started, (self._tail().splitlines() or [""])[-1]
                )
            time.sleep(0.2)
        self._workers = workers(self._pid)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=seconds)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            if method == "GET":
                raise
            if isinstance(error, TimeoutError):
                late = f"{path} did not answer within {seconds:g} s (rollout.engine.options.answer_seconds)"
                raise self.failed(late) from None
            raise self.failed(f"{path} broke off ({type(error).__name__}: {error})") from error
        finally:
            connection.close()

    def _tail(self) -> str:
        with suppress(OSError), open(self._folder / LOG_NAME, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
            return "\n".join(line[:TAIL_WIDTH] for line in lines)
        return ""

    def _end(self, *, clean: bool) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None and guard.stdout is not None
        with suppress(OSError):
            guard.stdin.write("." if clean else "")
            guard.stdin.close()
        if not _ended(guard, END_SECONDS):
            with suppress(ProcessLookupError):
                os.kill(self._guard_pid, signal.SIGKILL)  # takes the server along
        guard.stdout.close()
        if clean:
            shutil.rmtree(self._folder, ignore_errors=True)


def _ended(guard: "subprocess.Popen[str]", seconds: float) -> bool:
    """Whether it ends within that time: it writes no more, so its output is readable only at its end."""
    assert guard.stdout is not None
    return bool(select.select([guard.stdout], [], [], seconds)[0])
