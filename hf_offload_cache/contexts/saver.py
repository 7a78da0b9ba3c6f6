"""The steps by which a directory that was filled takes the place of a context, and the ways back from each."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..errors import ContextError
from ..stores.descriptor import Descriptor
from .data_files import MANIFEST_NAME, survey
from .file_system import ATTEMPTS, FOLDER, NO_FOLDER, FileSystem, leads_to, sync_folder, try_lock
from .move_in import Replacement
from .removal import discard, temporary_name

_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.EXDEV)
"""What exchanging fails with where the kernel, the file system or a sandbox has no such call."""
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
"""What giving a directory a name fails with when that belongs to anything but an empty directory."""


class Saver:
    """A temporary directory that is to become `target`.

    Call `make`, `check_filled`, `switch`, in this order; `go_back` after an error; `clean_up` in any case.

    Args:
        parent_fd: open descriptor of the directory that contains `target`; the caller closes it.

    Attributes:
        fd: its descriptor, which has the lock that keeps sweepers away; -1: none yet.
        left: files that could not be removed, and the reasons.
    """

    def __init__(self, target: Path, parent_fd: int, overwrite: bool, file_system: FileSystem) -> None:
        self._target = target
        self._parent_fd = parent_fd
        self._overwrite = overwrite
        self._file_system = file_system
        self._name: str | None = None
        self._exchanges = False
        self._new: Descriptor | None = None
        self._old: Descriptor | None = None
        self.left: list[str] = []

    @property
    def fd(self) -> int:
        return -1 if self._new is None else self._new.fd

    def make(self) -> None:
        """Make the temporary directory. Raises `OSError`."""
        for _ in range(ATTEMPTS):
            self._name = temporary_name()
            try:
                self._file_system.mkdir(self._name, self._parent_fd)
            except FileExistsError:
                self._name = None
                continue
            try:
                self._new = self._open_made(self._name)
            except FileNotFoundError:  # swept since
                continue
            self._file_system.fchmod(self.fd, 0o700)
            locked = try_lock(self._file_system, self.fd)
            if locked is not False and self._leads_to(self._name):
                return
            self._new.close()  # a sweeper was faster than the lock: it removes this one
            self._new = None
        raise OSError(errno.EBUSY, "other processes keep removing the temporary folder")

    def _open_made(self, name: str) -> Descriptor:
        try:
            return self._open(name)
        except PermissionError:  # the umask took the owner's rights
            self._file_system.chmod_folder(name, self._parent_fd)
            return self._open(name)

    def check_filled(self) -> None:
        """Raise `ContextError` when the temporary directory does not hold a context."""
        ours, foreign = survey(self._file_system, self.fd)
        if foreign or MANIFEST_NAME not in ours:
            wrong = f"holds {foreign[0]!r}, which no context may hold" if foreign else f"has no {MANIFEST_NAME!r}"
            raise ContextError(f"what was to be saved to {str(self._target)!r} {wrong}: nothing was saved")

    def check_target(self) -> bool:
        """True: a context that may be replaced; False: nothing, or an empty directory. Raises `FileExistsError`."""
        return self._is_context(self._target.name)

    def _is_context(self, name: str) -> bool:
        for _ in range(ATTEMPTS):
            try:
                found = self._open(name)
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno in NO_FOLDER:
                    raise self._refusal("is a file or a link, not a folder: choose another name") from error
                raise
            with found as fd:
                ours, foreign = survey(self._file_system, fd)
                if leads_to(self._file_system, name, self._parent_fd, fd):
                    break  # else it was on its way out, and half empty
        if foreign:
            raise self._refusal(f"holds {foreign[0]!r}, which is not of a context: move it, or choose another name")
        if ours and MANIFEST_NAME not in ours:
            raise self._refusal(f"has no {MANIFEST_NAME!r}, so it is not a context: remove it, or choose another name")
        if ours and not self._overwrite:
            raise self._refusal("holds a context: give overwrite=True to replace it, or choose another name")
        return bool(ours)

    def _refusal(self, why: str) -> FileExistsError:
        return FileExistsError(errno.EEXIST, f"{str(self._target)!r} {why}")

    def switch(self) -> None:
        """Let `target` be what was filled, and make sure of that on the disk. Raises `OSError`."""
        for _ in range(ATTEMPTS):
            if self._switch_now():
                return
        raise OSError(errno.EBUSY, "other processes keep replacing it")

    def _switch_now(self) -> bool:
        """One attempt; False: another process made or removed `target` between two steps."""
        assert self._name is not None
        if not self.check_target():
            self._exchanges = False
            try:
                self._file_system.rename(self._name, self._target.name, self._parent_fd)
            except OSError as error:
                if error.errno in _TAKEN:
                    return False
                raise
        else:
            try:
                self._keep_old(self._open(self._target.name))
            except FileNotFoundError:
                return False
            self._exchanges = True
            try:
                self._file_system.exchange(self._name, self._target.name, self._parent_fd)
            except OSError as error:
                if error.errno in _NO_EXCHANGE:
                    return self._move_in()
                if error.errno == errno.ENOENT and self._leads_to(self._name):
                    return False
                raise
            self._is_context(self._name)  # what came out: if it is not what was there before, back with it
        sync_folder(self._file_system, self._parent_fd)
        return True

    def _keep_old(self, old: Descriptor) -> None:
        """Keep sweepers from the old context: it has a temporary name while there may be a way back."""
        if self._old is not None:
            self._old.close()
        self._old = old
        try_lock(self._file_system, old.fd)

    def _move_in(self) -> bool:
        """Let the old directory hold the new context, where names cannot be exchanged. False as for `_switch_now`."""
        assert self._old is not None
        try_lock(self._file_system, self._old.fd, wait=True)
        if not leads_to(self._file_system, self._target.name, self._parent_fd, self._old.fd):
            return False
        replacement = Replacement(self._file_system, self.fd, self._old.fd)
        replacement.move_data()
        replacement.move_manifest(f"{str(self._target)!r} is the new context nevertheless")
        left = replacement.remove_old()
        if left is not None:
            self.left.append(f"data files of the context that was replaced: {left}")
        return True

    def go_back(self, error: BaseException) -> None:
        """Undo the switch if it was made; a note in `error` says when that is not possible."""
        try:
            if self.fd < 0 or not self._leads_to(self._target.name):
                return
            assert self._name is not None
            if self._exchanges:
                self._file_system.exchange(self._name, self._target.name, self._parent_fd)
            else:
                self._file_system.rename(self._target.name, self._name, self._parent_fd)
        except OSError as failed:
            error.add_note(f"{str(self._target)!r} is the new context nevertheless: going back failed, {failed}")

    def clean_up(self) -> None:
        """Remove what has the temporary name, the new context or the old one, and let go of it."""
        try:
            if self._name is not None:
                discard(self._file_system, self._parent_fd, self._name)
        except (OSError, ContextError) as error:
            self.left.append(f"{self._name}: {error}")
        finally:
            for folder in (self._new, self._old):
                if folder is not None:
                    folder.close()

    def _open(self, name: str) -> Descriptor:
        return self._file_system.open(name, FOLDER | os.O_NOFOLLOW, self._parent_fd)

    def _leads_to(self, name: str) -> bool:
        return leads_to(self._file_system, name, self._parent_fd, self.fd)
