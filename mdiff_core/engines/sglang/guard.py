"""Ends a server for certain: `python -m mdiff_core.engines.sglang.guard FOLDER COMMAND...`, in a session of its own.

Leaves its parent (Ray kills a worker's children with it, and this one is there to survive), writes its own and the server's process
id, starts COMMAND in another session with FOLDER/server.log as its output, and waits until its standard input ends (whoever holds
the other end left, however it died) or the command does. Then nothing of the command's group is left. FOLDER goes with it if a byte
came first; otherwise only the log stays. Its standard output ends when it does.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOG = "server.log"
GRACE_SECONDS = 5.0
"""For a server to free its GPU by itself."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(arguments: Sequence[str]) -> int:
    """Exit code of the command, or 0 when it was ended."""
    folder, command = Path(arguments[0]), arguments[1:]
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the other end of the pipe decides
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned workers become ours to bury
    with open(folder / LOG, "ab") as log:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=before_exec
        )
    watched = os.pidfd_open(server.pid)
    sys.stdout.write(f"{os.getpid()} {server.pid}\n")
    sys.stdout.flush()
    ready, _, _ = select.select([sys.stdin.fileno(), watched], [], [])
    asked = sys.stdin.fileno() in ready
    clean = asked and bool(os.read(sys.stdin.fileno(), 1))
    code = end(server)
    if clean:
        shutil.rmtree(folder, ignore_errors=True)
    for leftover in folder.iterdir() if folder.is_dir() else ():
        if leftover.name != LOG:
            shutil.rmtree(leftover, ignore_errors=True)
    return 0 if asked else code


def before_exec() -> None:
    """In the server: usual signals again, and death with this guard."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(server: subprocess.Popen[bytes]) -> int:
    """Ask the server, then kill its group, and wait until every process of it is gone."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
        os.killpg(server.pid, signal.SIGCONT)  # a stopped process could not heed the request
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_SECONDS)
    deadline = time.monotonic() + 2 * GRACE_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        bury()
        time.sleep(0.02)
    return server.wait()


def bury() -> None:
    """Reap what has ended: a zombie still counts as a member of its group."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
