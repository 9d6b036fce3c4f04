"""How fast are rollouts, what do they weigh, how long does a weight sync take, and does a whole round hold? Random weights.

    python benchmarks/rollout.py [--cases sglang,sync,round,...] [--model FOLDER] [--rows FILE]
    python benchmarks/rollout.py --tiny          the same on a CPU with a model of a few million weights, to try the script

Prints each row as it is measured and all of them as a table last; with `--rows FILE` the rows of several commands are one table, and
`--model FOLDER` keeps the model for the next one.
- `plain`: the diffusers pipeline; `diffusers`: our engine, eager and compiled in each of `--modes`, and whether pictures agree.
- `sglang`, `sglang-vae` (a VAE of the model's dtype, compiled), `sglang-compiled` (that and compiled blocks): rollouts into Arrow
  through the fleet, beside what the server's log says of its own stages.
- `sync`: LoRA of rank 32 and full weights into a running server, from files and from tensors.
- `round`, `round-fp16`: rollout, score, pair, update by their stages in bfloat16 or float16, with guidance and without.
- `exact`: the drift of rounds that our engine draws, with training's kernels and with others.

Cases that come one after another and want the same server share it.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import sd35m
from benchmarks.measured import Peak, Rows, tell, timed
from benchmarks.rollout_round import exact, whole_round
from benchmarks.rollout_servers import actors, deliver, log_of, raw_bytes, use_sync
from mdiff_core import generation, policies, registry, seeds
from mdiff_core.engines.sglang.processes import import_path
from mdiff_core.fleet import ray_environment
from mdiff_core.fleet.actor import make_engine
from mdiff_core.fleet.cluster import local_ray
from mdiff_core.options import Choice
from mdiff_core.sampler import draw_noise
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Prompt, Request, SamplingPlan, Trajectory

STAGE = re.compile(r"\[(\w+)\] finished in ([\d.]+) seconds")
WORDS = ("a red circle", "two blue squares", "three green triangles", "four white stars")


class Bench:
    """The model, its base policy and what was measured so far."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.rows = args, folder, Rows(args.rows)
        self.device = torch.device("cpu" if args.tiny else "cuda")
        self.size, self.dtype = (64, "float32") if args.tiny else (512, "bfloat16")
        self.family = Choice(name="sd3", options={"max_sequence_length": 16 if args.tiny else 256})
        self.path: Path = args.model or folder / "model"
        if not (self.path / "model_index.json").is_file():
            took = timed(lambda: sd35m.build(self.path, self.device, tiny=args.tiny))
            self.rows.add("model", "built in, s", f"{took:.1f}")
        digest = registry.make("family", self.family).digest(str(self.path))
        self.base = policies.base_version(folder / "base", base=str(self.path), base_digest=digest)
        self.kept = args.rows.parent if args.rows else folder
        """Of pictures that later cases and commands compare theirs with."""
        self.prompts = 0

    def model(self, dtype: str = "") -> Model:
        return Model(path=str(self.path), family=self.family, dtype=dtype or self.dtype)

    def rollout(self, name: str, **options: Any) -> Rollout:
        if name == "sglang" and self.args.attention:
            options["attention"] = self.args.attention
        share = 0.0 if self.args.tiny else 1.0 / self.args.engines
        return Rollout(
            group_size=self.args.batch, batch=self.args.batch, engine=Choice(name=name, options=options), engines=self.args.engines,
            gpus_per_engine=share, keep_engines=True,
        )  # fmt: skip

    def requests(self, images: int, kernel: str = "flow_sde") -> list[Request]:
        """Groups of `--batch` samples, each of a prompt that was not asked for before."""
        stochastic = kernel != "ode"
        plan = SamplingPlan(
            width=self.size, height=self.size, frames=1, steps=10, guidance=4.5, negative="", kernel=kernel,
            kernel_options={"eta": 0.7} if stochastic else {}, sde_steps=(2, 3) if stochastic else (),
        )  # fmt: skip
        indices, found = tuple(range(min(images, self.args.batch))), list[Request]()
        for _ in range(-(-images // self.args.batch)):
            number, self.prompts = self.prompts, self.prompts + 1
            prompt = Prompt(id=str(number), text=f"{WORDS[number % 4]} {number}", metadata={})
            own = tuple(seeds.derive(number, index) for index in indices)
            found.append(Request(prompt=prompt, group=f"g{number}", indices=indices, seeds=own, plan=plan))
        return found

    def generate(self, images: int, settings: Rollout, name: str) -> tuple[dict[str, Any], Path]:
        """Metrics of a rollout into Arrow, and the folder."""
        out = self.folder / name
        return generation.generate([self.requests(images)], settings, self.model(), self.base.path, out), out

    @contextmanager
    def engine(self, settings: Rollout) -> Iterator[Any]:
        engine = make_engine(settings, self.model())
        engine.load(self.base)
        try:
            yield engine
        finally:
            engine.close()


def draw(engine: Any, asked: Sequence[Request]) -> list[Trajectory]:
    """Each request as a batch, as many at a time as the fleet would send."""
    with ThreadPoolExecutor(engine.batches_at_once) as pool:
        batches = pool.map(lambda request: [found for found, _ in engine.generate([request])], asked)
        return [found for batch in batches for found in batch]


def sglang(bench: Bench, case: str, **options: Any) -> None:
    """From start to Arrow; the server's own rate is that of its log for the very same samples."""
    settings, batch, kind = bench.rollout("sglang", **options), bench.args.batch, case
    if bench.args.engines > 1:
        case += f", {bench.args.engines} engines on a GPU"
    with Peak() as peak:
        took, _ = bench.generate(batch * bench.args.engines, settings, f"{case}-first")
        bench.rows.add(case, "start, s", f"{took['start_seconds']:.1f}")
        bench.rows.add(case, "first batch, s (warm-up)", f"{took['seconds']:.1f}")
        logs = [log_of(actor) for actor in actors()]
        before = [log.stat().st_size for log in logs]
        found, out = bench.generate(bench.args.images, settings, case)
    images, rate = found["images"], found["images_per_s"]
    text = "".join(log.read_bytes()[at:].decode(errors="replace") for log, at in zip(logs, before, strict=True))
    stages: dict[str, list[float]] = {}
    for name, seconds in STAGE.findall(text):
        stages.setdefault(name.removesuffix("Stage"), []).append(float(seconds))
    denoising = sum(stages["Denoising"])
    if bench.args.engines == 1:
        bench.rows.numbers[kind] = images / denoising
    alone = bench.rows.numbers.get(kind, float("nan"))
    bench.rows.add(case, "denoising alone by one engine, images/s", f"{alone:.2f}")
    bench.rows.add(case, "rollout into Arrow, images/s", f"{rate:.2f} ({rate / alone:.0%} of denoising alone)")
    spent = {name: 1000 * sum(seconds) / images for name, seconds in stages.items()}
    told = ", ".join(f"{name} {ms:.1f}" for name, ms in spent.items() if ms >= 0.05)
    bench.rows.add(case, "server's stages, ms an image", f"{told}; of {1000 / rate:.1f} in all")
    size = sum(path.stat().st_size for path in out.rglob("*.arrow")) / images / 1e6
    raw = raw_bytes(actors()[0], bench.requests(batch)[0]) / batch / 1e6
    bench.rows.add(case, "MB an image", f"{size:.2f} in Arrow, {raw:.2f} in the raw response with all latents")
    bench.rows.add(case, "peak memory, GiB", str(peak))


def plain(bench: Bench) -> None:
    """The pipeline as its users call it; its pictures of the noise that our engine starts from are kept to compare."""
    from diffusers import StableDiffusion3Pipeline

    dtype, args = vars(torch)[bench.dtype], bench.args
    pipe = StableDiffusion3Pipeline.from_pretrained(bench.path, torch_dtype=dtype).to(bench.device)
    pipe.set_progress_bar_config(disable=True)
    how = {"num_inference_steps": 10, "guidance_scale": 4.5, "width": bench.size, "height": bench.size, "output_type": "np"}  # fmt: skip
    how["max_sequence_length"] = bench.family.options["max_sequence_length"]
    request = one_request(bench)
    shape = (16, bench.size // 8, bench.size // 8)
    latents = draw_noise(request.seeds, (), shape)[0].to(bench.device, dtype)
    texts = [request.prompt.text] * args.batch

    def first() -> None:
        pictures = pipe(texts, latents=latents, **how).images
        np.save(bench.kept / "plain.npy", (pictures * 255).round().astype(np.uint8))

    bench.rows.add("plain", "first batch, s", f"{timed(first):.1f}")
    calls = max(1, args.images // args.batch // 2)
    took = timed(lambda: [pipe([WORDS[call % 4]] * args.batch, **how) for call in range(calls)])
    bench.rows.numbers["plain"] = calls * args.batch / took
    bench.rows.add("plain", "diffusers pipeline, images/s", f"{bench.rows.numbers['plain']:.2f}")


def one_request(bench: Bench) -> Request:
    """The same for whoever draws it."""
    kept, bench.prompts = bench.prompts, 1_000_000
    request = bench.requests(bench.args.batch, kernel="ode")[0]
    bench.prompts = kept
    return request


def diffusers(bench: Bench) -> None:
    """Our in-process engine with the pipeline's own dtypes; compiled code pays off on a GPU only."""
    ways: dict[str, dict[str, Any]] = {}
    for mode in bench.args.modes.split(","):
        how: dict[str, Any] = {} if mode == "eager" else {"compile": True, "compile_mode": mode}
        ways["eager" if mode == "eager" else f"blocks {mode}"] = how
        if mode == "default":  # convolutions are cuDNN's whatever the mode
            ways["blocks and VAE default"] = how | {"compile_vae": True}
    rates = dict[str, float]()
    for way, options in ways.items():
        case, settings = f"diffusers, {way}", bench.rollout("diffusers", vae_dtype=bench.dtype, **options)
        with Peak() as peak, bench.engine(settings) as engine:
            warm = timed(lambda e=engine: draw(e, bench.requests(bench.args.batch)))
            bench.rows.add(case, "first batch, s (warm-up)", f"{warm:.1f}")
            took = timed(lambda e=engine: draw(e, bench.requests(bench.args.images)))
            rates[way] = bench.args.images / took
            against = rates[way] / bench.rows.numbers.get("plain", float("nan"))
            bench.rows.add(case, "images/s", f"{rates[way]:.2f} ({against:.2f} x the plain pipeline)")
            pictures = np.concatenate([found.frames for found in draw(engine, [one_request(bench)])])
        bench.rows.add(case, "peak memory, GiB", str(peak))
        compare(bench, way, pictures)
    way = max(rates, key=rates.__getitem__)
    settings = bench.rollout("diffusers", vae_dtype=bench.dtype, **ways[way])
    bench.generate(bench.args.batch * bench.args.engines, settings, "diffusers-first")
    rate = bench.generate(bench.args.images, settings, "diffusers")[0]["images_per_s"]
    against = rate / bench.rows.numbers.get("plain", float("nan"))
    bench.rows.add("diffusers", f"rollout into Arrow ({way}), images/s", f"{rate:.2f} ({against:.2f} x plain)")


def compare(bench: Bench, way: str, pictures: np.ndarray) -> None:
    """With those of the plain pipeline and of our eager engine, where they are there."""
    for name in ("plain", "eager"):
        file = bench.kept / f"{name}.npy"
        if file.is_file() and name != way:
            apart = np.abs(np.load(file).astype(int) - pictures.astype(int))
            told = f"mean {apart.mean():.3f}, 99.9 % within {np.quantile(apart, 0.999):.0f} of 255"
            bench.rows.add(f"diffusers, {way}", f"pictures against the {name} ones", told)
    if way == "eager":
        np.save(bench.kept / "eager.npy", pictures)


def sync(bench: Bench) -> None:
    """Full weights, then LoRAs, by either way into one server. The second of each is told: a first one imports and wraps layers."""
    family, settings = registry.make("family", bench.family), bench.rollout("sglang")
    net = family.transformer(str(bench.path), vars(torch)[bench.dtype], torch.device("cpu"))
    weights = {name: value.detach() for name, value in net.named_parameters()}
    targets = [name for name, layer in net.named_modules() if name.endswith(family.lora_targets)]
    common: dict[str, Any] = {"averages": {}, "parent": bench.base}
    scaled = {name: value * 1.01 for name, value in weights.items()}
    full = policies.write_full(bench.folder / "full", tensors=scaled, version="00000", **common)
    loras = []
    for number in range(2):
        shapes = {target: weights[f"{target}.weight"].shape for target in targets}
        lora = {f"{t}.lora_A.weight": torch.randn(32, s[1]) / 100 for t, s in shapes.items()}
        lora |= {f"{t}.lora_B.weight": torch.randn(s[0], 32) / 100 for t, s in shapes.items()}
        how = {"rank": 32, "alpha": 64.0, "targets": targets, "version": f"{number:05d}", **common}
        loras.append(policies.write_lora(bench.folder / f"lora{number}", tensors=lora, **how))
    bench.generate(1, settings, "sync-first")
    actor = actors()[0]
    for kind, found in (("full", [full, full]), ("LoRA", loras)):
        for way in ("artifact", "tensors"):
            use_sync(actor, way)
            took = [deliver(actor, policy.path) for policy in found][-1]
            bench.rows.add("sync", f"{kind} from {way}, verified, s", f"{took:.2f}")
            back = deliver(actor, bench.base.path)
            bench.rows.add("sync", f"base again after {kind} from {way}, s", f"{back:.2f}")


CASES: dict[str, Callable[[Bench], None]] = {
    "plain": plain,
    "diffusers": diffusers,
    "sglang": lambda bench: sglang(bench, "sglang"),
    "sglang-vae": lambda bench: sglang(bench, "sglang, compiled VAE", compile="vae", vae_dtype=bench.dtype),
    "sync": sync,
    "round": lambda bench: whole_round(bench, bench.dtype),
    "round-fp16": lambda bench: whole_round(bench, bench.dtype if bench.args.tiny else "float16"),
    "exact": exact,
    "sglang-compiled": lambda bench: sglang(
        bench, "sglang, compiled blocks and VAE", compile="blocks", vae_dtype=bench.dtype
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="samples of a request")
    parser.add_argument("--engines", type=int, default=1, help="that share the GPU")
    parser.add_argument("--modes", default="eager,default", help="of our engine: eager, or torch.compile's")
    parser.add_argument("--attention", default="", help="SGLang's attention backend")
    parser.add_argument(
        "--model", type=Path, default=None, help="where the model is built, or is from an earlier command"
    )
    parser.add_argument("--rows", type=Path, default=None, help="file of rows, of earlier commands too")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    os.environ.update(ray_environment(), PYTHONPATH=import_path())  # for Ray's processes
    with tempfile.TemporaryDirectory() as folder, local_ray():
        bench = Bench(args, Path(folder))
        for case in args.cases.split(","):
            took = timed(lambda case=case: CASES[case](bench))
            tell(f"-- {case} took {took:.0f} s")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    tell(f"\n{card}, torch {torch.__version__}, {' '.join(sys.argv)}\n\n{bench.rows.table()}")


if __name__ == "__main__":
    main()
