"""Contexts small enough to save a thousand times, and file systems that fail, interrupt or kill at the n-th call.

As a script (`python kill_points.py kill DIRECTORY`): kills a child at every call of every scenario, checks what is
left, and prints the number of kill points. One thread, and no torch: so that fork() is safe and quick.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_offload_cache.contexts import FileSystem, entries, read_small, reading, remove, sweep, write_file
from hf_offload_cache.contexts.publish import publish

MANIFEST = "manifest.json"
SHARED = b"the same in every version" * 7


class Quick(FileSystem):
    """Forces nothing to the disk: a killed process loses nothing that it handed to the kernel."""

    def fsync(self, fd: int) -> None:
        os.fstat(fd)


class NoExchange(Quick):
    def exchange(self, one: str, other: str, folder_fd: int) -> None:
        raise OSError(errno.ENOSYS, "cannot exchange names")


class NoLocks(Quick):
    def lock(self, fd: int, *, wait: bool = False) -> None:
        raise OSError(errno.ENOLCK, "has no locks")


class Neither(NoExchange, NoLocks):
    pass


class Steps:
    """Every call of a file system goes through `step`: here it counts, and calls."""

    def __init__(self, inner: FileSystem) -> None:
        self.inner = inner
        self.calls = 0
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            self.called.append(name)
            return self.step(name, lambda: getattr(self.inner, name)(*arguments, **keywords), arguments)

        return call

    def step(self, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        return call()


class Meanwhile(Steps):
    """Once, just before or after the first call named `at` that `when` is true of, `act` runs: as another process."""

    def __init__(
        self, inner: FileSystem, at: str, act: Callable[[], Any], *, after: bool = False,
        when: Callable[..., bool] = lambda *arguments: True,
    ) -> None:  # fmt: skip
        super().__init__(inner)
        self.at, self.act, self.after, self.when, self.done = at, act, after, when, False

    def step(self, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if name != self.at or self.done or not self.when(*arguments):
            return call()
        self.done = True
        found = call() if self.after else None
        self.act()
        return found if self.after else call()


class FailAt(Steps):
    """The call number `first` (and those up to `last`) raises `make_error()`; `after`: once it has had its effect."""

    def __init__(
        self, inner: FileSystem, first: int, make_error: Callable[[], BaseException], *, last: int | None = None,
        after: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(inner)
        self.first, self.last, self.make_error, self.after = first, last or first, make_error, after

    def step(self, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if not self.first <= self.calls <= self.last:
            return call()
        if self.after:
            result = call()
            if name == "open":
                result.close()
        elif name == "close":
            call()  # a descriptor is gone also when closing it fails
        raise self.make_error()


class ShortWrites(Steps):
    """Every write takes at most `most` bytes, every read gives at most as many."""

    def __init__(self, inner: FileSystem, most: int) -> None:
        super().__init__(inner)
        self.most = most

    def step(self, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if name == "write":
            return self.inner.write(arguments[0], arguments[1][: self.most])
        if name == "read":
            return self.inner.read(arguments[0], min(arguments[1], self.most))
        return call()


class KillAt(Steps):
    """The process is killed at point `point`: before each call, and with half of the bytes of each write written."""

    def __init__(self, inner: FileSystem, point: int) -> None:
        super().__init__(inner)
        self.point = point
        self.passed = 0

    def step(self, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        self._pass()
        if name == "write":
            if self.passed + 1 == self.point:
                self.inner.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            self._pass()
        return call()

    def _pass(self) -> None:
        self.passed += 1
        if self.passed == self.point:
            os.kill(os.getpid(), signal.SIGKILL)


def fails(number: int) -> Callable[[], OSError]:
    """What makes the error of this number, for `FailAt`."""
    return lambda: OSError(number, os.strerror(number))


def contents(version: str) -> dict[str, bytes]:
    """The files of a context: each names its version or is the same in all, and the manifest names all of them."""
    data = [f"{version} {part} ".encode() * 40 for part in range(2)] + [SHARED]
    files = {f"{hashlib.blake2b(piece, digest_size=16).hexdigest()}.records": piece for piece in data}
    state = f"{version} state".encode()
    files[f"{hashlib.blake2b(state, digest_size=16).hexdigest()}.state"] = state
    return {**files, MANIFEST: json.dumps({"version": version, "files": sorted(files)}).encode()}


def filling(version: str, file_system: Any) -> Callable[[int], None]:
    def fill(folder_fd: int) -> None:
        for name, data in contents(version).items():
            write_file(folder_fd, name, [data[:9], data[9:]], file_system=file_system)

    return fill


def save(target: Path, version: str, file_system: Any = None, *, overwrite: bool = True) -> None:
    file_system = file_system or Quick()
    publish(target, filling(version, file_system), overwrite=overwrite, file_system=file_system)


def read_version(folder_fd: int) -> str:
    """The version that an open context holds in full. `AssertionError` for a mixture; `OSError` for a missing file."""
    manifest = json.loads(read_small(folder_fd, MANIFEST, 10_000))
    expected = contents(manifest["version"])
    assert manifest["files"] == sorted(set(expected) - {MANIFEST})
    for name in manifest["files"]:
        assert read_small(folder_fd, name, 10_000) == expected[name], f"{name} is not of {manifest['version']}"
    return manifest["version"]


def version_of(target: Path) -> str | None:
    """The version that is at `target` in full; None: nothing is there at all."""
    return reading(target, read_version) if os.path.lexists(target) else None


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def temporaries(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".hf_offload_cache")]


def age(folder: Path) -> None:
    """Make every temporary folder in `folder` two days old."""
    for name in temporaries(folder):
        past = time.time() - 2 * 24 * 3600
        os.utime(folder / name, (past, past))


class Scenario:
    """What is there before, what the child does, and what may be there after it was killed.

    Args:
        locks: the file system has them; without, temporaries are swept only once they are a day old.
        exact: a context holds nothing but its own files after a kill.
    """

    def __init__(self, name: str, before: str | None, file_system: FileSystem, allowed: set[str | None]) -> None:
        self.name, self.before, self.file_system, self.allowed = name, before, file_system, allowed
        self.locks = not isinstance(file_system, NoLocks)
        self.exact = not isinstance(file_system, NoExchange)

    def prepare(self, folder: Path) -> None:
        if self.before is not None:
            save(folder / "ctx", self.before)

    def run(self, folder: Path, file_system: Any) -> None:
        save(folder / "ctx", "new", file_system, overwrite=self.before is not None)

    def check(self, folder: Path) -> str | None:
        """What is at the target. Raises `AssertionError` for anything that may not be."""
        target = folder / "ctx"
        found = version_of(target)
        assert found in self.allowed, f"{found} is at the target"
        assert entries(folder) == ([] if found is None else [target]), "an orphan is shown"
        if not self.locks:
            age(folder)
        sweep(folder, file_system=self.file_system)
        assert temporaries(folder) == [], "a temporary folder is left"
        assert version_of(target) == found, "sweeping changed the context"
        if found is not None and self.exact:
            assert names_in(target) == set(contents(found))
        save(target, "last", self.file_system)
        assert version_of(target) == "last"
        assert names_in(target) == set(contents("last")), "replacing leaves what it replaced"
        remove(target)
        assert names_in(folder) <= {"twin"}, "something is left behind"
        return found


class Removing(Scenario):
    """Files that were open before tell what was overwritten; a twin shares all of them but one."""

    def __init__(self, name: str, file_system: FileSystem, *, wipe: bool = False, twin: bool = False) -> None:
        super().__init__(name, "old", file_system, {"old", None})
        self.wipe, self.twin = wipe, twin
        self.open_fds: list[int] = []

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        if self.twin:
            (folder / "twin").mkdir()
            for name in contents("old"):
                os.link(folder / "ctx" / name, folder / "twin" / name)
        self.open_fds = [os.open(folder / "ctx" / name, os.O_RDONLY) for name in contents("old")]

    def run(self, folder: Path, file_system: Any) -> None:
        remove(folder / "ctx", wipe=self.wipe, file_system=file_system)

    def check(self, folder: Path) -> str | None:
        found = version_of(folder / "ctx")
        if not self.locks:
            age(folder)
        sweep(folder, file_system=self.file_system)
        kept = [os.pread(fd, 10_000, 0) for fd in self.open_fds]
        for fd in self.open_fds:
            os.close(fd)
        same = [data == expected for data, expected in zip(kept, contents("old").values(), strict=True)]
        if self.wipe and not self.twin and found is None:
            assert not any(same), "removed, and not overwritten"
        else:
            assert all(same), "overwritten, and not removed or shared"
        if self.twin:
            assert version_of(folder / "twin") == "old"
            remove(folder / "twin")
        return super().check(folder)


class Sweeping(Scenario):
    """What a killed saver and a killed wiper left, beside a context."""

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        for ending in ("partial", "wiping"):
            left = folder / f".hf_offload_cache-{'0' * 32}.{ending}"
            left.mkdir(mode=0o700)
            for name, data in contents("left").items():
                (left / name).write_bytes(data)
        if not self.locks:
            age(folder)

    def run(self, folder: Path, file_system: Any) -> None:
        assert sweep(folder, file_system=file_system) == 2


def scenarios() -> Iterator[Scenario]:
    for file_system in (Quick(), NoExchange(), NoLocks(), Neither()):
        how = type(file_system).__name__
        if not isinstance(file_system, NoExchange):  # what is new exchanges nothing
            yield Scenario(f"save new, {how}", None, file_system, {None, "new"})
        yield Scenario(f"overwrite, {how}", "old", file_system, {"old", "new"})
    for file_system in (Quick(), NoLocks()):
        how = type(file_system).__name__
        yield Removing(f"remove, {how}", file_system)
        yield Removing(f"wipe, {how}", file_system, wipe=True)
        yield Sweeping(f"sweep, {how}", "old", file_system, {"old"})
    yield Removing("wipe beside a twin", Quick(), wipe=True, twin=True)


def in_child(work: Callable[[], Any]) -> int:
    """How a child that did `work` ended: its exit status, or minus the signal. It is killed, or ends well."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the child ended with {status}"
    return status


def kill_everywhere(scenario: Scenario, folder: Path) -> Counter[str | None]:
    """What was at the target after a kill at each point in turn, until the child came to its end."""
    outcomes: Counter[str | None] = Counter()
    while True:
        point = sum(outcomes.values()) + 1
        try:
            scenario.prepare(folder)
            killer = KillAt(scenario.file_system, point)
            status = in_child(lambda: scenario.run(folder, killer))  # noqa: B023
            found = scenario.check(folder)
        except Exception as error:
            raise AssertionError(f"{scenario.name}, killed at point {point}") from error
        if status == 0:
            return outcomes
        outcomes[found] += 1


def main(command: str, *arguments: str) -> None:
    assert "torch" not in sys.modules, "fork() is not safe with torch's threads, and slow"
    if command == "kill":
        folder = Path(arguments[0])
        found = {scenario.name: dict(kill_everywhere(scenario, folder)) for scenario in scenarios()}
        print(json.dumps({"points": sum(sum(one.values()) for one in found.values()), "found": found}))
    elif command == "overwrite":
        target, version, times, how = arguments
        for _ in range(int(times)):
            save(Path(target), version, {"exchange": Quick, "in place": NoExchange}[how]())


def start_script(*arguments: str) -> subprocess.Popen[str]:
    """This file as a process of its own; `main` says which arguments it takes."""
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
