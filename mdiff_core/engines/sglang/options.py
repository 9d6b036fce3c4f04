"""Settings of the SGLang engine, and the command line and environment they become."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from mdiff_core import hub
from mdiff_core.contracts import Serving
from mdiff_core.options import Options

Dtype = Literal["float32", "bfloat16", "float16"]
PRECISIONS: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class SGLangOptions(Options):
    """Speed, memory and deadlines; the GPUs of an engine are tensor_parallel x ulysses x ring, twice that with cfg_parallel."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share each weight."""
    ulysses: int = Field(default=1, ge=1)
    """GPUs that share a sequence by attention heads."""
    ring: int = Field(default=1, ge=1)
    """GPUs that share a sequence by its length."""
    cfg_parallel: bool = False
    """Both branches of classifier-free guidance at once, each on its GPUs."""
    text_dtype: Dtype | None = None
    """Of the text encoders; null is model.dtype."""
    vae_dtype: Dtype = "float32"
    """Of the VAE, whose rounding shows in the images."""
    attention: str = ""
    """SGLang's attention backend, such as fa or torch_sdpa; empty lets it choose."""
    performance: Literal["manual", "auto", "speed", "memory"] = "auto"
    """SGLang's preset of where weights are kept."""
    compile: Literal["off", "vae", "blocks", "whole"] = "off"
    """Only the VAE, or the transformer's blocks or all of it, too; these take a minute or more at the first batch."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's: the second tries several ways of each matrix product, at a minute or more of start-up."""
    in_flight: int = Field(default=4, ge=1)
    """Requests of a batch that the server has at a time."""
    sync: Literal["artifact", "tensors"] = "artifact"
    """How a policy gets into the server: from files, or as tensors in shared memory."""
    start_seconds: float = Field(default=900.0, gt=0)
    """Longest until the server is healthy."""
    answer_seconds: float = Field(default=900.0, gt=0)
    """Longest that a request may take before the server counts as hung; keep it below rollout.timeout_s."""

    @model_validator(mode="after")
    def _mode_of_something(self) -> Self:
        if self.compile == "off" and self.compile_mode != "default":
            raise ValueError("compile_mode does nothing while compile is 'off'; set compile too")
        return self

    @property
    def gpus(self) -> int:
        """That one engine needs, when it is not on a CPU."""
        return self.tensor_parallel * self.ulysses * self.ring * (1 + self.cfg_parallel)


def command_line(options: SGLangOptions, serving: Serving, model: str, dtype: torch.dtype, on_gpu: bool) -> list[str]:
    """Arguments of `sglang serve`, all but host and ports."""
    name = str(dtype).removeprefix("torch.")
    text = PRECISIONS[options.text_dtype or name]
    arguments: dict[str, str | int | bool] = {
        "model-path": located(model),
        "model-id": serving.model_id,
        "backend": "sglang",
        "trust-remote-code": False,
        "warmup-mode": "off",
        "dit-precision": PRECISIONS[name],
        "vae-precision": PRECISIONS[options.vae_dtype],
        "num-gpus": options.gpus if on_gpu else 1,
        "tp-size": options.tensor_parallel,
        "sp-degree": options.ulysses * options.ring,
        "ulysses-degree": options.ulysses,
        "ring-degree": options.ring,
        "enable-cfg-parallel": options.cfg_parallel,
        "performance-mode": options.performance,
        "enable-torch-compile": options.compile != "off",
        "regional-compile": options.compile == "blocks",
        "output-path": "",
    }
    if options.attention:
        arguments["attention-backend"] = options.attention
    flat = [part for key, value in arguments.items() for part in (f"--{key}", written(value))]
    return [*flat, "--text-encoder-precisions", *[text] * serving.text_encoders]


def environment(options: SGLangOptions, model: str, on_gpu: bool) -> dict[str, str]:
    """What the server's processes need to find."""
    found: dict[str, str] = {}
    if Path(model).is_dir():
        found["HF_HUB_OFFLINE"] = "1"
    if options.compile in ("off", "vae"):
        found["TORCHDYNAMO_DISABLE"] = "1"  # a LoRA wraps each layer in one that compiles itself, on whatever device
    if options.compile != "off":
        # Texts are asked for with one sample, the rest with many: code for any number would be slower than code for each.
        found["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES"] = "0"
        found["SGLANG_TORCH_COMPILE_MODE"] = options.compile_mode
    if not on_gpu:
        # As many threads as this process was given, and asleep while they wait: spinning ones slow everybody else down.
        found |= {"OMP_NUM_THREADS": str(torch.get_num_threads()), "OMP_WAIT_POLICY": "PASSIVE"}
    return found


def located(model: str) -> str:
    """A folder's absolute path, as the server runs elsewhere; a hub id as it is, or fetched at its revision, which the server
    cannot be told."""
    from huggingface_hub import snapshot_download

    where, revision = hub.source(model)
    if revision:
        return str(snapshot_download(where, revision=revision))
    return os.path.abspath(where) if Path(where).is_dir() else where


def written(value: str | int | bool) -> str:
    """As the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
