"""Rewards against the plain loop over samples that the libraries' own examples show: the same models, the same pictures.

    python benchmarks/rewards.py [--images 48] [--group 24] [--clip-images 8] [--size large] [--device cpu]
        [--repeats 3] [--pixels 512]

Prints, for OCR and for a CLIP of random weights, images/s each way and how far the scores differ. Batches and the text that a
group shares are the recipes' own; on a GPU give --clip-images 256 --size huge --device cuda.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parents[1]))

from mdiff_core import quotes
from mdiff_core.rewards.clip import ClipOptions, ClipScore
from mdiff_core.rewards.ocr import Ocr, OcrOptions
from mdiff_core.types import Prompt
from mdiff_core.worlds import phrases

SIZES = {
    "base": (768, 12, 12, 32, 512, 8, 512),
    "large": (1024, 24, 16, 14, 768, 12, 768),
    "huge": (1280, 32, 16, 14, 1024, 16, 1024),
}
"""Of a CLIP: vision's width, layers, heads and patch, text's width and heads, and the shared vector."""
TEXT_LAYERS = {"base": 12, "large": 12, "huge": 24}


def pictures(texts: Sequence[str], pixels: int) -> np.ndarray:
    """[N, 1, H, W, 3]: each text in two lines on noise, as far as a policy that learns to write."""
    made, found = np.random.default_rng(0), []
    for text in texts:
        noise = made.integers(140, 240, (pixels // 8, pixels // 8, 3), np.uint8)
        image = Image.fromarray(noise).resize((pixels, pixels), Image.Resampling.BICUBIC)
        pen, font = ImageDraw.Draw(image), ImageFont.load_default(pixels // 8)
        pen.multiline_text(
            (pixels / 2, pixels / 2), text.replace(" ", "\n"), "black", font, anchor="mm", align="center"
        )
        found.append(np.asarray(image))
    return np.stack(found)[:, None]


def compared(name: str, plain: Callable[[], np.ndarray], ours: Callable[[], np.ndarray], repeats: int) -> None:
    """Both ways in turn, `repeats` times; a table of the quickest of each, which other work on the machine disturbed least."""
    ways, scores, best = {"plain loop": plain, "reward": ours}, {}, {}
    for _ in range(repeats):
        for way, call in ways.items():
            started = time.perf_counter()
            scores[way] = call()
            best[way] = min(best.get(way, math.inf), time.perf_counter() - started)
    count = len(scores["reward"])
    for way, took in best.items():
        sys.stdout.write(f"| {name} | {way} | {count} | {took:.2f} | {count / took:.2f} |\n")
    off = np.abs(scores["plain loop"] - scores["reward"]).max()
    rate = best["plain loop"] / best["reward"]
    sys.stdout.write(f"\n{name}: {rate:.2f} times the plain loop's rate, scores differ by {off:.1e} at most\n\n")


def ocr(prompts: Sequence[Prompt], frames: np.ndarray, repeats: int) -> None:
    """RapidOCR as its README calls it, against the reward."""
    from rapidocr import RapidOCR

    engine = RapidOCR(params={"Global.log_level": "error"})

    def plain() -> np.ndarray:
        scores = []
        for frame, prompt in zip(frames[:, 0], prompts, strict=True):
            read = quotes.plain("".join(engine(frame[..., ::-1].copy()).txts or ()))
            wanted = quotes.plain(prompt.metadata["text"])
            scores.append(1 - quotes.distance(wanted, read) / max(len(wanted), len(read)))
        return np.array(scores)

    reward = Ocr(OcrOptions())
    engine(frames[0, 0]), reward(frames[:2], prompts[:2])  # models are read
    compared("ocr", plain, lambda: reward(frames, prompts), repeats)


def clip(prompts: Sequence[Prompt], frames: np.ndarray, repeats: int, *, size: str, device: str, dtype: str) -> None:
    """A transformers CLIP sample by sample, as its documentation calls it, against the reward."""
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    with tempfile.TemporaryDirectory() as folder:
        random_clip(Path(folder), size)
        model = CLIPModel.from_pretrained(folder).to(device=device, dtype=vars(torch)[dtype]).eval()
        tokenizer, processor = AutoTokenizer.from_pretrained(folder), CLIPImageProcessorPil.from_pretrained(folder)
        reward = ClipScore(ClipOptions(model=folder, device=device, dtype=dtype))
        reward(frames[:1], prompts[:1])  # weights are read

    def plain() -> np.ndarray:
        scores = []
        for frame, prompt in zip(frames[:, 0], prompts, strict=True):
            tokens = tokenizer([prompt.text], padding=True, return_tensors="pt").to(device)
            pixels = processor([Image.fromarray(frame)], return_tensors="pt")["pixel_values"]
            with torch.no_grad():
                out = model(**tokens, pixel_values=pixels.to(device=device, dtype=model.dtype))
            scores.append(float(out.image_embeds[0].float() @ out.text_embeds[0].float()))
        return np.array(scores)

    compared(f"clip {size} on {device}", plain, lambda: reward(frames, prompts), repeats)


def random_clip(folder: Path, size: str, device: str = "cpu") -> None:
    """A CLIP of that size with random weights, made on `device`, and the tiny world's tokenizer."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    from mdiff_core.worlds import tiny_text

    width, layers, heads, patch, text_width, text_heads, shared = SIZES[size]
    tokenizer = tiny_text.clip_tokenizer()
    text = {
        "hidden_size": text_width, "intermediate_size": 4 * text_width, "num_hidden_layers": TEXT_LAYERS[size],
        "num_attention_heads": text_heads, "vocab_size": 49408, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "patch_size": patch,
    }  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=shared))
    model.save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)
    tokenizer.model_max_length = 77
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--group", type=int, default=24)
    parser.add_argument("--clip-images", type=int, default=8)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pixels", type=int, default=512)
    args = parser.parse_args()
    lines = phrases.choose("ocr", -(-max(args.images, args.clip_images) // args.group), 0, frozenset())
    prompts = [Prompt(id=text, text=text, metadata=metadata) for text, metadata in lines for _ in range(args.group)]
    frames = pictures([prompt.metadata["text"] for prompt in prompts], args.pixels)
    sys.stdout.write("| reward | way | images | s | images/s |\n|---|---|---|---|---|\n")
    if args.images:
        ocr(prompts[: args.images], frames[: args.images], args.repeats)
    if args.clip_images:
        place = {"size": args.size, "device": args.device, "dtype": args.dtype}
        clip(prompts[: args.clip_images], frames[: args.clip_images], args.repeats, **place)


if __name__ == "__main__":
    main()
