"""Timelines, and traces: timelines in a file that https://ui.perfetto.dev and chrome://tracing show.

The file is a JSON array in Chrome's trace event format. `json` writes it: packages for that format (viztracer and
others) trace Python's own calls, or keep all events in memory until the end.
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

NOTHING = nullcontext()
"""A span that nobody records: `with timeline.span(...) if timeline.on else NOTHING:` makes no call."""


class Timeline:
    """Receives spans of work and of waiting, and forgets them; `Trace` writes them to a file.

    Times are `time.perf_counter()` seconds. `add` is for any thread; all else is for the thread that runs the model.
    A span on the decode path is one line, `with timeline.span("rank", layer_idx) if timeline.on else NOTHING:`.

    The hooks on the model report steps: `begin_step`, for each block `enter_block`, `enter_attention`,
    `leave_attention`, `enter_rest`, and `end_step`.
    """

    on = False
    """Whether spans are recorded. If not, callers may skip work that only serves them."""

    def add(self, track: str, name: str, start: float, stop: float, **details: Any) -> None:
        """Record a span on the line `track` ("compute", "reads", "writes"), with `details` for JSON, such as `bytes`.
        Spans of "compute" nest; those of other tracks may overlap, and are then shown on separate lines."""

    def span(self, name: str, layer_idx: int | None = None) -> AbstractContextManager[None]:
        """A span on the line "compute" around the `with` block, also if that raises."""
        return NOTHING

    def count(self, name: str, **values: float) -> None:
        """Record curves of `values`, which are valid from now on."""

    # --- the steps ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a forward of the complete model; a step that has not ended was interrupted."""

    def describe_step(self, name: str, **details: Any) -> None:
        """Name the current step, "prefill" or "decode", and add details."""

    def enter_block(self, layer_idx: int) -> None:
        """Begin a decoder block, which lasts until the next one or the step's end."""

    def enter_attention(self, layer_idx: int) -> None:
        """Begin the block's attention."""

    def leave_attention(self, layer_idx: int) -> None:
        """End the block's attention; the cache may look ahead now."""

    def enter_rest(self, layer_idx: int) -> None:
        """Begin the part of the block that follows the cache's work."""

    def end_step(self) -> None:
        """End the forward."""

    # --- the file ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin recording; an earlier trace of that name is lost from now on."""

    @property
    def failure(self) -> OSError | None:
        """The error that ended the recording, if any."""
        return None

    def flush(self) -> None:
        """Write what is buffered."""

    def close(self) -> None:
        """End the recording. Idempotent."""


NO_TIMELINE = Timeline()
"""The timeline of caches without a trace."""


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
                f"trace {str(path)!r} is a symbolic link, which is not followed: set trace to a file"
            ) from error
        raise ConfigError(
            f"trace {str(path)!r} cannot be written ({error.strerror}): "
            "set trace to a file in an existing folder that you can write to"
        ) from error
    try:
        _check(fd, path, made)
    except BaseException:
        os.close(fd)
        raise
    return fd, made


def _check(fd: int, path: Path, made: bool) -> None:
    """Raise `ConfigError` unless the open file can hold a trace, and lock it against other traces."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"trace {str(path)!r} must be a file, but is a device or a pipe: set trace to a file")
    if not made and found.st_uid != os.geteuid():
        raise ConfigError(
            f"trace {str(path)!r} belongs to another user, who could read the trace: set trace to a file of your own"
        )
    if not _claim(fd):
        raise ConfigError(
            f"trace {str(path)!r} is in use by another cache: set one file per cache, or close the other first"
        )
    if made:
        try:
            os.fchmod(fd, 0o600)  # the umask may have taken more
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"trace {str(path)!r} cannot be hidden from other users there ({error.strerror}): set trace to a file "
                "on another file system"
            ) from error


def _claim(fd: int) -> bool:
    """Lock the file until it is closed. False: another trace has the lock. File systems without locks have none."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a file system without locks
        return True
    return True


COMPUTE = "compute"
"""The track of the thread that runs the model; the only one whose spans nest."""

_AT_ONCE = 64
"""Events encoded and written at once."""

_Event = tuple[str, str, str, float, float, dict[str, Any]]  # phase, track, name, start, stop, details


class Trace(Timeline):
    """Writes a timeline to `path`: after each step, and whenever `MOST_EVENTS` are buffered.

    The file is complete after `close`. Until then, or if the process dies, it lacks the closing bracket, which the
    format allows and both viewers accept. It grows by about 130 bytes per span: in decoding, some 40 KiB per step of 30
    layers. Spans are the host's: on CUDA, compute shows when kernels were launched. Only the owner can access the file
    (0600), because a trace reveals how long a text is and when it was read. A copy in a forked process does nothing.

    Events are written between steps; otherwise the write is a span "write trace". A failed write ends the trace
    (`failure`), not the cache; the file then ends with the last complete piece.

    Args:
        path: an existing file, whose content is lost at `start`, or a new one in an existing folder. No other trace may
            be writing to it.
        name: name of the process in the viewer.

    Raises `ConfigError` if `path` cannot be written; then nothing has changed.
    """

    MOST_EVENTS = 512
    HELD_BYTES = 320 * 1024
    """Upper bound on the memory of `MOST_EVENTS` and of the text being written; the trace's creator books it."""

    on = True

    def __init__(self, path: str | os.PathLike[str], name: str = "hf_offload_cache") -> None:
        self._path = Path(path)
        self._fd: int | None
        self._fd, self._made = _open(self._path)
        self._size = 0  # bytes written
        self._failure: OSError | None = None
        self._process = os.getpid()
        self._name = name
        self._origin = time.perf_counter()
        self._lock = threading.RLock()  # a garbage collection under it may close the cache on the same thread
        self._events: list[_Event] = []
        self._lanes: dict[str, list[tuple[int, float]]] = {}  # track -> thread ids, and when each is free
        self._threads = 0
        self._steps = 0
        self._step: tuple[float, str, dict[str, Any]] | None = None
        self._spans: dict[str, tuple[int, float]] = {}  # begun in this block: layer and start
        self._latest = self._origin  # latest known time on the model's thread

    def add(self, track: str, name: str, start: float, stop: float, **details: Any) -> None:
        if track == COMPUTE:
            self._latest = max(self._latest, stop)
        self._take(("X", track, name, start, stop, details))

    def span(self, name: str, layer_idx: int | None = None) -> _Span:
        return _Span(self, name, layer_idx)

    def count(self, name: str, **values: float) -> None:
        now = time.perf_counter()
        self._take(("C", COMPUTE, name, now, now, values))

    # --- the steps ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._interrupt()
        self._steps += 1
        self._latest = time.perf_counter()
        self._step = (self._latest, "step", {})

    def describe_step(self, name: str, **details: Any) -> None:
        if self._step is not None:
            self._step = (self._step[0], name, details)

    def enter_block(self, layer_idx: int) -> None:
        now = time.perf_counter()
        self._leave(now, "attention", "rest of block", "layer")
        self._enter("layer", layer_idx, now)

    def enter_attention(self, layer_idx: int) -> None:
        now = time.perf_counter()
        self._leave(now, "rest of block")
        self._enter("attention", layer_idx, now)

    def leave_attention(self, layer_idx: int) -> None:
        self._leave(time.perf_counter(), "attention")

    def enter_rest(self, layer_idx: int) -> None:
        self._enter("rest of block", layer_idx, time.perf_counter())

    def end_step(self) -> None:
        self._leave_step(time.perf_counter())
        self.flush()

    def _interrupt(self) -> None:
        """End open spans at the latest known time of the model's thread."""
        if self._step is not None:
            self._step[2]["interrupted"] = True
        self._leave_step(self._latest)

    def _leave_step(self, now: float) -> None:
        self._leave(now, "attention", "rest of block", "layer")
        if self._step is not None:
            (start, name, details), self._step = self._step, None
            self._take(("i", COMPUTE, f"step {self._steps}", start, start, {}))
            self.add(COMPUTE, name, start, now, step=self._steps, **details)

    def _enter(self, span: str, layer_idx: int, now: float) -> None:
        self._spans[span], self._latest = (layer_idx, now), now

    def _leave(self, now: float, *spans: str) -> None:
        for span in spans:
            if span in self._spans:
                layer_idx, start = self._spans.pop(span)
                self.add(COMPUTE, f"layer {layer_idx}" if span == "layer" else span, start, now, layer=layer_idx)

    # --- the file ----------------------------------------------------------------------------------------------

    @property
    def failure(self) -> OSError | None:
        return self._failure

    def start(self) -> None:
        """Empty the file and write its beginning. Idempotent."""
        with self._lock:
            if not self._size:
                names = {"name": "process_name", "ph": "M", "pid": self._process, "tid": 0}
                self._append("[\n" + json.dumps({**names, "args": {"name": self._name}}))

    def flush(self) -> None:
        with self._lock:
            if self._events:
                self._write()

    def close(self) -> None:
        """Write what is buffered and the closing bracket. If nothing was recorded or started, the file stays as it was.
        """
        with self._lock:
            if self._fd is None:
                return
            self._interrupt()
            self.flush()
            if self._size:
                failure, self._failure = self._failure, None  # a full disk may have room for the bracket
                self._append("\n]\n")
                self._failure = failure or self._failure
            elif self._made and os.getpid() == self._process:
                self._path.unlink(missing_ok=True)
            fd, self._fd = self._fd, None
            os.close(fd)

    def _take(self, event: _Event) -> None:
        with self._lock:
            if self._fd is None or self._failure is not None:
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
            self._append("".join(lines))

    def _append(self, text: str) -> None:
        """Write all of `text` or nothing; stores an error as the failure."""
        if self._fd is None or self._failure is not None or os.getpid() != self._process:
            return
        data = memoryview(text.encode())
        done = 0
        try:
            if not self._size:
                os.fchmod(self._fd, 0o600)  # an existing file may be open to others
                os.ftruncate(self._fd, 0)
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._size + done)
        except OSError as error:
            self._failure = error
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
        else:
            self._size += done

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
        """Thread id of a line of `track` that is free from `start` on; `lines` gets the name of a new one."""
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
    """A `with` block that adds its span when it ends."""

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
    """numpy's and torch's scalars as Python numbers, other values as text."""
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)
