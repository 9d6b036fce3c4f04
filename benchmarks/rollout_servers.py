"""What `rollout.py` asks of SGLang engines where they run, in the fleet's actors."""

import time
from pathlib import Path
from typing import Any

from mdiff_core.engines.sglang.engine import ROLLOUT
from mdiff_core.engines.sglang.guard import LOG
from mdiff_core.engines.sglang.requests import sampling_body
from mdiff_core.engines.sglang.weights import FromFiles, FromTensors
from mdiff_core.fleet.cluster import NAMESPACE
from mdiff_core.policies import open_policy
from mdiff_core.sampler import latent_steps
from mdiff_core.types import Request


def actors() -> list[Any]:
    """Engines that the last rollout left up."""
    import ray

    kept = ray.util.list_named_actors(all_namespaces=True)
    return [ray.get_actor(one["name"], namespace=NAMESPACE) for one in kept if one["namespace"] == NAMESPACE]


def there(actor: Any, work: Any, *arguments: Any) -> Any:
    """Of `work(engine, *arguments)`, run in the engine's process."""
    import ray

    return ray.get(actor.__ray_call__.remote(lambda self, *given: work(self._engine, *given), *arguments))


def log_of(actor: Any) -> Path:
    """The server's log."""
    return Path(there(actor, lambda engine: str(engine._server.folder / LOG)))


def use_sync(actor: Any, way: str) -> None:
    """From now on policies come from an `artifact` or as `tensors`."""
    there(actor, _use_sync, way)


def deliver(actor: Any, policy: Path) -> float:
    """Seconds to load a policy and to verify it."""
    return float(there(actor, _deliver, str(policy)))


def raw_bytes(actor: Any, request: Request) -> int:
    """Size of the answer to a request for all latents and the text's embeddings, which the server sends once."""
    return int(there(actor, _raw_bytes, request))


def _use_sync(engine: Any, way: str) -> None:
    server = engine._server
    engine._sync = FromFiles(server) if way == "artifact" else FromTensors(server, engine._device)


def _deliver(engine: Any, policy: str) -> float:
    opened = open_policy(Path(policy), verify=False)
    started = time.monotonic()
    engine.load(opened)
    return time.monotonic() - started


def _raw_bytes(engine: Any, request: Request) -> int:
    kept = latent_steps(request.plan.sde_steps)
    body = sampling_body(request, engine._serving, 0.7, kept, engine._device.type)
    body |= {"rollout_return_denoising_env": True, "rollout_return_step_indices": None}
    return len(engine._server.post(ROLLOUT, body, 600.0))
