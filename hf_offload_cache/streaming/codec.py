"""Chunks as objects of the network: quantised, one byte a symbol, and compressed. Needs the extra `[stream]`."""

from __future__ import annotations

import errno
import math
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import ConfigError, CorruptRecordError

# Keys and values of a chunk as symbols of a byte, and back: how much of them is kept

GROUP = 64
"""Elements that share a scale, at most: tokens of a channel of keys, channels of a token of values."""
_LEAST, _MOST = 1e-2, 6e4
"""Scales are kept in 16 bits: a chunk whose largest element is smaller, or larger, or no number, is kept as it is."""


@dataclass(frozen=True)
class ChunkShape:
    """Of keys (heads, tokens, key_dim) and values (heads, tokens, value_dim) of one layer."""

    heads: int
    tokens: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of keys and values, as they are."""
        return self.heads * self.tokens * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def of_keys(self) -> tuple[int, int, int]:
        return self.heads, self.tokens, self.key_dim

    def of_values(self) -> tuple[int, int, int]:
        return self.heads, self.tokens, self.value_dim


class Quantiser(Protocol):
    """Tensors on the CPU; any thread. Decoding goes head by head."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of which the bytes are kept, one after another."""

    def parts(self, shape: ChunkShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each tensor that `encode` gives for a chunk of this shape."""

    def decode(
        self, parts: list[torch.Tensor], shape: ChunkShape, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Into keys (heads, t, Dk) and values (heads, t, Dv) of the tokens from `start`, a multiple of `GROUP`, on."""


def fits(tensor: torch.Tensor) -> bool:
    """Whether scales of it can be kept in 16 bits."""
    if not tensor.numel():
        return True
    most = float(tensor.abs().max())  # no number compares with anything
    return most == 0 or _LEAST < most < _MOST


class Whole:
    """Nothing is lost: the first bytes of all elements, then the second ones, so that exponents lie together."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        return [_planes(keys), _planes(values)]

    def parts(self, shape: ChunkShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [
            ((shape.dtype.itemsize, math.prod(dims)), torch.uint8) for dims in (shape.of_keys(), shape.of_values())
        ]

    def decode(
        self, parts: list[torch.Tensor], shape: ChunkShape, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        stop = start + keys.shape[1]
        for part, dims, out in zip(parts, (shape.of_keys(), shape.of_values()), (keys, values), strict=True):
            planes = part.view(-1, *dims)[:, :, start:stop]
            for head, own in enumerate(out):
                own.copy_(planes[:, head].permute(1, 2, 0).contiguous().view(shape.dtype).squeeze(-1))


class Step:
    """Multiples of a share of the standard deviation of all keys, or values, of the chunk, beside each channel's mean:
    channels that lie far from zero do not decide on the step of the others."""

    def __init__(self, share: float) -> None:
        self._share = share

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for tensor in (keys.float(), values.float()):
            mean = tensor.mean(1).half()
            rest = tensor - mean.float()[:, None]
            step = (rest.std(correction=0) * self._share).clamp(min=float(rest.abs().max()) / 32000, max=_MOST)
            step = torch.where(step > 0, step, 1.0).reshape(1)
            times = (rest / step).round().to(torch.int32).view(-1)
            symbols = torch.where(times < 0, -2 * times - 1, 2 * times)  # small either way: second bytes are mostly 0
            found += [step, mean, torch.stack([symbols & 255, symbols >> 8]).to(torch.uint8)]
        return found

    def parts(self, shape: ChunkShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
        found: list[tuple[tuple[int, ...], torch.dtype]] = []
        for dims in (shape.of_keys(), shape.of_values()):
            of_channels = dims[0], dims[2]
            found += [((1,), torch.float32), (of_channels, torch.float16), ((2, math.prod(dims)), torch.uint8)]
        return found

    def decode(
        self, parts: list[torch.Tensor], shape: ChunkShape, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        stop = start + keys.shape[1]
        for own, dims, into in ((parts[:3], shape.of_keys(), keys), (parts[3:], shape.of_values(), values)):
            step, means, planes = own
            for low, high, mean, out in zip(*planes.view(2, *dims)[:, :, start:stop], means, into, strict=True):
                symbols = low.to(torch.int32) | high.to(torch.int32) << 8
                times = torch.where(symbols & 1 == 1, -(symbols + 1) // 2, symbols // 2)
                out.copy_((times * step).add_(mean.float()))


class Range:
    """`bits` between the least and the largest of a group: `GROUP` tokens of a channel of keys, `GROUP` channels of a
    token of values."""

    def __init__(self, bits: int) -> None:
        self._most = 2**bits - 1

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        heads, tokens, dim = keys.shape
        short = -tokens % GROUP
        if short:  # the last group is filled with its last token
            keys = torch.cat([keys, keys[:, -1:].expand(heads, short, dim)], 1)
        found = self._symbols(keys.float().unflatten(1, (-1, GROUP)), 2)
        found[0] = found[0].flatten(1, 2)[:, :tokens].contiguous()
        of_groups = [self._symbols(group, 2) for group in values.float().split(_width(values.shape[2]), 2)]
        symbols, low, step = zip(*of_groups, strict=True)
        return [*found, torch.cat(symbols, 2), torch.stack(low, 2), torch.stack(step, 2)]

    def _symbols(self, groups: torch.Tensor, along: int) -> list[torch.Tensor]:
        low, high = groups.amin(along, keepdim=True).half(), groups.amax(along, keepdim=True)
        step = ((high - low.float()) / self._most).half()
        divisor = torch.where(step > 0, step, 1.0).float()
        symbols = ((groups - low.float()) / divisor).round().clamp(0, self._most).to(torch.uint8)
        return [symbols, low.squeeze(along), step.squeeze(along)]

    def parts(self, shape: ChunkShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
        heads, tokens, dim = shape.of_keys()
        of_keys = heads, -(-tokens // GROUP), dim
        of_values = heads, tokens, -(-shape.value_dim // _width(shape.value_dim))
        found: list[tuple[tuple[int, ...], torch.dtype]] = []
        for dims, scales in ((shape.of_keys(), of_keys), (shape.of_values(), of_values)):
            found += [(dims, torch.uint8), (scales, torch.float16), (scales, torch.float16)]
        return found

    def decode(
        self, parts: list[torch.Tensor], shape: ChunkShape, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        stop = start + keys.shape[1]
        groups, width = slice(start // GROUP, -(-stop // GROUP)), _width(shape.value_dim)
        for symbols, low, step, out in zip(*parts[:3], keys, strict=True):
            scales = (one[groups].float().repeat_interleave(GROUP, 0)[: stop - start] for one in (step, low))
            out.copy_(next(scales).mul_(symbols[start:stop]).add_(next(scales)))
        for symbols, low, step, out in zip(*parts[3:], values, strict=True):
            groups_of = zip(symbols[start:stop].split(width, 1), out.split(width, 1), strict=True)
            for place, (group, into) in enumerate(groups_of):
                scales = (one[start:stop, place, None].float() for one in (step, low))
                into.copy_(group.float().mul_(next(scales)).add_(next(scales)))


def _width(dim: int) -> int:
    """Channels of each group but the last, which may have fewer: as few groups of up to `GROUP` as there can be, and
    these alike."""
    return -(-dim // -(-dim // GROUP))


def _planes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, (itemsize, elements): all first ones, all second ones..."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.dtype.itemsize).t().contiguous()


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
_MAGIC, _VERSION = b"HFOC", 1
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
    if magic == _MAGIC and version != _VERSION:
        raise _corrupt(name, f"its format has version {version} and this library reads {_VERSION}: publish it anew")
    if magic != _MAGIC or level >= len(_NAMES):
        raise _corrupt(name, "it is no chunk of a published context")
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
