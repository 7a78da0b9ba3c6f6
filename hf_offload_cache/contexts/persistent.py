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
        """Publish the cache's content as the directory `directory`, which `open` opens in another process without
        prefill.

        Returns the context's digest, 64 hex digits. If somebody could restore an older context, keep the digest where
        they cannot write: `open(..., expect=digest)` accepts no other context.

        On the file system of `path`, stored records are linked, not copied, unless some records of a file were given
        up: these are never saved. Each record is checked as it is copied. A linked file is read and checked if
        something has written to it since this cache opened or froze it. Stored records are immutable from then on, and
        this cache adds its own records next to them. The directory is published in one atomic step: a process that is
        killed leaves the old context, the new one, or none if there was none. Only the owner can access the directory
        (0700), and it is encrypted if the cache has an `encryption_key`.

        Args:
            overwrite: replace an existing context.
            tokenizer: makes its identity part of the context's.
            full_digest: digest every byte of the weights, not a sample, here and in `open`.

        Raises `FileExistsError`; `CorruptRecordError` for a record that is no longer as it was written, for example
        because the context was wiped while open; `StoreFullError` and other `StoreError`s. In these cases nothing is
        published, and the cache is unchanged. Raises `ValueError` for an empty cache, and the errors of any use of a
        cache.
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
        """Open a cache with the content that `save` saved: no prefill, and no keys and values are read before a step
        needs them.

        Any number of caches and processes may open one context. Their additions go to unnamed files in `path`; the
        context is unchanged. It may be replaced or removed meanwhile: caches that have it open keep it.

        Args:
            memory: as in `for_budget`, for `max_context` (by default 4,096 tokens more than are stored) and
                `max_batch`.
            path: folder for additions; None: the temporary folder.
            tokenizer: compared with the tokenizer of `save`, if both are given.
            expect: the digest that `save` returned; any other context raises `ContextMismatchError`, such as an older
                one with the same key.
            **fields: fields of the configuration. Fields that the stored format fixes (`group_size`, `rank`,
                `summary_dtype`) raise `ConfigError` unless equal; `adapter`, which is in the context, always does.
                Fields of a machine or a run (`engine`, `verify`, `io_timeout`, `trace`, `encryption_key`, the limits)
                are not saved. Others are as they were, or as `memory` allows.

        Raises `ContextMismatchError` if the model is not the one it was saved with, naming the field and both values,
        or if the context is not the expected one; `ContextError` for a directory without a context, or a damaged
        manifest; `CorruptRecordError` for bytes that differ from those written, here or in the step that reads them;
        `EncryptionKeyError`; and the constructor's errors. In these cases nothing is left behind.
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
