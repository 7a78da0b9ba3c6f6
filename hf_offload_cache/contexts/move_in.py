"""Replacing a context where two directories cannot exchange names: the old one takes the new one's files in."""

from __future__ import annotations

import os
from contextlib import suppress

from .data_files import MANIFEST_NAME, survey
from .file_system import FileSystem, sync_folder
from .removal import twice


class Replacement:
    """The steps, in order: `move_data`, `move_manifest`, `remove_old`. The manifest decides which context it is.

    Data files are named by digests: one that both contexts have is the same file, and replaced by its twin. The
    manifest moves last, and a sweeper removes it first: what has it has all the data files.

    Args:
        new_fd, old_fd: the new context's directory, complete, and the old one's. The caller closes them.
    """

    def __init__(self, file_system: FileSystem, new_fd: int, old_fd: int) -> None:
        self._file_system = file_system
        self._new_fd = new_fd
        self._old_fd = old_fd
        self._before = survey(file_system, old_fd)[0]
        self._new = survey(file_system, new_fd)[0]

    def move_data(self) -> None:
        """Let the old directory hold the data files of both contexts. After any error it is as before."""
        try:
            for name in self._new:
                if name != MANIFEST_NAME:
                    self._move(name)
            sync_folder(self._file_system, self._old_fd)
        except BaseException as error:
            self._take_back(error)
            raise

    def move_manifest(self, note: str) -> None:
        """From here on it is the new context. `note` goes to an error that comes after that; before, all is undone."""
        try:
            self._move(MANIFEST_NAME)
            sync_folder(self._file_system, self._old_fd)
        except BaseException as error:
            if self._is_new():
                error.add_note(note)
            else:
                self._take_back(error)
            raise

    def remove_old(self) -> OSError | None:
        """Remove what the new manifest does not name, unless another saver has come since. The error if that fails."""
        try:
            twice(self._remove_old)
        except OSError as error:
            return error
        return None

    def _remove_old(self) -> None:
        if self._is_new():
            self._unlink([name for name in self._before if name not in self._new])

    def _move(self, name: str) -> None:
        self._file_system.rename(name, name, self._new_fd, self._old_fd)

    def _is_new(self) -> bool:
        try:
            there = self._file_system.stat(MANIFEST_NAME, self._old_fd)
        except FileNotFoundError:  # being removed
            return False
        return MANIFEST_NAME in self._new and os.path.samestat(there, self._new[MANIFEST_NAME])

    def _take_back(self, error: BaseException) -> None:
        try:
            twice(lambda: self._unlink([name for name in self._new if name not in self._before]))
        except OSError as left:
            error.add_note(f"data files that no manifest names were left in the old context: {left}")

    def _unlink(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._file_system.unlink(name, self._old_fd)
