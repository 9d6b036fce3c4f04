"""Engines and rewards as Ray actors: started, fed, watched, restarted and ended. The only home of Ray."""

from mdiff_core.fleet.cluster import local_ray, ray_environment
from mdiff_core.fleet.fleet import Fleet
from mdiff_core.fleet.pool import RewardPool

__all__ = ["Fleet", "RewardPool", "local_ray", "ray_environment"]
