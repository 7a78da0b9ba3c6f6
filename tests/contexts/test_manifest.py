"""A manifest and states by another writer, every digest right: refused by a named error, and nothing else happens."""

from __future__ import annotations

import copy
import functools
import json
import operator
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
from hostile_files import digest_of, manifest_of, replace_state, sign, write
from saved_contexts import answer, copy_of, opened, prefilled, rewrite_state, rewrite_values, same

from hf_offload_cache import errors
from hf_offload_cache.contexts import MANIFEST_NAME, Manifest, read_manifest

NAMED = (errors.ContextError, errors.StoreError, errors.EncryptionKeyError, errors.ConfigError)
MOST_BYTES = 64 * 2**20
"""That refusing may allocate: a context here has 2 MiB, and a manifest at most 16."""
HUGE = 2**62

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def context(saved_once: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy, of which the manifest may be changed; beside it nothing appears, changes or goes."""
    outside = tmp_path / "outside.records"
    outside.write_bytes(b"outside" * 1000)
    yield copy_of(saved_once, tmp_path / "context", MANIFEST_NAME)
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


DROP = object()
"""Stands for a value that is taken away."""


def put(where: str, value: Any) -> Change:
    """A change of what lies at `where`, its steps apart by dots: `value` takes its place, or is called with it."""
    *way, last = (int(step) if step.isdigit() else step for step in where.split("."))

    def change(tree: Any) -> None:
        for step in way:
            tree = tree[step]
        if value is DROP:
            del tree[last]
        else:
            tree[last] = value(tree[last]) if callable(value) else value

    return change


def cases(table: dict[str, list[Any]], **others: Change) -> Any:
    """The parameters `change`: each value at its place, and `others`."""
    found = [
        pytest.param(put(where, value), id=f"{where} {number}")
        for where, values in table.items() for number, value in enumerate(values)
    ]  # fmt: skip
    found += [pytest.param(change, id=name) for name, change in others.items()]
    return pytest.mark.parametrize("change", found)


def test_rewriting_by_itself_is_no_change(context: Path) -> None:
    """Else the tests below would prove nothing."""
    with opened(context) as cache:
        expected = answer(cache)
    for which in (None, 0, 1, 2):
        rewrite_state(context, which, lambda tree: None)
    with opened(context) as cache:
        assert same(answer(cache), expected)
    assert read_manifest(context).to_bytes() == Manifest.parse((context / MANIFEST_NAME).read_bytes(), "x").to_bytes()
    assert json.loads(read_manifest(context).to_bytes())["digest"] == digest_of(manifest_of(context))


# --- values of the manifest ----------------------------------------------------------------------------------------

NAMES = [
    "../../outside.records", "../outside.records", "/etc/passwd", "0" * 33 + ".records", "0" * 31 + ".records",
    "0" * 32 + ".records\n", "0" * 32 + ".records/..", "0" * 32, "A" * 32 + ".records", "manifest.json", "", ".", "..",
    "0" * 32 + ".record\u017f", "\u0660" * 32 + ".records", "\0" * 32 + ".records", 5, None, ["0" * 32 + ".records"],
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_lead_elsewhere(context: Path, name: Any) -> None:
    before = manifest_of(context)
    for place in ("layers.0.parts.0.file", "layers.0.state.file", "state.file"):
        sign(context, before)
        found = name.replace(".records", ".state") if isinstance(name, str) and "state" in place else name
        rewrite_values(context, put(place, found))
        assert "manifest" in str(refused(context))


COUNTS: list[Any] = [-1, 0, 1, 2, 2**31, 2**47, 2**48, HUGE, 2**64, 10**400]
COUNTS += [1.5, 1e300, float("nan"), float("inf"), True, None, "7", []]
COUNTED = [
    "layers.0.parts.0.records", "layers.0.state.bytes", "state.bytes", "layers.0.record_bytes", "tokens", "batch",
    "version",
]  # fmt: skip


@pytest.mark.parametrize("place", COUNTED)
def test_absurd_counts(context: Path, place: str) -> None:
    before = manifest_of(context)
    for value in COUNTS:
        sign(context, before)
        if value == 1 and value is not True and place in ("version", "batch"):
            continue  # as it is
        rewrite_values(context, put(place, value))
        try:
            refused(context)
        except BaseException as error:
            error.add_note(f"{place} is {value}")
            raise


SEALED = {"kind": "aes-256-gcm", "salt": "00" * 32}
WRONG: dict[str, list[Any]] = {
    "format": ["a format"], "cache": ["OffloadCache", "os.system"], "more": [1], "layers": [[], 3],
    "layers.0": [None], "layers.2": [DROP], "layers.0.more": [1], "layers.0.parts.0.offset": [0],
    "layers.0.kind": ["kept", "shared"], "layers.1.kind": ["offloaded"], "layers.0.record_bytes": [8192],
    "layers.0.parts": [[], lambda parts: parts + parts[:1], lambda parts: parts * 1000],
    "layers.0.parts.0.guard": [{"kind": "none"}, {}, SEALED], "key_check": ["00" * 16, 7], "config": [[]],
    "config.more": [1], "config.num_sinks": [DROP], "config.num_selected": [-7],
    "config.group_size": ["many", 4, json.loads("[" * 900 + "]" * 900)], "identity": [[], {}],
    "identity.model_type": [7, "gpt2"], "tokens": [10_000], "batch": [2], "library": ["x" * 17 * 2**20],
}  # fmt: skip


@cases(
    {**WRONG, "layers": [*WRONG["layers"], lambda layers: layers + layers[:1], lambda layers: layers * 33_000,
                         lambda layers: [layers[1], layers[0], layers[2]]]},
    records_of_a_kept_layer=lambda values: values["layers"][1].update(parts=values["layers"][0]["parts"]),
    records_of_another_layer=lambda values: values["layers"][0].update(parts=values["layers"][2]["parts"]),
    state_of_another_layer=lambda values: values["layers"][0].update(state=values["layers"][2]["state"]),
    state_of_the_cache=lambda values: values["layers"][0].update(state=values["state"]),
    state_of_a_layer=lambda values: values.update(state=values["layers"][0]["state"]),
    half_the_records_of_twice_the_size=lambda values: (
        put("layers.0.record_bytes", 8192)(values), put("layers.0.parts.0.records", lambda count: count // 2)(values)
    ),
    empty=lambda values: values.clear(),
)  # fmt: skip
def test_wrong_values(context: Path, change: Change) -> None:
    rewrite_values(context, lambda values: (change(values), None)[1])
    refused(context)


def test_another_version_is_named_in_one_line(context: Path) -> None:
    rewrite_values(context, put("version", 2))
    said = refused(context, "its format has version 2 and this library reads 1: save the context anew$")
    assert "\n" not in str(said)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_any_value_of_another_type_or_missing(context: Path, seed: int) -> None:
    """A value anywhere, replaced or taken away: refused, or of no importance to what the context answers."""
    draw, before = random.Random(seed), manifest_of(context)
    with opened(context, exact=True) as cache:
        expected = answer(cache)
    values: list[Any] = [None, True, -1, 0, HUGE, 1e300, float("nan"), "", "x", "\ud800", [], {}, [[]], {"": 0}]
    for _ in range(60):
        changed = copy.deepcopy(before)
        *way, last = _anywhere(changed, draw)
        value = draw.choice(values)
        value = DROP if draw.random() < 0.3 else value
        held = functools.reduce(operator.getitem, way, changed)
        if value is DROP:
            del held[last]
        else:
            held[last] = value
        sign(context, changed)
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
    "nothing": b"", "no JSON": b"{", "a number": b"7", "a list": b"[]", "null": b"null", "NaN": b"NaN",
    "an empty object": b"{}", "not UTF-8": b'{"manifest": "\xff"}', "UTF-16": '{"manifest": {}}'.encode("utf-16"),
    "deep": b"[" * 10**6, "deep and closed": b'{"manifest": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "deep objects": b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
    "a long number": b'{"manifest": {"format": "hf_offload_cache context", "version": ' + b"9" * 10**5 + b"}}",
    "the key twice": b'{"manifest": {}, "manifest": []}', "zeros": bytes(5000),
}  # fmt: skip


@pytest.mark.parametrize("what", TEXTS)
def test_texts(context: Path, what: str) -> None:
    write(context / MANIFEST_NAME, TEXTS[what])
    assert "manifest" in str(refused(context))


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_key_for_what_is_not_encrypted(context: Path) -> None:
    """Else what is saved from there would look encrypted, and its records would not be."""
    pytest.importorskip("cryptography")
    assert "not encrypted" in str(refused(context, encryption_key=lambda: bytes(32)))


# --- states --------------------------------------------------------------------------------------------------------

def cut(dim: int, stop: int = -1) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda held: held.narrow(dim, 0, held.shape[dim] + stop).contiguous()


Held = torch.Tensor
FORM, TABLE, TAIL = "layer.history.form", "layer.history.table", "layer.history.tail"
SUMMARY = "layer.predictor.summary"
LAYERS: dict[str, list[Any]] = {
    "tags": [[], [[1, 2]]],
    "tags.0": [cut(0), Held.long, Held.flatten, lambda tags: torch.nn.functional.pad(tags, (0, 1))],
    FORM: [DROP], f"{FORM}.key_dim": [DROP, 2**19], f"{FORM}.more": [1],
    f"{FORM}.dtype": ["float32", torch.float64, torch.int32],
    f"{FORM}.group_size": [0, -8, HUGE, True, 8.0, 16, 4],
    "layer.history.length": [-1, HUGE, None, 600.0, 601],
    TABLE: [
        Held.long, Held.float, lambda table: table[0].contiguous(), lambda table: table.repeat(2, 1), cut(0),
        lambda table: table - 1, lambda table: table + 1, lambda table: table * 0 + 2**31 - 1, cut(1), [0],
    ],
    TAIL: [cut(2), Held.half, cut(1), lambda tail: tail.repeat(2, 1, 1), 0],
    "layer.history": [None], "layer.state": ["whatever", [1]], SUMMARY: [DROP, 5],
    f"{SUMMARY}.keys": [Held.flatten, Held.long, Held.bool, cut(2), cut(1, -8), None],
    f"{SUMMARY}.adapter": [Held.flatten, Held.long], f"{SUMMARY}.queries": [3], f"{SUMMARY}.scale": [None],
    "layer.predictor.fitted_at": ["now", None], "layer.scaling": ["large", None], "layer.predictor.adapter": [3],
}  # fmt: skip


def _both(*changes: tuple[str, Any]) -> Change:
    def change(tree: Any) -> None:
        for where, value in changes:
            put(where, value)(tree)

    return change


def _of_adapter(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """What the summary does not have has the adapter's values, changed."""

    def changing(tree: Any) -> None:
        summary = tree["layer"]["predictor"]["summary"]
        summary[name] = change(summary["adapter"] if summary[name] is None else summary[name]).contiguous()

    return changing


def _shorter(tree: Any) -> None:
    """A layer that agrees with itself, and not with the others."""
    _both((TABLE, cut(1)), ("layer.history.length", lambda length: length - 8))(tree)
    if tree["layer"]["predictor"]["summary"] is not None:
        put(f"{SUMMARY}.keys", cut(1, -8))(tree)


def _rows(rows: int) -> Change:
    def repeated(held: torch.Tensor) -> torch.Tensor:
        return held[:1].expand(rows, *held.shape[1:]).contiguous()

    def change(tree: Any) -> None:
        _both((TABLE, repeated), (TAIL, repeated))(tree)
        if tree["layer"]["predictor"]["summary"] is not None:
            put(f"{SUMMARY}.keys", repeated)(tree)

    return change


@cases(
    LAYERS,
    nothing=lambda tree: {},
    a_list=lambda tree: [tree],
    none=lambda tree: {"layer": None, "tags": []},
    heads_and_sizes_exchanged=put(FORM, lambda form: {**form, "num_key_heads": 16, "key_dim": 2}),
    keys_and_values_of_unlike_sizes=put(FORM, lambda form: {**form, "key_dim": 8, "value_dim": 24}),
    heads_twice=put(
        FORM, lambda form: {**form, "num_key_heads": 4, "key_dim": 8, "num_value_heads": 4, "value_dim": 8}
    ),
    one_group_less=_shorter,
    one_token_less=_both((TAIL, cut(1)), ("layer.history.length", 599)),
    two_sequences=_rows(2),
    no_sequence=_rows(0),
    keys_of_no_rank=_both((f"{SUMMARY}.keys", cut(2, -8)), (f"{SUMMARY}.adapter", lambda held: held[:, :, :0])),
    queries_of_another_shape=_of_adapter("queries", lambda held: held[:1]),
    queries_of_whole_numbers=_of_adapter("queries", Held.long),
    scale_of_another_shape=_of_adapter("scale", lambda held: held[:-1]),
    scale_of_whole_numbers=_of_adapter("scale", Held.long),
)
def test_states_of_a_layer_that_do_not_fit(context: Path, change: Change) -> None:
    """Refused when it is opened: no step begins with a layer that another one does not go with."""
    rewrite_state(context, 2, change)
    refused(context)


@cases({
    "layer": [{}, [1]], "layer.more": [1], "layer.update": [1],
    "layer.keys": [None, 1, Held.long, lambda keys: keys.repeat(2, 1, 1, 1)],
    "layer.cumulative_length": [-5, "many", 7],
})  # fmt: skip
def test_states_of_transformers_layers_that_do_not_fit(context: Path, change: Change) -> None:
    rewrite_state(context, 1, change)
    refused(context)


@cases(
    {
        "ids": [
            None, [1, 2], lambda ids: ids[0].contiguous(), Held.float, Held.int, lambda ids: ids.repeat(2, 1), cut(1),
            lambda ids: ids.repeat(1, 2), lambda ids: ids[:, :0],
        ],
        "padded": [DROP, [1]],
        "media": [
            None, {}, [1], [()], [(0, 1, 2)], [(5, 1, 2, "0" * 32)], [(0, 2, 2, "0" * 32)], [(0, 1, 2**40, "0" * 32)],
            [(0, 1, 2, "0" * 31)], [(0, True, 2, "0" * 32)], [(0, 1, 2, 7)],
        ],
    },
    nothing=lambda tree: {},
)  # fmt: skip
def test_states_of_the_cache_that_do_not_fit(context: Path, change: Change) -> None:
    rewrite_state(context, None, change)
    refused(context)


def _raw_state(context: Path, data: bytes) -> None:
    """`data` as layer 2's state, with its digest."""
    manifest = manifest_of(context)
    replace_state(context, manifest, 2, data)
    sign(context, manifest)


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


def test_another_cache_goes_on(saved_once: Path) -> None:
    """After all of these, in the same process."""
    with opened(saved_once) as cache:
        found = answer(cache)
    with prefilled() as cache:
        assert same(found, answer(cache))
    assert manifest_of(saved_once)["tokens"] == saved_contexts.LONG
