"""Publishing a context in one atomic step: others see the complete old directory or the complete new one."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import ContextError
from ..stores.atomic_file import Descriptor
from .file_system import ATTEMPTS, FILE_SYSTEM, FOLDER, NO_FOLDER, FileSystem, leads_to, reported, sync_folder, try_lock
from .folder import MANIFEST_NAME, is_temporary, survey, temporary_name
from .removal import discard, sweep_open, twice


class Replacement:
    """Replaces a context if two directories cannot exchange names: the new one's files move into the old one.

    The steps are `move_data`, `move_manifest`, `remove_old`. The manifest decides which context it is. Data files are
    named by digests, so a file that both contexts have is replaced by an equal one. The manifest moves last, and a
    sweeper removes it first, so a directory with a manifest has all its data files.

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
        """Move the data files into the old directory. After any error it is as before."""
        try:
            for name in self._new:
                if name != MANIFEST_NAME:
                    self._move(name)
            sync_folder(self._file_system, self._old_fd)
        except BaseException as error:
            self._take_back(error)
            raise

    def move_manifest(self, note: str) -> None:
        """Make it the new context. Errors before that undo everything; a later error gets `note`."""
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
        """Remove files that only the old manifest named, unless another saver came since. Returns the error, if any."""
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
            status = self._file_system.stat(MANIFEST_NAME, self._old_fd)
        except FileNotFoundError:  # being removed
            return False
        return MANIFEST_NAME in self._new and os.path.samestat(status, self._new[MANIFEST_NAME])

    def _take_back(self, error: BaseException) -> None:
        try:
            twice(lambda: self._unlink([name for name in self._new if name not in self._before]))
        except OSError as left:
            error.add_note(f"data files that no manifest names remain in the old context: {left}")

    def _unlink(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._file_system.unlink(name, self._old_fd)


_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.EXDEV)
"""Errors of exchanging if the kernel, the file system or a sandbox does not support it."""
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
"""Errors of renaming a directory to a name of anything but an empty directory."""


class Saver:
    """A temporary directory that is to become `target`.

    Call `make`, `check_filled`, `switch`, in this order; `go_back` after an error; `clean_up` in any case.

    Args:
        parent_fd: open descriptor of the directory that contains `target`; the caller closes it.

    Attributes:
        fd: its descriptor, whose lock keeps sweepers away; -1: none yet.
        left: what could not be removed, and the reasons.
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
                self._new = self._open_new(self._name)
            except FileNotFoundError:  # swept since
                continue
            self._file_system.fchmod(self.fd, 0o700)
            locked = try_lock(self._file_system, self.fd)
            if locked is not False and self._leads_to(self._name):
                return
            self._new.close()  # a sweeper locked it first, and removes it
            self._new = None
        raise OSError(errno.EBUSY, "other processes keep removing the temporary folder")

    def _open_new(self, name: str) -> Descriptor:
        try:
            return self._open(name)
        except PermissionError:  # the umask took the owner's rights
            self._file_system.chmod_folder(name, self._parent_fd)
            return self._open(name)

    def check_filled(self) -> None:
        """Raise `ContextError` unless the temporary directory contains a context."""
        ours, foreign = survey(self._file_system, self.fd)
        if foreign or MANIFEST_NAME not in ours:
            wrong = f"contains {foreign[0]!r}, not a context's file" if foreign else f"has no {MANIFEST_NAME!r}"
            raise ContextError(f"what was to be saved to {str(self._target)!r} {wrong}: nothing was saved")

    def check_target(self) -> bool:
        """True: a context that may be replaced; False: nothing, or an empty directory. Raises `FileExistsError`."""
        return self._is_context(self._target.name)

    def _is_context(self, name: str) -> bool:
        for _ in range(ATTEMPTS):
            try:
                folder = self._open(name)
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno in NO_FOLDER:
                    raise self._refusal("is a file or a link, not a folder: choose another name") from error
                raise
            with folder as fd:
                ours, foreign = survey(self._file_system, fd)
                if leads_to(self._file_system, name, self._parent_fd, fd):
                    break  # else it was being removed, and half empty
        if foreign:
            raise self._refusal(f"contains {foreign[0]!r}, not a context's file: move it, or choose another name")
        if ours and MANIFEST_NAME not in ours:
            raise self._refusal(f"has no {MANIFEST_NAME!r}, so it is not a context: remove it, or choose another name")
        if ours and not self._overwrite:
            raise self._refusal("contains a context: give overwrite=True to replace it, or choose another name")
        return bool(ours)

    def _refusal(self, why: str) -> FileExistsError:
        return FileExistsError(errno.EEXIST, f"{str(self._target)!r} {why}")

    def switch(self) -> None:
        """Make the filled directory `target`, and confirm that on the disk. Raises `OSError`."""
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
            self._is_context(self._name)  # raises, which goes back, if it was replaced by something else meanwhile
        sync_folder(self._file_system, self._parent_fd)
        return True

    def _keep_old(self, old: Descriptor) -> None:
        """Lock the old context against sweepers, because it has a temporary name until going back is ruled out."""
        if self._old is not None:
            self._old.close()
        self._old = old
        try_lock(self._file_system, old.fd)

    def _move_in(self) -> bool:
        """Move the new context into the old directory, if names cannot be exchanged. False as for `_switch_now`."""
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
        """Undo the switch if it was made; if that fails, `error` gets a note."""
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
        """Remove the directory with the temporary name, the new context or the old one, and close both."""
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


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)


def publish(
    target: str | os.PathLike[str],
    fill: Callable[[int], None],
    *,
    overwrite: bool = False,
    file_system: FileSystem = FILE_SYSTEM,
    warn: Callable[[str], object] = _warn,
) -> None:
    """Make the context `target`; with `overwrite`, replace an existing one.

    `fill` gets the descriptor of a new directory (0700 whatever the umask, with a temporary name next to `target`). It
    puts the data files and `manifest.json` there, each forced to the disk. The directory then becomes `target` in one
    atomic step: it is renamed (the kernel lets a directory replace only an empty one), or it exchanges names with the
    old context, which is removed. If names cannot be exchanged, the data files move into the old directory (their names
    are digests of their content), the manifest is renamed over the old one, and files that only the old manifest named
    are removed.

    If the process is killed at any point, `target` is the old or the new context in full. The next `sweep` of the
    folder, with which `publish` begins, removes the leftovers. One exception: a kill while data files move leaves some
    that no manifest names in `target` until it is replaced or removed.

    Several processes may replace one context at the same time: the last one wins. Without exchange they take turns by a
    lock; without locks only one process may do so at a time.

    Raises:
        FileExistsError: `target` exists and may not be replaced: a context without `overwrite`; a file, a link, a
            folder that is not empty and not a context, or that contains other files as well.
        ContextError: `target` has no name of its own; or `fill` left no manifest, or a file that no context may
            contain.
        StoreError: (`StoreFullError` for no space) a step failed.
        Errors of `fill` and `KeyboardInterrupt` are passed on.
        After any of these `target` is as before and the temporary directory is gone. Two exceptions: an error while
        the new context is confirmed on the disk (the last fsync) leaves the new one if going back fails too, and if
        names cannot be exchanged; the error then says so. `warn` is called with leftovers that cannot be removed.
    """
    target = Path(target)
    if not target.name or target.name == ".." or is_temporary(target.name):
        raise ContextError(f"a context needs a folder name of its own, got {str(target)!r}: give one such as 'context'")
    with reported(f"saving to {str(target)!r}: opening its folder"):
        parent = file_system.open(str(target.parent), FOLDER)
    with parent as parent_fd:
        saver = Saver(target, parent_fd, overwrite, file_system)
        try:
            with reported(f"saving to {str(target)!r}"):
                sweep_open(file_system, parent_fd)
                saver.check_target()  # refuse before the work
                saver.make()
            fill(saver.fd)
            with reported(f"saving to {str(target)!r}"):
                saver.check_filled()
                sync_folder(file_system, saver.fd)
                saver.switch()
        except BaseException as error:
            saver.go_back(error)
            raise
        finally:
            try:
                saver.clean_up()
            except BaseException:  # of a signal: once more
                saver.clean_up()
                raise
            for left in saver.left:
                warn(f"saving to {str(target)!r}: this could not be removed, the next save there tries again: {left}")
