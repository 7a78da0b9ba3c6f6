"""Contexts of somebody who may write to them, with every digest right: they open and answer, or raise one of our
errors, in bounded memory. Never anything else."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import (
    Leaf,
    Verdict,
    at,
    blake_name,
    change_context,
    faults,
    judged,
    leaves,
    leaves_of,
    manifest_of,
    named,
    packed,
    put,
    rename_records,
    replace_state,
    sign,
    state_of,
    write,
)
from saved_contexts import feed, ids, model, prefilled
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from hf_offload_cache import AbstractTreeCache, ClusterCache, ContextLibrary, DiskSwapCache, SpecCache, verify
from hf_offload_cache.console.main import main
from hf_offload_cache.contexts import MANIFEST_NAME
from hf_offload_cache.errors import BudgetError, ContextError

MIB = 2**20
PEAK = 400 * MIB
"""That any of these contexts, of some hundred KiB, may take at most: what opening the right one takes, and to spare."""
ROOM = 3 * 2**30
"""Address space that they may have: reserved memory that nobody touches is in it."""

CACHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "disk-swap": (DiskSwapCache, {"rank": None}),
    "disk-swap-rank": (DiskSwapCache, {}),
    "cluster": (ClusterCache, {}),
    "spec": (SpecCache, {"rank": None}),
    "tree": (AbstractTreeCache, {}),
}
SPEC: dict[str, Any] = {"num_recent": 8, "num_selected": 32, "block_tokens": 256, "engine": "mapped"}


def made(name: str, folder: Path) -> tuple[Any, Path]:
    """A class and a saved context of it, which has decoded something: it has made choices, and a guess."""
    cls, fields = CACHES[name]
    cache = SpecCache(model(), **SPEC) if cls is SpecCache else prefilled(cls=cls, **fields)
    with cache:
        if cls is SpecCache:
            feed(cache, ids())
        for token in (17, 23):
            feed(cache, torch.tensor([[token]]))
        cache.save(folder / "right")
    return cls, folder / "right"


def use(cls: Any, folder: Path, **fields: Any) -> None:
    with cls.open(folder, model(), engine=fields.pop("engine", "mapped"), **fields) as cache:
        for token in (5, 9, 11):
            feed(cache, torch.tensor([[token]]))


def told(found: list[Verdict]) -> str:
    return "\n".join(map(str, found))


def fuzzed(name: str, folder: Path, count: int, seed: int, *, each: bool = False) -> list[Verdict]:
    """`count` changes of anything; with `each`, as many of every leaf of the cache's state and of the last layer's."""
    cls, right = made(name, folder)
    which: list[Leaf | None] = [*leaves_of(right, None), *leaves_of(right, -1)] if each else [None]

    def cases() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "as it was saved", functools.partial(use, cls, right)
        for number, leaf in enumerate(which * count):
            rng = random.Random(f"{name} {seed} {number}")
            copy = folder / "changed"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(right, copy)
            try:
                what = change_context(copy, rng, leaf)
            except (ValueError, OverflowError):  # it cannot be written so
                continue
            yield f"{name} {number}: {what}", functools.partial(use, cls, copy)

    return judged(cases(), ROOM)


@pytest.mark.parametrize("name", CACHES)
def test_what_a_changed_leaf_does(name: str, tmp_path: Path) -> None:
    found = fuzzed(name, tmp_path, 2, seed=1, each=True)
    assert found[0].kind == "answered" and len(found) > 30
    assert not faults(found, PEAK), told(faults(found, PEAK))
    assert any(one.kind == "refused" for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", CACHES)
def test_what_many_changed_leaves_do(name: str, seed: int, tmp_path: Path) -> None:
    found = fuzzed(name, tmp_path, 150, seed)
    assert not faults(found, PEAK), told(faults(found, PEAK))


# --- manifests --------------------------------------------------------------------------------------------------------


def manifests(right: dict[str, Any], raw: str) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Names of manifests, and what writes each into a folder."""

    def saying(**fields: Any) -> Callable[[Path], None]:
        return lambda folder: sign(folder, {**right, **fields})

    def deep(depth: int) -> Callable[[Path], None]:
        inner = json.dumps({**right, "library": "@"}).replace('"@"', "[" * depth + "]" * depth)
        return lambda folder: write(folder / MANIFEST_NAME, f'{{"digest":"0","manifest":{inner}}}')

    def first_part(**fields: Any) -> Callable[[Path], None]:
        first, *others = right["layers"]
        part, *rest = first["parts"]
        return saying(layers=[{**first, "parts": [{**part, **fields}, *rest]}, *others])

    yield from ((f"nested {depth} deep", deep(depth)) for depth in (40, 900, 985, 3000))
    yield "60,000 layers", saying(layers=right["layers"] * 20000)
    yield "4,000 layers", saying(layers=right["layers"] * 1333)
    yield "2**28 records", first_part(records=2**28)
    yield "2**47 records", first_part(records=2**47)
    first, *others = right["layers"]
    yield "records of 2 GiB", saying(layers=[{**first, "record_bytes": 2**31 - 4096}, *others])
    yield "2**47 tokens", saying(tokens=2**47)
    yield "a state of 2**47 bytes", saying(state={**right["state"], "bytes": 2**47})
    yield "a state elsewhere", saying(state={**right["state"], "file": "../../../etc/passwd"})
    yield "a class with escapes", saying(cache="\x1b[2J\x1b]0;owned\x07DiskSwapCache")
    yield "a library with escapes", saying(library="\x1b[2J")
    yield "a field with escapes", saying(**{"\x1b[2J" * 1000: 1})
    yield "a lone surrogate", saying(library="\ud800")
    yield "a size without end", saying(config={**right["config"], "write_queue": "9" * 400})
    digits = raw.replace('"tokens": ', '"tokens": ' + "9" * 5000)
    yield "a number of 5,000 digits", lambda folder: write(folder / MANIFEST_NAME, digits)
    many = '{"manifest":{"x":[' + "{}," * 1_000_000 + "{}]}}"
    yield "many objects", lambda folder: write(folder / MANIFEST_NAME, many)
    yield "larger than is read", lambda folder: write(folder / MANIFEST_NAME, " " * (17 * MIB) + "{}")


def test_what_a_hostile_manifest_does(saved_once: Path, tmp_path: Path) -> None:
    """Opened, verified, listed, inspected and looked up in a library, whose other contexts are found all the same."""
    library = ContextLibrary(tmp_path / "library")
    shutil.copytree(saved_once, tmp_path / "right")
    with DiskSwapCache.open(tmp_path / "right", model(), engine="mapped") as cache:
        library.save(cache)
    right, raw = manifest_of(tmp_path / "right"), (tmp_path / "right" / "manifest.json").read_text()
    wanted = torch.cat([ids(), torch.tensor([[5]])], 1)

    def look_up() -> None:
        found = library.open(wanted, model(), engine="mapped")
        assert found is not None and found[1] == ids().shape[1]
        found[0].close()

    def console(*arguments: str) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            assert main(list(arguments)) in (0, 1, 2)
        assert all(character.isprintable() or character == "\n" for character in said.getvalue())

    def cases() -> Iterator[tuple[str, Callable[[], object]]]:
        for name, change in manifests(right, raw):
            shutil.rmtree(tmp_path / "changed", ignore_errors=True)
            shutil.copytree(tmp_path / "right", tmp_path / "changed")
            change(tmp_path / "changed")
            stored = tmp_path / "library" / ("0" * 32)
            shutil.rmtree(stored, ignore_errors=True)
            shutil.copytree(tmp_path / "changed", stored)
            yield f"{name}, opened", lambda: use(DiskSwapCache, tmp_path / "changed")
            yield f"{name}, verified", lambda: verify(tmp_path / "changed").findings
            yield f"{name}, listed", lambda: console("ls", str(tmp_path / "library"))
            yield f"{name}, inspected", lambda: console("inspect", str(tmp_path / "changed"))
            yield f"{name}, looked up beside", look_up

    found = judged(cases(), ROOM)
    assert not faults(found, PEAK), told(faults(found, PEAK))
    opened = [one for one in found if one.case.endswith("opened")]
    assert len(opened) > 15 and all(one.kind == "refused" for one in opened), told(opened)
    assert all(one.text.isprintable() for one in found)
    assert all(one.kind == "answered" for one in found if one.case.endswith("beside")), told(found)


def test_a_records_file_of_holes_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are as large as the manifest says, and there are as many bytes: none of them on the disk."""
    with SpecCache(model(), **{**SPEC, "engine": "memory"}) as cache:
        feed(cache, ids())
        cache.save(tmp_path / "context")
    with monkeypatch.context() as patch:
        patch.setattr("hf_offload_cache.contexts.open.free_memory", lambda: 4096)
        with pytest.raises(BudgetError, match=r"keeps its records in host memory.* 4,096 are free"):
            SpecCache.open(tmp_path / "context", model(), engine="memory")
    folder, big = tmp_path / "context", 256 * MIB
    manifest = manifest_of(folder)
    entry = manifest["layers"][0]
    entry["record_bytes"] = big
    rename_records(folder, manifest, 0)
    (part,) = entry["parts"]
    os.truncate(folder / part["file"], big * part["records"])
    sign(folder, manifest)
    cases = [(engine, functools.partial(use, SpecCache, folder, engine=engine)) for engine in ("memory", "mapped")]
    found = judged([*cases, ("verify", lambda: verify(folder))], ROOM)
    assert [one.kind for one in found] == ["refused", "refused", "answered"], told(found)
    assert all("a record of its form has" in one.text for one in found[:2]) and not faults(found[:2], PEAK)
    assert found[2].peak < PEAK + 2 * big  # a record is checked as a whole


def test_a_state_of_holes_takes_no_memory(tmp_path: Path) -> None:
    _, right = made("disk-swap", tmp_path)
    manifest = manifest_of(right)
    name = manifest["layers"][0]["state"]["file"]
    manifest["layers"][0]["state"]["bytes"] = 2**31
    os.truncate(right / name, 2**31)
    sign(right, manifest)
    (found,) = judged([("a state of 2 GiB", functools.partial(use, DiskSwapCache, right))], ROOM)
    assert (found.kind, found.peak < PEAK) == ("refused", True) and "are on the disk" in found.text


def changed_guess(right: Path, guess: torch.Tensor) -> None:
    manifest = manifest_of(right)
    tensors, tree = state_of((right / manifest["state"]["file"]).read_bytes())
    (path,) = (path for path in leaves(tree) if named(tree, path) == "guess")
    tensors[at(tree, path)] = guess
    replace_state(right, manifest, None, packed(tensors, tree))
    sign(right, manifest)


@pytest.mark.parametrize("guess", [-1, 199, 2**62])
def test_a_guess_that_is_no_token_is_refused(tmp_path: Path, guess: int) -> None:
    _, right = made("spec", tmp_path)
    changed_guess(right, torch.tensor([[198]]))  # the last one that the model has
    use(SpecCache, right)
    changed_guess(right, torch.tensor([[guess]]))
    with pytest.raises(ContextError, match="not a known token"):
        SpecCache.open(right, model(), engine="mapped")


def test_a_tensor_that_many_leaves_name_is_refused(tmp_path: Path) -> None:
    """A tree that named one tensor a thousand times would take its memory a thousand times."""
    _, right = made("disk-swap", tmp_path)
    manifest = manifest_of(right)
    tensors, tree = state_of((right / manifest["layers"][0]["state"]["file"]).read_bytes())
    one, other, *_ = (path for path in leaves(tree) if path[-1] == "tensor")
    put(tree, other, at(tree, one))
    replace_state(right, manifest, 0, packed(tensors, tree))
    sign(right, manifest)
    with pytest.raises(ContextError, match=r"layer 0.*the state cannot be read"):
        use(DiskSwapCache, right)


# --- layers of transformers' own --------------------------------------------------------------------------------------


@functools.cache
def linear() -> Any:
    """Two layers with a linear state, and one of full attention."""
    torch.manual_seed(0)
    fields = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields |= {"head_dim": 16, "num_hidden_layers": 3, "vocab_size": 99, "num_experts": 0, "linear_num_value_heads": 4}
    fields |= {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**fields, **kinds)).eval()


def test_what_a_changed_linear_state_does(tmp_path: Path) -> None:
    def fed(cache: Any, tokens: torch.Tensor) -> None:
        with torch.no_grad():
            linear()(tokens, past_key_values=cache)

    with DiskSwapCache(linear(), num_recent=8, group_size=8, engine="mapped") as cache:
        fed(cache, torch.arange(5, 95)[None])
        cache.save(tmp_path / "right")

    def answered(folder: Path) -> None:
        with DiskSwapCache.open(folder, linear(), engine="mapped") as cache:
            fed(cache, torch.tensor([[7]]))
            fed(cache, torch.tensor([[8]]))

    def cases() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "as it was saved", lambda: answered(tmp_path / "right")
        for number in range(25):
            shutil.rmtree(tmp_path / "changed", ignore_errors=True)
            shutil.copytree(tmp_path / "right", tmp_path / "changed")
            with contextlib.suppress(ValueError, OverflowError):
                what = change_context(tmp_path / "changed", random.Random(f"linear {number}"))
                yield f"linear {number}: {what}", lambda: answered(tmp_path / "changed")

    found = judged(cases(), ROOM)
    assert found[0].kind == "answered" and not faults(found, PEAK), told(faults(found, PEAK))


def test_a_check_that_is_missing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_offload_cache.history.state.is_tensor", lambda *_, **__: True)
    assert faults(fuzzed("disk-swap", tmp_path, 2, seed=1, each=True), PEAK)


def test_names_of_objects_follow_from_their_bytes() -> None:
    """What tests/streaming make is made by this."""
    assert blake_name(b"") == "3345524abf6bbe1809449224b5972c41790b6cf2"
