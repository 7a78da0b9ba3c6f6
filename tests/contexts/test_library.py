"""A library of contexts: what is found, what is kept, what goes; against a model in plain Python, and beside others."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PAD, SMALL, assert_exact, fresh, generate, padding, prompt, tiny
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from transformers import DynamicCache

from hf_offload_cache import ContextLibrary, DiskSwapCache, OffloadCache
from hf_offload_cache.contexts import library as prefixes
from hf_offload_cache.contexts import listing, prompt_of, total_bytes
from hf_offload_cache.errors import BudgetError, ConfigError, ContextError, EncryptionKeyError

OPEN: dict[str, Any] = {"engine": "mapped"}


def filled(model: Any, ids: torch.Tensor, cls: type[OffloadCache] = DiskSwapCache, **fields: Any) -> OffloadCache:
    """A cache that holds `ids`; no two of them share a file."""
    cache = cls(model, **{**SMALL, **OPEN, **fields})
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def keep(library: ContextLibrary, model: Any, ids: torch.Tensor, **fields: Any) -> Path:
    with filled(model, ids, **fields) as cache:
        return library.save(cache)


def row(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers])


@pytest.fixture
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def library(tmp_path: Path) -> ContextLibrary:
    return ContextLibrary(tmp_path / "library")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A warning that no test asked for fails it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(passed over|evicted).*")
        yield


# ---------------------------------------------------------------------------------------------- find and open


def test_the_longest_prefix_is_found_and_never_all_tokens(library: ContextLibrary, model: Any) -> None:
    ids = prompt(model, 1, 40)
    short, long = keep(library, model, ids[:, :16]), keep(library, model, ids[:, :32])
    for query in (ids, ids[0]):
        found = library.find(query, model)
        assert found is not None and (found.path, found.tokens, found.matched) == (long, 32, 32)
    changed = ids.clone()
    changed[0, 20] += 1
    assert library.find(changed, model).matched == 20  # type: ignore[union-attr]
    exactly = library.find(ids[:, :32], model)
    assert exactly is not None and (exactly.path, exactly.matched) == (long, 31), "generate needs a new token"
    listing.touch(short)
    assert library.find(ids[:, :10], model).path == short, "of equal matches, that used last"  # type: ignore[union-attr]
    assert library.find(ids[:, :10], model, least=9) is not None
    assert library.find(ids[:, :10], model, least=10) is None
    assert library.find(prompt(model, 1, 40, seed=1), model, least=2) is None


def test_what_is_opened_goes_on_as_if_nothing_had_happened(library: ContextLibrary, model: Any) -> None:
    ids = prompt(model)
    keep(library, model, ids[:, :40], exact=True)
    for query in (ids, torch.cat([ids[:, :33], prompt(model, 1, 9, seed=3)], 1)):
        opened = library.open(query, model, engine="mapped")
        assert opened is not None
        cache, matched = opened
        with cache:
            assert matched == cache.tokens == (40 if query is ids else 33)
            assert_exact(generate(model, DynamicCache(config=model.config), query), generate(model, cache, query))
    assert library.open(prompt(model, 1, 20, seed=9), model, least=5) is None


def test_layers_that_cannot_take_tokens_back_match_in_full(library: ContextLibrary) -> None:
    model = tiny("gemma3")
    ids = prompt(model, 1, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep(library, model, ids[:, :24])
        found = library.find(ids, model)
        assert found is not None and found.matched == found.tokens == 24
        assert library.find(ids[:, :24], model) is None
        assert library.find(torch.cat([ids[:, :23], ids[:, :9]], 1), model) is None
        cache, _ = library.open(ids, model, exact=True, **OPEN)  # type: ignore[misc]
        with cache:
            assert_exact(generate(model, DynamicCache(config=model.config), ids), generate(model, cache, ids))


def test_batches_and_padding(library: ContextLibrary, model: Any) -> None:
    """As many sequences, equal in all of them, padding in the same places; what is padding in all does not count."""
    mask = padding(3)[1:]
    ids = prompt(model, 2).masked_fill(mask == 0, PAD)
    with DiskSwapCache(model, **SMALL, **OPEN) as cache:
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
        library.save(cache)
    more, ones = torch.cat([ids, ids[:, -4:]], 1), torch.cat([mask, mask[:, -4:]], 1)
    found = library.find(more, model, attention_mask=ones)
    assert found is not None and found.matched == ids.shape[1]
    for row_, position in ((0, 50), (1, 40)):
        changed = more.clone()
        changed[row_, position] += 1
        assert library.find(changed, model, attention_mask=ones).matched == position  # type: ignore[union-attr]
    assert library.find(more, model) is None, "without its padding it is another prompt"
    assert library.find(more[:1], model, attention_mask=ones[:1]) is None
    keep(library, model, more[:1, 20:50])
    assert library.find(more[:1, 20:], model).matched == 30  # type: ignore[union-attr]
    assert library.find(more[:1, 20:].repeat(2, 1), model) is None, "one sequence is not two, even if these are alike"
    changed = more.clone()
    changed[0, 14] += 1
    assert library.find(changed, model, attention_mask=ones, least=4) is None, "11 of the 14 are padding in both"
    assert library.find(changed, model, attention_mask=ones, least=3) is not None


def test_other_models_classes_and_forms_do_not_match(library: ContextLibrary, model: Any) -> None:
    ids = prompt(model, 1, 40)
    keep(library, model, ids[:, :24])
    assert library.find(ids, fresh("llama", seed=1)) is None
    assert library.find(ids, tiny("qwen2")) is None
    assert library.find(ids, model, OffloadCache) is None
    assert library.open(ids, model, group_size=8) is None
    keep(library, model, ids[:, :30], cls=OffloadCache, exact=True)
    found = library.find(ids, model, OffloadCache)
    assert found is not None and found.tokens == 30
    keep(library, model, ids[:, :32], exact=True)
    cache, matched = library.open(ids, model, exact=False, **OPEN)  # type: ignore[misc]
    cache.close()
    assert matched == 24, "an exact context has no compact keys to be sparse by"
    cache, matched = library.open(ids, model, **OPEN)  # type: ignore[misc]
    cache.close()
    assert matched == 32


def test_tokens_that_stand_for_something_else(library: ContextLibrary) -> None:
    """Images in the ids, and embeddings, are refused."""
    model = fresh("llama")
    ids = prompt(model, 1, 40)
    keep(library, model, ids[:, :30])
    model.config.image_token_id = int(ids[0, 12])
    model.config.video_token_id = None
    for given, said in (({"input_ids": ids}, "images"), ({"inputs_embeds": torch.randn(1, 40, 64)}, "embeddings")):
        with DiskSwapCache(model, **SMALL, **OPEN) as cache:
            with torch.no_grad():
                model(**given, past_key_values=cache)
            with pytest.raises(ValueError, match=said):
                library.save(cache)
    assert len(library.entries()) == 1
    del model.config.image_token_id, model.config.video_token_id
    assert library.find(ids, model).matched == 30  # type: ignore[union-attr]
    model.config.image_token_index = int(ids[0, 12])
    assert prompt_of(ids, None, 1, model)[1] == int((ids[0] == ids[0, 12]).nonzero()[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_ids": torch.zeros(1, 4)}, "input_ids must be token ids"),
        ({"input_ids": torch.zeros(1, 2, 2, dtype=torch.long)}, "input_ids must be token ids"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids must be token ids"),
        ({"input_ids": row(5, 6), "attention_mask": row(1)}, "attention_mask must have the shape"),
        ({"input_ids": row(5, 6), "least": 0}, "least must be a whole number"),
    ],
)
def test_a_wrong_request(arguments: dict[str, Any], words: str, library: ContextLibrary, model: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        library.find(model=model, **arguments)


# ---------------------------------------------------------------------------------------------- keys


def test_an_encrypted_library(tmp_path: Path, model: Any) -> None:
    pytest.importorskip("cryptography")
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(bytes(range(32)))
    other.write_bytes(bytes(32))
    ids = prompt(model, 1, 40)
    secret, open_one = ContextLibrary(tmp_path / "l", key=key), ContextLibrary(tmp_path / "l")
    with filled(model, ids[:, :30], encryption_key=key) as cache:
        name = secret.save(cache).name
        with pytest.raises(EncryptionKeyError, match="the same one"):
            open_one.save(cache)
    with filled(model, ids[:, :30]) as cache, pytest.raises(EncryptionKeyError, match="the same one"):
        secret.save(cache)
    assert secret.find(ids, model).tokens == 30  # type: ignore[union-attr]
    assert open_one.find(ids, model) is None and open_one.open(ids, model) is None
    assert ContextLibrary(tmp_path / "l", key=other).find(ids, model) is None
    plain = keep(open_one, model, ids[:, :30])
    assert plain.name != name, "the name tells nothing to who has no key"
    assert secret.find(ids, model).path.name == name, "what is not encrypted is passed over"  # type: ignore[union-attr]
    secret.remove(plain.name)
    cache, matched = secret.open(ids, model, **OPEN)  # type: ignore[misc]
    with cache:
        assert matched == 30 and cache.storage.key == key.read_bytes()


# ---------------------------------------------------------------------------------------------- keep and evict


def test_an_equal_context_is_only_touched(library: ContextLibrary, model: Any) -> None:
    path = keep(library, model, row(*range(5, 25)))
    keep(library, model, row(*range(30, 50)))
    before = os.stat(path / "manifest.json")
    assert keep(library, model, row(*range(5, 25))) == path
    after = os.stat(path / "manifest.json")
    assert after.st_ino == before.st_ino and after.st_mtime_ns > before.st_mtime_ns
    assert library.entries()[0].path == path and len(library.entries()) == 2
    (path / "manifest.json").write_text("{}")
    assert keep(library, model, row(*range(5, 25))) == path, "a damaged one is replaced"
    assert library.find(row(*range(5, 30)), model).path == path  # type: ignore[union-attr]


def test_a_context_too_large_by_itself_is_refused_with_the_numbers(tmp_path: Path, model: Any) -> None:
    """Manifests and all: the cap holds to the last byte. Nothing is evicted for what cannot be kept."""
    size = _size_of(tmp_path, model, prompt(model))
    library = ContextLibrary(tmp_path / "l", max_bytes=size // 2)
    kept = keep(library, model, row(*range(5, 12)))
    for most in (size // 2, size - 1):
        library.max_bytes = most
        with pytest.raises(BudgetError, match=rf"{most:,}.*{size:,}" if most > size // 2 else rf"{most:,}.*cache.save"):
            keep(library, model, prompt(model))
        if most == size // 2:
            assert [entry.path for entry in library.entries()] == [kept]
    assert library.find(prompt(model), model) is None
    library.max_bytes = size
    keep(library, model, prompt(model))
    assert [entry.bytes for entry in library.entries()] == [size]


def test_the_cap_holds_to_the_last_byte(tmp_path: Path, model: Any) -> None:
    """Manifests and all: what a context will take is known beforehand but for what describes it."""
    one, two = row(*range(5, 25)), row(*range(30, 50))
    size = _size_of(tmp_path, model, one)
    library = ContextLibrary(tmp_path / "l", max_bytes=2 * size)
    keep(library, model, one)
    assert keep(library, model, two).exists() and len(library.entries()) == 2
    library.evict(0)
    library.max_bytes -= 1
    keep(library, model, one)
    kept = keep(library, model, two)
    assert [entry.path for entry in library.entries()] == [kept]


def _size_of(folder: Path, model: Any, ids: torch.Tensor) -> int:
    library = ContextLibrary(folder / "measured")
    keep(library, model, ids)
    (entry,) = library.entries()
    return entry.bytes


@pytest.mark.parametrize("less", [0, 1])
def test_what_contexts_share_counts_once(less: int, library: ContextLibrary, model: Any) -> None:
    with filled(model, prompt(model)) as cache:
        first = library.save(cache)
        with torch.no_grad():
            model(prompt(model, 1, 24, seed=2), past_key_values=cache)
        second = library.save(cache)
    two, one = library.entries()
    assert (two.path, one.path) == (second, first)
    shared = one.bytes - one.freed_bytes
    assert shared > 0 and two.bytes - two.freed_bytes == shared
    assert total_bytes([one, two]) == one.bytes + two.bytes - shared == _blocks_of(library.folder)
    assert library.evict(total_bytes([one, two])) == []
    assert [entry.path for entry in library.evict(two.bytes - less)] == ([first, second] if less else [first])
    assert _blocks_of(library.folder) == (0 if less else two.bytes)


def test_what_is_used_while_others_are_evicted_stays(
    library: ContextLibrary, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = keep(library, model, row(*range(5, 25))), keep(library, model, row(*range(30, 50)))
    listed = listing.listing

    def touching(*arguments: Any, **options: Any) -> Any:
        found = listed(*arguments, **options)
        listing.touch(first)
        return found

    monkeypatch.setattr(listing, "listing", touching)
    assert [entry.path for entry in library.evict(listed(library.folder)[0].bytes)] == [second]
    monkeypatch.undo()
    assert [entry.path for entry in library.entries()] == [first]


def test_a_longer_context_makes_no_more_room_than_it_takes(library: ContextLibrary, model: Any) -> None:
    """What it shares with the one it continues is there already."""
    ids = prompt(model, 1, 80)
    other = keep(library, model, row(5, 6, 7, 8, 9))
    with filled(model, ids) as cache:
        library.save(cache)
    cache, matched = library.open(torch.cat([ids, row(5)], 1), model, **OPEN)  # type: ignore[misc]
    with cache, torch.no_grad():
        model(prompt(model, 1, 16, seed=2), past_key_values=cache)
        library.max_bytes = total_bytes(library.entries()) + 100_000
        library.save(cache)
    assert matched == 80
    assert len(library.entries()) == 3 and library.entries()[-1].path == other


def _blocks_of(folder: Path) -> int:
    stats = [os.stat(path) for path in folder.rglob("[!.]*") if path.is_file()]  # without the count of the day's bytes
    return sum({found.st_ino: found.st_blocks * 512 for found in stats}.values())


def test_a_damaged_context_is_evicted_when_it_is_its_turn_and_said_so(library: ContextLibrary, model: Any) -> None:
    path = keep(library, model, row(*range(5, 25)))
    kept = keep(library, model, row(*range(30, 50)))
    os.truncate(next(path.glob("*.records")), 4096)
    assert [entry.damage is not None for entry in library.entries()] == [False, True]
    assert library.evict(library.entries()[0].bytes + library.entries()[1].bytes) == []
    with pytest.warns(UserWarning, match=f"evicted the damaged context .*{path.name}.* 4,096 bytes"):
        (gone,) = library.evict(library.entries()[0].bytes)
    assert gone.path == path and [entry.path for entry in library.entries()] == [kept]


def test_a_context_with_something_of_the_users_in_it_stays(library: ContextLibrary, model: Any) -> None:
    path = keep(library, model, row(*range(5, 25)))
    (path / "notes.txt").write_text("mine")
    keep(library, model, row(*range(30, 50)))
    with pytest.raises(BudgetError, match=r"notes\.txt"):
        library.evict(0)
    assert (path / "notes.txt").read_text() == "mine" and [entry.path for entry in library.entries()] == [path]


def test_contexts_under_other_names_are_left_alone(library: ContextLibrary, model: Any) -> None:
    ids = prompt(model, 1, 40)
    with filled(model, ids[:, :30]) as cache:
        cache.save(library.folder / "mine")
        named = library.save(cache)
    shutil.copytree(named, library.folder / ("0" * 32))
    entry = next(entry for entry in library.entries() if entry.path == named)
    assert library.remove(named.name, wipe=True) == entry.freed_bytes
    with pytest.warns(UserWarning, match="its name does not follow"):
        assert library.find(ids, model) is None
    library.evict(0)
    assert [path.name for path in library.folder.glob("[!.]*")] == ["mine"]  # and the day's bytes
    for name, said in (("mine", "32 hexadecimal"), ("../library/mine", "32 hexadecimal"), (named.name, "no context")):
        with pytest.raises(ContextError, match=said):
            library.remove(name)


def test_the_folder_is_made_for_its_owner(tmp_path: Path) -> None:
    assert ContextLibrary(tmp_path / "new").folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    for folder in ("file", "missing/library"):
        with pytest.raises(ContextError, match="cannot be made"):
            ContextLibrary(tmp_path / folder)
    with pytest.raises(ConfigError, match="max_bytes"):
        ContextLibrary(tmp_path / "new", max_bytes="a lot")


def test_a_folder_that_cannot_be_written_to(
    library: ContextLibrary, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keep(library, model, row(*range(5, 25)))
    before = os.stat(path / "manifest.json").st_mtime_ns

    def refused(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(listing.os, "utime", refused)
    cache, matched = library.open(row(*range(5, 30)), model, **OPEN)  # type: ignore[misc]
    cache.close()
    assert matched == 20 and os.stat(path / "manifest.json").st_mtime_ns == before


# ---------------------------------------------------------------------------------------------- damage and haste


def _flip(path: Path, at: int = -9) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["manifest", "ids", "missing ids", "missing records", "layer"])
def test_a_damaged_context_gives_way_to_the_next_best(what: str, library: ContextLibrary, model: Any) -> None:
    ids = prompt(model, 1, 40)
    good, bad = keep(library, model, ids[:, :20]), keep(library, model, ids[:, :30])
    entry = library.entries()[0]
    assert entry.manifest is not None
    match what:
        case "manifest":
            _flip(bad / "manifest.json", 300)
        case "ids":
            _flip(bad / entry.manifest.state.file)
        case "missing ids":
            (bad / entry.manifest.state.file).unlink()
        case "missing records":
            (bad / entry.manifest.layers[2].parts[0].file).unlink()
        case "layer":
            _flip(bad / entry.manifest.layers[1].state.file)
    with pytest.warns(UserWarning, match=f"{bad.name}.* is passed over"):
        opened = ContextLibrary(library.folder).open(ids, model, **OPEN)
    assert opened is not None and opened[1] == 20
    opened[0].close()
    assert {entry.path for entry in library.entries()} == {good, bad}, "nothing is deleted because it is damaged"


@pytest.mark.parametrize("when", ["listed", "manifest read", "matched"])
def test_a_context_that_vanishes_is_passed_over(
    when: str, library: ContextLibrary, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(model, 1, 40)
    kept, gone = keep(library, model, ids[:, :20]), keep(library, model, ids[:, :30])

    def first_remove(module: Any, name: str) -> None:
        call = getattr(module, name)

        def removing(*arguments: Any, **keywords: Any) -> Any:
            result = call(*arguments, **keywords) if when == "listed" else None
            shutil.rmtree(gone, ignore_errors=True)
            return result if when == "listed" else call(*arguments, **keywords)

        monkeypatch.setattr(module, name, removing)

    match when:
        case "listed":
            first_remove(prefixes, "entries")
        case "manifest read":
            first_remove(prefixes, "read_text")
        case "matched":
            first_remove(DiskSwapCache, "open")
    opened = library.open(ids, model, **OPEN)
    assert opened is not None and opened[1] == 20 and not gone.exists() and kept.exists()
    opened[0].close()


def test_one_that_is_replaced_by_another_between_find_and_open(
    library: ContextLibrary, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever moved something else there: what it holds is not what was asked for."""
    ids = prompt(model, 1, 40)
    first, second = keep(library, model, ids[:, :30]), keep(library, model, prompt(model, 1, 10, seed=4))
    opening = DiskSwapCache.open

    def replacing(*arguments: Any, **keywords: Any) -> Any:
        shutil.rmtree(first)
        shutil.copytree(second, first)
        return opening(*arguments, **keywords)

    monkeypatch.setattr(DiskSwapCache, "open", replacing)
    with pytest.warns(UserWarning, match="something else"):
        assert library.open(ids, model, **OPEN) is None


def test_ids_are_read_once(library: ContextLibrary, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(model, 1, 40)
    path, gone = keep(library, model, ids[:, :30]), keep(library, model, ids[:, :20])
    assert library.find(ids, model).path == path  # type: ignore[union-attr]
    reading = prefixes.read_text
    read: list[Path] = []
    monkeypatch.setattr(prefixes, "read_text", lambda path, *rest: (read.append(path), reading(path, *rest))[1])
    assert library.find(ids, model).path == path  # type: ignore[union-attr]
    assert read == []
    library.remove(gone.name)
    assert keep(library, model, ids[:, :20]) == gone
    library.find(ids, model)
    assert len(read) <= 1, "only that which is new"
    keep(library, tiny("qwen2"), prompt(tiny("qwen2"), 1, 9))
    read.clear()
    library.find(ids, model)
    assert read == [], "of other models the manifest is enough"
    monkeypatch.setattr(prefixes, "_KEPT_BYTES", 0)
    other = ContextLibrary(library.folder)
    assert [other.find(ids, model).path for _ in range(2)] == [path] * 2  # type: ignore[union-attr]
    assert len(read) == 4, "what is too much to keep is read each time"


# ---------------------------------------------------------------------------------------------- against plain Python


class LibraryMachine(RuleBasedStateMachine):
    """Short prompts of three tokens, so that prefixes meet; the model knows sizes only from the disk."""

    prompts = st.lists(st.sampled_from([5, 6, 7]), min_size=1, max_size=14).map(tuple)
    caps = st.sampled_from([60_000, 130_000, 260_000])

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.library = ContextLibrary(self.folder, max_bytes=260_000)
        self.model = tiny("llama")
        self.kept: dict[tuple[int, ...], int] = {}  # bytes, those used last at the end

    def _use(self, ids: tuple[int, ...]) -> None:
        self.kept[ids] = self.kept.pop(ids)

    def _evict(self, most: int) -> None:
        while sum(self.kept.values()) > most:
            del self.kept[next(iter(self.kept))]

    def _longest(self, wanted: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
        best = None
        for ids in self.kept:  # a later one that is as good wins
            matched = next((i for i, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), len(ids))
            matched = min(matched, len(wanted) - 1)
            if matched and (best is None or matched >= best[0]):
                best = (matched, ids)
        return best

    @rule(ids=prompts, again=st.booleans())
    def save(self, ids: tuple[int, ...], again: bool) -> None:
        if again and self.kept:
            ids = next(iter(self.kept))
        with filled(self.model, torch.tensor([ids])) as cache:
            try:
                path = self.library.save(cache)
            except BudgetError:
                assert ids not in self.kept
                size = _size_of(self.folder.parent, self.model, torch.tensor([ids]))
                shutil.rmtree(self.folder.parent / "measured")
                assert size > self.library.max_bytes
                return
        if ids in self.kept:
            self._use(ids)
        else:
            self.kept[ids] = next(entry.bytes for entry in self.library.entries() if entry.path == path)
        self._evict(self.library.max_bytes)
        assert ids in self.kept

    @rule(wanted=prompts)
    def find(self, wanted: tuple[int, ...]) -> None:
        found, expected = self.library.find(torch.tensor(wanted), self.model), self._longest(wanted)
        assert (None if found is None else (found.matched, found.tokens)) == (
            None if expected is None else (expected[0], len(expected[1]))
        )

    @rule(wanted=prompts)
    def open(self, wanted: tuple[int, ...]) -> None:
        opened, expected = self.library.open(torch.tensor([wanted]), self.model, **OPEN), self._longest(wanted)
        assert (opened is None) == (expected is None)
        if opened is not None and expected is not None:
            with opened[0] as cache:
                assert opened[1] == expected[0] == cache.tokens
                assert tuple(cache.input_ids[0].tolist()) == wanted[: expected[0]]
            self._use(expected[1])

    @rule(most=caps)
    def evict(self, most: int) -> None:
        before = set(self.kept)
        self._evict(most)
        assert len(self.library.evict(most)) == len(before - set(self.kept))

    @rule(most=caps)
    def set_cap(self, most: int) -> None:
        self.library.max_bytes = most
        self.library.evict()
        self._evict(most)

    @rule()
    def another_process(self) -> None:
        self.library = ContextLibrary(self.folder, max_bytes=self.library.max_bytes)

    @invariant()
    def in_order(self) -> None:
        found = self.library.entries()
        assert [entry.bytes for entry in found] == list(reversed(self.kept.values()))
        assert [entry.tokens for entry in found] == [len(ids) for ids in reversed(self.kept)]
        assert total_bytes(found) == sum(self.kept.values()) <= self.library.max_bytes


def test_a_library_against_plain_python(tmp_path: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("Machine", (LibraryMachine,), {"folder": tmp_path / "library"})
    few = settings(
        max_examples=8, stateful_step_count=12, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=few)
