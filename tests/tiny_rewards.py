"""Reward models of the real classes, a few kB each, laid out as the published ones."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mdiff_core.worlds import tiny_text

WIDTH, PATCH, SIZE = 64, 8, 32


def clip(folder: Path) -> Path:
    """A random CLIP with preprocessing and tokenizer, in transformers' layout; returns its folder."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    tokenizer = tiny_text.clip_tokenizer()
    shared = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": tiny_text.TEXT_LENGTH,
    }
    config = CLIPConfig(
        text_config=shared | text, vision_config=shared | {"image_size": SIZE, "patch_size": PATCH}, projection_dim=24
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = CLIPModel(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2)  # the default's pictures are all alike
    model.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


def open_clip(folder: Path, model: nn.Module) -> Path:
    """The weights of a transformers CLIP as an OpenCLIP checkpoint, which is what HPS publishes."""
    state = model.state_dict()
    found: dict[str, Tensor] = {"logit_scale": state["logit_scale"]}
    for side, tower, layers in (("visual.", "vision_model", 2), ("", "text_model", 2)):
        for i in range(layers):
            old, new = f"{side}transformer.resblocks.{i}", f"{tower}.encoder.layers.{i}"
            for kind in ("weight", "bias"):
                parts = [state[f"{new}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                found[f"{old}.attn.in_proj_{kind}"] = torch.cat(parts)
                found[f"{old}.attn.out_proj.{kind}"] = state[f"{new}.self_attn.out_proj.{kind}"]
                found[f"{old}.ln_1.{kind}"] = state[f"{new}.layer_norm1.{kind}"]
                found[f"{old}.ln_2.{kind}"] = state[f"{new}.layer_norm2.{kind}"]
                found[f"{old}.mlp.c_fc.{kind}"] = state[f"{new}.mlp.fc1.{kind}"]
                found[f"{old}.mlp.c_proj.{kind}"] = state[f"{new}.mlp.fc2.{kind}"]
    embeddings = "vision_model.embeddings."
    found["visual.class_embedding"] = state[f"{embeddings}class_embedding"]
    found["visual.positional_embedding"] = state[f"{embeddings}position_embedding.weight"]
    found["visual.conv1.weight"] = state[f"{embeddings}patch_embedding.weight"]
    found["visual.proj"] = state["visual_projection.weight"].T.contiguous()
    found["token_embedding.weight"] = state["text_model.embeddings.token_embedding.weight"]
    found["positional_embedding"] = state["text_model.embeddings.position_embedding.weight"]
    found["text_projection"] = state["text_projection.weight"].T.contiguous()
    for kind in ("weight", "bias"):
        found[f"visual.ln_pre.{kind}"] = state[f"vision_model.pre_layrnorm.{kind}"]
        found[f"visual.ln_post.{kind}"] = state[f"vision_model.post_layernorm.{kind}"]
        found[f"ln_final.{kind}"] = state[f"text_model.final_layer_norm.{kind}"]
    assert len(found) == 2 * 2 * 12 + 14
    path = folder / "HPS_tiny.pt"
    torch.save({"epoch": 1, "state_dict": found}, path)
    return path


def head(folder: Path, width: int, prefix: str = "layers.") -> tuple[Path, dict[str, Tensor]]:
    """Layers 0, 2, 4, 6, 7 of a head, as where dropout stood between them."""
    sizes = {0: (width, 16), 2: (16, 12), 4: (12, 8), 6: (8, 4), 7: (4, 1)}
    made = torch.Generator().manual_seed(2)
    state: dict[str, Tensor] = {}
    for number, (before, after) in sizes.items():
        state[f"{prefix}{number}.weight"] = torch.randn(after, before, generator=made) / math.sqrt(before)
        state[f"{prefix}{number}.bias"] = torch.randn(after, generator=made)
    path = folder / "head.pth"
    torch.save(state, path)
    return path, state


def bert_tokenizer(folder: Path) -> Path:
    """A word-piece tokenizer of letters."""
    from transformers import BertTokenizer

    folder.mkdir(exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    return folder


def image_reward(folder: Path, vocabulary: int = 64) -> tuple[Path, Any, Any]:
    """A random ImageReward checkpoint under the published names, and the networks whose weights it has."""
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    with torch.random.fork_rng():
        torch.manual_seed(3)
        vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=1, image_size=SIZE,
                patch_size=PATCH, layer_norm_eps=1e-6,
            )
        )  # fmt: skip
        text = BlipTextModel(
            BlipTextConfig(
                vocab_size=vocabulary, hidden_size=WIDTH, encoder_hidden_size=WIDTH, intermediate_size=96,
                num_hidden_layers=2, num_attention_heads=1, max_position_embeddings=40,
            ),
            add_pooling_layer=False,
        )  # fmt: skip
        for parameter in [*vision.parameters(), *text.parameters()]:
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2)
    state = {f"blip.text_encoder.{name}": tensor for name, tensor in text.state_dict().items()}
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    names = {
        "embeddings.class_embedding": "cls_token",
        "embeddings.position_embedding": "pos_embed",
        "embeddings.patch_embedding": "patch_embed.proj",
        "encoder.layers": "blocks",
        "self_attn.qkv": "attn.qkv",
        "self_attn.projection": "attn.proj",
        "layer_norm": "norm",
        "post_layernorm": "norm",
    }
    for name, tensor in vision.state_dict().items():
        for new, old in names.items():
            name = name.replace(new, old)
        state[f"blip.visual_encoder.{name}"] = tensor
    state |= head(folder, WIDTH, "mlp.layers.")[1]
    path = folder / "ImageReward.pt"
    torch.save(state, path)
    return path, vision.eval(), text.eval()
