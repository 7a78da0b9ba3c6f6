"""Kills processes that save a real cache, at every system call of it, and looks at what is left.

As a script (`python crash_driver.py DIRECTORY STEP METHOD`): a child is forked for every STEP-th point of every
scenario, and killed there; prints how many there were. A script, because a process that forks must have no threads:
torch gets one.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kill_points import in_child
from saved_contexts import answer, feed, files_of, ids, prefilled, same
from saved_contexts import opened as opened_as

from hf_offload_cache.contexts import FileSystem, entries, sweep
from hf_offload_cache.contexts.listing import listing
from hf_offload_cache.registry import cache_class

CALLS = (
    "mkdir", "rmdir", "open", "close", "unlink", "rename", "link", "ftruncate", "fchmod", "chmod", "fsync", "fdatasync",
    "write", "pwrite",
)  # fmt: skip
"""Of the module os: those that change something on the disk, or a descriptor. Stores and contexts call them by name."""
MORE = 80
"""Tokens that the new context has more than the old one: some of its records are old ones, and some are not."""
BEGIN: dict[str, dict[str, Any]] = {
    "disk-swap": {"length": 64, "exact": True}, "abstract-tree": {"length": 160}, "cluster": {"length": 160},
}  # fmt: skip
"""What the old one is made with; the second has abstracts and replicas, and tables of both, the third clusters."""
METHOD = sys.argv[3] if len(sys.argv) > 3 else "disk-swap"


def opened(folder: Path) -> Any:
    return opened_as(folder, cache_class(METHOD))


class Killer:
    """In this process: the call number `point` of those to `CALLS`, or to exchange names, is not made: SIGKILL.

    A write at that point puts half of its bytes there. Nothing is forced to the disk: a process that is killed loses
    nothing that it gave to the kernel. `point` 0 only counts.
    """

    def __init__(self, point: int, *, exchange: bool, link: bool) -> None:
        self.point, self.calls = point, 0
        self.names: Counter[str] = Counter()
        for name in CALLS:
            if hasattr(os, name):
                setattr(os, name, self._wrap(name, (lambda *_: None) if "sync" in name else getattr(os, name)))
        FileSystem.exchange = self._wrap("exchange", FileSystem.exchange if exchange else _refuse)  # type: ignore[method-assign]
        if not link:
            os.link = self._wrap("link", _refuse)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            self.names[name] += 1
            if self.calls == self.point:
                if "write" in name:
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:], **keywords)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return counted


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, "not here")


class Scenario:
    """`overwrite`: there is a context. `exchange`, `link`: the file system can do that."""

    def __init__(self, name: str, *, overwrite: bool, exchange: bool = True, link: bool = True) -> None:
        self.name, self.overwrite, self.exchange, self.link = name, overwrite, exchange, link


SCENARIOS = (
    Scenario("new", overwrite=False),
    Scenario("new, copied", overwrite=False, link=False),
    Scenario("overwrite", overwrite=True),
    Scenario("overwrite in place", overwrite=True, exchange=False),
)


def save_new(base: Path, target: Path, scenario: Scenario, point: int) -> None:
    """In a child: open the old context, go on, and save that as `target`; killed at `point`."""
    cache = opened(base)
    feed(cache, ids(MORE, seed=9))
    killer = Killer(point, exchange=scenario.exchange, link=scenario.link)
    cache.save(target, overwrite=scenario.overwrite)
    os.write(2, f"{scenario.name}: {killer.calls} {dict(killer.names)}\n".encode())


class Expected:
    """What the old and the new context hold and answer."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.known = {}
        with opened(base) as cache:
            cache.fork().close()
            feed(cache, ids(MORE, seed=9))
            cache.save(folder)
        for name, place in (("old", base), ("new", folder)):
            with opened(place) as cache:
                self.known[name] = cache.input_ids, answer(cache, 1)
        assert self.known["old"][0].shape[1] + MORE == self.known["new"][0].shape[1]

    def which(self, target: Path) -> str:
        """"old" or "new", in full. Raises `AssertionError`, or what opening does."""
        with opened(target) as cache:
            held, found = cache.input_ids, answer(cache, 1)
        known = self.known.items()
        fits = [name for name, (tokens, reply) in known if torch.equal(tokens, held) and same(reply, found)]
        assert len(fits) == 1, "a mixture of the old and the new context"
        return fits[0]


def check(folder: Path, scenario: Scenario, expected: Expected) -> str:
    """What is at the target now: "old", "new" or "nothing". Raises `AssertionError` for what may not be."""
    target = folder / "target"
    there = os.path.lexists(target)
    assert there or not scenario.overwrite, "a gap"
    found = expected.which(target) if there else "nothing"
    before = {path.name: path.stat().st_ino for path in target.iterdir()} if there else {}
    shown = [target] if there else []
    assert entries(folder) == shown and [entry.path for entry in listing(folder)] == shown, "an orphan is shown"
    sweep(folder)
    assert sorted(os.listdir(folder)) == [path.name for path in shown], "something is left behind"
    if there:
        assert {path.name: path.stat().st_ino for path in target.iterdir()} == before, "sweeping changed it"
        if scenario.exchange:
            assert set(os.listdir(target)) == set(files_of(target).values()), "a file that no manifest names"
    return found


def kill_everywhere(folder: Path, base: Path, scenario: Scenario, expected: Expected, step: int) -> Counter[str]:
    """What was at the target after a kill at every `step`-th point, until the child came to its end, and six times as
    often among the last ones: what comes after the new context is in its place is short."""
    outcomes: Counter[str] = Counter()

    def killed(point: int) -> bool:
        here = folder / f"{point}"
        here.mkdir()
        source = base
        if scenario.overwrite:  # the context that is replaced is the one that is open
            source = here / "target"
            source.mkdir(mode=0o700)
            for path in base.iterdir():
                os.link(path, source / path.name)
        try:
            status = in_child(lambda: save_new(source, here / "target", scenario, point))
            found = check(here, scenario, expected)
        except Exception as error:
            error.add_note(f"{scenario.name}, killed at point {point}")
            raise
        if status:
            outcomes[found] += 1
        else:
            assert found == "new"
        return bool(status)

    point = 1
    while killed(point):
        point += step
    for missed in range(point - 1, max(0, point - step), -max(1, step // 6)):
        killed(missed)
    return outcomes


def main(place: str, step: str, method: str) -> None:
    torch.set_num_threads(1)
    folder = Path(place)
    with prefilled(cls=cache_class(method), **BEGIN[method]) as cache:
        cache.save(folder / "base")
    expected = Expected(folder / "base", folder / "expected")
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all that was imported
    found = {}
    for number, scenario in enumerate(SCENARIOS):
        (folder / f"{number}").mkdir()
        found[scenario.name] = dict(
            kill_everywhere(folder / f"{number}", folder / "base", scenario, expected, int(step))
        )
    print(json.dumps({"points": sum(sum(one.values()) for one in found.values()), "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
