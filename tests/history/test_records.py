"""Record geometry: what goes in comes out, padding is zero, sizes follow the rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.core import OffloadLayer, Shared
from hf_offload_cache.errors import ConfigError
from hf_offload_cache.fetch import Storage
from hf_offload_cache.history import TARGET_RECORD_BYTES, RecordFormat
from hf_offload_cache.stores import DEVICE_BLOCK, aligned_empty

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pair(
    heads: int, dim: int, value_heads: int, value_dim: int, tokens: int = 5, batch: int = 2, dtype=torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values whose every element is different where the dtype allows."""
    keys = torch.arange(batch * heads * tokens * dim, dtype=torch.float32).reshape(batch, heads, tokens, dim)
    values = -1 - torch.arange(batch * value_heads * tokens * value_dim, dtype=torch.float32)
    return (keys / 8).to(dtype), (values / 8).reshape(batch, value_heads, tokens, value_dim).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 5)] * 4) | st.tuples(*[st.integers(1, 5)] * 2).map(lambda alike: alike * 2),
    tokens=st.integers(1, 9),
    batch=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    group=st.integers(1, 20),
)
def test_entries_come_back(
    shape: tuple[int, int, int, int], tokens: int, batch: int, dtype: torch.dtype, group: int
) -> None:
    """`split` undoes `entries`, as views, into a buffer in which everything was NaN."""
    keys, values = pair(*shape, tokens, batch, dtype)
    form = RecordFormat.of(keys, values, group)
    assert form.entry_width == shape[0] * shape[1] + shape[2] * shape[3]
    buffer = torch.full((batch, tokens + 2, form.entry_width), torch.nan, dtype=dtype)
    entries = form.entries(keys, values, buffer[:, 1:-1])
    assert buffer[:, [0, -1]].isnan().all()
    back = form.split(entries)
    assert torch.equal(back[0], keys)
    assert torch.equal(back[1], values)
    assert back[0].untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert torch.equal(entries[0, 0, : shape[1]], keys[0, 0, 0])
    assert torch.equal(entries[-1, -1, -shape[3] :], values[-1, -1, -1])


@settings(max_examples=100, deadline=None)
@given(shape=st.tuples(*[st.integers(1, 200)] * 4), dtype=st.sampled_from(DTYPES), group=st.integers(1, 1024))
def test_record_bytes(shape: tuple[int, int, int, int], dtype: torch.dtype, group: int) -> None:
    form = RecordFormat(*shape, dtype, group)
    payload = group * (shape[0] * shape[1] + shape[2] * shape[3]) * dtype.itemsize
    assert form.record_bytes % DEVICE_BLOCK == 0
    assert 0 <= form.record_bytes - payload < DEVICE_BLOCK
    assert form.entry_bytes * group == form.payload_width * dtype.itemsize == payload


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "group"),
    [
        (1, 16, torch.float32, 16),  # 128 bytes a token
        (3, 64, torch.bfloat16, 16),  # 768: 16 tokens are 12 KiB
        (4, 64, torch.bfloat16, 16),  # 1 KiB: 16 tokens are 16 KiB to the byte
        (8, 64, torch.bfloat16, 8),  # 2 KiB
        (9, 64, torch.bfloat16, 4),  # 8 tokens would be 18 KiB
        (8, 128, torch.bfloat16, 4),  # 4 KiB: four tokens to the byte
        (32, 128, torch.float32, 4),  # never fewer than 4
    ],
)
def test_default_group_size(heads: int, dim: int, dtype: torch.dtype, group: int) -> None:
    keys, values = pair(heads, dim, heads, dim, 1, 1, dtype)
    form = RecordFormat.of(keys, values, None)
    assert form.group_size == group
    assert group == 4 or group * form.entry_bytes <= TARGET_RECORD_BYTES
    assert group == 16 or 2 * group * form.entry_bytes > TARGET_RECORD_BYTES


def packed(form: RecordFormat, entries: torch.Tensor) -> torch.Tensor:
    """Payloads of entries (n, group size, entry width), in records whose memory held something else."""
    payloads = form.payload(torch.full((len(entries), form.record_bytes), 0xA5, dtype=torch.uint8))
    form.pack(entries, payloads)
    return payloads


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 40)] * 4) | st.tuples(*[st.integers(1, 40)] * 2).map(lambda alike: alike * 2),
    dtype=st.sampled_from((*DTYPES, torch.float64)),
    group=st.integers(1, 20),
    scale=st.sampled_from((1e-30, 1e-3, 1.0, 300.0)),
    seed=st.integers(0, 1000),
)
def test_entries_in_8_bits(
    shape: tuple[int, int, int, int], dtype: torch.dtype, group: int, scale: float, seed: int
) -> None:
    """Unpacked elements differ by at most half a level of their head's and token's largest. The largest does not
    change, except for rounding in bfloat16, which rounds the scales. Packing the result again changes nothing, except
    for rounding in float32 and float64."""
    form = RecordFormat(*shape, dtype, group, 8)
    random = torch.Generator().manual_seed(seed)
    size = torch.rand(3, group, 1, generator=random, dtype=torch.float64) + 0.01
    entries = (torch.randn(3, group, form.entry_width, generator=random, dtype=torch.float64) * size * scale).to(dtype)
    given_ = entries.clone()
    payloads = packed(form, entries)
    assert torch.equal(entries, given_)
    back = form.unpacked(payloads)
    rounds = 0 if dtype.itemsize == 2 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(form.unpacked(packed(form, back)), back, rtol=rounds, atol=0)
    for came, went in zip(form.split(entries), form.split(back), strict=True):
        most = came.double().abs().amax(3, keepdim=True)
        error = (came.double() - went.double()).abs()
        rounding = most * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
        assert (error <= most / 254 * 1.001 + rounding).all()
        rounds = torch.finfo(dtype).eps if dtype == torch.bfloat16 else rounds
        torch.testing.assert_close(went.abs().amax(3), came.abs().amax(3), rtol=rounds, atol=0)
    assert form.payload_bytes <= form.record_bytes < form.payload_bytes + DEVICE_BLOCK
    scales = (form.num_key_heads + form.num_value_heads) * dtype.itemsize
    assert 0 <= form.payload_bytes - group * (form.entry_width + scales) < dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_entries_that_have_8_bits_are_kept_as_they_are(dtype: torch.dtype) -> None:
    keys, values = pair(2, 16, 2, 16, dtype=dtype)
    with pytest.raises(ConfigError, match=f"{dtype}, which has 8 bits already: leave out entry_bits=8"):
        RecordFormat.of(keys, values, 4, 8)
    form = RecordFormat.of(keys, values, 4)
    entries = form.entries(keys, values, torch.empty(2, 5, form.entry_width, dtype=dtype))[:, :4]
    records = aligned_empty(2, form.record_bytes)
    form.fill(entries, records)
    assert torch.equal(form.unpacked(form.payload(records)).view(torch.uint8), entries.view(torch.uint8))


def test_the_least_numbers_keep_their_sign_in_8_bits() -> None:
    """Their scale is not a normal number, and so imprecise that they are more than 127 times it."""
    form = RecordFormat(1, 4, 1, 4, torch.bfloat16, 1, 8)
    for most in torch.logspace(-39, -35, 200).bfloat16().tolist():
        entries = torch.tensor([1, -1, 0.5, 0] * 2).mul(most).bfloat16().view(1, 1, 8)
        back = form.unpacked(packed(form, entries))
        assert torch.equal(back.sign() * (back != 0), entries.sign() * (back != 0))
        assert (back.abs() <= most * (1 + 2**-6)).all()


def test_zeros_and_numbers_that_are_not_finite_in_8_bits() -> None:
    form = RecordFormat(2, 3, 1, 2, torch.bfloat16, 4, 8)
    entries = torch.ones(2, 4, form.entry_width, dtype=torch.bfloat16)
    entries[0, 1] = 0
    entries[0, 2, 4], entries[1, 3, 7] = torch.inf, torch.nan
    back = form.unpacked(packed(form, entries))
    expected = entries.clone()
    expected[0, 2, 3:6] = expected[1, 3, 6:] = torch.nan
    assert torch.equal(back.isnan(), expected.isnan())
    assert torch.equal(back.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize(
    ("heads", "dim", "group", "record_bytes"),
    [
        (3, 64, 10, 4096), (1, 256, 15, 8192), (4, 128, 15, 16384), (8, 128, 7, 16384), (32, 128, 4, 36864),
        (1, 2, 16, 4096),
    ],
)  # fmt: skip
def test_default_group_size_in_8_bits(heads: int, dim: int, group: int, record_bytes: int) -> None:
    """The fewest bytes a token, within 16 KiB if four tokens are: SmolLM2, Gemma 3 270M, and larger models."""
    form = RecordFormat.of(*pair(heads, dim, heads, dim, 1, 1, torch.bfloat16), None, 8)
    assert (form.group_size, form.record_bytes) == (group, record_bytes)


def test_of_two_types_the_one_that_attention_uses_or_that_holds_both() -> None:
    keys, values = pair(1, 4, 1, 4)
    assert RecordFormat.of(keys, values.bfloat16(), 4).dtype == torch.float32
    assert RecordFormat.of(keys.half(), values.bfloat16(), 4).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert RecordFormat.of(keys, values.bfloat16(), 4).dtype == torch.bfloat16
        assert RecordFormat.of(keys.half(), values, 4).dtype == torch.bfloat16
        assert RecordFormat.of(keys, values, 4).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_layer_writes(dtype: torch.dtype) -> None:
    """Records in the store: payload as it came, in order, and zeros to the end; keys and values of other widths."""
    keys, values = pair(2, 3, 1, 5, 22, 2, dtype)
    config = OffloadConfig(group_size=4, num_recent=3, engine="memory")
    shared = Shared(config, Storage(config, None))
    try:
        layer = OffloadLayer(shared, 0)
        for start, stop in ((0, 13), (13, 14), (14, 22)):
            layer.update(keys[:, :, start:stop], values[:, :, start:stop])
        assert layer.history.units == 4
        out = aligned_empty(8, layer.history.form.record_bytes)
        out.fill_(255)
        shared.storage.prefetcher.flush()
        layer.history.store.read(layer.history.table.ids.reshape(-1).astype(np.int64), out)
        payload = layer.history.form.payload(out)
        assert not out[:, payload.shape[1] * dtype.itemsize :].any()
        assert out.shape[1] > payload.shape[1] * dtype.itemsize
        sealed = layer.history.form.split(payload.reshape(2, 16, layer.history.form.entry_width))
        assert torch.equal(sealed[0], keys[:, :, :16])
        assert torch.equal(sealed[1], values[:, :, :16])
        assert torch.equal(layer.history.whole()[0], keys)
        assert torch.equal(layer.history.whole()[1], values)
    finally:
        shared.storage.close()
