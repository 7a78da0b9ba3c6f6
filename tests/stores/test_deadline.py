"""How long a device is waited for: the rule, and the calls that it goes into. Time is given, never passed."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from hf_offload_cache.stores import EXIT_SECONDS, Deadline, has_passed, seconds_left
from hf_offload_cache.stores import base as deadline
from hf_offload_cache.stores.uring import queues as io_uring

NOW = 1000.0


@pytest.fixture(autouse=True)
def set_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`time.monotonic` stands still."""

    def set_to(seconds: float) -> None:
        monkeypatch.setattr(deadline.time, "monotonic", lambda: seconds)

    set_to(NOW)
    return set_to


def test_after_a_stall_none_until_there_is_an_answer() -> None:
    for seconds, usual in ((60.0, NOW + 60), (None, None)):
        waiting = Deadline(seconds)
        assert waiting.expires() == usual
        error = waiting.missed("layer 3: reading record 4")
        assert error.errno == errno.ETIMEDOUT and str(error).count("layer 3: reading record 4: no answer for") == 1
        assert waiting.stalled and waiting.expires() == NOW
        waiting.answered()
        assert not waiting.stalled and waiting.expires() == usual


@pytest.mark.parametrize("seconds", [60.0, 0.05, None])
def test_the_end_of_the_interpreter_is_not_held_up(seconds: float | None) -> None:
    waiting = Deadline(seconds)
    waiting.shorten_for_exit()
    assert waiting.expires() == NOW + EXIT_SECONDS
    waiting.missed()
    assert waiting.expires() == NOW


def test_what_is_left_of_a_deadline(set_time: Callable[[float], None]) -> None:
    assert seconds_left(None, 0.5) == 0.5 and not has_passed(None)
    assert seconds_left(NOW + 2, 0.5) == 0.5 and not has_passed(NOW + 2)
    assert seconds_left(NOW + 0.25, 0.5) == 0.25
    set_time(NOW + 0.25)
    assert seconds_left(NOW + 0.25, 0.5) == 0 and has_passed(NOW + 0.25)
    set_time(NOW + 1)
    assert seconds_left(NOW + 0.25, 0.5) == 0 and has_passed(NOW + 0.25)


# --------------------------------------------------------------------------------------------------- the kernel's call


class Calls:
    """Stands for `io_uring.enter` and `select.poll`; answers `answer`, with the errno `number`."""

    def __init__(self, answer: int = 3, number: int = 0) -> None:
        self.answer, self.number = answer, number
        self.entered: list[tuple[int, ...]] = []
        self.times: list[tuple[int, int]] = []
        self.polled: list[float] = []

    def enter(self, fd: int, submit: int, wanted: int, flags: int, argument: int = 0, argument_bytes: int = 0) -> int:
        self.entered.append((fd, submit, wanted, flags, argument_bytes))
        if argument:
            at = ctypes.c_uint64.from_address(argument + 16).value
            self.times.append((ctypes.c_int64.from_address(at).value, ctypes.c_int64.from_address(at + 8).value))
        ctypes.set_errno(self.number)
        return self.answer

    def register(self, fd: int, events: int) -> None:
        assert fd == 7

    def poll(self, milliseconds: float) -> list[Any]:
        self.polled.append(milliseconds)
        return []


def waiter(calls: Calls, monkeypatch: pytest.MonkeyPatch, timed: bool) -> io_uring.Waiter:
    monkeypatch.setattr(io_uring, "enter", calls.enter)
    monkeypatch.setattr(io_uring.select, "poll", lambda: calls)
    return io_uring.Waiter(7, io_uring.Parameters(features=1 << 8 if timed else 0))


@pytest.mark.parametrize("timed", [True, False])
def test_a_wait_without_a_limit(monkeypatch: pytest.MonkeyPatch, timed: bool) -> None:
    calls = Calls()
    assert waiter(calls, monkeypatch, timed).wait(2, 5, None) == 3
    assert calls.entered == [(7, 2, 5, 1, 0)] and not calls.polled


@pytest.mark.parametrize("ahead", [0.25, 60.5, -4.0])
def test_a_wait_with_a_limit(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    calls = Calls()
    assert waiter(calls, monkeypatch, True).wait(2, 5, NOW + ahead) == 3
    assert calls.entered == [(7, 2, 5, 1 | 8, 24)], "waits (1), with an argument (8)"
    expected = max(0.0, ahead)
    assert calls.times == [(int(expected), int(expected % 1 * 10**9))]
    for number, answer in ((errno.ETIME, 0), (errno.EINTR, -1)):  # the limit is no error, and others are
        assert waiter(Calls(-1, number), monkeypatch, True).wait(0, 1, NOW + 1) == answer


@pytest.mark.parametrize("submit", [0, 2])
def test_an_old_kernel_is_polled(monkeypatch: pytest.MonkeyPatch, submit: int) -> None:
    calls = Calls()
    assert waiter(calls, monkeypatch, False).wait(submit, 5, NOW + 1.5) == (3 if submit else 0)
    assert calls.entered == ([(7, 2, 0, 0, 0)] if submit else []) and calls.polled == [1500.0]
    failing = Calls(-1, errno.EBUSY)
    assert waiter(failing, monkeypatch, False).wait(2, 5, NOW + 1.5) == -1
    assert not failing.polled


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENOMEM, "ulimit -l"), (errno.EPERM, "seccomp"), (errno.EIO, "Input/output")],
)
def test_the_kernel_gives_no_ring(monkeypatch: pytest.MonkeyPatch, number: int, says: str) -> None:
    def refuse(*_: Any) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(io_uring, "_system_call", lambda: refuse)
    with pytest.raises(OSError, match=f"io_uring refused: .*{says}") as caught:
        io_uring.open_ring(4)
    assert caught.value.errno == number


def test_a_program_that_is_started_gets_no_ring() -> None:
    try:
        descriptor, _ = io_uring.open_ring(4)
    except OSError as error:
        pytest.skip(str(error))
    with descriptor as fd:
        assert not os.get_inheritable(fd)
