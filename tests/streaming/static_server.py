"""A static web server on loopback, which does with some objects what a test asks for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = Callable[[str, bytes], bytes | int | None]
"""Given the name of an object and its bytes: what is sent in their place; a status; None: 404."""


class Handler(SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, served: Served, **kwargs: Any) -> None:
        self._served = served
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        name, served = self.path.strip("/").split("/")[-1], self._served
        file = Path(served.folder, name)
        served.asked.append(name)
        if served.dead or not file.exists():
            if not served.dead:
                self.send_error(404)
            self.close_connection = True
            return
        data = served.fault(name, file.read_bytes())
        if data is None or isinstance(data, int):
            self.send_error(data or 404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(served.said or len(data)))
        self.end_headers()
        while served.trickles == name and data:
            with contextlib.suppress(OSError):
                self.wfile.write(data[:1])
            data = data[1:]
            time.sleep(0.1)
        for start in range(0, len(data), 4096):
            if served.dead:
                self.close_connection = True
                return
            with contextlib.suppress(OSError):
                self.wfile.write(data[start : start + 4096])
            if served.pause:
                time.sleep(served.pause)

    def log_message(self, *args: Any) -> None:
        """Nothing."""


class Served:
    """A folder that is served. `dead`: connections are closed without a word; `pause`: seconds between 4,096 bytes;
    `trickles`: an object that comes byte by byte, as long as it is named here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fault = folder, (lambda name, data: data)
        self.dead, self.pause, self.said, self.trickles = False, 0.0, 0, ""
        self.asked: list[str] = []
        self.url = ""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    found = Served(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, served=found))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
