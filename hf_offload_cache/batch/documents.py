"""Answers to several questions about one document, which is prefilled at most once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import at_least
from ..console.answer import check_length, document_part, generate_answer, question_part
from ..core.cache import OffloadCache
from ..core.filling import prefill
from ..errors import BudgetError, ContextError, CorruptRecordError, StoreError, StoreFullError
from ..model.look_ahead import reason_against_pieces
from .recipe import Recipe
from .shared_contexts import Found, SharedContexts


class DocumentError(ValueError):
    """A document has no text, or no question. The message quotes neither."""


_TEXT = "a text"


def _kind(value: Any) -> str:
    """Description of a value, without its content."""
    if not isinstance(value, str):
        return type(value).__name__
    if not value.strip():
        return "an empty text"
    half = next((place for place, letter in enumerate(value) if "\ud800" <= letter <= "\udfff"), None)
    return _TEXT if half is None else f"half a surrogate pair at character {half:,}, which no text has"


@dataclass(frozen=True)
class DocumentAnswers:
    """The answers about one document, and what they took.

    Attributes:
        context: source of the document's keys and values: "prefilled", "opened" (saved before), "continued" (the same,
            but only a beginning of it) or "streamed".
        notes: why a shared context was not used, or this one was not shared.
        peak_memory_bytes: of all its caches together: all questions but the last are answered by forks.
        full_kv_bytes: memory of `DynamicCache` at the end of the longest question's answer.
    """

    answers: list[str]
    context: str
    notes: list[str]
    document_tokens: int
    new_tokens: int
    seconds: float
    peak_memory_bytes: int
    full_kv_bytes: int
    disk_bytes: int


class Answering:
    """Answers questions about documents, in the thread that runs the model. Keeps no state between documents.

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
        """Raises `DocumentError`, `PromptTooLongError`, and a cache's errors: `BudgetError`, `StoreError`."""
        begun = time.perf_counter()
        ids, asked = self._prompts(document, questions)
        longest = ids.shape[1] + max(question.shape[1] for question in asked)
        check_length(self._recipe.model, longest, self._new)
        most = longest + self._new
        if (alone := reason_against_pieces(self._recipe.model, ids.shape[1], longest)) is not None:
            found = Found(notes=[f"the document is prefilled with each question: {alone}"])
            return self._answer(ids, asked, most, found, begun)
        found = Found() if self._contexts is None else self._contexts.take(ids, most)
        if found.cache is not None:
            try:
                with found.cache as cache:
                    if (held := cache.get_seq_length()) < ids.shape[1]:
                        prefill(self._recipe.model, ids[:, held:], cache, self._chunk)
                    if found.damaged or held < ids.shape[1]:
                        self._keep(ids, cache, found)
                    return self._answer(ids, asked, most, found, begun, cache)
            except StoreFullError:  # a prefill would need even more room
                raise
            except (BudgetError, ContextError, StoreError) as error:  # in records that only a step reads
                damaged = isinstance(error, (ContextError, CorruptRecordError))
                notes = [*found.notes, f"the shared context is not used: {error}"]
                found = Found(damaged=damaged, closed=found.closed, notes=notes)
        with self._recipe.make(most) as cache:
            prefill(self._recipe.model, ids, cache, self._chunk)
            self._keep(ids, cache, found)
            return self._answer(ids, asked, most, found, begun, cache)

    def _prompts(self, document: Any, questions: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Ids (1, T) of the document, and (1, t) of each question behind it."""
        if (kind := _kind(document)) != _TEXT:
            raise DocumentError(f"the document must be a text, got {kind}")
        single = isinstance(questions, str | bytes) or not isinstance(questions, Iterable)
        asked = [questions] if single else list(questions)
        kinds = [_kind(question) for question in asked]
        if not kinds or any(kind != _TEXT for kind in kinds):
            got = next((kind for kind in kinds if kind != _TEXT), "an empty list")
            raise DocumentError(f"questions must be a text, or a list of at least one text, got {got}")
        device = self._recipe.model.device
        ids = document_part(self._tokenizer, document).to(device)
        return ids, [question_part(self._tokenizer, question).to(device) for question in asked]

    def _keep(self, ids: torch.Tensor, cache: OffloadCache, found: Found) -> None:
        if found.closed:
            found.notes.append("not shared: it is unknown what the store contains, so nothing is written there")
        elif self._contexts is not None:
            found.notes += self._contexts.keep(ids, cache, replace=found.damaged)

    def _answer(
        self, ids: torch.Tensor, asked: Sequence[torch.Tensor], most: int, found: Found, begun: float,
        document: OffloadCache | None = None,
    ) -> DocumentAnswers:  # fmt: skip
        """Answer all questions: with forks of the document's cache and at last itself, or each with its own cache for
        `most` tokens."""
        model, texts, new, peak, full, disk = self._recipe.model, list[str](), 0, 0, 0, 0
        for left, question in zip(range(len(asked) - 1, -1, -1), asked, strict=True):
            opened: contextlib.AbstractContextManager[OffloadCache]
            if document is None:
                opened = self._recipe.make(most)
            else:
                opened = document.fork() if left else contextlib.nullcontext(document)
            with opened as cache:
                other = 0 if document is None or not left else document.report().memory_bytes
                prompt = torch.cat([ids, question], 1)
                answer = generate_answer(model, self._tokenizer, prompt, cache, self._new, self._chunk)
                report = cache.report()
            texts.append(answer.text)
            new += answer.new_tokens
            peak = max(peak, other + report.peak_memory_bytes)
            full, disk = max(full, report.full_kv_bytes), max(disk, report.disk_bytes)
        return DocumentAnswers(
            texts, found.origin, found.notes, ids.shape[1], new, time.perf_counter() - begun, peak, full, disk
        )
