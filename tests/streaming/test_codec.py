"""Chunks as objects: what each level keeps, how large it is, and what is no chunk."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace

import pytest
import torch
import zstandard

from hf_offload_cache.errors import ConfigError, CorruptRecordError
from hf_offload_cache.streaming import LEVELS, ChunkShape, encode, unpack, unpacked_bytes


def chunk(
    heads: int = 3, tokens: int = 1024, dims: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, ChunkShape]:
    """Channels of keys differ much, as they do."""
    generator = torch.Generator().manual_seed(tokens)
    spread = torch.rand(heads, 1, dims[0], generator=generator) * 8 + 0.2
    keys = torch.randn(heads, tokens, dims[0], generator=generator) * spread + 3 * spread
    values = torch.randn(heads, tokens, dims[1], generator=generator)
    return keys.to(dtype), values.to(dtype), ChunkShape(heads, tokens, *dims, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lossless_loses_nothing(dtype: torch.dtype) -> None:
    keys, values, shape = chunk(dtype=dtype)
    keys[0, 0, :3] = torch.tensor([torch.inf, torch.nan, -0.0])
    data = encode(keys, values, "lossless")
    found = unpack(data, shape, "a chunk").decode()
    for own, theirs in zip((keys, values), found, strict=True):
        assert own.dtype == theirs.dtype and own.numpy(force=True).tobytes() == theirs.numpy(force=True).tobytes() if (
            dtype != torch.bfloat16
        ) else torch.equal(own.view(torch.int16), theirs.view(torch.int16))
    assert len(data) < shape.nbytes


def test_the_fewer_bytes_the_less_is_kept() -> None:
    keys, values, shape = chunk()
    sizes, errors = [], []
    for level in LEVELS:
        data = encode(keys, values, level)
        found = unpack(data, shape, "a chunk").decode()
        sizes.append(len(data) / shape.nbytes)
        errors.append(float((found[1].float() - values.float()).square().mean().sqrt()))
    assert sizes == sorted(sizes, reverse=True) and errors == sorted(errors)
    assert sizes[2] < 0.28 and errors[2] < 0.1  # of a deviation of 1: half a step of 15 in some five deviations


@pytest.mark.parametrize("level", list(LEVELS))
@pytest.mark.parametrize(
    ("tokens", "dims"), [(1, (64, 64)), (63, (40, 24)), (65, (80, 128)), (200, (16, 96)), (70, (67, 131))]
)
def test_chunks_of_any_shape(level: str, tokens: int, dims: tuple[int, int]) -> None:
    keys, values, shape = chunk(2, tokens, dims)
    for own, theirs in zip((keys, values), unpack(encode(keys, values, level), shape, "a chunk").decode(), strict=True):
        assert own.shape == theirs.shape and theirs.dtype == own.dtype
        worst = (own.float() - theirs.float()).abs().max() / own.float().std()
        assert worst < {"lossless": 1e-6, "fine": 0.08, "default": 0.5, "small": 0.2, "smallest": 0.3}[level]


def test_equal_elements_come_back() -> None:
    """A group without a range, a token without a largest, a chunk without a deviation."""
    shape = ChunkShape(2, 70, 16, 16, torch.float32)
    keys, values = torch.full((2, 70, 16), 0.5), torch.zeros(2, 70, 16)
    for level in LEVELS:
        found = unpack(encode(keys, values, level), shape, "a chunk").decode()
        torch.testing.assert_close(found, (keys, values), atol=0.04, rtol=0)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e5])
def test_what_has_no_scale_is_kept_as_it_is(wrong: float) -> None:
    keys, values, shape = chunk(2, 64, dtype=torch.float32)
    keys[1, 3, 5] = wrong
    found = unpack(encode(keys, values), shape, "a chunk").decode()
    assert torch.equal(found[0].nan_to_num(7), keys.nan_to_num(7)) and torch.equal(found[1], values)


def test_an_unknown_level_is_refused() -> None:
    keys, values, _ = chunk(1, 4)
    with pytest.raises(ConfigError, match="level must be one of lossless, fine, default, small, smallest, got 'best'"):
        encode(keys, values, "best")


def test_what_is_no_chunk_is_told_before_memory_is_taken() -> None:
    keys, values, shape = chunk(2, 64)
    data = encode(keys, values)
    header = struct.calcsize("<4sBBxxIIIIQ")
    huge = data[: header - 8] + struct.pack("<Q", 1 << 40) + data[header:]
    bomb = data[:header] + zstandard.ZstdCompressor().compress(bytes(1 << 24))
    wrong = {
        "header": data[: header - 1],
        "no chunk of a published context": b"XXXX" + data[4:],
        "has version 2 and this library reads 1: publish it anew": data[:4] + b"\2" + data[5:],
        "heads, tokens and dimensions": encode(*chunk(2, 65)[:2]),
        "unpacked, and should have": huge,
        "to the size that its header says": bomb,
        "has .* bytes unpacked, or more": data[:-9],
    }
    tracemalloc.start()
    for said, one in wrong.items():
        with pytest.raises(CorruptRecordError, match=f"chunk 3.*{said}"):
            unpack(one, shape, "chunk 3")
    assert tracemalloc.get_traced_memory()[1] < 2 * shape.nbytes
    tracemalloc.stop()


@pytest.mark.parametrize("level", list(LEVELS))
def test_a_part_is_of_the_whole(level: str) -> None:
    """With an indexer's keys, which are lossless at every level."""
    keys, values, shape = chunk(2, 200, (40, 24))
    shape, indexer = replace(shape, indexer_dim=16), values.flatten(1)[0, : 200 * 16].view(200, 16)
    unpacked = unpack(encode(keys, values, level, indexer), shape, "a chunk")
    whole = unpacked.decode()
    assert torch.equal(whole[2], indexer[None])
    for start, stop in ((0, 64), (64, 192), (128, 200), (192, 200)):
        for own, theirs in zip(unpacked.decode(start, stop), whole, strict=True):
            assert torch.equal(own, theirs[:, start:stop])
    assert sum(part.nbytes for part in unpacked.parts) == unpacked_bytes(level, shape) <= unpacked_bytes("other", shape)
