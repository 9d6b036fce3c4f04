"""A policy as a whole model in diffusers' layout, for any pipeline, engine or hub: its weights merged into its base.

`python -m mdiff_core.export POLICY OUT --recipe RECIPE [--weights ema] [--dtype float16] [a.b=c ...]`.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from mdiff_core import config, hub, policies, registry
from mdiff_core.contracts import Family
from mdiff_core.errors import BadSetting, MdiffError
from mdiff_core.policies import Weights
from mdiff_core.settings import Model

DTYPES = ("float32", "bfloat16", "float16")


def export(policy: Path, out: Path, model: Model, *, weights: Weights = "live", dtype: str = "float32") -> None:
    """Write the folder `out`, there once it is whole: the base's other parts, and the transformer merged in float32.

    BadArtifact for a policy of another base or without those weights; BadSetting when `out` exists.
    """
    if out.exists():
        raise BadSetting(f"out: {out} exists; name a folder that does not, or remove it")
    family: Family = registry.make("family", model.family)
    opened = policies.open_policy(policy)
    policies.check_base(opened, family.digest(model.path), hub.fingerprint(model.path, hub.TRAINED))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as made:
        whole = Path(made) / out.name
        hub.copy_without(model.path, whole, "transformer")
        transformer = family.transformer(model.path, torch.float32, torch.device("cpu"))
        policies.apply_to(transformer, opened, weights)
        hub.save(transformer.to(vars(torch)[dtype]), whole / "transformer")
        whole.rename(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 after one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m mdiff_core.export", description=__doc__)
    parser.add_argument("policy", type=Path, help="folder of the policy")
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--recipe", required=True, help="of the run: names the base model and its family")
    parser.add_argument("--weights", choices=get_args(Weights), default="live")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the transformer's file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="the run's overrides of `model`")
    given = parser.parse_args(arguments)
    try:
        model = config.load(given.recipe, given.overrides).model
        export(given.policy, given.out, model, weights=given.weights, dtype=given.dtype)
    except MdiffError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{given.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
