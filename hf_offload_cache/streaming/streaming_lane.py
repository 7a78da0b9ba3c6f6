"""The lane that streams: claims cells, brings them, checks them, and keeps them until they are used."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from ..errors import StoreError
from ..report.timeline import Timeline
from .cells import Cells
from .plan import Cell
from .spool import Spool
from .stream_manifest import StreamManifest, digest
from .transport import MissingObjectError, Transport

_WINDOW = 2.0
"""Seconds that bandwidth is measured over."""
_FAILURES = 4
"""Failures in a row after which the link counts as dead."""
_IDLE = 0.02


class StreamingLane:
    """A thread with an event loop of its own, from `start` to `stop`.

    Args:
        together: objects that are asked for at a time: one is on its way while the next is asked for.
    """

    def __init__(
        self, manifest: StreamManifest, cells: Cells, transport: Callable[[], Transport], spool: Spool,
        timeline: Timeline, together: int = 2,
    ) -> None:  # fmt: skip
        self._manifest, self.cells, self._make, self._spool = manifest, cells, transport, spool
        self._timeline, self._together = timeline, together
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[Cell, asyncio.Task[bytes]] = {}
        self._stopping = threading.Event()
        self._recent: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._failures = 0
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
            asyncio.run(self._stream())
        except Exception as error:  # whatever it is: computing goes on without
            self.trouble.append(f"{type(error).__name__}: {error}")
        finally:
            self.cells.stop()

    async def _stream(self) -> None:
        self._loop = asyncio.get_running_loop()
        transport = self._make()
        try:
            await asyncio.gather(*(self._worker(transport) for _ in range(self._together)))
        finally:
            await transport.close()

    async def _worker(self, transport: Transport) -> None:
        while not self._stopping.is_set() and self._failures < _FAILURES:
            cell = self.cells.claim()
            if cell is None:
                if not self.cells.open:
                    return
                await asyncio.sleep(_IDLE)  # another's may come back
                continue
            await self._bring(transport, cell)

    async def _bring(self, transport: Transport, cell: Cell) -> None:
        chunk, layer = cell
        found = self._manifest.cells[chunk][layer]
        assert found is not None
        task = asyncio.ensure_future(transport.get(found.name, found.bytes, self._came))
        self._tasks[cell], begun = task, time.perf_counter()
        try:
            data = await task
            if len(data) != found.bytes or digest(data) != found.name:
                raise MissingObjectError(5, f"{found.name} is not what it was when it was published")
            self._spool.put(cell, data)
        except asyncio.CancelledError:
            self.cells.lose(cell)
            if self._stopping.is_set():
                return
        except MissingObjectError as error:
            self._note(error)
            self.cells.lose(cell)
        except Exception as error:
            self._failures += 1
            self._note(error)
            self.cells.lose(cell, again=self._failures < _FAILURES)
            await asyncio.sleep(min(0.1 * 2**self._failures, 1))
        else:
            self._failures = 0
            self.cells.received(cell)
            told = f"chunk {chunk} layer {layer}"
            self._timeline.add("streaming", told, begun, time.perf_counter(), bytes=len(data))
        finally:
            self._tasks.pop(cell, None)

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
        for task in list(self._tasks.values()):
            task.cancel()

    def _note(self, error: Exception) -> None:
        text = error.strerror if isinstance(error, StoreError) else None
        self.trouble.append(text or f"{type(error).__name__}: {error}")
