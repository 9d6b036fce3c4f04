"""torch.compile of a network's repeated parts, which takes seconds where compiling all of it takes minutes."""

from collections.abc import Sequence

from torch import nn

VARIANTS = 64
"""Kinds of part times shapes of batch that are compiled before one runs as it is; torch's own limit of 8 is soon met."""


def compile_in_place(networks: Sequence[nn.Module], mode: str) -> None:
    """Compiled at their first use. Those of one class and shape share code; a batch of another size gets code of its own, as
    code for any size is slower. `mode` is torch.compile's."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, VARIANTS)
    for network in networks:
        network.compile(dynamic=False, mode=mode)
