"""CLIP as rewards use it: pictures and texts to unit vectors, in batches, each text once."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mdiff_core import hub
from mdiff_core.vision import ModelOptions, take

VIT_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""The architecture, preprocessing and tokenizer of PickScore and HPS."""


class Clip:
    """A frozen CLIP; its weights are read when the first frame comes."""

    def __init__(self, model: str, processor: str, options: ModelOptions, weights: str = "") -> None:
        """`model` and `processor` are folders or hub ids. With `weights`, a file of an OpenCLIP checkpoint, `model` gives the
        architecture only."""
        self._names = model, processor
        self._options, self._weights = options, weights

    def pictures(self, images: np.ndarray, *, pad: bool = False) -> Tensor:
        """[N, D] float32 unit vectors, on the CPU, of [N, H, W, 3] uint8; `pad` fits the whole picture in instead of cropping."""
        return torch.cat([self._pictures(some, pad) for some in self._batches(images)])

    def texts(self, texts: Sequence[str]) -> Tensor:
        """[N, D] float32 unit vectors, on the CPU; a text longer than the model takes is cut."""
        different = list(dict.fromkeys(texts))
        found = torch.cat([self._texts(some) for some in self._batches(different)])
        where = {text: i for i, text in enumerate(different)}
        return found[[where[text] for text in texts]]

    def cosines(self, images: np.ndarray, texts: Sequence[str], *, pad: bool = False) -> Tensor:
        """[N] float32: how much image i is like text i, in [-1, 1]."""
        return (self.pictures(images, pad=pad) * self.texts(texts)).sum(dim=1)

    @property
    def scale(self) -> float:
        """What the model multiplies cosines with."""
        return float(self._model.logit_scale.float().exp())

    def _batches(self, items: Any) -> Iterator[Any]:
        for start in range(0, len(items), self._options.batch):
            yield items[start : start + self._options.batch]

    @torch.no_grad()
    def _pictures(self, images: np.ndarray, pad: bool) -> Tensor:
        pixels = self._processor([fitted(image) if pad else image for image in images], return_tensors="pt")
        seen = self._model.vision_model(pixel_values=pixels["pixel_values"].to(**self._options.place()))
        return unit(self._model.visual_projection(seen.pooler_output))

    @torch.no_grad()
    def _texts(self, texts: Sequence[str]) -> Tensor:
        length = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt")
        read = self._model.text_model(**tokens.to(self._options.place()["device"]))
        return unit(self._model.text_projection(read.pooler_output))

    @cached_property
    def _processor(self) -> Any:
        from transformers import CLIPImageProcessorPil  # the pixels of published scores, whatever else is installed

        return hub.open_model(CLIPImageProcessorPil, self._names[1])

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return hub.open_model(AutoTokenizer, self._names[1])

    @cached_property
    def _model(self) -> Any:
        from transformers import CLIPConfig, CLIPModel

        if not self._weights:
            model = hub.open_model(CLIPModel, self._names[0], use_safetensors=True)
        else:
            model = CLIPModel(hub.open_model(CLIPConfig, self._names[0]))
            take(model, from_open_clip(hub.weights(self._weights)), self._weights)
        return model.to(**self._options.place()).eval().requires_grad_(False)


def unit(vectors: Tensor) -> Tensor:
    """Of length 1, float32, on the CPU."""
    return nn.functional.normalize(vectors.float(), dim=-1).cpu()


def fitted(image: np.ndarray) -> np.ndarray:
    """The picture [H, W, 3] in the middle of a black square: HPS looks at all of it."""
    height, width = image.shape[:2]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    square = np.zeros((side, side, 3), np.uint8)
    square[top : top + height, left : left + width] = image
    return square


OPEN_CLIP = (
    ("visual.class_embedding", "vision_model.embeddings.class_embedding"),
    ("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    ("visual.conv1.", "vision_model.embeddings.patch_embedding."),
    ("visual.ln_pre.", "vision_model.pre_layrnorm."),
    ("visual.ln_post.", "vision_model.post_layernorm."),
    ("visual.transformer.resblocks.", "vision_model.encoder.layers."),
    ("transformer.resblocks.", "text_model.encoder.layers."),
    ("token_embedding.", "text_model.embeddings.token_embedding."),
    ("positional_embedding", "text_model.embeddings.position_embedding.weight"),
    ("ln_final.", "text_model.final_layer_norm."),
    (".ln_1.", ".layer_norm1."),
    (".ln_2.", ".layer_norm2."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
    (".attn.", ".self_attn."),
)
"""Names in an OpenCLIP checkpoint -> in transformers; the first that fits, per kind."""


def from_open_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An OpenCLIP checkpoint under transformers' names: projections turned, the fused query, key and value taken apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ("visual.proj", "text_projection"):
            found["visual_projection.weight" if name == "visual.proj" else "text_projection.weight"] = tensor.T
            continue
        if name == "attn_mask":
            continue  # a constant, which transformers makes itself
        for old, new in OPEN_CLIP:
            if name.startswith(old) or old.startswith("."):
                name = name.replace(old, new, 1)
        if ".in_proj_" in name:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                found[name.replace("in_proj_", f"{part}_proj.")] = piece
        else:
            found[name] = tensor
    return found
