"""What has come over the network and is not used yet: as it came, in a file without a name."""

from __future__ import annotations

import os
import tempfile
import threading

from ..errors import StoreError


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
