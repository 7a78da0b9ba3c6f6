"""The face towards transformers: a `Cache` whose full-attention layers keep their history in a store."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from ..config import OffloadConfig
from ..contexts.persistent import Persistent
from ..errors import SeamLostError, UnsupportedModelError
from ..fetch.storage import Storage
from ..memory.machine import check_descriptors
from ..model import attach
from ..model.attachable import Attachable
from ..model.geometry import rows_of_ids
from ..model.inner_model import inner_model
from ..model.own_model import OwnModel
from ..model.place import no_place, offloaded_layers, unoffloaded
from ..model.untraced import untraced
from ..report.cache_report import CacheReport
from .beginning import begin
from .budgeted import Budgeted
from .cache_operations import CacheOperations
from .continuation import check_model, check_planned, check_prompt, check_uses_cache, check_was_used, repeats
from .forward_ended import ForwardEnded
from .held import Held
from .layers import make_layers
from .load_config import load_config
from .offload_layer import OffloadLayer
from .reporting import report_of, sparse_warning
from .shared import SEAM_LOST, Shared
from .step import MOST_CANDIDATES, kept_logits
from .token_log import TokenLog

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..report.stream_report import StreamReport


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
