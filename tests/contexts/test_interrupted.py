"""Ctrl-C at many places of open, save, fork and others: it stays Ctrl-C, and leaves no descriptor and no file behind.

No timer: a profile function raises it where it is to come, which is after a call in C or before a function of ours.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_contexts import CACHES, ids, key, model, prefilled, saved

import hf_offload_cache
from hf_offload_cache import ContextLibrary, DiskSwapCache, publish_context, verify

pytestmark = pytest.mark.usefixtures("nothing_stays")
PACKAGE = str(Path(hf_offload_cache.__file__).parent)
OPENING = ("open", "extend", "mmap", "dup")
"""Calls in C after which something may be open that nobody owns yet."""

Make = Callable[[Path], Any]


class Interrupt:
    """A profile function: raises `error` once, at place number `at` (None: nowhere), and counts the places."""

    def __init__(self, at: int | None, opening: bool, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.opening, self.error = at, opening, error
        self.places = 0
        self.functions: set[Any] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE) or not self.here(frame, event, argument):
            return
        self.places += 1
        if self.places == self.at:
            sys.setprofile(None)
            raise self.error

    def here(self, frame: Any, event: str, argument: Any) -> bool:
        if self.opening:
            return event == "c_return" and getattr(argument, "__name__", "") in OPENING
        if event != "call" or frame.f_code in self.functions:
            return False
        self.functions.add(frame.f_code)
        return True

    def run(self, do: Callable[[], Any]) -> BaseException | None:
        """What `do` raised; what it returned is closed."""
        gc.disable()  # a collection's callbacks raise nothing
        sys.setprofile(self)
        try:
            result = do()
        except BaseException as error:
            return error.with_traceback(None)
        finally:
            sys.setprofile(None)
            gc.enable()
        if hasattr(result, "close"):
            result.close()
        return None


def places(count: int, most: int) -> list[int]:
    """`most` of the places 1 to `count`, evenly, the first and the last among them."""
    return sorted({1 + (count - 1) * one // max(1, most - 1) for one in range(most)}) if count else []


def descriptors() -> Counter[str]:
    gc.collect()
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
        except OSError:  # of the listing itself
            continue
    return found


def temporary(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


OPERATIONS: dict[str, tuple[Make, Callable[[Any, Path], Any]]] = {
    "open": (lambda folder: None, lambda cache, folder: opened(folder)),
    "make": (lambda folder: None, lambda cache, folder: folder_class(folder)(model(), path=folder)),
    "save": (lambda folder: opened(folder), lambda cache, folder: cache.save(folder / "new", overwrite=True)),
    "fork": (lambda folder: opened(folder), lambda cache, folder: cache.fork()),
    "close": (lambda folder: opened(folder), lambda cache, folder: cache.close()),
    "library": (
        lambda folder: None,
        lambda cache, folder: ContextLibrary(folder / "library").open(ids(310), model(), path=folder)[0],  # type: ignore[index]
    ),
    "verify": (lambda folder: None, lambda cache, folder: verify(folder / "ctx").whole or 1 / 0),
    "publish": (
        lambda folder: opened(folder),
        lambda cache, folder: publish_context(cache, folder / "pub", overwrite=True, chunk_tokens=64),
    ),
}


def opened(folder: Path) -> Any:
    return folder_class(folder).open(folder / "ctx", model(), path=folder)


def folder_class(folder: Path) -> Any:
    return next(cls for cls in CACHES if cls.__name__ == folder.name)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A context and a library with one, by the cache that it is named after."""
    cls = request.param
    folder = tmp_path / cls.__name__
    folder.mkdir()
    saved(folder / "ctx", cls)
    with prefilled(cls) as cache:
        ContextLibrary(folder / "library").save(cache)
    return folder


def check(folder: Path, name: str, *, opening: bool, most: int, error: type[BaseException] = KeyboardInterrupt) -> int:
    """Interrupt operation `name` at `most` places; how many there are."""
    make, do = OPERATIONS[name]
    counting = Interrupt(None, opening)
    for _ in range(2):  # the second time everything is imported
        counting = Interrupt(None, opening)
        cache = make(folder)
        assert counting.run(lambda cache=cache: do(cache, folder)) is None  # type: ignore[misc]
        if cache is not None:
            cache.close()
    before = descriptors()
    for at in places(counting.places, most):
        cache = make(folder)
        interrupt = Interrupt(at, opening, error)
        raised = interrupt.run(lambda cache=cache: do(cache, folder))  # type: ignore[misc]
        assert type(raised) is error or interrupt.places < at, f"place {at} of {counting.places}: {raised!r}"
        if cache is not None:
            cache.close()
        cache = raised = None
        left = descriptors() - before
        assert not left, f"place {at} of {counting.places}: {left}"
        assert not temporary(folder) and verify(folder / "ctx").whole
    return counting.places


@pytest.mark.parametrize("name", ["open", "make", "save", "fork", "library", "verify"])
@pytest.mark.parametrize("folder", CACHES[:1], indirect=True)
def test_after_each_call_that_opens(folder: Path, name: str) -> None:
    assert check(folder, name, opening=True, most=12) > 0


@pytest.mark.parametrize("folder", CACHES[1:], indirect=True)
def test_after_each_call_that_opens_of_other_caches(folder: Path) -> None:
    assert check(folder, "open", opening=True, most=8) > 10


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("name", ["open", "save", "fork"])
@pytest.mark.parametrize("folder", CACHES[:1], indirect=True)
def test_before_some_functions(folder: Path, name: str, error: type[BaseException]) -> None:
    assert check(folder, name, opening=False, most=8, error=error) > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("folder", CACHES, indirect=True)
def test_everywhere(folder: Path, name: str) -> None:
    check(folder, name, opening=True, most=1000)
    check(folder, name, opening=False, most=1000)


def test_an_interrupted_save_leaves_the_old_context(tmp_path: Path) -> None:
    """Encrypted, and on the way over it: it is the old or the new one, in full."""
    saved(tmp_path / "ctx", encryption_key=key)
    count = None
    for at in (None, *range(1, 200, 14)):
        with DiskSwapCache.open(tmp_path / "ctx", model(), encryption_key=key) as cache:
            interrupt = Interrupt(at, opening=False)
            raised = interrupt.run(lambda cache=cache: cache.save(tmp_path / "ctx", overwrite=True))  # type: ignore[misc]
        count = interrupt.places if at is None else count
        assert count is not None and (raised is None) == (at is None or at > count)
        assert raised is None or type(raised) is KeyboardInterrupt
        assert verify(tmp_path / "ctx", key=key).whole and os.listdir(tmp_path) == ["ctx"]


def test_an_error_while_closing_does_not_take_the_place_of_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "ctx")

    def fails(self: Any) -> None:
        closing(self)
        raise OSError(5, "the device is gone")

    def interrupted(self: Any, *_: Any) -> None:
        raise KeyboardInterrupt

    closing = DiskSwapCache.close
    with monkeypatch.context() as patch:
        patch.setattr(DiskSwapCache, "close", fails)
        patch.setattr(DiskSwapCache, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            DiskSwapCache.open(tmp_path / "ctx", model())
        assert any("the device is gone" in note for note in caught.value.__notes__)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DiskSwapCache, "close", fails)
        with DiskSwapCache.open(tmp_path / "ctx", model()):
            raise KeyboardInterrupt
