"""Saving and removing directories: whatever fails or is killed, what has the name is the old or the new in full."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_points
import pytest
from kill_points import (
    Meanwhile,
    Neither,
    NoExchange,
    NoLocks,
    Quick,
    Steps,
    contents,
    names_in,
    read_version,
    save,
    temporaries,
    version_of,
)

from hf_offload_cache.contexts import MANIFEST_NAME, FileSystem, entries, open_folder, reading, remove, sweep
from hf_offload_cache.contexts.publish import publish
from hf_offload_cache.errors import ContextError, StoreError

FILE_SYSTEMS = [Quick(), NoExchange(), NoLocks(), Neither()]
pytestmark = pytest.mark.usefixtures("no_descriptor_stays_open")
EVERY_FILE_SYSTEM = pytest.mark.parametrize("file_system", FILE_SYSTEMS, ids=lambda one: type(one).__name__)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where an old context is."""
    save(tmp_path / "ctx", "old")
    return tmp_path / "ctx"


class Unprivileged(Steps):
    """Root may open everything; others may not open a folder that its umask has closed to them."""

    def step(self, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        folder = name == "open" and arguments[1] & os.O_DIRECTORY
        if folder and self.inner.stat(arguments[0], (*arguments, None)[2]).st_mode & 0o500 != 0o500:
            raise PermissionError(errno.EACCES, "no permission", arguments[0])
        return call()


# ---- what is made


@EVERY_FILE_SYSTEM
def test_saved_replaced_removed(tmp_path: Path, file_system: FileSystem) -> None:
    target = tmp_path / "ctx"
    save(target, "old", file_system, overwrite=False)
    assert version_of(target) == "old"
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(target, "new", file_system, overwrite=False)
    assert version_of(target) == "old"
    save(target, "new", file_system)
    assert version_of(target) == "new"
    assert names_in(target) == set(contents("new"))
    freed = remove(target, file_system=file_system)
    assert freed >= len(contents("new")) * 512
    assert names_in(tmp_path) == set()


def can_exchange(folder: Path) -> bool:
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        for name in ("one", "other"):
            (folder / name).mkdir()
        FileSystem().exchange("one", "other", folder_fd)
    except OSError:
        return False
    finally:
        os.close(folder_fd)
    return True


def test_saving_sweeps_first(tmp_path: Path) -> None:
    left = tmp_path / f".hf_offload_cache-{'0' * 32}.partial"
    save(tmp_path / "dead", "left")
    (tmp_path / "dead").rename(left)
    save(tmp_path / "ctx", "new")
    assert names_in(tmp_path) == {"ctx"}


def test_an_empty_folder_may_be_the_target(tmp_path: Path) -> None:
    (tmp_path / "ctx").mkdir()
    save(tmp_path / "ctx", "new", overwrite=False)
    assert version_of(tmp_path / "ctx") == "new"


@pytest.mark.parametrize("umask", [0, 0o777])
@EVERY_FILE_SYSTEM
def test_only_the_owner_may_read_whatever_the_umask(tmp_path: Path, umask: int, file_system: FileSystem) -> None:
    save(tmp_path / "ctx", "old", file_system)
    before = os.umask(umask)
    try:
        save(tmp_path / "ctx", "new", Unprivileged(file_system))
        save(tmp_path / "first", "new", Unprivileged(file_system))
    finally:
        os.umask(before)
    for target in (tmp_path / "ctx", tmp_path / "first"):
        assert target.stat().st_mode & 0o7777 == 0o700
        assert {(target / name).stat().st_mode & 0o7777 for name in names_in(target)} == {0o600}


def test_a_folder_that_its_maker_may_not_open_is_removed_all_the_same(tmp_path: Path) -> None:
    class NoChange(Quick):
        def chmod_folder(self, name: str, folder_fd: int) -> None:
            raise OSError(errno.EIO, "broken")

    before = os.umask(0o777)
    try:
        with pytest.raises(StoreError, match="broken"):
            save(tmp_path / "ctx", "new", Unprivileged(NoChange()))
    finally:
        os.umask(before)
    assert names_in(tmp_path) == set()


def test_it_is_closed_to_others_from_the_first_moment(tmp_path: Path) -> None:
    modes = []

    def fill(folder_fd: int) -> None:
        modes.append(os.fstat(folder_fd).st_mode & 0o7777)
        kill_points.filling("new", Watching())(folder_fd)

    class Watching(Quick):
        def fchmod(self, fd: int, mode: int) -> None:
            modes.append(os.fstat(fd).st_mode & 0o077)
            super().fchmod(fd, mode)

    before = os.umask(0)
    try:
        publish(tmp_path / "ctx", fill, file_system=Watching())
    finally:
        os.umask(before)
    assert modes == [0, 0o700, *[0] * len(contents("new"))]


class Ordered(Steps):
    """What is forced to the disk, switched and removed, in order, with what it was done to."""

    def __init__(self, inner: FileSystem, folder: Path) -> None:
        super().__init__(inner)
        self.folder = folder
        self.events: list[str] = []

    def step(self, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if name == "fsync":
            there = os.fstat(arguments[0])
            if os.path.samestat(there, self.folder.stat()):
                self.events.append("force the parent")
            elif (self.folder / "ctx").exists() and os.path.samestat(there, (self.folder / "ctx").stat()):
                self.events.append("force the target")
            else:
                self.events.append("force a folder" if os.path.isdir(f"/dev/fd/{arguments[0]}") else "force a file")
        elif name in ("rename", "exchange", "unlink"):
            self.events.append("move the manifest" if arguments[1] == MANIFEST_NAME else name)
        return call()


def runs(events: list[str]) -> list[str]:
    return [event for at, event in enumerate(events) if at == 0 or events[at - 1] != event]


def test_each_step_is_on_the_disk_before_the_next(tmp_path: Path) -> None:
    ready = ["force a file", "force a folder"]
    first = Ordered(Quick(), tmp_path)
    save(tmp_path / "ctx", "old", first)
    assert runs(first.events) == [*ready, "rename", "force the parent"]
    in_place = Ordered(NoExchange(), tmp_path)
    save(tmp_path / "ctx", "new", in_place)
    moved = ["exchange", "rename", "force the target", "move the manifest", "force the target", "unlink"]
    assert runs(in_place.events) == [*ready, *moved]
    if can_exchange(tmp_path):
        exchanged = Ordered(Quick(), tmp_path)
        save(tmp_path / "ctx", "last", exchanged)
        assert runs(exchanged.events) == [*ready, "exchange", "force the parent", "unlink"]


# ---- what is refused


@pytest.mark.parametrize("overwrite", [False, True])
@EVERY_FILE_SYSTEM
def test_what_is_not_a_context_is_never_replaced(tmp_path: Path, overwrite: bool, file_system: FileSystem) -> None:
    save(tmp_path / "real", "old")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "remains").mkdir()
    (tmp_path / "remains" / f"{'0' * 32}.state").touch()
    save(tmp_path / "mixed", "old")
    (tmp_path / "mixed" / "notes").touch()
    before = {str(path): path.lstat().st_ino for path in tmp_path.rglob("*")}
    for name in ("file", "folder", "link", "dangling", "remains", "mixed"):
        filled = []
        with pytest.raises(FileExistsError, match=name):
            publish(tmp_path / name, filled.append, overwrite=overwrite, file_system=file_system)
        assert filled == []  # before any work
    assert {str(path): path.lstat().st_ino for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("name", ["", "..", f".hf_offload_cache-{'0' * 32}.partial"])
def test_a_target_needs_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(ContextError, match="name of its own"):
        save(Path(name) if not name else tmp_path / name, "new")
    assert names_in(tmp_path) == set()


def test_a_folder_to_lie_in_must_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere") as raised:
        save(tmp_path / "nowhere" / "ctx", "new")
    assert raised.value.errno == errno.ENOENT


@pytest.mark.parametrize("wrong", ["no manifest", "a foreign file", "a link"])
def test_what_is_filled_must_be_a_context(tmp_path: Path, wrong: str) -> None:
    save(tmp_path / "ctx", "old")

    def fill(folder_fd: int) -> None:
        kill_points.filling("new", Quick())(folder_fd)
        if wrong == "no manifest":
            os.unlink(MANIFEST_NAME, dir_fd=folder_fd)
        elif wrong == "a foreign file":
            os.close(os.open("notes", os.O_CREAT, dir_fd=folder_fd))
        else:
            os.symlink("/", f"{'0' * 32}.state", dir_fd=folder_fd)

    with warnings.catch_warnings(record=True) as caught, pytest.raises(ContextError, match="nothing was saved"):
        publish(tmp_path / "ctx", fill, overwrite=True)
    stays = wrong != "no manifest"  # what is not ours is not removed
    assert ["could not be removed" in str(warning.message) for warning in caught] == [True] * stays
    assert len(temporaries(tmp_path)) == stays
    assert version_of(tmp_path / "ctx") == "old"
    assert entries(tmp_path) == [tmp_path / "ctx"]


# ---- what others do meanwhile


def test_removed_just_before_it_is_replaced(tmp_path: Path, target: Path) -> None:
    save(target, "new", Meanwhile(Quick(), "exchange", lambda: remove(target)))
    assert version_of(target) == "new"
    assert names_in(tmp_path) == {"ctx"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_made_by_another_just_before_it_gets_its_name(tmp_path: Path, overwrite: bool) -> None:
    target = tmp_path / "ctx"
    between = Meanwhile(Quick(), "rename", lambda: save(target, "other"))
    if overwrite:
        save(target, "new", between)
    else:
        with pytest.raises(FileExistsError):
            save(target, "new", between, overwrite=False)
    assert between.done
    assert version_of(target) == ("new" if overwrite else "other")
    assert names_in(tmp_path) == {"ctx"}


def test_a_folder_of_someone_else_that_comes_in_between_goes_back(tmp_path: Path, target: Path) -> None:
    def swap() -> None:
        remove(target)
        target.mkdir()
        (target / "mine").write_text("precious")

    with pytest.raises(FileExistsError, match="'mine'"):
        save(target, "new", Meanwhile(Quick(), "exchange", swap))
    assert (target / "mine").read_text() == "precious" and names_in(tmp_path) == {"ctx"}


@pytest.mark.parametrize(("at", "after"), [("mkdir", True), ("lock", False)])
def test_a_sweeper_that_is_faster_than_the_lock(tmp_path: Path, at: str, after: bool) -> None:
    """The temporary folder is there and not locked yet: it is swept, and the saver takes another."""
    swept: list[int] = []
    save(tmp_path / "ctx", "new", Meanwhile(Quick(), at, lambda: swept.append(sweep(tmp_path)), after=after))
    assert swept == [1]
    assert version_of(tmp_path / "ctx") == "new" and names_in(tmp_path) == {"ctx"}


def test_a_living_saver_is_not_swept(tmp_path: Path) -> None:
    def fill(folder_fd: int) -> None:
        kill_points.age(tmp_path)
        assert sweep(tmp_path) == 0
        kill_points.filling("new", Quick())(folder_fd)

    publish(tmp_path / "ctx", fill)
    assert version_of(tmp_path / "ctx") == "new"


@EVERY_FILE_SYSTEM
def test_a_saver_whose_folder_is_taken_all_the_same_leaves_the_old_one(tmp_path: Path, file_system: FileSystem) -> None:
    """Without locks a sweeper may be wrong about who is dead: it may not come to half a context."""
    target = tmp_path / "ctx"
    for existing in (False, True):
        if existing:
            save(target, "old")

        def fill(folder_fd: int) -> None:
            kill_points.filling("new", Quick())(folder_fd)
            kill_points.age(tmp_path)
            assert sweep(tmp_path, file_system=NoLocks()) == 1

        with pytest.raises((StoreError, ContextError)):
            publish(target, fill, overwrite=True, file_system=file_system)
        assert version_of(target) == ("old" if existing else None)
        assert temporaries(tmp_path) == []
        assert not existing or names_in(target) == set(contents("old"))


@pytest.mark.parametrize(
    ("before", "inner", "at"),
    [(None, NoLocks, "rename"), ("old", NoLocks, "exchange"), ("old", Neither, "exchange"), ("old", Neither, "rename")],
)
def test_a_folder_that_is_half_swept_is_not_published(
    tmp_path: Path, before: str | None, inner: type[FileSystem], at: str
) -> None:
    """The sweeper, wrong about who is dead, comes just before the switch and is killed after one file."""
    target = tmp_path / "ctx"
    if before is not None:
        save(target, before)

    class Dying(NoLocks):
        unlinked = 0

        def unlink(self, name: str, folder_fd: int) -> None:
            self.unlinked += 1
            if self.unlinked > 1:
                raise OSError(errno.EIO, "killed")
            super().unlink(name, folder_fd)

    def sweep_partly() -> None:
        kill_points.age(tmp_path)
        sweep(tmp_path, file_system=Dying())

    file_system = Meanwhile(inner(), at, sweep_partly)
    with pytest.raises(StoreError):
        save(target, "new", file_system)
    assert file_system.done
    assert version_of(target) == before
    assert entries(tmp_path) == ([] if before is None else [target])
    assert before is None or names_in(target) == set(contents("old"))


def is_the_manifest(old: str, new: str, *_: Any) -> bool:
    return new == MANIFEST_NAME


def test_the_folder_is_taken_at_the_last_moment_of_moving_in(tmp_path: Path, target: Path) -> None:
    """The sweeper takes it when the data files have moved and the manifest has not."""
    taken: list[int] = []

    def take() -> None:
        kill_points.age(tmp_path)
        taken.append(sweep(tmp_path, file_system=NoLocks()))

    with pytest.raises(StoreError):
        save(target, "new", Meanwhile(Neither(), "rename", take, when=is_the_manifest))
    assert taken == [1] and version_of(target) == "old" and names_in(target) == set(contents("old"))


@pytest.mark.parametrize("then", ["nothing", "replaced", "removed"])
def test_savers_that_move_in_take_turns(tmp_path: Path, then: str, target: Path) -> None:
    """Another one holds the lock; it lets go when this one waits for it, and did something before."""
    other_fd = os.open(target, os.O_RDONLY)
    Quick().lock(other_fd)
    waited = []

    class Waiting(NoExchange):
        def lock(self, fd: int, *, wait: bool = False) -> None:
            if wait and not waited:
                waited.append(version_of(target))
                {"nothing": lambda: None, "removed": lambda: remove(target),
                 "replaced": lambda: save(target, "other", Neither())}[then]()  # fmt: skip
                os.close(other_fd)
            super().lock(fd, wait=wait)

    save(target, "new", Waiting())
    assert waited == ["old"]
    assert version_of(target) == "new"
    assert names_in(target) == set(contents("new"))
    assert names_in(tmp_path) == {"ctx"}


def test_what_another_saver_put_there_since_is_not_removed(target: Path) -> None:
    """Without locks: it brings back the old context before the files of that are removed."""
    back = Meanwhile(Neither(), "rename", lambda: save(target, "old", Neither()), after=True, when=is_the_manifest)
    save(target, "new", back)
    assert back.done and version_of(target) == "old"


@pytest.mark.parametrize("how", ["exchange", "in place"])
def test_a_reader_goes_over_to_the_new_one(how: str, target: Path) -> None:
    calls = []

    def read(folder_fd: int) -> str:
        calls.append(folder_fd)
        if len(calls) == 1:
            save(target, "new", {"exchange": Quick, "in place": NoExchange}[how]())
            os.stat(next(iter(contents("old"))), dir_fd=folder_fd)
        return read_version(folder_fd)

    assert reading(target, read) == "new"
    assert len(calls) == 2


def test_a_reader_of_what_is_damaged_or_gone_does_not_try_for_ever(target: Path) -> None:
    (target / next(iter(contents("old")))).unlink()
    with pytest.raises(FileNotFoundError):
        reading(target, read_version)

    def read(folder_fd: int) -> str:
        remove(target)
        return read_version(folder_fd)

    with pytest.raises(ContextError, match="no context"):
        reading(target, read)


def test_a_folder_that_is_opened_while_it_is_replaced(target: Path) -> None:
    between = Meanwhile(Quick(), "stat", lambda: save(target, "new"))
    with open_folder(target, file_system=between) as fd:
        assert read_version(fd) == "new"


@pytest.mark.parametrize("how", ["exchange", "in place"])
def test_two_processes_replace_a_context_that_a_third_reads(tmp_path: Path, how: str) -> None:
    target = tmp_path / "ctx"
    save(target, "first")
    writers = [kill_points.start_script("overwrite", str(target), version, "150", how) for version in ("one", "other")]
    seen = []
    try:
        while any(writer.poll() is None for writer in writers):
            seen.append(reading(target, read_version))
    finally:
        ends = [writer.communicate(timeout=60)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], ends
    assert set(seen) <= {"first", "one", "other"}
    last = version_of(target)
    assert last in ("one", "other")
    assert names_in(target) == set(contents(last))
    assert names_in(tmp_path) == {"ctx"}


@pytest.mark.parametrize("wipe", [False, True])
def test_a_living_removal_is_not_swept(tmp_path: Path, wipe: bool) -> None:
    save(tmp_path / "ctx", "old")
    swept = []
    remove(tmp_path / "ctx", wipe=wipe, file_system=Meanwhile(Quick(), "unlink", lambda: swept.append(sweep(tmp_path))))
    assert swept == [0]
    assert names_in(tmp_path) == set()
