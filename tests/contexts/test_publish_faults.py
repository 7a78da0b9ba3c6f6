"""Every call of a save or a removal fails, is interrupted, or is the last one: what is left is the old or the new."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_points
import pytest
from kill_points import (
    FailAt,
    Neither,
    NoExchange,
    NoLocks,
    Quick,
    ShortWrites,
    contents,
    fails,
    names_in,
    save,
    temporaries,
    version_of,
)

from hf_offload_cache.contexts import FileSystem, entries, remove, sweep
from hf_offload_cache.contexts.publish import publish
from hf_offload_cache.errors import StoreError, StoreFullError

FILE_SYSTEMS = [Quick(), NoExchange(), NoLocks(), Neither()]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such: a hundred thousand files are made and removed."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


pytestmark = pytest.mark.usefixtures("no_descriptor_stays_open")
SAVING = [
    pytest.param(before, file_system, id=f"{before} {type(file_system).__name__}")
    for before in (None, "old")
    for file_system in FILE_SYSTEMS
    if before is not None or not isinstance(file_system, NoExchange)  # what is new exchanges nothing
]


FAULTS: dict[str, tuple[Any, bool, bool]] = {
    "EIO": (fails(errno.EIO), False, False),
    "EIO after the call": (fails(errno.EIO), True, False),
    "ENOSPC": (fails(errno.ENOSPC), False, False),
    "EINTR after the call": (fails(errno.EINTR), True, False),
    "EIO from then on": (fails(errno.EIO), False, True),
    "Ctrl-C": (KeyboardInterrupt, False, False),
    "Ctrl-C after the call": (KeyboardInterrupt, True, False),
    "Ctrl-C from then on": (KeyboardInterrupt, False, True),
}
"""What a call raises; whether it had its effect; whether all calls after it fail, too: then nothing can be cleaned
up."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("before", "file_system"), SAVING)
def test_each_call_of_a_save_fails(tmp_path: Path, before: str | None, file_system: FileSystem, fault: str) -> None:
    """What is left is the old or the new, and nothing else: after an error at once, else once it is swept."""
    target, outcomes, failed = tmp_path / "ctx", set(), 0
    make_error, after, lasting = FAULTS[fault]
    for first in range(1, 1000):
        if before is not None:
            save(target, before)
        faulty = FailAt(file_system, first, make_error, last=10_000 if lasting else None, after=after)
        descriptors, raised = len(os.listdir("/dev/fd")), None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if lasting else "error", UserWarning)
            try:
                save(target, "new", faulty, overwrite=before is not None)
            except (StoreError, KeyboardInterrupt) as error:
                raised = error
        assert len(os.listdir("/dev/fd")) == descriptors
        found = version_of(target)
        outcomes.add(found)
        assert found in (before, "new"), faulty.called
        if isinstance(raised, StoreError) and not lasting:
            failed += 1
            assert raised.errno == make_error().errno
            assert isinstance(raised, StoreFullError) == (raised.errno == errno.ENOSPC)
            kept = "is the new context nevertheless" in str(raised)
            assert found == ("new" if kept else before), faulty.called
            assert not kept or isinstance(file_system, NoExchange)
        elif lasting or raised is not None:  # a save that could not clean up any more raised nothing
            assert raised is None or isinstance(raised, KeyboardInterrupt) == (make_error is KeyboardInterrupt)
            if isinstance(file_system, NoLocks):
                kill_points.age(tmp_path)
            sweep(tmp_path, file_system=file_system if isinstance(file_system, NoLocks) else Quick())
            found = version_of(target)  # a sweep completes an exchange that was begun
            assert found in (before, "new"), faulty.called
        if found is not None:
            left = {*contents("old"), *contents("new")} if lasting else set(contents("old"))
            assert set(contents(found)) <= names_in(target) <= {*contents(found), *left}, faulty.called
            remove(target)
        assert names_in(tmp_path) == set(), faulty.called
        if faulty.calls < first:
            break
    assert faulty.calls < first and outcomes >= ({before, "new"} if lasting else {"new"})
    assert make_error is KeyboardInterrupt or lasting or failed > 40


@pytest.mark.parametrize("how", [Quick, NoExchange])
def test_a_save_that_cannot_clean_up_is_a_save(tmp_path: Path, how: type[FileSystem]) -> None:
    class NoRemoval(how):  # type: ignore[valid-type, misc]
        def unlink(self, name: str, folder_fd: int) -> None:
            raise OSError(errno.EIO, "stuck")

        def rmdir(self, name: str, folder_fd: int) -> None:
            raise OSError(errno.EIO, "stuck")

    save(tmp_path / "ctx", "old")
    with pytest.warns(UserWarning, match="could not be removed.*stuck") as caught:
        save(tmp_path / "ctx", "new", NoRemoval())
    assert {warning.filename for warning in caught} == {kill_points.__file__}  # who called, not the inside
    assert version_of(tmp_path / "ctx") == "new"
    assert entries(tmp_path) == [tmp_path / "ctx"]
    save(tmp_path / "ctx", "last")
    assert names_in(tmp_path) == {"ctx"}
    assert names_in(tmp_path / "ctx") == set(contents("last"))


def test_what_fill_raises_is_passed_on_and_nothing_is_left(tmp_path: Path) -> None:
    save(tmp_path / "ctx", "old")

    def fill(folder_fd: int) -> None:
        kill_points.filling("new", Quick())(folder_fd)
        raise error

    for error in (ValueError("mine"), OSError(errno.EDOM, "mine"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)) as raised:
            publish(tmp_path / "ctx", fill, overwrite=True)
        assert raised.value is error
        assert version_of(tmp_path / "ctx") == "old"
        assert names_in(tmp_path) == {"ctx"}


@pytest.mark.parametrize("most", [1, 7])
def test_short_writes_and_reads_are_taken_up_again(tmp_path: Path, most: int) -> None:
    short = ShortWrites(Quick(), most)
    save(tmp_path / "ctx", "new", short)
    assert version_of(tmp_path / "ctx") == "new"
    assert short.called.count("write") > sum(map(len, contents("new").values())) // (2 * most)


@pytest.mark.parametrize("wipe", [False, True])
@pytest.mark.parametrize("after", [False, True], ids=["without effect", "after its effect"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EINTR], ids=errno.errorcode.get)
def test_each_call_of_a_removal_fails(tmp_path: Path, number: int, after: bool, wipe: bool) -> None:
    target = tmp_path / "ctx"
    survived = 0
    for first in range(1, 1000):
        if not target.exists():
            save(target, "old")
        faulty = FailAt(Quick(), first, fails(number), after=after)
        descriptors = len(os.listdir("/dev/fd"))
        try:
            remove(target, wipe=wipe, file_system=faulty)
            survived += 1
            assert names_in(tmp_path) == set()
        except StoreError as error:
            assert error.errno == number
            assert version_of(target) in ("old", None)
            sweep(tmp_path)
            assert temporaries(tmp_path) == []
        assert len(os.listdir("/dev/fd")) == descriptors
        if faulty.calls < first:
            break
    assert survived > 10  # what fails once is tried again
    assert faulty.calls < first


# ---- every call is the last one


def test_killed_at_every_call(tmp_path: Path) -> None:
    script = kill_points.start_script("kill", str(tmp_path))
    output, errors = script.communicate(timeout=250)
    assert script.returncode == 0, errors
    result = json.loads(output)
    print(f"kill points tried: {result['points']}")
    assert result["points"] >= 700
    for name, outcomes in result["found"].items():
        expected = {"old"} if name.startswith("sweep") else {"null", "new"} if " new" in name else {"old", "new"}
        expected = {"old", "null"} if name.startswith(("remove", "wipe")) else expected
        assert set(outcomes) == expected, name
        assert sum(outcomes.values()) > 20, name
