"""A static server on loopback behind a token bucket: a link of a given rate, which may change, that all share."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_PIECE, _TURN = 16384, 0.005
"""Bytes that pass together, at least, and seconds: a loop that sleeps a millisecond a piece would be the link."""

Rate = Callable[[float], float]
"""Bytes a second, so many seconds after the first object was asked for."""


class BucketServer:
    """Serves `folder`; `rate` may be set between loads, which begin with `restart`."""

    def __init__(self, folder: Path, rate: Rate) -> None:
        self._folder, self.rate = folder, rate
        self.url = ""
        self.restart()

    def restart(self) -> None:
        """The link's time begins with the next request; nothing is queued before it."""
        self._origin: float | None = None
        self._free_at = 0.0

    async def answer(self, request: Any) -> Any:
        from aiohttp import web

        file = self._folder / request.match_info["name"]
        if not file.is_file():
            raise web.HTTPNotFound
        data = file.read_bytes()
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        while data:
            at = 0.0 if self._origin is None else time.monotonic() - self._origin
            size = max(_PIECE, int(self.rate(at) * _TURN))
            await asyncio.sleep(self._pass(len(data[:size])))
            try:
                await response.write(data[:size])
            except ConnectionError:  # nobody wants it any more
                break
            data = data[size:]
        return response

    def _pass(self, count: int) -> float:
        """Seconds until so many bytes have passed, behind those that came before."""
        now = time.monotonic()
        self._origin = now if self._origin is None else self._origin
        start = max(now, self._free_at)
        self._free_at = start + count / self.rate(start - self._origin)
        return self._free_at - now


@contextlib.contextmanager
def bucket_server(folder: Path, rate: Rate) -> Iterator[BucketServer]:
    """In a thread of its own, until the end of the `with`."""
    from aiohttp import web

    found, loop = BucketServer(folder, rate), asyncio.new_event_loop()
    ready, stopping = threading.Event(), asyncio.Event()

    async def serve() -> None:
        application = web.Application()
        application.router.add_get("/{name}", found.answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        ready.set()
        await stopping.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()


def trace(name: str, mean: float, seconds: float, seed: int = 0) -> Rate:
    """The rate of a link of `mean` bytes a second; "slower" and "faster" change at 30% of `seconds`. Wi-Fi and
    congested ones vary ten times in `seconds`, as a gamma distribution does (SparKV, sections III and VI)."""
    if name == "slower":
        return lambda at: mean if at < 0.3 * seconds else mean / 4
    if name == "faster":
        return lambda at: mean if at < 0.3 * seconds else mean * 4
    if name == "a sixth":
        return lambda at: mean / 6
    if name in ("wi-fi", "congested"):
        share, spread = (1.0, 0.31) if name == "wi-fi" else (0.776, 0.71)
        shape = 1 / spread**2
        rates = np.random.default_rng(seed).gamma(shape, mean * share / shape, 4096).clip(mean / 50)
        return lambda at: float(rates[min(4095, int(at / seconds * 10))])
    return lambda at: mean


TRACES = ("constant", "slower", "faster", "wi-fi", "congested", "a sixth")
