"""What a user may set: every refusal names the field, the rule, the value and what works; nothing is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CASES, SMALL, assert_exact, prompt, reference, tiny, unchanged

from hf_offload_cache import DiskSwapCache, DiskSwapConfig, OffloadCache, OffloadConfig, SpecConfig
from hf_offload_cache.config import parse_size
from hf_offload_cache.errors import ConfigError, StoreError, StoreFullError
from hf_offload_cache.registry import CACHES, cache_class
from hf_offload_cache.testing import open_descriptors


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """The model, the threads and the descriptors are as before."""
    before = open_descriptors(), threading.active_count()
    with unchanged(tiny("llama")):
        yield
    assert (open_descriptors(), threading.active_count()) == before


OUT_OF_RANGE: list[tuple[str, Any, str, Any]] = [
    ("num_sinks", -1, "at least 0", 0),
    ("num_recent", 0, "at least 1", 1),
    ("block_tokens", 15, "at least 16", 16),
    ("group_size", 0, "at least 1", 1),
    ("group_size", 1025, "at most 1024", 1024),
    ("write_queue", "63KiB", "at least 64KiB", "64KiB"),
    ("write_queue", 0, "at least 64KiB", "64KiB"),
    ("num_selected", 0, "at least 1", 1),
    ("reuse_capacity", -5, "at least 0", 0),
    ("rank", 0, "at least 1", 1),
    ("host_memory", 0, "at least one byte", "64GiB"),
]


@pytest.mark.parametrize(("field", "value", "rule", "nearest"), OUT_OF_RANGE)
def test_out_of_range(field: str, value: Any, rule: str, nearest: Any) -> None:
    """The message holds all four, and the nearest value is one that works."""
    with pytest.raises(ConfigError) as caught:
        DiskSwapConfig(**{field: value})
    message = str(caught.value)
    assert field in message
    assert rule in message
    assert str(value) in message
    assert str(nearest) in message.partition("use ")[2]
    assert getattr(DiskSwapConfig(**{field: nearest}), field) == nearest


@pytest.mark.parametrize("name", CACHES)
def test_text_is_not_a_switch(name: str) -> None:
    """Not even "False", which would be true."""
    config_class = cache_class(name).config_class
    switches = [field.name for field in dataclasses.fields(config_class) if isinstance(field.default, bool)]
    assert {"exact", "verify", "candidates"} <= set(switches)
    for switch in switches:
        for value in ("False", 1, []):
            with pytest.raises(ConfigError, match=f"{switch} must be one of"):
                config_class(**{switch: value})


@pytest.mark.parametrize("value", [1.5, "4", True, float("nan")])
@pytest.mark.parametrize("field", ["num_sinks", "num_recent", "block_tokens", "num_selected", "reuse_capacity", "rank"])
def test_not_a_whole_number(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{field} must be a whole number, got {value!r}"):
        DiskSwapConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("exact", "exactly", "bitwise"),
        ("exact", 1, "bitwise"),
        ("engine", "tape", "mapped"),
        ("summary_dtype", "int4", "int8"),
    ],
)
def test_not_one_of(field: str, value: Any, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DiskSwapConfig(**{field: value})
    assert all(part in str(caught.value) for part in (field, repr(value), known))


@pytest.mark.parametrize(
    ("fields", "named", "works"),
    [
        ({"block_tokens": 16, "group_size": 32}, ["block_tokens (16)", "group_size (32)"], {"block_tokens": 32}),
        ({"block_tokens": 16, "group_size": 32}, ["block_tokens=32", "group_size=16"], {"group_size": 16}),
        ({"exact": True, "adapter": "a"}, ["exact=True", "adapter", "exact=False"], {"exact": False}),
        ({"exact": "bitwise", "adapter": "a"}, ["exact='bitwise'", "adapter", "exact=False"], {"adapter": None}),
    ],
)
def test_contradictions(fields: dict[str, Any], named: list[str], works: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        DiskSwapConfig(**fields)
    assert [name for name in named if name not in str(caught.value)] == []
    assert DiskSwapConfig(**{**fields, **works}) is not None


def test_a_rank_beyond_the_models_width() -> None:
    """Two key heads of 16: 32 works, 33 is refused with both numbers."""
    with pytest.raises(ConfigError, match=r"rank must be at most 32.*got 33.*rank=32"):
        DiskSwapCache(tiny("llama"), rank=33)
    with DiskSwapCache(tiny("llama"), rank=32) as cache:
        assert cache.config.rank == 32


def test_unknown_fields_suggest() -> None:
    """A near name; else all names. The base's configuration has no fields of a method."""
    with pytest.raises(ConfigError, match=r"DiskSwapConfig has no field 'num_select'; did you mean 'num_selected'\?"):
        DiskSwapCache(tiny("llama"), num_select=3)
    with pytest.raises(ConfigError, match=r"no field 'zzz'; known: num_sinks, num_recent"):
        DiskSwapCache(tiny("llama"), zzz=1)
    with pytest.raises(ConfigError, match=r"OffloadConfig has no field 'reuse_capacity'"):
        OffloadCache(tiny("llama"), reuse_capacity=1)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KiB", 65536), ("1.5MiB", 3 * 2**19), (" 2 GB ", 2 * 10**9), ("7", 7), (12, 12), ("3b", 3), ("1kb", 1000),
     ("2TB", 2 * 10**12), ("1TiB", 2**40)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "4 parsecs", "-1", "1e3", None, True])
def test_sizes_that_are_none(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?i)MiB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    with pytest.raises(ConfigError):
        DiskSwapConfig(write_queue=text)


def test_a_size_that_is_none_names_its_field() -> None:
    with pytest.raises(ConfigError, match="write_queue"):
        DiskSwapConfig(write_queue="4 parsecs")


def test_configuration_from_a_file(tmp_path: Path) -> None:
    """A JSON object of fields; what is given beside it goes on top, unless the file is wrong in itself."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_selected": 64, "group_size": 8}))
    loaded = DiskSwapConfig.load(path, {"group_size": 4})
    assert loaded == DiskSwapConfig(num_selected=64, group_size=4)
    assert DiskSwapConfig.load(str(path), {}).group_size == 8
    assert DiskSwapConfig.load(loaded, {"num_sinks": 0}) == DiskSwapConfig(num_selected=64, group_size=4, num_sinks=0)
    with DiskSwapCache(tiny("llama"), config=path, num_recent=5) as cache:
        assert (cache.config.num_selected, cache.config.num_recent) == (64, 5)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b'{"rank": ' + b"[" * 40 + b"]" * 40 + b"}", "nested more than 32 deep"),
        (b"[" * 10**6, "lists and objects"),
        (b" " * (5 * 2**20) + b"{}", "more than 4,194,304 bytes"),
        (b'{"write_queue": "' + b"9" * 400 + b'"}', "write_queue must be a number of bytes"),
        (b"\xff\xfe\x00", "JSON"),
        (b'{"num_selectde": 3}', "num_selected"),
        (b'{"rank": "4"}', "rank must be a whole number"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes | None, named: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=named):
        DiskSwapCache(tiny("llama"), config=path)


def test_the_speculative_token_looks_ahead() -> None:
    """So only an explicit True is a mistake."""
    assert {SpecConfig(**given).look_ahead for given in ({}, {"look_ahead": None}, {"look_ahead": False})} == {False}
    with pytest.raises(ConfigError, match="look_ahead must be False in a SpecConfig, got True: leave it out"):
        SpecConfig(look_ahead=True)


def test_a_configuration_of_another_kind() -> None:
    for wrong in (7, OffloadConfig()):
        with pytest.raises(ConfigError, match=rf"DiskSwapConfig.*{type(wrong).__name__}"):
            DiskSwapCache(tiny("llama"), config=wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- the disk


@pytest.mark.parametrize("place", ["a file", "missing", "/proc"])
@pytest.mark.parametrize("engine", ["auto", "mapped"])
def test_a_path_that_cannot_hold_files(tmp_path: Path, place: str, engine: str) -> None:
    path = Path(place) if place == "/proc" else tmp_path / "place"
    if place == "a file":
        path.write_text("")
    with pytest.raises(StoreError) as caught:
        DiskSwapCache(tiny("llama"), path=path, engine=engine)
    assert str(path) in str(caught.value)
    assert "path" in str(caught.value).replace(str(path), "")
    assert isinstance(caught.value, OSError)
    assert caught.value.errno


@pytest.mark.parametrize("engine", ["auto", "mapped"])
def test_no_space_during_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """The second layer finds no room: the error has the numbers, another cache works, and nothing is left."""
    model = tiny("llama")
    real = os.fstatvfs
    calls = []

    def nearly_full(fd: int) -> os.statvfs_result:
        values = list(real(fd))
        calls.append(fd)
        values[1], values[4] = 1, 10**9 if len(calls) == 1 else 5 * 4096
        return os.statvfs_result(values)

    with DiskSwapCache(model, path=tmp_path, engine=engine, exact=True, **SMALL) as full:
        monkeypatch.setattr(os, "fstatvfs", nearly_full)
        with pytest.raises(StoreFullError) as caught, torch.no_grad():
            model(prompt(model), past_key_values=full)
        monkeypatch.undo()
        message = str(caught.value)
        assert "layer 1" in message
        assert str(5 * 4096) in message.replace(",", "") or "20" in message
        with DiskSwapCache(model, path=tmp_path, exact=True, **SMALL) as other:
            assert_exact(reference("llama", "greedy"), CASES["greedy"](model, other))
        full.reset()
        assert_exact(reference("llama", "greedy"), CASES["greedy"](model, full))
    assert list(tmp_path.iterdir()) == []
    assert full.disk_bytes == full.memory_bytes == 0
