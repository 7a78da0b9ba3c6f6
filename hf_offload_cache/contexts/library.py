"""A folder that keeps contexts: found again by the tokens that they begin with; the least recently used go."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import parse_size
from ..errors import BudgetError, ContextError, ContextMismatchError, CorruptRecordError, EncryptionKeyError, StoreError
from ..model.fingerprint import EVERY_BYTE, full_fingerprint
from ..model.look_ahead import reason_against_pieces
from ..model.place import inner_model
from ..model.plain_caches import may_crop
from ..registry import class_named
from ..stores.base import DEVICE_BLOCK
from ..stores.encryption import KeySource, key_check, load_key
from .configuration import common_prefix, encode, form_fields, placeholders, prompt_of, saved_fields
from .data_files import MANIFEST_NAME
from .folder import entries, reading, remove
from .listing import Entry, evict, listing, look, mark, touch
from .manifest import Manifest, StateFile
from .open import capture_kept, closed_on_error, token_ids
from .protocol import ContextCache, StoredLayer
from .reader import ContextReader, NoRoomError, check_digest, most_of_cache, read_manifest
from .state import tensor_bytes

# Which tokens the contexts of a folder begin with: read once, and kept as long as the context stays

NAME = re.compile(r"[0-9a-f]{32}")
"""What contexts in a library are called."""
_KEPT_BYTES = 64 * 2**20
"""Ids that an index keeps; those of further contexts are read again each time."""


@dataclass(frozen=True)
class Known:
    """What a look-up needs of a context. `model` is `model_digest` of it, `config` has the fields that were saved."""

    path: Path
    cache: str
    model: str
    config: dict[str, Any]
    batch: int
    tokens: int
    key_check: str | None
    state: StateFile
    binding: bytes
    digest: str
    mark_name: str
    last_used_ns: int


class PrefixIndex:
    """Index of the contexts in `folder` whose names follow from their content. For one thread at a time.

    A context that vanishes is skipped; so is a damaged one, with a warning that names it. If the damage is more than
    `look` shows, `found_damaged` is called with path, digest and reason.
    """

    def __init__(
        self, folder: Path, key: bytes | None, found_damaged: Callable[[Path, str, str], object] = lambda *what: None
    ) -> None:
        self._folder = folder
        self._key = key
        self._found_damaged = found_damaged
        self._known: dict[tuple[str, int, int], Known] = {}
        self._ids: dict[str, np.ndarray] = {}
        self._ids_bytes = 0

    def __call__(self) -> list[Known]:
        """Those there are now. Reads the manifests that were not read before. Raises `ContextError`, `StoreError`."""
        known: dict[tuple[str, int, int], Known] = {}
        for path in entries(self._folder):
            if not NAME.fullmatch(path.name):
                continue
            try:
                there = os.stat(path / MANIFEST_NAME, follow_symlinks=False)
                place = (path.name, there.st_ino, there.st_size)
                found = self._known.get(place) or _read(path)
                if os.path.lexists(path / found.mark_name):
                    raise ContextError(f"it is damaged{_told(path)}; it is replaced when its text is saved again")
            except (ContextError, OSError) as error:
                pass_over(path, error)
                continue
            known[place] = Known(**{**vars(found), "last_used_ns": there.st_mtime_ns})
        self._known = known
        names = {place[0] for place in known}
        self._ids = {name: ids for name, ids in self._ids.items() if name in names}
        self._ids_bytes = sum(ids.nbytes for ids in self._ids.values())
        return list(known.values())

    def ids(self, known: Known, form: Mapping[str, Any]) -> np.ndarray | None:
        """What `encode` gives for the tokens of a context that this index has the key for; None: it is passed over.

        `form`: its `form_fields`, from which its name follows.
        """
        if known.path.name in self._ids:
            return self._ids[known.path.name]
        try:
            ids = read_ids(known.path, known, self._key)
        except (ContextError, OSError) as error:
            if is_damage(error):
                self._found_damaged(known.path, known.digest, str(error))
            pass_over(known.path, error)
            return None
        key = None if known.key_check is None else self._key
        if prefix_name(known.cache, known.model, form, ids, key) != known.path.name:
            why = "its name does not follow from what it holds: it was not saved here; move it away"
            pass_over(known.path, ContextError(why))
            return None
        ids = ids.astype(np.int32) if ids.size and abs(ids).max() < 2**31 else ids
        if self._ids_bytes + ids.nbytes <= _KEPT_BYTES:
            self._ids[known.path.name] = ids
            self._ids_bytes += ids.nbytes
        return ids


def read_ids(path: Path, manifest: Manifest | Known, key: bytes | None) -> np.ndarray:
    """The tokens of the context at `path`, as `encode` gives them. Raises `ContextError`, `StoreError`,
    `EncryptionKeyError`."""
    if manifest.key_check is not None and (key is None or key_check(key) != manifest.key_check):
        what = "give the key, it is encrypted" if key is None else "it was encrypted with another key"
        raise EncryptionKeyError(f"the tokens of {str(path)!r} cannot be read: {what}")

    def read(folder_fd: int) -> np.ndarray:
        own = None if manifest.key_check is None else key
        reader, most = ContextReader(folder_fd, str(path), own), most_of_cache(manifest.batch, manifest.tokens)
        tree = reader.state(manifest.state, "cache", binding=manifest.binding, most=most)
        return token_ids(tree, manifest.batch, manifest.tokens).numpy()

    return reading(path, read)


def known_of(path: Path, manifest: Manifest) -> Known:
    """Everything that a look-up needs about the context at `path`, except when it was last used."""
    made_for, config = model_digest(manifest.identity), manifest.config
    return Known(
        path, manifest.cache, made_for, config, manifest.batch, manifest.tokens, manifest.key_check, manifest.state,
        manifest.binding, manifest.digest, manifest.mark_name, 0,
    )


def _read(path: Path) -> Known:
    return known_of(path, read_manifest(path))


def _told(path: Path) -> str:
    entry = look(path)
    return "" if entry is None or entry.damage is None else f" ({entry.damage})"


def is_damage(error: Exception) -> bool:
    """Whether an exception from reading a context means that it is not as it was written, whoever reads it."""
    if isinstance(error, ContextError):
        return not isinstance(error, (ContextMismatchError, NoRoomError))
    return isinstance(error, CorruptRecordError) or (isinstance(error, StoreError) and error.errno == errno.EIO)


def pass_over(path: Path, error: Exception) -> None:
    """Nothing for a context that is gone; else a warning that names it."""
    if look(path) is not None:
        what = " ".join(str(error).split())
        warnings.warn(f"the context {str(path)!r} is passed over: {what}", UserWarning, stacklevel=2)


def model_digest(fingerprint: Mapping[str, str]) -> str:
    """Equal for models whose keys and values are interchangeable, whatever their tokenizer."""
    fields = {name: value for name, value in fingerprint.items() if name not in ("tokenizer", EVERY_BYTE)}
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def prefix_name(cache: str, model: str, form: Mapping[str, Any], ids: np.ndarray, key: bytes | None) -> str:
    """What a context is called in a library; with a key, nobody without it can tell the name from the tokens."""
    digest = hashlib.blake2b(digest_size=16, key=key or b"", person=b"context name")
    digest.update(json.dumps([cache, model, dict(form), list(ids.shape)], sort_keys=True).encode())
    digest.update(np.ascontiguousarray(ids).tobytes())
    return digest.hexdigest()


# What a cache will take on the disk, once it is a context

def bytes_of(cache: ContextCache, kept: Collection[tuple[int, int]] = ()) -> int:
    """What a frozen cache will take on the disk beside the files `kept`, but for what describes it."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, StoredLayer):
            stores = layer.freeze()
            for store, live in zip(stores, layer.live(stores), strict=True):
                if (store.written & ~live).any():  # it will be a copy without them
                    total += int(np.count_nonzero(store.written & live)) * store.record_bytes
                elif store.inode not in kept:
                    total += store.capacity * store.record_bytes
            state: Any = layer.capture()
        else:
            state = capture_kept(layer)
        total += -(-tensor_bytes(state) // DEVICE_BLOCK) * DEVICE_BLOCK
    return total


@dataclass(frozen=True)
class Match:
    """A context that shares its beginning with a prompt: `matched` of its `tokens` per sequence, padding included.
    `digest` identifies it, as `save` of a cache returns it."""

    path: Path
    tokens: int
    matched: int
    digest: str


class ContextLibrary:
    """The contexts in `folder`, which is created (0700) if needed. Holds no lock and no descriptor.

    Each context is a directory whose name is a digest of class, model, format and token ids. Several processes may use
    one folder at the same time: contexts that vanish are skipped, and open contexts stay readable for those who have
    them open. Contexts with other names, which a cache's `save` made, are neither counted nor found nor removed.

    Args:
        max_bytes: maximum disk space of the contexts after a `save`; data that several contexts share counts once.
        key: key of an encrypted library: a file or a callback, as `encryption_key`. Contexts with another key, or with
            none, are skipped; a library without a key skips encrypted ones. `entries` notes them.

    A damaged context is never opened: it is skipped with a warning that names it. A read that finds damage, even in a
    later step, marks the context for all processes. The next request then skips it, and the next `save` of its text
    replaces it. Raises `ConfigError`, `EncryptionKeyError`; `ContextError` if `folder` is not a directory and cannot be
    made one.
    """

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: int | str = "200GB", key: KeySource | None = None
    ) -> None:
        self.folder = Path(folder)
        self.max_bytes = parse_size(max_bytes, "max_bytes")
        self._key = None if key is None else load_key(key)
        self._key_check = None if self._key is None else key_check(self._key)
        self._damaged: dict[str, str] = {}
        """By digest: what was found of contexts and could not be written down."""
        try:
            new = not self.folder.exists()
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if new:
                self.folder.chmod(0o700)  # the umask may have taken the owner's rights
        except OSError as error:
            raise ContextError(
                f"folder {str(self.folder)!r} cannot be made ({error.strerror}): give one whose parent exists"
            ) from error
        self._index = PrefixIndex(self.folder, self._key, self._found_damaged)

    # --- find --------------------------------------------------------------------------------------------------

    def find(
        self,
        input_ids: torch.Tensor,
        model: Any,
        cls: type[ContextCache] | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        least: int = 1,
        expect: Collection[str] | None = None,
    ) -> Match | None:
        """The context of `model` with the longest prefix in common with the prompt; of several, the last one used.

        Args:
            input_ids: (T,) or (B, T). A context must have as many sequences. It matches over the tokens that all of
                them share, at most T - 1 tokens, because `generate` needs a new one.
            cls: cache class whose contexts are searched; None: every registered class.
            attention_mask: of the same shape, 0 at padding; None: no padding.
            least: minimum number of matching tokens, not counting tokens that are padding in every sequence.
            expect: digests as returned by a cache's `save` and by `Entry.digest`; other contexts are skipped, such as
                old ones that somebody restored. None: any.

        A model with sliding-window or linear layers cannot take tokens back: its contexts match completely or not at
        all. Tokens that stand for images or sound match nothing, because ids do not identify their content. If a
        model's keys depend on a forward's length, only prompts and contexts match that are too short for such a change.
        """
        found = self._matches(input_ids, model, cls, attention_mask, least, {}, expect)
        return next((match for match, _ in found), None)

    def open(
        self,
        input_ids: torch.Tensor,
        model: Any,
        cls: type[ContextCache] | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        least: int = 1,
        expect: Collection[str] | None = None,
        **fields: Any,
    ) -> tuple[Any, int] | None:
        """Open the context that `find` finds. Returns a cache with the matching tokens and their number; None without a
        match.

        The cache has the class that saved the context, or `cls` (whose name is the same).
        `model.generate(input_ids, past_key_values=cache)` continues from there. The context counts as used now.
        `fields` are those of `OffloadCache.open`, including `memory` and `path`; contexts whose stored format has other
        values are not considered. Raises the errors of `OffloadCache.open` for `fields`. A damaged context is skipped,
        and the next best is opened. If a later step reads damage, it raises `CorruptRecordError`; call this again to
        get the next best context.
        """
        if self._key is not None:
            key = self._key
            fields = {"encryption_key": lambda: key, **fields}
        for match, made_by in self._matches(input_ids, model, cls, attention_mask, least, fields, expect):
            same = {} if expect is None else {"expect": match.digest}
            try:
                cache = made_by.open(match.path, model, **same, **fields)
                with closed_on_error(cache):
                    if cache.tokens != match.tokens:
                        raise ContextError("it was replaced by one that holds something else")
                    cache.storage.on_damage(functools.partial(self._found_damaged, match.path, match.digest))
                    if match.matched < match.tokens:
                        cache.crop(match.matched - match.tokens)
            except ContextMismatchError:
                continue  # in what only opening compares: every byte of the weights
            except (ContextError, StoreError) as error:
                if not is_damage(error):
                    if isinstance(error, StoreError):
                        raise
                else:
                    self._found_damaged(match.path, match.digest, str(error))
                pass_over(match.path, error)
                continue
            touch(match.path)
            return cache, match.matched
        return None

    def _matches(
        self,
        input_ids: torch.Tensor,
        model: Any,
        cls: type[ContextCache] | None,
        attention_mask: torch.Tensor | None,
        least: int,
        fields: dict[str, Any],
        expect: Collection[str] | None,
    ) -> list[tuple[Match, type[ContextCache]]]:
        """Best first, each with the class that opens it."""
        inner = inner_model(model)
        wanted, limit = prompt_of(input_ids, attention_mask, least, inner)
        for digest in () if expect is None else expect:
            check_digest(digest)
        of = model_digest(full_fingerprint(model))
        real = np.cumsum((wanted >= 0).any(0))
        found: list[tuple[int, int, str, Match, type[ContextCache]]] = []
        for known in self._index():
            made_by = class_named(known.cache) if cls is None else cls
            if made_by is None or known.cache != made_by.__name__:
                continue
            if known.model != of or known.batch != len(wanted) or known.key_check != self._key_check:
                continue
            if known.digest in self._damaged or (expect is not None and known.digest not in expect):
                continue
            if reason_against_pieces(inner, 1, max(known.tokens, wanted.shape[1])) is not None:
                continue  # its keys may not be those of this prompt
            form, croppable = form_fields(made_by.config_class, known.config), may_crop(inner)
            if not _fits(form, fields) or (known.tokens > limit and not croppable):
                continue
            ids = self._index.ids(known, form)
            if ids is None:
                continue
            matched = min(common_prefix(ids, wanted), limit)
            if matched and real[matched - 1] >= least and (matched == known.tokens or croppable):
                match = Match(known.path, known.tokens, matched, known.digest)
                found.append((matched, known.last_used_ns, known.path.name, match, made_by))
        return [item[3:] for item in sorted(found, key=lambda item: item[:3], reverse=True)]

    def _found_damaged(self, path: Path, digest: str, why: str) -> None:
        """Stop all processes from opening the context at `path`, if it still has that digest. May run in any thread;
        raises nothing."""
        if not mark(path, digest, why):
            self._damaged[digest] = why

    # --- keep --------------------------------------------------------------------------------------------------

    def save(self, cache: ContextCache, tokenizer: Any = None) -> Path:
        """Save the context of `cache`; returns the directory. If an equal context exists, it only counts as used. It is
        replaced if it is known to be damaged, or if `open` would not accept it.

        Least recently used contexts are evicted first, until the new one fits (a damaged one with a warning). When this
        returns, the contexts take `max_bytes` at most, whoever else saves meanwhile. `tokenizer` is passed to
        `OffloadCache.save`.

        Raises `BudgetError` with the numbers for a context that is larger than `max_bytes` by itself. It is not kept,
        and nothing is evicted, unless its records and states without the rest would have fitted. Raises
        `EncryptionKeyError` unless the cache's key is the library's; `ValueError` for content that token ids do not
        identify (embeddings, images); and the errors of `OffloadCache.save`.
        """
        if cache.storage.key != self._key:
            raise EncryptionKeyError(
                "the cache's encryption_key and the library's key must be the same one, or neither have one: give both"
            )
        cache.freeze()
        held = encode(cache.input_ids, cache.attention_mask)
        if (held == -1).any() or np.isin(held, placeholders(cache.model)).any():
            raise ValueError(
                "the cache holds embeddings, or tokens that stand for images or sound: token ids cannot find it; "
                "save it in a folder of its own with cache.save"
            )
        form = form_fields(cache.config_class, saved_fields(cache.config))
        name = prefix_name(type(cache).__name__, model_digest(full_fingerprint(cache.model)), form, held, self._key)
        path = self.folder / name
        there = look(path)
        if there is None or not self._can_be_opened(there, form) or not (touch(path) or look(path)):
            self._check_size(bytes_of(cache))
            kept = {inode for entry in listing(self.folder, sizes_only=True) for inode in entry.files}
            self._make_room(self.max_bytes - min(self.max_bytes, bytes_of(cache, kept)))
            try:
                self._damaged.pop(cache.save(path, overwrite=there is not None, tokenizer=tokenizer), None)
            except FileExistsError:
                if look(path) is None:
                    raise
        touch(path)
        saved = look(path)
        if saved is not None and saved.bytes > self.max_bytes:
            remove(path)
            self._check_size(saved.bytes)
        self._make_room(self.max_bytes)
        return path

    def _can_be_opened(self, entry: Entry, form: dict[str, Any]) -> bool:
        """As far as is known without reading records."""
        manifest = entry.manifest
        if entry.damage is not None or manifest is None or manifest.key_check != self._key_check:
            return False
        known = known_of(entry.path, manifest)
        return known.digest not in self._damaged and self._index.ids(known, form) is not None

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise BudgetError(
                f"max_bytes is {self.max_bytes:,} and this context alone takes {size:,}: give the library as much, or "
                "save the cache in a folder of its own with cache.save"
            )

    def _make_room(self, most_bytes: int) -> list[Entry]:
        done = evict(self.folder, most_bytes, lambda entry: NAME.fullmatch(entry.name) is not None)
        for entry, _ in done.removed:
            if entry.damage is not None:
                what = f"evicted the damaged context {str(entry.path)!r}: {entry.damage}"
                warnings.warn(what, UserWarning, stacklevel=3)
        if done.held_bytes > most_bytes:
            entry, error = done.refused[0]
            raise BudgetError(
                f"max_bytes is {self.max_bytes:,} and room cannot be made: {str(entry.path)!r} does not go ({error})"
            ) from error
        return [entry for entry, _ in done.removed]

    # --- look after --------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """The folder's contexts, most recently used first; includes damaged ones, and those with another key, which
        have a `note`."""
        return [self._noted(entry) for entry in listing(self.folder) if NAME.fullmatch(entry.name)]

    def _noted(self, entry: Entry) -> Entry:
        """With what this library knows of it beside."""
        if (manifest := entry.manifest) is None:
            return entry
        note, damage = None, entry.damage or self._damaged.get(manifest.digest)
        if manifest.key_check != self._key_check:
            kind = "not encrypted" if manifest.key_check is None else "encrypted with another key"
            kind = "encrypted, and the library has no key" if self._key_check is None else kind
            note = f"it is {kind}: this library never opens it; move it away, or remove it"
        return dataclasses.replace(entry, damage=damage, note=note)

    def remove(self, name: str, wipe: bool = False) -> int:
        """Remove one; returns the bytes of disk that this frees. `wipe` overwrites what no other context shares.

        Raises `ContextError` when there is none of that name.
        """
        if not NAME.fullmatch(name):
            raise ContextError(f"name must be one of a context in the library, 32 hexadecimal digits, got {name!r}")
        return remove(self.folder / name, wipe=wipe)

    def evict(self, max_bytes: int | str | None = None) -> list[Entry]:
        """Remove least recently used contexts until all take `max_bytes` (None: the library's) at most; returns them.

        A damaged one goes when it is its turn, with a warning that names it. Raises `BudgetError` when one does not go.
        """
        return self._make_room(self.max_bytes if max_bytes is None else parse_size(max_bytes, "max_bytes"))


def _fits(form: dict[str, Any], fields: dict[str, Any]) -> bool:
    """Whether a context of that form may be opened with `fields`."""
    if form.get("exact") and not fields.get("exact", True):
        return False
    return all(form[name] == fields[name] for name in form if name != "exact" and name in fields)
