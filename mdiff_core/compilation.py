"""torch.compile of a network's repeated parts, which takes seconds where compiling all of it takes minutes; and where it is run."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
T = TypeVar("T")

VARIANTS = 64
"""Kinds of part times shapes of batch that are compiled before one runs as it is; torch's own limit of 8 is soon met."""


DEVICE = ThreadPoolExecutor(1, thread_name_prefix="device")
"""One thread for good, as PyTorch crashes when one compiles after another that did has ended."""


def on_device(threads: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, done on the device's thread after all that was asked for before.

    With `threads` CPU threads: every thread has a number of its own, and the last bits of sums depend on it.
    """

    def counted() -> T:
        torch.set_num_threads(threads)
        return work(*args, **kwargs)

    return DEVICE.submit(counted).result()


def compile_in_place(networks: Sequence[nn.Module], mode: str) -> None:
    """Compiled at their first use. Those of one class and shape share code; a batch of another size gets code of its own, as
    code for any size is slower. `mode` is torch.compile's."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, VARIANTS)
    for network in networks:
        network.compile(dynamic=False, mode=mode)
