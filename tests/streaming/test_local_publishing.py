"""A folder of this machine that is published to: whose it is, what a full disk or a link does, and what is forced to
the disk."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.asyn
import long_context
import pytest
from long_context import publish_short, streamed_short
from long_llama import long_model
from nothing_left import no_threads_and_descriptors
from pairwise import combinations

from hf_offload_cache import publish_context
from hf_offload_cache.errors import DamagedObjectError, ObjectError, StoreError, StoreFullError

NAME = "stream.json"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    long_model()
    fsspec.asyn.get_loop()  # its thread stays
    with no_threads_and_descriptors():
        yield


@pytest.mark.parametrize(("umask", "kind"), combinations([0, 0o022, 0o777], ["{}", "file://{}", "local://{}"]))
def test_what_is_published_is_its_owners(umask: int, kind: str, tmp_path: Path) -> None:
    """Also folders above it that had to be made; one that was there keeps its mode."""
    (tmp_path / "there").mkdir(mode=0o755)
    (tmp_path / "there").chmod(0o755)
    place = tmp_path / "there" / "above" / "published"
    before = os.umask(umask)
    try:
        publish_short(kind.format(place), tmp_path)
        publish_short(kind.format(place), tmp_path, overwrite=True)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in place.parent.rglob("*")}
    assert modes.pop(place) == stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert len(modes) == 6 and set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o755
    assert streamed_short(kind.format(place), tmp_path).lost == 0


@pytest.mark.parametrize("kind", ["dir::{}", "dir::file://{}", "simplecache::{}"])
def test_so_is_what_is_published_by_another_file_system(kind: str, tmp_path: Path) -> None:
    """fsspec's own way there is neither atomic nor private."""
    place = kind.format(tmp_path / "published")
    publish_short(place, tmp_path)
    publish_short(place, tmp_path, overwrite=True)
    made = [tmp_path / "published", *(tmp_path / "published").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()} == {0o700}
    assert streamed_short(place, tmp_path).lost == 0


def test_nothing_goes_through_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others may read it in plain, and from which it would be copied over what is there."""
    make = publish_context

    def without_one(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        return make(*given, **named)

    monkeypatch.setattr(long_context, "publish_context", without_one)
    publish_short(tmp_path / "published", tmp_path)
    assert (tmp_path / "published" / NAME).exists()


def test_files_and_names_are_forced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each before it has its name, and all of them before the manifest has its."""
    done, fsync, replace = list[str](), os.fsync, os.replace

    def syncing(fd: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def replacing(source: str, target: str, **folders: Any) -> None:
        done.append(NAME if target == NAME else "name")
        replace(source, target, **folders)

    (tmp_path / "published").mkdir()
    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    publish_short(tmp_path / "published", tmp_path)
    assert done == ["file", "name", "folder"] * 5 + ["file", NAME, "folder"]


@pytest.mark.parametrize(
    ("call", "number"), combinations(["write", "fsync", "replace"], [errno.ENOSPC, errno.EDQUOT, errno.EIO])
)
def test_a_disk_that_fails_leaves_what_was_there(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the manifest, when the objects are there."""
    place = tmp_path / "published"
    publish_short(place, tmp_path)
    publish_short(place, tmp_path, seed=1, overwrite=True)
    publish_short(place, tmp_path, overwrite=True)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    own, temporary = getattr(os, call), list[int]()

    def failing(first: Any, *others: Any, **more: Any) -> Any:
        if call == "replace" or os.readlink(f"/proc/self/fd/{first}").startswith(f"{place}/.{NAME}"):
            temporary.append(1)
            raise OSError(number, os.strerror(number))
        return own(first, *others, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(StoreError, match=rf"writing stream\.json: .*{os.strerror(number)}") as caught:
            publish_short(place, tmp_path, seed=1, overwrite=True)
    assert isinstance(caught.value, StoreFullError) == (number != errno.EIO) and temporary
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert streamed_short(place, tmp_path).lost == 0


def test_links_at_names_are_replaced_and_not_followed(tmp_path: Path) -> None:
    place, other = tmp_path / "published", tmp_path / "other"
    manifest = publish_short(place, tmp_path)
    cell = manifest.cells[0][1].name
    other.write_bytes((place / cell).read_bytes())
    for name in (NAME, cell):
        (place / name).unlink()
        (place / name).symlink_to(other)
    held = other.read_bytes()
    with pytest.raises(ObjectError, match=r"stream\.json: is a link.*overwrite=True"):
        publish_short(place, tmp_path)
    publish_short(place, tmp_path, overwrite=True)
    assert other.read_bytes() == held and not any(path.is_symlink() for path in place.iterdir())
    assert streamed_short(place, tmp_path).lost == 0


@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_is_no_folder_to_publish_to(dangling: bool, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    if not dangling:
        (tmp_path / "target").mkdir()
    for overwrite in (False, True):
        with pytest.raises(ObjectError, match="is a link or no folder: give a folder") as caught:
            publish_short(tmp_path / "link", tmp_path, overwrite=overwrite)
        assert "check=False" not in str(caught.value)
    assert not dangling or not (tmp_path / "target").exists()


def test_what_is_written_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a disk that gives something else."""
    write = os.write

    def flipping(fd: int, data: Any) -> int:
        if "/published/." in os.readlink(f"/proc/self/fd/{fd}"):
            data = bytes([data[0] ^ 1]) + bytes(data[1:])
        return write(fd, data)

    monkeypatch.setattr(os, "write", flipping)
    with pytest.raises(DamagedObjectError, match="not as it was written, its bytes differ"):
        publish_short(tmp_path / "published", tmp_path)
    assert not (tmp_path / "published" / NAME).exists()


def test_a_pipe_is_no_object(tmp_path: Path) -> None:
    """It is not waited for."""
    place = tmp_path / "published"
    cell = publish_short(place, tmp_path).cells[0][1].name
    for name in (NAME, cell):
        (place / name).unlink()
        os.mkfifo(place / name)
    with pytest.raises(ObjectError, match="is no regular file"):
        publish_short(place, tmp_path)
    publish_short(place, tmp_path, overwrite=True)
    assert streamed_short(place, tmp_path).lost == 0
