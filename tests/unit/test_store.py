"""A store that cannot be used is found out before anything is made."""

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mdiff_core.errors import BadSetting
from mdiff_core.stores import settled


def test_a_folder_becomes_absolute_and_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settled("a/b") == settled(f"file://{tmp_path}/a/b") == str(tmp_path / "a/b")
    assert settled("~/x") == str(tmp_path / "home/x")
    assert settled("memory://bucket/x") == "memory://bucket/x"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("store", ["{file}", "{file}/below", "foo://x", "file:/tmp/x", "a\x00b", "x" * 5000])
def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, store: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSetting, match=r"^store: '"):
        settled(store.format(file=tmp_path / "file"))


def test_an_object_store_that_does_not_answer_is_said() -> None:
    class Locked(MemoryFileSystem):
        def exists(self, path: str, **_: Any) -> bool:
            raise RuntimeError("403\n\ntrace") from KeyError("Unable to locate credentials")

    fsspec.register_implementation("locked", Locked, clobber=True)
    with pytest.raises(BadSetting) as caught:
        settled("locked://bucket/x")
    assert str(caught.value).startswith(
        "store: 'locked://bucket/x' cannot be reached ('Unable to locate credentials'); set"
    )
