"""Finished or not there: artifacts made side by side, left by the dead, and damaged afterwards."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mdiff_core import artifacts, workspaces
from mdiff_core.artifacts import MANIFEST, find, produce, production, read_manifest
from mdiff_core.errors import BadArtifact, Damaged

ROOT = Path(__file__).parents[2]

MAKER = """
import sys
from mdiff_core.artifacts import produce, production
made = production(sys.argv[1], "update", "1", "{}", {}, ("policy", "state"))
def run(_, folders):
    print("started", flush=True)
    sys.stdin.readline()
    for role, folder in folders.items():
        (folder / "who").write_text(sys.argv[2])
    return {}
print(sorted(produce(made, run, {}).values()), flush=True)
"""
"""A stage of two outputs that begins, waits to be told to go on, and says who it is."""


class Maker:
    """Such a stage in a process of its own, begun."""

    def __init__(self, store: Path, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAKER, str(store), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout and self.process.stdout.readline() == "started\n"

    def finish(self) -> None:
        """Let it end, which it must do well."""
        self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0

    def kill(self) -> None:
        """So that nothing cleans up."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def made_in(store: Path) -> artifacts.Production:
    return production(str(store), "update", "1", "{}", {}, ("policy", "state"))


def said(store: Path) -> set[str]:
    return {(Path(uri) / "who").read_text() for uri in made_in(store).uris.values()}


def test_two_processes_that_make_the_same_both_succeed_and_one_result_stays(tmp_path: Path) -> None:
    """Whole: not the policy of one and the train state of the other."""
    one, other = Maker(tmp_path, "one"), Maker(tmp_path, "other")
    assert len(list(tmp_path.glob("*/*.partial"))) == 4
    other.finish()
    assert made_in(tmp_path).done and said(tmp_path) == {"other"}
    one.finish()
    assert made_in(tmp_path).done and said(tmp_path) == {"other"}
    assert not list(tmp_path.glob("*/*.partial"))


def test_what_the_dead_left_is_cleared_and_what_the_living_fill_is_not(tmp_path: Path) -> None:
    living, dead = Maker(tmp_path, "living"), Maker(tmp_path, "dead")
    dead.kill()
    assert len(list(tmp_path.glob("*/*.partial"))) == 4  # stays to be looked at
    last = Maker(tmp_path, "last")
    assert len(list(tmp_path.glob("*/*.partial"))) == 4
    living.finish()
    last.finish()
    assert said(tmp_path) == {"living"} and not list(tmp_path.glob("*/*.partial"))


def test_half_of_a_dead_process_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """It had published its policy and not its train state."""
    dead = Maker(tmp_path, "dead")
    dead.finish()
    (Path(made_in(tmp_path).uris["state"]) / MANIFEST).unlink()
    Maker(tmp_path, "next").finish()
    assert said(tmp_path) == {"next"}


def test_a_folder_without_locks_is_never_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(workspaces.fcntl, "flock", refuse)
    with workspaces.beside(tmp_path / "a") as first, workspaces.beside(tmp_path / "a") as second:
        assert first != second and first.exists() and second.exists()


def make(store: Path, stage: str, text: str, inputs: Mapping[str, str] = {}) -> Path:
    def run(_: Mapping[str, Path], folders: Mapping[str, Path]) -> dict[str, float]:
        (folders[stage] / "some").mkdir()
        (folders[stage] / "some/file.json").write_text(text)
        return {}

    uris = produce(production(str(store), stage, "1", "{}", inputs), run, {})
    return Path(uris[stage])


def test_a_changed_small_file_makes_an_artifact_unfinished(tmp_path: Path) -> None:
    folder = make(tmp_path, "prompts", "[1]")
    (folder / "some/file.json").write_text("[2]")
    with pytest.raises(BadArtifact, match=r"some/file.json: changed since it was written; run the same command again"):
        read_manifest(str(folder))
    assert make(tmp_path, "prompts", "[1]") == folder and find(str(folder)) is not None


def test_a_manifest_from_before_there_were_digests_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path, "prompts", "[1]")
    found = read_manifest(str(folder))
    text = found.to_json().replace('"sha256"', '"_"')
    (folder / MANIFEST).write_text(text[: text.index('"_"')].rstrip().rstrip(",") + "," + text[text.index('"sizes"') :])
    assert read_manifest(str(folder)).sizes == found.sizes and not read_manifest(str(folder)).sha256


def test_an_input_that_turns_out_damaged_is_made_again(tmp_path: Path) -> None:
    """The stage that reads it fails once, and says that the same command helps."""
    given, other = make(tmp_path, "given", "[1]"), make(tmp_path, "other", "[1]")
    made = production(str(tmp_path), "last", "1", "{}", {"given": str(given), "other": str(other)})

    def run(read: Mapping[str, Path], _: Mapping[str, Path]) -> dict[str, float]:
        raise Damaged("x: changed", read["given"] / "some/file.json")

    with pytest.raises(
        BadArtifact, match=r"^x: changed; it no longer counts as finished, so run the same command again"
    ):
        produce(made, run, {"given": given, "other": other})
    assert find(str(given)) is None and find(str(other)) is not None
    assert (given / "some/file.json").exists()
    assert make(tmp_path, "given", "[1]") == given and find(str(given)) is not None


def test_a_damaged_download_is_fetched_again(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    made = make(tmp_path / "here", "prompts", "[1]")
    fs.put(str(made), f"/{tmp_path.name}/prompts/a", recursive=True)
    uri, cache = f"memory://{tmp_path.name}/prompts/a", tmp_path / "cache"
    copy = artifacts.localize(uri, cache)
    (copy / "some/file.json").write_text("[2]")
    assert (artifacts.localize(uri, cache) / "some/file.json").read_text() == "[1]"
    fs.pipe_file(f"/{tmp_path.name}/prompts/a/some/file.json", b"[2]")
    artifacts.set_aside(copy)
    with pytest.raises(BadArtifact, match="changed since it was written"):
        artifacts.localize(uri, cache)
