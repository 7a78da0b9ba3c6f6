"""What a library does with contexts that are damaged, of another key, or older than they should be."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import combinations
from small_contexts import CACHES, answer, flip, ids, key, model, other_key, prefilled, saved

from hf_offload_cache import AbstractTreeCache, ContextLibrary, DiskSwapCache, SpecCache, publish_context, verify
from hf_offload_cache.errors import ConfigError, ContextMismatchError, CorruptRecordError, EncryptionKeyError

OPEN = {"engine": "mapped"}
pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.fixture
def library(tmp_path: Path) -> ContextLibrary:
    return ContextLibrary(tmp_path / "library")


@pytest.fixture
def path(library: ContextLibrary) -> Path:
    """A context of `TOKENS` in it."""
    return keep(library, TOKENS)


TOKENS = ids()


def keep(library: ContextLibrary, tokens: torch.Tensor, cls: Any = DiskSwapCache, **fields: Any) -> Path:
    with prefilled(cls, tokens, **fields) as cache:
        return library.save(cache)


def prompt(tokens: torch.Tensor) -> torch.Tensor:
    """One that a context of `tokens` matches in full."""
    return torch.cat([tokens, torch.full((1, 1), 17)], 1)


def ask(library: ContextLibrary, tokens: torch.Tensor, **fields: Any) -> Any:
    """The tokens held of `prompt(tokens)` and an answer; None: there was no context."""
    found = library.open(prompt(tokens), model(), **OPEN, **fields)
    if found is None:
        return None
    with found[0] as cache:
        return found[1], answer(cache)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CACHES)
def test_a_read_that_fails_marks_the_entry(library: ContextLibrary, cls: Any) -> None:
    """The next request goes on without it, in every process, and the next save of the text replaces it."""
    path = keep(library, TOKENS, cls)
    shorter = keep(library, TOKENS[:, :200], cls)
    expected = ask(library, TOKENS)
    flip(path)
    with pytest.raises(CorruptRecordError):
        ask(library, TOKENS)
    for again in (library, ContextLibrary(library.folder)):
        with pytest.warns(UserWarning, match=f"{path.name}.* is passed over: it is damaged .*not what was written"):
            found = again.open(prompt(TOKENS), model(), **OPEN)
        assert found is not None and found[1] == 200
        found[0].close()
        damage = {entry.path: entry.damage for entry in again.entries()}
        assert damage[shorter] is None and "a read found damage: layer" in str(damage[path])
    assert keep(library, TOKENS, cls) == path
    assert ask(library, TOKENS) == expected
    assert [entry.damage for entry in library.entries()] == [None, None] and verify(path).whole
    assert not list(path.glob("*.damaged"))


def test_memory_that_is_short_is_no_damage(
    library: ContextLibrary, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's allocator raises a RuntimeError, as a tensor of a wrong shape would."""
    expected = ask(library, TOKENS)
    with prefilled(DiskSwapCache, TOKENS) as cache:
        layer = type(cache.layers[0])
    with monkeypatch.context() as patched:
        patched.setattr(layer, "restore", lambda *_: torch.empty(2**50, dtype=torch.uint8))
        with pytest.warns(UserWarning, match="is passed over: the context does not fit into memory"):
            assert library.open(prompt(TOKENS), model(), **OPEN) is None
    assert [entry.damage for entry in library.entries()] == [None] and not list(path.glob("*.damaged"))
    assert ask(library, TOKENS) == expected


def test_forks_mark_it_too(library: ContextLibrary, path: Path) -> None:
    found = library.open(prompt(TOKENS), model(), **OPEN)
    assert found is not None
    with found[0] as cache, cache.fork() as twin:
        flip(path)
        with pytest.raises(CorruptRecordError):
            answer(twin)
    assert library.entries()[0].damage is not None


def test_a_file_that_is_cut_off_while_it_is_open(library: ContextLibrary, path: Path) -> None:
    found = library.open(prompt(TOKENS), model(), **OPEN)
    assert found is not None
    with found[0] as cache:
        sizes = {file: file.stat().st_size for file in path.glob("*.records")}
        for file in sizes:
            os.truncate(file, 4096)
        with pytest.raises(CorruptRecordError):
            answer(cache)
        for file, size in sizes.items():
            os.truncate(file, size)
    assert library.entries()[0].damage is not None


def test_damage_that_opening_finds_is_marked(library: ContextLibrary) -> None:
    """Of a state; and of records, where they go into memory."""
    for cls, fields, ending in ((DiskSwapCache, OPEN, "state"), (SpecCache, {"engine": "memory"}, "records")):
        path = keep(library, TOKENS, cls)
        flip(path, ending=ending)
        with pytest.warns(UserWarning, match="is passed over"):
            assert library.open(prompt(TOKENS), model(), cls, **fields) is None
        assert keep(library, TOKENS, cls) == path
        assert [entry.damage for entry in library.entries() if entry.path == path] == [None]
        assert verify(path).whole


def test_an_entry_that_was_replaced_meanwhile_is_not_marked(library: ContextLibrary, path: Path) -> None:
    found = library.open(prompt(TOKENS), model(), **OPEN)
    assert found is not None
    with found[0] as cache:
        flip(path)
        shutil.rmtree(path)
        keep(library, TOKENS[:, :250])
        os.rename(keep(library, TOKENS[:, :260]), path)
        with pytest.raises(CorruptRecordError):
            answer(cache)
    assert [entry.damage for entry in library.entries()] == [None, None]


def test_a_folder_that_cannot_be_written_to(
    library: ContextLibrary, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This library remembers it by itself."""
    flip(path)
    real = os.open

    def read_only(name: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(name).endswith(".damaged"):
            raise OSError(30, "Read-only file system")
        return real(name, flags, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        with pytest.raises(CorruptRecordError):
            ask(library, TOKENS)
    assert not list(path.glob("*.damaged"))
    assert ask(library, TOKENS) is None and library.entries()[0].damage is not None
    keep(library, TOKENS)
    assert ask(library, TOKENS) is not None


def test_verify_tells_of_a_mark(library: ContextLibrary, path: Path) -> None:
    good = {file: file.read_bytes() for file in path.iterdir()}
    flip(path)
    with pytest.raises(CorruptRecordError):
        ask(library, TOKENS)
    found = verify(path)
    assert not found.whole and {"marked", "damaged"} == {finding.kind for finding in found.findings}
    for file, content in good.items():
        file.write_bytes(content)
    found = verify(path)
    assert found.whole and [finding.kind for finding in found.findings] == ["marked"]
    (path / found.findings[0].file).unlink()
    assert ask(ContextLibrary(library.folder), TOKENS) is not None
    assert library.remove(path.name) > 0


# --- keys -------------------------------------------------------------------------------------------------------------


def kinds(folder: Path) -> dict[str, tuple[ContextLibrary, dict[str, Any]]]:
    """A folder's libraries without a key and with two, and what their caches are made with."""
    return {
        "plain": (ContextLibrary(folder), {}),
        "key": (ContextLibrary(folder, key=key), {"encryption_key": key}),
        "other": (ContextLibrary(folder, key=other_key), {"encryption_key": other_key}),
    }


@pytest.mark.parametrize(
    ("cls", "mine"), combinations([DiskSwapCache, AbstractTreeCache], ["plain", "key", "other"])
)
def test_contexts_of_another_key_are_skipped(tmp_path: Path, mine: str, cls: Any, recwarn: Any) -> None:
    """Though they match better: a lookup neither raises nor opens them, and `entries` says why."""
    tokens = ids()
    libraries = kinds(tmp_path / "library")
    for name, (library, fields) in libraries.items():
        keep(library, tokens[:, : 100 if name == mine else 300], cls, **fields)
    library, _ = libraries[mine]
    assert library.find(prompt(tokens), model()).tokens == 100  # type: ignore[union-attr]
    found = ask(library, tokens)
    assert found is not None and found[0] == 100
    assert len(recwarn) == 0
    notes = [entry.note for entry in library.entries()]
    assert notes.count(None) == 1 and len(notes) == 3
    assert all("never opens it" in note for note in notes if note)
    assert all(entry.damage is None for entry in library.entries())


def test_a_plain_context_under_an_encrypted_ones_name(tmp_path: Path) -> None:
    """Somebody put it there: it is not opened, and a save of the text takes the place back."""
    tokens = ids()
    libraries = kinds(tmp_path / "library")
    library, fields = libraries["key"]
    path = keep(library, tokens, **fields)
    expected = ask(library, tokens)
    shutil.rmtree(path)
    os.rename(keep(libraries["plain"][0], tokens), path)
    assert ask(library, tokens) is None
    assert keep(library, tokens, **fields) == path
    assert ask(library, tokens) == expected


def test_publishing_with_a_key_takes_no_plain_folder(tmp_path: Path) -> None:
    saved(tmp_path / "ctx", encryption_key=key)
    given: list[dict[str, Any]] = [{"key": key}, {"key": other_key, "context_key": key}]
    for number, keys in enumerate(given):
        assert publish_context(tmp_path / "ctx", tmp_path / f"pub {number}", model=model(), **keys).tokens == 300
    shutil.rmtree(tmp_path / "ctx")
    saved(tmp_path / "ctx")
    for keys in (*given, {"context_key": key}):
        with pytest.raises(EncryptionKeyError, match="a key was given, but the context is not"):
            publish_context(tmp_path / "ctx", tmp_path / "new", model=model(), **keys)
    assert not (tmp_path / "new").exists()
    publish_context(tmp_path / "ctx", tmp_path / "new", model=model(), key=key, context_key=False)
    assert b"prefixes" not in (tmp_path / "new" / "stream.json").read_bytes()
    publish_context(tmp_path / "ctx", tmp_path / "plain", model=model())
    assert b"prefixes" in (tmp_path / "plain" / "stream.json").read_bytes()


# --- older ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "fields"), combinations(CACHES, {"plain": {}, "key": {"encryption_key": key}}))
def test_an_older_context_is_not_the_expected_one(tmp_path: Path, cls: Any, fields: dict[str, Any]) -> None:
    with prefilled(cls, **fields) as cache:
        first = cache.save(tmp_path / "ctx")
        shutil.copytree(tmp_path / "ctx", tmp_path / "old")
        answer(cache)
        second = cache.save(tmp_path / "ctx", overwrite=True)
        held = cache.tokens
    assert first != second and len(first) == len(second) == 64
    with cls.open(tmp_path / "ctx", model(), expect=second, **OPEN, **fields) as cache:
        assert cache.tokens == held
    shutil.rmtree(tmp_path / "ctx")
    os.rename(tmp_path / "old", tmp_path / "ctx")
    with pytest.raises(ContextMismatchError, match=f"digest is {first} and expect is {second}"):
        cls.open(tmp_path / "ctx", model(), expect=second, **OPEN, **fields)
    with cls.open(tmp_path / "ctx", model(), expect=first, **OPEN, **fields) as cache:
        assert cache.tokens == 300


@pytest.mark.parametrize("wrong", ["", "0" * 63, "g" * 64, 5, b"0" * 64])
def test_a_digest_that_is_none(library: ContextLibrary, path: Path, wrong: Any) -> None:
    for ask_for in (
        lambda: DiskSwapCache.open(path, model(), expect=wrong),
        lambda: library.find(prompt(TOKENS), model(), expect=[wrong]),
    ):
        with pytest.raises(ConfigError, match="expect must be a digest of 64 hexadecimal digits"):
            ask_for()


def test_a_library_takes_the_expected_ones_alone(library: ContextLibrary) -> None:
    kept = keep(library, TOKENS[:, :100])
    older = keep(library, TOKENS)
    digests = {entry.path: entry.digest for entry in library.entries()}
    assert ask(library, TOKENS)[0] == 300 and len(set(digests.values())) == 2
    found = library.find(prompt(TOKENS), model(), expect={digests[kept]})
    assert found is not None and (found.path, found.digest) == (kept, digests[kept])
    assert ask(library, TOKENS, expect=list(digests.values()))[0] == 300
    assert ask(library, TOKENS, expect=[digests[kept]])[0] == 100
    assert library.open(prompt(TOKENS), model(), expect=[]) is None
    assert dataclasses.replace(found, matched=1).path != older
