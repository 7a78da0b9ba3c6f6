"""The answers to several questions about one document, which is prefilled once, or not at all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import at_least
from ..console.answer import check_length, document_part, generate_answer, question_part
from ..core.cache import OffloadCache
from ..core.filling import prefill
from ..errors import ContextError, CorruptRecordError, StoreError, StoreFullError
from ..model.look_ahead import reason_against_pieces
from .recipe import Recipe
from .shared_contexts import Found, SharedContexts


class DocumentError(ValueError):
    """A document has no text, or no question is asked about it. The message quotes neither."""


_TEXT = "a text"


def _kind(value: Any) -> str:
    """What a value is, without what is in it."""
    if not isinstance(value, str):
        return type(value).__name__
    if not value.strip():
        return "an empty text"
    half = next((place for place, letter in enumerate(value) if "\ud800" <= letter <= "\udfff"), None)
    return _TEXT if half is None else f"half a surrogate pair at character {half:,}, which no text has"


@dataclass(frozen=True)
class DocumentAnswers:
    """Of one document. Seconds, bytes."""

    answers: list[str]
    context: str
    """Where the document's keys and values came from: "prefilled", "opened" (saved before) or "streamed"."""
    notes: list[str]
    """Why a shared context was not used, or not left for others."""
    document_tokens: int
    new_tokens: int
    seconds: float
    """All that this document took."""
    peak_memory_bytes: int
    """The most that its caches held together. Of several questions those before the last are answered by forks, beside
    what holds the document."""
    full_kv_bytes: int
    """What `DynamicCache` would have held at the end of the longest of them."""
    disk_bytes: int


class Answering:
    """Answers documents in the thread that runs the model. Keeps nothing between two documents.

    Args:
        contexts: where contexts are shared; None: they are not shared.
        max_new_tokens: limit per answer, which is greedy.
        prefill_chunk: tokens per model call; None: 1,024, or all tokens if the model's keys depend on a call's length.
    """

    def __init__(
        self, tokenizer: Any, recipe: Recipe, contexts: SharedContexts | None = None, max_new_tokens: int = 64,
        prefill_chunk: int | None = None,
    ) -> None:  # fmt: skip
        at_least(max_new_tokens=max_new_tokens)
        if prefill_chunk is not None:
            at_least(prefill_chunk=prefill_chunk)
        self._tokenizer, self._recipe, self._contexts = tokenizer, recipe, contexts
        self._new, self._chunk = max_new_tokens, prefill_chunk

    def __call__(self, document: Any, questions: Any) -> DocumentAnswers:
        """Raises `DocumentError`, `PromptTooLongError`, and what a cache raises: `BudgetError`, `StoreError`."""
        begun = time.perf_counter()
        ids, asked = self._prompts(document, questions)
        longest = ids.shape[1] + max(one.shape[1] for one in asked)
        check_length(self._recipe.model, longest, self._new)
        most = longest + self._new
        if (alone := reason_against_pieces(self._recipe.model, ids.shape[1], longest)) is not None:
            found = Found(notes=[f"the document is prefilled with each question: {alone}"])
            return self._answer(ids, asked, lambda left: self._recipe.make(most), found, begun)
        found = Found() if self._contexts is None else self._contexts.take(ids, most)
        if found.cache is not None:
            try:
                with found.cache as cache:
                    if found.damaged:
                        self._keep(ids, cache, found)
                    return self._answer_by_forks(ids, asked, cache, found, begun)
            except StoreFullError:  # for what is added, which a prefill would add to
                raise
            except (ContextError, StoreError) as error:  # of what only a step reads
                damaged = isinstance(error, (ContextError, CorruptRecordError))
                notes = [*found.notes, f"the shared context is not used: {error}"]
                found = Found(damaged=damaged, closed=found.closed, notes=notes)
        with self._recipe.make(most) as cache:
            prefill(self._recipe.model, ids, cache, self._chunk)
            self._keep(ids, cache, found)
            return self._answer_by_forks(ids, asked, cache, found, begun)

    def _prompts(self, document: Any, questions: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Ids (1, T) of the document, and (1, t) of each question behind it."""
        if (kind := _kind(document)) != _TEXT:
            raise DocumentError(f"the document must be a text, got {kind}")
        one = isinstance(questions, str | bytes) or not isinstance(questions, Iterable)
        several = [questions] if one else list(questions)
        kinds = [_kind(one) for one in several]
        if not kinds or any(kind != _TEXT for kind in kinds):
            got = next((kind for kind in kinds if kind != _TEXT), "an empty list")
            raise DocumentError(f"questions must be a text or a list of texts, one at least, got {got}")
        device = self._recipe.model.device
        ids = document_part(self._tokenizer, document).to(device)
        return ids, [question_part(self._tokenizer, one).to(device) for one in several]

    def _keep(self, ids: torch.Tensor, cache: OffloadCache, found: Found) -> None:
        if found.closed:
            found.notes.append("not shared: the store does not say what it has, and nothing is written there")
        elif self._contexts is not None:
            found.notes += self._contexts.keep(ids, cache, replace=found.damaged)

    def _answer_by_forks(
        self, ids: torch.Tensor, asked: Sequence[torch.Tensor], base: OffloadCache, found: Found, begun: float
    ) -> DocumentAnswers:
        def make(left: int) -> contextlib.AbstractContextManager[OffloadCache]:
            return base.fork() if left else contextlib.nullcontext(base)

        return self._answer(ids, asked, make, found, begun, base)

    def _answer(
        self, ids: torch.Tensor, asked: Sequence[torch.Tensor],
        make: Callable[[int], contextlib.AbstractContextManager[OffloadCache]], found: Found, begun: float,
        base: OffloadCache | None = None,
    ) -> DocumentAnswers:  # fmt: skip
        """`make`: gives the cache of a question behind which so many are left; beside it lies `base`."""
        model, texts, new, peak, full, disk = self._recipe.model, [], 0, 0, 0, 0
        for left, question in zip(range(len(asked) - 1, -1, -1), asked, strict=True):
            with make(left) as own:
                beside = base.report().memory_bytes if left and base is not None else 0
                prompt = torch.cat([ids, question], 1)
                answer = generate_answer(model, self._tokenizer, prompt, own, self._new, self._chunk)
                report = own.report()
            texts.append(answer.text)
            new += answer.new_tokens
            peak = max(peak, beside + report.peak_memory_bytes)
            full, disk = max(full, report.full_kv_bytes), max(disk, report.disk_bytes)
        return DocumentAnswers(
            texts, found.origin, found.notes, ids.shape[1], new, time.perf_counter() - begun, peak, full, disk
        )
