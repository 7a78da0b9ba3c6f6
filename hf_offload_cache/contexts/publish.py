"""A directory gets its name when it is complete, in one step: whoever looks sees all of the old or all of the new."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from ..errors import ContextError
from .file_system import FILE_SYSTEM, FOLDER, FileSystem, reported, sync_folder
from .removal import is_temporary, sweep_open
from .saver import Saver


def publish(
    target: str | os.PathLike[str],
    fill: Callable[[int], None],
    *,
    overwrite: bool = False,
    file_system: FileSystem = FILE_SYSTEM,
    warn: Callable[[str], None] | None = None,
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
    with reported(f"saving to {str(target)!r}: the folder that it is to lie in"):
        parent = file_system.open(str(target.parent), FOLDER)
    with parent as parent_fd:
        saver = Saver(target, parent_fd, overwrite, file_system)
        try:
            with reported(f"saving to {str(target)!r}"):
                sweep_open(file_system, parent_fd)
                saver.check_target()  # refuse before the work is done
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
            except BaseException:  # a signal's: once more
                saver.clean_up()
                raise
            for left in saver.left:
                message = (
                    f"saving to {str(target)!r}: this could not be removed, the next save there tries again: {left}"
                )
                if warn is None:
                    warnings.warn(message, UserWarning, stacklevel=2)
                else:
                    warn(message)
