"""The worlds that a tiny SD3 is built for, and its text side: tokenizers that know their words, encoders that stay random.

The encoders only have to keep words and their order apart.
"""

import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mdiff_core.worlds import shapes, words

if TYPE_CHECKING:
    from torch import nn
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

TEXT_LENGTH = 16
"""Tokens that each of CLIP and T5 sees; the longest caption of shapes needs 10, of words 15."""
CLIP_WIDTH, T5_WIDTH = 64, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a tiny SD3 is built for."""

    clip_words: tuple[str, ...]
    """Words that are one token each; others fall apart into letters."""
    t5_words: tuple[str, ...]
    """The same for T5."""
    marks: str
    """Punctuation of the captions."""
    pictures: Callable[[int], Iterator[np.ndarray]]
    """The endless series [SIZE, SIZE, 3] uint8 that a seed names."""
    paper: tuple[int, int, int]
    """Colour of the background."""
    ink: float = 0.0
    """How much more an error counts in the VAE's training, per unit (of -1..1) by which the pixel stands out from the paper."""
    of_shapes: bool = False
    """Whether VAE and transformer start from those of shapes instead of from nothing."""


SHAPES = World(
    clip_words=shapes.VOCABULARY,
    t5_words=shapes.VOCABULARY,
    marks="",
    pictures=lambda seed: map(shapes.render, shapes.scenes(seed)),
    paper=shapes.BACKGROUND,
)
WORDS = World(
    clip_words=(),  # CLIP would find them inside drawn words, which have to be told letter by letter
    t5_words=('"', "in", *words.INKS),  # T5's begin with a space
    marks='"',
    pictures=lambda seed: (image for _, image in words.scenes(seed)),
    paper=words.PAPER,
    ink=10.0,  # letters are few and thin: a VAE that starts from nothing, or counts all pixels alike, ends with blank paper
    of_shapes=True,
)
WORLDS = {"shapes": SHAPES, "words": WORDS}


def clip_tokenizer(world: World = SHAPES) -> "CLIPTokenizer":
    """The words and marks of the world, and letters, each as a token inside a word and as one that ends it."""
    from transformers import CLIPTokenizer

    merges = byte_pairs(world.clip_words)
    single = string.ascii_lowercase + world.marks
    pieces = [*single, *(f"{letter}</w>" for letter in single), *map("".join, merges)]
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


def t5_tokenizer(world: World = SHAPES) -> "T5Tokenizer":
    """The words of the world, its marks, and letters."""
    from transformers import T5Tokenizer

    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -10.0)]
    vocab += [(f"▁{word}", -1.0) for word in world.t5_words]
    vocab += [(letter, -10.0) for letter in string.ascii_lowercase + world.marks]
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
