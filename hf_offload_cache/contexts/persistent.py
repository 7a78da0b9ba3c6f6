"""What a cache offers to outlive its process: `save`, `open`, `fork`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from .fork import fork
from .open import open_context
from .save import save


class Persistent:
    """The verbs, on top of what the cache captures, restores and freezes."""

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        tokenizer: Any = None,
        full_digest: bool = False,
    ) -> str:
        """Publish what is held as the directory `directory`, which `open` opens in another process without prefill.

        Returns the context's digest, 64 hex digits. Keep it elsewhere where somebody could put an older context back:
        `open(..., expect=digest)` takes no other.

        On the file system of `path`, stored records are linked in and not copied, unless some of a file were given
        up: these are never saved. Each record is checked as it is copied. A file that is linked in is read and checked
        where something has written to it since this cache opened or froze it. Stored records are immutable from then
        on, and this cache goes on with records of its own beside them. Published in one atomic step: a process that is
        killed leaves the old context, the new one, or none where there was none. The directory is for its owner only
        (0700), and encrypted where the cache has an `encryption_key`.

        Args:
            overwrite: replace a context that is there.
            tokenizer: makes its identity part of the context's.
            full_digest: digest every byte of the weights, not a sample, here and in `open`.

        Raises `FileExistsError`; `CorruptRecordError` for a record that is not any more what was written, such as one
        of a context that was wiped while it is open; `StoreFullError` and other `StoreError`s. Nothing is published
        then, and the cache is as it was. Raises `ValueError` for a cache that holds nothing, and what any use of a
        cache does.
        """
        cache: Any = self  # a `ContextCache`
        return save(cache, directory, overwrite=overwrite, tokenizer=tokenizer, full_digest=full_digest)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        model: Any,
        memory: int | str | None = None,
        path: str | Path | None = None,
        *,
        tokenizer: Any = None,
        expect: str | None = None,
        **fields: Any,
    ) -> Self:
        """A cache that holds what `save` saved: no prefill, and no keys and values are read before a step needs them.

        Any number of caches and processes may open one context; what they add goes to unnamed files in `path`, the
        context stays as it is. It may be replaced or removed meanwhile: those that have it open keep it.

        Args:
            memory: as in `for_budget`, for `max_context` (by default 4,096 tokens more than are held) and `max_batch`.
            path: folder for what is added; None: the temporary folder.
            tokenizer: is compared with that of `save`, when both are given.
            expect: the digest that `save` returned: another context, such as an older one with the same key, is none.
            **fields: fields of the configuration. Those that the stored format fixes (`group_size`, `rank`,
                `summary_dtype`) are refused unless equal, and `adapter`, which is in the context, is always; those of a
                machine or a run (`engine`, `verify`, `io_timeout`, `trace`, `encryption_key`, the limits) are not
                saved; others are as they were, or as `memory` allows.

        Raises `ContextMismatchError` where the model is not the one it was saved with, naming the field and both
        values, or where the context is not the expected one; `ContextError` for a directory without a context, or a
        damaged manifest; `CorruptRecordError` for other bytes than were written, here or in the step that reads them;
        `EncryptionKeyError`; and as the constructor does. Nothing is left behind.
        """
        kind: Any = cls  # of `ContextCache`s
        return open_context(kind, directory, model, memory, path, tokenizer, fields, expect)

    def fork(self) -> Self:
        """A cache of its own that holds the same: N questions over one document share what is stored.

        Nothing on disk is copied, now or later: what is stored is immutable from now on, and what either adds is its
        own. Compact keys in memory are shared until one of the two adds a group; each one's account counts them. Tables
        and latest tokens are copied. Blocks until all writes are done. `copy.deepcopy` does the same.
        """
        cache: Any = self  # a `ContextCache`
        return fork(cache)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = self.fork()
        return twin
