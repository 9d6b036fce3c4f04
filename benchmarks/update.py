"""How fast is the update at SD3.5-medium's size, and what does each of its promises cost? Random weights.

    python benchmarks/update.py [--rows 64] [--microbatch 8] [--guidance 4.5] [--cases plain,lora,...]
    MDIFF_BENCH=FOLDER torchrun --nproc-per-node 2 benchmarks/update.py --cases lora,full

`plain` is a PEFT loop by hand without sharding, the yardstick (`plain-again` repeats it last); `lora`, `full`,
`checkpointing` are ours; `again` repeats `lora`, for its checksum; `second` has rows drawn with the merged LoRA
that `lora` left; `loose` does not ask for deterministic kernels, as drawing the rows does.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mdiff_core import policies, registry, tables
from mdiff_core.guidance import guided_velocity
from mdiff_core.jobs import UpdateJob
from mdiff_core.options import Choice
from mdiff_core.policy import TrainedPolicies
from mdiff_core.settings import Lora, Model, Sampling, Train
from mdiff_core.train import lora as adapters
from mdiff_core.train import precision, shard
from mdiff_core.train.loop import Trainer, peak_memory
from mdiff_core.train.rows import Conditions, Reader, plan
from mdiff_core.train.state import empty_state
from mdiff_core.types import Conditioning

DEVICE = shard.own_device()
TINY = "--tiny" in sys.argv
LATENT, TEXT, WIDTH, POOLED = ((16, 8, 8), 9, 32, 16) if TINY else ((16, 64, 64), 333, 4096, 2048)
SD35_MEDIUM = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": WIDTH,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": POOLED,
    "out_channels": 16,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
} | (
    {"num_layers": 2, "num_attention_heads": 2, "dual_attention_layers": (0,), "caption_projection_dim": 128}
    if TINY
    else {}
)


def build_model(folder: Path) -> None:
    """SD3.5-medium's transformer with random weights, in bfloat16."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    with DEVICE:
        model = SD3Transformer2DModel(**SD35_MEDIUM).to(torch.bfloat16)
    model.save_pretrained(folder / "transformer")


def make_job(arguments: argparse.Namespace, folder: Path, **changes: Any) -> UpdateJob:
    settings = {"lr": 3e-4, "lora": Lora(rank=32, alpha=64.0), "microbatch": arguments.microbatch, "drift_limit": 10.0}
    return UpdateJob(
        model=Model(path=str(folder), family=Choice(name="sd3"), dtype="bfloat16"),
        sampling=Sampling(
            width=512,
            height=512,
            steps=10,
            guidance=arguments.guidance,
            kernel=Choice(name="flow_sde", options={"eta": 0.7}),
        ),
        loss=Choice(name="flow_grpo", options={"clip": 1e-4, "beta": arguments.beta}),
        train=Train(**(settings | changes)),
        seed=1,
        round=0,
    )


@torch.no_grad()
def draw(folder: Path, one: UpdateJob, count: int, policy: Path) -> Path:
    """Rows of one optimizer step, sampled from the policy as an engine would: weights merged, bfloat16, batches of 8."""
    folder.mkdir()
    family, kernel = registry.make("family", one.model.family), registry.make("kernel", one.sampling.kernel)
    net = family.transformer(one.model.path, torch.bfloat16, DEVICE)
    policies.apply_to(net, policies.open_policy(policy))
    generator = torch.Generator().manual_seed(0)
    texts = {
        f"text-{number}": {
            "encoder_hidden_states": torch.randn(TEXT, WIDTH, generator=generator).bfloat16(),
            "pooled_projections": torch.randn(POOLED, generator=generator).bfloat16(),
        }
        for number in range(5)
    }
    with tables.condition_writer(folder) as writer:
        for key, condition in texts.items():
            writer.add(key, condition)
    cached = Conditions(folder, DEVICE, exact=False)
    sigmas = family.sigmas(one.model.path, steps=10, width=512, height=512)
    with tables.row_writer(folder, 0, "transitions") as rows:
        for first in range(0, count, 8):
            steps = (torch.arange(8) + first) % 8
            keys = [f"text-{(first + i) // 16 % 4}" for i in range(8)]
            negative = ["text-4"] * 8 if one.sampling.guidance > 1 else []
            now, after = sigmas[steps].to(DEVICE), sigmas[steps + 1].to(DEVICE)
            x = torch.randn(8, *LATENT, generator=generator).to(DEVICE)
            noise = torch.randn(8, *LATENT, generator=generator).to(DEVICE)
            conditioning = Conditioning(
                positive=cached.stacked(keys), negative=cached.stacked(negative), guidance=one.sampling.guidance
            )
            moments = kernel.moments(
                x, guided_velocity(family, net, x, now, conditioning), now, after, sigmas[1].to(DEVICE).expand(8)
            )
            x_next = kernel.step(x, moments, noise)
            rows.add_batch(
                {
                    "sample": [f"{first + i}" for i in range(8)],
                    "group": [f"{(first + i) // 16}" for i in range(8)],
                    "advantage": np.random.default_rng(first).standard_normal(8).astype(np.float32),
                    "condition": keys,
                    "negative": negative or [""] * 8,
                    "guidance": np.full(8, one.sampling.guidance, np.float32),
                    "seed": np.arange(8, dtype=np.int64) + first,
                    "step": steps.numpy().astype(np.int32),
                    "sigma": now.cpu().numpy(),
                    "sigma_next": after.cpu().numpy(),
                    "sigma_ceiling": np.full(8, float(sigmas[1]), np.float32),
                    "x": x.cpu().numpy(),
                    "x_next": x_next.cpu().numpy(),
                    "log_prob": kernel.log_prob(x_next, moments).cpu().numpy(),
                }
            )
    return folder


def plain(one: UpdateJob, pairs: Path, repeats: int) -> list[dict[str, float]]:
    """The same steps by hand: PEFT, autocast, AdamW, no sharding and no promises."""
    family, kernel = registry.make("family", one.model.family), registry.make("kernel", one.sampling.kernel)
    loss = registry.make("loss", one.loss)
    net = family.transformer(one.model.path, torch.bfloat16, DEVICE)
    targets = adapters.targets_of(net, family.lora_targets)
    adapters.inject(net, one.train.lora, targets)
    parameters = adapters.parameters_of(net, targets)
    adapters.start(parameters, one.train.lora, one.seed)
    optimizer = torch.optim.AdamW(parameters.values(), lr=one.train.lr, fused=True)
    three = TrainedPolicies(net, family, kernel, loss.needs.policies, frozen={"reference": lambda: adapters.off(net)})
    found = []
    for _ in range(repeats):
        wait()
        started = time.monotonic()
        reader = Reader(
            conditions=Conditions(pairs, DEVICE, exact=False), device=DEVICE, size=one.train.microbatch, rank=0, world=1
        )
        (step,) = plan(pairs, one, 0, registry.make("loss", one.loss))
        gaps = []
        for batch in reader.microbatches(step):
            three.live.density = None
            with torch.autocast(DEVICE.type, torch.bfloat16):
                cells = loss(three, batch.rows)
            (cells.loss.sum() / len(step.rows)).backward()
            gaps.append((three.live.density.log_prob - batch.rows.log_prob).abs().max())
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        drift = float(torch.stack(gaps).max())
        memory = peak_memory(DEVICE) / 2**30
        seconds = time.monotonic() - started
        found.append({"seconds": seconds, "peak_memory_gb": memory, "grad_norm": norm, "drift_max": drift})
    return found


def wait(fresh: bool = False) -> None:
    """For the GPU; `fresh` gives back unused memory and forgets its peak."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        if fresh:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--guidance", type=float, default=4.5)
    parser.add_argument("--beta", type=float, default=0.04)
    parser.add_argument("--repeats", type=int, default=4, help="passes of a case; the first is told apart")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--cases", default="plain,lora,again,loose,second,checkpointing,full,plain-again")
    arguments = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    root = Path(os.environ.get("MDIFF_BENCH", "")) if world > 1 else Path(tempfile.mkdtemp(prefix="mdiff-bench-"))
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    if world > 1:
        dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    run = Cases(arguments, root, rank)
    rows = []
    for name in arguments.cases.split(","):
        rows.append((name, run.case(name)))
        if rank == 0:
            sys.stderr.write(f"{rows[-1]}\n")
    if world > 1:
        dist.destroy_process_group()
    if rank == 0:
        report(rows, arguments, world)
    return 0


class Cases:
    """Model and rows, made once by rank 0, and the runs on them."""

    def __init__(self, arguments: argparse.Namespace, root: Path, rank: int) -> None:
        self.arguments, self.root, self.rank = arguments, root, rank
        self.one = make_job(arguments, root / "model")
        self.on_one(self._prepare)

    def on_one(self, work: Callable[[], object]) -> None:
        if self.rank == 0:
            work()
        if dist.is_initialized():
            dist.barrier()

    def _prepare(self) -> None:
        build_model(self.root / "model")
        (self.root / "model" / "scheduler").mkdir()
        (self.root / "model" / "scheduler" / "scheduler_config.json").write_text('{"shift": 3.0}')
        digest = registry.make("family", self.one.model.family).digest(self.one.model.path)
        policies.base_version(self.root / "policy", base=self.one.model.path, base_digest=digest)
        empty_state(self.root / "state")
        self._draw(self.root / "pairs", self.one, self.arguments.rows, self.root / "policy")
        wait()

    def _draw(self, *what: Any) -> None:
        with precision.deterministic(DEVICE):
            draw(*what)

    def case(self, name: str) -> dict[str, Any]:
        """The first pass apart, which warms up, and the median and range of the others."""
        changes: dict[str, dict[str, Any]] = {
            "checkpointing": {"checkpointing": True},
            "full": {"method": "full", "lr": 1e-5},
        }
        wait(fresh=True)
        if name.startswith("plain"):
            return summed(plain(self.one, self.root / "pairs", self.arguments.repeats), "")
        policy, state, pairs = self.root / "policy", self.root / "state", self.root / "pairs"
        if name == "second":
            policy, state, pairs = self.root / "policy-lora", self.root / "state-lora", self.root / "pairs-second"
            self.on_one(lambda: self._draw(pairs, self.one, self.arguments.rows, policy))
        one = make_job(self.arguments, self.root / "model", **changes.get(name, {}))
        free = nullcontext() if name == "loose" else precision.deterministic(DEVICE)
        with free, shard.all_ranks(DEVICE) as mesh:
            trainer = Trainer(one, policies.open_policy(policy), state, mesh)
            found = [trainer.train(pairs, number) for number in range(self.arguments.repeats)]
            made = ""
            if name in ("lora", "again", "checkpointing"):
                made = trainer.save(self.root / f"policy-{name}", self.root / f"state-{name}").checksum[:8]
        return summed(found, made)


def summed(found: list[dict[str, float]], checksum: str) -> dict[str, Any]:
    """Drift and gradient of the first pass; seconds of the others."""
    warm = sorted(metrics["seconds"] for metrics in found[1:])
    seconds = {"cold": found[0]["seconds"], "median": statistics.median(warm), "least": warm[0], "most": warm[-1]}
    return found[0] | seconds | {"checksum": checksum}


def report(rows: list[tuple[str, dict[str, Any]]], arguments: argparse.Namespace, world: int) -> None:
    out = sys.stdout.write
    out(
        f"{torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'} x{world}, torch {torch.__version__}, {vars(arguments)}\n"
    )
    columns = ("rows/s", "median", "least", "most", "cold", "peak_memory_gb", "grad_norm", "drift_max", "checksum")
    out(f"{'case':>14} " + " ".join(f"{name:>14}" for name in columns) + "\n")
    for name, metrics in rows:
        values = metrics | {"rows/s": arguments.rows / metrics["median"]}
        cells = [values.get(column, "") for column in columns]
        out(f"{name:>14} " + " ".join(f"{c:>14.6g}" if isinstance(c, float) else f"{c:>14}" for c in cells) + "\n")


if __name__ == "__main__":
    sys.exit(main())
