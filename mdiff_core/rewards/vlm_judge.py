"""A vision-language model behind any OpenAI-compatible server, asked to mark each sample."""

import json
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from mdiff_core import calls
from mdiff_core import frames as pictures
from mdiff_core.calls import Server, ServerOptions
from mdiff_core.errors import RewardFailed
from mdiff_core.types import Prompt

QUESTION = (
    "The picture was made for this prompt:\n{prompt}\n\n"
    "Judge how well it shows what the prompt asks for, and nothing that is wrong with it. "
    "Give a whole-picture mark from 0 (not at all) to {best} (perfectly). "
    'Answer with JSON only: {{"reason": "one sentence", "score": a number from 0 to {best}}}'
)


class VlmJudgeOptions(ServerOptions):
    """Which model, and what it is asked."""

    model: str
    """Name that the server knows the model by."""
    question: str = QUESTION
    """What is asked beside the frames; {prompt} and {best} are filled in, and other braces doubled."""
    best: float = Field(default=10.0, gt=0)
    """The highest mark."""
    tokens: int = Field(default=256, ge=16)
    """Longest answer."""
    schema_enforced: bool = True
    """Ask the server to keep to the answer's JSON schema; false for servers that cannot."""

    @field_validator("question")
    @classmethod
    def _can_be_filled_in(cls, question: str) -> str:
        try:
            question.format(prompt="", best=0)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"has braces that are neither {{prompt}} nor {{best}} ({error}); double them") from error
        return question


class VlmJudge:
    """The model's mark / best, in [0, 1]. As steady as the server: it is asked without randomness, but batching may change its mind."""

    Options = VlmJudgeOptions
    groupwise = False

    def __init__(self, options: VlmJudgeOptions) -> None:
        self.options = options

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, H, W, 3] uint8, one request a sample; RewardFailed for anything else, or as the server behaves."""
        pictures.check("vlm_judge", frames, prompts)
        parts = list(zip(pictures.picked(frames, self.options.frames), prompts, strict=True))
        return calls.gathered(self.ask, parts, [1] * len(parts), self.options.parallel)

    def ask(self, part: tuple[np.ndarray, Prompt]) -> list[float]:
        """The mark of one sample."""
        frames, prompt = part
        return [self.mark(self._server.post(self.request(frames, prompt)))]

    def request(self, frames: np.ndarray, prompt: Prompt) -> dict[str, Any]:
        """Body of a chat completion: the question, then every frame [F, H, W, 3]."""
        question = self.options.question.format(prompt=prompt.text, best=f"{self.options.best:g}")
        shown = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{calls.png(frame)}"}} for frame in frames
        ]
        body = {
            "model": self.options.model,
            "messages": [{"role": "user", "content": [{"type": "text", "text": question}, *shown]}],
            "temperature": 0,
            "seed": 0,
            "max_tokens": self.options.tokens,
        }
        if self.options.schema_enforced:
            form = {"name": "mark", "strict": True, "schema": self.schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body

    def schema(self) -> dict[str, Any]:
        """JSON schema of the answer."""
        return {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
            "required": ["reason", "score"],
            "additionalProperties": False,
        }

    def mark(self, answer: Any) -> float:
        """The mark in a chat completion; RewardFailed when it has none."""
        try:
            text = str(answer["choices"][0]["message"]["content"])
            # a model that was not held to the schema likes to talk around the JSON
            score = json.loads(text[text.index("{") : text.rindex("}") + 1])["score"]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RewardFailed(f"vlm_judge: no mark in the answer {str(answer)[:120]!r}") from error
        right = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
        if not right or not 0 <= score <= self.options.best:
            raise RewardFailed(f"vlm_judge: the mark {score!r} is not from 0 to {self.options.best:g}")
        return float(score) / self.options.best

    @cached_property
    def _server(self) -> Server:
        return Server("vlm_judge", self.options, f"{self.options.url.rstrip('/')}/chat/completions")
