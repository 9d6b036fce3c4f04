"""Builds a Stable Diffusion 3 small enough for a laptop's CPU, out of the real classes, for the world of shapes or of words.

The text encoders (`tiny_text`) are random and stay so. The VAE is trained here; the transformer is left for mdiff's own supervised
fine-tuning. `python -m mdiff_core.worlds.tiny_sd3 build --help`.
"""

import argparse
import json
import logging
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mdiff_core.errors import BadSetting
from mdiff_core.worlds.shapes import SIZE
from mdiff_core.worlds.tiny_text import (
    CLIP_WIDTH,
    SHAPES,
    T5_WIDTH,
    WORLDS,
    World,
    clip_encoder,
    clip_tokenizer,
    t5_encoder,
    t5_tokenizer,
)

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
    from torch import Tensor

LATENT_CHANNELS = 16
LAYERS = 5
"""Transformer blocks."""
BATCH = 128
POOL = 16_384
"""Pictures that the VAE is trained on."""
KL_WEIGHT = 1e-4
"""Per latent number; with ten times more, half of the channels say nothing and the transformer learns slower."""
LOST = 0.1
"""Squared error, over the square of what stands out from the paper, up to which a picture counts as given back. OCR then reads 97 % of
words exactly, 91 % up to 0.15 and 76 % up to 0.3; blank paper's is 1."""
NEW = 512
"""Pictures that a trained VAE is judged by."""


log = logging.getLogger(__name__)


def transformer() -> "SD3Transformer2DModel":
    """The untrained denoiser: 64 image tokens (one per latent pixel) and 2 x TEXT_LENGTH text tokens."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=SIZE // 8,
        patch_size=1,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=32,
        num_attention_heads=4,
        caption_projection_dim=128,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=SIZE // 8,
        qk_norm="rms_norm",
    )


def autoencoder() -> "AutoencoderKL":
    """The untrained VAE: SIZE x SIZE pixels to SIZE/8 x SIZE/8 latents."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        sample_size=SIZE,
        latent_channels=LATENT_CHANNELS,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 64, 64),
        layers_per_block=1,
        norm_num_groups=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
    )


def pixels(seed: int, count: int, world: World = SHAPES) -> "Tensor":
    """The first `count` pictures of a seed as the VAE sees them: [count, 3, SIZE, SIZE] float32 in -1..1."""
    import torch

    frames = np.stack(list(islice(world.pictures(seed), count)))
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_autoencoder(vae: "AutoencoderKL", pool: "Tensor", *, steps: int, world: World = SHAPES) -> None:
    """Adam on L1 of pixels (ink weighted) and of edges plus a little KL, on the device of `vae` and `pool`.

    pool [N, 3, SIZE, SIZE] in -1..1. Draws from torch's global generators.
    """
    import torch

    vae.train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1e-3 if world.of_shapes else 2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    for step in range(steps):
        images = pool[torch.randint(len(pool), (BATCH,), device=pool.device)]
        with torch.autocast(pool.device.type, torch.bfloat16, enabled=pool.device.type == "cuda"):
            posterior = vae.encode(images).latent_dist
            drawn = vae.decode(posterior.sample()).sample
        off = (drawn.float() - images).abs()
        edges = _slopes(drawn.float() - images)
        ink = 1 + world.ink * _stands_out(images, world).abs().amax(1, keepdim=True)
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = (ink * off).mean() + edges + KL_WEIGHT * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == steps - 1:
            log.info("vae step %d: L1 %.4f edges %.4f kl %.2f", step, off.mean(), edges, kl)
    vae.eval()


def _slopes(image: "Tensor") -> "Tensor":
    """Mean absolute difference of neighbouring pixels."""
    return image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()


def _stands_out(images: "Tensor", world: World) -> "Tensor":
    """[B, 3, H, W]: difference from the paper."""
    return images - (images.new_tensor(world.paper).view(1, 3, 1, 1) / 127.5 - 1)


def given_back(vae: "AutoencoderKL", images: "Tensor", world: World) -> float:
    """Share of pictures [N, 3, H, W] of which encoding and decoding lose less than LOST."""
    import torch

    with torch.no_grad():
        drawn = torch.cat([vae.decode(vae.encode(part).latent_dist.mode()).sample for part in torch.split(images, 64)])
    off, there = ((part**2).sum((1, 2, 3)) for part in (drawn - images, _stands_out(images, world)))
    return float((off < LOST * there).float().mean())


def standardise(vae: "AutoencoderKL", pool: "Tensor") -> None:
    """Set scaling_factor and shift_factor so that latents (z - shift) * scale of `pool` have mean 0 and spread 1."""
    import torch

    with torch.no_grad():
        latents = torch.cat([vae.encode(part).latent_dist.mode() for part in torch.split(pool, 256)])
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


def pipeline(world: World = SHAPES) -> "StableDiffusion3Pipeline":
    """The whole model, untrained, random from torch's global generator on the CPU."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    clip, t5 = clip_tokenizer(world), t5_tokenizer(world)
    return StableDiffusion3Pipeline(
        transformer=transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(),
        text_encoder=clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=clip_encoder(clip),
        tokenizer_2=clip_tokenizer(world),
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
    )


def save(pipe: "StableDiffusion3Pipeline", out: Path) -> None:
    """Write diffusers' layout: weights stored as float16, to be opened as float32."""
    import torch

    pipe.to(torch.float16).save_pretrained(out)
    for config in out.glob("text_encoder*/config.json"):  # transformers opens a model in the dtype named here
        config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float32"}, indent=2) + "\n")


def build(pipe: "StableDiffusion3Pipeline", *, world: World, seed: int, vae_steps: int, device: str) -> float:
    """Train the VAE for `vae_steps` on pictures of `seed`; the share of new ones that it gives back."""
    vae = pipe.vae.to(device)
    pool = pixels(seed, POOL, world).to(device)
    train_autoencoder(vae, pool, steps=vae_steps, world=world)
    vae.half().float()  # scale and shift belong to the weights as stored
    standardise(vae, pool[:4096])
    share = given_back(vae, pixels(seed + 1, NEW, world).to(device), world)
    log.info("vae: gives back %.3f of %d new pictures", share, NEW)
    vae.cpu()
    return share


def start(world: World, shapes: Path) -> "StableDiffusion3Pipeline":
    """The world's model before any training, where it asks for that with VAE and transformer of `shapes`, as float32."""
    from diffusers import AutoencoderKL, SD3Transformer2DModel

    pipe = pipeline(world)
    if world.of_shapes:
        pipe.vae = AutoencoderKL.from_pretrained(shapes, subfolder="vae")
        pipe.transformer = SD3Transformer2DModel.from_pretrained(shapes, subfolder="transformer")
    return pipe


def blank(model: Path, out: Path, *, seed: int) -> None:
    """Write `model` to `out` with an untrained transformer in it. Seeds torch's global generators."""
    import torch
    from diffusers import StableDiffusion3Pipeline

    torch.manual_seed(seed)
    save(StableDiffusion3Pipeline.from_pretrained(model, transformer=transformer()), out)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mdiff_core.worlds.tiny_sd3", description=__doc__)
    parser.add_argument("what", choices=("build", "blank"))
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("assets/shapes_sd3"),
        help="blank: whose other parts to take; build of words: whose VAE and transformer to start from",
    )
    parser.add_argument("--world", choices=WORLDS, default="shapes", help="build: what it is to draw")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vae-steps", type=int, default=1500)
    parser.add_argument("--least", type=float, default=0.8, help="build: share of pictures the VAE must give back")
    parser.add_argument("--device", default="cpu", help="cuda takes about a minute, cpu half a day (words: minutes)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.what == "blank":
        blank(args.model, args.out, seed=args.seed)
        return
    import torch

    torch.manual_seed(args.seed)
    world = WORLDS[args.world]
    pipe = start(world, args.model)
    share = build(pipe, world=world, seed=args.seed, vae_steps=args.vae_steps, device=args.device)
    if share < args.least:
        raise BadSetting(
            f"--vae-steps: after {args.vae_steps} the VAE gives back {share:.3f} of new pictures, less than --least {args.least:g}, so "
            "whatever is trained on its latents would draw the rest away; nothing was written, train it for longer"
        )
    save(pipe, args.out)


if __name__ == "__main__":
    main()
