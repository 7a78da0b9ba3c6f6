"""A single file that is replaced in one step: whoever looks sees all of the old one or all of the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Make `path` what `write` puts at the place it is given: a temporary file in the same folder.

    It is forced to the disk, then moved over `path`, and so is the new name. After any exception, which is passed on,
    the temporary file is gone and `path` as it was, unless the error came from forcing the name to the disk. Killed: a
    file may stay whose name begins with a point, then that of `path`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name is the folder's content
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
