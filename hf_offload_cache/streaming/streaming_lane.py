"""The lane that streams: claims cells, brings them, checks them, and keeps them until they are used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..errors import CorruptRecordError, DamagedObjectError, ObjectError, StoreError
from ..report.trace import Timeline
from ..stores.encryption import decrypt
from .answers import Answer, line_of, place_error
from .cells import Cells
from .codec import unpack, unpacked_bytes
from .plan import Cell
from .stream_manifest import StreamManifest, StreamObject, binding, digest
from .transport import Transport, run

# What has come over the network and is not used yet: as it came, in a file without a name

class Spool:
    """In the folder `directory`, on its disk; memory is taken for what is under way alone. Any thread."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        except OSError as error:
            raise StoreError(error.errno, f"a file for what is streamed: {error.strerror}") from error
        self._lock = threading.Lock()
        self._end = 0
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    def put(self, cell: tuple[int, int], data: bytes) -> None:
        """Raises `StoreError`."""
        with self._lock:
            place, self._end = self._end, self._end + len(data)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], place + written)
        except OSError as error:
            raise StoreError(error.errno, f"keeping what is streamed: {error.strerror}") from error
        self._places[cell] = place, len(data)

    def get(self, cell: tuple[int, int]) -> bytes:
        """What was put there last. Raises `StoreError`."""
        place, size = self._places[cell]
        pieces, missing = [], size
        try:
            while missing:
                piece = os.pread(self._file.fileno(), missing, place + size - missing)
                if not piece:
                    raise OSError(5, "the file is shorter than what was written")
                pieces.append(piece)
                missing -= len(piece)
        except OSError as error:
            raise StoreError(error.errno, f"reading what is streamed: {error.strerror}") from error
        return b"".join(pieces)

    def close(self) -> None:
        self._file.close()


# Cells that have come, as keys and values: decoded by a thread of its own, ahead of the one that takes them in

_AHEAD = 3
"""Cells that are decoded ahead of the one that is added."""
FEW = 128
"""Tokens of a cell that are decoded at a time within a limit of memory: whole groups."""


class UselessError(Exception):
    """What has come of a cell cannot be used."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.cell = cell


class Decoder:
    """Used by one thread; `close` ends its own.

    Args:
        sparing: within a limit of memory: a few tokens at a time, and nothing ahead but what is unpacked.
    """

    def __init__(self, manifest: StreamManifest, spool: Spool, key: bytes | None, *, sparing: bool) -> None:
        self._manifest, self._spool, self._key, self._sparing = manifest, spool, key, sparing
        self.seconds: list[float] = []
        """Of each cell that was decoded."""
        self._thread = ThreadPoolExecutor(1, "hf_offload_cache decoding")

    @property
    def nbytes(self) -> int:
        """Of a cell as it was unpacked, and of what is decoded of it, or ahead."""
        shape = self._manifest.shape(0)
        decoded = (0.5 if self._sparing else _AHEAD + 1.5) * shape.nbytes
        levels = (self._manifest.level, "lossless")  # what a level cannot keep is kept whole
        return max(unpacked_bytes(level, shape) for level in levels) + round(decoded)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def decoded(self, cells: Iterable[Cell | None]) -> Iterator[tuple[Cell, tuple[torch.Tensor, torch.Tensor]]]:
        """In their order, keys and values (heads, tokens, D) on the CPU. `cells` are asked for a few ahead, unless a
        None says that the next one takes time, and what that raises is raised here. Raises `UselessError`."""
        waiting: list[tuple[Cell, Future[Any]]] = []
        coming, ended = iter(cells), False
        try:
            while True:
                while len(waiting) < (1 if self._sparing else _AHEAD) and not ended:
                    try:
                        cell = next(coming)
                    except StopIteration:
                        ended = True
                        break
                    if cell is not None:
                        waiting.append((cell, self._thread.submit(self._decode, cell)))
                    elif waiting:
                        break
                if not waiting:
                    return
                cell, found = waiting.pop(0)
                if not self._sparing:
                    yield cell, found.result()
                    continue
                unpacked, tokens = found.result(), self._manifest.tokens_of(cell[0])
                del found
                for start in range(0, tokens, FEW):
                    yield cell, unpacked.decode(start, min(start + FEW, tokens))
                del unpacked
        finally:
            for _, left in waiting:
                left.cancel()

    def _decode(self, cell: Cell) -> Any:
        """Keys and values; within a limit of memory what they are decoded from."""
        chunk, layer = cell
        place, begun = f"chunk {chunk} layer {layer}", time.perf_counter()
        try:
            data: bytes = self._spool.get(cell)
            if self._key is not None:
                data = decrypt(self._key, data, binding(self._manifest.context, place))
            unpacked = unpack(data, self._manifest.shape(chunk), place, self._manifest.level)
            found = unpacked if self._sparing else unpacked.decode()
        except (CorruptRecordError, StoreError) as error:
            raise UselessError(cell) from error
        self.seconds.append(time.perf_counter() - begun)
        return found


_WINDOW = 2.0
"""Seconds that bandwidth is measured over."""
_FAILURES, _TRIES = 4, 2
"""Failures in a row after which the link counts as dead; tries after which a cell is computed."""
_IDLE = 0.02
_SILENCES, _SLOWEST = 6, 32768
"""An object may take so many times the silence, and as long as it takes at so many bytes a second."""


class StreamingLane:
    """A thread with its own event loop, from `start` to `stop`.

    Args:
        beside: objects fetched before all cells, by name: see `taken`.
        together: number of objects requested at a time: one is on its way while the next is requested.
        silence: seconds that a server may ask to wait; a link that asks for more counts as dead.
    """

    def __init__(
        self, manifest: StreamManifest, cells: Cells, transport: Callable[[], Transport], spool: Spool,
        timeline: Timeline, beside: dict[str, StreamObject], together: int = 2, silence: float = 10.0,
    ) -> None:  # fmt: skip
        self._manifest, self.cells, self._make, self._spool = manifest, cells, transport, spool
        self._timeline, self.together, self._silence = timeline, together, silence
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[Cell | str, asyncio.Future[bytes]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._tries = Counter[Cell]()
        self._wanted, self._beside = beside, dict[str, bytes]()
        self.beside = set(beside)
        """Names of those objects beside the cells that have neither come nor failed."""
        self._stopping = threading.Event()
        self._recent: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._failures = 0
        self._not_before = 0.0
        """When the server may be asked again, by `time.monotonic`."""
        self.received_bytes = 0
        self.began: float | None = None
        self.ended: float | None = None
        """Of what was streamed, when the first and the last bytes came, by `time.perf_counter`."""
        self.trouble: list[str] = []
        """What went wrong, a line each."""
        self._thread = threading.Thread(target=self._run, name="hf_offload_cache streaming", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What is under way is given up, connections are closed, and the thread ends."""
        self._stopping.set()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(self._give_up)
        if self._thread.ident is not None:
            self._thread.join()

    def cancel(self, cell: Cell) -> None:
        """Nobody waits for a cell any more. Any thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._cancel, cell)

    def taken(self, name: str) -> bytes | None:
        """What has come of an object beside the cells; once. Any thread."""
        return self._beside.pop(name, None)

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second that have come in the last seconds; None: too little has to tell."""
        with self._lock:
            now = time.perf_counter()
            while self._recent and self._recent[0][0] < now - _WINDOW:
                self._recent.popleft()
            total = sum(count for _, count in self._recent)
            since = max(now - _WINDOW, self.began or now)
        return total / (now - since) if now - since > 0.05 else None

    # --- in its thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            run(self._stream())
        except Exception as error:  # whatever it is: computing goes on without
            self.trouble.append(f"{type(error).__name__}: {error}")
        finally:
            self.beside.clear()
            self.cells.stop()

    async def _stream(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._stopping.is_set():
            return
        transport = self._make()
        try:
            beside = [self._wanted, *[dict[str, StreamObject]()] * (self.together - 1)]
            self._workers = [asyncio.ensure_future(self._worker(transport, first)) for first in beside]
            for found in await asyncio.gather(*self._workers, return_exceptions=True):
                if isinstance(found, Exception):
                    raise found
        finally:
            await transport.close()

    async def _worker(self, transport: Transport, beside: dict[str, StreamObject]) -> None:
        for name, found in beside.items():
            if self._stopping.is_set():
                return
            await self._bring_beside(transport, name, found)
        while not self._stopping.is_set() and self._failures < _FAILURES:
            if (wait := self._not_before - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            cell = self.cells.claim()
            if cell is None:
                if not self.cells.open:
                    return
                await asyncio.sleep(_IDLE)  # another's may come back
                continue
            await self._bring(transport, cell)

    async def _bring_beside(self, transport: Transport, name: str, found: StreamObject) -> None:
        try:
            self._beside[name] = await self._get(transport, found, name)
        except asyncio.CancelledError:
            return
        except Exception as error:
            self._note(error)
        finally:
            self.beside.discard(name)

    async def _get(self, transport: Transport, found: StreamObject, key: Cell | str) -> bytes:
        """Checked; can be cancelled by its `key`."""
        seconds = _SILENCES * self._silence + found.bytes / _SLOWEST
        task = asyncio.ensure_future(asyncio.wait_for(transport.get(found.name, found.bytes, self._came), seconds))
        self._tasks[key] = task
        try:
            data = await task
        except TimeoutError as error:
            raise place_error(Answer.LATER, f"{found.name} did not come within {seconds:g} s") from error
        finally:
            if self._tasks.get(key) is task:
                del self._tasks[key]
        if len(data) != found.bytes or digest(data) != found.name:
            text = f"{found.name} is not what it was when it was published"
            raise place_error(Answer.BROKEN, text, kind=DamagedObjectError)
        return data

    async def _bring(self, transport: Transport, cell: Cell) -> None:
        chunk, layer = cell
        found, begun = self._manifest.cells[chunk][layer], time.perf_counter()
        assert found is not None
        try:
            data = await self._get(transport, found, cell)
            self._spool.put(cell, data)
        except asyncio.CancelledError:
            self.cells.lose(cell)
        except Exception as error:
            self._note(error)
            await self._fail(cell, error)
        else:
            self._failures = 0
            self.cells.received(cell)
            told = f"chunk {chunk} layer {layer}"
            self._timeline.add("streaming", told, begun, time.perf_counter(), bytes=len(data))

    async def _fail(self, cell: Cell, error: Exception) -> None:
        """Ask for a cell once more, or leave it to computing, by what the store answered."""
        answer = error.answer if isinstance(error, ObjectError) else Answer.LATER
        if answer is Answer.ABSENT or isinstance(error, DamagedObjectError):
            self.cells.lose(cell)
            return
        self._failures += 1
        self._tries[cell] += 1
        wait = error.retry_after if isinstance(error, ObjectError) else None
        if wait is not None and wait > self._silence:
            self._failures = _FAILURES
        elif wait is not None:
            self._not_before = max(self._not_before, time.monotonic() + wait)
        else:
            await asyncio.sleep(min(0.1 * 2**self._failures, 1))
        again = answer is Answer.LATER and self._tries[cell] < _TRIES and self._failures < _FAILURES
        self.cells.lose(cell, again=again, unavailable=not again)

    def _came(self, count: int) -> None:
        now = time.perf_counter()
        with self._lock:
            self.began, self.ended = self.began or now, now
            self._recent.append((now, count))
            self.received_bytes += count
        self.cells.heard = time.monotonic()

    def _cancel(self, cell: Cell) -> None:
        if (task := self._tasks.get(cell)) is not None:
            task.cancel()

    def _give_up(self) -> None:
        for worker in self._workers:  # and with it what it waits for
            worker.cancel()

    def _note(self, error: Exception) -> None:
        text = error.strerror if isinstance(error, StoreError) else None
        self.trouble.append(line_of(text or f"{type(error).__name__}: {error}"))
