"""Engines and rewards as Ray actors: started, fed, watched, restarted and ended. The only home of Ray."""

from pathlib import Path

from mdiff_core.fleet.cluster import is_up, local_ray, ray_environment
from mdiff_core.fleet.fleet import Fleet
from mdiff_core.fleet.inside import Inside
from mdiff_core.fleet.pool import RewardPool
from mdiff_core.policies import Weights
from mdiff_core.settings import Model, Rollout

__all__ = ["Fleet", "Inside", "RewardPool", "engines", "is_up", "local_ray", "ray_environment"]


def engines(rollout: Rollout, model: Model, policy: Path, weights: Weights = "live") -> Fleet | Inside:
    """The recipe's engines with a policy, to be used in a `with` block: on Ray, or in this process with `rollout.engines=0`."""
    return (Fleet if rollout.engines else Inside)(rollout, model, policy, weights)
