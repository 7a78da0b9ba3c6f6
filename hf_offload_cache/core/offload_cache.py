"""The face towards transformers: a `Cache` whose full-attention layers keep their history in a store."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from ..config import OffloadConfig, parse_size
from ..contexts.adapters import adapter_fields
from ..errors import BudgetError, ConfigError, PromptError, SeamLostError, UnsupportedModelError
from ..memory.fit import parse_memory, plan_memory
from ..memory.machine import check_descriptors
from ..model import attach
from ..model.attachable import Attachable
from ..model.geometry import Geometry
from ..model.inner_model import inner_model
from ..model.look_ahead import LookAhead
from ..model.own_model import OwnModel
from ..report.cache_report import CacheReport
from ..stores.engines import resolve_engine
from .continuation import check_model, check_planned, check_positions, check_prompt, padding_of
from .hybrid_layer import hybrid
from .offload_layer import OffloadLayer
from .shared import SEAM_LOST, Shared
from .token_log import TokenLog


class OffloadCache(Cache, Attachable):
    """Base of the family. Constructing attaches the seams to `model`; `close`, the end of a `with`, or garbage
    collection takes them off again. Used by one thread at a time; several caches may share a model.

    Args:
        model: a decoder `PreTrainedModel`, also under PEFT or torch.compile. Held weakly.
        path: folder on the disk to use; None: the temporary folder. Files in it have no name.
        config: an instance of `config_class`, the path of a JSON of its fields, or None.
        **fields: fields of the configuration by name.

    Raises `ConfigError`, `UnsupportedModelError`, `StoreError` (nothing is left behind), `TypeError`.
    """

    config_class: ClassVar[type[OffloadConfig]] = OffloadConfig
    layer_class: ClassVar[type[OffloadLayer]] = OffloadLayer

    def __init__(
        self,
        model: Any,
        path: str | Path | None = None,
        config: OffloadConfig | str | Path | None = None,
        **fields: Any,
    ) -> None:
        inner = inner_model(model)
        self.config = self.config_class.load(config, fields, inner)
        if inner.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"model {type(inner).__name__} is an encoder-decoder: this cache serves decoder-only models; "
                "use transformers' EncoderDecoderCache"
            )
        self._check_budget(inner)
        self.shared = Shared(self.config, path)
        self.timeline = self.shared.timeline
        self.warnings: list[str] = []
        self._model = OwnModel(inner)
        self._given = weakref.ref(model)  # PEFT's wrapper knows of soft prompts, the model in it does not
        self.adapters: dict[str, str] | None = None
        """PEFT's adapters when what is held began: `contexts.adapters.adapter_fields`; None: nothing is held."""
        self._tokens = TokenLog(self.shared.account, self.config.max_context)
        self._step_started: float | None = None
        self._step_ids: torch.Tensor | None = None
        self._step_padding: torch.Tensor | None = None
        self._step_length = 0
        self._open: list[int] | None = None  # lengths at the beginning of a step that has not ended
        self._entered = False
        self._units_seen = (0, 0, 0)  # selected, resident, ready: at the end of the last step
        self._final: CacheReport | None = None
        self._resumed = False  # nothing was compared yet with what was brought back
        self.look_ahead: LookAhead | None = None
        token = -1
        try:
            super().__init__(layers=self._make_layers(inner))
            if self.shared.engine != "memory":
                check_descriptors(sum(isinstance(layer, OffloadLayer) for layer in self.layers))
            self.prepare(inner)
            token = attach.attach(inner, self)
        finally:
            self._finalizer = weakref.finalize(self, _shut_down, self.shared, weakref.ref(inner), token)
            if token == -1:
                self._finalizer()
        self.timeline.start()
        self.shared.keys_are_shared = any(isinstance(layer, DummyLayer) for layer in self.layers)
        self.offloaded = [layer for layer in self.layers if isinstance(layer, OffloadLayer)]
        self._by_index = {layer.layer_idx: layer for layer in self.offloaded}
        self._first = min(self._by_index, default=0)
        if not self.offloaded:
            self._warn(f"{type(inner).__name__} has no full-attention layer: there is nothing to offload")

    @classmethod
    def for_budget(
        cls,
        model: Any,
        memory: int | str,
        max_context: int,
        max_batch: int = 1,
        path: str | Path | None = None,
        **fields: Any,
    ) -> Self:
        """The best cache that never holds more than `memory` for up to `max_batch` sequences of `max_context` tokens.

        Args:
            memory: bytes, a size such as "300MiB", or a fraction of what `DynamicCache` would hold, such as "1/13".
            max_context: tokens a sequence, those that are generated included.
            max_batch: sequences, beams included.
            **fields: fields of the configuration that are to stay as they are; the others are chosen by
                `config_class.fit`.

        A step or a change of rows beyond what was planned raises `BudgetError` before anything of it is taken in; the
        cache goes on with what it holds. Raises as the constructor does, and `BudgetError` with the least memory that
        would do.
        """
        for name, value in (("max_context", max_context), ("max_batch", max_batch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        geometry = Geometry.of(model)
        fields = resolve_engine(fields, path)
        limit = parse_memory(memory, geometry.full_kv_bytes(max_context, max_batch))
        config = cls.config_class.fit(geometry, limit, max_context, max_batch, fields)
        return cls(model, path=path, config=config)

    def _check_budget(self, model: PreTrainedModel) -> None:
        """Raises `BudgetError` where the configuration names a budget and limits that do not go together."""
        memory, context, batch = self.config.memory, self.config.max_context, self.config.max_batch
        if memory is None or context is None or batch is None:
            return
        peak = plan_memory(Geometry.of(model), self.config, context, batch).peak_bytes
        if peak > parse_size(memory, "memory"):
            raise BudgetError(
                f"memory is {parse_size(memory):,} bytes, and {batch} x {context:,} tokens can take {peak:,} with "
                "these fields: give as much, or let for_budget() choose the fields"
            )

    def prepare(self, model: PreTrainedModel) -> None:
        """What a method needs of the model before the first step; runs before the seams go on."""

    def _make_layers(self, model: PreTrainedModel) -> list[Any]:
        """transformers' own layers for this model, with every full-attention one replaced by ours."""
        layers: list[Any] = list(DynamicCache(config=model.config).layers)
        for layer_idx, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[layer_idx] = self.layer_class(self.shared, layer_idx)
            elif type(layer) is LinearAttentionAndFullAttentionLayer:
                states = {name: getattr(layer, name) for name in ("number_of_states",) if hasattr(layer, name)}
                layers[layer_idx] = hybrid(self.layer_class)(self.shared, layer_idx, **states)
        return layers

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Cache.update`; raises `CacheClosedError` on a closed cache, whatever the kind of layer, and `BudgetError`
        beyond what was planned."""
        self.shared.check_open()
        if layer_idx == self._first or self._open is None:  # once a step, and out of step: another model has no seams
            check_model(self._model, self._model.stranger())
        layer = self._by_index.get(layer_idx)
        if layer is not None:
            check_planned(self.config, key_states.shape[0], layer.length + key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    # --- the step, as the seams tell it ------------------------------------------------------------------------

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Before the model's forward: check that the step continues what is held, start the clock."""
        self.shared.check_open()
        check_model(self._model, model)
        intact = attach.intact(model)
        if intact:  # else an interruption is not what kept keys from attention
            self._check_whole()
        self.shared.check_seam()
        if not intact and any(layer.state == "tagged" for layer in self.offloaded):
            raise SeamLostError(SEAM_LOST)
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        given = ids if ids is not None else embeds
        self._check_whole()
        lengths = [layer.get_seq_length() for layer in self._with_length()]
        if given is None:
            return None
        history = max(lengths, default=self._tokens.length)
        if not history:
            self.adapters = adapter_fields(self.given_model, self.model)
        if history:
            batch = max((layer.batch for layer in self.offloaded), default=given.shape[0])
            if given.shape[0] != batch:
                raise PromptError(
                    f"the cache holds {batch} sequences and the model was given {given.shape[0]}: "
                    "use a new cache, or reset(), for a batch of another size"
                )
            check_positions(kwargs.get("position_ids"), kwargs.get("attention_mask"), history)
        length, mask = history + given.shape[1], kwargs.get("attention_mask")
        check_planned(self.config, given.shape[0], length)
        unsure = self._resumed or given.shape[1] > 1  # not in every step: the history can be long
        self._step_padding = padding_of(self._tokens, mask, history, length, compare=unsure)
        self._resumed = False
        self._open, self._entered = lengths, False
        self._step_ids = ids if ids is not None else torch.full(given.shape[:2], TokenLog.UNKNOWN)
        self._step_length = history
        kind = "decode" if history and given.shape[1] == 1 else "prefill"
        self.timeline.describe_step(kind, sequences=given.shape[0], tokens=given.shape[1], history=history)
        self._step_started = time.perf_counter() if kind == "decode" else None
        return None

    def _check_rows(self, count: int) -> None:
        """Before the rows become `count`. Raises `BudgetError`."""
        if count != self._tokens.batch:
            check_planned(self.config, count, 0)

    @property
    def decoding(self) -> bool:
        """A single-query step over a history is under way."""
        return self._step_started is not None

    def end_step(self, output: Any) -> Any | None:
        """After the model's forward: keep the ids, stop the clock."""
        self.shared.check_seam()
        if self._step_ids is not None:
            self._tokens.append(self._step_ids, self._step_length, self._step_padding)
            self._step_ids = self._step_padding = None
        self._open = None
        seconds = None if self._step_started is None else time.perf_counter() - self._step_started
        self.shared.counters.end_step(seconds, self.shared.prefetcher.seconds_in_flight)
        self._step_started = None
        if not self.config.exact:
            self._check_sparse()
        for layer in self.offloaded:
            layer.end_step()
        if self.look_ahead is not None:
            self.look_ahead.end_step()
        self._account_live()
        if self.timeline.on:
            self._count_on_timeline()
        return None

    def _count_on_timeline(self) -> None:
        counters = self.shared.counters
        now = (counters.units_selected, counters.units_resident, counters.units_ready)
        selected, resident, ready = (new - old for new, old in zip(now, self._units_seen, strict=True))
        self._units_seen = now
        if selected > 0:
            self.timeline.count("selected units", resident=resident / selected, ready=ready / selected)
        self.timeline.count("memory, bytes", held=self.shared.account.current)

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        self._entered = True
        if self.look_ahead is not None:
            self.look_ahead.enter_block(layer_idx, block, hidden)

    def enter_attention(self, layer_idx: int, module: torch.nn.Module, hidden: torch.Tensor, rotary: Any) -> None:
        if self.look_ahead is not None:
            self.look_ahead.enter_attention(layer_idx, module, hidden, rotary)

    def check_prompt(self, input_ids: torch.Tensor) -> None:
        """`generate` is about to drop the first of ids (B, P), which the cache should hold. Raises `PromptError`."""
        self.shared.check_open()
        self._check_whole()
        check_prompt(self._tokens, self._held(), input_ids)

    def _take_back(self) -> bool:
        """Take back what a forward that did not end has added to some layers; whether there was any.

        Raises `RuntimeError` where that cannot be: something was interrupted while it changed, or a layer of
        transformers' own is ahead, whose window or state does not go back.
        """
        if self._open is None:
            return False
        lengths = [layer.get_seq_length() for layer in self._with_length()]
        if lengths == self._open and not (self._entered and self._has_linear_state()):
            return False
        pairs = zip(self._with_length(), self._open, strict=True)
        ahead = [(layer, before) for layer, before in pairs if layer.get_seq_length() != before]
        if self._has_linear_state() or not all(isinstance(layer, OffloadLayer) for layer, _ in ahead):
            self.shared.broken = True
        self.shared.check_open()
        with self.shared.changing():
            for layer, before in ahead:
                assert isinstance(layer, OffloadLayer)
                if before:
                    layer.crop(before - layer.length)
                else:
                    layer.reset()
            self._tokens.truncate(min(self._tokens.length, max(self._open)))  # the step's, if it was at its very end
        self.shared.unseen = self.shared.front = self._open = None
        return True

    def _check_whole(self) -> None:
        """Raises `RuntimeError`, once, where a forward was interrupted: whoever calls has counted on what it added."""
        if self._take_back():
            raise RuntimeError(
                "an earlier forward was interrupted; what it had added to some layers was taken back, and the cache "
                f"holds {self.tokens:,} tokens a sequence again, as before it: call again, with what follows these"
            )

    def _has_linear_state(self) -> bool:
        """Some layer keeps a state whose length cannot be asked for."""
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def _with_length(self) -> list[CacheLayerMixin]:
        return [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)]

    def _held(self) -> int:
        """Tokens a sequence held, whatever the kinds of layers."""
        lengths = [layer.get_seq_length() for layer in self._with_length()]
        return max(lengths, default=self._tokens.length)

    def _check_sparse(self) -> None:
        if any("cannot be sparse" in warning for warning in self.warnings):
            return
        dense = [layer.layer_idx for layer in self.offloaded if layer.state != "tagged"]
        model = self._model()
        if not dense or model is None or not self._tokens.length:
            return
        why = "their attention is not a plain softmax over the keys that the cache gets"
        if not attach.replaced(model):
            name = model.config._attn_implementation
            why = f"the implementation {name!r} of this model's attention cannot be replaced: 'sdpa' or 'eager' can, "
            why += "if the model offers them"
        self._warn(f"layers {dense} cannot be sparse ({why}); they are exact, brought back whole in every step")

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        warnings.warn(message, UserWarning, stacklevel=3)

    # --- batch operations: the layers', and the ids ------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        self._take_back()
        tokens_to_remove = int(tokens_to_remove)
        with self.shared.changing():
            super().crop(tokens_to_remove)
            kept = tokens_to_remove if tokens_to_remove > 0 else self._tokens.length + tokens_to_remove
            self._tokens.truncate(max(0, kept))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._take_back()
        self._check_rows(len(beam_idx))
        with self.shared.changing():
            super().reorder_cache(beam_idx)
            self._tokens.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take_back()
        self._check_rows(self._tokens.batch * repeats)
        with self.shared.changing():
            super().batch_repeat_interleave(repeats)
            self._tokens.select_rows(torch.arange(self._tokens.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._take_back()
        indices = torch.as_tensor(indices)
        self._check_rows(int(indices.sum()) if indices.dtype == torch.bool else len(indices))
        with self.shared.changing():
            super().batch_select_indices(indices)
            self._tokens.select_rows(indices)

    def reset(self) -> None:
        """Forget everything; counters start anew. Also brings a cache back whose step was interrupted."""
        self.shared.mend()
        self.shared.check_open()
        self.shared.unseen = self.shared.front = self._open = None
        self._units_seen = (0, 0, 0)
        super().reset()
        model = self._model()
        if model is not None:  # transformers' own keep the batch size of their states
            fresh: Any
            kept: Any
            for layer_idx, fresh in enumerate(DynamicCache(config=model.config).layers):
                kept = self.layers[layer_idx]
                if not isinstance(kept, OffloadLayer):
                    if getattr(kept, "record_past", False):
                        fresh.activate_past_recording()
                    self.layers[layer_idx] = fresh
        self._tokens.truncate(0)
        self.shared.reset_counters()

    # --- contexts ----------------------------------------------------------------------------------------------

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

    @property
    def input_ids(self) -> torch.Tensor:
        """The ids held, padding included: int64 (B, tokens) in host memory, a copy; -1 where the model was given
        embeddings. A prompt continues the cache when it begins with them."""
        return self._tokens.ids

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 where a token is held and 0 where padding is: int64 (B, tokens) in host memory, a copy."""
        return self._tokens.visible.long()

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        tokenizer: Any = None,
        full_digest: bool = False,
    ) -> None:
        """Publish what is held as the directory `directory`, which `open` opens in another process without prefill.

        On the file system of `path`, stored records are linked in and not copied (but where some of a file were given
        up: these are never saved); they are immutable from then on, and this cache goes on with records of its own
        beside them. Published in one atomic step: whoever is killed at
        whatever moment, there is the old context, or the new one, or none. The directory is for its owner only (0700),
        and encrypted where the cache has an `encryption_key`.

        Args:
            overwrite: replace a context that is there.
            tokenizer: makes its identity part of the context's.
            full_digest: digest every byte of the weights, not a sample, here and in `open`.

        Raises `FileExistsError`; `StoreFullError` and other `StoreError`s with nothing published and the cache as it
        was; `ValueError` for a cache that holds nothing; as any use of the cache does.
        """
        from ..contexts.save import save

        save(self, directory, overwrite=overwrite, tokenizer=tokenizer, full_digest=full_digest)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        model: Any,
        memory: int | str | None = None,
        path: str | Path | None = None,
        *,
        tokenizer: Any = None,
        **fields: Any,
    ) -> Self:
        """A cache that holds what `save` saved: no prefill, and no keys and values are read before a step needs them.

        Any number of caches and processes may open one context; what they add goes to unnamed files in `path`, the
        context stays as it is. It may be replaced or removed meanwhile: those that have it open keep it.

        Args:
            memory: as in `for_budget`, for `max_context` (by default 4,096 tokens more than are held) and `max_batch`.
            path: folder for what is added; None: the temporary folder.
            tokenizer: is compared with that of `save`, when both are given.
            **fields: fields of the configuration. Those that the stored format fixes (`group_size`, `rank`,
                `summary_dtype`, `adapter`) are refused unless equal; those of a machine or a run (`engine`, `verify`,
                `io_timeout`, `trace`, `encryption_key`, the limits) are not saved; others are as they were, or as
                `memory` allows.

        Raises `ContextMismatchError` where the model is not the one it was saved with, naming the field and both
        values; `ContextError` for a directory without a context, or a damaged manifest; `CorruptRecordError` for other
        bytes than were written, here or in the step that reads them; `EncryptionKeyError`; and as the constructor does.
        Nothing is left behind.
        """
        from ..contexts.open import open_context

        return open_context(cls, directory, model, memory, path, tokenizer, fields)

    def fork(self) -> Self:
        """A cache of its own that holds the same: N questions over one document share what is stored.

        Nothing on disk is copied, now or later: what is stored is immutable from now on, and what either adds is its
        own. Compact keys in memory are shared until one of the two adds a group; each one's account counts them. Tables
        and latest tokens are copied. Blocks until all writes are done. `copy.deepcopy` does the same.
        """
        from ..contexts.fork import fork

        return fork(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = self.fork()
        return twin

    def freeze(self) -> None:
        """All that is stored is immutable from now on, and on the disk. Raises what a write failed with."""
        self.shared.check_open()
        self._take_back()
        self.shared.check_seam()
        try:
            for layer in self.offloaded:
                layer.freeze()
        except Exception:
            raise
        except BaseException:  # a signal's can come between two lines
            self.shared.broken = True
            raise

    def capture(self) -> dict[str, Any]:
        """What is held beside the layers, as a tree of values and tensors for `restore`; good until the next change."""
        return {"ids": self._tokens.capture(self.sequences, self.tokens)}

    def restore(self, tree: dict[str, Any]) -> None:
        """Hold what was captured; for a new cache."""
        self._tokens.restore(tree["ids"])
        self.adapters = adapter_fields(self.given_model, self.model)
        self._resumed = True

    # --- what users read ---------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """What the cache holds now in compute and host memory, all of it."""
        self.shared.check_process()
        self._account_live()
        return self.shared.account.current

    @property
    def tokens(self) -> int:
        """Tokens a sequence held, padding included."""
        return max((layer.length for layer in self.offloaded), default=self._tokens.length)

    @property
    def sequences(self) -> int:
        """Sequences held, beams included."""
        return max((layer.batch for layer in self.offloaded), default=self._tokens.batch)

    @property
    def disk_bytes(self) -> int:
        """What lies on the disk for this cache, what it shares with others included."""
        self.shared.check_process()
        return sum(store.disk_bytes for store in self.shared.stores)

    @property
    def own_disk_bytes(self) -> int:
        """What of `disk_bytes` lies in files that only this cache ever had: nothing of what it was forked or saved
        with."""
        return sum(store.own_disk_bytes for store in self.shared.stores)

    def report(self) -> CacheReport:
        """What the cache did since construction or `reset`, and what it holds now; after `close`, the last one."""
        return CacheReport.of(self) if self._final is None else self._final

    def kept_bytes(self) -> int:
        """Bytes of layers that are not offloaded (sliding windows, linear states), and of hybrids' linear states."""
        total = 0
        for layer in self.layers:
            kept = () if isinstance(layer, OffloadLayer) else ("keys", "values")
            held = [getattr(layer, name, None) for name in kept]
            for name in ("conv_states", "recurrent_states"):
                held.extend(getattr(layer, name, {}).values())
            total += sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))
        return total

    def _account_live(self) -> None:
        """Bring to account what others allocate: transformers' own layers, and records that stores hold in memory."""
        account = self.shared.account
        stores = sum(store.memory_bytes for store in self.shared.stores)
        tables = sum(layer.tables_nbytes for layer in self.offloaded if layer.is_initialized)
        account.observe("layers not offloaded", self.kept_bytes())
        account.observe("records in memory", stores)
        account.observe("tables", tables)

    # --- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back files, threads, buffers and, with the last cache on the model, the model's seams. Idempotent."""
        here = self.shared.process.is_here
        if here and not self.closed:
            self.timeline.flush()
            self._final = self.report()
        try:
            self._finalizer()
        finally:
            if here:
                if self.look_ahead is not None:
                    self.look_ahead.end_step()  # of a step that did not end
                for layer in self.offloaded:
                    layer.close()
                self._tokens.truncate(0)
                self.layers = []
                self._account_live()

    @property
    def closed(self) -> bool:
        return self.shared.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: its data lies in files of this process; fork() or deepcopy it "
            "in this process, save() it for another"
        )


def _shut_down(shared: Shared, model: weakref.ref[PreTrainedModel], token: int) -> None:
    try:
        shared.close()
    finally:
        attach.release(model(), token)
