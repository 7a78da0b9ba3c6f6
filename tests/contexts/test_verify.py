"""Everything that is wrong with a context is found and named, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, prompt, tiny

from hf_offload_cache import DiskSwapCache, verify
from hf_offload_cache.contexts import Manifest
from hf_offload_cache.contexts import verify as module
from hf_offload_cache.errors import ContextError, EncryptionKeyError

RECORD = 4096


def save(path: Path, length: int = 56, **fields: Any) -> Manifest:
    model = tiny("llama")
    with DiskSwapCache(model, engine="mapped", **SMALL, **fields) as cache:
        with torch.no_grad():
            model(prompt(model, 1, length), past_key_values=cache)
        cache.save(path)
        return Manifest.parse((path / "manifest.json").read_bytes(), "here")


def flip(path: Path, *positions: int) -> None:
    content = bytearray(path.read_bytes())
    for position in positions:
        content[position] ^= 0x10
    path.write_bytes(content)


def found(path: Path, **options: Any) -> list[tuple[str, str, str, tuple[int, ...]]]:
    return [(x.kind, x.part, x.file, x.records) for x in verify(path, **options).findings]


@pytest.fixture
def context(tmp_path: Path) -> Path:
    return tmp_path / "context"


def test_a_whole_context(context: Path) -> None:
    manifest = save(context)
    told: list[tuple[int, int]] = []
    result = verify(context, progress=lambda done, total: told.append((done, total)))
    assert result.whole and result.findings == ()
    assert result.files == len(manifest.file_names)
    assert result.records == sum(part.records for layer in manifest.layers for part in layer.parts)
    assert result.bytes == manifest.record_bytes + manifest.state_bytes
    assert told == sorted(told) and told[-1] == (result.bytes, result.bytes)


@pytest.mark.parametrize("block_bytes", [1, 5 * RECORD, 2**20])
@pytest.mark.parametrize("direct", [True, False])
def test_every_damaged_record_is_named(
    context: Path, block_bytes: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, in whatever blocks they are read, with or without the page cache."""
    manifest = save(context)
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    if not direct:
        monkeypatch.setattr(module.NamedFile, "try_direct", lambda file: "not here")
    one, other = (manifest.layers[index].parts[0].file for index in (0, 2))
    flip(context / one, 0, 4 * RECORD + 17, 5 * RECORD - 1, 12 * RECORD - 1)
    flip(context / other, 7 * RECORD)
    assert found(context) == [
        ("damaged", "layer 0", one, (0, 4, 11)),
        ("damaged", "layer 2", other, (7,)),
    ]
    assert not verify(context).whole


def test_numbers_run_on_from_file_to_file(context: Path) -> None:
    """As errors of reads number a layer's records."""
    model = tiny("llama")
    with DiskSwapCache(model, engine="mapped", **SMALL) as cache, torch.no_grad():
        model(prompt(model), past_key_values=cache)
        cache.fork().close()
        model(prompt(model, 1, 40, seed=3), past_key_values=cache)
        cache.save(context)
    manifest = Manifest.parse((context / "manifest.json").read_bytes(), "here")
    first, second = manifest.layers[1].parts
    flip(context / second.file, 3 * RECORD)
    assert found(context) == [("damaged", "layer 1", second.file, (first.records + 3,))]


def test_files_cut_and_grown(context: Path) -> None:
    manifest = save(context)
    names = [layer.parts[0].file for layer in manifest.layers]
    os.truncate(context / names[0], 9 * RECORD + 100)
    flip(context / names[0], 2 * RECORD)
    with open(context / names[1], "ab") as file:
        file.write(b"more")
    os.truncate(context / names[2], 0)
    findings = verify(context).findings
    assert [(x.file, x.records) for x in findings] == [
        (names[0], (2, 9, 10, 11)),
        (names[1], ()),
        (names[2], tuple(range(12))),
    ]
    assert "it has 36,964 bytes and was written with 49,152; its checksum differs" in findings[0].problem
    assert not verify(context).whole


def test_swapped_records_and_swapped_files(context: Path, tmp_path: Path) -> None:
    manifest = save(context)
    one, other = (manifest.layers[index].parts[0].file for index in (0, 1))
    content = (context / one).read_bytes()
    (context / one).write_bytes(content[RECORD : 2 * RECORD] + content[:RECORD] + content[2 * RECORD :])
    assert found(context) == [("damaged", "layer 0", one, (0, 1))]
    (context / one).write_bytes((context / other).read_bytes())
    (context / other).write_bytes(content)
    every = tuple(range(12))
    assert found(context) == [("damaged", "layer 0", one, every), ("damaged", "layer 1", other, every)]


def test_states(context: Path) -> None:
    """What a lost state takes along is damaged too: without tags nothing can be checked."""
    manifest = save(context)
    flip(context / manifest.state.file, 30)
    (context / manifest.layers[0].state.file).unlink()
    os.truncate(context / manifest.layers[1].state.file, 100)
    every = tuple(range(12))
    assert found(context) == [
        ("damaged", "cache", manifest.state.file, ()),
        ("missing", "layer 0", manifest.layers[0].state.file, ()),
        ("damaged", "layer 0", manifest.layers[0].parts[0].file, every),
        ("damaged", "layer 1", manifest.layers[1].state.file, ()),
        ("damaged", "layer 1", manifest.layers[1].parts[0].file, every),
    ]


def test_tags_that_are_not_those_of_the_records(context: Path) -> None:
    """A manifest that leads to the state of another layer vouches for it; the records do not."""
    manifest = save(context)
    one, other = manifest.layers[0], manifest.layers[1]
    swapped = one.model_copy(update={"state": other.state})
    layers = (swapped, *manifest.layers[1:])
    (context / "manifest.json").write_bytes(manifest.model_copy(update={"layers": layers}).to_bytes())
    findings = verify(context).findings
    assert [(x.kind, x.part, x.file) for x in findings] == [
        ("damaged", "layer 0", other.state.file),
        ("damaged", "layer 0", one.parts[0].file),
        ("foreign", "", one.state.file),
    ]
    assert "tags are not those of" in findings[0].problem


def test_missing_foreign_and_exposed(context: Path) -> None:
    manifest = save(context)
    gone = manifest.layers[2].parts[0].file
    (context / gone).rename(context / ("0" * 32 + ".records"))
    (context / "a note").write_text("hello")
    (context / ("1" * 32 + ".state")).symlink_to("/etc/passwd")
    context.chmod(0o755)
    (context / "manifest.json").chmod(0o640)
    assert set(found(context)) == {
        ("missing", "layer 2", gone, ()),
        ("foreign", "", "0" * 32 + ".records", ()),
        ("foreign", "", "1" * 32 + ".state", ()),
        ("foreign", "", "a note", ()),
        ("exposed", "", ".", ()),
        ("exposed", "", "manifest.json", ()),
    }
    (problem,) = [x.problem for x in verify(context).findings if x.file == "manifest.json"]
    assert "040" in problem and "chmod" in problem
    (context / ("0" * 32 + ".records")).rename(context / gone)  # company and modes are no damage
    assert verify(context).whole


@pytest.mark.parametrize("how", ["link", "pipe", "folder"])
def test_a_file_that_is_something_else_now(how: str, context: Path, tmp_path: Path) -> None:
    """Not followed, not opened, and no hang."""
    manifest = save(context)
    path = context / manifest.layers[0].parts[0].file
    path.rename(tmp_path / "outside")
    match how:
        case "link":
            path.symlink_to(tmp_path / "outside")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    assert {x[:3] for x in found(context)} == {("missing", "layer 0", path.name), ("foreign", "", path.name)}


def test_no_manifest(context: Path, tmp_path: Path) -> None:
    save(context)
    flip(context / "manifest.json", 200)
    assert [finding[:3] for finding in found(context)] == [("damaged", "manifest", "manifest.json")]
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nothing"):
        with pytest.raises(ContextError, match=name):
            verify(tmp_path / name)


def test_records_that_cannot_be_read(context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device fails at two records of a block: these are named, the others are checked."""
    manifest = save(context)
    flip(context / manifest.layers[1].parts[0].file, 8 * RECORD)
    reading = module.NamedFile.read

    def read(file: Any, buffer: memoryview, offset: int) -> None:
        touched = range(offset // RECORD, (offset + len(buffer)) // RECORD)
        if file.place.endswith(manifest.layers[1].parts[0].file) and (3 in touched or 6 in touched):
            raise OSError(errno.EIO, "the device says no")
        reading(file, buffer, offset)

    monkeypatch.setattr(module.NamedFile, "read", read)
    monkeypatch.setattr(module.NamedFile, "try_direct", lambda file: "not here")
    (finding,) = verify(context).findings
    assert finding.records == (3, 6, 8)
    assert "the device says no" in finding.problem and "checksum" in finding.problem


def test_a_context_that_is_replaced_meanwhile(context: Path, tmp_path: Path) -> None:
    """The new one is what is checked: no finding about files that were on their way out."""
    save(context, 56)
    manifest = save(tmp_path / "new", 24)
    replaced: list[int] = []

    def replace(done: int, total: int) -> None:
        if not replaced:
            replaced.append(done)
            for file in context.iterdir():
                file.unlink()
            context.rmdir()
            shutil.copytree(tmp_path / "new", context)

    result = verify(context, progress=replace)
    assert result.whole and replaced and result.bytes == manifest.record_bytes + manifest.state_bytes


def test_an_encrypted_context(context: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(bytes(range(32)))
    other.write_bytes(bytes(32))
    manifest = save(context, encryption_key=key)
    assert verify(context, key=key).whole and verify(context, key=lambda: bytes(range(32))).whole
    with pytest.raises(EncryptionKeyError, match="encrypted"):
        verify(context)
    with pytest.raises(EncryptionKeyError, match="not the one"):
        verify(context, key=other)
    flip(context / manifest.layers[0].parts[0].file, 3 * RECORD + 5, 9 * RECORD)
    assert found(context, key=key) == [("damaged", "layer 0", manifest.layers[0].parts[0].file, (3, 9))]


def test_nothing_is_left_open_and_nothing_written(context: Path) -> None:
    manifest = save(context)
    flip(context / manifest.layers[0].parts[0].file, 3)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in context.iterdir()}
    open_before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert not verify(context).whole
    if open_before:
        assert len(os.listdir("/proc/self/fd")) == open_before
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in context.iterdir()} == before
