"""A folder of contexts that are found by the tokens they begin with; the least recently used are evicted."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import parse_size
from ..errors import BudgetError, ContextError, ContextMismatchError, CorruptRecordError, EncryptionKeyError, StoreError
from ..model.fingerprint import EVERY_BYTE, full_fingerprint
from ..model.look_ahead import reason_against_pieces
from ..model.media import Medium, whole
from ..model.place import inner_model
from ..model.plain_caches import may_crop
from ..registry import class_named
from ..stores.base import DEVICE_BLOCK
from ..stores.encryption import KeySource, key_check, load_key
from .configuration import Text, common_prefix, encode, form_fields, prompt_of, saved_fields, unidentified
from .folder import MANIFEST_NAME, entries, reading
from .listing import Entry, WrittenToday, evict, listing, look, mark, touch
from .manifest import Manifest, StateFile, check_digest, read_manifest
from .open import LayersInTurn, capture_kept, closed_on_error, media_in, token_ids
from .removal import remove
from .state import ContextReader, NoRoomError, StoredLayer, most_of_cache, tensor_bytes

NAME = re.compile(r"[0-9a-f]{32}")
"""Names of contexts in a library."""
_MEDIUM_BYTES = 300
"""Memory of the mark of a picture or sound."""
_KEPT_BYTES = 64 * 2**20
"""Bytes of token ids that an index keeps; those of further contexts are read each time."""


@dataclass(frozen=True)
class Known:
    """A context's values for look-ups. `model` is its `model_digest`, `config` has the saved fields."""

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

    @classmethod
    def of(cls, path: Path, manifest: Manifest, last_used_ns: int = 0) -> Known:
        model = model_digest(manifest.identity)
        same = {name: getattr(manifest, name) for name in _SAME}
        return cls(path=path, model=model, last_used_ns=last_used_ns, **same)


_SAME = ("cache", "config", "batch", "tokens", "key_check", "state", "binding", "digest", "mark_name")
"""Fields of `Known` that a manifest has too."""


class PrefixIndex:
    """Index of the contexts in `folder` whose names follow from their content. For any thread.

    Tokens are read once, and kept as long as the context exists. A context that is removed is skipped, and so is a
    damaged one, with a warning that names it. If `look` does not show the damage, `found_damaged` is called with path,
    digest and reason.
    """

    def __init__(self, folder: Path, key: bytes | None, found_damaged: Callable[[Path, str, str], object]) -> None:
        self._folder = folder
        self._key = key
        self._found_damaged = found_damaged
        self._known: dict[tuple[str, int, int], Known] = {}
        self._texts: dict[str, Text] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def __call__(self) -> list[Known]:
        """The present contexts. Reads manifests that were not read before. Raises `ContextError`, `StoreError`."""
        known: dict[tuple[str, int, int], Known] = {}
        for path in entries(self._folder):
            if not NAME.fullmatch(path.name):
                continue
            try:
                status = os.stat(path / MANIFEST_NAME, follow_symlinks=False)
                place = (path.name, status.st_ino, status.st_size)
                context = self._known.get(place) or Known.of(path, read_manifest(path))
                if os.path.lexists(path / context.mark_name):
                    entry = look(path)
                    details = "" if entry is None or entry.damage is None else f" ({entry.damage})"
                    raise ContextError(f"it is damaged{details}; it is replaced when its text is saved again")
            except (ContextError, OSError) as error:
                _warn_skipped(path, error)
                continue
            known[place] = dataclasses.replace(context, last_used_ns=status.st_mtime_ns)
        names = {name for name, _, _ in known}
        with self._lock:
            self._known = known
            self._texts = {name: text for name, text in self._texts.items() if name in names}
            self._bytes = sum(map(_text_bytes, self._texts.values()))
        return list(known.values())

    def text(self, known: Known, form: Mapping[str, Any]) -> Text | None:
        """The tokens of a context that this index has the key for; None: it is skipped.

        `form`: its `form_fields`, from which its name follows.
        """
        kept = self._texts.get(known.path.name)
        if kept is not None:
            return kept
        try:
            text = read_text(known.path, known, self._key)
        except (ContextError, OSError) as error:
            if is_damage(error):
                self._found_damaged(known.path, known.digest, str(error))
            _warn_skipped(known.path, error)
            return None
        key = None if known.key_check is None else self._key
        if prefix_name(known.cache, known.model, form, text, key) != known.path.name:
            why = "its name does not follow from its content: it was not saved here; move it away"
            _warn_skipped(known.path, ContextError(why))
            return None
        ids = text.ids
        text = Text(ids.astype(np.int32) if ids.size and abs(ids).max() < 2**31 else ids, text.media)
        with self._lock:
            if self._bytes + _text_bytes(text) <= _KEPT_BYTES:
                self._texts[known.path.name] = text
                self._bytes += _text_bytes(text)
        return text


def _text_bytes(text: Text) -> int:
    return text.ids.nbytes + len(text.media) * _MEDIUM_BYTES


def read_text(path: Path, manifest: Manifest | Known, key: bytes | None) -> Text:
    """The tokens of the context at `path`. Raises `ContextError`, `StoreError`, `EncryptionKeyError`."""
    if manifest.key_check is not None and (key is None or key_check(key) != manifest.key_check):
        why = "give the key, it is encrypted" if key is None else "it was encrypted with another key"
        raise EncryptionKeyError(f"the tokens of {str(path)!r} cannot be read: {why}")

    def read(folder_fd: int) -> Text:
        reader = ContextReader(folder_fd, str(path), None if manifest.key_check is None else key)
        most = most_of_cache(manifest.batch, manifest.tokens)
        tree = reader.state(manifest.state, "cache", binding=manifest.binding, most=most)
        ids = token_ids(tree, manifest.batch, manifest.tokens)
        return Text(ids.numpy(), media_in(tree, ids))

    return reading(path, read)


def is_damage(error: Exception) -> bool:
    """Whether an exception from reading a context means that its files are not as they were written."""
    if isinstance(error, ContextError):
        return not isinstance(error, (ContextMismatchError, NoRoomError))
    return isinstance(error, CorruptRecordError) or (isinstance(error, StoreError) and error.errno == errno.EIO)


def _warn_skipped(path: Path, error: Exception) -> None:
    """Warn that a context is skipped, unless it was removed."""
    if look(path) is not None:
        why = " ".join(str(error).split())
        warnings.warn(f"the context {str(path)!r} is passed over: {why}", UserWarning, stacklevel=2)


def model_digest(fingerprint: Mapping[str, str]) -> str:
    """Equal for models whose keys and values are interchangeable, whatever their tokenizer."""
    fields = {name: value for name, value in fingerprint.items() if name not in ("tokenizer", EVERY_BYTE)}
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def prefix_name(cache: str, model: str, form: Mapping[str, Any], text: Text, key: bytes | None) -> str:
    """A context's name in a library. Without the key, if there is one, it cannot be computed from the tokens."""
    digest = hashlib.blake2b(digest_size=16, key=key or b"", person=b"context name")
    media = [sorted(text.media)] if text.media else []
    digest.update(json.dumps([cache, model, dict(form), list(text.ids.shape), *media], sort_keys=True).encode())
    digest.update(np.ascontiguousarray(text.ids).tobytes())
    return digest.hexdigest()


def bytes_of(cache: Any, kept: Collection[tuple[int, int]] = ()) -> int:
    """Disk space of a frozen cache as a context, besides the files `kept`, and without its manifest."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, StoredLayer):
            stores = layer.freeze()
            for store, live in zip(stores, layer.live(stores), strict=True):
                if (store.written & ~live).any():  # the file will be a copy without the unused records
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
    """A context that shares its beginning with a prompt: `matched` of its `tokens` per sequence, padding included. A
    cache's `save` returned its `digest`."""

    path: Path
    tokens: int
    matched: int
    digest: str


class ContextLibrary:
    """The contexts in `folder`, which is created (0700) if needed. Holds no lock and no descriptor.

    Each context is a directory whose name is a digest of class, model, format and token ids. Several processes may use
    one folder at the same time: contexts that are removed are skipped, and caches that have one open keep it. Contexts
    with other names, which a cache's `save` made, are neither counted nor found nor removed.

    Args:
        max_bytes: maximum disk space of the contexts after a `save`; data that several contexts share counts once.
        max_bytes_a_day: maximum bytes that `save` adds to the folder on one day (UTC), by all processes, because flash
            memory wears. None: no limit. A cache's own writes before it is saved are in its report.
        key: key of an encrypted library: a file or a callback, as `encryption_key`. Contexts with another key, or with
            none, are skipped; a library without a key skips encrypted ones. `entries` notes them.

    A damaged context is never opened: it is skipped with a warning that names it. A read that finds damage, even in a
    later step, marks the context for all processes. The next request then skips it, and the next `save` of its text
    replaces it. Raises `ConfigError`, `EncryptionKeyError`; `ContextError` if `folder` is not a directory and cannot be
    made.
    """

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: int | str = "200GB", key: KeySource | None = None,
        *, max_bytes_a_day: int | str | None = None,
    ) -> None:  # fmt: skip
        self.folder = Path(folder)
        self.max_bytes = parse_size(max_bytes, "max_bytes")
        self.max_bytes_a_day = None if max_bytes_a_day is None else parse_size(max_bytes_a_day, "max_bytes_a_day")
        self._key, self._key_source = None if key is None else load_key(key), key
        self._key_check = None if self._key is None else key_check(self._key)
        self._damaged: dict[str, str] = {}
        """Damage that was found and could not be marked in the folder, by the context's digest."""
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
        self._day = WrittenToday(self.folder)

    def __reduce__(self) -> Any:
        """A copy, for example in another process, reads the folder and the key anew."""
        make = functools.partial(type(self), max_bytes_a_day=self.max_bytes_a_day)
        return make, (self.folder, self.max_bytes, self._key_source)

    @property
    def key_fields(self) -> dict[str, Any]:
        """The fields that a cache needs for its content to be saved here: `encryption_key`, if there is a key."""
        key = self._key
        return {} if key is None else {"encryption_key": lambda: key}

    # --- find --------------------------------------------------------------------------------------------------

    def find(
        self,
        input_ids: torch.Tensor,
        model: Any,
        cls: type[Any] | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        least: int = 1,
        expect: Collection[str] | None = None,
        like: Mapping[str, Any] | None = None,
        media: Sequence[Medium] = (),
        identity: Mapping[str, str] | None = None,
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
            like: fields of a cache's configuration: only contexts that `open` would open with them and `alike`. None:
                any.
            media: the prompt's pictures and sounds, which must be equal too, as `offload` finds them. Tokens that stand
                for others match nothing, because ids do not identify their content.
            identity: the model's fingerprint, as `offload` computes it before a request; None: the present one.

        A cache with sliding-window or linear layers cannot be cropped: its contexts match completely or not at all. If
        a model's keys depend on a forward's length, only prompts and contexts match that are too short for such a
        change.
        """
        fields, alike = dict(like or {}), like is not None
        matches = self._matches(input_ids, model, cls, attention_mask, least, fields, expect, alike, media, identity)
        return matches[0][0] if matches else None

    def open(
        self,
        input_ids: torch.Tensor,
        model: Any,
        cls: type[Any] | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        least: int = 1,
        expect: Collection[str] | None = None,
        alike: bool = False,
        media: Sequence[Medium] = (),
        identity: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> tuple[Any, int] | None:
        """Open the context that `find` finds. Returns a cache with the matching tokens and their number; None without a
        match.

        The cache has the class that saved the context, or `cls` (whose name is the same).
        `model.generate(input_ids, past_key_values=cache)` continues from there. The context counts as used now.
        `fields` are those of `OffloadCache.open`, including `memory` and `path`; contexts whose stored format has other
        values are not considered. `alike`: only contexts of caches that were exact, or were not, as `fields` say:
        tokens that sparse steps generated are not those of an exact cache. Raises the errors of `OffloadCache.open` for
        `fields`. A damaged context is skipped, and the next best is opened. If a later step reads damage, it raises
        `CorruptRecordError`; call this again to get the next best context.
        """
        fields = {**self.key_fields, **fields}
        asked = (input_ids, model, cls, attention_mask, least, fields, expect, alike, media, identity)
        for match, made_by in self._matches(*asked):
            same = {} if expect is None else {"expect": match.digest}
            try:
                cache = made_by.open(match.path, model, **same, **fields)
                with closed_on_error(cache):
                    if cache.tokens != match.tokens:
                        raise ContextError("it was replaced by something else")
                    self.watch(cache, match)
                    if match.matched < match.tokens:
                        cache.crop(match.matched - match.tokens)
            except ContextMismatchError:
                continue  # in what only opening compares, such as every byte of the weights
            except (ContextError, StoreError) as error:
                if is_damage(error):
                    self._found_damaged(match.path, match.digest, str(error))
                elif isinstance(error, StoreError):
                    raise
                _warn_skipped(match.path, error)
                continue
            touch(match.path)
            return cache, match.matched
        return None

    def _matches(
        self,
        input_ids: torch.Tensor,
        model: Any,
        cls: type[Any] | None,
        attention_mask: torch.Tensor | None,
        least: int,
        fields: dict[str, Any],
        expect: Collection[str] | None,
        alike: bool = False,
        media: Sequence[Medium] = (),
        identity: Mapping[str, str] | None = None,
    ) -> list[tuple[Match, type[Any]]]:
        """Matches, the best first, each with the class that opens it."""
        inner = inner_model(model)
        wanted, limit = prompt_of(input_ids, attention_mask, least, inner, media)
        for digest in () if expect is None else expect:
            check_digest(digest)
        made_for = model_digest(identity or full_fingerprint(model))
        real_tokens = np.cumsum((wanted.ids >= 0).any(0))
        matches: list[tuple[int, int, str, Match, type[Any]]] = []
        for known in self._index():
            made_by = class_named(known.cache) if cls is None else cls
            if made_by is None or known.cache != made_by.__name__:
                continue
            if known.model != made_for or known.batch != len(wanted.ids) or known.key_check != self._key_check:
                continue
            if known.digest in self._damaged or (expect is not None and known.digest not in expect):
                continue
            if reason_against_pieces(inner, 1, max(known.tokens, wanted.ids.shape[1])) is not None:
                continue  # its keys may differ from this prompt's
            form, croppable = form_fields(made_by.config_class, known.config), may_crop(inner)
            if not _fits(form, fields) or (known.tokens > limit and not croppable):
                continue
            if alike and bool(form.get("exact")) is not bool(fields.get("exact")):
                continue
            text = self._index.text(known, form)
            if text is None:
                continue
            matched = whole(wanted.media, min(common_prefix(text, wanted), limit))
            if matched and real_tokens[matched - 1] >= least and (matched == known.tokens or croppable):
                match = Match(known.path, known.tokens, matched, known.digest)
                matches.append((matched, known.last_used_ns, known.path.name, match, made_by))
        return [ranked[3:] for ranked in sorted(matches, key=lambda ranked: ranked[:3], reverse=True)]

    def open_match(self, match: Match, model: Any, cls: type[Any], **fields: Any) -> LayersInTurn:
        """The context that `find` returned, of class `cls`, to be read layer by layer, with the `fields` of
        `OffloadCache.open`. Raises its errors; damage is marked."""

        def failed(error: Exception) -> None:
            if is_damage(error):
                self._found_damaged(match.path, match.digest, str(error))

        fields = {**self.key_fields, **fields}
        try:
            context = LayersInTurn(cls, match.path, model, fields.pop("path", None), fields, match.digest)
        except (ContextError, StoreError) as error:
            failed(error)
            raise
        context.on_error = failed
        self.watch(context.cache, match)
        touch(match.path)
        return context

    def watch(self, cache: Any, match: Match) -> None:
        """Mark the context of `match` for all processes if `cache`, which reads it, finds damage."""
        cache.storage.on_damage(functools.partial(self._found_damaged, match.path, match.digest))

    def _found_damaged(self, path: Path, digest: str, why: str) -> None:
        """Keep all processes from opening the context at `path`, if it still has that digest. For any thread; raises
        nothing."""
        if not mark(path, digest, why):
            self._damaged[digest] = why

    # --- keep --------------------------------------------------------------------------------------------------

    def save(self, cache: Any, tokenizer: Any = None, *, instead: bool = False) -> Path:
        """Save the context of `cache`; returns the directory. If an equal context exists, it only counts as used,
        unless it is known to be damaged, or `open` would not accept it: then it is replaced.

        `instead`: remove the contexts of the same sequences that end earlier. This one serves their requests too,
        unless it cannot be cropped: then they stay.

        Least recently used contexts are evicted first, until the new one fits (a damaged one with a warning). When this
        returns, the contexts take at most `max_bytes`, even if others save meanwhile. `tokenizer` is passed to
        `OffloadCache.save`.

        Raises `BudgetError` for a context that is larger than `max_bytes`, or than what `max_bytes_a_day` leaves; it is
        not kept. Nothing is evicted then, unless only its manifest made it too large. Raises `EncryptionKeyError`
        unless the cache's key is the library's; `ValueError` for content that token ids do not identify (embeddings,
        images that no digest is known of); and the errors of `OffloadCache.save`.
        """
        if cache.storage.key != self._key:
            raise EncryptionKeyError(
                "the cache's encryption_key and the library's key must be the same one, or both be None: give both"
            )
        cache.freeze()
        text = Text(encode(cache.input_ids, cache.attention_mask), cache.contents.tokens.media)
        if (text.ids == -1).any() or unidentified(text, cache.model).any():
            raise ValueError(
                "the cache contains embeddings, or tokens that stand for images or sound: token ids cannot find it; "
                "save it to a separate folder with cache.save"
            )
        form = form_fields(cache.config_class, saved_fields(cache.config))
        model = model_digest(cache.identity or full_fingerprint(cache.given_model))
        name = prefix_name(type(cache).__name__, model, form, text, self._key)
        path = self.folder / name
        existing = look(path)
        if existing is None or not self._can_be_opened(existing, form) or not (touch(path) or look(path)):
            self._check_size(bytes_of(cache))
            kept = {inode for entry in listing(self.folder, sizes_only=True) for inode in entry.files}
            new = bytes_of(cache, kept)
            self._check_day(new)
            self._make_room(self.max_bytes - min(self.max_bytes, new))
            try:
                self._damaged.pop(cache.save(path, overwrite=existing is not None, tokenizer=tokenizer), None)
            except FileExistsError:
                if look(path) is None:
                    raise
            self._day.add(new)
        touch(path)
        if instead and may_crop(inner_model(cache.model)):
            self._remove_beginnings(path, type(cache), form, text)
        saved = look(path)
        if saved is not None and saved.bytes > self.max_bytes:
            remove(path)
            self._check_size(saved.bytes)
        self._make_room(self.max_bytes)
        return path

    def _remove_beginnings(self, path: Path, cls: type[Any], form: dict[str, Any], text: Text) -> None:
        """Remove the contexts of this `form` whose tokens are a proper beginning of `text`, those of the context at
        `path`."""
        listed = self._index()
        model = next((known.model for known in listed if known.path == path), None)
        for known in listed:
            ours = (known.cache, known.model, known.batch) == (cls.__name__, model, len(text.ids))
            if not ours or known.tokens >= text.ids.shape[1] or known.key_check != self._key_check:
                continue
            if form_fields(cls.config_class, known.config) != form:
                continue
            beginning = self._index.text(known, form)
            if beginning is not None and common_prefix(beginning, text) == known.tokens:
                with contextlib.suppress(ContextError):  # removed since
                    remove(known.path)

    def _can_be_opened(self, entry: Entry, form: dict[str, Any]) -> bool:
        """Whether `open` would accept a context, without reading its records."""
        manifest = entry.manifest
        if entry.damage is not None or manifest is None or manifest.key_check != self._key_check:
            return False
        known = Known.of(entry.path, manifest)
        return known.digest not in self._damaged and self._index.text(known, form) is not None

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise BudgetError(
                f"max_bytes is {self.max_bytes:,} and this context alone takes {size:,}: raise max_bytes, or save the "
                "cache to a separate folder with cache.save"
            )

    def _check_day(self, size: int) -> None:
        most, before = self.max_bytes_a_day, self._day.bytes()
        if most is not None and before + size > most:
            raise BudgetError(
                f"max_bytes_a_day is {most:,}, {before:,} were written today, and this context adds {size:,}: raise "
                "max_bytes_a_day, or wait for tomorrow (UTC)"
            )

    def _make_room(self, most_bytes: int) -> list[Entry]:
        eviction = evict(self.folder, most_bytes, lambda entry: NAME.fullmatch(entry.name) is not None)
        for entry, _ in eviction.removed:
            if entry.damage is not None:
                message = f"evicted the damaged context {str(entry.path)!r}: {entry.damage}"
                warnings.warn(message, UserWarning, stacklevel=3)
        if eviction.held_bytes > most_bytes:
            entry, error = eviction.refused[0]
            raise BudgetError(
                f"max_bytes is {self.max_bytes:,} and room cannot be made: {str(entry.path)!r} cannot be removed "
                f"({error}); remove it, or raise max_bytes"
            ) from error
        return [entry for entry, _ in eviction.removed]

    def bytes_written_today(self) -> int:
        """Bytes that `save` added to the folder since midnight (UTC), by all processes."""
        return self._day.bytes()

    # --- look after --------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """The folder's contexts, the most recently used first, including damaged ones, and those with another key,
        which have a `note`."""
        return [self._noted(entry) for entry in listing(self.folder) if NAME.fullmatch(entry.name)]

    def _noted(self, entry: Entry) -> Entry:
        """`entry` with the damage and the note that this library knows."""
        if (manifest := entry.manifest) is None:
            return entry
        note, damage = None, entry.damage or self._damaged.get(manifest.digest)
        if manifest.key_check != self._key_check:
            kind = "not encrypted" if manifest.key_check is None else "encrypted with another key"
            kind = "encrypted, and the library has no key" if self._key_check is None else kind
            note = f"it is {kind}: this library never opens it; move it away, or remove it"
        return dataclasses.replace(entry, damage=damage, note=note)

    def remove(self, name: str, wipe: bool = False) -> int:
        """Remove a context; returns the bytes of disk that this frees. `wipe` first overwrites what no other context
        shares. Raises `ContextError` if there is none of that name."""
        if not NAME.fullmatch(name):
            raise ContextError(f"name must be one of a context in the library, 32 hexadecimal digits, got {name!r}")
        return remove(self.folder / name, wipe=wipe)

    def evict(self, max_bytes: int | str | None = None) -> list[Entry]:
        """Remove least recently used contexts until the others take at most `max_bytes` (None: the library's); returns
        the removed ones. Warns if one was damaged. Raises `BudgetError` if one cannot be removed."""
        return self._make_room(self.max_bytes if max_bytes is None else parse_size(max_bytes, "max_bytes"))


def _fits(form: dict[str, Any], fields: dict[str, Any]) -> bool:
    """Whether a context with these `form_fields` can be opened with `fields`."""
    if form.get("exact") and not fields.get("exact", True):
        return False
    return all(form[name] == fields[name] for name in form if name != "exact" and name in fields)
