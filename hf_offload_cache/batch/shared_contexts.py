"""Contexts of documents that workers share through a folder or a URL.

In a local or mounted folder, contexts are saved and opened: nothing is computed or copied, a cache's fitted state is
complete, and any kind of layer is supported. Elsewhere contexts are published and streamed.

A context appears completely or not at all: a directory gets its name in one step, and a publication's manifest is
written last. If two workers store the same context, either one may stay.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..contexts.library import ContextLibrary
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
    """The search for a document's shared context.

    Attributes:
        cache: holds the document, or its beginning; the caller closes it. None: the document has to be prefilled.
        origin: "opened" or "streamed" if `cache` was, "continued" if it holds the document's beginning.
        damaged: the stored context cannot be trusted: replace it.
        closed: the store refuses or fails, so its content is unknown: write nothing.
        notes: messages for the user, a sentence each.
    """

    cache: OffloadCache | None = None
    origin: str = "prefilled"
    damaged: bool = False
    closed: bool = False
    notes: list[str] = field(default_factory=list)


class SharedContexts(Protocol):
    """A place of shared contexts. Faults of the place or of its contexts are not raised: the document is prefilled."""

    def take(self, ids: torch.Tensor, most: int) -> Found:
        """The context of ids (1, T), in a cache with room for `most` tokens."""

    def keep(self, ids: torch.Tensor, cache: OffloadCache, *, replace: bool) -> list[str]:
        """Share the content of `cache`, ids (1, T); with `replace`, instead of an existing context. Returns why it was
        not shared."""


def shared_contexts(
    place: str, recipe: Recipe, level: str = "lossless", options: dict[str, Any] | None = None
) -> SharedContexts:
    """Shared contexts at a path, whose folder is created, or at any fsspec URL. `options` go to its file system, and
    `level` applies to streamed keys and values. Raises `ConfigError`, and `StoreError` for a folder that cannot be
    created."""
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
    """Directories of `OffloadCache.save`."""

    folder: Path
    recipe: Recipe

    def take(self, ids: torch.Tensor, most: int) -> Found:
        place = self.folder / self.recipe.name(ids)
        try:
            os.lstat(place)
        except OSError as error:
            if of_error(error) is Answer.ABSENT:
                return Found()
            return Found(closed=True, notes=[f"the context in {place} could not be read: {error.strerror}"])
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
        except OSError as error:  # somebody removes it; the cache has its files open
            return Found(cache, "opened", notes=[f"the context in {place} could not be marked as used: {error}"])
        return Found(cache, "opened")

    def keep(self, ids: torch.Tensor, cache: OffloadCache, *, replace: bool) -> list[str]:
        place = self.folder / self.recipe.name(ids)
        try:
            cache.save(place, overwrite=replace)
        except FileExistsError as error:  # another worker's context, or something else
            return [f"not shared: {error}"] if replace else []
        except (StoreError, ContextError) as error:
            return [f"not shared: {error}"]
        return []


@dataclass(frozen=True)
class LibraryContexts:
    """Contexts of a library, which documents with a common beginning share. Those that it evicts are computed again."""

    library: ContextLibrary
    recipe: Recipe

    def take(self, ids: torch.Tensor, most: int) -> Found:
        more = torch.cat([ids, ids[:, -1:]], 1)  # a library leaves the last token to the model
        try:
            opened = self.recipe.open_beginning(self.library, more, most)
        except BudgetError as error:
            return Found(notes=[f"a stored context does not fit: {error}"])
        except (ContextError, StoreError) as error:
            return Found(notes=[f"the library could not be read: {error}"])
        if opened is None:
            return Found()
        cache, tokens = opened
        return Found(cache, "opened" if tokens == ids.shape[1] else "continued")

    def keep(self, ids: torch.Tensor, cache: OffloadCache, *, replace: bool) -> list[str]:
        try:
            self.library.save(cache, instead=True)
        except (OSError, ValueError) as error:  # a full disk, limits, placeholders
            return [f"not shared: {error}"]
        return []


@dataclass(frozen=True)
class PublishedContexts:
    """Publications of `publish_context`, each in its own folder below `url`."""

    url: str
    recipe: Recipe
    level: str
    options: dict[str, Any] | None

    def take(self, ids: torch.Tensor, most: int) -> Found:
        place = self._place(ids)
        name = without_secrets(place)
        with contextlib.ExitStack() as undo:
            cache = undo.enter_context(self.recipe.make(most))
            more = torch.cat([ids, ids[:, -1:]], 1)  # streaming leaves the last token to the model
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
                return Found(closed=True, notes=[f"the context could not be fetched: {error}"])
            report = cache.stream_report
            assert report is not None
            if cache.tokens < ids.shape[1]:
                return Found(damaged=True, notes=[_distrusted(name, "it holds another text")])
            undo.pop_all()
        if report.whole is not None:
            return Found(cache, "prefilled", notes=[f"not streamed: {report.whole}"])
        lost = [f"{report.lost} of {report.cells} cells could not be fetched and were computed"] if report.lost else []
        notes = [f"{name}: {note}" for note in (*lost, *report.trouble)]
        return Found(cache, "streamed", damaged=report.lost > 0, closed=report.unavailable > 0, notes=notes)

    def keep(self, ids: torch.Tensor, cache: OffloadCache, *, replace: bool) -> list[str]:
        try:
            publish_context(
                cache, self._place(ids), key=self._key, level=self.level, overwrite=replace, options=self.options
            )
        except FileExistsError:
            return []  # another worker was faster
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
