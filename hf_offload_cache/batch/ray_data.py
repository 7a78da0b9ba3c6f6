"""Questions about many documents, on several workers: Ray Data is the engine, this is what its workers call.

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
from ..console.named_cache import check_fields, offloading_class
from ..errors import BudgetError, ConfigError, PromptError, StoreError
from ..interop.offload import FLOOR

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset

    from .documents import DocumentAnswers

COLUMNS = (
    "answers", "context", "context_note", "document_tokens", "new_tokens", "seconds", "peak_memory_bytes",
    "full_kv_bytes", "disk_bytes", "error",
)  # fmt: skip
"""What a row has beside what it had."""
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
            the contexts are encrypted (field `encryption_key`). Nothing there is ever removed.
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
    `answers` (a list), `context` ("prefilled", "opened", "streamed"), `context_note` (why a shared context was not
    used, or this one not shared), `document_tokens`, `new_tokens`, `seconds`, `peak_memory_bytes`, `full_kv_bytes`,
    `disk_bytes`, `error`. In a row with an error all others are null. A row that is computed again because its worker
    died has the same answers, unless meanwhile a context was shared that was fitted to another question.

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
        contexts: str | None = None,
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
        from .shared_contexts import shared_contexts

        _pyarrow()
        _check(model, cache, memory, path, errors, floor, fields)
        self._columns, self._raises = (document, questions), errors == "raise"
        loaded, tokenizer = model() if callable(model) else load(model, dtype, device)
        recipe = Recipe(loaded, offloading_class(cache), memory, path, fields, floor, strict)
        recipe.check()
        shared = None if contexts is None else shared_contexts(contexts, recipe, level, options)
        self._answering = Answering(tokenizer, recipe, shared, max_new_tokens, prefill_chunk)

    def __call__(self, batch: pyarrow.Table | Mapping[str, Any]) -> pyarrow.Table:
        """The rows of a batch, one after the other. Raises `ConfigError` for columns that are missing, or there
        already."""
        arrow = _pyarrow()
        if not isinstance(batch, arrow.Table):
            batch = arrow.table({name: _column(arrow, name, list(column)) for name, column in batch.items()})
        for name in self._columns:
            if name not in batch.column_names:
                raise ConfigError(f"there is no column {name!r} among {', '.join(batch.column_names)}: name it")
        if taken := [name for name in COLUMNS if name in batch.column_names]:
            raise ConfigError(f"there is a column {taken[0]!r} already: rename it, the answers have one of that name")
        asked = zip(*(_values(batch.column(name)) for name in self._columns), strict=True)
        rows = [self._row(document, questions) for document, questions in asked]
        for name, kind in _types(arrow).items():
            batch = batch.append_column(name, arrow.array([row.get(name) for row in rows], kind))
        return batch

    def _row(self, document: Any, questions: Any) -> dict[str, Any]:
        import torch

        from ..console.arguments import PromptTooLongError
        from .documents import DocumentError

        own = (DocumentError, PromptTooLongError, BudgetError, PromptError, StoreError, torch.OutOfMemoryError)
        try:
            return _as_row(self._answering(document, questions))
        except own as error:
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
    """`dataset` with answers, by `AnswerDocuments` on `concurrency` workers; nothing runs before it is consumed.

    A worker is given one document at a time. One that dies, by a signal or for want of memory, is started again by Ray,
    and its document is given out again; all else goes on.

    Args:
        model: as of `AnswerDocuments`.
        cache: likewise.
        memory: likewise.
        concurrency: workers, or the fewest and the most of them.
        retries: how often a document is given out again whose worker died, before the job fails; -1: without end. What
            waits for such a worker counts, too.
        ray_options: of `map_batches`: `num_gpus=1`, say. Workers claim no CPU of Ray, so that those that read documents
            have one on the smallest machine; with `num_cpus=4` they do, and compute with as many threads.
        options: all others of `AnswerDocuments`.

    Raises `ConfigError` for a cache or a field that there is not, or a model that is loaded, and `ImportError` where
    Ray is missing.
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
    one_each = dataset.repartition(target_num_rows_per_block=1)
    given = {"model": model, "cache": cache, "memory": memory, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `max_task_retries` goes with 2.64, which is not supported
        return one_each.map_batches(
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
            f"model must be a hub name, a folder, or a function that returns model and tokenizer, got "
            f"{type(model).__name__}: each worker loads its own; AnswerDocuments alone takes lambda: (model, tokenizer)"
        )
    offloading_class(cache)
    check_fields(cache, fields, path, memory)
    parse_size(floor, "floor")
    if errors not in ("row", "raise"):
        raise ConfigError(f"errors must be 'row' or 'raise', got {errors!r}")


def _as_row(found: DocumentAnswers) -> dict[str, Any]:
    return {**vars(found), "context_note": "; ".join(found.notes) or None}


def _column(arrow: Any, name: str, values: list[Any]) -> Any:
    try:
        return arrow.array(values)
    except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:  # whose message has a value
        kinds = sorted({type(one).__name__ for one in values})
        raise ConfigError(
            f"column {name!r} has values of {', '.join(kinds)}, which are no column of pyarrow's "
            f"({type(error).__name__}): give values of one type"
        ) from None


def _values(column: Any) -> list[Any]:
    """Those of a column of pyarrow's; bytes for a text that is none, by an error that would carry all of it."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(one) for one in column]
    return values


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return b""


def _types(arrow: Any) -> dict[str, Any]:
    """Of each of `COLUMNS`: said, since a block of nulls alone would have none."""
    kinds = dict.fromkeys(COLUMNS, arrow.int64())
    kinds |= dict.fromkeys(("context", "context_note", "error"), arrow.string())
    return {**kinds, "answers": arrow.list_(arrow.string()), "seconds": arrow.float64()}


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f"AnswerDocuments needs the package pyarrow: {_INSTALL}") from error
    return pyarrow
