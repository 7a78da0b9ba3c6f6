"""A model kept unpacked in the user's cache folder, so that it is unpacked once and not at every start."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from ..config import read_json

_LIST = "files.json"
"""Name, bytes and xxh3 of every other file of a folder: what is not just this is damaged."""


class DamagedError(ValueError):
    """The folder is there, and is not what was written; the message says which file and why."""


class NoHomeError(OSError):
    """The system has no folder for a user's files."""


def models_folder() -> Path:
    """`$XDG_CACHE_HOME/hf_offload_cache/models`; if that variable is unset or relative, the folder is in ~/.cache.

    Raises `NoHomeError` if the system does not know this user's home either.
    """
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not stated.is_absolute():
        try:
            stated = Path.home() / ".cache"
        except RuntimeError as error:
            raise NoHomeError(f"user {os.getuid()} has no home: set XDG_CACHE_HOME or HOME to a folder") from error
    return stated / "hf_offload_cache" / "models"


def check(folder: Path) -> bool:
    """Whether the folder is there; every byte of it is read. Raises `DamagedError`, and `OSError` where it may not be
    read."""
    if not folder.is_dir():
        return False
    try:
        listed = read_json(folder / _LIST)
        for name, (size, digest) in listed.items():
            if (folder / name).stat().st_size != size:
                raise DamagedError(f"{name} has {(folder / name).stat().st_size:,} bytes instead of {size:,}")
            if _digest(folder / name) != digest:
                raise DamagedError(f"{name} is not what was written")
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{_LIST} is not what was written") from error
    return True


def keep(folder: Path, write: Callable[[Path], object]) -> bool:
    """Gives what `write` puts into the folder it is called with the name `folder`, in one step; what was there goes.

    False, with nothing written, while another process is at it. Whoever looks sees all of it or nothing: a process
    that dies half-way leaves a part that the next one removes. Whatever `write` raises leaves nothing; `OSError` where
    the folder cannot be made or the disk is full.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f"{folder.name}.lock")) as alone:
        if not alone:
            return False
        part = folder.with_name(f"{folder.name}.part")
        _remove(part)
        try:
            part.mkdir()
            write(part)
            files = sorted(file for file in part.iterdir())
            listed = {file.name: (file.stat().st_size, _digest(file)) for file in files}
            (part / _LIST).write_text(json.dumps(listed, indent=1))
            for file in (*files, part / _LIST, part):
                _sync(file)
            _remove(folder)
            part.rename(folder)
            _sync(folder.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return True


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Whether this is the only process here. The kernel takes the lock back when a process dies."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digest(file: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(file, "rb") as opened:
        while piece := opened.read(2**20):
            hasher.update(piece)
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
