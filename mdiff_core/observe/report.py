"""One HTML page about one run, whole in itself: no scripts, no network. Also the pieces that Flyte Decks show.

`python -m mdiff_core.observe.report check FOLDER --gain 0.10` says whether the run's evaluation reward rose enough.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from mdiff_core.errors import BadArtifact, BadSetting, MdiffError
from mdiff_core.observe import alarm, charts, metrics, page
from mdiff_core.observe.metrics import Record

FILE = "report.html"
START = {"policy": "start policy", "state": "start train state"}
"""What the run began with, as the page calls it."""
SHOWN = 48
"""Samples shown at most; the page stays a few megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Samples to show, in an order that is the same before and after training."""

    frames: np.ndarray
    """[N, H, W, 3] uint8; of a video, its middle frame."""
    captions: Sequence[str]
    rewards: Sequence[float]
    total: int = 0
    """Samples that there are, when fewer are given."""


def sample_grid(frames: np.ndarray, captions: Sequence[str], scores: Sequence[float], total: int = 0) -> str:
    """Deck fragment: captioned images [N, H, W, 3] uint8 with their scores; `total` as in Grid."""
    shown = zip(frames[:SHOWN], captions, scores, strict=False)
    cards = "".join(
        f'<div class="card"><div>{page.picture(frame, caption)}</div><b>{page.cell(float(score))}</b> {escape(caption)}</div>'
        for frame, caption, score in shown
    )
    return page.fragment(f'{_left_out(max(total, len(frames)))}<div class="cards one">{cards}</div>')


def histogram(values: Sequence[float], *, title: str = "") -> str:
    """Deck fragment: distribution of the finite values; says how many were not finite."""
    return page.fragment(charts.histogram(values, title=title))


def curve(series: Mapping[str, Sequence[tuple[float, float]]], *, title: str = "") -> str:
    """Deck fragment: one line per name through its points (x, y)."""
    return page.fragment(charts.lines(series, title=title))


def table(rows: Mapping[str, object]) -> str:
    """Deck fragment: names and values."""
    return page.fragment(page.names_and_values(rows))


def write(folder: Path, *, before: Grid, after: Grid, policy: str = "") -> Path:
    """Write `<folder>/report.html` from the folder's `metrics.jsonl` and `run.json`; returns its path.

    `policy` is the address of what the run trained.

    BadArtifact when those are missing; BadSetting when the grids do not show the same prompts.
    """
    if list(before.captions) != list(after.captions):
        raise BadSetting("report: before and after show different prompts; make both with the same evaluation settings")
    run, records = metrics.read_run(folder), metrics.read(folder)
    rounds = [record for record in records if record["kind"] == "round"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    body = _head(run, rounds, evaluations) + _pairs(before, after) + _curves(rounds, evaluations) + _times(records)
    body += _evaluations(evaluations) + _rounds(rounds) + _lineage(records) + _settings(run, policy)
    path = folder / FILE
    path.write_text(page.document(f"{run['name']} · mdiff", body), encoding="utf-8")
    return path


def _head(run: Record, rounds: Sequence[Record], evaluations: Sequence[Record]) -> str:
    config = run["config"]
    about = f"recipe {config['recipe']} · model {config['model']['path']} · seed {config['seed']}"
    text = f'<h1>{escape(run["name"])}</h1><p class="quiet">{escape(about)}</p>'
    tiles = {"rounds": str(len(rounds)), "seconds in stages": f"{_seconds(list(rounds) + list(evaluations)):.0f}"}
    if evaluations:
        first, last = (float(record[metrics.EVALUATED]) for record in (evaluations[0], evaluations[-1]))
        tiles = {"held-out reward, before → after": f"{first:.3f} → {last:.3f}", "gain": f"{last - first:+.3f}"} | tiles
    if rounds:
        tiles["final policy"] = rounds[-1]["checksum"][:12]
    why = alarm.told(evaluations)
    text += f'<p class="alarm"><b>Alarm.</b> {escape(why)}</p>' if why else ""
    shown = "".join(f"<div><b>{escape(value)}</b><span>{name}</span></div>" for name, value in tiles.items())
    return f'{text}<div class="tiles">{shown}</div>'


def _seconds(records: Sequence[Record]) -> float:
    return sum(float(value) for record in records for key, value in record.items() if key.startswith("seconds/"))


def _left_out(count: int) -> str:
    return f'<p class="quiet">The first {SHOWN} of {count}.</p>' if count > SHOWN else ""


def _pairs(before: Grid, after: Grid) -> str:
    if not len(before.captions):
        return ""
    cards = ""
    for index in range(min(SHOWN, len(before.captions))):
        caption, was, now = before.captions[index], round(before.rewards[index], 2), round(after.rewards[index], 2)
        way = "up" if now > was else "down" if now < was else "quiet"
        cards += (
            f'<div class="card"><div>{page.picture(before.frames[index], f"before: {caption}")}'
            f"{page.picture(after.frames[index], f'after: {caption}')}</div>{escape(caption)}<br>"
            f'<b class="{way}">{was:.2f} → {now:.2f}</b></div>'
        )
    note = '<p class="quiet">Left before training, right after; same prompt, same seed, same sampler.</p>'
    return f'<h2>Before and after</h2>{note}{_left_out(max(before.total, len(before.captions)))}<div class="cards two">{cards}</div>'


def _series(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    return [(record["round"], record[key]) for record in records if key in record]


def _curves(rounds: Sequence[Record], evaluations: Sequence[Record]) -> str:
    reward = {"rollout mean": _series(rounds, metrics.REWARD), "held-out": _series(evaluations, metrics.EVALUATED)}
    drift = _series(rounds, metrics.DRIFT)
    log = all(value > 0 for _, value in drift)
    last = evaluations[-1] if evaluations else {}
    for key in last:
        if key.startswith(metrics.GOLD) and key.endswith("/mean"):
            reward[f"gold {key.split('/')[2]}"] = _series(evaluations, key)
    drawn = [
        ("Reward by round", {name: points for name, points in reward.items() if points}, False),
        ("Largest log-prob drift, engine to trainer", {"drift": drift} if drift else {}, log),
        *(
            (title, {name: points} if (points := _series(rounds, key)) else {}, False)
            for title, name, key in (
                ("Loss", "loss", metrics.LOSS),
                ("Gradient norm before clipping", "norm", metrics.GRAD_NORM),
            )
        ),
    ]
    shown = "".join(charts.lines(series, title=title, log=log) for title, series, log in drawn if series)
    return f'<h2>Curves</h2><div class="charts">{shown}</div>' if shown else ""


def _times(records: Sequence[Record]) -> str:
    """Seconds per round by stage; an evaluation counts with the round it follows."""
    bars: dict[int, dict[str, float]] = {}
    for record in records:
        for stage in metrics.STAGES:
            seconds = record.get(f"seconds/{stage}", 0.0)
            bar = bars.setdefault(record["round"], {})
            bar[stage] = bar.get(stage, 0.0) + seconds
    used = [stage for stage in metrics.STAGES if any(bar.get(stage, 0.0) > 0 for bar in bars.values())]
    chart = charts.stacked([(str(round), bar) for round, bar in sorted(bars.items())], used, title="Seconds by round")
    return f'<h2>Where the time went</h2><div class="charts">{chart}</div>'


def _evaluations(evaluations: Sequence[Record]) -> str:
    """What was measured on held-out prompts: reward, gold and diversity, of every set."""
    last = evaluations[-1] if evaluations else {}
    keys = [
        key for key in last if key.startswith("evaluate/") and key.endswith(("/reward_mean", "/mean", "/diversity"))
    ]
    heads = [key.removeprefix("evaluate/").removesuffix("/mean").replace("reward_mean", "reward") for key in keys]
    rows = [[record["round"], *(record.get(key, float("nan")) for key in keys)] for record in evaluations]
    return f"<h2>Evaluations</h2>{page.columns(['after round', *heads], rows)}" if keys else ""


def _rounds(rounds: Sequence[Record]) -> str:
    keys = {
        "reward": metrics.REWARD,
        "kept groups": metrics.KEPT_GROUPS,
        "groups": metrics.GROUPS,
        "drift": metrics.DRIFT,
        "loss": metrics.LOSS,
        "grad norm": metrics.GRAD_NORM,
    }
    keys = {head: key for head, key in keys.items() if any(key in record for record in rounds)}
    rows = [
        [record["round"], *(record.get(key, float("nan")) for key in keys.values()), round(_seconds([record]), 1)]
        for record in rounds
    ]
    if not rows:
        return ""
    return f"<h2>Rounds</h2>{page.columns(['round', *keys, 'seconds'], rows)}"


def _lineage(records: Sequence[Record]) -> str:
    seen = {record["policy"]: (record["policy"], record["parent"] or "-", record["checksum"]) for record in records}
    heads = ["version", "trained from", "checksum of the weights"]
    return f"<h2>Policies</h2>{page.columns(heads, list(seen.values()))}"


def _settings(run: Record, policy: str) -> str:
    files = {START.get(role, role): where for role, where in run["files"].items()}
    files |= {"trained policy": policy} if policy else {}
    listed = f"<h2>Files</h2>{page.names_and_values(files)}" if files else ""
    command = f"<h2>Run it again</h2><pre>{escape(run['command'])}</pre>"
    settings = f"<details><summary>Settings</summary>{page.names_and_values(dotted(run['config']))}</details>"
    return listed + command + settings


def dotted(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Settings by the name an override would use."""
    flat: dict[str, object] = {}
    for name, value in config.items():
        nested = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": json.dumps(value)}  # type: ignore[arg-type]
    return flat


def check(folder: Path, gain: float) -> str:
    """`demo ok: reward A -> B` and the report's path; BadArtifact when the evaluation reward rose by less than `gain`, or rose
    while a gold reward or diversity fell."""
    found = [float(r[metrics.EVALUATED]) for r in metrics.read(folder) if r["kind"] == "evaluation"]
    if len(found) < 2:
        raise BadArtifact(
            f"{folder}: {len(found)} evaluations in {metrics.FILE}, but a gain needs two; let the run finish"
        )
    first, last = found[0], found[-1]
    if not last - first >= gain:
        raise BadArtifact(
            f"{folder}: held-out reward went {first:.4f} -> {last:.4f}, a gain below {gain}; see {folder / FILE}"
        )
    if why := alarm.told(metrics.read(folder)):
        raise BadArtifact(f"{folder}: alarm, {why}; look at the pictures in {folder / FILE} before trusting the reward")
    if not (folder / FILE).exists():
        raise BadArtifact(f"{folder / FILE}: missing; run the workflow again, its last task writes it")
    return f"demo ok: reward {first:.4f} -> {last:.4f}\nreport: {folder / FILE}\n"


def main(arguments: Sequence[str]) -> int:
    """The command line; exit code 1 with a sentence when the check fails."""
    parser = argparse.ArgumentParser(prog="python -m mdiff_core.observe.report")
    commands = parser.add_subparsers(required=True)
    checker = commands.add_parser("check", help="whether a run's held-out reward rose enough")
    checker.add_argument("folder", type=Path, help="run folder, which holds metrics.jsonl and report.html")
    checker.add_argument("--gain", type=float, required=True, help="least rise from the first to the last evaluation")
    asked = parser.parse_args(arguments)
    try:
        sys.stdout.write(check(asked.folder, asked.gain))
    except MdiffError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
