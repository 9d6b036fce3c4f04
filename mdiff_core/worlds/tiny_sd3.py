"""Builds a Stable Diffusion 3 small enough for a laptop's CPU, out of the real classes, for the shapes world.

The text encoders are random and stay so: they only have to keep words and their order apart. The VAE is trained here; the
transformer is left untrained for mdiff's own supervised fine-tuning. `python -m mdiff_core.worlds.tiny_sd3 build --help`.
"""

import argparse
import json
import logging
import math
import string
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mdiff_core.worlds.shapes import SIZE, VOCABULARY, render, scenes

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
    from torch import Tensor, nn
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

TEXT_LENGTH = 16
"""Tokens that each of CLIP and T5 sees; the longest caption needs 10."""
CLIP_WIDTH, T5_WIDTH = 64, 128
LATENT_CHANNELS = 16
LAYERS = 5
"""Transformer blocks."""
BATCH = 128
POOL = 16_384
"""Scenes that the VAE is trained on."""
KL_WEIGHT = 1e-4
"""Per latent number; with ten times more, half of the channels say nothing and the transformer learns slower."""


log = logging.getLogger(__name__)


def clip_tokenizer() -> "CLIPTokenizer":
    """One token for every word of the captions; other words fall apart into letters."""
    from transformers import CLIPTokenizer

    merges = byte_pairs(VOCABULARY)
    pieces = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase), *map("".join, merges)]
    vocab = {piece: index for index, piece in enumerate(("<|startoftext|>", "<|endoftext|>", *pieces))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=TEXT_LENGTH)


def byte_pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges that make every word one token: the commonest pair first, ties by spelling (the library's trainer breaks them by chance)."""
    splits = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while pairs := Counter(pair for split in splits for pair in pairwise(split)):
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((left, right))
        for split in splits:
            for at in range(len(split) - 2, -1, -1):
                if split[at : at + 2] == [left, right]:
                    split[at : at + 2] = [left + right]
    return merges


def t5_tokenizer() -> "T5Tokenizer":
    """One token for every word of the captions; other words fall apart into letters."""
    from transformers import T5Tokenizer

    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -10.0)]
    vocab += [(f"▁{word}", -1.0) for word in VOCABULARY]
    vocab += [(letter, -10.0) for letter in string.ascii_lowercase]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=TEXT_LENGTH)


def clip_encoder(tokenizer: "CLIPTokenizer") -> "CLIPTextModelWithProjection":
    """A random CLIP text model; its pooled output is read at the tokenizer's end token."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CLIPTextModelWithProjection(config)
    _randomise(model, {"token_embedding": 1.0, "position_embedding": 0.7})
    return model


def t5_encoder(tokenizer: "T5Tokenizer") -> "T5EncoderModel":
    """A random T5 encoder; position shows only in the attention biases, which are therefore large."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=T5_WIDTH,
        d_kv=32,
        d_ff=2 * T5_WIDTH,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=32,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    model = T5EncoderModel(config)
    _randomise(model, {"shared": 1.0, "relative_attention_bias": 2.0, ".q.": (T5_WIDTH * config.d_kv) ** -0.5})
    return model


def _randomise(model: "nn.Module", spread: dict[str, float]) -> None:
    """Gaussian weights that keep a signal's size (1 / sqrt(inputs)), or of the spread named for a part of the name; frozen."""
    from torch import nn

    for name, weight in model.named_parameters():
        weight.requires_grad_(False)
        if weight.dim() > 1:
            std = next((spread[part] for part in spread if part in name), weight.shape[1] ** -0.5)
            nn.init.normal_(weight, std=std)


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


def pixels(seed: int, count: int) -> "Tensor":
    """The first `count` scenes of a seed as the VAE sees them: [count, 3, SIZE, SIZE] float32 in -1..1."""
    import torch

    frames = np.stack([render(scene) for scene in islice(scenes(seed), count)])
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_autoencoder(vae: "AutoencoderKL", pool: "Tensor", *, steps: int) -> None:
    """Adam on L1 of pixels and of edges plus a little KL, on the device of `vae` and `pool`.

    pool [N, 3, SIZE, SIZE] in -1..1. Draws from torch's global generators.
    """
    import torch

    vae.train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=1e-4)
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
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = off.mean() + edges + KL_WEIGHT * kl
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


def standardise(vae: "AutoencoderKL", pool: "Tensor") -> None:
    """Set scaling_factor and shift_factor so that latents (z - shift) * scale of `pool` have mean 0 and spread 1."""
    import torch

    with torch.no_grad():
        latents = torch.cat([vae.encode(part).latent_dist.mode() for part in torch.split(pool, 256)])
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


def pipeline() -> "StableDiffusion3Pipeline":
    """The whole model, untrained, random from torch's global CPU generator."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(),
        text_encoder=clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=clip_encoder(clip),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
    )


def save(pipe: "StableDiffusion3Pipeline", out: Path) -> None:
    """Write diffusers' layout: weights stored as float16, to be opened as float32."""
    import torch

    pipe.to(torch.float16).save_pretrained(out)
    for config in out.glob("text_encoder*/config.json"):  # transformers opens a model in the dtype named here
        config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float32"}, indent=2) + "\n")


def build(out: Path, *, seed: int, vae_steps: int, device: str) -> None:
    """Write the model to `out`: VAE trained for `vae_steps`, transformer untrained. Seeds torch's global generators."""
    import torch

    torch.manual_seed(seed)
    pipe = pipeline()
    vae = pipe.vae.to(device)
    pool = pixels(seed, POOL).to(device)
    train_autoencoder(vae, pool, steps=vae_steps)
    vae.half().float()  # scale and shift belong to the weights as stored
    standardise(vae, pool[:4096])
    vae.cpu()
    save(pipe, out)


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
        "--model", type=Path, default=Path("assets/shapes_sd3"), help="blank: whose other parts to take"
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vae-steps", type=int, default=1500)
    parser.add_argument("--device", default="cpu", help="cuda takes about a minute, cpu half a day")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.what == "blank":
        blank(args.model, args.out, seed=args.seed)
    else:
        build(args.out, seed=args.seed, vae_steps=args.vae_steps, device=args.device)


if __name__ == "__main__":
    main()
