"""Stands in for `sglang serve` where answers must be wrong on purpose: the same protocol, numbers without meaning.

It obeys the word in the file that FAKE_SGLANG_DEED names, once, and removes the file.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

if __name__ == "__main__":
    sys.stderr.write("the fake is starting\n")  # before the seconds that imports take

import msgspec
import torch
from safetensors.torch import save

from mdiff_core.sigmas import flow_match_sigmas

LATENT = (16, 8, 8)
ONE_AT_A_TIME = Lock()


def packed(value: torch.Tensor) -> dict[str, Any]:
    return {
        "__tensor__": True,
        "data": save({"t": value.contiguous()}),
        "shape": list(value.shape),
        "dtype": str(value.dtype),
    }


def entries(body: dict[str, Any], deed: str) -> list[dict[str, Any]]:
    """As SGLang would answer, but for the deed."""
    steps = body["num_inference_steps"]
    asked = None if deed == "no trajectory" else body.get("rollout_return_step_indices")
    seeds = body["extra_sampling_params"].get("seed", [body["seed"]])
    noise = [torch.randn(LATENT, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    match deed:
        case "swapped":
            noise = noise[::-1]
        case "cloned":
            noise = [noise[0]] * len(noise)
        case "one missing":
            noise = noise[1:]
    text = {"pooled_projections": torch.ones(8), "encoder_hidden_states": torch.ones(4, 8)}
    env = {"pos_cond_kwargs": text, "neg_cond_kwargs": text} if body.get("rollout_return_denoising_env") else None
    found = []
    for z in noise:
        latents = torch.stack([z / (1 + step) for step in asked or ()]) if asked else None
        sigmas = flow_match_sigmas(steps, 1.0 if deed == "other sigmas" else 3.0)
        if latents is not None and deed == "nan latents":
            latents[-1, 0, 0, 0] = torch.nan
        found.append({
            "request_id": "r", "prompt": body["prompt"], "seed": body["seed"] + (deed == "other seed"),
            "generated_output": packed(torch.rand(3, body["height"], body["width"])),
            "rollout_log_probs": packed(torch.full((steps,), torch.nan if deed == "nan log-probs" else -1.0)),
            "denoising_env": env and not found and {branch: {n: packed(t) for n, t in one.items()} for branch, one in env.items()},
            "dit_trajectory": None if latents is None else {"latents": packed(latents), "sigmas": packed(sigmas)},
        })  # fmt: skip
    return found


def taken() -> str:
    """The deed, which nobody else gets then; nothing when there is none."""
    path = Path(os.environ["FAKE_SGLANG_DEED"])
    with ONE_AT_A_TIME:
        word = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
    return word


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(200, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        samples = "seed" in body.get("extra_sampling_params", {})
        deed = taken() if samples or self.path != "/rollout/generate" else ""
        match deed:
            case "http 500":
                self.reply(500, b'{"detail": "out of memory"}')
            case "http 400":
                self.reply(400, b'{"detail": "no such width"}')
            case "hang":
                time.sleep(3600)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "garbage":
                self.reply(200, b"\xc1garbage")
            case _ if self.path != "/rollout/generate":
                self.reply(200, b'{"success": true}')
            case _:
                self.reply(200, msgspec.msgpack.encode(entries(body, deed)), cut=deed == "truncated body")

    def reply(self, code: int, content: bytes, cut: bool = False) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


def install() -> None:
    """In this process, SGLang engines start this file instead of SGLang."""
    from mdiff_core.engines.sglang import server

    server.SERVE = (sys.executable, __file__)


def main(arguments: list[str]) -> None:
    told = dict(zip(arguments[::2], arguments[1::2], strict=False))
    deed = Path(os.environ["FAKE_SGLANG_DEED"])
    word = deed.read_text() if deed.exists() else ""
    if word.startswith("die at start"):
        sys.exit("cannot load the model: no such file")
    if word == "never healthy":
        time.sleep(3600)
    ThreadingHTTPServer((told["--host"], int(told["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
