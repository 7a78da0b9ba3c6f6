"""Chunks as objects of the network: quantised, one byte a symbol, and compressed. Needs the extra `[stream]`."""

from __future__ import annotations

import errno
import math
import struct
from typing import Any

import torch

from ..errors import ConfigError, CorruptRecordError
from .quantisers import ChunkShape, Quantiser, Range, Step, Whole, fits

LEVELS: dict[str, Quantiser] = {
    "lossless": Whole(),
    "fine": Step(0.1),
    "default": Range(4),
    "small": Step(0.35),
    "smallest": Step(0.5),
}
"""Name -> what is kept, the most first. Of bf16 keys and values after RoPE: some .70, .33, .28, .21 and .19."""
_NAMES = tuple(LEVELS)
_HEADER = struct.Struct("<4sBBxxIIIIQ")
_MAGIC, _VERSION = b"HFOC", 1
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


def decode(data: bytes | memoryview, shape: ChunkShape, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What `encode` was given, as far as its level keeps it, of `shape.dtype`: new tensors on the CPU. Any thread.

    Raises `CorruptRecordError` that calls it `name` where the object is none of such a shape, before memory is taken
    for what it says.
    """
    if len(data) < _HEADER.size:
        raise _corrupt(name, f"it has {len(data)} bytes, and its header {_HEADER.size}")
    magic, version, level, *dims, size = _HEADER.unpack(data[: _HEADER.size])
    if (magic, version) != (_MAGIC, _VERSION) or level >= len(_NAMES):
        raise _corrupt(name, "it is no chunk of this version")
    if tuple(dims) != (shape.heads, shape.tokens, shape.key_dim, shape.value_dim):
        raise _corrupt(name, f"it is of {tuple(dims)} heads, tokens and dimensions, and should be of {shape}")
    quantiser = LEVELS[_NAMES[level]]
    parts = quantiser.parts(shape)
    sizes = [math.prod(own) * dtype.itemsize for own, dtype in parts]
    if size != sum(sizes):
        raise _corrupt(name, f"it says that it has {size:,} bytes unpacked, and should have {sum(sizes):,}")
    raw = bytearray(_unpacked(data[_HEADER.size :], size, name))
    tensors, first = [], 0
    for (own, dtype), count in zip(parts, sizes, strict=True):
        tensors.append(torch.frombuffer(raw, dtype=torch.uint8, count=count, offset=first).view(dtype).view(own))
        first += count
    return quantiser.decode(tensors, shape)


def _unpacked(data: bytes | memoryview, size: int, name: str) -> bytes:
    zstandard = _zstandard()
    try:
        if zstandard.frame_content_size(data) != size:
            raise _corrupt(name, "what is compressed has another size than its header says")
        unpacked: bytes = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise _corrupt(name, f"it cannot be decompressed ({error})") from error
    if len(unpacked) != size:
        raise _corrupt(name, f"it has {len(unpacked):,} bytes unpacked, and should have {size:,}")
    return unpacked


def _corrupt(name: str, what: str) -> CorruptRecordError:
    return CorruptRecordError(errno.EIO, f"{name}: {what}")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("streaming needs the package zstandard: pip install 'hf-offload-cache[stream]'") from error
    return zstandard
