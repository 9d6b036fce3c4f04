"""The server's main module: `python -m mdiff_core.engines.sglang.serve serve --model-path ...`; its workers import it again.

Two things that SGLang 0.5.17 does badly on a CPU are put right here, by way of torch and zmq; its models that do not name the
blocks to compile by themselves, as Stable Diffusion 3, get a rule for it, and the VAE may be compiled without the transformer;
answers are pickled by `transport`, and texts encoded and sent `once`. SGLang is left as it is.
"""

import os
import pickle
import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import zmq

from mdiff_core.engines.sglang.once import of_first_sample, remembered, with_first_sample
from mdiff_core.engines.sglang.transport import dumps

IDLE_MS = 2
"""A worker's nap when nobody asks for anything."""

if "empty_cache" not in vars(torch.cpu):  # called after merging a LoRA, on whatever device
    vars(torch.cpu)["empty_cache"] = lambda: None


def recv_patiently(socket: zmq.Socket[bytes], flags: int = 0, **options: Any) -> Any:
    """Wait a little before there is nothing: the worker asks without a pause, which would keep a core busy for good."""
    if flags & zmq.NOBLOCK and not socket.poll(IDLE_MS):
        raise zmq.Again
    return recv_at_once(socket, flags, **options)


def is_block(name: str, module: torch.nn.Module) -> bool:
    """Whether a transformer's part of that name is one of its repeated blocks."""
    return bool(re.fullmatch(r"(\w+_)?blocks\.\d+", name))


def compile_anyway(*arguments: Any, **options: Any) -> Any:
    """The VAE's compiled decoder, though TORCHDYNAMO_DISABLE keeps the transformer and layers with a LoRA as they are."""
    kept = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    try:
        return compile_unless_disabled(*arguments, **options)
    finally:
        if kept is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = kept


if __name__ == "__mp_main__" and "--regional-compile true" in " ".join(sys.argv):
    from sglang.multimodal_gen.runtime.models.dits.base import BaseDiT

    BaseDiT._compile_conditions = [is_block]  # else SGLang refuses to compile the blocks of those that name none

if __name__ == "__mp_main__":
    from sglang.multimodal_gen.runtime.managers import scheduler

    if vars(scheduler).get("pickle") is not pickle:
        raise ImportError(
            "this SGLang does not pickle its answers where 0.5.17 does; install the version that is pinned"
        )
    vars(scheduler)["pickle"] = SimpleNamespace(**{**vars(pickle), "dumps": dumps})

    from sglang.multimodal_gen.runtime.pipelines_core.stages import TextEncodingStage
    from sglang.multimodal_gen.runtime.post_training.rollout_denoising_mixin import RolloutDenoisingMixin as Mixin
    from sglang.multimodal_gen.runtime.utils.torch_compile import ActiveTargetCompiledCallable

    TextEncodingStage.encode_text = remembered(TextEncodingStage.encode_text)
    Mixin._maybe_init_denoising_env_collection = of_first_sample(Mixin._maybe_init_denoising_env_collection)
    compile_unless_disabled = ActiveTargetCompiledCallable.get_or_compile
    ActiveTargetCompiledCallable.get_or_compile = compile_anyway

    recv_at_once = zmq.Socket.recv_multipart
    zmq.Socket.recv_multipart = recv_patiently  # type: ignore[assignment]

if __name__ == "__main__":
    from sglang.cli.main import main
    from sglang.multimodal_gen.runtime.entrypoints.post_training import rollout_api as api

    vars(api)["_slice_rollout_trajectory_for_sample"] = with_first_sample(api._slice_rollout_trajectory_for_sample)
    main()
