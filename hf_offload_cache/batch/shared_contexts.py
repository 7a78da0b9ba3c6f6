"""Where workers find contexts of documents that were prefilled before, and leave theirs: a folder, or a URL.

Where it is a folder of this machine, or one that is mounted, a context is saved there and opened: that takes no
computing, copies nothing, and a cache's fitted state is there to the last bit, whatever kinds of layers the model has.
Elsewhere it is published, and streamed.

A context is there whole or not at all: a directory gets its name in one step, and the manifest of what is published
comes last. Of two workers that leave the same one, both are right, and either's is there afterwards.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..contexts.listing import touch
from ..core.cache import OffloadCache
from ..errors import (
    BudgetError,
    ConfigError,
    ContextError,
    CorruptRecordError,
    EncryptionKeyError,
    ObjectError,
    StoreError,
    UnsupportedModelError,
)
from ..streaming.answers import Answer, of_error, without_secrets
from ..streaming.codec import check_level
from ..streaming.objects import made_folder
from ..streaming.places import file_system_of, is_local, is_web, join
from ..streaming.publish import publish_context
from ..streaming.stream_context import ForeignManifestError, stream_context
from .recipe import Recipe


@dataclass
class Found:
    """What there was of a document's context."""

    cache: OffloadCache | None = None
    """Holds the document, or what of it could be had, and is the caller's to close; None: prefill it."""
    origin: str = "prefilled"
    """"opened" or "streamed", where `cache` was."""
    damaged: bool = False
    """The stored context is not to be trusted: replace it."""
    closed: bool = False
    """The store refuses or fails, so that nobody knows what is there: leave it as it is."""
    notes: list[str] = field(default_factory=list)
    """What a user should know of it, a sentence each."""


class SharedContexts(Protocol):
    """Neither raises for what is wrong with the place or with what is there: a context is made anew, at worst."""

    def take(self, ids: torch.Tensor, most: int) -> Found:
        """The context of ids (1, T), in a cache that has room for `most` tokens."""

    def keep(self, ids: torch.Tensor, cache: OffloadCache, *, replace: bool) -> list[str]:
        """Leave what `cache` holds, which is ids (1, T), for others; with `replace`, instead of a context that
        is there. Returns why not."""


def shared_contexts(
    place: str, recipe: Recipe, level: str = "lossless", options: dict[str, Any] | None = None
) -> SharedContexts:
    """Of a path or any URL of fsspec's; `options` go to its file system, and `level` is what is kept of keys and values
    that are streamed. A folder is made. Raises `ConfigError`, `StoreError` where it cannot be used."""
    check_level(level)
    if is_web(place):
        return PublishedContexts(place, recipe, level, options)
    system, root = file_system_of(place, options)
    if not is_local(system):
        return PublishedContexts(place, recipe, level, options)
    try:
        if not Path(root).is_dir():
            made_folder(Path(root)).close()
    except OSError as error:
        raise StoreError(error.errno, f"contexts {place!r}: the folder cannot be made: {error.strerror}") from error
    return SavedContexts(Path(root), recipe)


@dataclass(frozen=True)
class SavedContexts:
    """Directories that `OffloadCache.save` made."""

    folder: Path
    recipe: Recipe

    def take(self, ids: torch.Tensor, most: int) -> Found:
        place = self.folder / self.recipe.name(ids)
        try:
            os.lstat(place)
        except OSError as error:
            if of_error(error) is Answer.ABSENT:
                return Found()
            return Found(closed=True, notes=[f"the context in {place} could not be looked at: {error.strerror}"])
        try:
            cache = self.recipe.open(place, most)
        except BudgetError as error:
            return Found(notes=[f"the context in {place} does not fit: {error}"])
        except (ContextError, CorruptRecordError, EncryptionKeyError, ConfigError) as error:
            return Found(damaged=True, notes=[_distrusted(place, error)])
        except StoreError as error:
            return Found(closed=True, notes=[f"the context in {place} could not be read: {error}"])
        held = cache.input_ids
        if held.shape != ids.shape or not bool((held.cpu() == ids.cpu()).all()):
            cache.close()
            return Found(damaged=True, notes=[_distrusted(place, "it holds another text")])
        try:
            touch(place)
        except OSError as error:  # it goes away: what the cache has open may be read all the same
            return Found(cache, "opened", notes=[f"the context in {place} is not noted as used: {error}"])
        return Found(cache, "opened")

    def keep(self, ids: torch.Tensor, cache: OffloadCache, *, replace: bool) -> list[str]:
        place = self.folder / self.recipe.name(ids)
        try:
            cache.save(place, overwrite=replace)
        except FileExistsError as error:  # another worker was there first; or what is there is no context
            return [f"not shared: {error}"] if replace else []
        except (StoreError, ContextError) as error:
            return [f"not shared: {error}"]
        return []


@dataclass(frozen=True)
class PublishedContexts:
    """What `publish_context` made, each in a folder of its own below `url`."""

    url: str
    recipe: Recipe
    level: str
    options: dict[str, Any] | None

    def take(self, ids: torch.Tensor, most: int) -> Found:
        place = self._place(ids)
        name = without_secrets(place)
        with contextlib.ExitStack() as undo:
            cache = undo.enter_context(self.recipe.make(most))
            more = torch.cat([ids, ids[:, -1:]], 1)  # a context is loaded up to the last token, which is the model's
            try:
                stream_context(place, self.recipe.model, more, cache, key=self._key, options=self.options)
            except ForeignManifestError as error:
                return Found(closed=True, notes=[_distrusted(name, error)])
            except (ContextError, CorruptRecordError, EncryptionKeyError) as error:
                return Found(damaged=True, notes=[_distrusted(name, error)])
            except ConfigError as error:
                return Found(notes=[f"not streamed: {error}"])
            except StoreError as error:
                if isinstance(error, ObjectError) and error.answer == Answer.ABSENT:
                    return Found()
                return Found(closed=True, notes=[f"the context could not be had: {error}"])
            report = cache.stream_report
            assert report is not None
            if cache.tokens < ids.shape[1]:
                return Found(damaged=True, notes=[_distrusted(name, "it holds another text")])
            undo.pop_all()
        if report.whole is not None:
            return Found(cache, "prefilled", notes=[f"not streamed: {report.whole}"])
        lost = f"{report.lost} of {report.cells} cells could not be had and were computed"
        notes = [f"{name}: {one}" for one in [*([lost] if report.lost else []), *report.trouble]]
        return Found(cache, "streamed", damaged=report.lost > 0, closed=report.unavailable > 0, notes=notes)

    def keep(self, ids: torch.Tensor, cache: OffloadCache, *, replace: bool) -> list[str]:
        try:
            publish_context(
                cache, self._place(ids), key=self._key, level=self.level, overwrite=replace, options=self.options
            )
        except FileExistsError:
            return []  # another worker was there first
        except (StoreError, ContextError, UnsupportedModelError, ConfigError) as error:
            return [f"not shared: {error}"]
        return []

    def _place(self, ids: torch.Tensor) -> str:
        return join(self.url, self.recipe.name(ids, self.level))

    @property
    def _key(self) -> Any:
        key = self.recipe.key
        return None if key is None else (lambda: key)


def _distrusted(place: Any, why: object) -> str:
    return f"the context in {place} is not used: {why}"
