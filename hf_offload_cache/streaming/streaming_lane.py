"""The streaming lane: a thread that claims cells, fetches and checks them, and keeps them in a file."""

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


class Spool:
    """Received objects that are not used yet, in a file without a name in `directory`. Any thread. Raises
    `StoreError`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        with _store_errors("a file for streamed data"):
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()
        self._end = 0
        self._places: dict[Cell, tuple[int, int]] = {}

    def put(self, cell: Cell, data: bytes) -> None:
        with self._lock:
            place, self._end = self._end, self._end + len(data)
        written = 0
        with _store_errors("keeping streamed data"):
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], place + written)
        self._places[cell] = place, len(data)

    def get(self, cell: Cell) -> bytes:
        """The bytes that were put there last."""
        place, size = self._places[cell]
        pieces, missing = [], size
        with _store_errors("reading streamed data"):
            while missing:
                piece = os.pread(self._file.fileno(), missing, place + size - missing)
                if not piece:
                    raise OSError(5, "the file is shorter than what was written")
                pieces.append(piece)
                missing -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _store_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(error.errno, f"{doing}: {error.strerror}") from error


_AHEAD = 3
"""Cells decoded ahead of the one that is added."""
FEW = 128
"""Tokens of a cell that are decoded at a time under a memory limit: complete groups."""


class UselessError(Exception):
    """A received cell cannot be used; `__cause__` says why."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.cell = cell


class Decoder:
    """Decodes received cells in a thread of its own, ahead of the one thread that uses it.

    Args:
        tokens: tokens of the context to decode, from the first one on: the last chunk may have more of them.
        sparing: under a memory limit: decode a few tokens at a time, and only unpack ahead.
    """

    def __init__(
        self, manifest: StreamManifest, spool: Spool, key: bytes | None, tokens: int, *, sparing: bool
    ) -> None:
        self._manifest, self._spool, self._key, self._sparing = manifest, spool, key, sparing
        self._tokens = tokens
        self.seconds: list[float] = []
        """Decoding time of each cell."""
        self._thread = ThreadPoolExecutor(1, "hf_offload_cache decoding")

    @property
    def nbytes(self) -> int:
        """Bytes of an unpacked cell, and of the cells decoded from it or ahead."""
        shape = self._manifest.largest
        decoded = (0.5 if self._sparing else _AHEAD + 1.5) * shape.nbytes
        levels = (self._manifest.level, "lossless")  # a chunk that the level cannot encode is lossless
        return max(unpacked_bytes(level, shape) for level in levels) + round(decoded)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def decoded(self, cells: Iterable[Cell | None]) -> Iterator[tuple[Cell, list[torch.Tensor]]]:
        """In the order of `cells`, each one's keys and values (heads, tokens, D) on the CPU, and an indexer's keys (1,
        tokens, D) if its layer has one. A few cells are taken from `cells` in advance; None stops that, because the
        next one will take time. Raises `UselessError`, and what `cells` raises."""
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
                cell, result = waiting.pop(0)
                if not self._sparing:
                    yield cell, result.result()
                    continue
                unpacked, tokens = result.result(), self._manifest.tokens_of(cell[0], self._tokens)
                del result
                for start in range(0, tokens, FEW):
                    yield cell, unpacked.decode(start, min(start + FEW, tokens))
                del unpacked
        finally:
            for _, left in waiting:
                left.cancel()

    def _decode(self, cell: Cell) -> Any:
        """Keys and values; under a memory limit, the unpacked object."""
        chunk, layer = cell
        place, begun = f"chunk {chunk} layer {layer}", time.perf_counter()
        try:
            data: bytes = self._spool.get(cell)
            if self._key is not None:
                data = decrypt(self._key, data, binding(self._manifest.context, place))
            unpacked = unpack(data, self._manifest.shape(chunk, layer), place, self._manifest.level)
            result = unpacked if self._sparing else unpacked.decode(0, self._manifest.tokens_of(chunk, self._tokens))
        except (CorruptRecordError, StoreError) as error:
            raise UselessError(cell) from error
        self.seconds.append(time.perf_counter() - begun)
        return result


_WINDOW = 2.0
"""Seconds that bandwidth is measured over."""
_FAILURES, _TRIES = 4, 2
"""Consecutive failures after which the link counts as dead; tries after which a cell is computed."""
_IDLE = 0.02
_SILENCES, _SLOWEST = 6, 32768
"""An object's time limit: this many times `silence`, plus its transfer at this many bytes a second."""


class StreamingLane:
    """A thread with its own event loop, from `start` to `stop`.

    Args:
        extra_objects: objects fetched before all cells, by name: see `taken`.
        together: number of simultaneous requests.
        silence: longest wait, in seconds, that a server may ask for; a link that asks for more counts as dead.

    Attributes:
        pending_objects: names of the `extra_objects` that have neither arrived nor failed.
        began: when the first bytes arrived, by `time.perf_counter`; `ended`: the last ones.
        trouble: failures, a line each.
    """

    def __init__(
        self, manifest: StreamManifest, cells: Cells, transport: Callable[[], Transport], spool: Spool,
        timeline: Timeline, extra_objects: dict[str, StreamObject], together: int = 2, silence: float = 10.0,
    ) -> None:  # fmt: skip
        self._manifest, self.cells, self._make, self.spool = manifest, cells, transport, spool
        self._timeline, self.together, self._silence = timeline, together, silence
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[Cell | str, asyncio.Future[bytes]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._tries = Counter[Cell]()
        self._wanted, self._received_objects = extra_objects, dict[str, bytes]()
        self.pending_objects = set(extra_objects)
        self._stopping = threading.Event()
        self._recent: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._failures = 0
        self._not_before = 0.0  # when the server may be asked again, by `time.monotonic`
        self.received_bytes = 0
        self.began: float | None = None
        self.ended: float | None = None
        self.trouble: list[str] = []
        self._thread = threading.Thread(target=self._run, name="hf_offload_cache streaming", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel all transfers, close connections, and wait for the thread to end."""
        self._stopping.set()
        self._in_loop(lambda: [worker.cancel() for worker in self._workers])
        if self._thread.ident is not None:
            self._thread.join()

    def cancel(self, cell: Cell) -> None:
        """Cancel a cell's transfer. Any thread."""
        self._in_loop(lambda: self._tasks[cell].cancel() if cell in self._tasks else None)

    def _in_loop(self, call: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(call)

    def taken(self, name: str) -> bytes | None:
        """An arrived object of `extra_objects`, once. Any thread."""
        return self._received_objects.pop(name, None)

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second over the last seconds; None: not enough has arrived to tell."""
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
        except Exception as error:  # of any kind: computing continues without the network
            self.trouble.append(f"{type(error).__name__}: {error}")
        finally:
            self.pending_objects.clear()
            self.cells.stop()

    async def _stream(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._stopping.is_set():
            return
        transport = self._make()
        try:
            objects = [self._wanted, *[dict[str, StreamObject]()] * (self.together - 1)]
            self._workers = [asyncio.ensure_future(self._worker(transport, first)) for first in objects]
            for result in await asyncio.gather(*self._workers, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
        finally:
            await transport.close()

    async def _worker(self, transport: Transport, objects: dict[str, StreamObject]) -> None:
        for name, item in objects.items():
            if self._stopping.is_set():
                return
            await self._fetch_object(transport, name, item)
        while not self._stopping.is_set() and self._failures < _FAILURES:
            if (wait := self._not_before - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            cell = self.cells.claim()
            if cell is not None:
                await self._fetch(transport, cell)
            elif self.cells.open:
                await asyncio.sleep(_IDLE)  # another worker's cell may become free again
            else:
                return

    async def _fetch_object(self, transport: Transport, name: str, item: StreamObject) -> None:
        try:
            self._received_objects[name] = await self._get(transport, item, name)
        except asyncio.CancelledError:
            return
        except Exception as error:
            self._note(error)
        finally:
            self.pending_objects.discard(name)

    async def _get(self, transport: Transport, item: StreamObject, key: Cell | str) -> bytes:
        """The object's bytes, checked against its digest. `_tasks[key]` cancels it."""
        seconds = _SILENCES * self._silence + item.bytes / _SLOWEST
        task = asyncio.ensure_future(asyncio.wait_for(transport.get(item.name, item.bytes, self._came), seconds))
        self._tasks[key] = task
        try:
            data = await task
        except TimeoutError as error:
            raise place_error(Answer.LATER, f"{item.name} did not arrive within {seconds:g} s") from error
        finally:
            if self._tasks.get(key) is task:
                del self._tasks[key]
        if len(data) != item.bytes or digest(data) != item.name:
            text = f"{item.name} is not what it was when it was published"
            raise place_error(Answer.BROKEN, text, kind=DamagedObjectError)
        return data

    async def _fetch(self, transport: Transport, cell: Cell) -> None:
        chunk, layer = cell
        item, begun = self._manifest.cells[chunk][layer], time.perf_counter()
        assert item is not None
        try:
            data = await self._get(transport, item, cell)
            self.spool.put(cell, data)
        except asyncio.CancelledError:
            self.cells.lose(cell)
        except Exception as error:
            self._note(error)
            await self._fail(cell, error)
        else:
            self._failures = 0
            self.cells.received(cell)
            name = f"chunk {chunk} layer {layer}"
            self._timeline.add("streaming", name, begun, time.perf_counter(), bytes=len(data))

    async def _fail(self, cell: Cell, error: Exception) -> None:
        """Free the cell for another try, or leave it to computing, depending on the store's answer."""
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

    def _note(self, error: Exception) -> None:
        text = error.strerror if isinstance(error, StoreError) else None
        self.trouble.append(line_of(text or f"{type(error).__name__}: {error}"))
