"""The errors of this library: each is also the built-in error that a caller would expect.

Every message names the argument or place, the rule, the value, and what to do.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A field is unknown, out of range, or contradicts another; the nearest values that work are named."""


class AdapterError(ValueError):
    """A calibrated adapter cannot be used: unreadable, corrupt, of another version, or for another model or shape."""


class BudgetError(ValueError):
    """The memory, the context or the batch that was planned for would be exceeded; nothing was added."""


class UnsupportedModelError(ValueError):
    """The model has no place for this cache (an encoder-decoder, or one whose layers do not support a sparse mode), or
    stores state on itself from step to step that the cache cannot follow."""


class PromptError(ValueError):
    """The tokens given to the model do not continue what the cache holds; nothing was appended."""


class ReadOnlyError(ValueError):
    """Code assigned or wrote to a cache's keys, values or layers; they are unchanged."""


class ContextError(ValueError):
    """A directory holds no saved context, or one whose manifest is damaged, of an unknown version, or absurd."""


def shown(value: object, most: int = 80) -> str:
    """An outside value as an error shows it: at most the given number of characters, and none that controls a terminal;
    for a tensor its shape and type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{tuple(value.shape)} {value.dtype}"
    text = value[: most + 1] if isinstance(value, str) else f"{value!r:.{most + 1}}"
    escaped = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text[:most])
    return escaped + ("..." if len(text) > most else "")


def not_whole(name: str, what: str) -> ContextError:
    """The error for a part of a context that cannot have been captured so."""
    return ContextError(f"{name} of the context does not hold together: {what}; save the context anew")


class ContextMismatchError(ContextError):
    """A saved context was made with something else (a model, an adapter, a tokenizer); the field and both values are
    named."""


class EncryptionKeyError(ValueError):
    """A key is missing, cannot be read, has the wrong size, or is not the one that the data was written with."""


class ForkedProcessError(RuntimeError):
    """A cache of the parent process was used in a child that was forked from it. The parent's is as it was."""


class SeamLostError(RuntimeError):
    """Keys left `update` and did not come to our attention; raised in the same forward, before any token.

    The cache may hold one more token in some layers than in others: `reset()` or `close()` it.
    """


class CacheUnusedError(RuntimeError):
    """A model was given this cache and ran without it. Raised in the same forward, before any token, or by
    `offload(strict=True)` when the request has ended."""


class CacheClosedError(RuntimeError):
    """The cache was closed; its data is gone."""


class StoreError(OSError):
    """A record could not be read or written; names the layer and the record. Other records stay readable."""


class CorruptRecordError(StoreError):
    """Stored bytes are not what was written: flipped, cut off, swapped or missing. Names the layer and the record.

    Nothing of them was handed out. What else is stored stays readable.
    """


class StalledError(StoreError):
    """A device did not answer before the deadline. The cache is not to be used any more: close it."""


class StoreFullError(StoreError):
    """The disk has no room for the records asked for; nothing of them was kept."""


class ObjectError(StoreError):
    """An object or the manifest of a published context could not be read or written: `answer` is the store's answer.

    "absent": it does not exist. "refused": the store does not allow the request; a retry does not help. "later": the
    store or the link fails at the moment; a retry may help. "broken": something else was received.
    """

    answer: str = "broken"
    retry_after: float | None = None
    """Seconds that the store asks to wait; None: it does not say."""


class DamagedObjectError(ObjectError, CorruptRecordError):
    """An object of a published context exists, but is not the one that was published: publish the context again."""


OURS = tuple(value for value in list(vars().values()) if isinstance(value, type) and issubclass(value, Exception))
"""All of them."""
