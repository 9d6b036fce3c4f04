"""ImageReward (arXiv 2304.05977): BLIP reads the prompt while looking at the frame, and a head makes that a number."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from mdiff_core import frames as pictures
from mdiff_core import hub
from mdiff_core.types import Prompt
from mdiff_core.vision import ModelOptions, affine, take

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the published model's raw output, which is normalised with them."""
HEAD_WIDTH = 64
"""Of an attention head, in ViT and BERT of every size."""
VISION = (
    ("cls_token", "embeddings.class_embedding"),
    ("pos_embed", "embeddings.position_embedding"),
    ("patch_embed.proj.", "embeddings.patch_embedding."),
    ("blocks.", "encoder.layers."),
    (".attn.qkv.", ".self_attn.qkv."),
    (".attn.proj.", ".self_attn.projection."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
)
"""Names in BLIP's own checkpoints -> in transformers, of the picture's side; those of the text's side are alike."""


class ImageRewardOptions(ModelOptions):
    """Which ImageReward."""

    weights: str = "THUDM/ImageReward/ImageReward.pt"
    """The published checkpoint: a path, or owner/name/file on the hub. The sizes of all layers are read from it."""
    tokenizer: str = "google-bert/bert-base-uncased"
    """Folder or hub id."""
    tokens: int = Field(default=35, ge=2)
    """Tokens of the prompt that are read."""


class ImageReward:
    """Preference of people for the frame, about normal with mean 0 and std 1."""

    Options = ImageRewardOptions
    groupwise = False

    def __init__(self, options: ImageRewardOptions) -> None:
        self.options = options

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, H, W, 3] uint8; RewardFailed for anything else."""
        return pictures.scores("image_reward", frames, prompts, self.options, self.measure)

    def measure(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Scores [N] of images [N, H, W, 3]."""
        texts, size = [prompt.text for prompt in prompts], self.options.batch
        cuts = range(0, len(images), size)
        found: np.ndarray = torch.cat([self._judged(images[i : i + size], texts[i : i + size]) for i in cuts]).numpy()
        return found

    @torch.no_grad()
    def _judged(self, images: np.ndarray, texts: Sequence[str]) -> Tensor:
        vision, text, head = self._networks
        place = self.options.place()
        asked = {"padding": "max_length", "truncation": True, "max_length": self.options.tokens, "return_tensors": "pt"}
        tokens = self._tokenizer(list(texts), **asked).to(place["device"])
        pixels = self._processor(list(images), return_tensors="pt")["pixel_values"]
        seen = vision(pixel_values=pixels.to(**place)).last_hidden_state
        read = text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        )
        raw: Tensor = head(read.last_hidden_state[:, 0].float().cpu()).squeeze(1)
        return (raw - MEAN) / STD

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return hub.open_model(AutoTokenizer, self.options.tokenizer)

    @cached_property
    def _processor(self) -> Any:
        from transformers import CLIPImageProcessorPil

        size = self._networks[0].config.image_size
        return CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})

    @cached_property
    def _networks(self) -> tuple[Any, Any, nn.Sequential]:
        """The picture's side, the text's side, and the head, from one checkpoint."""
        where = self.options.weights
        tensors = hub.weights(where)
        vision, text = (
            vision_of(part(tensors, "blip.visual_encoder."), where),
            text_of(part(tensors, "blip.text_encoder."), where),
        )
        networks = [network.to(**self.options.place()).eval().requires_grad_(False) for network in (vision, text)]
        return networks[0], networks[1], affine(tensors, "mlp.layers.", where)


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below `prefix`, without it and without buffers that hold no weights."""
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in found.items() if not name.endswith("position_ids")}


def layers(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """How many layers there are with names like `pattern`, which has the number in its group."""
    return 1 + max((int(found[1]) for name in tensors if (found := re.match(pattern, name))), default=-1)


def vision_of(tensors: Mapping[str, Tensor], where: str) -> nn.Module:
    """The ViT of BLIP with these weights."""
    from transformers import BlipVisionConfig, BlipVisionModel

    renamed = {}
    for name, tensor in tensors.items():
        for old, new in VISION:
            name = name.replace(old, new, 1)
        renamed[f"post_layernorm.{name.removeprefix('norm.')}" if name.startswith("norm.") else name] = tensor
    width, _, patch, _ = renamed["embeddings.patch_embedding.weight"].shape
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=renamed["encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=layers(renamed, r"encoder\.layers\.(\d+)\."),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=patch * round((renamed["embeddings.position_embedding"].shape[1] - 1) ** 0.5),
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    model: nn.Module = BlipVisionModel(config)
    take(model, renamed, where)
    return model


def text_of(tensors: Mapping[str, Tensor], where: str) -> nn.Module:
    """The BERT of BLIP with these weights, which looks at the picture in every layer."""
    from transformers import BlipTextConfig, BlipTextModel

    vocabulary, width = tensors["embeddings.word_embeddings.weight"].shape
    config = BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        encoder_hidden_size=tensors["encoder.layer.0.crossattention.self.key.weight"].shape[1],
        intermediate_size=tensors["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=layers(tensors, r"encoder\.layer\.(\d+)\."),
        num_attention_heads=width // HEAD_WIDTH,
        max_position_embeddings=tensors["embeddings.position_embeddings.weight"].shape[0],
    )
    model: nn.Module = BlipTextModel(config, add_pooling_layer=False)
    take(model, tensors, where)
    return model
