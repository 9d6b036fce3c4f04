"""Prompt files are read strictly, and a round's prompts are a function of (seed, round)."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mdiff_core import prompts
from mdiff_core.errors import BadSetting
from mdiff_core.types import Prompt


def jsonl(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def some(count: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", text=f"text {i}", metadata={}) for i in range(count)]


def test_reads_jsonl_and_skips_blank_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"input": "a cat", "metadata": {"n": [1, {"deep": null}]}}', "", '{"input": "ein Bär"}')
    first, second = prompts.read(path)
    assert (first.text, first.metadata) == ("a cat", {"n": [1, {"deep": None}]})
    assert (second.text, second.metadata) == ("ein Bär", {})
    assert second.id.startswith("000003-"), "the id holds the line number of the file"


def test_reads_txt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('a cat\r\n\n{"input": "not JSON here"}\n')
    assert [prompt.text for prompt in prompts.read(path)] == ["a cat", '{"input": "not JSON here"}']


def test_equal_texts_stay_different_prompts(tmp_path: Path) -> None:
    first, second = prompts.read(jsonl(tmp_path, '{"input": "a cat"}', '{"input": "a cat"}'))
    assert first.id != second.id


def test_ids_are_stable(tmp_path: Path) -> None:
    assert prompts.read(jsonl(tmp_path, '{"input": "a cat"}'))[0].id == "000001-51e46741"


def test_write_then_read_is_the_identity(tmp_path: Path) -> None:
    line = '{"input": "two\\nlines\\u2028", "metadata": {"a": [true]}}'
    original = prompts.read(jsonl(tmp_path, "", line, '{"input": "x"}'))
    prompts.write(tmp_path / "copy.jsonl", original)
    assert prompts.read(tmp_path / "copy.jsonl") == original


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{input: cat}", "not JSON"),
        ('"a cat"', "not an object"),
        ("{}", "`input` is None"),
        ('{"input": "  "}', "`input` is '  '"),
        ('{"input": 3}', "`input` is 3"),
        ('{"input": "a", "metadata": [1]}', "`metadata` is [1]"),
        ('{"input": "a", "prompt": "b"}', "unknown key 'prompt'"),
        ('{"input": "a", "id": 7}', "`id` is 7"),
        ('{"input": "half a character: \\ud800"}', "cannot be used"),
        ('{"input": "a", "metadata": {"n": %s}}' % ("9" * 5000), "cannot be used"),
        ('{"input": "a", "metadata": %s}' % ("[" * 100_000), "cannot be used"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = jsonl(tmp_path, '{"input": "good"}', line)
    with pytest.raises(BadSetting) as caught:
        prompts.read(path)
    assert f"{path}:2: " in str(caught.value)
    assert says in str(caught.value)


GENEVAL = {"tag": "counting", "include": [{"class": "bench", "count": 2}], "exclude": [{"class": "bench", "count": 3}]}


def test_reads_geneval_metadata_as_flow_grpo_publishes_them(tmp_path: Path) -> None:
    colored = {"tag": "color_attr", "include": [{"class": "cup", "count": 1, "color": "red"}], "prompt": "a red cup"}
    first, second = prompts.read(
        jsonl(tmp_path, json.dumps(GENEVAL | {"prompt": "a photo of two benches"}), json.dumps(colored))
    )
    assert (first.text, first.metadata) == ("a photo of two benches", GENEVAL)
    assert (second.text, second.metadata["include"][0]["color"]) == ("a red cup", "red")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": ""}, "`prompt` is ''"),
        ({"tag": "colour"}, "`tag` is 'colour'; GenEval's are single_object"),
        ({"include": []}, "`include` is []"),
        ({"include": [{"class": "bench"}]}, "`include` is [{'class': 'bench'}]"),
        ({"include": [{"class": "bench", "count": 0}]}, "`include`"),
        ({"include": [{"class": "", "count": 1}]}, "`include`"),
        ({"exclude": ["bench"]}, "`exclude` is ['bench']"),
    ],
)
def test_a_bad_geneval_line_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = jsonl(tmp_path, json.dumps(GENEVAL | {"prompt": "two benches"} | change))
    with pytest.raises(BadSetting) as caught:
        prompts.read(path)
    assert f"{path}:1: " in str(caught.value) and says in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    empty, binary, table = tmp_path / "empty.txt", tmp_path / "binary.txt", tmp_path / "prompts.csv"
    empty.write_text("\n \n")
    binary.write_bytes(b"caf\xe9\n")
    table.write_text("a,b\n")
    twice = jsonl(tmp_path, '{"input": "a", "id": "x"}', '{"input": "b", "id": "x"}')
    cases = {
        tmp_path / "absent.jsonl": "cannot be read",
        tmp_path: "neither",
        empty: "no prompts",
        binary: "not UTF-8",
        table: "neither .jsonl nor .txt",
        twice: "id 'x' twice",
    }
    for path, says in cases.items():
        with pytest.raises(BadSetting) as caught:
            prompts.read(path)
        assert str(path) in str(caught.value)
        assert says in str(caught.value)


def test_rounds_cut_one_endless_stream() -> None:
    """Position is all the state: small rounds, one after another, draw what a big one does."""
    few = some(7)
    together = [prompt.id for _, prompt in prompts.draw(few, per_round=30, round=0, seed=3)]
    apart = [prompt.id for round in range(10) for _, prompt in prompts.draw(few, per_round=3, round=round, seed=3)]
    assert apart == together


def test_every_epoch_holds_every_prompt_once_in_a_new_order() -> None:
    epochs = [[p.id for _, p in prompts.draw(some(20), per_round=20, round=round, seed=0)] for round in range(3)]
    assert all(Counter(epoch) == Counter(epochs[0]) and len(set(epoch)) == 20 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_group_ids_differ_within_a_run() -> None:
    drawn = [group for round in range(5) for group, _ in prompts.draw(some(2), per_round=5, round=round, seed=0)]
    assert len(set(drawn)) == len(drawn) == 25


def test_the_order_depends_on_seed_and_ids_only() -> None:
    few = some(12)
    assert prompts.draw(few, per_round=12, round=0, seed=1) == prompts.draw(few[::-1], per_round=12, round=0, seed=1)
    assert prompts.draw(few, per_round=12, round=0, seed=1) != prompts.draw(few, per_round=12, round=0, seed=2)


def test_nothing_to_draw_from() -> None:
    with pytest.raises(BadSetting, match="none to draw from"):
        prompts.draw([], per_round=1, round=0, seed=0)


def test_written_files_are_plain_jsonl(tmp_path: Path) -> None:
    prompts.write(tmp_path / "out.jsonl", some(2))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["input"] for line in lines] == ["text 0", "text 1"]
