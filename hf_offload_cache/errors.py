"""The errors of this library. Each is a subclass of the built-in error that a caller would expect.

Every message names the argument or place, the rule, the value, and what to do.
"""

from __future__ import annotations

import errno


class ConfigError(ValueError):
    """A field is unknown, out of range, or contradicts another; the message names the closest values that work."""


class AdapterError(ValueError):
    """A calibrated adapter cannot be used: unreadable, corrupt, of another version, or for another model or shape."""


class BudgetError(ValueError):
    """The memory, the context or the batch that was planned for would be exceeded; nothing was added."""

    needed: int | None = None
    """Bytes that would be enough, if a plan found them."""
    of_host: bool = False
    """They are of host memory, with a model on a GPU: `memory` is enough."""


class UnsupportedModelError(ValueError):
    """The model has no place for this cache (an encoder-decoder, or one whose layers do not support a sparse mode), or
    stores state on itself from step to step that the cache cannot follow."""


class PromptError(ValueError):
    """The tokens given to the model do not continue the stored ones; nothing was appended."""


class ReadOnlyError(ValueError):
    """Code assigned or wrote to a cache's keys, values or layers; they are unchanged."""


class ContextError(ValueError):
    """A directory contains no saved context, or its manifest is damaged, invalid, or of an unknown version."""


def shown(value: object, most: int = 80) -> str:
    """An untrusted value for an error message: at most `most` characters, without any that control a terminal; for a
    tensor its shape and type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{tuple(value.shape)} {value.dtype}"
    text = value[: most + 1] if isinstance(value, str) else f"{value!r:.{most + 1}}"
    escaped = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text[:most])
    return escaped + ("..." if len(text) > most else "")


def not_whole(name: str, what: str) -> ContextError:
    """The error for a part of a context that no cache can have captured."""
    return ContextError(f"{name} of the context does not hold together: {what}; save the context anew")


class ContextMismatchError(ContextError):
    """A saved context was made with another model, adapter or tokenizer; the message names the field and both
    values."""


class EncryptionKeyError(ValueError):
    """A key is missing, cannot be read, has the wrong size, or is not the one that the data was written with."""


class ForkedProcessError(RuntimeError):
    """A forked child process used a cache of its parent. The parent's cache is unchanged."""


class SeamLostError(RuntimeError):
    """Keys that `update` returned did not reach this library's attention. Raised in the same forward, before any token.

    Some layers of the cache may have one token more than others: `reset()` or `close()` it.
    """


class CacheUnusedError(RuntimeError):
    """A model ran without the cache that it was given. Raised in the same forward, before any token, or by
    `offload(strict=True)` at the end of the request."""


class CacheClosedError(RuntimeError):
    """The cache was closed; its data is gone."""


class StoreError(OSError):
    """A record could not be read or written; the message names the layer and the record. Others stay readable."""


class CorruptRecordError(StoreError):
    """Stored bytes are not what was written: flipped, cut off, swapped or missing. The message names the layer and the
    record. None of these bytes was used; others stay readable."""


class StalledError(StoreError):
    """A device did not answer before the deadline. The cache cannot be used any more: close it."""


class StoreFullError(StoreError):
    """The disk has no room for the records, of which nothing was kept."""


def is_full(error: OSError) -> bool:
    """Whether a disk, or a user's share of one, has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class ObjectError(StoreError):
    """An object or the manifest of a published context could not be read or written.

    `answer` is the store's. "absent": it does not exist. "refused": the store does not allow the request; a retry does
    not help. "later": the store or the link fails at the moment; a retry may help. "broken": something else was
    received.
    """

    answer: str = "broken"
    retry_after: float | None = None
    """Seconds that the store asks to wait; None: it does not say."""


class DamagedObjectError(ObjectError, CorruptRecordError):
    """An object of a published context exists, but is not the one that was published: publish the context again."""


OURS = tuple(value for value in list(vars().values()) if isinstance(value, type) and issubclass(value, Exception))
"""All of these errors."""
