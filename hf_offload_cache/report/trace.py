"""A timeline as a file that https://ui.perfetto.dev and chrome://tracing show.

The format is the JSON array of Chrome's trace event format, written with `json` alone: packages that write it
(viztracer and others) trace Python's own calls, or hold all events in memory until the end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import ConfigError

# What a cache says about when it does what. Without `trace` nobody listens, and saying it costs next to nothing

NOTHING = nullcontext()
"""A span that nobody listens to: `with timeline.span(...) if timeline.on else NOTHING:` makes no call."""


class Timeline:
    """Told of spans of work and of waiting; this one forgets them. `Trace` writes them to a file.

    Times are `time.perf_counter()` seconds. `add` is for any thread; all else is for the thread that runs the model.
    A span on the decode path is one line, `with timeline.span("rank", layer_idx) if timeline.on else NOTHING:`.

    The seams on the model tell the steps: `begin_step`, for each block `enter_block`, `enter_attention`,
    `leave_attention`, `enter_rest`, and `end_step`.
    """

    on = False
    """Somebody listens: what takes time only to be told about can be left out otherwise."""

    def add(self, track: str, name: str, start: float, stop: float, **details: Any) -> None:
        """A span called `name` on the line `track` ("compute", "reads", "writes"), with JSON-able `details`, such as
        `bytes`. Spans of "compute" nest; those of another track may overlap, and get lines beside each other then."""

    def span(self, name: str, layer_idx: int | None = None) -> AbstractContextManager[None]:
        """A span on the line "compute" for as long as the block under it runs, also when that raises."""
        return NOTHING

    def count(self, name: str, **values: float) -> None:
        """Curves of `values`, which hold from now on."""

    # --- the steps ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A forward of the whole model begins. One that has not ended was interrupted."""

    def describe_step(self, name: str, **details: Any) -> None:
        """What the step under way is to be called, "prefill" or "decode", and what to say about it."""

    def enter_block(self, layer_idx: int) -> None:
        """A decoder block begins; it lasts until the next one begins or the step ends."""

    def enter_attention(self, layer_idx: int) -> None:
        """Its attention begins."""

    def leave_attention(self, layer_idx: int) -> None:
        """Its attention has ended; the cache looks ahead now, if it does."""

    def enter_rest(self, layer_idx: int) -> None:
        """The cache is done; the block goes on."""

    def end_step(self) -> None:
        """The forward has ended."""

    # --- the file ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The cache is constructed: from now on an earlier trace of that name is gone."""

    @property
    def failure(self) -> OSError | None:
        """Why nothing is recorded any more, if so."""
        return None

    def flush(self) -> None:
        """Hand over what is held back."""

    def close(self) -> None:
        """The end; what is told from now on is forgotten. Idempotent."""


NO_TIMELINE = Timeline()
"""For those who were given none."""


# The file of a trace: an array of JSON objects that is right at every moment but for the closing bracket

class TraceFile:
    """A trace file, opened and reserved against other traces. Its old content stays until the first `append`. From then
    on only its owner can access it (0600), because a trace reveals how long a text is and when it was read.

    For one thread at a time. A copy of it in a forked process does nothing.

    Attributes:
        failure: the error of a write; after it nothing is written, and the file ends with the last successful `append`.

    Raises `ConfigError` if `path` cannot be written; then nothing has changed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.failure: OSError | None = None
        self._process = os.getpid()
        self._size = 0  # bytes written
        self._fd: int | None
        self._fd, self._made = _open(self.path)

    @property
    def open(self) -> bool:
        """`close` has not been called."""
        return self._fd is not None

    @property
    def started(self) -> bool:
        """Something was written."""
        return self._size > 0

    def append(self, text: str) -> None:
        """Write all of `text` or nothing; an error is kept as `failure`."""
        if self._fd is None or self.failure is not None or os.getpid() != self._process:
            return
        data = memoryview(text.encode())
        done = 0
        try:
            if not self._size:
                os.fchmod(self._fd, 0o600)  # a file that was there may be open to others
                os.ftruncate(self._fd, 0)
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._size + done)
        except OSError as error:
            self.failure = error
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
        else:
            self._size += done

    def close(self, ending: str = "") -> None:
        """Append `ending`, and let the file go; where nothing was ever written, as it was before. Idempotent."""
        if self._fd is None:
            return
        if self._size:
            failure, self.failure = self.failure, None  # a disk that was full may have room for so little
            self.append(ending)
            self.failure = failure or self.failure
        elif self._made and os.getpid() == self._process:
            self.path.unlink(missing_ok=True)
        fd, self._fd = self._fd, None
        os.close(fd)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor for writing to the file at `path`, whose content is unchanged, and whether the file is new. A new
    file has mode 0600, whatever the umask. Links are not followed, because in a folder that others can write to, one
    could lead to a file of this user."""
    flags = os.O_WRONLY | os.O_NOFOLLOW
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe without a reader: refuse
    made = True
    try:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            made = False
            fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # EMLINK: on BSD
            raise ConfigError(
                f"trace {str(path)!r} is a symbolic link, which is not followed: give `trace` a file"
            ) from error
        raise ConfigError(
            f"trace {str(path)!r} cannot be written ({error.strerror}): "
            "give `trace` a file in a folder that exists and that you may write to"
        ) from error
    try:
        _check(fd, path, made)
    except BaseException:
        os.close(fd)
        raise
    return fd, made


def _check(fd: int, path: Path, made: bool) -> None:
    """Raises `ConfigError` unless the open file may hold a trace, and lets nobody else write one there."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"trace {str(path)!r} must be a file, and is a device or a pipe: give `trace` a file")
    if not made and found.st_uid != os.geteuid():
        raise ConfigError(
            f"trace {str(path)!r} belongs to another user, who could read the trace: give `trace` a file of your own"
        )
    if not _claim(fd):
        raise ConfigError(
            f"trace {str(path)!r} is being written by another cache: give each its own file, or close the other first"
        )
    if made:
        try:
            os.fchmod(fd, 0o600)  # the umask may have taken more
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"trace {str(path)!r} cannot be kept from other users there ({error.strerror}): give `trace` a file on "
                "another file system"
            ) from error


def _claim(fd: int) -> bool:
    """Keep other traces off the file until it is closed; False where one has it. No lock where there are none."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a file system without locks
        return True
    return True


COMPUTE = "compute"
"""The line of the thread that runs the model; the only one whose spans nest."""

_AT_ONCE = 64
"""Events whose text is made and written at a time."""

_Event = tuple[str, str, str, float, float, dict[str, Any]]  # phase, track, name, start, stop, details


class Trace(Timeline):
    """Writes what it is told to `path`, in pieces: at the end of each step, and whenever `MOST_EVENTS` are held.

    The file is complete after `close`. Before, or when the process dies, it lacks the closing bracket, which the format
    allows and both viewers take. It grows by about 130 bytes a span, in decoding some 40 KiB a step of 30 layers.
    Spans are of the host: on CUDA, compute is when kernels were launched.

    Writing takes place between steps, and shows as "write trace" when it does not. A write that fails ends the trace
    (`failure`), not the cache; the file ends with the last piece that was written whole.

    Args:
        path: a file that exists, whose content goes with `start`, or a new one in a folder that exists. No other
            trace may be writing to it.
        name: of the process that is traced, for the viewer.

    Raises `ConfigError` when `path` cannot be written; then nothing has changed.
    """

    MOST_EVENTS = 512
    HELD_BYTES = 320 * 1024
    """What `MOST_EVENTS` take at most, with the text of those that are being written; booked by who makes one."""

    on = True

    def __init__(self, path: str | os.PathLike[str], name: str = "hf_offload_cache") -> None:
        self._file = TraceFile(path)
        self._process = os.getpid()
        self._name = name
        self._origin = time.perf_counter()
        self._lock = threading.RLock()  # a garbage collection under it may close the cache on the same thread
        self._events: list[_Event] = []
        self._lanes: dict[str, list[tuple[int, float]]] = {}  # of each track: thread ids, and when they are free
        self._threads = 0
        self._steps = 0
        self._step: tuple[float, str, dict[str, Any]] | None = None
        self._block: tuple[int, float] | None = None
        self._attention: tuple[int, float] | None = None
        self._rest: tuple[int, float] | None = None
        self._latest = self._origin  # of what is known of the model's thread

    # --- what is told ------------------------------------------------------------------------------------------

    def add(self, track: str, name: str, start: float, stop: float, **details: Any) -> None:
        """See `Timeline.add`."""
        if track == COMPUTE:
            self._latest = max(self._latest, stop)
        self._take(("X", track, name, start, stop, details))

    def span(self, name: str, layer_idx: int | None = None) -> _Span:
        """See `Timeline.span`."""
        return _Span(self, name, layer_idx)

    def count(self, name: str, **values: float) -> None:
        """See `Timeline.count`."""
        now = time.perf_counter()
        self._take(("C", COMPUTE, name, now, now, values))

    def begin_step(self) -> None:
        """See `Timeline.begin_step`."""
        self._interrupt()
        self._steps += 1
        self._latest = time.perf_counter()
        self._step = (self._latest, "step", {})

    def describe_step(self, name: str, **details: Any) -> None:
        """See `Timeline.describe_step`."""
        if self._step is not None:
            self._step = (self._step[0], name, details)

    def enter_block(self, layer_idx: int) -> None:
        """See `Timeline.enter_block`."""
        now = time.perf_counter()
        self._leave_block(now)
        self._block, self._latest = (layer_idx, now), now

    def enter_attention(self, layer_idx: int) -> None:
        """See `Timeline.enter_attention`."""
        now = time.perf_counter()
        self._leave_rest(now)
        self._attention, self._latest = (layer_idx, now), now

    def leave_attention(self, layer_idx: int) -> None:
        """See `Timeline.leave_attention`."""
        self._leave_attention(time.perf_counter())

    def enter_rest(self, layer_idx: int) -> None:
        """See `Timeline.enter_rest`."""
        self._latest = time.perf_counter()
        self._rest = (layer_idx, self._latest)

    def end_step(self) -> None:
        """See `Timeline.end_step`. Writes what is held."""
        self._leave_step(time.perf_counter())
        self.flush()

    # --- the steps' spans --------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """What is open ended with the last that is known of the model's thread: nobody said more."""
        if self._step is not None:
            self._step[2]["interrupted"] = True
        self._leave_step(self._latest)

    def _leave_step(self, now: float) -> None:
        self._leave_block(now)
        if self._step is not None:
            (start, name, details), self._step = self._step, None
            self._take(("i", COMPUTE, f"step {self._steps}", start, start, {}))
            self.add(COMPUTE, name, start, now, step=self._steps, **details)

    def _leave_block(self, now: float) -> None:
        self._leave_attention(now)
        self._leave_rest(now)
        if self._block is not None:
            (layer_idx, start), self._block = self._block, None
            self.add(COMPUTE, f"layer {layer_idx}", start, now, layer=layer_idx)

    def _leave_attention(self, now: float) -> None:
        if self._attention is not None:
            (layer_idx, start), self._attention = self._attention, None
            self.add(COMPUTE, "attention", start, now, layer=layer_idx)

    def _leave_rest(self, now: float) -> None:
        if self._rest is not None:
            (layer_idx, start), self._rest = self._rest, None
            self.add(COMPUTE, "rest of block", start, now, layer=layer_idx)

    # --- the file ----------------------------------------------------------------------------------------------

    @property
    def failure(self) -> OSError | None:
        """See `Timeline.failure`."""
        return self._file.failure

    def start(self) -> None:
        """Empty the file and write its beginning. Idempotent."""
        with self._lock:
            if not self._file.started:
                names = {"name": "process_name", "ph": "M", "pid": self._process, "tid": 0}
                self._file.append("[\n" + json.dumps({**names, "args": {"name": self._name}}))

    def flush(self) -> None:
        """Write what is held."""
        with self._lock:
            if self._events:
                self._write()

    def close(self) -> None:
        """Write what is held and the closing bracket, and let the file go. Where nothing was recorded nor started, the
        file is as it was before."""
        with self._lock:
            if not self._file.open:
                return
            self._interrupt()
            self.flush()
            self._file.close("\n]\n")

    def _take(self, event: _Event) -> None:
        with self._lock:
            if not self._file.open or self._file.failure is not None:
                return
            self._events.append(event)
            if len(self._events) >= self.MOST_EVENTS:
                began = time.perf_counter()
                self._write()
                self._events.append(("X", "write trace", "write trace", began, time.perf_counter(), {}))

    def _write(self) -> None:
        events, self._events = self._events, []
        self.start()
        for first in range(0, len(events), _AT_ONCE):
            lines: list[str] = []
            for event in events[first : first + _AT_ONCE]:
                self._encode(event, lines)
            self._file.append("".join(lines))

    def _encode(self, event: _Event, lines: list[str]) -> None:
        phase, track, name, start, stop, details = event
        begin = round((start - self._origin) * 1e9)  # whole nanoseconds keep spans nested that were
        end = max(begin, round((stop - self._origin) * 1e9))
        thread = self._thread(track, start, stop, lines)
        parts = [f',\n{{"name":{json.dumps(name)},"ph":"{phase}","ts":{_microseconds(begin)}']
        if phase == "X":
            parts.append(f',"dur":{_microseconds(end - begin)},"cat":{json.dumps(track)}')
        elif phase == "i":
            parts.append(',"s":"p"')
        parts.append(f',"pid":{self._process},"tid":{thread}')
        if details:
            parts.append(f',"args":{_json(details)}')
        parts.append("}")
        lines.append("".join(parts))

    def _thread(self, track: str, start: float, stop: float, lines: list[str]) -> int:
        """The thread id of a line of `track` that is free from `start` on; a new one is named in `lines` first."""
        lanes = self._lanes.setdefault(track, [])
        for lane, (thread, free) in enumerate(lanes):
            if track == COMPUTE or free <= start:
                lanes[lane] = (thread, max(stop, free))
                return thread
        self._threads += 1
        thread = self._threads
        lanes.append((thread, stop))
        label = track if len(lanes) == 1 else f"{track} {len(lanes)}"
        order = 100 * list(self._lanes).index(track) + len(lanes)
        for name, value in (("thread_name", {"name": label}), ("thread_sort_index", {"sort_index": order})):
            line = {"name": name, "ph": "M", "pid": self._process, "tid": thread, "args": value}
            lines.append(",\n" + json.dumps(line))
        return thread


class _Span:
    """Adds itself on leaving."""

    __slots__ = ("_layer_idx", "_name", "_start", "_trace")

    def __init__(self, trace: Trace, name: str, layer_idx: int | None) -> None:
        self._trace = trace
        self._name = name
        self._layer_idx = layer_idx

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        details: dict[str, Any] = {} if self._layer_idx is None else {"layer": self._layer_idx}
        if kind is not None:
            details["raised"] = kind.__name__
        self._trace.add(COMPUTE, self._name, self._start, time.perf_counter(), **details)


def _microseconds(nanoseconds: int) -> str:
    sign = "-" if nanoseconds < 0 else ""
    return f"{sign}{abs(nanoseconds) // 1000}.{abs(nanoseconds) % 1000:03d}"


def _json(details: dict[str, Any]) -> str:
    try:
        return json.dumps(details, default=_plain, allow_nan=False)
    except ValueError:  # JSON has no such number
        return json.dumps({name: str(value) for name, value in details.items()})


def _plain(value: Any) -> Any:
    """numpy's and torch's scalars as Python's, anything else as text."""
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)
