"""A folder that keeps contexts: found again by the tokens that they begin with; the least recently used go."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import parse_size
from ..errors import BudgetError, ContextError, ContextMismatchError, EncryptionKeyError, StoreError
from ..model.fingerprint import full_fingerprint
from ..model.inner_model import inner_model
from ..model.rotary import reason_against_pieces
from ..registry import class_named
from ..stores.encryption import KeySource, key_check, load_key
from .configuration import form_fields, saved_fields
from .folder import remove
from .listing import Entry, evict, listing, look, mark, touch
from .open import closed_on_error
from .prefixes import NAME, PrefixIndex, is_damage, known_of, model_digest, pass_over, prefix_name
from .prompts import common_prefix, encode, placeholders, prompt_of
from .protocol import ContextCache
from .reader import check_digest
from .sizes import bytes_of


@dataclass(frozen=True)
class Match:
    """A context that begins as a prompt does: `matched` of the `tokens` that it holds, a sequence, padding included.
    `digest` tells it from any other, as `save` of a cache returns it."""

    path: Path
    tokens: int
    matched: int
    digest: str


class ContextLibrary:
    """The contexts in `folder`, which is made (0700) if need be. Holds no lock and no descriptor.

    Each lies in a directory whose name is a digest of class, model, format and token ids. Several processes may use one
    folder at the same time: what vanishes is passed over, and what is open stays readable by who has it open. Contexts
    under other names, which `save` of a cache made, are neither counted nor found nor removed.

    Args:
        max_bytes: the most that the contexts may take on the disk after a `save`; what several share counts once.
        key: of an encrypted library: a file or a callback, as `encryption_key`. Contexts under another key, or under
            none, are passed over; in a library without a key those that are encrypted. `entries` has a note of them.

    A damaged context is never opened: it is passed over with a warning that names it. Whatever read finds the damage,
    also one of a later step, marks the context for all processes, so that the next request goes on without it and the
    next `save` of its text replaces it. Raises `ConfigError`, `EncryptionKeyError`; `ContextError` when `folder` is no
    directory and cannot be made one.
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
        """The context of `model` that shares the longest prefix with the prompt; of several, that used last.

        Args:
            input_ids: (T,) or (B, T). A context matches that has as many sequences, over the tokens that all of them
                share; T - 1 at most, since `generate` needs a new one.
            cls: class of the caches whose contexts are looked at; None: those of every registered class.
            attention_mask: of the same shape, 0 at padding; None: there is none.
            least: tokens that have to match, those that are padding in every sequence not counted.
            expect: digests, as `save` of a cache and `Entry.digest` have them: other contexts are passed over, such as
                old ones that somebody put back. None: any.

        A model with sliding-window or linear layers cannot take tokens back: its contexts match in full or not at all.
        Tokens that stand for images or sound match nothing, since ids do not tell what they stand for. Of a model whose
        keys depend on the length of a forward, prompts and contexts match that are short enough not to.
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
        """What `find` finds as a cache that holds the tokens that match, and how many these are; None without a match.

        The cache is of the class that saved it, or of `cls` (whose name is the same).
        `model.generate(input_ids, past_key_values=cache)` goes on from there. The context counts as used now. `fields`
        are those of `OffloadCache.open`, `memory` and `path` too; contexts whose stored format has other values are not
        considered. Raises what `OffloadCache.open` raises for `fields`; a damaged context gives way to the next best. A
        step that reads damage later raises `CorruptRecordError`: call this again, and it gives the next best.
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
            form, croppable = form_fields(made_by.config_class, known.config), made_by.may_crop(inner)
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
        """The context at `path`, if it still is the one with that digest, is not opened any more, by anybody. Any
        thread; raises nothing."""
        if not mark(path, digest, why):
            self._damaged[digest] = why

    # --- keep --------------------------------------------------------------------------------------------------

    def save(self, cache: ContextCache, tokenizer: Any = None) -> Path:
        """Keep what `cache` holds; returns the directory. An equal context that is there already only counts as used,
        unless it is known to be damaged, or `open` would not take it: then it is replaced.

        Least recently used contexts are evicted first, until the new one fits (a damaged one with a warning). When this
        returns, the contexts take `max_bytes` at most, whoever else saves meanwhile. `tokenizer` goes to
        `OffloadCache.save`.

        Raises `BudgetError` with the numbers for a context above `max_bytes` by itself: nothing is kept of it, and
        nothing evicted, unless its records and states alone would have fitted; `EncryptionKeyError` unless the cache's
        key is the library's; `ValueError` for a cache that holds what token ids do not tell (embeddings, images); and
        as `OffloadCache.save`.
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
        """The contexts there are, those used last first; damaged ones too, and with a `note` those of another key."""
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
