"""The face towards transformers: a `Cache` whose full-attention layers keep their history in a store."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from ..config import OffloadConfig
from ..contexts.save import Persistent
from ..errors import SeamLostError, UnsupportedModelError
from ..fetch.storage import Storage
from ..memory.account import RECORDS
from ..memory.machine import check_descriptors
from ..model import attach
from ..model.geometry import rows_of_ids
from ..model.peft_adapters import adapter_fields
from ..model.place import OwnModel, inner_model, no_place, offloaded_layers, unoffloaded, untested
from ..model.seam import Attachable
from ..model.untraced import untraced
from ..report.report import CacheReport
from .budgeted import Budgeted, load_config
from .cache_operations import CacheOperations
from .forward_ended import ForwardEnded
from .layer import OffloadLayer
from .layers import make_layers
from .shared import SEAM_LOST, Shared
from .step import (
    MOST_CANDIDATES,
    begin,
    check_model,
    check_planned,
    check_prompt,
    check_uses_cache,
    check_was_used,
    kept_logits,
    repeats,
)
from .token_log import TokenLog

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..report.report import StreamReport


# What a cache holds, as users and saved contexts see it

class Held(CacheOperations):
    """Figures of what is held now, and the verbs that take it out and put it back."""

    storage: Storage
    adapters: dict[str, str] | None
    _model: OwnModel
    _given: weakref.ref[Any]
    _resumed: bool

    # --- the model ---------------------------------------------------------------------------------------------

    def live_model(self) -> PreTrainedModel | None:
        return self._model()

    @property
    def model(self) -> PreTrainedModel:
        """The model that the cache is of. Raises `RuntimeError` when it is gone."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this cache is gone: open what was saved with a live one")
        return model

    @property
    def given_model(self) -> Any:
        """What the cache was constructed with: the model, or PEFT's or torch.compile's wrapper while there is one."""
        model = self.model
        given = self._given()
        return model if given is None else given

    # --- what is held ------------------------------------------------------------------------------------------

    @property
    def input_ids(self) -> torch.Tensor:
        """The ids held, padding included: int64 (B, tokens) in host memory, a copy; -1 where the model was given
        embeddings. A prompt continues the cache when it begins with them."""
        return self._tokens.ids

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 where a token is held and 0 where padding is: int64 (B, tokens) in host memory, a copy."""
        return self._tokens.visible.long()

    @property
    def tokens(self) -> int:
        """Tokens a sequence held, padding included."""
        return max((layer.length for layer in self.offloaded), default=self._tokens.length)

    @property
    def noted(self) -> int:
        """Tokens a sequence whose ids are known."""
        return self._tokens.length

    @property
    def sequences(self) -> int:
        """Sequences held, beams included."""
        return max((layer.batch for layer in self.offloaded), default=self._tokens.batch)

    @property
    def memory_bytes(self) -> int:
        """What the cache holds now in compute and host memory, all of it."""
        self.storage.check_process()
        self.account_live()
        return self.storage.account.current

    @property
    def host_bytes(self) -> int:
        """Of `memory_bytes`, records that budgets do not count: see `OffloadConfig.records_apart`."""
        self.account_live()
        return self.storage.account.apart

    @property
    def disk_bytes(self) -> int:
        """What lies on the disk for this cache, what it shares with others included."""
        self.storage.check_process()
        tables = sum(table.nbytes for table in self.storage.tables)
        return sum(store.disk_bytes for store in self.storage.stores) + tables

    @property
    def own_disk_bytes(self) -> int:
        """What of `disk_bytes` are records in files that only this cache ever had: nothing of what it was forked or
        saved with."""
        return sum(store.own_disk_bytes for store in self.storage.stores)

    def account_live(self) -> None:
        """Bring to account what others allocate: transformers' own layers, and records that stores hold in memory."""
        account = self.storage.account
        account.observe("layers not offloaded", self.kept_bytes())
        account.observe(RECORDS, sum(store.memory_bytes for store in self.storage.stores))
        account.observe("tables", sum(layer.tables_nbytes for layer in self.offloaded))
        self.shared.books_changed = False

    # --- taken out and put back --------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises `CacheClosedError`, `ForkedProcessError`, or `RuntimeError` where the cache is not to be used."""
        self.shared.check_open()

    def begin_context(self) -> None:
        """What is held begins with the forward that comes: remember which of PEFT's adapters made it."""
        self.adapters = adapter_fields(self.given_model, self.model)

    def end_part(self) -> None:
        """A forward ended before its last layer, as `Filling` had asked for: what is held is not taken back."""
        self.shared.step = self.shared.unseen = self.shared.front = None
        self.storage.timeline.end_step()

    def note_tokens(self, ids: torch.Tensor) -> None:
        """All layers hold ids (B, t) behind those that are known: see `Filling`."""
        if not self._tokens.length:
            self.begin_context()
        self._tokens.append(ids.to("cpu"), self._tokens.length)
        self.account_live()

    def freeze(self) -> None:
        """All that is stored is immutable from now on, and on the disk. Raises what a write failed with.

        What records are streamed through is given back: a cache that was frozen may lie beside its forks for long."""
        self.check_open()
        self.take_back()
        self.shared.check_seam()
        self.conversation.check()
        self.storage.release_stream_buffers()
        try:
            for layer in self.offloaded:
                layer.freeze()
        except Exception:
            raise
        except BaseException:  # a signal's can come between two lines
            self.storage.torn = True
            raise

    def capture(self) -> dict[str, Any]:
        """What is held beside the layers, as a tree of values and tensors for `restore`; good until the next change."""
        return {
            "ids": self._tokens.capture(self.sequences, self.tokens), "model": self.conversation.capture()
        }  # fmt: skip

    def restore(self, tree: dict[str, Any]) -> None:
        """Hold what was captured; for a new cache."""
        self._tokens.restore(tree["ids"])
        self.conversation.restore(tree["model"], len(tree["ids"]))
        self.begin_context()
        self._resumed = True


# What a cache tells its report

def report_of(cache: Held) -> CacheReport:
    """What `cache` did since construction or `reset`, and what it holds now."""
    storage, offloaded = cache.storage, cache.offloaded
    states = {"unknown": 0, "tagged": 0, "full": 0, "kept": len(cache.layers) - len(offloaded)}
    for layer in offloaded:
        states[layer.state] += 1
    told: Any = cache
    return CacheReport.of(
        cache=type(cache).__name__,
        tokens=cache.tokens,
        full_kv_bytes=sum(layer.full_bytes for layer in offloaded) + cache.kept_bytes(),
        memory_bytes=cache.memory_bytes,  # before the account's peak is read
        account=storage.account,
        disk_bytes=cache.disk_bytes,
        replica_bytes=sum(layer.replica_bytes for layer in offloaded if layer.is_initialized),
        counters=storage.counters,
        stores=storage.stores,
        store=storage.description,
        layers=states,
        warnings=[*told.warnings, *_notes(cache)],
    )


def _notes(cache: Held) -> list[str]:
    """What a user should know about how the cache runs here."""
    notes = [] if (newer := untested()) is None else [newer]
    if cache.storage.engine == "direct" and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        notes.append("set OMP_WAIT_POLICY=PASSIVE before importing torch: waiting threads take the readers' cores")
    if (failure := cache.storage.timeline.failure) is not None:
        notes.append(f"trace {str(cache.config.trace)!r} ends early, it could not be written: {failure.strerror}")
    return notes


def sparse_warning(cache: Any) -> str | None:
    """What to say, once, of layers that cannot be sparse; None: nothing."""
    dense = [layer.layer_idx for layer in cache.offloaded if layer.state != "tagged"]
    if not dense or any("cannot be sparse" in warning for warning in cache.warnings):
        return None
    model = cache.live_model()
    if model is None:
        return None
    why = "their attention is not a plain softmax over the keys that the cache gets"
    if not attach.replaced(model):
        name = model.config._attn_implementation
        why = f"the implementation {name!r} of this model's attention cannot be replaced: 'sdpa' or 'eager' can, "
        why += "if the model offers them"
    return f"layers {dense} cannot be sparse ({why}); they are exact, read completely in every step"


class OffloadCache(Held, Budgeted, Persistent, CacheOperations, Attachable):
    """Base of the family. Constructing attaches the seams to `model`; `close`, the end of a `with`, or garbage
    collection takes them off again. Used by one thread at a time; several caches may share a model.

    Args:
        model: a decoder `PreTrainedModel`, also under PEFT or torch.compile. Held weakly.
        path: folder on the disk to use; None: the temporary folder. Files in it have no name.
        config: an instance of `config_class`, the path of a JSON of its fields, or None.
        **fields: fields of the configuration by name.

    Raises `ConfigError`, `UnsupportedModelError`, `StoreError` (nothing is left behind), `TypeError`.
    """

    def __init__(
        self,
        model: Any,
        path: str | Path | None = None,
        config: OffloadConfig | str | Path | None = None,
        **fields: Any,
    ) -> None:
        inner = inner_model(model)
        given = load_config(self.config_class, config, fields, inner)
        if (why := no_place(model)) is not None:
            raise UnsupportedModelError(why)
        self.config = given.for_layers(offloaded_layers(inner))
        self.check_budget(inner)
        self.shared = Shared(self.config, path)
        self.storage: Storage = self.shared.storage
        self.shared.take_back = weakref.WeakMethod(self.take_back)
        self.timeline = self.storage.timeline
        self.warnings: list[str] = []
        self._model = OwnModel(inner)
        self._rows_of_ids = rows_of_ids(inner)
        self._given = weakref.ref(model)  # PEFT's wrapper knows of soft prompts, the model in it does not
        self.adapters: dict[str, str] | None = None
        """PEFT's adapters when what is held began; None: nothing is held."""
        self._tokens = TokenLog(self.storage.account, self.config.max_context)
        self._prefilled = self._resumed = False  # a forward ended since the prompt; opened, and not compared yet
        self._final: CacheReport | None = None
        token = -1
        try:
            super().__init__(layers=make_layers(inner, self.layer_class, self.shared))
            self.set_layers(self.layers)
            if self.storage.engine != "memory":
                check_descriptors(sum(layer.num_stores for layer in self.layers if isinstance(layer, OffloadLayer)))
            self.prepare(inner)
            self.watches_blocks = self.wants_blocks()
            token = attach.attach(inner, self)
            self.conversation = attach.conversation(inner)
        finally:
            self._finalizer = weakref.finalize(self, _shut_down, self.storage, weakref.ref(inner), token)
            if token == -1:
                self._finalizer()
        self.timeline.start()
        self._by_index = {layer.layer_idx: layer for layer in self.offloaded}
        if (kept := unoffloaded(inner)) is not None:
            self._warn(kept)

    stream_report: StreamReport | None = None
    """What `stream_context` did to fill this cache; None: nothing was streamed."""

    # --- layers ------------------------------------------------------------------------------------------------

    def prepare(self, model: PreTrainedModel) -> None:
        """What a method needs of the model before the first step; runs before the seams go on."""

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Cache.update`; raises `CacheClosedError` on a closed cache, whatever the kind of layer, and `BudgetError`
        beyond what was planned."""
        layer, step = self._by_index.get(layer_idx), self.shared.step
        if step is None or (layer is not None and layer.length != step.history):
            self.shared.check_open()  # another model has no seams, or none that tell this cache of a step
            check_model(self._model, self._model.stranger())
        if layer is None:
            self.shared.check_open()
            given = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            if key_states.shape[-2] > 1:  # one token pushes one out of a window: a copy would free no more than that
                self.settle_kept(self.layers[layer_idx])
            return given
        if self.config.max_context is not None or self.config.max_batch is not None:
            check_planned(self.config, key_states.shape[0], layer.length + key_states.shape[2] - layer.guessed)
        given = layer.update(key_states, value_states, *args, **kwargs)
        if self.shared.ends_after is not None and self.shared.ends_after(layer_idx):
            raise ForwardEnded
        return given

    # --- the step, as the seams tell it ------------------------------------------------------------------------

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Before the model's forward: check that the step continues what is held, start the clock."""
        shared = self.shared
        shared.check_open()
        check_model(self._model, model)
        check_uses_cache(self._model, kwargs)
        intact = attach.intact(self._model() or model)  # the step may be a part's
        if intact:  # else an interruption is not what kept keys from attention
            self.check_whole()
        shared.check_seam()
        if not intact and any(layer.state == "tagged" for layer in self.offloaded):
            raise SeamLostError(SEAM_LOST)
        self.check_whole()
        lengths = self.lengths()
        if not max(lengths, default=self._tokens.length):
            self.begin_context()
        batch = next((layer.batch for layer in self.offloaded if layer.is_initialized), None)
        candidates = self.recording and self._prefilled and self._announced is not False
        announced, self._announced = self._announced, None if self._announced is None else False
        self.conversation.begin(max(lengths, default=self._tokens.length))
        step = begin(
            kwargs, self.config, self._tokens, lengths, batch, compare=self._resumed, candidates=candidates,
            rows_of_ids=self._rows_of_ids,
        )  # fmt: skip
        self._most_cropped = None
        if step is not None:
            if announced and self.config.memory is not None and step.tokens > MOST_CANDIDATES:
                self._most_cropped = kept_logits(kwargs)
            shared.step, self._resumed = step, False
            self._watch_blocks()
            kind = "decode" if step.selects else "prefill"
            self.timeline.describe_step(kind, sequences=step.sequences, tokens=step.tokens, history=step.history)
        return None

    def end_step(self, output: Any = None) -> Any:
        """After the model's forward: keep the ids, stop the clock."""
        shared, step = self.shared, self.shared.step
        self.conversation.end()
        shared.check_seam()
        if step is not None:
            check_was_used(self, step, self._with_length, output)
        if step is not None and step.ids is not None:
            self._tokens.append(step.ids, step.history, step.padding)
        shared.step = None
        self._prefilled = True
        if step is not None and step.selects:
            self._decoded, self._activated = True, False
        for layer in self._by_index.values():
            if layer.state == "unknown":  # attention did not ask for what is held
                layer.end_step()
        seconds = None if step is None or step.started is None else time.perf_counter() - step.started
        self.storage.counters.end_step(seconds, self.storage.prefetcher.seconds_in_flight)
        if not self.config.exact and self._tokens.length and (warning := sparse_warning(self)):
            self._warn(warning)
        if step is None or step.tokens > 1:
            self.settle_kept()
        if step is None or not step.selects or shared.books_changed or self._kept:
            self.account_live()
        self.storage.show_counters()
        return None

    def wants_blocks(self) -> bool:
        """Whether the seams are to tell of blocks in the coming step."""
        return self.has_linear_state or self.timeline.on

    def _watch_blocks(self) -> None:
        if self.watches_blocks is not (wanted := self.wants_blocks()):
            self.watches_blocks = wanted
            attach.watch_blocks(self.model, self)

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        if self.shared.step is not None:
            self.shared.step.entered = True

    def prepare_step(self, *, first: bool) -> None:
        """A prompt, or a piece of one, is no verification of candidates; nor is what a generation does not announce."""
        self._announced = True
        if first:
            self.begin_generation()
            self._prefilled = False

    def check_prompt(self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> None:
        """`generate` is about to drop the first of ids (B, P), which the cache should hold. Raises `PromptError`."""
        self.shared.check_open()
        self.check_whole()
        check_prompt(self._tokens, self.held(), input_ids, inputs_embeds)

    def start_over(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> None:
        self.shared.check_open()
        held = self.held()
        if held and not repeats(self._tokens, held, input_ids, inputs_embeds):
            self._warn_once(
                f"{type(self.model).__name__} dropped the tokens that this cache held, and goes on without them, as it "
                "does with DynamicCache: its rotary embedding changes at this length, and transformers passed on only "
                "the latest tokens; begin such a text with a prompt that is longer than that"
            )
        self.forget()

    def _warn_once(self, message: str) -> None:
        if message not in self.warnings:
            self._warn(message)

    def warn(self, message: str, stacklevel: int = 2) -> None:
        """Issue a warning about this cache and add it to the report. `stacklevel`: as `warnings.warn` counts from the
        caller's line."""
        self.warnings.append(message)
        warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)

    def warn_of(self, notes: Iterable[str]) -> None:
        """Call `warn` with each warning, for code that made this cache for a caller. If warnings are errors, close the
        cache."""
        try:
            for note in notes:
                self.warn(note, stacklevel=3)
        except BaseException:
            self.close()
            raise

    def _warn(self, message: str) -> None:
        self.warn(message, stacklevel=3)

    # --- the end -----------------------------------------------------------------------------------------------

    def report(self) -> CacheReport:
        """What the cache did since construction or `reset`, and what it holds now; after `close`, the last one."""
        return report_of(self) if self._final is None else self._final

    def close(self) -> None:
        """Give back files, threads, buffers and, with the last cache on the model, the model's seams. Idempotent."""
        here = self.storage.process.is_here
        with contextlib.ExitStack() as last_first:  # each runs, whatever another raises
            if here:
                last_first.callback(self._forget)
            last_first.callback(self._finalizer)
            if here and not self.closed:
                self.timeline.flush()
                self._final = self.report()

    def _forget(self) -> None:
        for layer in self.offloaded:
            layer.close()
        self._tokens.truncate(0)
        self.set_layers([])
        self.account_live()

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


def _shut_down(storage: Storage, model: weakref.ref[PreTrainedModel], token: int) -> None:
    try:
        storage.close()
    finally:
        attach.release(model(), token)
