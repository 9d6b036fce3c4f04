"""What every reward must keep to, whatever it looks at; a new registry line is tested by this file as it is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CLIPModel

from mdiff_core import registry
from mdiff_core.contracts import Reward
from mdiff_core.errors import BadSetting, RewardFailed
from mdiff_core.options import Choice
from mdiff_core.types import Prompt
from mdiff_core.worlds import shapes
from tests import reward_servers, tiny_rewards

SAMPLES = 6


def shapes_metadata(index: int) -> dict[str, Any]:
    return shapes.metadata(shapes.scene_of(0, index).content)


def text_metadata(index: int) -> dict[str, Any]:
    return {"text": f"word {index}"}


METADATA: dict[str, Callable[[int], dict[str, Any]]] = {
    "shapes": shapes_metadata,
    "ocr": text_metadata,
    "ocr_flow_grpo": text_metadata,
}
"""Reward name to the prompt metadata of sample i; a reward that is not here needs none."""


def clip_model(folder: Path) -> dict[str, Any]:
    return {"model": str(tiny_rewards.clip(folder))}


def pickscore_model(folder: Path) -> dict[str, Any]:
    return {"model": str(tiny_rewards.clip(folder)), "processor": str(folder)}


def hps_model(folder: Path) -> dict[str, Any]:
    model = CLIPModel.from_pretrained(tiny_rewards.clip(folder))
    return {"model": str(folder), "weights": str(tiny_rewards.open_clip(folder, model))}


def aesthetic_model(folder: Path) -> dict[str, Any]:
    return {"model": str(tiny_rewards.clip(folder)), "head": str(tiny_rewards.head(folder, 24)[0])}


def image_reward_model(folder: Path) -> dict[str, Any]:
    tokenizer = tiny_rewards.bert_tokenizer(folder / "bert")
    return {"weights": str(tiny_rewards.image_reward(folder)[0]), "tokenizer": str(tokenizer)}


MODELS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "aesthetic": aesthetic_model,
    "clip": clip_model,
    "hps": hps_model,
    "image_reward": image_reward_model,
    "pickscore": pickscore_model,
}
"""Reward name to a maker of the tiny model it needs, which gives the options that name it."""

SERVERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "http": reward_servers.brightness,
    "vlm_judge": reward_servers.judge,
}
"""Reward name to what its server answers."""

OPTIONS: dict[str, dict[str, Any]] = {
    "python": {"function": "tests.own_rewards:brightness"},
    "vlm_judge": {"model": "some-model"},
}
"""Reward name to other options it cannot do without."""


@pytest.fixture(scope="module", params=sorted(registry.REGISTRY["reward"]))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def options(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    found = dict(OPTIONS.get(name, {}))
    if name in MODELS:
        found |= MODELS[name](tmp_path_factory.mktemp(name))
    if name not in SERVERS:
        yield found
        return
    with reward_servers.serving(reward_servers.Server(SERVERS[name])) as server:
        yield found | {"url": server.url}


@pytest.fixture
def reward(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MDIFF_MODULES", "tests.own_rewards")
    return registry.make("reward", Choice(name=name, options=options))


@pytest.fixture
def prompts(name: str) -> list[Prompt]:
    of = METADATA.get(name, lambda index: {})
    texts = [shapes.caption(shapes.scene_of(0, i).content) for i in range(SAMPLES)]
    return [Prompt(id=f"p{i}", text=text, metadata=of(i)) for i, text in enumerate(texts)]


@pytest.fixture
def frames() -> np.ndarray:
    """[6, 1, 64, 64, 3]: pictures of what was asked for, of something else, of nothing, and noise."""
    right = [shapes.render(shapes.scene_of(0, i)) for i in range(3)]
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    wrong = [shapes.render(shapes.scene_of(0, 9)), np.zeros((64, 64, 3), np.uint8), noise]
    return np.stack(right + wrong)[:, None]


def test_it_keeps_the_protocol(reward: Any) -> None:
    assert isinstance(reward, Reward)


def test_one_finite_number_a_sample(reward: Reward, frames: np.ndarray, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        reward.check(prompt)
    values = reward(frames, prompts)
    assert (values.shape, values.dtype) == ((SAMPLES,), np.float64)
    assert np.isfinite(values).all()


def test_the_same_twice(reward: Reward, frames: np.ndarray, prompts: list[Prompt]) -> None:
    assert np.array_equal(reward(frames, prompts), reward(frames, prompts))


def test_the_order_does_not_matter(reward: Reward, frames: np.ndarray, prompts: list[Prompt]) -> None:
    order = np.random.default_rng(1).permutation(SAMPLES)
    turned = reward(frames[order], [prompts[i] for i in order])
    # models may sum in another order in another batch; what reads pixels only must agree to the last bit
    assert turned == pytest.approx(reward(frames, prompts)[order], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("size", [1, 4])
def test_the_batch_size_does_not_matter(reward: Reward, frames: np.ndarray, prompts: list[Prompt], size: int) -> None:
    cuts = range(0, SAMPLES, size)
    if reward.groupwise:
        pytest.skip("its calls hold whole groups")
    parts = [reward(frames[i : i + size], prompts[i : i + size]) for i in cuts]
    assert np.concatenate(parts) == pytest.approx(reward(frames, prompts), rel=1e-5, abs=1e-6)


def test_it_changes_neither_frames_nor_prompts(reward: Reward, frames: np.ndarray, prompts: list[Prompt]) -> None:
    before = frames.copy(), [dict(prompt.metadata) for prompt in prompts]
    frames.setflags(write=False)
    reward(frames, prompts)
    assert np.array_equal(frames, before[0]) and [dict(prompt.metadata) for prompt in prompts] == before[1]


def test_videos_get_one_number_too(reward: Reward, frames: np.ndarray, prompts: list[Prompt]) -> None:
    values = reward(np.repeat(frames, 3, axis=1), prompts)
    assert values.shape == (SAMPLES,) and np.isfinite(values).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames, prompts: (frames[:0], prompts[:0]),
        lambda frames, prompts: (frames[:, :0], prompts),
        lambda frames, prompts: (frames[:, :, :0], prompts),
        lambda frames, prompts: (frames[:, 0], prompts),
        lambda frames, prompts: (frames[..., :1], prompts),
        lambda frames, prompts: (np.moveaxis(frames, -1, 2), prompts),
        lambda frames, prompts: (frames.astype(np.float32) / 255, prompts),
        lambda frames, prompts: (frames, prompts[:-1]),
    ],
    ids=["no samples", "no frames", "no rows", "no frame axis", "grey", "channels first", "floats", "prompt short"],
)
def test_what_is_not_frames_is_refused(
    reward: Reward, frames: np.ndarray, prompts: list[Prompt], spoil: Callable[..., tuple[np.ndarray, list[Prompt]]]
) -> None:
    with pytest.raises((RewardFailed, BadSetting, ValueError)):
        reward(*spoil(frames, prompts))


def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no_such_option"):
        registry.options("reward", Choice(name=name, options={"no_such_option": 1}))
