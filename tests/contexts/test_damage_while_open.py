"""A context that is wiped or damaged while it is open: `save` publishes nothing of it, and the cache goes on."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pairwise import combinations
from small_contexts import CACHES, answer, flip, ids, key, model, saved

from hf_offload_cache import ContextLibrary, DiskSwapCache, SpecCache, publish_context, verify
from hf_offload_cache.console import main as console
from hf_offload_cache.errors import CorruptRecordError

pytestmark = pytest.mark.usefixtures("nothing_stays")
CHANGED = r"layer \d: record.* not what was written"


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another file system."""

    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", link)


def opened(folder: Path, cls: Any = DiskSwapCache, **fields: Any) -> Any:
    return cls.open(folder, model(), **{"engine": "mapped", **fields})


def check_refused(cache: Any, folder: Path) -> None:
    """Nothing is published and nothing left, and an old context stays."""
    before = sorted(os.listdir(folder))
    with pytest.raises(CorruptRecordError, match=CHANGED):
        cache.save(folder / "new")
    assert sorted(os.listdir(folder)) == before
    with pytest.raises(CorruptRecordError, match=CHANGED):
        cache.save(folder / "old", overwrite=True)
    assert sorted(os.listdir(folder)) == before and verify(folder / "old").whole


@pytest.mark.parametrize(("cls", "trusts"), combinations(CACHES, {"verify": False, "no verify": True}))
def test_a_flipped_bit_is_not_saved_again(tmp_path: Path, cls: Any, trusts: bool) -> None:
    saved(tmp_path / "old", cls, ids(64, seed=5))
    with opened(saved(tmp_path / "ctx", cls), cls, verify=not trusts) as cache:
        flip(tmp_path / "ctx", most=1)
        check_refused(cache, tmp_path)


@pytest.mark.parametrize("cls", CACHES)
def test_what_was_put_behind_the_records_is_not_saved(tmp_path: Path, cls: Any) -> None:
    """A linked file would be too long to be opened."""
    with opened(saved(tmp_path / "ctx", cls), cls) as cache:
        for file in (tmp_path / "ctx").glob("*.records"):
            with open(file, "ab") as more:
                more.write(bytes(4096))
        cache.save(tmp_path / "new")
        expected = answer(cache)
    assert verify(tmp_path / "new").whole
    with opened(tmp_path / "new", cls) as cache:
        assert answer(cache) == expected


@pytest.mark.parametrize(
    ("cls", "fields"),
    combinations(CACHES, {"plain": {}, "no verify": {"verify": False}, "key": {"encryption_key": key}}),
)
def test_copies_are_checked(tmp_path: Path, cls: Any, fields: dict[str, Any], no_links: None) -> None:
    own = {name: value for name, value in fields.items() if name != "verify"}
    with opened(saved(tmp_path / "ctx", cls, **own), cls, **fields) as cache:
        cache.save(tmp_path / "before")
        assert verify(tmp_path / "before", key=own.get("encryption_key")).whole
        shutil.rmtree(tmp_path / "before")
        flip(tmp_path / "ctx", most=1)
        with pytest.raises(CorruptRecordError, match=CHANGED):
            cache.save(tmp_path / "new")
        assert os.listdir(tmp_path) == ["ctx"]


@pytest.mark.parametrize("cls", CACHES)
def test_what_is_left_after_a_crop_is_checked(tmp_path: Path, cls: Any) -> None:
    with opened(saved(tmp_path / "ctx", cls), cls, verify=False) as cache:
        flip(tmp_path / "ctx")
        with pytest.raises(CorruptRecordError, match=CHANGED):
            cache.crop(-100)
            cache.save(tmp_path / "new")
        assert os.listdir(tmp_path) == ["ctx"]


@pytest.mark.parametrize("cls", CACHES)
def test_what_was_wiped_is_not_saved(tmp_path: Path, cls: Any) -> None:
    saved(tmp_path / "old", cls, ids(64, seed=5))
    with opened(saved(tmp_path / "ctx", cls), cls) as cache, cache.fork() as twin:
        assert console.main(["rm", "--wipe", str(tmp_path / "ctx")]) == 0
        for one in (cache, twin):
            check_refused(one, tmp_path)


def test_what_was_removed_and_not_wiped_is_saved(tmp_path: Path) -> None:
    with opened(saved(tmp_path / "ctx")) as cache:
        assert console.main(["rm", str(tmp_path / "ctx")]) == 0
        cache.save(tmp_path / "new")
        expected = answer(cache)
    assert verify(tmp_path / "new").whole
    with opened(tmp_path / "new") as cache:
        assert answer(cache) == expected


def test_damage_that_a_read_found_is_not_linked(tmp_path: Path) -> None:
    """It was there before the context was opened: no date tells."""
    saved(tmp_path / "ctx")
    flip(tmp_path / "ctx")
    with opened(tmp_path / "ctx") as cache:
        with pytest.raises(CorruptRecordError):
            answer(cache)
        cache.crop(300 - cache.tokens if cache.tokens > 300 else 300)
        with pytest.raises(CorruptRecordError, match=CHANGED):
            cache.save(tmp_path / "new")
    assert os.listdir(tmp_path) == ["ctx"]


def test_files_that_nobody_touched_are_linked_and_not_read(tmp_path: Path) -> None:
    """Turn by turn, also when other names of theirs come and go."""
    with opened(saved(tmp_path / "ctx")) as cache:
        before = cache.report().bytes_read
        for turn in range(3):
            cache.save(tmp_path / "new", overwrite=turn > 0)
        shared = {path.stat().st_ino for path in (tmp_path / "ctx").glob("*.records")}
        assert shared == {path.stat().st_ino for path in (tmp_path / "new").glob("*.records")}
        assert cache.report().bytes_read == before


def test_the_cache_stays_usable_as_far_as_it_was(tmp_path: Path) -> None:
    with opened(saved(tmp_path / "ctx")) as cache:
        expected = answer(cache)
    with opened(tmp_path / "ctx") as cache:
        files = {path: path.read_bytes() for path in (tmp_path / "ctx").glob("*.records")}
        flip(tmp_path / "ctx")
        with pytest.raises(CorruptRecordError):
            cache.save(tmp_path / "new")
        for path, content in files.items():
            with open(path, "r+b") as file:
                file.write(content)
        cache.save(tmp_path / "new")
        assert answer(cache) == expected
    assert verify(tmp_path / "new").whole


def test_what_is_read_into_memory_is_checked_though_reads_trust(tmp_path: Path) -> None:
    """What is saved of it gets new tags, which would vouch for it."""
    saved(tmp_path / "ctx", SpecCache)
    flip(tmp_path / "ctx", most=1)
    with pytest.raises(CorruptRecordError, match=CHANGED):
        opened(tmp_path / "ctx", SpecCache, engine="memory", verify=False)


def test_a_library_keeps_nothing_of_it(tmp_path: Path) -> None:
    library = ContextLibrary(tmp_path / "library")
    with opened(saved(tmp_path / "ctx")) as cache:
        flip(tmp_path / "ctx")
        with pytest.raises(CorruptRecordError, match=CHANGED):
            library.save(cache)
        assert library.entries() == [] and os.listdir(library.folder) == []


@pytest.mark.parametrize("of", ["cache", "folder"])
def test_nothing_of_it_is_published(tmp_path: Path, of: str) -> None:
    saved(tmp_path / "ctx")
    with opened(tmp_path / "ctx", verify=False) as cache:
        flip(tmp_path / "ctx")
        with pytest.raises(CorruptRecordError, match=CHANGED):
            publish_context(cache if of == "cache" else tmp_path / "ctx", tmp_path / "pub", model=model())
    assert not (tmp_path / "pub" / "stream.json").exists()


def test_merged_parts_are_checked(tmp_path: Path) -> None:
    """Turns that were frozen one by one become one file."""
    saved(tmp_path / "ctx")
    with opened(tmp_path / "ctx", verify=False) as cache:
        for turn in range(4):
            answer(cache, new=20)
            cache.save(tmp_path / f"turn {turn}")
        for turn in range(4):
            flip(tmp_path / f"turn {turn}")
        answer(cache, new=20)
        with pytest.raises(CorruptRecordError, match=CHANGED):
            cache.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
