"""Real HTTP servers for rewards: good ones, and ones that misbehave as told."""

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


def decoded(png: str) -> np.ndarray:
    """[H, W, 3] uint8."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))


def brightness(body: dict[str, Any]) -> dict[str, Any]:
    """A reward server by the protocol: mean pixel of a sample's frames over 255."""
    assert body["protocol"] == "mdiff-reward/1"
    return {"scores": [float(np.mean([decoded(frame) for frame in one["frames"]])) / 255 for one in body["samples"]]}


def judge(body: dict[str, Any]) -> dict[str, Any]:
    """A chat completion whose mark is 10 times the brightness of the pictures."""
    (message,) = body["messages"]
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    mark = 10 * float(np.mean([decoded(url.removeprefix("data:image/png;base64,")) for url in urls])) / 255
    return {"choices": [{"message": {"content": json.dumps({"reason": "it is that bright", "score": mark})}}]}


class Server:
    """Answers with `reply(body)`; `script` first: statuses or answers for the next requests. Keeps what it was asked."""

    def __init__(self, reply: Callable[[dict[str, Any]], Any], *script: int | Answer, drip_s: float = 0.0) -> None:
        self.reply, self.script, self.drip_s = reply, list(script), drip_s
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.url = ""

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        with self.lock:
            self.bodies.append(body)
            self.headers.append(headers)
            told = self.script.pop(0) if self.script else 200
        if isinstance(told, tuple):
            return told
        return (200, {}, json.dumps(self.reply(body)).encode()) if told == 200 else (told, {}, b"as told")


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """The server on a free port, until the block ends."""
    stop = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, headers, content = server.answer(body, dict(self.headers))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            for byte in content:
                if not server.drip_s:
                    self.wfile.write(content)
                    return
                if stop.wait(server.drip_s):
                    return
                try:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                except OSError:
                    return

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        http.shutdown()
        thread.join()
        http.server_close()


def slow(seconds: float) -> Callable[[dict[str, Any]], Any]:
    """`brightness` after a while."""

    def reply(body: dict[str, Any]) -> Any:
        time.sleep(seconds)
        return brightness(body)

    return reply
