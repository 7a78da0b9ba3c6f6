"""A store whose records can be made immutable: what saving a context and forking a cache need beyond `Store`."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch

from ..errors import StoreError
from .base import Store
from .guard import RecordGuard


class FreezableStore(Store):
    """A store that can be frozen: its records are immutable from then on, can be shared, and given a name on the disk.

    Once frozen, `allocate` and `write` raise `StoreError`, unless the store says where new records go, and `free` does
    nothing: others may hold the records.

    Attributes:
        first_id: the number that errors give to the first record: not 0 where this store is a part of another.
    """

    def __init__(self, record_bytes: int, name: str) -> None:
        super().__init__(record_bytes, name)
        self.first_id = 0

    @abstractmethod
    def freeze(self) -> None:
        """Make all records immutable for good, and give the unused end back. Idempotent.

        No write may be under way or follow. Raises `StoreError`, and is not frozen then.
        """

    @property
    @abstractmethod
    def written(self) -> np.ndarray:
        """Which records of a frozen store hold something: (capacity,), bool; the caller's."""

    @property
    def inode(self) -> tuple[int, int] | None:
        """Device and number of the file that the records lie in, by which two stores tell that they share it; None:
        they are in no file of one's own."""
        return None

    @abstractmethod
    def share(self) -> FreezableStore:
        """Another frozen store over the same records, with counters of its own; each is closed by its owner.

        Takes no disk space. May be used by another thread than this store. Raises `StoreError` unless this store is
        frozen.
        """

    @abstractmethod
    def export(self, folder_fd: int, name: str, live: np.ndarray | None = None) -> RecordGuard:
        """Give the records of a frozen store the new name `name` in the open directory `folder_fd`, mode 0600.

        A hard link if the file system allows it, else a copy. `live` ((capacity,), bool; None: all) says which records
        may be in the file: if the others hold data, the file is a copy without them, with holes instead.

        Each record is checked as it is copied, whatever reads trust. A link reads nothing, unless something has written
        to the file since it was opened or frozen, or a read has found damage in it: then the complete file is checked.

        The file's content is on the device when this returns; its name is when the directory is synced. Returns the
        guard whose tags describe it. Raises `StoreError` (`StoreFullError` with the numbers, before anything is copied;
        `CorruptRecordError` for a record that is not as it was written): then no file of that name exists.
        """

    def verify(self, ids: np.ndarray, records: torch.Tensor) -> None:
        """Raise `CorruptRecordError` unless `records`, which `read` gave for `ids`, are what was written.

        For a caller that is about to vouch for them: it checks what `read` was told to trust. Wrong rows are
        overwritten.
        """

    def on_damage(self, told: Callable[[str], object]) -> None:
        """Register `told` to be called, once and in any thread, with the reason when a read of a frozen store finds a
        record that is unreadable or not as it was written. Reads of stores that share the record count too. It must not
        raise."""

    def _check_frozen(self, frozen: bool, purpose: str) -> None:
        """For `share` and `export`: raise `StoreError` unless `frozen`; `purpose` is e.g. "shared"."""
        if not frozen:
            raise StoreError(errno.EBUSY, f"{self.name}: records that may change cannot be {purpose}; freeze it first")

    def _check_not_frozen(self, frozen: bool) -> None:
        """For `allocate` and `write`: raise `StoreError` when `frozen`."""
        if frozen:
            raise StoreError(errno.EROFS, f"{self.name}: its records are frozen; new ones go to another store")


def require_freezable(store: Store) -> FreezableStore:
    """`store`, which is to be frozen. Raises `TypeError` where it cannot be."""
    if isinstance(store, FreezableStore):
        return store
    raise TypeError(
        f"saving and forking need a store that can be frozen; {store.name} is in a {type(store).__name__}, which is no "
        "FreezableStore: implement freeze, written, share and export, or use one of the engines of this package"
    )
