"""What is kept in the user's cache folder: whole or not there, whatever happens in between."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from hf_offload_cache.console import DamagedError, check, keep, models_folder


def write_two(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(range(256)) * 5000)
    (folder / "config.json").write_text("{}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models" / "name-1.2-bfloat16"


def test_kept_and_found(folder):
    assert check(folder) is False
    assert keep(folder, write_two) is True
    assert check(folder) is True
    assert (folder / "weights").read_bytes() == bytes(range(256)) * 5000
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


def flip(folder):
    data = bytearray((folder / "weights").read_bytes())
    data[700_000] ^= 1
    (folder / "weights").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "weights is not what was written"),
        (lambda folder: os.truncate(folder / "weights", 1000), "weights has 1,000 bytes instead of 1,280,000"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "files.json").unlink(), "files.json is missing"),
        (lambda folder: (folder / "files.json").write_text('{"weights": 3}'), "files.json is not what was written"),
        (lambda folder: (folder / "files.json").write_text("[]"), "files.json is not what was written"),
        (lambda folder: (folder / "files.json").write_bytes(b"\xff{"), "files.json is not what was written"),
    ],
)
def test_damage_is_named_and_replaced(folder, damage, words):
    keep(folder, write_two)
    damage(folder)
    with pytest.raises(DamagedError, match=words):
        check(folder)
    assert keep(folder, write_two) is True
    assert check(folder) is True


def test_a_full_disk_leaves_what_was_there(folder):
    def full(part):
        write_two(part)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        keep(folder, full)
    assert check(folder) is False
    keep(folder, write_two)
    with pytest.raises(OSError, match="No space left"):
        keep(folder, full)
    assert check(folder) is True
    assert not folder.with_name(f"{folder.name}.part").exists()


def test_two_at_once(folder):
    folder.parent.mkdir(parents=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as another process holds it
        assert keep(folder, lambda part: pytest.fail("both wrote")) is False
    assert keep(folder, write_two) is True and check(folder) is True


def test_killed_half_way(folder):
    """What a process that was killed has left."""
    part = folder.with_name(f"{folder.name}.part")
    seen = []
    keep(folder, lambda place: (seen.append(place), write_two(place)))
    assert seen == [part]
    shutil.rmtree(folder)
    part.mkdir()
    (part / "weights").write_bytes(b"half")
    assert check(folder) is False
    assert keep(folder, write_two) is True and check(folder) is True
    assert not part.exists()


@pytest.mark.parametrize(
    ("stated", "place"), [("/some/where", "/some/where"), ("rel/ative", "~/.cache"), ("", "~/.cache")]
)
def test_where(monkeypatch, stated, place):
    monkeypatch.setenv("XDG_CACHE_HOME", stated)
    assert models_folder() == Path(place).expanduser() / "hf_offload_cache" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models_folder() == Path.home() / ".cache" / "hf_offload_cache" / "models"
