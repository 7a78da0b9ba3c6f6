"""Whatever bytes of a saved context change: a named error, or the answer of the context as it was. Never another."""

from __future__ import annotations

import gc
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import saved_contexts
from harness import Decoded
from hostile_files import manifest_of
from saved_contexts import answer, copy_of, files_of, opened, prefilled, same

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, errors
from hf_offload_cache.testing import open_descriptors

BLOCK = 4096
KEY = bytes(range(32))
LEAST = 250
"""Corruptions tried, where each file has a few; the default run tries every fourth one."""

NAMED = (errors.ContextError, errors.CorruptRecordError, errors.EncryptionKeyError, errors.ConfigError)


@dataclass(frozen=True)
class Corruption:
    """What is done to which file of a context: `change(content)` is what is there instead, None: nothing."""

    what: str
    file: str
    change: Callable[[bytes], bytes | None]


@dataclass(frozen=True)
class Saved:
    """A context, another one of the same model, and what the first answers: to each way of opening it."""

    folder: Path
    other: Path
    fields: dict[str, Any]
    answers: dict[bool, Decoded]
    cls: type[Any]
    named: dict[str, np.ndarray]
    """Of each file of records, by what it is, which hold something that is attended to: (count,), bool."""

    @property
    def record(self) -> tuple[int, int, int]:
        """Bytes of a record, of what of it is not padding, and of the keys of a token."""
        sizes = {AbstractTreeCache: (2 * BLOCK, 2 * BLOCK, 64), ClusterCache: (BLOCK, 2048, 64)}
        return sizes.get(self.cls, (BLOCK, 2048, 128))

    def reaches(self, file: str, content: bytes, changed: bytes | None) -> bool:
        """Whether a change of a file of records is one of a record that is attended to."""
        if changed is None or len(changed) != len(content):
            return True
        differ = np.frombuffer(content, dtype=np.uint8) != np.frombuffer(changed, dtype=np.uint8)
        return bool(self.named[file][np.unique(differ.nonzero()[0] // self.record[0])].any())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Plain, encrypted, with abstracts and replicas, in clusters. Some records of their own lie above the first: two
    parts a layer."""
    found = {}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {}, "encrypted": {"encryption_key": lambda: KEY}, "tree": {"cls": AbstractTreeCache},
        "clusters": {"cls": ClusterCache},
    }  # fmt: skip
    for kind, fields in kinds.items():
        if kind == "encrypted":
            pytest.importorskip("cryptography")
        folder = tmp_path_factory.mktemp(kind)
        for name, seed in (("one", 7), ("other", 8)):
            with prefilled(seed, **fields) as cache:
                cache.fork().close()
                saved_contexts.feed(cache, saved_contexts.ids(100 if "cls" in fields else 40, seed + 10))
                cache.save(folder / name)
        answers = {}
        for exact in (True, False):
            with opened(folder / "one", exact=exact, **fields) as cache:
                answers[exact] = answer(cache, 2)
        with opened(folder / "one", exact=True, **fields) as cache:
            named = {}
            for layer in cache.offloaded:
                live = layer.live(layer.freeze())
                named.update({f"records {layer.layer_idx}.{part}": own for part, own in enumerate(live)})
        cls = fields.get("cls", DiskSwapCache)
        found[kind] = Saved(folder / "one", folder / "other", fields, answers, cls, named)
    return found


def flip(position: int, bit: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        return bytes(changed)

    return change


def put(position: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:position] + data + content[position + len(data) :]


def swap(one: int, other: int, record: int) -> Callable[[bytes], bytes]:
    """Two records of `record` bytes change places."""

    def change(content: bytes) -> bytes:
        first, second = (content[at * record : (at + 1) * record] for at in (one, other))
        return put(other * record, first)(put(one * record, second)(content))

    return change


def in_any_file(file: str, content: bytes, others: list[bytes]) -> Iterator[Corruption]:
    """First and last byte, cuts, what is added, zeros, another file's content, nothing."""
    size = len(content)
    changes: dict[str, Callable[[bytes], bytes | None]] = {
        "first byte": flip(0, 0),
        "last byte": flip(size - 1, 7),
        "cut by a byte": lambda content: content[:-1],
        "cut by a block": lambda content: content[:-BLOCK],
        "cut to nothing": lambda content: b"",
        "a byte more": lambda content: content + b"\0",
        "a block more": lambda content: content + bytes(BLOCK),
        "all zeros": lambda content: bytes(len(content)),
        "first block zeros": put(0, bytes(min(BLOCK, size))),
        "missing": lambda content: None,
    }
    for number, other in enumerate(others):
        if other != content:
            changes[f"another file's content, {number}"] = lambda content, other=other: other
    for what, change in changes.items():
        yield Corruption(what, file, change)


def in_manifest(content: bytes, draw: random.Random, each: int) -> Iterator[Corruption]:
    """Of every value and every name of a value, `each` bits; digits and signs between them too."""
    text = content.decode()
    fields: dict[str, list[int]] = {}
    for found in re.finditer(r'"(\w+)": ("[^"]*"|[-\w.]+)', text):
        fields.setdefault(f"name of {found[1]}", []).extend(range(found.start(1), found.end(1)))
        fields.setdefault(f"value of {found[1]}", []).extend(range(found.start(2), found.end(2)))
    fields["signs"] = [at for at, sign in enumerate(text) if sign in '{}[]:,"']
    for field, positions in fields.items():
        for _ in range(each):
            position = draw.choice(positions)
            yield Corruption(f"bit of {field}", "manifest", flip(position, draw.randrange(8)))
        yield Corruption(f"zero in {field}", "manifest", put(draw.choice(positions), b"\0"))
        yield Corruption(f"digit in {field}", "manifest", put(draw.choice(positions), b"7"))


def in_state(file: str, content: bytes, draw: random.Random, each: int, encrypted: bool) -> Iterator[Corruption]:
    """Every tensor and the safetensors header; an encrypted one has no parts to tell apart."""
    places = {"blob": range(len(content))}
    if not encrypted:
        start = 8 + int.from_bytes(content[:8], "little")
        places = {"size of the header": range(8), "header": range(8, start)}
        for name, where in json.loads(content[8:start]).items():
            first, stop = where["data_offsets"]
            if stop > first:
                places[f"tensor {name}"] = range(start + first, start + stop)
    for place, positions in places.items():
        for _ in range(each if not encrypted else 4 * each):
            yield Corruption(f"bit of {place}", file, flip(draw.choice(positions), draw.randrange(8)))
        yield Corruption(f"byte of {place}", file, put(draw.choice(positions), b"\x5a"))
        yield Corruption(f"{place} zeroed", file, put(positions[0], bytes(min(BLOCK, len(positions)))))


def in_records(
    file: str, content: bytes, draw: random.Random, each: int, sizes: tuple[int, int, int]
) -> Iterator[Corruption]:
    """Keys, values and padding of records anywhere; whole records. `sizes`: see `Saved.record`."""
    record, payload, keys = sizes
    count, entry = len(content) // record, 2 * keys
    parts = {
        "keys": lambda: draw.randrange(8) * entry + draw.randrange(keys),
        "values": lambda: draw.randrange(8) * entry + keys + draw.randrange(keys),
        "padding": lambda: draw.randrange(payload, record),
    }
    for part, place in parts.items():
        for number in range(each if part != "padding" or payload < record else 0):
            position = draw.randrange(count) * record + place()
            change = flip(position, draw.randrange(8)) if number % 3 else put(position, b"\xff")
            yield Corruption(f"{part} of a record", file, change)
    for _ in range(each):
        yield Corruption("record zeroed", file, put(draw.randrange(count) * record, bytes(record)))
        one, other = draw.sample(range(count), 2) if count > 1 else (0, 0)
        if one != other:
            yield Corruption("records swapped", file, swap(one, other, record))
            start, place = one * record, other * record
            yield Corruption("record copied", file, lambda c, s=start, p=place: put(p, c[s : s + record])(c))


def corruptions(saved: Saved, seed: int, each: int) -> Iterator[Corruption]:
    draw, encrypted = random.Random(seed), "encryption_key" in saved.fields
    files, foreign = files_of(saved.folder), files_of(saved.other)
    contents = {file: (saved.folder / name).read_bytes() for file, name in files.items()}
    assert manifest_of(saved.folder)["layers"][0]["parts"][1:], "there are to be two parts"
    for file, content in contents.items():
        others = [(saved.other / foreign[file]).read_bytes()]
        others += [other for name, other in contents.items() if name.split()[0] == file.split()[0] and name != file]
        yield from in_any_file(file, content, others)
        if file == "manifest":
            yield from in_manifest(content, draw, each)
        elif file.startswith("records"):
            yield from in_records(file, content, draw, 2 * each, saved.record)
        elif file.startswith("replicas"):
            yield from in_records(file, content, draw, 1, (BLOCK, BLOCK, 64))
        else:
            yield from in_state(file, content, draw, each, encrypted)


def outcome(folder: Path, saved: Saved, exact: bool, engine: str) -> str:
    """"refused", "refused in a step" or "the same". Raises whatever is not named, and `AssertionError`."""
    try:
        cache = opened(folder, exact=exact, engine=engine, **saved.fields)
    except NAMED as error:
        assert re.search(r"layer \d|manifest|cache|context", str(error)), f"does not say where: {error}"
        return "refused"
    with cache:
        try:
            found = answer(cache, 2)
        except NAMED as error:
            assert re.search(r"layer \d", str(error)), f"does not name the layer: {error}"
            return "refused in a step"
    assert same(found, saved.answers[exact]), "OTHER TOKENS OR LOGITS"
    return "the same"


def sweep(saved: Saved, tmp_path: Path, seed: int, each: int, both: bool, every: int) -> Counter[tuple[str, str]]:
    """How many corruptions ended how, by kind of file. Now and then, and at the end, the context itself answers."""
    outcomes: Counter[tuple[str, str]] = Counter()
    names = files_of(saved.folder)
    tried = list(corruptions(saved, seed, each))
    random.Random(seed).shuffle(tried)  # those of one place follow each other
    for number, corruption in enumerate(tried[::every]):
        target = copy_of(saved.folder, tmp_path / f"{number}", names[corruption.file])
        path = target / names[corruption.file]
        content = path.read_bytes()
        changed = corruption.change(content)
        if changed == content:
            continue
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        records = corruption.file.startswith("records")
        for exact in (True, False) if both or (records and number % 4 == 0) else (True,):
            engine = ("auto", "mapped", "memory")[number % 3] if records else "mapped"
            try:
                found = outcome(target, saved, exact, engine)
            except BaseException as error:
                mode = "exact" if exact else "sparse"
                error.add_note(f"{corruption.what} in {corruption.file}, {mode}, engine {engine}, {target}")
                raise
            if records and exact and saved.reaches(corruption.file, content, changed):
                assert found != "the same", f"{corruption.what}: nobody noticed"
        outcomes[corruption.file.split()[0], found if changed is not None else "refused"] += 1
        for left in target.iterdir():
            left.unlink()
        target.rmdir()
        if number % 100 == 0:
            check_base(saved)
    check_base(saved)
    return outcomes


def check_base(saved: Saved) -> None:
    with opened(saved.folder, exact=True, **saved.fields) as cache:
        assert same(answer(cache, 2), saved.answers[True]), "another cache of this process answers something else"


def try_all(
    base: dict[str, Saved], tmp_path: Path, seed: int, each: int, both: bool, every: int = 1
) -> Counter[tuple[str, str]]:
    gc.collect()  # what earlier tests left
    before = open_descriptors()
    total: Counter[tuple[str, str]] = Counter()
    for kind, saved in base.items():
        (tmp_path / kind).mkdir()
        total += sweep(saved, tmp_path / kind, seed, each, both, every)
    assert open_descriptors() == before
    print(f"{sum(total.values())} corruptions: {dict(total)}")
    return total


def test_no_corruption_changes_an_answer(
    base: dict[str, Saved], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    total = try_all(base, tmp_path, seed=4, each=1, both=False, every=4)
    record_property("corruptions", sum(total.values()))
    assert sum(total.values()) >= LEAST
    assert {kind for kind, _ in total} == {"manifest", "cache", "layer", "records", "replicas"}
    assert total["records", "refused in a step"] > 12


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_more(base: dict[str, Saved], tmp_path: Path) -> None:
    assert sum(try_all(base, tmp_path, seed=5, each=12, both=True).values()) >= 14 * LEAST
