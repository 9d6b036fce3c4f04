"""Metrics survive kills and NaN; the report is one file that shows what the run did."""

import base64
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.observe import charts, metrics, page, report
from mdiff_core.observe.metrics import Metrics, evaluation_record, round_record
from tasks import telling

SECONDS = {"rollout": 20.0, "score": 1.5, "pair": 0.5, "update": 30.0}


def a_round(number: int, reward: float = 0.5, **update: float) -> metrics.Record:
    score = {"reward_mean": reward, "kept_groups": 6, "groups": 8, "dropped": {"no_spread": 2}}
    trained = {"loss": 1e-3, "grad_norm": 0.4, "drift_max": 3e-7} | update
    stages = {"score": score, "update": trained}
    version = {"policy": f"v{number}", "parent": f"v{number - 1}", "checksum": f"{number:064d}"}
    return round_record(round=number, stages=stages, seconds=SECONDS, **version)


def an_evaluation(number: int, reward: float) -> metrics.Record:
    version = {"policy": f"v{number}", "parent": "", "checksum": f"{number:064d}"}
    return evaluation_record(round=number, metrics={"reward_mean": reward}, seconds=4.0, **version)


def a_run(folder: Path, before: float = 0.5, after: float = 0.7) -> Path:
    config = {
        "recipe": "shapes_flow_grpo",
        "seed": 3,
        "model": {"path": "assets/<m>"},
        "train": {"lr": 1e-4, "betas": [0.9, 0.999]},
    }
    metrics.write_run(folder, name="a <run>", config=config, command="pyflyte run", files={"policy": "runs/policy/1"})
    with Metrics(folder, environment={}) as sink:
        sink.write(an_evaluation(0, before))
        for number in (1, 2, 3):
            sink.write(a_round(number, reward=before + 0.05 * number))
        sink.write(an_evaluation(3, after))
    return folder


def a_grid(count: int = 3, size: int = 16, seed: int = 0) -> report.Grid:
    frames = np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return report.Grid(
        frames=frames, captions=[f"caption <{i}>" for i in range(count)], rewards=[0.25 * i for i in range(count)]
    )


class TestRecords:
    def test_every_number_of_a_stage_is_under_its_stage(self):
        record = a_round(2)
        assert record["score/dropped/no_spread"] == 2
        assert record["seconds/update"] == 30.0
        headline = {metrics.REWARD, metrics.KEPT_GROUPS, metrics.GROUPS, metrics.LOSS, metrics.GRAD_NORM, metrics.DRIFT}
        assert headline <= set(record)

    def test_one_line_says_what_a_person_wants_to_know(self):
        line = metrics.one_line(a_round(2, reward=0.625))
        for word in ("round 2", "0.6250", "6/8 groups", "3.0e-07", "1.000e-03", "0.4", "rollout 20.0s", "update 30.0s"):
            assert word in line
        assert "\n" not in line

    def test_one_line_says_which_stages_were_reused(self):
        line = metrics.one_line(a_round(2) | {"reused": ["rollout", "score"]})
        assert "rollout reused score reused pair 0.5s update 30.0s" in line

    def test_one_line_of_supervised_training_speaks_of_no_reward(self):
        record = a_round(1)
        supervised = {key: value for key, value in record.items() if not key.startswith("score/")}
        assert "reward" not in metrics.one_line(supervised)

    def test_one_line_of_an_evaluation(self):
        assert metrics.one_line(an_evaluation(3, 0.75)) == "evaluation after round 3: reward 0.7500  policy v3"


class TestJsonLines:
    def test_what_is_written_is_read_in_the_order_of_rounds(self, tmp_path):
        a_run(tmp_path)
        found = [(record["kind"], record["round"]) for record in metrics.read(tmp_path)]
        assert found == [("evaluation", 0), ("round", 1), ("round", 2), ("round", 3), ("evaluation", 3)]

    def test_a_round_appended_again_replaces_the_first(self, tmp_path):
        a_run(tmp_path)
        with Metrics(tmp_path, environment={}) as sink:
            sink.write(a_round(2, reward=0.9))
        assert [record[metrics.REWARD] for record in metrics.read(tmp_path) if record["kind"] == "round"][1] == 0.9
        assert len(metrics.read(tmp_path)) == 5

    def test_a_record_can_be_read_before_the_sink_is_closed(self, tmp_path):
        sink = Metrics(tmp_path, environment={})
        sink.write(a_round(1))
        assert len(metrics.read(tmp_path)) == 1
        sink.close()

    @pytest.mark.parametrize("cut", [1, 40])
    def test_a_line_torn_by_a_kill_is_ignored_and_then_replaced(self, tmp_path, cut):
        a_run(tmp_path)
        file = tmp_path / metrics.FILE
        file.write_bytes(file.read_bytes()[:-cut])
        assert len(metrics.read(tmp_path)) == 4
        with Metrics(tmp_path, environment={}) as sink:
            sink.write(an_evaluation(3, 0.8))
        assert [record["round"] for record in metrics.read(tmp_path)] == [0, 1, 2, 3, 3]
        assert all(json.loads(line) for line in file.read_text().splitlines())

    def test_numbers_that_are_not_finite_stay_json_and_come_back_as_nan(self, tmp_path):
        with Metrics(tmp_path, environment={}) as sink:
            sink.write(a_round(1, loss=math.nan, grad_norm=math.inf))
        assert "NaN" not in (tmp_path / metrics.FILE).read_text()
        (record,) = metrics.read(tmp_path)
        assert math.isnan(record[metrics.LOSS]) and math.isnan(record[metrics.GRAD_NORM])

    def test_array_scalars_are_numbers(self, tmp_path):
        with Metrics(tmp_path, environment={}) as sink:
            sink.write({"kind": "round", "round": 1, "update/loss": np.float32(0.5), "score/groups": np.int64(3)})
        assert metrics.read(tmp_path)[0]["update/loss"] == 0.5

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path):
        with pytest.raises(BadArtifact, match=r"metrics\.jsonl"):
            metrics.read(tmp_path)
        with pytest.raises(BadArtifact, match=r"run\.json"):
            metrics.read_run(tmp_path)
        for odd in ("{}", "[]", "null", '{"name": "a", "config": 1, "command": "", "files": {}}'):
            (tmp_path / metrics.RUN_FILE).write_text(odd)
            with pytest.raises(BadArtifact, match=r"run\.json: not a run's description .* delete the file"):
                metrics.read_run(tmp_path)

    def test_a_broken_line_is_named(self, tmp_path):
        a_run(tmp_path)
        file = tmp_path / metrics.FILE
        lines = file.read_text().splitlines()
        file.write_text("\n".join([lines[0], "{oops", *lines[1:]]) + "\n")
        with pytest.raises(BadArtifact, match=r"metrics\.jsonl:2"):
            metrics.read(tmp_path)


class TestOtherSinks:
    def test_tensorboard_is_told_every_number_at_its_round(self, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folder = tmp_path / "run"
        with Metrics(folder, environment={"MDIFF_TENSORBOARD": str(tmp_path / "events")}) as sink:
            sink.write(a_round(1, loss=math.nan))
            sink.write(a_round(2, reward=0.75))
        events = EventAccumulator(str(tmp_path / "events" / "run")).Reload()
        assert [(event.step, event.value) for event in events.Scalars(metrics.REWARD)] == [(1, 0.5), (2, 0.75)]
        assert [event.step for event in events.Scalars(metrics.LOSS)] == [2]

    def test_wandb_gets_the_run_offline(self, tmp_path, monkeypatch):
        import wandb

        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        metrics.write_run(tmp_path / "folder", name="run-7", config={}, command="", files={})
        with Metrics(tmp_path / "folder", environment={"WANDB_PROJECT": "mdiff", "WANDB_MODE": "offline"}) as sink:
            sink.write(a_round(1))
        wandb.teardown()  # its service would outlive the test
        (file,) = tmp_path.glob("wandb/offline-run-*/run-run-7.wandb")
        assert metrics.REWARD.encode() in file.read_bytes()

    def test_nothing_else_is_opened_unless_configured(self, tmp_path):
        with Metrics(tmp_path / "run", environment={"WANDB_PROJECT": "mdiff", "WANDB_MODE": "disabled"}) as sink:
            sink.write(a_round(1))
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [metrics.FILE]


class TestCharts:
    finite = some.floats(-1e9, 1e9)

    @given(low=finite, width=some.floats(1e-3, 1e9))
    def test_ticks_are_round_values_inside_the_range(self, low, width):
        axis = charts.Axis(low=low, high=low + width, start=0, end=100)
        ticks = axis.ticks()
        assert 2 <= len(ticks) <= 6
        # Up to the rounding error of numbers as large as the range's ends.
        slack = 1e-9 * (abs(low) + width)
        assert all(low - slack <= tick <= low + width + slack for tick in ticks)

    def test_a_logarithmic_axis_has_decades_at_equal_distances(self):
        axis = charts.Axis(low=1e-8, high=1e-4, start=200, end=0, log=True)
        assert [round(axis(tick)) for tick in axis.ticks()] == [200, 150, 100, 50, 0]

    @given(some.lists(some.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=50))
    def test_a_histogram_counts_every_finite_value_once(self, values):
        text = charts.histogram(values, title="rewards")
        counts = [int(count) for count in re.findall(r": (\d+)</title>", text)]
        missing = sum(not math.isfinite(value) for value in values)
        assert sum(counts) == len(values) - missing
        assert (f"({missing} not finite)" in text) == (missing > 0)

    def test_points_without_a_value_are_left_out(self):
        text = charts.lines({"reward": [(1, 0.5), (2, math.nan), (3, 0.7)]})
        assert text.count("<circle") == 2

    def test_nothing_to_draw_is_said(self):
        for text in (charts.lines({"a": []}), charts.histogram([]), charts.stacked([], ["rollout"])):
            assert "no values" in text

    def test_a_column_is_as_high_as_its_parts_together(self):
        text = charts.stacked([("1", SECONDS), ("2", {"update": 52.0})], list(SECONDS))
        heights = [float(height) for height in re.findall(r'height="([\d.]+)" fill', text)]
        assert sum(heights[:4]) == pytest.approx(sum(heights[4:]), abs=0.3)  # pixels are written with one decimal


class Elements(HTMLParser):
    """What a page is made of; fails on tags that do not match."""

    void = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def pictures(self) -> list[np.ndarray]:
        sources = [attributes["src"] or "" for tag, attributes in self.seen if tag == "img"]
        return [np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))) for source in sources]


class TestReport:
    def test_the_page_needs_nothing_from_outside(self, tmp_path):
        path = report.write(a_run(tmp_path), before=a_grid(seed=1), after=a_grid(seed=2))
        assert path == tmp_path / "report.html"
        text = path.read_text()
        elements = Elements(text)
        assert not {tag for tag, _ in elements.seen} & {"script", "link", "iframe", "object", "embed"}
        assert not re.search(r"https?://|url\(|@import", text)
        sources = [attributes.get("src") or "data:" for _, attributes in elements.seen]
        assert all(source.startswith("data:") for source in sources)

    def test_small_samples_are_shown_exactly_before_beside_after(self, tmp_path):
        before, after = a_grid(seed=1), a_grid(seed=2)
        pictures = Elements(report.write(a_run(tmp_path), before=before, after=after).read_text()).pictures()
        np.testing.assert_array_equal(np.stack(pictures[::2]), before.frames)
        np.testing.assert_array_equal(np.stack(pictures[1::2]), after.frames)

    def test_it_says_what_happened(self, tmp_path):
        text = report.write(a_run(tmp_path), before=a_grid(), after=a_grid()).read_text()
        said = (
            "0.500 → 0.700",
            "+0.200",
            "a &lt;run&gt;",
            "caption &lt;1&gt;",
            "train.lr",
            "[0.9, 0.999]",
            f"{3:064d}",
            "runs/policy/1",
        )
        for words in said:
            assert words in text

    def test_supervised_training_without_rewards_has_a_report(self, tmp_path):
        metrics.write_run(
            tmp_path, name="sft", config={"recipe": "s", "seed": 0, "model": {"path": "m"}}, command="c", files={}
        )
        version = {"policy": "v1", "parent": "v0", "checksum": "0" * 64}
        record = round_record(
            round=1, stages={"update": {"loss": 0.5, "grad_norm": 1.0}}, seconds={"update": 3.0}, **version
        )
        with Metrics(tmp_path, environment={}) as sink:
            sink.write(record)
        empty = a_grid(count=0)
        text = report.write(tmp_path, before=empty, after=empty).read_text()
        assert "Loss" in text and "Before and after" not in text and "kept groups" not in text

    def test_grids_of_different_prompts_are_refused(self, tmp_path):
        with pytest.raises(BadSetting, match="different prompts"):
            report.write(a_run(tmp_path), before=a_grid(2), after=a_grid(3))

    def test_large_samples_are_scaled_down(self):
        element = Elements(page.picture(np.zeros((512, 1024, 3), np.uint8), "x"))
        assert element.pictures()[0].shape == (128, 256, 3)

    def test_deck_pieces_are_whole_and_escape_what_they_are_given(self):
        grid = a_grid(count=report.SHOWN + 1)
        pieces = [
            report.sample_grid(grid.frames, grid.captions, grid.rewards),
            report.histogram([0.0, 1.0], title="<b>"),
            report.curve({"<i>": [(0, 1)], "b": [(1, 2)]}, title="t"),
            report.table({"<k>": "<v>", "n": 0.123456}),
        ]
        for piece in pieces:
            assert Elements(piece).seen[0][0] == "style"
        assert f"first {report.SHOWN} of {report.SHOWN + 1}" in pieces[0]
        assert (
            "<b></" not in pieces[1] and "<i>:" not in pieces[2] and "&lt;v&gt;" in pieces[3] and "0.1235" in pieces[3]
        )


class TestCheck:
    def test_a_gain_is_said_in_one_line_with_the_report(self, tmp_path, capsys):
        report.write(a_run(tmp_path, 0.5, 0.65), before=a_grid(), after=a_grid())
        assert report.main(["check", str(tmp_path), "--gain", "0.10"]) == 0
        assert capsys.readouterr().out == f"demo ok: reward 0.5000 -> 0.6500\nreport: {tmp_path}/report.html\n"

    @pytest.mark.parametrize("after", [0.55, 0.4, math.nan])
    def test_too_small_a_gain_fails_with_both_rewards(self, tmp_path, capsys, after):
        report.write(a_run(tmp_path, 0.5, after), before=a_grid(), after=a_grid())
        assert report.main(["check", str(tmp_path), "--gain", "0.10"]) == 1
        said = capsys.readouterr()
        assert "0.5000" in said.err and "below 0.1" in said.err and "demo ok" not in said.out

    def test_a_run_that_did_not_finish_fails(self, tmp_path, capsys):
        with Metrics(tmp_path, environment={}) as sink:
            sink.write(an_evaluation(0, 0.5))
        assert report.main(["check", str(tmp_path), "--gain", "0.10"]) == 1
        assert "needs two" in capsys.readouterr().err


class TestAlarm:
    def alarmed(self, folder: Path) -> Path:
        a_run(folder)
        with Metrics(folder, environment={}) as sink:
            why = "the reward rose 0.5 -> 0.7 while gold 'clip' fell 0.3 -> 0.1"
            gold = {"evaluate/gold/clip/mean": 0.1, "evaluate/diversity": 0.2, "evaluate/alarm": 1.0}
            sink.write(an_evaluation(3, 0.7) | gold | {metrics.ALARM: why})
        return folder

    def test_the_gate_fails_with_the_reason_though_the_reward_rose(self, tmp_path, capsys):
        report.write(self.alarmed(tmp_path), before=a_grid(), after=a_grid())
        assert report.main(["check", str(tmp_path), "--gain", "0.1"]) == 1
        assert "alarm, the reward rose 0.5 -> 0.7 while gold 'clip' fell" in capsys.readouterr().err

    def test_the_report_and_the_line_say_it(self, tmp_path):
        text = report.write(self.alarmed(tmp_path), before=a_grid(), after=a_grid()).read_text()
        assert "<b>Alarm.</b> the reward rose 0.5" in text and "gold/clip" in text and "gold clip" in text
        assert "ALARM: the reward rose" in metrics.one_line(metrics.read(tmp_path)[-1])
        quiet = report.write(a_run(tmp_path / "quiet"), before=a_grid(), after=a_grid()).read_text()
        assert "Alarm" not in quiet


def test_a_report_of_evaluations_alone_shows_only_charts_with_data(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / metrics.FILE).write_text("")
    with Metrics(tmp_path, environment={}) as sink:
        sink.write(an_evaluation(0, 0.4))
        sink.write(an_evaluation(1, 0.5))
    text = report.write(tmp_path, before=a_grid(), after=a_grid()).read_text()
    assert "Reward by round" in text and "no values" not in text
    assert not [title for title in ("Loss", "Gradient norm", "log-prob drift", "<h2>Rounds</h2>") if title in text]


def test_a_grid_that_was_cut_says_of_how_many(tmp_path: Path) -> None:
    grid = replace(a_grid(report.SHOWN), total=384)
    text = report.write(a_run(tmp_path), before=grid, after=grid).read_text()
    assert f"The first {report.SHOWN} of 384." in text
    assert f"The first {report.SHOWN} of 384." in report.sample_grid(
        grid.frames, grid.captions, grid.rewards, grid.total
    )
    assert "The first" not in report.write(tmp_path, before=a_grid(), after=a_grid()).read_text()


def test_an_evaluation_belongs_to_the_round_that_made_its_policy() -> None:
    """Whatever another run of the same settings has told meanwhile."""
    told = [{"kind": "round", "round": 1, "policy": "00001-a"}, {"kind": "round", "round": 2, "policy": "00002-b"}]
    assert [telling.rounds_of(policy, told) for policy in ("00000-x", "00001-a", "00002-b")] == [0, 1, 2]
