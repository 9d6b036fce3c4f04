"""Stable Diffusion 3 and 3.5 in diffusers' layout: two CLIP encoders, T5, SD3Transformer2DModel, a 16-channel VAE."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from mdiff_core import hub
from mdiff_core.contracts import Serving
from mdiff_core.errors import BadSetting
from mdiff_core.options import Options
from mdiff_core.sigmas import TRAIN_TIMESTEPS, scheduled_sigmas
from mdiff_core.types import Condition

CLIP_LENGTH = 77
"""Most tokens that CLIP has positions for."""
SGLANG_LENGTH = 256
"""Tokens that SGLang's SD3 pipeline gives T5 unless told otherwise."""


class SD3Options(Options):
    """Text side."""

    max_sequence_length: int = Field(default=256, ge=1, le=512)
    """Tokens that T5 sees."""


class SD3:
    """The family; see contracts.Family."""

    Options: ClassVar[type[Options]] = SD3Options
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    def __init__(self, options: SD3Options) -> None:
        self.options = options

    def check(self, model: str, *, width: int, height: int, frames: int) -> None:
        """Sizes are multiples of VAE downscale x patch and fit the position table; the published 8 x 2 for a hub id not on disk."""
        if frames != 1:
            raise BadSetting(f"sampling.frames: {frames}, but sd3 draws single images; set it to 1")
        vae, transformer = (hub.config_on_disk(model, f"{part}/config.json") for part in ("vae", "transformer"))
        downscale = 2 ** (len(vae["block_out_channels"]) - 1) if vae else 8
        patch = transformer["patch_size"] if transformer else 2
        unit = downscale * patch
        most = unit * transformer["pos_embed_max_size"] if transformer else None
        for field, size in (("width", width), ("height", height)):
            if size % unit or (most and size > most):
                nearest = max(unit, min(round(size / unit) * unit, most or size + unit))
                limit = f" up to {most}" if most else ""
                raise BadSetting(
                    f"sampling.{field}: {size} is not a multiple of {unit}{limit} (VAE downscale {downscale} x patch {patch}); "
                    f"the nearest valid size is {nearest}"
                )

    def digest(self, model: str) -> str:
        """sha256 of transformer/config.json without the keys that say who wrote it."""
        config = hub.config(model, "transformer/config.json")
        kept = {key: value for key, value in config.items() if key not in ("_diffusers_version", "_name_or_path")}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def transformer(self, model: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """SD3Transformer2DModel, eval mode, no gradients."""
        from diffusers import SD3Transformer2DModel

        return cast(nn.Module, hub.load(SD3Transformer2DModel, model, "transformer", torch_dtype=dtype).to(device))

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        """The joint attention blocks."""
        return list(cast(nn.ModuleList, transformer.transformer_blocks))

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """One forward pass in the transformer's dtype; the time stays float32 up to its embedding."""
        dtype = cast(torch.dtype, transformer.dtype)
        embeds = {key: value.to(dtype) for key, value in condition.items()}
        output = transformer(hidden_states=x.to(dtype), timestep=sigma * TRAIN_TIMESTEPS, return_dict=False, **embeds)
        return cast(Tensor, output[0]).float()

    def encoder(self, model: str, dtype: torch.dtype, device: torch.device) -> "SD3TextEncoder":
        """Both CLIPs, and T5 where the model has one."""
        return SD3TextEncoder(model, dtype, device, self.options.max_sequence_length)

    def decoder(self, model: str, dtype: torch.dtype, device: torch.device) -> "SD3Codec":
        """The VAE."""
        from diffusers import AutoencoderKL

        return SD3Codec(hub.load(AutoencoderKL, model, "vae", torch_dtype=dtype).to(device))

    def sigmas(self, model: str, *, steps: int, width: int, height: int) -> Tensor:
        """[steps+1] float32 of the model's own scheduler, which does not look at the size."""
        return scheduled_sigmas(hub.config(model, "scheduler/scheduler_config.json"), steps, model)

    def serving(self) -> Serving:
        """SGLang takes one pipeline for every SD3; it cuts the negative text at its own 256 tokens, whatever the option.

        Left alone it gives CLIP its own length and T5 256 tokens; told a length, it gives that to all three. BadSetting for a
        length that CLIP has no positions for.
        """
        length = self.options.max_sequence_length
        if CLIP_LENGTH < length != SGLANG_LENGTH:
            raise BadSetting(
                f"model.family.options.max_sequence_length: {length}, but SGLang cuts the texts of CLIP and T5 alike; use {SGLANG_LENGTH}, "
                f"or {CLIP_LENGTH} at most, or the diffusers engine"
            )
        return Serving(
            model_id="stable-diffusion-3.5-medium",
            text_encoders=3,
            sampling_params={} if length == SGLANG_LENGTH else {"max_sequence_length": length},
            conditions={name: name for name in ("encoder_hidden_states", "pooled_projections")},
        )


class SD3TextEncoder:
    """StableDiffusion3Pipeline's conditioning: CLIPs' next-to-last states side by side, padded to T5's width, then T5's states."""

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device, length: int) -> None:
        from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

        def pair(encoder: Any, tokenizer: Any, part: str) -> tuple[Any, Any]:
            loaded = hub.load(encoder, model, f"text_encoder{part}", dtype=dtype).to(device)
            return hub.tokenizer(tokenizer, model, f"tokenizer{part}"), loaded

        self._device, self._length = device, length
        self._width = hub.config(model, "transformer/config.json")["joint_attention_dim"]
        self._clips = [pair(CLIPTextModelWithProjection, CLIPTokenizer, part) for part in ("", "_2")]
        has_t5 = hub.config(model, "model_index.json")["text_encoder_3"][0] is not None
        self._t5 = pair(T5EncoderModel, T5Tokenizer, "_3") if has_t5 else None

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[Condition]:
        """Per text: encoder_hidden_states [tokens, width] and pooled_projections [width], on the CPU."""
        limit = self._clips[0][0].model_max_length
        outputs = [
            clip(self._tokens(tokenizer, texts, limit), output_hidden_states=True) for tokenizer, clip in self._clips
        ]
        words = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        words = nn.functional.pad(words, (0, self._width - words.shape[-1]))
        states = torch.cat((words, self._t5_states(texts, words)), dim=1).cpu()
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1).cpu()
        pairs = zip(states, pooled, strict=True)
        return [{"encoder_hidden_states": state.clone(), "pooled_projections": pool.clone()} for state, pool in pairs]

    def _t5_states(self, texts: Sequence[str], like: Tensor) -> Tensor:
        if self._t5 is None:  # the pipeline's stand-in for an absent T5
            return like.new_zeros(len(texts), self._length, self._width)
        tokenizer, t5 = self._t5
        return cast(Tensor, t5(self._tokens(tokenizer, texts, self._length))[0])

    def _tokens(self, tokenizer: Any, texts: Sequence[str], length: int) -> Tensor:
        encoded = tokenizer(list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return cast(Tensor, encoded.input_ids).to(self._device)


class SD3Codec:
    """The VAE with the model's scale and shift."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    def latent_shape(self, *, width: int, height: int, frames: int) -> tuple[int, ...]:
        """(channels, height, width) of one latent; frames is 1, as `SD3.check` made sure."""
        assert frames == 1
        downscale = 2 ** (len(self._vae.config.block_out_channels) - 1)
        return (self._vae.config.latent_channels, height // downscale, width // downscale)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        """[B, C, h, w] -> [B, 1, H, W, 3] uint8, rounded as diffusers' image processor does."""
        latents = latents.to(self._vae.device, self._vae.dtype)
        pixels = self._vae.decode(latents / self._vae.config.scaling_factor + self._shift, return_dict=False)[0]
        frames = (pixels.float() * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return cast(np.ndarray, frames.permute(0, 2, 3, 1).unsqueeze(1).contiguous().cpu().numpy())

    @torch.no_grad()
    def encode(self, frames: np.ndarray) -> Tensor:
        """[B, 1, H, W, 3] uint8 -> [B, C, h, w] float32 on the CPU."""
        pixels = torch.tensor(frames[:, 0], device=self._vae.device).permute(0, 3, 1, 2).to(self._vae.dtype) / 127.5 - 1
        latents = self._vae.encode(pixels).latent_dist.mode().float()
        return cast(Tensor, (latents - self._shift) * self._vae.config.scaling_factor).cpu()

    def networks(self) -> Sequence[nn.Module]:
        """The decoder alone."""
        return [self._vae.decoder]

    @property
    def _shift(self) -> float:
        return self._vae.config.shift_factor or 0.0
