"""A `DynamicCache` in files that are mapped: the operating system pages it in and out."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any, Self

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_offload_cache.errors import BudgetError

_ROOM = 1.125
"""Times the prompt's tokens that a map has room for, in whole rows: a map does not grow."""


class PagedLayer(DynamicLayer):
    """Keys and values (B, Hk, T, D) of one layer in one mapped, unnamed file; host memory only.

    The kernel reads ahead as it does by default (no MADV_RANDOM). A step attends to all of it.
    """

    def __init__(self, cache: PagedCache) -> None:
        super().__init__()
        self._cache = cache
        self._map: mmap.mmap | None = None
        self._fd = -1
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the file, with room for an eighth more tokens than come first."""
        if key_states.device.type != "cpu":
            raise ValueError(f"a paged DynamicCache lies in host memory, got keys on {key_states.device}")
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, tokens, dim = key_states.shape
        self._room = max(int(tokens * _ROOM), tokens + 256)
        shape = (2, batch, heads, self._room, dim)
        nbytes = 2 * batch * heads * self._room * dim * self.dtype.itemsize
        with tempfile.TemporaryFile(dir=self._cache.directory) as file:
            file.truncate(nbytes)
            self._fd = os.dup(file.fileno())
        self._map = mmap.mmap(self._fd, nbytes)
        self._whole = torch.frombuffer(self._map, dtype=self.dtype).view(shape)
        self.keys, self.values = self._whole[0, :, :, :0], self._whole[1, :, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values (B, Hk, t, D) behind what is held; views of all. Raises `BudgetError` when full."""
        self._cache.trim()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self._length + key_states.shape[2]
        if stop > self._room:
            raise BudgetError(f"a paged layer has room for {self._room} tokens, got {stop}: fill it with more at first")
        self._whole[0, :, :, self._length : stop] = key_states
        self._whole[1, :, :, self._length : stop] = value_states
        self._length = stop
        self.keys, self.values = self._whole[0, :, :, :stop], self._whole[1, :, :, :stop]
        self._cache.touched(self)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of the map."""
        return 0 if self._map is None else len(self._map)

    def drop(self, start: int, stop: int) -> None:
        """Write bytes [start, stop) of the map back, and let go of their pages."""
        if self._map is None or stop <= start:
            return
        self._map.flush(start, stop - start)
        self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
        os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the file back. Idempotent."""
        if self._map is not None:
            self.keys = self.values = self._whole = torch.empty(0)
            self._map = None  # goes with the last tensor on it
            os.close(self._fd)
            self._fd = -1


class PagedCache(DynamicCache):
    """A `DynamicCache` whose pages are dropped, oldest use first, to `limit` bytes between layers: what a machine with
    so much memory for them would do, since a step touches all bytes once and in order. Within a layer's attention there
    is no limit, which favours this baseline. Writes of new tokens are waited for when their page is dropped."""

    def __init__(self, config: Any, limit: int, path: str | Path | None = None) -> None:
        super().__init__(config=config)
        self.limit = limit
        self.directory = path
        self._used: deque[tuple[PagedLayer, int, int]] = deque()
        self._held = 0
        self.layers: list[Any] = [PagedLayer(self) for _ in self.layers]

    def touched(self, layer: PagedLayer) -> None:
        """All of `layer` is in use, and so in memory after it."""
        for entry in [entry for entry in self._used if entry[0] is layer]:
            self._used.remove(entry)
            self._held -= entry[2] - entry[1]
        self._used.append((layer, 0, layer.nbytes))
        self._held += layer.nbytes

    def trim(self) -> None:
        """Drop what was used longest ago, page by page, until `limit` bytes are left."""
        while self._held > self.limit:
            layer, start, stop = self._used.popleft()
            size = min(self._held - self.limit, stop - start)
            size = min(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, stop - start)
            layer.drop(start, start + size)
            self._held -= size
            if start + size < stop:
                self._used.appendleft((layer, start + size, stop))

    @property
    def held_bytes(self) -> int:
        """Bytes that may be in memory now, as the trimming counts them."""
        return self._held

    def close(self) -> None:
        """Give the files back. Idempotent."""
        for layer in self.layers:
            layer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
