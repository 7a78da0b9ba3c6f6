"""One context as a directory: nothing outside of it is read, written or removed, and nothing in it that is not ours."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_points import (
    FailAt,
    Meanwhile,
    NoLocks,
    Quick,
    ShortWrites,
    age,
    contents,
    names_in,
    save,
    temporaries,
    version_of,
)

from hf_offload_cache.contexts import entries, open_file, open_folder, read_small, remove, sweep, write_file
from hf_offload_cache.errors import ContextError, StoreError, StoreFullError

pytestmark = pytest.mark.usefixtures("no_descriptor_stays_open")

NAME = f"{'0123456789abcdef' * 2}.records"


@pytest.fixture
def folder_fd(tmp_path: Path) -> Iterator[int]:
    """An open directory, `tmp_path`/inside."""
    (tmp_path / "inside").mkdir()
    fd = os.open(tmp_path / "inside", os.O_RDONLY)
    yield fd
    os.close(fd)


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "secret")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endpoint(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        folder_fd = os.open(path.parent, os.O_RDONLY)  # a socket's path is short
        try:
            listener.bind(f"/dev/fd/{folder_fd}/{path.name}" if sys.platform == "linux" else str(path))
        finally:
            os.close(folder_fd)


PLANTED = pytest.mark.parametrize("plant", [link, pipe, endpoint, Path.mkdir], ids=lambda plant: plant.__name__)


# ---- files


@pytest.mark.parametrize("name", [NAME, NAME.replace("records", "state"), "manifest.json"])
def test_written_and_read(folder_fd: int, tmp_path: Path, name: str) -> None:
    data = os.urandom(10_000)
    write_file(folder_fd, name, [data[:3], bytearray(data[3:4000]), memoryview(data)[4000:], b""])
    assert (tmp_path / "inside" / name).read_bytes() == data
    assert read_small(folder_fd, name, len(data)) == data
    with open_file(folder_fd, name) as fd:
        assert os.get_blocking(fd)
        assert not os.get_inheritable(fd)
        assert os.read(fd, 20_000) == data


def test_buffers_of_any_type_are_written_as_bytes(folder_fd: int) -> None:
    words = memoryview(bytearray(64)).cast("Q")
    words[1] = 2**40
    write_file(folder_fd, NAME, [words[:0], words])
    assert read_small(folder_fd, NAME, 64) == words.tobytes()


@pytest.mark.parametrize(
    "name",
    [
        "../secret", "/etc/hostname", ".", "..", "", "inside/" + NAME, NAME[1:], "0" + NAME, NAME.upper(), NAME + "\n",
        NAME + ".tmp", "manifest.json/", "./manifest.json", "Manifest.json", NAME.replace("0", "g"), "notes",
        NAME.replace("records", "record"), NAME + "\0",
    ],
)  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_other_names_are_refused_before_anything_is_opened(tmp_path: Path, name: str, inside: bool) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "inside").mkdir()
    folder_fd = os.open(tmp_path / "inside", os.O_RDONLY)
    nothing = FailAt(Quick(), 1, lambda: AssertionError("a call was made"), last=100)
    try:
        for call in (
            lambda: open_file(folder_fd, name, file_system=nothing),  # type: ignore[arg-type]
            lambda: read_small(folder_fd, name, 100, file_system=nothing),  # type: ignore[arg-type]
            lambda: write_file(folder_fd, name, [b"x"], file_system=nothing),  # type: ignore[arg-type]
        ):
            with pytest.raises(ContextError, match="32 hexadecimal digits"):
                call()
    finally:
        os.close(folder_fd)
    assert (tmp_path / "secret").read_text() == "secret"
    assert names_in(tmp_path / "inside") == set()


@PLANTED
@pytest.mark.parametrize("name", [NAME, "manifest.json"])
def test_only_regular_files_are_read_and_none_blocks(
    folder_fd: int, tmp_path: Path, name: str, plant: Callable[[Path], Any]
) -> None:
    (tmp_path / "secret").write_text("secret")
    plant(tmp_path / "inside" / name)
    for read in (lambda: open_file(folder_fd, name), lambda: read_small(folder_fd, name, 100)):
        with pytest.raises(ContextError, match=f"{name}.*regular file"):
            read()


@PLANTED
def test_nothing_that_is_there_is_written_to(folder_fd: int, tmp_path: Path, plant: Callable[[Path], Any]) -> None:
    """A link that leads nowhere makes no file, either."""
    plant(tmp_path / "inside" / NAME)
    before = (tmp_path / "inside" / NAME).lstat()
    for secret in (None, "secret"):
        if secret:
            (tmp_path / "secret").write_text(secret)
        with pytest.raises(FileExistsError):
            write_file(folder_fd, NAME, [b"x"])
        assert (tmp_path / "secret").exists() is bool(secret)
    assert (tmp_path / "secret").read_text() == "secret"
    assert (tmp_path / "inside" / NAME).lstat().st_ino == before.st_ino


def test_the_size_is_checked_before_anything_is_allocated(folder_fd: int, tmp_path: Path) -> None:
    for read in (lambda: open_file(folder_fd, NAME), lambda: read_small(folder_fd, NAME, 100)):
        with pytest.raises(FileNotFoundError):
            read()
    (tmp_path / "inside" / NAME).touch()
    for size, most in ((2**40, 1000), (1001, 1000)):
        os.truncate(tmp_path / "inside" / NAME, size)
        with pytest.raises(ContextError, match=f"1,000 bytes at most, and has {size:,}"):
            read_small(folder_fd, NAME, most)
    for size in (1000, 0):
        os.truncate(tmp_path / "inside" / NAME, size)
        assert read_small(folder_fd, NAME, size) == bytes(size)


def test_calls_that_do_little(folder_fd: int, tmp_path: Path) -> None:
    """Short reads go on; a file that is cut off while it is read, and a device that takes nothing, are errors."""
    data = os.urandom(1000)
    write_file(folder_fd, NAME, [data])
    short = ShortWrites(Quick(), 7)
    assert read_small(folder_fd, NAME, 1000, file_system=short) == data  # type: ignore[arg-type]
    assert short.called.count("read") == 143

    cutting: Any = Meanwhile(Quick(), "read", lambda: os.truncate(tmp_path / "inside" / NAME, 300))
    with pytest.raises(StoreError, match="ends at byte 300 of 1,000"):
        read_small(folder_fd, NAME, 1000, file_system=cutting)
    (tmp_path / "inside" / NAME).unlink()
    with pytest.raises(StoreError, match="takes no more bytes"):
        write_file(folder_fd, NAME, [b"x"], file_system=ShortWrites(Quick(), 0))  # type: ignore[arg-type]
    assert names_in(tmp_path / "inside") == set()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR], ids=errno.errorcode.get)
@pytest.mark.parametrize("after", [False, True], ids=["without effect", "after its effect"])
def test_each_call_of_a_write_fails(folder_fd: int, tmp_path: Path, number: int, after: bool) -> None:
    failed = 0
    for first in range(1, 100):
        faulty: Any = FailAt(Quick(), first, lambda: OSError(number, os.strerror(number)), after=after)
        try:
            write_file(folder_fd, NAME, [b"some", b"thing"], file_system=faulty)
            break
        except StoreError as error:
            failed += 1
            full = number in (errno.ENOSPC, errno.EDQUOT)
            assert error.errno == number
            assert isinstance(error, StoreFullError) == full
            if full and faulty.called[first - 1] != "open":
                assert "bytes free" in str(error)
        opened_in_vain = faulty.called == ["open"] and after
        assert names_in(tmp_path / "inside") == ({NAME} if opened_in_vain else set())
        if opened_in_vain:
            (tmp_path / "inside" / NAME).unlink()
    assert failed == 6
    assert faulty.called == ["open", "fchmod", "write", "write", "fsync", "close"]  # on the disk before it is closed
    assert read_small(folder_fd, NAME, 100) == b"something"


def test_what_the_pieces_raise_is_passed_on_and_nothing_is_left(folder_fd: int, tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"some"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(folder_fd, NAME, pieces())
    assert names_in(tmp_path / "inside") == set()


# ---- folders


def planted(folder: Path) -> tuple[str, ...]:
    """A context "ctx", and beside it what is none: the names of that."""
    save(folder / "ctx", "old")
    (folder / "link").symlink_to("ctx")
    (folder / "file").touch()
    for name in ("empty", "linked", "folder"):
        (folder / name).mkdir()
    (folder / "linked" / "manifest.json").symlink_to(folder / "ctx" / "manifest.json")
    (folder / "folder" / "mine").touch()
    return "nowhere", "link", "link/", "file", "empty", "folder"


def test_what_is_no_context_is_not_opened(tmp_path: Path) -> None:
    for name in (*planted(tmp_path), "linked", "file/below"):
        with pytest.raises(ContextError, match=name.rstrip("/")):
            open_folder(f"{tmp_path}/{name}")
    for path in (tmp_path / "ctx", f"{tmp_path}/ctx/"):
        with open_folder(path) as fd:
            assert not os.get_inheritable(fd)


def test_entries_are_contexts_only(tmp_path: Path) -> None:
    assert entries(tmp_path) == []
    planted(tmp_path)
    for name in ("b", "a", ".hidden", "left"):
        save(tmp_path / name, "old")
    (tmp_path / "left").rename(tmp_path / f".hf_offload_cache-{'0' * 32}.partial")
    (tmp_path / "odd" / "manifest.json").mkdir(parents=True)
    assert entries(tmp_path) == [tmp_path / name for name in (".hidden", "a", "b", "ctx")]
    for wrong in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ContextError, match="not a folder"):
            entries(wrong)
    with pytest.raises(StoreError, match="nowhere"):
        sweep(tmp_path / "nowhere")


# ---- removing


@pytest.mark.parametrize("wipe", [False, True])
@pytest.mark.parametrize("foreign", ["notes", "folder", "linked state", "linked manifest", "pipe"])
def test_what_is_not_ours_is_left_and_named_and_so_is_all_else(tmp_path: Path, foreign: str, wipe: bool) -> None:
    target = tmp_path / "ctx"
    save(target, "old")
    (tmp_path / "secret").write_text("secret")
    name = {"linked state": f"{'f' * 32}.state", "linked manifest": "manifest.json"}.get(foreign, foreign)
    if foreign == "notes":
        (target / name).write_text("mine")
    elif foreign == "folder":
        (target / name).mkdir()
        (target / name / "manifest.json").touch()
    elif foreign == "pipe":
        os.mkfifo(target / name)
    else:
        (target / name).unlink(missing_ok=True)
        link(target / name)
        (target / name).unlink()
        (target / name).symlink_to(tmp_path / "secret")
    before = names_in(target)
    with pytest.raises(ContextError, match=f"{name}.*nothing was removed"):
        remove(target, wipe=wipe)
    assert names_in(target) == before
    assert (tmp_path / "secret").read_text() == "secret"
    assert names_in(tmp_path) == {"ctx", "secret"}


def test_only_contexts_are_removed(tmp_path: Path) -> None:
    names = (*planted(tmp_path), "..")
    before = sorted(tmp_path.rglob("*"))
    for name in names:
        with pytest.raises(ContextError):
            remove(f"{tmp_path}/{name}")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("wipe", [False, True])
def test_what_is_shared_is_neither_wiped_nor_freed(tmp_path: Path, wipe: bool) -> None:
    """All else is overwritten, and forced to the disk before it is unlinked."""
    shared, own = f"{'1' * 32}.records", f"{'2' * 32}.records"
    data = b"secret " * 500_000
    for name in ("one", "twin"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"secret")
    (tmp_path / "one" / own).write_bytes(data[: 64 * 1024])
    (tmp_path / "one" / shared).write_bytes(data)
    os.link(tmp_path / "one" / shared, tmp_path / "twin" / shared)
    os.sync()
    open_fds = [os.open(tmp_path / "one" / name, os.O_RDONLY) for name in (own, "manifest.json")]
    watched: Any = FailAt(Quick(), 0, RuntimeError)
    assert 64 * 1024 <= remove(tmp_path / "one", wipe=wipe, file_system=watched) < 1024 * 1024
    left = [os.read(fd, len(data)) for fd in open_fds]
    for fd in open_fds:
        os.close(fd)
    assert [len(each) for each in left] == [64 * 1024, 6]
    assert [b"secret" in each for each in left] == [not wipe] * 2
    assert (tmp_path / "twin" / shared).read_bytes() == data and names_in(tmp_path) == {"twin"}
    calls = [name for name in watched.called if name in ("write", "fsync", "unlink", "rmdir")]
    for position in (at for at, name in enumerate(calls) if name == "write" and calls[at + 1] != "write"):
        assert calls[position + 1] == "fsync"
    assert remove(tmp_path / "twin") >= len(data)


def test_what_has_it_open_keeps_it(tmp_path: Path) -> None:
    save(tmp_path / "ctx", "old")
    with open_folder(tmp_path / "ctx") as folder, open_file(folder, next(iter(contents("old")))) as file:
        remove(tmp_path / "ctx")
        assert os.read(file, 10_000) == next(iter(contents("old").values()))


# ---- sweeping


def leave(folder: Path, digit: str, ending: str = "partial") -> Path:
    """What a killed saver or wiper leaves."""
    left = folder / f".hf_offload_cache-{digit * 32}.{ending}"
    left.mkdir()
    for name, data in contents("left").items():
        (left / name).write_bytes(data)
    return left


def test_only_what_is_certainly_left_behind_is_swept(tmp_path: Path) -> None:
    save(tmp_path / "ctx", "old")
    leave(tmp_path, "1")
    leave(tmp_path, "2", "wiping")
    living = leave(tmp_path, "3")
    odd = leave(tmp_path, "4")
    (odd / "mine").touch()
    link_name = tmp_path / f".hf_offload_cache-{'5' * 32}.partial"
    link_name.symlink_to("ctx")
    (tmp_path / f".hf_offload_cache-{'6' * 32}.partial").touch()
    (tmp_path / f".hf_offload_cache-{'7' * 32}").touch()
    (tmp_path / f".hf_offload_cache-{'8' * 31}.partial").mkdir()
    before = names_in(tmp_path)
    living_fd = os.open(living, os.O_RDONLY)
    Quick().lock(living_fd)
    try:
        assert sweep(tmp_path) == 2
    finally:
        os.close(living_fd)
    gone = {f".hf_offload_cache-{'1' * 32}.partial", f".hf_offload_cache-{'2' * 32}.wiping"}
    assert names_in(tmp_path) == before - gone
    assert names_in(odd) == {*contents("left"), "mine"}
    assert version_of(tmp_path / "ctx") == "old"
    assert names_in(living) == set(contents("left"))


def test_without_locks_only_what_is_a_day_old_is_swept(tmp_path: Path) -> None:
    leave(tmp_path, "1")
    assert sweep(tmp_path, file_system=NoLocks()) == 0
    assert len(temporaries(tmp_path)) == 1
    age(tmp_path)
    assert sweep(tmp_path, file_system=NoLocks()) == 1
    assert names_in(tmp_path) == set()


def test_what_belongs_to_another_user_is_not_swept(tmp_path: Path) -> None:
    leave(tmp_path, "1")

    class Others(Quick):
        def fstat(self, fd: int) -> os.stat_result:
            there = list(super().fstat(fd))
            there[stat.ST_UID] += 1
            return os.stat_result(there)

    assert sweep(tmp_path, file_system=Others()) == 0
    assert len(temporaries(tmp_path)) == 1


def test_what_becomes_a_context_between_listing_and_lock_is_not_swept(tmp_path: Path) -> None:
    left = leave(tmp_path, "1")
    publishing: Any = Meanwhile(Quick(), "lock", lambda: left.rename(tmp_path / "ctx"))
    assert sweep(tmp_path, file_system=publishing) == 0
    assert version_of(tmp_path / "ctx") == "left"
