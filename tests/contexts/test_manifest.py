"""A manifest and states by another writer, every digest right: refused by a named error, and nothing else happens."""

from __future__ import annotations

import copy
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import saved_contexts
import torch
from harness import Decoded, assert_exact
from saved_contexts import (
    answer,
    copy_of,
    digest_of,
    files_of,
    opened,
    prefilled,
    replace,
    rewrite_state,
    rewrite_values,
    same,
    values_of,
    write_values,
)

from hf_offload_cache import errors
from hf_offload_cache.contexts import MANIFEST_NAME, Manifest, read_manifest

NAMED = (errors.ContextError, errors.StoreError, errors.EncryptionKeyError, errors.ConfigError)
MOST_BYTES = 64 * 2**20
"""That refusing may allocate: a context here has 2 MiB, and a manifest at most 16."""
HUGE = 2**62

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    with prefilled() as cache:
        cache.save(folder / "context")
    return folder / "context"


@pytest.fixture
def context(base: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy, of which the manifest may be changed; beside it nothing appears, changes or goes."""
    outside = tmp_path / "outside.records"
    outside.write_bytes(b"outside" * 1000)
    yield copy_of(base, tmp_path / "context", MANIFEST_NAME)
    assert sorted(os.listdir(tmp_path)) == ["context", "outside.records"]
    assert outside.read_bytes() == b"outside" * 1000


def refused(context: Path, match: str | None = None, **fields: Any) -> Exception:
    """Opening raises a named error, for little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(NAMED, match=match) as raised:
            opened(context, **fields).close()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < MOST_BYTES, f"refusing took {most:,} bytes"
    return raised.value


def put(*path: str | int, value: Any) -> Change:
    """A change of what lies at `path`."""

    def change(tree: Any) -> None:
        for step in path[:-1]:
            tree = tree[step]
        tree[path[-1]] = value

    return change


def drop(*path: str | int) -> Change:
    def change(tree: Any) -> None:
        for step in path[:-1]:
            tree = tree[step]
        del tree[path[-1]]

    return change


def test_rewriting_by_itself_is_no_change(context: Path) -> None:
    """Else the tests below would prove nothing."""
    with opened(context) as cache:
        expected = answer(cache)
    for which in (None, 0, 1, 2):
        rewrite_state(context, which, lambda tree: None)
    with opened(context) as cache:
        assert same(answer(cache), expected)
    assert read_manifest(context).to_bytes() == Manifest.parse((context / MANIFEST_NAME).read_bytes(), "x").to_bytes()
    assert json.loads(read_manifest(context).to_bytes())["digest"] == digest_of(values_of(context))


# --- values of the manifest ----------------------------------------------------------------------------------------

NAMES = [
    "../../outside.records",
    "../outside.records",
    "/etc/passwd",
    "0" * 33 + ".records",
    "0" * 31 + ".records",
    "0" * 32 + ".records\n",
    "0" * 32 + ".records/..",
    "0" * 32,
    "A" * 32 + ".records",
    "manifest.json",
    "",
    ".",
    "..",
    "0" * 32 + ".record\u017f",
    "\u0660" * 32 + ".records",
    "\0" * 32 + ".records",
    5,
    None,
    ["0" * 32 + ".records"],
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_lead_elsewhere(context: Path, name: Any) -> None:
    before = values_of(context)
    for place in (("layers", 0, "parts", 0, "file"), ("layers", 0, "state", "file"), ("state", "file")):
        write_values(context, before)
        found = name.replace(".records", ".state") if isinstance(name, str) and place[-2] == "state" else name
        rewrite_values(context, put(*place, value=found))
        assert "manifest" in str(refused(context))


COUNTS: list[Any] = [-1, 0, 1, 2, 2**31, 2**47, 2**48, HUGE, 2**64, 10**400]
COUNTS += [1.5, 1e300, float("nan"), float("inf"), True, None, "7", []]
COUNTED = {
    "records": ("layers", 0, "parts", 0, "records"),
    "bytes of a state": ("layers", 0, "state", "bytes"),
    "bytes of the cache's": ("state", "bytes"),
    "record_bytes": ("layers", 0, "record_bytes"),
    "tokens": ("tokens",),
    "batch": ("batch",),
    "version": ("version",),
}


@pytest.mark.parametrize("place", COUNTED)
def test_absurd_counts(context: Path, place: str) -> None:
    before = values_of(context)
    for value in COUNTS:
        write_values(context, before)
        if value == 1 and value is not True and place in ("version", "batch"):
            continue  # as it is
        rewrite_values(context, put(*COUNTED[place], value=value))
        try:
            refused(context)
        except BaseException as error:
            error.add_note(f"{place} is {value}")
            raise


WRONG: dict[str, Change] = {
    "another format": put("format", value="a format"),
    "another class": put("cache", value="OffloadCache"),
    "a class that does not exist": put("cache", value="os.system"),
    "an additional field": put("more", value=1),
    "an additional field of a layer": put("layers", 0, "more", value=1),
    "an additional field of a part": put("layers", 0, "parts", 0, "offset", value=0),
    "no layers": put("layers", value=[]),
    "layers are a number": put("layers", value=3),
    "a layer is none": put("layers", 0, value=None),
    "a layer too few": drop("layers", 2),
    "a layer too many": lambda values: values["layers"].append(values["layers"][0]),
    "a hundred thousand layers": lambda values: values.update(layers=values["layers"] * 33_000),
    "layers 0 and 1 exchanged": lambda values: values["layers"].insert(0, values["layers"].pop(1)),
    "an offloaded layer is kept": put("layers", 0, "kind", value="kept"),
    "a kept layer is offloaded": put("layers", 1, "kind", value="offloaded"),
    "another kind": put("layers", 0, "kind", value="shared"),
    "records of a kept layer": lambda values: values["layers"][1].update(parts=values["layers"][0]["parts"]),
    "no records": put("layers", 0, "parts", value=[]),
    "the records twice": lambda values: values["layers"][0]["parts"].append(values["layers"][0]["parts"][0]),
    "the records often": lambda values: values["layers"][0].update(parts=values["layers"][0]["parts"] * 1000),
    "another layer's records": lambda values: values["layers"][0].update(parts=values["layers"][2]["parts"]),
    "another layer's state": lambda values: values["layers"][0].update(state=values["layers"][2]["state"]),
    "the cache's state is a layer's": lambda values: values.update(state=values["layers"][0]["state"]),
    "a layer's state is the cache's": lambda values: values["layers"][0].update(state=values["state"]),
    "another record size": put("layers", 0, "record_bytes", value=8192),
    "half the records of twice the size": lambda values: (
        values["layers"][0].update(record_bytes=8192),
        values["layers"][0]["parts"][0].update(records=values["layers"][0]["parts"][0]["records"] // 2),
    ),
    "guard unknown": put("layers", 0, "parts", 0, "guard", value={"kind": "none"}),
    "guard missing": put("layers", 0, "parts", 0, "guard", value={}),
    "guard encrypted": put("layers", 0, "parts", 0, "guard", value={"kind": "aes-256-gcm", "salt": "00" * 32}),
    "key_check of a plain one": put("key_check", value="00" * 16),
    "key_check is a number": put("key_check", value=7),
    "config is a list": put("config", value=[]),
    "a field of config unknown": put("config", "more", value=1),
    "a field of config missing": drop("config", "num_sinks"),
    "a field of config of another type": put("config", "group_size", value="many"),
    "a field of config absurd": put("config", "num_selected", value=-7),
    "group_size of config": put("config", "group_size", value=4),
    "identity is a list": put("identity", value=[]),
    "identity of numbers": put("identity", "model_type", value=7),
    "identity of another model": put("identity", "model_type", value="gpt2"),
    "no identity": put("identity", value={}),
    "tokens more than there are": put("tokens", value=10_000),
    "another batch": put("batch", value=2),
    "empty": lambda values: values.clear(),
    "a deep config": put("config", "group_size", value=json.loads("[" * 900 + "]" * 900)),
    "a long string": put("library", value="x" * 17 * 2**20),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_values(context: Path, what: str) -> None:
    rewrite_values(context, WRONG[what])
    refused(context)


def test_another_version_is_named_in_one_line(context: Path) -> None:
    rewrite_values(context, put("version", value=2))
    said = refused(context, "its format has version 2 and this library reads 1: save the context anew$")
    assert "\n" not in str(said)


@pytest.mark.parametrize("seed", range(4))
def test_any_value_of_another_type_or_missing(context: Path, seed: int) -> None:
    """A value anywhere, replaced or taken away: refused, or of no importance to what the context answers."""
    draw, before = random.Random(seed), values_of(context)
    with opened(context, exact=True) as cache:
        expected = answer(cache)
    values: list[Any] = [None, True, -1, 0, HUGE, 1e300, float("nan"), "", "x", "\ud800", [], {}, [[]], {"": 0}]
    for _ in range(60):
        changed = copy.deepcopy(before)
        *way, last = _anywhere(changed, draw)
        value = draw.choice(values)
        change = drop(*way, last) if draw.random() < 0.3 else put(*way, last, value=value)
        change(changed)
        write_values(context, changed)
        try:
            _refused_or(expected, context)
        except BaseException as error:
            error.add_note(f"{[*way, last]} was {value!r}, or dropped")
            raise


def _anywhere(tree: Any, draw: random.Random) -> list[str | int]:
    """The way to a value in the tree."""
    way: list[str | int] = []
    while isinstance(tree, dict | list) and tree and (not way or draw.random() < 0.85):
        way.append(draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree))))
        tree = tree[way[-1]]
    return way


def _refused_or(expected: Decoded, context: Path) -> None:
    try:
        cache = opened(context, exact=True)
    except NAMED:
        return
    with cache:
        assert_exact(expected, answer(cache))


TEXTS = {
    "nothing": b"",
    "no JSON": b"{",
    "a number": b"7",
    "a list": b"[]",
    "null": b"null",
    "NaN": b"NaN",
    "an empty object": b"{}",
    "not UTF-8": b'{"manifest": "\xff"}',
    "UTF-16": '{"manifest": {}}'.encode("utf-16"),
    "deep": b"[" * 10**6,
    "deep and closed": b'{"manifest": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "deep objects": b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
    "a long number": b'{"manifest": {"format": "hf_offload_cache context", "version": ' + b"9" * 10**5 + b"}}",
    "the key twice": b'{"manifest": {}, "manifest": []}',
    "zeros": bytes(5000),
}


@pytest.mark.parametrize("what", TEXTS)
def test_texts(context: Path, what: str) -> None:
    replace(context, MANIFEST_NAME, TEXTS[what])
    assert "manifest" in str(refused(context))


def test_every_depth(context: Path) -> None:
    """Whatever gives up first: reading JSON, digesting or checking."""
    for depth in (50, 150, 250, 300, 400, 600, 900, 960, 980, 990, 1000):
        text = (context / MANIFEST_NAME).read_text()
        nested = "[" * depth + "]" * depth
        changed = text.replace('"group_size": 8', f'"group_size": {nested}')
        assert changed != text
        try:
            values = json.loads(changed)["manifest"]
            changed = json.dumps({"manifest": values, "digest": digest_of(values)})
        except RecursionError:
            pass
        target = context / MANIFEST_NAME
        replace(context, MANIFEST_NAME, changed.encode())
        refused(context)
        replace(context, MANIFEST_NAME, text.encode())
        assert target.stat().st_size


def test_a_manifest_of_gigabytes_is_not_read(context: Path) -> None:
    with open(context / MANIFEST_NAME, "r+b") as file:
        file.truncate(2**33)
    refused(context, match=r"manifest\.json.*8,589,934,592")


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["manifest", "cache", "layer 0", "records 0.0"])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "folder", "pipe", "socket"])
def test_no_regular_file(context: Path, base: Path, which: str, kind: str) -> None:
    import socket

    path = context / files_of(context)[which]
    path.unlink()
    if kind == "link":
        path.symlink_to(base / path.name)
    elif kind == "link to nothing":
        path.symlink_to("nothing")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        here = os.open(context, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(f"/proc/self/fd/{here}/{path.name}" if os.path.exists("/proc/self/fd") else str(path))
        finally:
            os.close(here)
    refused(context)


def test_a_key_for_what_is_not_encrypted(context: Path) -> None:
    """Else what is saved from there would look encrypted, and its records would not be."""
    pytest.importorskip("cryptography")
    assert "not encrypted" in str(refused(context, encryption_key=lambda: bytes(32)))


@pytest.mark.parametrize("how", ["rows", "mask", "crop"])
def test_what_was_given_up_is_not_saved(tmp_path: Path, how: str) -> None:
    """Neither the keys of sequences that were left out, nor of tokens that were cropped."""
    with prefilled(rows=2) as cache:
        keys = cache.layers[0].history.whole()[0]
        if how == "crop":
            cache.layers[1].activate_past_recording()
            cache.reset()
            saved_contexts.feed(cache, saved_contexts.ids(rows=2))
            cache.crop(-200)
        else:
            cache.batch_select_indices(torch.tensor([0] if how == "rows" else [True, False]))
        cache.save(tmp_path / "context")
    given_up = keys[1, :, 400:560] if how == "crop" else keys[1, :, :560]
    held = b"".join((tmp_path / "context" / name).read_bytes() for name in os.listdir(tmp_path / "context"))
    assert keys[0, :, 8].reshape(-1).numpy().tobytes() in held
    for token in range(0, given_up.shape[1], 40):
        assert given_up[:, token].reshape(-1).numpy().tobytes() not in held


@pytest.mark.parametrize("size", [2**42, 2**43])
def test_a_state_as_large_as_it_says(context: Path, size: int) -> None:
    """Of zeros that take no disk space. It is not read into memory."""
    values = values_of(context)
    path = context / values["layers"][0]["state"]["file"]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    try:
        with open(path, "r+b") as file:
            file.truncate(size)
    except OSError:
        pytest.skip("this file system has no files of that size")
    values["layers"][0]["state"]["bytes"] = size
    write_values(context, values)
    refused(context)


# --- states --------------------------------------------------------------------------------------------------------

HISTORY = ("layer", "history")
LAYERS: dict[str, Change] = {
    "nothing": lambda tree: {},
    "a list": lambda tree: [tree],
    "none": lambda tree: {"layer": None, "tags": []},
    "no tags": put("tags", value=[]),
    "tags too few": lambda tree: tree.update(tags=[tree["tags"][0][:-1]]),
    "tags of another type": lambda tree: tree.update(tags=[tree["tags"][0].long()]),
    "tags are no tensor": put("tags", value=[[1, 2]]),
    "tags flat": lambda tree: tree.update(tags=[tree["tags"][0].reshape(-1)]),
    "tags of one column more": lambda tree: tree.update(tags=[torch.nn.functional.pad(tree["tags"][0], (0, 1))]),
    "no form": drop(*HISTORY, "form"),
    "form of another layout": drop(*HISTORY, "form", "key_dim"),
    "form with more": put(*HISTORY, "form", "more", value=1),
    "dtype is a string": put(*HISTORY, "form", "dtype", value="float32"),
    "dtype of another size": put(*HISTORY, "form", "dtype", value=torch.float64),
    "dtype of whole numbers": put(*HISTORY, "form", "dtype", value=torch.int32),
    "group_size zero": put(*HISTORY, "form", "group_size", value=0),
    "group_size negative": put(*HISTORY, "form", "group_size", value=-8),
    "group_size huge": put(*HISTORY, "form", "group_size", value=HUGE),
    "group_size true": put(*HISTORY, "form", "group_size", value=True),
    "group_size a number of other kind": put(*HISTORY, "form", "group_size", value=8.0),
    "group_size twice": put(*HISTORY, "form", "group_size", value=16),
    "group_size half": put(*HISTORY, "form", "group_size", value=4),
    "key_dim huge": put(*HISTORY, "form", "key_dim", value=2**19),
    "heads and sizes exchanged": lambda tree: tree["layer"]["history"]["form"].update(num_key_heads=16, key_dim=2),
    "keys and values of unlike sizes": lambda tree: tree["layer"]["history"]["form"].update(key_dim=8, value_dim=24),
    "heads twice, of half the size": lambda tree: tree["layer"]["history"]["form"].update(
        num_key_heads=4, key_dim=8, num_value_heads=4, value_dim=8
    ),
    "length negative": put(*HISTORY, "length", value=-1),
    "length huge": put(*HISTORY, "length", value=HUGE),
    "length none": put(*HISTORY, "length", value=None),
    "length a float": put(*HISTORY, "length", value=600.0),
    "length one more": put(*HISTORY, "length", value=601),
    "table of another type": lambda tree: _history(tree, table=lambda table: table.long()),
    "table of floats": lambda tree: _history(tree, table=lambda table: table.float()),
    "table flat": lambda tree: _history(tree, table=lambda table: table[0]),
    "table of two rows": lambda tree: _history(tree, table=lambda table: table.repeat(2, 1)),
    "table of no rows": lambda tree: _history(tree, table=lambda table: table[:0]),
    "table names a record below": lambda tree: _history(tree, table=lambda table: table - 1),
    "table names a record above": lambda tree: _history(tree, table=lambda table: table + 1),
    "table names the largest": lambda tree: _history(tree, table=lambda table: table * 0 + 2**31 - 1),
    "table shorter": lambda tree: _history(tree, table=lambda table: table[:, :-1]),
    "table is no tensor": put(*HISTORY, "table", value=[0]),
    "tail of another width": lambda tree: _history(tree, tail=lambda tail: tail[:, :, :-1]),
    "tail of another type": lambda tree: _history(tree, tail=lambda tail: tail.half()),
    "tail of another length": lambda tree: _history(tree, tail=lambda tail: tail[:, :-1]),
    "tail of two rows": lambda tree: _history(tree, tail=lambda tail: tail.repeat(2, 1, 1)),
    "tail is no tensor": put(*HISTORY, "tail", value=0),
    "one group less, and the length": lambda tree: _shorter(tree, 1),
    "one token less, and the length": lambda tree: (
        _history(tree, tail=lambda tail: tail[:, :-1]), put(*HISTORY, "length", value=599)(tree)
    ),
    "two sequences in all": lambda tree: _rows(tree, 2),
    "no sequence in all": lambda tree: _rows(tree, 0),
    "history none": put(*HISTORY, value=None),
    "state unknown": put("layer", "state", value="whatever"),
    "state a list": put("layer", "state", value=[1]),
    "no summary entry": drop("layer", "predictor", "summary"),
    "summary a number": put("layer", "predictor", "summary", value=5),
    "compact keys flat": lambda tree: _summary(tree, keys=lambda keys: keys.reshape(-1)),
    "compact keys of whole numbers": lambda tree: _summary(tree, keys=lambda keys: keys.to(torch.int64)),
    "compact keys of booleans": lambda tree: _summary(tree, keys=lambda keys: keys.to(torch.bool)),
    "compact keys of another rank": lambda tree: _summary(tree, keys=lambda keys: keys[:, :, :-1]),
    "compact keys of no rank": lambda tree: _summary(
        tree, keys=lambda keys: keys[:, :, :0], adapter=lambda adapter: adapter[:, :, :0]
    ),
    "compact keys too few": lambda tree: _summary(tree, keys=lambda keys: keys[:, :-8]),
    "compact keys none": put("layer", "predictor", "summary", "keys", value=None),
    "adapter flat": lambda tree: _summary(tree, adapter=lambda adapter: adapter.reshape(-1)),
    "adapter of whole numbers": lambda tree: _summary(tree, adapter=lambda adapter: adapter.long()),
    "projection of queries of another shape": lambda tree: _summary(tree, queries=lambda queries: queries[:1]),
    "projection of queries of whole numbers": lambda tree: _summary(tree, queries=lambda queries: queries.long()),
    "projection of queries a number": put("layer", "predictor", "summary", "queries", value=3),
    "scale of another shape": lambda tree: _summary(tree, scale=lambda scale: scale[:-1]),
    "scale of whole numbers": lambda tree: _summary(tree, scale=lambda scale: scale.long()),
    "scale none": put("layer", "predictor", "summary", "scale", value=None),
    "fitted_at a string": put("layer", "predictor", "fitted_at", value="now"),
    "fitted_at none": put("layer", "predictor", "fitted_at", value=None),
    "scaling a string": put("layer", "scaling", value="large"),
    "scaling none": put("layer", "scaling", value=None),
    "adapter a number": put("layer", "predictor", "adapter", value=3),
}


def _history(tree: Any, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name, change in changes.items():
        tree["layer"]["history"][name] = change(tree["layer"]["history"][name]).contiguous()


def _summary(tree: Any, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    summary = tree["layer"]["predictor"]["summary"]
    for name, change in changes.items():
        held = summary["adapter"] if summary[name] is None else summary[name]
        summary[name] = change(held).contiguous()


def _shorter(tree: Any, groups: int) -> None:
    """A layer that agrees with itself, and not with the others."""
    _history(tree, table=lambda table: table[:, :-groups])
    tree["layer"]["history"]["length"] -= 8 * groups
    if tree["layer"]["predictor"]["summary"] is not None:
        _summary(tree, keys=lambda keys: keys[:, : -8 * groups])


def _rows(tree: Any, rows: int) -> None:
    def repeated(held: torch.Tensor) -> torch.Tensor:
        return held[:1].expand(rows, *held.shape[1:])

    _history(tree, table=repeated, tail=repeated)
    if tree["layer"]["predictor"]["summary"] is not None:
        _summary(tree, keys=repeated)


@pytest.mark.parametrize("what", LAYERS)
def test_states_of_a_layer_that_do_not_fit(context: Path, what: str) -> None:
    """Refused when it is opened: no step begins with a layer that another one does not go with."""
    rewrite_state(context, 2, LAYERS[what])
    refused(context)


KEPT: dict[str, Change] = {
    "nothing": put("layer", value={}),
    "a list": put("layer", value=[1]),
    "an attribute more": put("layer", "more", value=1),
    "a method replaced": put("layer", "update", value=1),
    "keys none": put("layer", "keys", value=None),
    "keys a number": put("layer", "keys", value=1),
    "keys of another type": lambda tree: tree["layer"].update(keys=tree["layer"]["keys"].long()),
    "keys of two rows": lambda tree: tree["layer"].update(keys=tree["layer"]["keys"].repeat(2, 1, 1, 1)),
    "length negative": put("layer", "cumulative_length", value=-5),
    "length a string": put("layer", "cumulative_length", value="many"),
    "length another": put("layer", "cumulative_length", value=7),
}


@pytest.mark.parametrize("what", KEPT)
def test_states_of_transformers_layers_that_do_not_fit(context: Path, what: str) -> None:
    rewrite_state(context, 1, KEPT[what])
    refused(context)


CACHE: dict[str, Change] = {
    "nothing": lambda tree: {},
    "ids none": put("ids", value=None),
    "ids a list": put("ids", value=[1, 2]),
    "ids flat": lambda tree: tree.update(ids=tree["ids"][0]),
    "ids of floats": lambda tree: tree.update(ids=tree["ids"].float()),
    "ids of 32 bits": lambda tree: tree.update(ids=tree["ids"].int()),
    "ids of two rows": lambda tree: tree.update(ids=tree["ids"].repeat(2, 1)),
    "ids too few": lambda tree: tree.update(ids=tree["ids"][:, :-1].contiguous()),
    "ids too many": lambda tree: tree.update(ids=tree["ids"].repeat(1, 2)),
    "no ids": lambda tree: tree.update(ids=tree["ids"][:, :0]),
    "padded is missing": drop("padded"),
    "padded a list": put("padded", value=[1]),
}


@pytest.mark.parametrize("what", CACHE)
def test_states_of_the_cache_that_do_not_fit(context: Path, what: str) -> None:
    rewrite_state(context, None, CACHE[what])
    refused(context)


def _raw_state(context: Path, data: bytes) -> None:
    """`data` as layer 2's state, with its digest."""
    import xxhash

    values = values_of(context)
    entry = values["layers"][2]["state"]
    entry.update(file=f"{xxhash.xxh3_128_hexdigest(data)}.state", bytes=len(data))
    replace(context, entry["file"], data)
    write_values(context, values)


def _safetensors(tree: Any, header: dict[str, Any] | None = None, size: int | None = None) -> bytes:
    """A file by hand; the header says whatever it says."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    header = {"tree": {"dtype": "U8", "shape": [len(text)], "data_offsets": [0, len(text)]}, **(header or {})}
    data = json.dumps(header).encode()
    return (len(data) if size is None else size).to_bytes(8, "little") + data + text


RAW: dict[str, bytes] = {
    "empty": b"",
    "eight bytes": bytes(8),
    "a header of 2**63": _safetensors({}, size=2**63),
    "a header of 2**40": _safetensors({}, size=2**40),
    "a tensor of 2**60": _safetensors({}, {"0": {"dtype": "F32", "shape": [2**60], "data_offsets": [2, 2 + 2**62]}}),
    "a tensor of overflow": _safetensors({}, {"0": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [2, 2]}}),
    "tensors that overlap": _safetensors({}, {"0": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}),
    "no tree": b"\x02" + bytes(7) + b"{}",
    "tree no JSON": _safetensors(b"{"),
    "tree not UTF-8": _safetensors(b"\xff\xff"),
    "tree of floats": _safetensors(
        bytes(8), {"tree": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    ),
    "tree deep": _safetensors(b'{"list": [' * 20_000 + b"]}" * 20_000),
    "tree deeper than Python": _safetensors(b'{"list": [' * 450 + b"]}" * 450),
    "tree of an unknown kind": _safetensors({"pickle": "x"}),
    "tree of two kinds": _safetensors({"list": [], "tuple": []}),
    "a tensor that is not there": _safetensors({"tensor": "17"}),
    "a tensor by a list": _safetensors({"tensor": []}),
    "the tree as a tensor of its own": _safetensors({"tensor": "tree"}),
    "a dtype that is none": _safetensors({"dtype": "load"}),
    "a dtype by a number": _safetensors({"dtype": 7}),
    "a dictionary of pairs that are none": _safetensors({"dict": [[1]]}),
    "a dictionary with lists as keys": _safetensors({"dict": [[[], 1]]}),
    "a dictionary of a number": _safetensors({"dict": 7}),
    "a list of a number": _safetensors({"list": 7}),
    "a list": _safetensors([1]),
}


@pytest.mark.parametrize("what", RAW)
def test_states_that_are_none(context: Path, what: str) -> None:
    _raw_state(context, RAW[what])
    assert "layer 2" in str(refused(context))


def test_another_cache_goes_on(base: Path) -> None:
    """After all of these, in the same process."""
    with opened(base) as cache:
        found = answer(cache)
    with prefilled() as cache:
        assert same(found, answer(cache))
    assert saved_contexts.values_of(base)["tokens"] == saved_contexts.LONG
