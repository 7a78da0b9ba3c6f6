"""Chunks as objects of the network: quantised, one byte a symbol, and compressed. Needs the extra `[stream]`."""

from __future__ import annotations

import errno
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError, CorruptRecordError
from .quantisers import GROUP, ChunkShape, Quantiser, Range, Step, Whole, fits

LEVELS: dict[str, Quantiser] = {
    "lossless": Whole(),
    "fine": Step(0.1),
    "default": Range(4),
    "small": Step(0.35),
    "smallest": Step(0.5),
}
"""Name -> what is kept, the most first. Of bf16 keys and values after RoPE: some .70, .34, .28, .23 and .20."""
_NAMES = tuple(LEVELS)
_HEADER = struct.Struct("<4sBBxxIIIIQ")
_MAGIC, _VERSION = b"HFOC", 2
_SERIAL = 32767
"""Elements that torch's elementwise operations leave to the thread that calls them."""
_FASTEST = 1
"""Level of zstandard: symbols are coded by their frequencies, and there is nothing to be found that repeats."""


def check_level(level: str) -> str:
    """Raises `ConfigError` for a name that is none of `LEVELS`."""
    if level not in LEVELS:
        raise ConfigError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    return level


def encode(keys: torch.Tensor, values: torch.Tensor, level: str = "default") -> bytes:
    """Keys (heads, tokens, Dk) and values (heads, tokens, Dv) of one layer, of any device and floating type, as one
    object. A chunk whose scales cannot be kept in 16 bits is kept as it is. Raises `ConfigError`."""
    quantiser = LEVELS[check_level(level)]
    keys, values = keys.detach().cpu(), values.detach().cpu()
    if not (fits(keys) and fits(values)):
        level, quantiser = "lossless", LEVELS["lossless"]
    data = b"".join(part.view(-1).view(torch.uint8).numpy().tobytes() for part in quantiser.encode(keys, values))
    shape = keys.shape[0], keys.shape[1], keys.shape[2], values.shape[2]
    header = _HEADER.pack(_MAGIC, _VERSION, _NAMES.index(level), *shape, len(data))
    return header + _zstandard().ZstdCompressor(level=_FASTEST).compress(data)


@dataclass(frozen=True)
class Unpacked:
    """An object that is not compressed any more. Any thread."""

    quantiser: Quantiser
    parts: list[torch.Tensor]
    shape: ChunkShape

    def decode(self, start: int = 0, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (heads, tokens, Dk) and values (heads, tokens, Dv), as far as the level keeps them, of `shape.dtype`:
        new tensors on the CPU. Of tokens `start`, a multiple of `GROUP`, to `stop`; None: to the last.

        In pieces of which torch gives none to other threads, which the model computes with meanwhile."""
        shape = self.shape
        count = (shape.tokens if stop is None else stop) - start
        keys, values = (
            torch.empty(shape.heads, count, dim, dtype=shape.dtype, device="cpu")
            for dim in (shape.key_dim, shape.value_dim)
        )
        step = max(GROUP, _SERIAL // max(shape.key_dim, shape.value_dim) // GROUP * GROUP)
        for first in range(0, count, step):
            into = slice(first, min(first + step, count))
            self.quantiser.decode(self.parts, shape, start + first, keys[:, into], values[:, into])
        return keys, values


def unpacked_bytes(level: str, shape: ChunkShape) -> int:
    """Of an object of a level that is not compressed any more; of one that is none, as many as of any."""
    found = [LEVELS[level]] if level in LEVELS else list(LEVELS.values())
    return max(sum(math.prod(own) * dtype.itemsize for own, dtype in one.parts(shape)) for one in found)


def unpack(data: bytes | memoryview, shape: ChunkShape, name: str, of_level: str | None = None) -> Unpacked:
    """An object of `encode`, with `of_level` or, where that could not keep it, "lossless". Any thread.

    Raises `CorruptRecordError` that calls it `name` where the object is none of such a shape, before memory is taken
    for what it says.
    """
    if len(data) < _HEADER.size:
        raise _corrupt(name, f"it has {len(data)} bytes, and its header {_HEADER.size}")
    magic, version, level, *dims, size = _HEADER.unpack(data[: _HEADER.size])
    if (magic, version) != (_MAGIC, _VERSION) or level >= len(_NAMES):
        raise _corrupt(name, "it is no chunk of this version")
    if of_level is not None and _NAMES[level] not in (of_level, "lossless"):
        raise _corrupt(name, f"it is of level {_NAMES[level]!r}, and should be of {of_level!r}")
    if tuple(dims) != (shape.heads, shape.tokens, shape.key_dim, shape.value_dim):
        raise _corrupt(name, f"it is of {tuple(dims)} heads, tokens and dimensions, and should be of {shape}")
    quantiser = LEVELS[_NAMES[level]]
    parts = quantiser.parts(shape)
    sizes = [math.prod(own) * dtype.itemsize for own, dtype in parts]
    if size != sum(sizes):
        raise _corrupt(name, f"it says that it has {size:,} bytes unpacked, and should have {sum(sizes):,}")
    raw = _unpacked(memoryview(data)[_HEADER.size :], size, name)
    tensors, first = [], 0
    for (own, dtype), count in zip(parts, sizes, strict=True):
        tensors.append(torch.frombuffer(raw, dtype=torch.uint8, count=count, offset=first).view(dtype).view(own))
        first += count
    return Unpacked(quantiser, tensors, shape)


def _unpacked(data: memoryview, size: int, name: str) -> bytearray:
    zstandard = _zstandard()
    try:
        if zstandard.frame_content_size(data) != size:
            raise _corrupt(name, "it cannot be decompressed to the size that its header says")
        unpacked, filled = bytearray(size), 0
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            while filled < size and (count := reader.readinto(memoryview(unpacked)[filled:])):
                filled += count
            more = reader.read(1)
    except zstandard.ZstdError as error:
        raise _corrupt(name, f"it cannot be decompressed ({error})") from error
    if filled != size or more:
        raise _corrupt(name, f"it has {filled:,} bytes unpacked, or more, and should have {size:,}")
    return unpacked


def _corrupt(name: str, what: str) -> CorruptRecordError:
    return CorruptRecordError(errno.EIO, f"{name}: {what}")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("streaming needs the package zstandard: pip install 'hf-offload-cache[stream]'") from error
    return zstandard
