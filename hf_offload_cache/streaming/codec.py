"""Chunks as objects of the network: quantised to symbols of one byte, and compressed. Needs the extra `[stream]`."""

from __future__ import annotations

import errno
import math
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import ConfigError, CorruptRecordError

GROUP = 64
"""Most elements that share a scale: tokens of a channel of keys, channels of a token of values."""
_LEAST, _MOST = 1e-2, 6e4
"""Scales have 16 bits: a chunk whose largest element is outside of this range, or NaN, is stored lossless."""
Dims = tuple[int, int, int]
"""(heads, tokens, channels)."""
Parts = list[tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor that a quantiser makes of keys, or of values."""


@dataclass(frozen=True)
class ChunkShape:
    """Sizes of the keys (heads, tokens, key_dim) and values (heads, tokens, value_dim) of a chunk in one layer, and of
    its indexer's keys (tokens, indexer_dim), 0: it has none."""

    heads: int
    tokens: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    indexer_dim: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, unquantised."""
        return sum(map(math.prod, self.dims)) * self.dtype.itemsize

    @property
    def dims(self) -> list[Dims]:
        """Sizes of the keys, of the values, and of an indexer's keys."""
        heads = [(self.heads, self.key_dim), (self.heads, self.value_dim), (1, self.indexer_dim)]
        return [(count, self.tokens, dim) for count, dim in heads[: 3 if self.indexer_dim else 2]]


class Quantiser(Protocol):
    """Quantises keys, or values, (heads, tokens, channels) on the CPU. Any thread."""

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Tensors whose bytes are stored, one after another."""

    def parts(self, dims: Dims, dtype: torch.dtype) -> Parts:
        """The form of what `encode` returns for a tensor of these dimensions and type."""

    def decode(self, parts: list[torch.Tensor], dims: Dims, start: int, out: torch.Tensor) -> None:
        """Decode into `out` (heads, t, channels) the tokens from `start` on, a multiple of `GROUP`."""


class Lossless:
    """The bytes as they are: the first bytes of all elements, then the second ones, so that exponents lie together."""

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.dtype.itemsize).t().contiguous()]

    def parts(self, dims: Dims, dtype: torch.dtype) -> Parts:
        return [((dtype.itemsize, math.prod(dims)), torch.uint8)]

    def decode(self, parts: list[torch.Tensor], dims: Dims, start: int, out: torch.Tensor) -> None:
        planes = parts[0].view(-1, *dims)[:, :, start : start + out.shape[1]]
        for head, of_head in enumerate(out):
            of_head.copy_(planes[:, head].permute(1, 2, 0).contiguous().view(out.dtype).squeeze(-1))


class Step:
    """Multiples of a share of the standard deviation of all elements, relative to each channel's mean: channels far
    from zero do not determine the step of the others."""

    def __init__(self, share: float) -> None:
        self._share = share

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mean = tensor.float().mean(1).half()
        rest = tensor.float() - mean.float()[:, None]
        step = (rest.std(correction=0) * self._share).clamp(min=float(rest.abs().max()) / 32000, max=_MOST)
        step = torch.where(step > 0, step, 1.0).reshape(1)
        times = (rest / step).round().to(torch.int32).view(-1)
        symbols = torch.where(times < 0, -2 * times - 1, 2 * times)  # small either way: second bytes are mostly 0
        return [step, mean, torch.stack([symbols & 255, symbols >> 8]).to(torch.uint8)]

    def parts(self, dims: Dims, dtype: torch.dtype) -> Parts:
        heads, _, channels = dims
        return [((1,), torch.float32), ((heads, channels), torch.float16), ((2, math.prod(dims)), torch.uint8)]

    def decode(self, parts: list[torch.Tensor], dims: Dims, start: int, out: torch.Tensor) -> None:
        step, means, planes = parts
        planes = planes.view(2, *dims)[:, :, start : start + out.shape[1]]
        for low, high, mean, of_head in zip(*planes, means, out, strict=True):
            symbols = low.to(torch.int32) | high.to(torch.int32) << 8
            times = torch.where(symbols & 1 == 1, -(symbols + 1) // 2, symbols // 2)
            of_head.copy_((times * step).add_(mean.float()))


class TokenRange:
    """`bits` between the least and the largest element of `GROUP` tokens of a channel: for keys."""

    def __init__(self, bits: int) -> None:
        self._most = 2**bits - 1

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        heads, tokens, channels = tensor.shape
        if short := -tokens % GROUP:  # the last group is filled with its last token
            tensor = torch.cat([tensor, tensor[:, -1:].expand(heads, short, channels)], 1)
        symbols, low, step = _symbols(tensor.float().unflatten(1, (-1, GROUP)), self._most)
        return [symbols.flatten(1, 2)[:, :tokens].contiguous(), low, step]

    def parts(self, dims: Dims, dtype: torch.dtype) -> Parts:
        scales = dims[0], -(-dims[1] // GROUP), dims[2]
        return [(dims, torch.uint8), (scales, torch.float16), (scales, torch.float16)]

    def decode(self, parts: list[torch.Tensor], dims: Dims, start: int, out: torch.Tensor) -> None:
        count = out.shape[1]
        groups = slice(start // GROUP, -(-(start + count) // GROUP))
        for symbols, low, step, of_head in zip(*parts, out, strict=True):
            scales = (scale[groups].float().repeat_interleave(GROUP, 0)[:count] for scale in (step, low))
            of_head.copy_(next(scales).mul_(symbols[start : start + count]).add_(next(scales)))


class ChannelRange:
    """`bits` between the least and the largest element of up to `GROUP` channels of a token: for values. Groups are as
    few as possible and of similar size."""

    def __init__(self, bits: int) -> None:
        self._most = 2**bits - 1

    @staticmethod
    def _width(channels: int) -> int:
        return -(-channels // -(-channels // GROUP))

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        groups = tensor.float().split(self._width(tensor.shape[2]), 2)
        symbols, low, step = zip(*(_symbols(group, self._most) for group in groups), strict=True)
        return [torch.cat(symbols, 2), torch.stack(low, 2), torch.stack(step, 2)]

    def parts(self, dims: Dims, dtype: torch.dtype) -> Parts:
        scales = dims[0], dims[1], -(-dims[2] // self._width(dims[2]))
        return [(dims, torch.uint8), (scales, torch.float16), (scales, torch.float16)]

    def decode(self, parts: list[torch.Tensor], dims: Dims, start: int, out: torch.Tensor) -> None:
        tokens, width = slice(start, start + out.shape[1]), self._width(dims[2])
        for symbols, low, step, of_head in zip(*parts, out, strict=True):
            groups = zip(symbols[tokens].split(width, 1), of_head.split(width, 1), strict=True)
            for place, (group, into) in enumerate(groups):
                scales = (scale[tokens, place, None].float() for scale in (step, low))
                into.copy_(group.float().mul_(next(scales)).add_(next(scales)))


def _symbols(groups: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Symbols 0 to `most` of groups along dimension 2, and each group's least element and step."""
    low, high = groups.amin(2, keepdim=True).half(), groups.amax(2, keepdim=True)
    step = ((high - low.float()) / most).half()
    divisor = torch.where(step > 0, step, 1.0).float()
    symbols = ((groups - low.float()) / divisor).round().clamp(0, most).to(torch.uint8)
    return symbols, low.squeeze(2), step.squeeze(2)


LEVELS: dict[str, tuple[Quantiser, Quantiser]] = {
    "lossless": (Lossless(), Lossless()),
    "fine": (Step(0.1), Step(0.1)),
    "default": (TokenRange(4), ChannelRange(4)),
    "small": (Step(0.35), Step(0.35)),
    "smallest": (Step(0.5), Step(0.5)),
}
"""Name -> quantisers of keys and of values, the largest first: some .70, .34, .28, .23 and .20 of bf16 after RoPE."""
_INDEXER = LEVELS["lossless"][:1]
"""Quantiser of an indexer's keys, at every level: it ranks all tokens by them."""
_NAMES = tuple(LEVELS)
_HEADER = struct.Struct("<4sBBxxIIIIQ")
_MAGIC, _VERSION = b"HFOC", 1
_SERIAL = 32767
"""Most elements that torch's elementwise operations process in the calling thread."""
_FASTEST = 1
"""Level of zstandard: symbols are coded by frequency, and there are no repetitions to find."""


def check_level(level: str) -> str:
    """Raises `ConfigError` for a name that is not in `LEVELS`."""
    if level not in LEVELS:
        raise ConfigError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    return level


def _encodable(tensor: torch.Tensor) -> bool:
    most = float(tensor.abs().max()) if tensor.numel() else 0.0
    return most == 0 or _LEAST < most < _MOST  # false for NaN


def encode(
    keys: torch.Tensor, values: torch.Tensor, level: str = "default", indexer: torch.Tensor | None = None
) -> bytes:
    """Keys (heads, tokens, Dk) and values (heads, tokens, Dv) of one layer, of any device and floating type, as one
    object; behind them its `indexer`'s keys (tokens, D), lossless. A chunk whose scales do not fit 16 bits is stored
    lossless. Raises `ConfigError`."""
    check_level(level)
    tensors = [keys.detach().cpu(), values.detach().cpu()]
    if not all(map(_encodable, tensors)):
        level = "lossless"
    tensors += [] if indexer is None else [indexer.detach().cpu()[None]]
    pairs = zip(_quantisers(level, len(tensors)), tensors, strict=True)
    parts = [part for quantiser, tensor in pairs for part in quantiser.encode(tensor)]
    data = b"".join(part.view(-1).view(torch.uint8).numpy().tobytes() for part in parts)
    header = _HEADER.pack(_MAGIC, _VERSION, _NAMES.index(level), *keys.shape, values.shape[2], len(data))
    return header + _zstandard().ZstdCompressor(level=_FASTEST).compress(data)


def _quantisers(level: str, count: int) -> tuple[Quantiser, ...]:
    """The quantisers of keys and values and, if `count` is 3, of an indexer's keys."""
    return (*LEVELS[level], *_INDEXER)[:count]


@dataclass(frozen=True)
class Unpacked:
    """A decompressed object. Any thread."""

    level: str
    parts: list[torch.Tensor]
    shape: ChunkShape

    def decode(self, start: int = 0, stop: int | None = None) -> list[torch.Tensor]:
        """Keys (heads, t, Dk) and values (heads, t, Dv) of `shape.dtype`, and if the layer has an indexer its keys (1,
        t, D), new tensors on the CPU: tokens `start`, a multiple of `GROUP`, to `stop`, None: to the last.

        Decodes pieces so small that torch keeps them in this thread: the model computes with the others meanwhile.
        """
        shape, at = self.shape, 0
        count = (shape.tokens if stop is None else stop) - start
        step = max(GROUP, _SERIAL // max(dims[2] for dims in shape.dims) // GROUP * GROUP)
        decoded = []
        for quantiser, dims in zip(_quantisers(self.level, len(shape.dims)), shape.dims, strict=True):
            parts = self.parts[at : at + len(quantiser.parts(dims, shape.dtype))]
            at += len(parts)
            out = torch.empty(dims[0], count, dims[2], dtype=shape.dtype, device="cpu")
            for first in range(0, count, step):
                quantiser.decode(parts, dims, start + first, out[:, first : first + step])
            decoded.append(out)
        return decoded


def _parts(level: str, shape: ChunkShape) -> Parts:
    pairs = zip(_quantisers(level, len(shape.dims)), shape.dims, strict=True)
    return [part for quantiser, dims in pairs for part in quantiser.parts(dims, shape.dtype)]


def unpacked_bytes(level: str, shape: ChunkShape) -> int:
    """Size of a decompressed object; for an unknown level, the largest of all levels."""
    levels = [level] if level in LEVELS else _NAMES
    return max(sum(math.prod(dims) * dtype.itemsize for dims, dtype in _parts(one, shape)) for one in levels)


def unpack(data: bytes | memoryview, shape: ChunkShape, name: str, of_level: str | None = None) -> Unpacked:
    """Decompress an object of `encode`, of level `of_level` or "lossless". Any thread.

    Raises `CorruptRecordError`, which begins with `name`, for an object of another shape or level, before memory is
    allocated for the size that it states.
    """
    if len(data) < _HEADER.size:
        raise _corrupt(name, f"it has {len(data)} bytes, and its header {_HEADER.size}")
    magic, version, number, *dims, size = _HEADER.unpack(data[: _HEADER.size])
    if magic == _MAGIC and version != _VERSION:
        raise _corrupt(name, f"its format has version {version} and this library reads {_VERSION}: publish it anew")
    if magic != _MAGIC or number >= len(_NAMES):
        raise _corrupt(name, "it is no chunk of a published context")
    level = _NAMES[number]
    if of_level is not None and level not in (of_level, "lossless"):
        raise _corrupt(name, f"it is of level {level!r}, and should be of {of_level!r}")
    if tuple(dims) != (shape.heads, shape.tokens, shape.key_dim, shape.value_dim):
        raise _corrupt(name, f"its heads, tokens and dimensions are {tuple(dims)}, and should be those of {shape}")
    expected = unpacked_bytes(level, shape)
    if size != expected:
        raise _corrupt(name, f"it says that it has {size:,} bytes unpacked, and should have {expected:,}")
    raw = _decompressed(memoryview(data)[_HEADER.size :], size, name)
    tensors, first = [], 0
    for form, dtype in _parts(level, shape):
        count = math.prod(form) * dtype.itemsize
        tensors.append(torch.frombuffer(raw, dtype=torch.uint8, count=count, offset=first).view(dtype).view(form))
        first += count
    return Unpacked(level, tensors, shape)


def _decompressed(data: memoryview, size: int, name: str) -> bytearray:
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


def _corrupt(name: str, problem: str) -> CorruptRecordError:
    return CorruptRecordError(errno.EIO, f"{name}: {problem}")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("streaming needs the package zstandard: pip install 'hf-offload-cache[stream]'") from error
    return zstandard
