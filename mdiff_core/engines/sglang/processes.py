"""What a server's surroundings need to know of ports and processes (Linux)."""

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Different ones, free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def import_path() -> str:
    """PYTHONPATH under which another process finds this package, wherever it runs."""
    here = str(Path(__file__).parents[3])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def workers(server: int) -> frozenset[int]:
    """The server's own process and its children, but Python's helper: without any of them requests would wait for ever."""
    found = {server}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == server and b"resource_tracker" not in (folder / "cmdline").read_bytes():
                    found.add(int(folder.name))
    return frozenset(found)


def alive(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
