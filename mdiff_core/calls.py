"""Requests to a reward's server: JSON there and back, a deadline, several at once. Asking again is the caller's."""

import base64
import io
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image
from pydantic import Field

from mdiff_core.errors import BadSetting, PartlyFailed, RewardFailed, RewardUnavailable
from mdiff_core.frames import FrameCount

if TYPE_CHECKING:
    import httpx

BUSY = (408, 425, 429)
"""Answers that ask for patience, as do those from 500 on."""
SHOWN = 200
"""Characters of an answer that an error repeats."""
T = TypeVar("T")


class ServerOptions(FrameCount):
    """Where the server is, and how it is asked."""

    url: str = Field(pattern="^https?://")
    """Address that requests are posted to."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest from sending a request to the last byte of its answer."""
    parallel: int = Field(default=4, ge=1)
    """Requests under way at once."""
    secret: str = ""
    """Environment variable, or file, that holds the token of the header; empty sends none."""
    header: str = "Authorization"
    """Header with the token; Authorization gets `Bearer ` before it."""


class Server:
    """One address; connections are kept and shared by all threads."""

    def __init__(self, reward: str, options: ServerOptions, url: str) -> None:
        """`reward` is for messages."""
        self._reward, self._options, self._url = reward, options, url

    def post(self, body: Mapping[str, Any]) -> Any:
        """The answer's JSON. RewardUnavailable when the server is down, slow, busy or broken; RewardFailed when it refuses."""
        import httpx

        try:
            status, wait, content = self._exchange(body)
        except httpx.TimeoutException as error:
            raise RewardUnavailable(f"{self._where} did not answer within {self._options.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise RewardUnavailable(f"{self._where} cannot be reached ({type(error).__name__}: {error})") from error
        said = content[:SHOWN].decode(errors="replace")
        if status in BUSY or status >= 500:
            raise RewardUnavailable(f"{self._where} answered {status}: {said!r}", wait)
        if status != 200:
            raise RewardFailed(
                f"{self._where} answered {status}: {said!r}; see that address, token and request are right"
            )
        try:
            return json.loads(content)
        except ValueError as error:
            raise RewardFailed(f"{self._where} answered with what is not JSON: {said!r}") from error

    def _exchange(self, body: Mapping[str, Any]) -> tuple[int, float, bytes]:
        """Status, seconds that the server asks to wait, content."""
        import httpx

        deadline = time.monotonic() + self._options.timeout_s
        with self._client.stream("POST", self._url, json=body, headers=self._headers()) as answer:
            content = bytearray()
            for piece in answer.iter_bytes():
                content += piece
                # the client's own limit is on each piece, and a server may drip
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer took too long")
            return answer.status_code, seconds(answer.headers.get("Retry-After", "")), bytes(content)

    def _headers(self) -> dict[str, str]:
        if not self._options.secret:
            return {}
        token = secret(self._options.secret)
        return {self._options.header: f"Bearer {token}" if self._options.header == "Authorization" else token}

    @property
    def _where(self) -> str:
        return f"{self._reward}: {self._url}"

    @cached_property
    def _client(self) -> "httpx.Client":
        import httpx

        limits = httpx.Limits(max_connections=self._options.parallel, max_keepalive_connections=self._options.parallel)
        return httpx.Client(timeout=self._options.timeout_s, limits=limits)


def secret(name: str) -> str:
    """The token in an environment variable or file; BadSetting when there is neither. It is in no message."""
    if name in os.environ:
        return os.environ[name].strip()
    if Path(name).is_file():
        return Path(name).read_text().strip()
    raise BadSetting(f"secret: '{name}' is neither an environment variable nor a file here; provide it to the stage")


def seconds(text: str) -> float:
    """Of a Retry-After header; 0 for none, or for a date."""
    return float(text) if text.isdecimal() else 0.0


def png(frame: np.ndarray) -> str:
    """[H, W, 3] uint8 as a PNG in base64."""
    data = io.BytesIO()
    Image.fromarray(frame).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def gathered(
    ask: Callable[[T], Sequence[float]], parts: Sequence[T], sizes: Sequence[int], parallel: int
) -> np.ndarray:
    """[B] scores from `ask` of each part, `parallel` at once; part i gives `sizes[i]` of them.

    When every part fails because the server cannot be asked: RewardUnavailable; when some fail: PartlyFailed.
    """

    def one(part: T, size: int) -> tuple[Sequence[float], Sequence[str], RewardFailed | None]:
        try:
            values = ask(part)
        except PartlyFailed as error:
            return error.values, error.reasons, error
        except RewardFailed as error:
            return [np.nan] * size, [str(error)] * size, error
        return values, [""] * size, None

    with ThreadPoolExecutor(parallel) as threads:
        found = list(threads.map(one, parts, sizes))
    errors = [error for _, _, error in found if error]
    unavailable = [error for error in errors if isinstance(error, RewardUnavailable)]
    wait = max((error.retry_after for error in unavailable), default=0.0)
    if len(unavailable) == len(found):
        raise RewardUnavailable(str(unavailable[0]), wait)
    if errors:
        values = [value for some, _, _ in found for value in some]
        raise PartlyFailed(values, [why for _, whys, _ in found for why in whys], wait)
    return np.array([value for some, _, _ in found for value in some], np.float64)
