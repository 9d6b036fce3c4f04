"""Laws of the shapes world: a scene is what its seed, caption and metadata say, and the verifier agrees."""

import json
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from mdiff_core.errors import BadSetting
from mdiff_core.rewards.shapes import Shapes, ShapesOptions
from mdiff_core.types import Prompt
from mdiff_core.worlds import shapes, verify
from mdiff_core.worlds.shapes import Content, Item, Phrase, Scene

SHIPPED = Path(__file__).parents[2] / "assets" / "shapes_prompts"
SCENES = [shapes.scene_of(0, index) for index in range(300)]
IMAGES = np.stack([shapes.render(scene) for scene in SCENES])
METADATA = [shapes.metadata(scene.content) for scene in SCENES]


def every_content() -> list[Content]:
    kinds = list(product(shapes.COLOURS, shapes.SHAPES))
    numbers = range(1, len(shapes.COUNTS) + 1)
    phrases = {(n, kind): Phrase(count=n, colour=kind[0], shape=kind[1]) for n in numbers for kind in kinds}
    made = [Content(phrases=(phrase,), relation="") for phrase in phrases.values()]
    for first, second in permutations(kinds, 2):
        counts = [(n, m) for n in numbers for m in numbers if n + m <= shapes.MOST_OBJECTS]
        made += [Content(phrases=(phrases[n, first], phrases[m, second]), relation="") for n, m in counts]
        ends = (phrases[1, first], phrases[1, second])
        made += [Content(phrases=ends, relation=relation) for relation in shapes.RELATIONS]
    return made


def find(count: int, *, relation: str = "") -> Scene:
    """A scene of so many objects."""
    return next(s for s in SCENES if len(s.items) == count and s.content.relation == relation)


def scored(scene: Scene, *items: Item) -> float:
    """What `items` are worth when the scene's content was asked for."""
    image = shapes.render(replace(scene, items=items))
    return float(verify.score(image[None], [shapes.metadata(scene.content)])[0])


def other(item: Item, *, colour: bool = False, shape: bool = False) -> Item:
    """An object of a kind that no two-phrase scene of the item's own kind need hold: next colour, next shape."""
    colours, forms = list(shapes.COLOURS), list(shapes.SHAPES)
    return replace(
        item,
        colour=colours[(colours.index(item.colour) + colour) % len(colours)],
        shape=forms[(forms.index(item.shape) + shape) % len(forms)],
    )


def test_a_rendered_scene_scores_one() -> None:
    assert (verify.score(IMAGES, METADATA) == 1.0).all()
    assert verify.exact(IMAGES, METADATA).all()


def test_a_scene_depends_on_its_seed_and_index_alone() -> None:
    again = [shapes.scene_of(0, index) for index in reversed(range(300))][::-1]
    assert again == SCENES
    assert shapes.scene_of(1, 0) != SCENES[0] != SCENES[1]


def test_another_layout_of_the_same_content_scores_one() -> None:
    rng = np.random.default_rng(5)
    images = np.stack([shapes.render(shapes.lay_out(scene.content, rng)) for scene in SCENES[:100]])
    assert (verify.score(images, METADATA[:100]) == 1.0).all()


def test_objects_lie_inside_and_apart() -> None:
    for scene in SCENES:
        covered = [shapes.coverage(item) for item in scene.items]
        for item, share in zip(scene.items, covered, strict=True):
            assert share.sum() == pytest.approx(shapes.SHAPES[item.shape] * item.radius**2, rel=0.04)  # nothing cut off
        grown = [ndimage.binary_dilation(share > 0) for share in covered]
        assert np.sum(grown, axis=0).max() == 1


def test_a_shape_covers_the_area_it_says() -> None:
    for shape, unit in shapes.SHAPES.items():
        item = Item(colour="red", shape=shape, x=31.7, y=33.1, radius=12)
        assert shapes.coverage(item).sum() == pytest.approx(unit * 144, rel=0.01)


def test_no_two_contents_share_a_caption_and_all_words_are_known() -> None:
    contents = every_content()
    captions = {shapes.caption(content) for content in contents}
    assert len(captions) == len(set(contents)) == len(contents) == 3000
    assert {word for caption in captions for word in caption.split()} == set(shapes.VOCABULARY)


def test_metadata_survive_json() -> None:
    for content in every_content():
        assert shapes.content_of(json.loads(json.dumps(shapes.metadata(content)))) == content


def test_every_drawn_content_is_one_of_them() -> None:
    assert {scene.content for scene in SCENES} <= set(every_content())


def test_captions_that_ask_for_the_same_picture_have_one_meaning() -> None:
    a, b = (Phrase(count=1, colour=colour, shape="circle") for colour in ("red", "blue"))
    same = {"left of": "right of", "above": "below", "": ""}
    for relation, turned in same.items():
        one, two = Content(phrases=(a, b), relation=relation), Content(phrases=(b, a), relation=turned)
        assert shapes.meaning(one) == shapes.meaning(two)
    assert len({shapes.meaning(content) for content in every_content()}) == 60 + (2100 + 840) // 2


def test_contents_differ_in_meaning_and_leave_out_what_they_must() -> None:
    first = shapes.contents(200, 3)
    held = frozenset(map(shapes.meaning, first))
    assert len(held) == 200
    assert shapes.contents(200, 3) == first
    assert held.isdisjoint(map(shapes.meaning, shapes.contents(500, 4, without=held)))
    with pytest.raises(BadSetting, match="exclude less"):
        shapes.contents(1531, 0)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_credit_grows_with_every_object_found(count: int) -> None:
    scene = find(count)
    values = [scored(scene, *scene.items[:found]) for found in range(count + 1)]
    assert values[0] == 0 and values[-1] == 1
    assert all(low < high for low, high in pairwise(values))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_wrong_objects_cost_by_how_wrong_they_are(count: int) -> None:
    scene = find(count)
    head, rest = scene.items[0], scene.items[1:]
    shape, colour, both = (
        scored(scene, other(head, **change), *rest)
        for change in ({"shape": True}, {"colour": True}, {"shape": True, "colour": True})
    )
    assert 1 > shape >= both and 1 > colour >= both
    if count == 1:
        assert shape > colour > both == 0


def test_extra_objects_cost() -> None:
    scene = find(1)
    spots = [(x, y) for y in (9, 24, 39, 54) for x in (9, 24, 39, 54)]
    kinds = list(product(shapes.COLOURS, shapes.SHAPES))
    everything = [Item(colour=c, shape=s, x=x, y=y, radius=5) for (c, s), (x, y) in zip(kinds, spots, strict=False)]
    asked = (scene.content.phrases[0].colour, scene.content.phrases[0].shape)
    ordered = sorted(everything, key=lambda item: (item.colour, item.shape) != asked)
    values = [scored(scene, *ordered[:n]) for n in range(1, len(ordered) + 1)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1 and values[-1] < 0.02


@pytest.mark.parametrize("relation", shapes.RELATIONS)
def test_the_relation_counts(relation: str) -> None:
    scene = find(2, relation=relation)
    first, second = scene.items
    swapped = (replace(first, x=second.x, y=second.y), replace(second, x=first.x, y=first.y))
    assert scored(scene, first, second) == 1
    assert scored(scene, *swapped) == 0.25
    x, y = shapes.RELATIONS[relation]
    turned = [
        scored(
            scene,
            replace(first, x=32 - 16 * (x * c - y * s), y=32 - 16 * (y * c + x * s), radius=6),
            replace(second, x=32 + 16 * (x * c - y * s), y=32 + 16 * (y * c + x * s), radius=6),
        )
        for c, s in ((np.cos(angle), np.sin(angle)) for angle in np.radians([0, 40, 50, 70, 95]))
    ]
    assert turned[:2] == [1, 1] and turned[1] > turned[2] > turned[3] > turned[4] == 0.25


def test_pictures_of_nothing_score_nothing() -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (100, 64, 64, 3), np.uint8)
    smooth = ndimage.gaussian_filter(rng.normal(0, 1, (100, 64, 64, 3)), (0, 3, 3, 0)) * 600 + 100
    flat = [np.broadcast_to(np.uint8(c), (100, 64, 64, 3)) for c in (shapes.BACKGROUND, 0, 128, 255)]
    floods = [np.broadcast_to(np.uint8(c), (100, 64, 64, 3)) for c in shapes.COLOURS.values()]
    for images in (noise, np.clip(smooth, 0, 255).astype(np.uint8), *flat, *floods):
        assert verify.score(np.ascontiguousarray(images), METADATA[:100]).max() < 0.05


def test_blur_and_grain_as_of_a_vae_are_forgiven() -> None:
    blurred = ndimage.gaussian_filter(IMAGES.astype(np.float32), (0, 0.9, 0.9, 0))
    grainy = IMAGES + np.random.default_rng(0).normal(0, 10, IMAGES.shape)
    for images in (blurred, grainy):
        assert verify.exact(np.clip(images, 0, 255).astype(np.uint8), METADATA).mean() > 0.98


def test_another_prompts_picture_scores_little() -> None:
    assert verify.score(IMAGES[:150], METADATA[150:]).mean() < 0.1


def test_an_image_is_scored_for_itself() -> None:
    one_by_one = [verify.score(IMAGES[i : i + 1], METADATA[i + 1 : i + 2])[0] for i in range(50)]
    assert np.array_equal(one_by_one, verify.score(IMAGES[:50], METADATA[1:51]))


@pytest.mark.parametrize("images", [IMAGES[0], IMAGES[:, :32], IMAGES.astype(np.float32)])
def test_other_images_are_refused(images: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        verify.look(images)


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"phrases": 3, "relation": ""},
        {"phrases": [], "relation": ""},
        {"phrases": [{"count": 1, "colour": "pink", "shape": "circle"}], "relation": ""},
        {"phrases": [{"count": 9, "colour": "red", "shape": "circle"}], "relation": ""},
        {"phrases": [{"count": 1, "colour": "red", "shape": "circle"}] * 2, "relation": ""},
        {"phrases": [{"count": 1, "colour": "red", "shape": "circle"}], "relation": "above"},
    ],
)
def test_metadata_of_another_world_are_refused(meta: dict[str, object]) -> None:
    prompt = Prompt(id="a", text="", metadata=meta)
    with pytest.raises(BadSetting, match="metadata"):
        Shapes(ShapesOptions()).check(prompt)


def test_the_reward_is_the_score_or_exactness() -> None:
    prompts = [Prompt(id=str(i), text="", metadata=meta) for i, meta in enumerate(METADATA[1:41])]
    frames = IMAGES[:40, None]
    assert np.array_equal(Shapes(ShapesOptions())(frames, prompts), verify.score(IMAGES[:40], METADATA[1:41]))
    assert set(Shapes(ShapesOptions(exact=True))(frames, prompts)) <= {0.0, 1.0}


def test_prompts_on_the_command_line(tmp_path: Path) -> None:
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    shapes.main(["prompts", "--count", "30", "--seed", "1", "--out", str(held)])
    shapes.main(["prompts", "--count", "900", "--seed", "2", "--out", str(train), "--exclude", str(held)])
    assert shapes.meanings_in(held).isdisjoint(shapes.meanings_in(train))
    line = json.loads(held.read_text().splitlines()[0])
    assert line["input"] == shapes.caption(shapes.content_of(line["metadata"]))


def test_the_shipped_prompts_ask_for_what_can_be_drawn_and_hold_some_out() -> None:
    train, held = (SHIPPED / name for name in ("train.jsonl", "held_out.jsonl"))
    assert shapes.meanings_in(held).isdisjoint(shapes.meanings_in(train))
    for file, count in ((train, 320), (held, 96)):
        assert len(shapes.meanings_in(file)) == len(file.read_text().splitlines()) == count


def test_images_on_the_command_line(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    shapes.write_prompts(held, [SCENES[0].content])
    shapes.main(["images", "--count", "20", "--seed", "0", "--out", str(tmp_path / "set"), "--exclude", str(held)])
    lines = [json.loads(line) for line in (tmp_path / "set" / "captions.jsonl").read_text().splitlines()]
    images = np.stack([np.asarray(Image.open(tmp_path / "set" / line["image"])) for line in lines])
    assert np.array_equal(images[0], IMAGES[1])
    assert verify.exact(images, [line["metadata"] for line in lines]).all()


def test_a_share_of_the_captions_is_wrong_and_the_pictures_stay(tmp_path: Path) -> None:
    """Captions that must not appear do not appear as wrong ones either."""
    held = tmp_path / "held.jsonl"
    shapes.write_prompts(held, [scene.content for scene in SCENES[:20]])
    common = ["images", "--count", "60", "--seed", "0", "--exclude", str(held), "--out"]
    shapes.main([*common, str(tmp_path / "right")])
    shapes.main([*common, str(tmp_path / "wrong"), "--mislabelled", "0.5"])
    right, wrong = (
        [json.loads(line)["input"] for line in (tmp_path / name / "captions.jsonl").read_text().splitlines()]
        for name in ("right", "wrong")
    )
    assert 18 <= sum(a != b for a, b in zip(right, wrong, strict=True)) <= 42  # half of 60, give or take 3 deviations
    assert shapes.meanings_in(held).isdisjoint(shapes.meanings_in(tmp_path / "wrong" / "captions.jsonl"))
    for name in ("00000.png", "00059.png"):
        assert (tmp_path / "right" / name).read_bytes() == (tmp_path / "wrong" / name).read_bytes()
    with pytest.raises(SystemExit):
        shapes.main([*common, str(tmp_path / "x"), "--mislabelled", "1.5"])
