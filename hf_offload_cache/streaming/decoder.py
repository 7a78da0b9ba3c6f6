"""Cells that have come, as keys and values: decoded by a thread of its own, ahead of the one that takes them in."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..errors import CorruptRecordError, StoreError
from ..stores.encryption import decrypt
from .codec import unpack, unpacked_bytes
from .plan import Cell
from .spool import Spool
from .stream_manifest import StreamManifest, binding

_AHEAD = 3
"""Cells that are decoded ahead of the one that is taken in."""
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
