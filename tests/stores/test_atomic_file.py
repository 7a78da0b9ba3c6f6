"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_offload_cache.stores import replace_file


def test_until_it_is_complete_the_old_one_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(place: Path) -> None:
        place.write_text("half")
        assert path.read_text() == "old" and place.parent == tmp_path

    replace_file(path, write)
    assert path.read_text() == "half" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_after_an_error_all_is_as_before(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(place: Path) -> None:
        place.write_text("half")
        if call == "write":
            raise KeyboardInterrupt

    def fail(*args: object) -> None:
        raise OSError("the disk failed")

    if call != "write":
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(KeyboardInterrupt if call == "write" else OSError):
        replace_file(path, write)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_both_the_bytes_and_the_name_are_forced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = [], os.fsync

    def count(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(os, "fsync", count)
    replace_file(tmp_path / "file", lambda place: place.write_bytes(b"x"))
    assert synced == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]
