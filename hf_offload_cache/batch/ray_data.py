"""Questions about many documents, on several workers of Ray Data.

    import ray
    from hf_offload_cache import answer_documents

    documents = ray.data.read_parquet("documents")  # columns "document" and "questions"
    answer_documents(documents, memory="1/13", contexts="s3://bucket/contexts", concurrency=8).write_parquet("answers")
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import parse_size
from ..console.named_cache import check_fields, check_library_key, offloading_class
from ..contexts.library import ContextLibrary
from ..errors import BudgetError, ConfigError, PromptError, StoreError
from ..interop.offload import FLOOR

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset


COLUMNS = (
    "answers", "context", "context_note", "document_tokens", "new_tokens", "seconds", "peak_memory_bytes",
    "full_kv_bytes", "disk_bytes", "error",
)  # fmt: skip
"""Columns that answering adds to a row."""
_INSTALL = "pip install 'hf-offload-cache[ray]'"


class AnswerDocuments:
    """A class for `Dataset.map_batches`: each row is a document with one or more questions, and gets its answers.

    A worker loads the model once. It prefills each document once, into the document's own cache, and answers each
    question greedily with a fork of that cache. With `contexts` the prefilled document is stored for other jobs, under
    a name which is a digest of model, fields and tokens. A later question about the same document, in this job or
    another, opens or streams it without a prefill.

    Args:
        model: a Hub name or a folder; None: the default model from its package; or a function that returns model and
            tokenizer, which a worker calls. A loaded model raises `ConfigError`, because it would be copied to every
            worker.
        cache: a registered name ("disk-swap", "abstract-tree", "cluster", "spec"), or "module:Class".
        memory: the memory budget of a cache: bytes, "300MiB", or a share of what `DynamicCache` would take for the
            document, its longest question and the answer ("1/13"); None: as much as `fields` need. If a document has
            several questions, all but the last are answered by forks next to the document's cache: together up to twice
            the budget.
        floor: the budget of a document whose share is too small for any cache: bytes or a size, as in `offload`.
        strict: such a document gets an error instead.
        document: the column with the text.
        questions: the column with the questions, a text or a list of texts.
        contexts: where contexts are shared: a folder, or any fsspec URL. Contexts are saved in a folder ("file:" or a
            path, which may be mounted), and published elsewhere. Anyone who can write there decides the answers, unless
            the contexts are encrypted (field `encryption_key`). Nothing there is ever removed. A `ContextLibrary`, with
            its limits and key: a document starts from the longest beginning that is stored there, of any document or
            request (`offload(library=...)`), and leaves its own.
        options: options of the file system of `contexts`.
        level: how much of streamed keys and values is kept, as in `publish_context`.
        max_new_tokens: limit per answer.
        prefill_chunk: tokens per model call; None: 1,024, or all tokens if the model's keys depend on a call's length.
        path: folder on a worker's disk for its caches' files; None: its temporary folder.
        errors: "row": an error that concerns only one document (no text, too long for the model or its budget, no room
            for it on the disk or a GPU, a disk that fails while it is answered) goes into its row; "raise": it ends the
            job.
        dtype: the model's type; "auto": as it is stored.
        device: the model's device; None: CUDA if available.
        fields: fields of the cache's configuration.

    Call it with a pyarrow table, or with columns by name. It returns a table with these columns in addition to its own:
    `answers` (a list), `context` ("prefilled", "opened", "continued", "streamed"), `context_note` (why a shared context
    was not used, or this one not shared), `document_tokens`, `new_tokens`, `seconds`, `peak_memory_bytes`,
    `full_kv_bytes`, `disk_bytes`, `error`. In a row with an error all others are null. A row that is computed again
    because its worker died has the same answers, unless meanwhile a context was shared that was fitted to another
    question.

    Raises `ConfigError`; `ImportError` if pyarrow is missing; the errors of loading the model and of making a cache,
    such as `StoreError` for a `path` that cannot be written to.
    """

    def __init__(
        self,
        model: str | Callable[[], tuple[Any, Any]] | None = None,
        cache: str = "disk-swap",
        *,
        memory: int | str | None = None,
        floor: int | str = FLOOR,
        strict: bool = False,
        document: str = "document",
        questions: str = "questions",
        contexts: str | ContextLibrary | None = None,
        options: dict[str, Any] | None = None,
        level: str = "lossless",
        max_new_tokens: int = 64,
        prefill_chunk: int | None = None,
        path: str | Path | None = None,
        errors: str = "row",
        dtype: str = "auto",
        device: str | None = None,
        **fields: Any,
    ) -> None:
        from ..console.named_cache import load
        from .documents import Answering
        from .recipe import Recipe
        from .shared_contexts import LibraryContexts, SharedContexts, shared_contexts

        _pyarrow()
        _check(model, cache, memory, path, errors, floor, fields)
        self._columns, self._raises = (document, questions), errors == "raise"
        loaded, tokenizer = model() if callable(model) else load(model, dtype, device)
        if isinstance(contexts, ContextLibrary):
            check_library_key(contexts, fields)
            fields = {**fields, **contexts.key_fields}
            path = contexts.folder if path is None else path  # where records can be linked into it
        recipe = Recipe(loaded, offloading_class(cache), memory, path, fields, floor, strict)
        recipe.check()
        shared: SharedContexts | None = None
        if contexts is not None:
            shared = (
                LibraryContexts(contexts, recipe) if isinstance(contexts, ContextLibrary)
                else shared_contexts(contexts, recipe, level, options)
            )  # fmt: skip
        self._answering = Answering(tokenizer, recipe, shared, max_new_tokens, prefill_chunk)

    def __call__(self, batch: pyarrow.Table | Mapping[str, Any]) -> pyarrow.Table:
        """Answer the rows of a batch, one after the other. Raises `ConfigError` for missing columns, and for columns
        that answers would replace."""
        arrow = _pyarrow()
        if not isinstance(batch, arrow.Table):
            batch = arrow.table({name: _column(arrow, name, list(column)) for name, column in batch.items()})
        for name in self._columns:
            if name not in batch.column_names:
                raise ConfigError(f"there is no column {name!r} among {', '.join(batch.column_names)}: name it")
        if taken := [name for name in COLUMNS if name in batch.column_names]:
            raise ConfigError(f"there is a column {taken[0]!r} already, as in the answers: rename it")
        columns = (_values(batch.column(name)) for name in self._columns)
        rows = [self._row(document, questions) for document, questions in zip(*columns, strict=True)]
        for name, kind in _types(arrow).items():
            batch = batch.append_column(name, arrow.array([row.get(name) for row in rows], kind))
        return batch

    def _row(self, document: Any, questions: Any) -> dict[str, Any]:
        import torch

        from ..console.arguments import PromptTooLongError
        from .documents import DocumentError

        of_a_row = (DocumentError, PromptTooLongError, BudgetError, PromptError, StoreError, torch.OutOfMemoryError)
        try:
            result = self._answering(document, questions)
            return {**vars(result), "context_note": "; ".join(result.notes) or None}
        except of_a_row as error:
            if self._raises:
                raise
            return {"error": f"{type(error).__name__}: {error}"}


def answer_documents(
    dataset: Dataset,
    model: str | Callable[[], tuple[Any, Any]] | None = None,
    cache: str = "disk-swap",
    *,
    memory: int | str | None = None,
    concurrency: int | tuple[int, int] = 1,
    retries: int = 3,
    ray_options: dict[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """`dataset` with answers from `AnswerDocuments` on `concurrency` workers. Nothing runs before it is consumed.

    A worker gets one document at a time. If a worker is killed or runs out of memory, Ray restarts it, and another try
    at its document is made; all others continue.

    Args:
        model: as in `AnswerDocuments`.
        cache: as in `AnswerDocuments`.
        memory: as in `AnswerDocuments`.
        concurrency: number of workers, or the least and the most.
        retries: tries for a document whose worker died before the job fails; -1: unlimited. Documents that wait for
            such a worker count too.
        ray_options: for `map_batches`, such as `num_gpus=1`. By default workers claim no CPU of Ray, so that tasks that
            read documents get one even on the smallest machine. With `num_cpus=4` they claim four and compute with as
            many threads.
        options: all others of `AnswerDocuments`.

    Raises `ConfigError` for an unknown cache or field, or a loaded model, and `ImportError` if Ray is missing.
    """
    known = inspect.signature(AnswerDocuments).parameters
    fields = {name: value for name, value in options.items() if name not in known}
    _check(
        model, cache, memory, options.get("path"), options.get("errors", "row"), options.get("floor", FLOOR), fields
    )
    try:
        from ray.data import ActorPoolStrategy
    except ImportError as error:
        raise ImportError(f"answer_documents needs the package ray with its data part: {_INSTALL}") from error
    least, most = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    arguments: dict[str, Any] = {
        "compute": ActorPoolStrategy(min_size=least, max_size=most),
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": retries,
        **(ray_options or {}),
    }
    documents = dataset.repartition(target_num_rows_per_block=1)
    given = {"model": model, "cache": cache, "memory": memory, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray 2.64, not supported, drops `max_task_retries`
        return documents.map_batches(
            AnswerDocuments, batch_size=1, batch_format="pyarrow", fn_constructor_kwargs=given, **arguments
        )


def _check(
    model: Any, cache: str, memory: int | str | None, path: str | Path | None, errors: str, floor: int | str,
    fields: dict[str, Any],
) -> None:  # fmt: skip
    from torch.nn import Module

    named = model is None or isinstance(model, (str, Path))
    if isinstance(model, Module) or not (named or callable(model)):
        raise ConfigError(
            f"model must be a Hub name, a folder, or a function that returns model and tokenizer, got "
            f"{type(model).__name__}: each worker loads its own; without Ray, give AnswerDocuments a function"
        )
    offloading_class(cache)
    check_fields(cache, fields, path, memory)
    parse_size(floor, "floor")
    if errors not in ("row", "raise"):
        raise ConfigError(f"errors must be 'row' or 'raise', got {errors!r}")


def _column(arrow: Any, name: str, values: list[Any]) -> Any:
    try:
        return arrow.array(values)
    except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:  # its message quotes a value
        kinds = sorted({type(value).__name__ for value in values})
        raise ConfigError(
            f"column {name!r} has values of {', '.join(kinds)}, which pyarrow cannot store in a column "
            f"({type(error).__name__}): give values of one type"
        ) from None


def _values(column: Any) -> list[Any]:
    """A pyarrow column's values; b"" for invalid UTF-8, whose error would quote the text."""

    def value(scalar: Any) -> Any:
        try:
            return scalar.as_py()
        except UnicodeDecodeError:
            return b""

    return [value(scalar) for scalar in column]


def _types(arrow: Any) -> dict[str, Any]:
    """The type of each of `COLUMNS`: stated, because a block of nulls has none."""
    kinds = dict.fromkeys(COLUMNS, arrow.int64())
    kinds |= dict.fromkeys(("context", "context_note", "error"), arrow.string())
    return {**kinds, "answers": arrow.list_(arrow.string()), "seconds": arrow.float64()}


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f"AnswerDocuments needs the package pyarrow: {_INSTALL}") from error
    return pyarrow
