"""Engines as Ray actors: started, fed, watched, restarted and ended. The only home of Ray."""

from mdiff_core.fleet.cluster import local_ray, ray_environment
from mdiff_core.fleet.fleet import Fleet

__all__ = ["Fleet", "local_ray", "ray_environment"]
