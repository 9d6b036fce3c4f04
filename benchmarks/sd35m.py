"""Stable Diffusion 3.5-medium with random weights: speed and memory depend on shapes, not on values.

The transformer and the VAE are whole; text encoders have the real widths and few layers, and a small vocabulary.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mdiff_core.worlds import tiny_sd3, tiny_text

TRANSFORMER = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
VAE = {
    "sample_size": 1024,
    "latent_channels": 16,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
CLIPS = ({"hidden_size": 768, "intermediate_size": 3072, "projection_dim": 768, "num_attention_heads": 12},
         {"hidden_size": 1280, "intermediate_size": 5120, "projection_dim": 1280, "num_attention_heads": 20})  # fmt: skip
LAYERS = 2
"""Of each text encoder."""


def build(folder: Path, device: torch.device, *, tiny: bool) -> Path:
    """A model in diffusers' layout; `tiny` is the shapes world's, for a CPU."""
    if folder.exists():
        shutil.rmtree(folder)
    torch.manual_seed(0)
    pipe = tiny_sd3.pipeline() if tiny else medium(device)
    if tiny:
        tiny_sd3.save(pipe, folder)
    else:
        pipe.save_pretrained(folder)
    return folder


def medium(device: torch.device) -> Any:
    """StableDiffusion3Pipeline; bfloat16 but for the VAE."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    def made(kind: Any, *arguments: Any, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> nn.Module:
        with device:
            return kind(*arguments, **settings).to(dtype).eval().requires_grad_(False)

    clip_words, t5_words = tiny_text.clip_tokenizer(), tiny_text.t5_tokenizer()
    clip_words.model_max_length, t5_words.model_max_length = 77, 256
    ends = {"bos_token_id": clip_words.bos_token_id, "eos_token_id": clip_words.eos_token_id}
    clips = [
        made(
            CLIPTextModelWithProjection,
            CLIPTextConfig(vocab_size=len(clip_words), num_hidden_layers=LAYERS, **ends, **size),
        )
        for size in CLIPS
    ]
    t5 = T5Config(
        vocab_size=len(t5_words), d_model=4096, d_kv=64, d_ff=10240, num_layers=LAYERS, num_heads=64,
        feed_forward_proj="gated-gelu", dropout_rate=0.0,
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=made(SD3Transformer2DModel, **TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=made(AutoencoderKL, dtype=torch.float32, **VAE),
        text_encoder=clips[0],
        tokenizer=clip_words,
        text_encoder_2=clips[1],
        tokenizer_2=clip_words,
        text_encoder_3=made(T5EncoderModel, t5),
        tokenizer_3=t5_words,
    )
