"""The cache that transformers sees: a `Cache` whose full-attention layers keep their history in a store."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..config import OffloadConfig, at_least, parse_memory
from ..contexts.open import closed_on_error, open_context
from ..contexts.save import fork, save
from ..errors import UnsupportedModelError
from ..fetch.storage import Storage
from ..memory.fit import Search, fit_stream
from ..memory.machine import check_descriptors
from ..memory.plan import MemoryPlan, Planned
from ..model import attach
from ..model.attention_call import untraced
from ..model.geometry import Geometry, rows_of_ids
from ..model.media import Media
from ..model.peft_adapters import adapter_fields
from ..model.place import OwnModel, device_type, inner_model, no_place, unoffloaded
from ..model.plain_caches import crops_all
from ..report.report import CacheReport, StreamReport
from .budget import Goals, choose_store, configured, fit_goal, missed_goal, notes_of
from .contents import Contents
from .layer import OffloadLayer
from .layers import make_layers, planner
from .plan import plan_cache
from .read_only import refuse_copy, refuse_layers, refuse_pickle
from .reporting import report_of
from .shared import Shared, shut_down
from .step import check_model, check_planned, check_uses_cache, check_was_used, sparse_warning


class OffloadCache(Cache):
    """Base of the family. The constructor attaches the seams to `model`; `close`, the end of a `with`, or garbage
    collection removes them. For one thread at a time; several caches may share a model.

    Args:
        model: a decoder `PreTrainedModel`, also under PEFT or torch.compile. The cache keeps a weak reference.
        path: folder on the disk to use; None: the temporary folder. Its files are unnamed.
        config: an instance of `config_class`, the path of a JSON of its fields, or None.
        **fields: fields of the configuration by name.

    Raises `ConfigError`, `UnsupportedModelError`, `StoreError` (nothing is left behind), `TypeError`.
    """

    config_class: ClassVar[type[OffloadConfig]] = OffloadConfig
    layer_class: ClassVar[type[OffloadLayer]] = OffloadLayer
    given: frozenset[str] = frozenset()  # names of the fields that the user gave to `for_budget`
    identity: dict[str, str] | None = None  # the model's fingerprint to save with; None: the present one
    media: Media | None = None
    """See `Attachable.media`."""
    goals: ClassVar[Goals] = Goals()
    """The fields that `goal` of a budget stands for."""
    selects: ClassVar[bool] = False
    """Whether steps select, unless the configuration is exact."""

    def __init__(
        self, model: Any, path: str | Path | None = None, config: OffloadConfig | str | Path | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        inner = inner_model(model)
        if (why := no_place(model)) is not None:
            raise UnsupportedModelError(why)
        self.config: OffloadConfig
        self.config, where = configured(type(self), config, fields, inner)
        self.why = ""
        """Measurements of this cache and of the others, if `offload_cache` chose it."""
        self.stream_report: StreamReport | None = None
        """Report of the `stream_context` that filled this cache; None: nothing was streamed."""
        self.shared = Shared(self.config, Storage(self.config, path, device_type(inner), where))
        self.run_indexer = self.shared.run_indexer
        self.storage = self.shared.storage
        self.timeline = self.storage.timeline
        self.watches_blocks = True
        self.warnings: list[str] = []
        self._model = OwnModel(inner)
        self._rows_of_ids = rows_of_ids(inner)
        self._given = weakref.ref(model)  # only PEFT's wrapper, not the model in it, knows of soft prompts
        self.adapters: dict[str, str] | None = None
        """PEFT's adapters at the first stored token; None: the cache is empty."""
        self._final: CacheReport | None = None
        token = -1
        try:
            self.contents = Contents(self.config, self.shared, make_layers(inner, self.layer_class, self.shared))
            self.shared.take_back = weakref.WeakMethod(self.contents.take_back)
            self.has_linear_state = self.contents.has_linear_state
            super().__init__(layers=self.contents.layers)
            if self.storage.engine != "memory":
                check_descriptors(sum(layer.num_stores for layer in self.layers if isinstance(layer, OffloadLayer)))
            self.prepare(inner)
            self.watches_blocks = self.wants_blocks()
            token = attach.attach(inner, self)
            self.contents.conversation = attach.conversation(inner)
        finally:
            self._finalizer = weakref.finalize(self, shut_down, self.storage, weakref.ref(inner), token)
            if token == -1:
                self._finalizer()
        self.timeline.start()
        self._by_index = {layer.layer_idx: layer for layer in self.offloaded}
        self._say(unoffloaded(inner))

    # --- the model, and its layers -----------------------------------------------------------------------------

    @property
    def model(self) -> PreTrainedModel:
        """The model of this cache. Raises `RuntimeError` if it no longer exists."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this cache is gone: open what was saved with a live one")
        return model

    @property
    def given_model(self) -> Any:
        """The constructor's argument: the model, or PEFT's or torch.compile's wrapper while that exists."""
        model = self.model
        given = self._given()
        return model if given is None else given

    def prepare(self, model: PreTrainedModel) -> None:
        """Prepare a method's use of the model before the first step; runs before the seams are attached."""

    @property
    def layers(self) -> list[Any]:
        """The model's layers, offloaded or transformers' own. Changing list or attribute raises `ReadOnlyError`."""
        return self.contents.layers  # plain Python: a compiler traces it

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        if layers is not self.contents.layers:
            refuse_layers()

    @property
    def offloaded(self) -> list[OffloadLayer]:
        """The layers whose history lies in a store."""
        return self.contents.offloaded

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        """As in a `DynamicCache`: keys, values and sliding window of each layer, read back complete one by one."""
        layer: Any
        for layer in self.layers:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)

    __copy__ = refuse_copy
    __reduce__ = refuse_pickle

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` restores the complete cache's earlier state."""
        return super().is_croppable and all(crops_all(layer) for layer in self.contents.kept)

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Cache.update`; raises `CacheClosedError` on a closed cache, for any kind of layer, and `BudgetError`
        beyond the planned limits."""
        if torch.compiler.is_dynamo_compiling():
            return OffloadCache.update.outside(self, key_states, value_states, layer_idx, *args, **kwargs)
        layer, step = self._by_index.get(layer_idx), self.shared.step
        if step is None or (layer is not None and (layer.history.length if layer.is_filled else 0) != step.history):
            self.shared.check_open()  # another model has no seams, or none that announce a step to this cache
            check_model(self._model, self._model.stranger())
        if layer is None:
            self.shared.check_open()
            given = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            if key_states.shape[-2] > 1:  # one token replaces one in a window: a copy would free no more than that
                self.contents.settle_kept(self.layers[layer_idx])
            return given
        if self.config.max_context is not None or self.config.max_batch is not None:
            check_planned(self.config, key_states.shape[0], layer.length + key_states.shape[2] - layer.guessed)
        given = layer.update(key_states, value_states, *args, **kwargs)
        if self.shared.ends_after is not None and self.shared.ends_after(layer_idx):
            layer.end_forward()
        return given

    # --- the step, called by the seams -------------------------------------------------------------------------

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Before the model's forward: check that the step continues the stored tokens, and start the clock."""
        contents, own = self.contents, self._model
        self.shared.check_open()
        check_model(own, model)
        check_uses_cache(own, kwargs)
        contents.check_intact(attach.intact(own.ref() or model))  # the step may be that of a part of the model
        lengths = contents.lengths()
        if not (held := max(lengths, default=contents.tokens.length)):
            self.begin_context()
        step = contents.begin(kwargs, lengths, held, self._rows_of_ids)
        if step is not None:
            if self.watches_blocks is not (wanted := self.wants_blocks()):
                self.watches_blocks = wanted
                attach.watch_blocks(self.model, self)
            if self.timeline.on:
                kind = "decode" if step.selects else "prefill"
                self.timeline.describe_step(kind, sequences=step.sequences, tokens=step.tokens, history=step.history)
        return None

    def end_step(self, output: Any = None) -> Any:
        """After the model's forward: keep the ids, stop the clock."""
        contents, step, storage = self.contents, self.shared.step, self.storage
        contents.conversation.end()
        if self.shared.unseen is not None:
            self.shared.check_seam()
        if step is not None:
            check_was_used(self, step, contents.with_length, output)
        contents.end(step)
        seconds = None if step is None or step.started is None else time.perf_counter() - step.started
        storage.counters.end_step(seconds, storage.prefetcher.seconds_in_flight)
        if not self.config.exact and contents.tokens.length:
            self._say(sparse_warning(contents.offloaded, self.warnings, self._model))
        if step is None or step.tokens > 1:
            contents.settle_kept()
        if step is None or not step.selects or self.shared.books_changed or contents.kept:
            contents.account_live()
        if self.timeline.on:
            storage.show_counters()

    def wants_blocks(self) -> bool:
        """Whether the seams should report blocks in the coming step."""
        return self.has_linear_state or self.timeline.on

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        if self.shared.step is not None:
            self.shared.step.entered = True

    def enter_attention(self, layer_idx: int, module: torch.nn.Module, hidden: torch.Tensor, rotary: Any) -> None:
        """See `Attachable`."""

    def leave_attention(self, layer_idx: int, output: torch.Tensor) -> None:
        """See `Attachable`."""

    def leave_indexer(self, layer_idx: int, chosen: torch.Tensor) -> torch.Tensor | None:
        """See `Attachable`."""
        return self.shared.chose(chosen)

    def fail_step(self) -> None:
        """Undo at the next call what the forward has added; its guesses no longer count."""
        self.contents.fail()

    def conversing(self, *, begins: bool = False) -> AbstractContextManager[None]:
        """See `Attachable.conversing`."""
        self.shared.check_open()
        return self.contents.conversation.preparing(self.held(), begins=begins)

    @property
    def is_reading(self) -> bool:
        return self.contents.is_reading

    def reading(self, tokens: int) -> AbstractContextManager[None]:
        return self.contents.reading(tokens)

    def prepare_step(self, *, first: bool) -> None:
        """Announce a step of `generate`, which verifies no candidates. `first`: a prompt's, or a chunk's of one."""
        self.contents.announce(first=first)

    def check_prompt(self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> None:
        """Check ids (B, P) whose stored beginning `generate` is about to drop. Raises `PromptError`."""
        self.shared.check_open()
        self.contents.check_prompt(input_ids, inputs_embeds)

    def start_over(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> None:
        self.shared.check_open()
        self._say(self.contents.dropped(type(self.model).__name__, input_ids, inputs_embeds))
        self.forget()

    def warn(self, message: str, stacklevel: int = 2) -> None:
        """Issue a warning about this cache and add it to the report. `stacklevel`: as in `warnings.warn`, counted from
        the caller's line."""
        self.warnings.append(message)
        warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)

    def _say(self, message: str | None) -> None:
        """Warn, but only once."""
        if message is not None and message not in self.warnings:
            self.warn(message, stacklevel=3)

    # --- contents ----------------------------------------------------------------------------------------------

    @property
    def input_ids(self) -> torch.Tensor:
        """The stored ids, padding included: int64 (B, tokens) in host memory, a copy; -1 where the model was given
        embeddings. A prompt continues the cache if it begins with them."""
        return self.contents.tokens.ids

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 for a stored token and 0 for padding: int64 (B, tokens) in host memory, a copy."""
        return self.contents.tokens.visible.long()

    @property
    def tokens(self) -> int:
        """Number of stored tokens a sequence, padding included."""
        return max((layer.length for layer in self.offloaded), default=self.contents.tokens.length)

    def held(self) -> int:
        """Number of stored tokens a sequence, for any kinds of layers."""
        return self.contents.held()

    @property
    def sequences(self) -> int:
        """Number of stored sequences, beams included."""
        return max((layer.batch for layer in self.offloaded), default=self.contents.tokens.batch)

    @property
    def memory_bytes(self) -> int:
        """Device and host memory in use by the cache now, in bytes."""
        self.storage.check_process()
        self.contents.account_live()
        return self.storage.account.current

    @property
    def host_bytes(self) -> int:
        """The part of `memory_bytes` that budgets do not count: see `host_side`."""
        self.contents.account_live()
        return self.storage.account.host_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk for this cache, including those it shares with others."""
        self.storage.check_process()
        tables = sum(table.nbytes for table in self.storage.tables)
        return sum(store.disk_bytes for store in self.storage.stores) + tables

    @property
    def own_disk_bytes(self) -> int:
        """The part of `disk_bytes` in files that only this cache ever had, without those it was forked or saved
        with."""
        return sum(store.own_disk_bytes for store in self.storage.stores)

    # --- changes -----------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Announce candidates, which steps of several queries may verify. `BudgetError` with `candidates=False`."""
        self.contents.activate_past_recording()
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' caches do. If a layer cannot read the entries it needs, raises `StoreError`, and the next
        call finishes the crop."""
        self.contents.crop(int(tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.contents.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.contents.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.contents.batch_select_indices(indices)

    def reset(self) -> None:
        """Drop all tokens and restart the counters. A cache whose step was interrupted is usable again."""
        self.forget()
        self.contents.recording = False
        self.shared.storage.reset_counters()

    def forget(self) -> None:
        """Drop all stored tokens, as `reset` does. Counters continue, and candidates are verified as before."""
        self.contents.forget(self._model())

    # --- within a budget ---------------------------------------------------------------------------------------

    @classmethod
    def for_budget(
        cls, model: Any, memory: int | str, max_context: int, max_batch: int = 1,
        path: str | Path | None = None, *, goal: str | None = None, **fields: Any,
    ) -> Self:  # fmt: skip
        """The best cache that never uses more than `memory` for up to `max_batch` sequences of `max_context` tokens.

        Args:
            memory: bytes, a size such as "300MiB", or a fraction of the full KV (`DynamicCache`), such as "1/13".
            max_context: tokens a sequence, generated ones included.
            max_batch: sequences, beams included.
            goal: "fidelity": steps closer to full attention, with a warning if they do not fit; "speed": faster ones;
                None: fidelity if that fits, with at most half of the context.
            **fields: fields of the configuration to keep as given; `fit` chooses the others.

        A step or a change of rows beyond these limits raises `BudgetError` and leaves the cache unchanged. Raises as
        the constructor does, `BudgetError` with the minimum memory, and `ConfigError` for a goal it has no fields for.
        """
        at_least(max_context=max_context, max_batch=max_batch)
        if (why := no_place(model)) is not None:
            raise UnsupportedModelError(why)
        geometry = Geometry.of(model)
        limit = parse_memory(memory, geometry.full_kv_bytes(max_context, max_batch))
        fields = cls.choose_store(geometry, (limit, max_context, max_batch), fields, path, goal)
        config = cls.fit(geometry, limit, max_context, max_batch, fields, goal)
        plan, cache = cls.plan(geometry, config, max_context, max_batch), cls(model, path=path, config=config)
        cache.given = frozenset(fields)
        with closed_on_error(cache):
            for note in [*missed_goal(cls, goal, config, fields), *cls.notes(plan, config, geometry, fields)]:
                cache.warn(note)
        return cache

    choose_store = classmethod(choose_store)

    @classmethod
    def missing(cls) -> str | None:
        """Packages that every cache of this class needs but are not installed, with how to install them; else None."""
        return None

    @classmethod
    def shortfalls(cls, config: OffloadConfig, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        """Warnings about what a cache of `config` does worse than expected, each with the remedy; for `plan` and
        `for_budget`. `given`: the fields that the user chose."""
        return []

    @classmethod
    def notes(
        cls, plan: MemoryPlan, config: OffloadConfig, geometry: Geometry, given: Iterable[str] = ()
    ) -> list[str]:
        """Notes that `plan` prints below its table and `for_budget` warns of: the shortfalls, a slower prefill, and
        that no cache is needed. `given`: the fields that the user chose."""
        short = () if geometry.is_indexed else cls.shortfalls(config, geometry, given)
        return [*short, *notes_of(cls, plan, config, geometry, given)]

    @classmethod
    def plan(cls, geometry: Geometry, config: OffloadConfig, max_context: int, max_batch: int) -> MemoryPlan:
        """Maximum memory of a cache of `config`, by owner, for `max_batch` sequences of up to `max_context` tokens.

        Raises `AdapterError` for an adapter file that cannot be read."""
        others = cls.plan_outside_layers(geometry, config, max_batch)
        selects = cls.selects and not config.exact
        return plan_cache(geometry, config, max_context, max_batch, planner(cls.layer_class), others, selects)

    @classmethod
    def plan_outside_layers(cls, geometry: Geometry, config: OffloadConfig, batch: int) -> Planned:
        """A method's memory in addition to its layers'."""
        return Planned()

    @classmethod
    def fit(
        cls, geometry: Geometry, memory: int, max_context: int, max_batch: int, fields: dict[str, Any],
        goal: str | None = None,
    ) -> OffloadConfig:  # fmt: skip
        """The best configuration within `memory` bytes for `max_batch` sequences of `max_context` tokens.

        `fields` are the user's and are kept. The others are for `goal`: see `Goals`. Raises `BudgetError` with the
        minimum memory, and `ConfigError`.
        """
        return fit_goal(cls, goal, geometry, (memory, max_context, max_batch), fields)

    @classmethod
    def choose_exact(cls, search: Search[Any]) -> OffloadConfig:
        """The best configuration of a search for a cache that attends to everything."""
        return fit_stream(search)

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        """The best configuration of a search: decides the order in which a method's own fields shrink."""
        return cls.choose_exact(search)

    @classmethod
    def stored_fields(cls, config: Any, geometry: Geometry) -> dict[str, Any]:
        """The `kept_values` of a saved `config`, for `fit`. Defaults that depend on the model's shape are replaced by
        the stored layers' values."""
        return {**config.kept_values(), **({"indexer_bits": config.indexer_bits} if geometry.is_indexed else {})}

    # --- contexts ----------------------------------------------------------------------------------------------

    def save(
        self, directory: str | os.PathLike[str], *, overwrite: bool = False, tokenizer: Any = None,
        full_digest: bool = False,
    ) -> str:  # fmt: skip
        """Publish the cache's content as `directory`, which `open` opens in another process without prefill.

        Returns the context's digest, 64 hex digits. If anyone could restore an older context, keep the digest where
        they cannot write: `open(..., expect=digest)` accepts no other context.

        On the file system of `path`, stored records are linked, not copied, unless some records of a file were freed:
        freed records are never saved. Each copied record is checked; a linked file is read and checked if something has
        written to it since this cache opened or froze it. Stored records are immutable from then on. The directory is
        published in one atomic step: a process that is killed leaves the old context, the new one, or none if there was
        none. Only the owner can access it (0700); it is encrypted if the cache has an `encryption_key`.

        Args:
            overwrite: replace an existing context.
            tokenizer: makes its identity part of the context's.
            full_digest: digest every byte of the weights, not a sample, here and in `open`.

        Raises `FileExistsError`; `CorruptRecordError` for a record that differs from what was written, for example
        because the context was wiped while open; `StoreFullError` and other `StoreError`s; `ValueError` for an empty
        cache; and the errors of any use of a cache. In these cases nothing is published, and the cache is unchanged.
        """
        return save(self, directory, overwrite=overwrite, tokenizer=tokenizer, full_digest=full_digest)

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], model: Any, memory: int | str | None = None,
        path: str | Path | None = None, *, tokenizer: Any = None, expect: str | None = None, **fields: Any,
    ) -> Self:  # fmt: skip
        """Open a cache with the content that `save` saved, without prefill. Keys and values are read only when a step
        needs them.

        Any number of caches and processes may open one context. Their additions go to unnamed files in `path`; the
        context is unchanged. It may be replaced or removed meanwhile: caches that have it open keep it.

        Args:
            memory: as in `for_budget`, for `max_context` (by default 4,096 tokens more than are stored) and
                `max_batch`.
            path: folder for additions; None: the temporary folder.
            tokenizer: compared with the tokenizer of `save`, if both are given.
            expect: the digest that `save` returned; any other context raises `ContextMismatchError`.
            **fields: fields of the configuration. Fields that the stored format fixes (`group_size`, `rank`,
                `summary_dtype`) raise `ConfigError` unless equal; `adapter`, which is in the context, always does.
                Fields of a machine or a run (`engine`, `verify`, `io_timeout`, `trace`, `encryption_key`, the limits)
                are not saved. Others keep their saved values, or change as `memory` requires.

        Raises `ContextMismatchError` if the model or the context is another one, naming the field and both values;
        `ContextError` for a directory without a context, or a damaged manifest; `CorruptRecordError` for bytes that
        differ from those written, here or in the step that reads them; `EncryptionKeyError`; and the constructor's
        errors. In these cases nothing is left behind.
        """
        return open_context(cls, directory, model, memory, path, tokenizer, fields, expect)

    def fork(self) -> Self:
        """An independent cache with the same content: N questions over one document share the stored records.

        Nothing on disk is copied, now or later: stored records are immutable from now on, and each cache adds its own.
        Compact keys in memory are shared until one of the two adds a group; both accounts count them. Tables and latest
        tokens are copied. Blocks until all writes are done. `copy.deepcopy` does the same.
        """
        return fork(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = self.fork()
        return twin

    def check_open(self) -> None:
        """Raise `CacheClosedError`, `ForkedProcessError`, or `RuntimeError` if the cache cannot be used."""
        self.shared.check_open()

    def begin_context(self) -> None:
        """Remember PEFT's adapters for the context that the coming forward begins."""
        self.adapters = adapter_fields(self.given_model, self.model)

    def end_part(self) -> None:
        """Keep what a forward added that `Filling` ended before its last layer."""
        self.shared.step = self.shared.unseen = self.shared.front = None
        self.storage.timeline.end_step()

    def freeze(self) -> None:
        """Make all stored records immutable, and write them to the disk. Raises the error of a failed write."""
        self.check_open()
        self.contents.freeze()

    def capture(self) -> dict[str, Any]:
        """The state besides the layers, as a tree of values and tensors for `restore`; valid until the next change."""
        return self.contents.capture(self.sequences, self.tokens)

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a captured state; for a new cache."""
        self.contents.restore(tree)
        self.begin_context()

    # --- the end -----------------------------------------------------------------------------------------------

    def report(self) -> CacheReport:
        """Activity since construction or `reset`, and the present contents; after `close`, the last such report."""
        return report_of(self) if self._final is None else self._final

    def close(self) -> None:
        """Free files, threads, buffers and, with the last cache on the model, the model's seams. Idempotent."""
        here = self.storage.process.is_here
        with contextlib.ExitStack() as last_first:  # each callback runs, even if another raises
            if here:
                last_first.callback(self.contents.close)
            last_first.callback(self._finalizer)
            if here and not self.closed:
                self.timeline.flush()
                self._final = self.report()

    @property
    def closed(self) -> bool:
        return self.storage.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None or isinstance(error, Exception):
                raise
            error.add_note(f"closing the cache failed too: {failed}")  # Ctrl-C stays Ctrl-C
