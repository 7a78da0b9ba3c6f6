"""What a cache does for transformers beside `update`: changes of what it holds, and taking back what did not end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from ..config import OffloadConfig
from ..contexts.open import crops_all, select_kept_rows
from ..errors import StoreError, UnsupportedModelError
from ..memory.storages import storage_bytes
from ..model.conversation import Conversation
from .kept_state import check_recorded, kept_state, settle
from .layer import OffloadLayer
from .read_only import Layers, refuse_layers
from .shared import Shared
from .step import check_planned
from .token_log import TokenLog

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CacheOperations(Cache):
    """A cache over layers of which some are `OffloadLayer`s; `OffloadCache` adds how it is made, and the step."""

    config: OffloadConfig
    shared: Shared
    _activated = False
    """`activate_past_recording` was called since the last step of decoding."""
    _decoded = False
    """A step of decoding ended since the prompt."""
    conversation: Conversation
    """What the model's own code keeps on the model for this cache."""
    recording = False
    """Candidates are being verified: forwards may be taken back by `crop`."""
    _cropped: int | None = None
    """Tokens that a crop which could not read was to leave: see `_end_crop`."""
    _most_cropped: int | None = None
    """How many tokens a crop after the forward takes back at most, where that is a prompt of `generate`'s, within a
    budget that the recorded prompt would exceed. None: any number."""
    _announced: bool | None = None
    """Whether `generate` has said that the coming step is its own; None: it has said nothing since recording began."""
    _tokens: TokenLog
    has_linear_state: bool
    """Some layer keeps a state whose length cannot be asked for."""
    _kept: list[Any]
    """The layers that hold something which is not offloaded."""
    _with_length: list[CacheLayerMixin]
    """The layers that have a length."""

    offloaded: list[OffloadLayer]
    """The layers whose history lies in a store."""

    @property
    def layers(self) -> list[Any]:
        """One for each layer of the model: offloaded ones, and transformers' own. Neither the list nor this attribute
        can be changed: that raises `ReadOnlyError`."""
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        if hasattr(self, "_layers"):
            refuse_layers()
        self._layers = Layers(layers)

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        """As a `DynamicCache`: keys, values and sliding window of each layer, brought back whole one after another."""
        layer: Any
        for layer in self.layers:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)

    def __copy__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied shallowly: two caches cannot own one store; fork() it, or "
            "copy.deepcopy it, which is the same"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: its data lies in files of this process; fork() or deepcopy it "
            "in this process, save() it for another"
        )

    # --- lengths -----------------------------------------------------------------------------------------------

    def lengths(self) -> list[int]:
        """Tokens a sequence that each layer holds which has a length."""
        return [layer.get_seq_length() for layer in self._with_length]

    def held(self) -> int:
        """Tokens a sequence held, whatever the kinds of layers."""
        return max(self.lengths(), default=self._tokens.length)

    @classmethod
    def may_crop(cls, model: PreTrainedModel) -> bool:
        """Whether what a cache of this class holds of `model` can be cropped: no window and no state is among it."""
        return not any(
            getattr(layer, "is_sliding", False)
            or isinstance(layer, LinearAttentionCacheLayerMixin)
            or not crops_all(layer)
            for layer in DynamicCache(config=model.config).layers
        )

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` restores the complete cache's earlier state."""
        return super().is_croppable and all(crops_all(layer) for layer in self._kept)

    def kept_bytes(self) -> int:
        """Bytes of everything that is not offloaded: layers with sliding windows, linear states or indexers, and
        hybrids' linear states. Each storage counts once."""
        return storage_bytes([kept_state(layer) for layer in self._kept])

    def settle_kept(self, *layers: Any) -> None:
        """Reduce layers that are not offloaded (none given: all) to the memory they need. transformers slices a window
        from the tokens that a forward added, and the slice keeps all of them in memory. While candidates are verified,
        the tokens that a crop may take back stay."""
        for layer in layers or self._kept:
            settle(layer, self._most_cropped)

    def conversing(self, *, begins: bool = False) -> AbstractContextManager[None]:
        """See `Attachable.conversing`."""
        self.shared.check_open()
        return self.conversation.preparing(self.held(), begins=begins)

    # --- taking back -------------------------------------------------------------------------------------------

    def take_back(self) -> bool:
        """Take back what a forward that did not end has added to some layers; whether there was any.

        Raises `RuntimeError` where that cannot be: something was interrupted while it changed, or a layer of
        transformers' own is ahead, whose window or state does not go back; and `StoreError` where a layer has to read
        for it and cannot now: what is left of it is taken back at the next call.
        """
        shared, step = self.shared, self.shared.step
        if self._cropped is not None:
            self._end_crop()
        if step is None:
            return False
        lengths = self.lengths()
        if lengths == step.lengths and not (step.entered and self.has_linear_state):
            shared.step = shared.unseen = shared.front = None  # it was given up before it added anything
            return False
        pairs = zip(self._with_length, lengths, step.lengths, strict=True)
        ahead = [(layer, before) for layer, now, before in pairs if now != before]
        if self.has_linear_state or not all(isinstance(layer, OffloadLayer) for layer, _ in ahead):
            shared.storage.torn = True
        shared.check_open()
        shared.books_changed = True
        for layer, before in ahead:
            assert isinstance(layer, OffloadLayer)
            now = layer.length
            try:
                if before:
                    layer.crop(before - now)
                else:
                    layer.reset()
            except BaseException as error:
                shared.storage.torn |= not isinstance(error, StoreError) or layer.length != now
                raise
        self._tokens.truncate(min(self._tokens.length, step.history))  # the step's, if it was at its very end
        shared.step = shared.unseen = shared.front = None
        return True

    def fail_step(self) -> None:
        """What the forward has added is taken back at the next call; no guess of it counts any more."""
        self.conversation.fail()
        if self.shared.step is not None:
            self.shared.step.guessed = 0

    def check_whole(self) -> None:
        """Raises `RuntimeError`, once, where a forward was interrupted: whoever calls has counted on what it added."""
        if self.take_back():
            raise RuntimeError(
                "an earlier forward was interrupted; what it had added to some layers was taken back, and the cache "
                f"holds {self.held():,} tokens a sequence again, as before it: call again, with what follows these"
            )

    # --- changes: the layers', and the ids ---------------------------------------------------------------------

    def _check_rows(self, count: int) -> None:
        """Before the rows become `count`. Raises `BudgetError`."""
        if count != self._tokens.batch:
            check_planned(self.config, count, 0)

    def activate_past_recording(self) -> None:
        """Candidates will be verified: after a first forward, steps of several queries may be of that kind."""
        super().activate_past_recording()
        self.recording, self._activated, self._announced = True, True, None

    def begin_generation(self) -> None:
        """A prompt comes. Where no candidates were announced since the last steps, there will be none: layers keep what
        they need."""
        if self._decoded and not self._activated:
            self.recording = False
            for layer in self.layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = False
        self._decoded = False

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' caches do. Where a layer cannot read what it has to, `StoreError` is raised, and the next
        call ends the crop."""
        self.take_back()
        self.shared.check_open()
        for layer in self._kept:
            if int(tokens_to_remove) and not crops_all(layer):
                raise UnsupportedModelError(
                    f"a {type(layer).__name__} cannot be cropped, because its crop leaves what it keeps besides keys "
                    "and values; nothing was cropped: reset() the cache, and give it the tokens to keep"
                )
        length, tokens_to_remove = self._tokens.length, int(tokens_to_remove)
        kept = min(length, max(0, tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove))
        self.shared.books_changed = True
        for layer in self._kept:
            check_recorded(layer, self._tokens.length - kept)
        try:
            super().crop(tokens_to_remove)
            self.settle_kept()
        except BaseException as error:
            ours = all(isinstance(layer, OffloadLayer) for layer in self.layers) and not self.has_linear_state
            if not (ours and isinstance(error, StoreError) and set(self.lengths()) <= {length, kept}):
                self.shared.storage.torn = True
            else:
                self._cropped = kept
                error.add_note(f"some layers are cropped: the next call ends it, and the cache holds {kept:,} tokens")
            raise
        self._tokens.truncate(kept)

    def _end_crop(self) -> None:
        """Crop the layers that an earlier `crop` did not come to. Raises `StoreError`: the next call goes on."""
        assert self._cropped is not None
        self.shared.check_open()
        for layer in self.offloaded:
            if layer.length > self._cropped:
                layer.crop(self._cropped - layer.length)
        self._tokens.truncate(self._cropped)
        self._cropped = None

    def _settle(self, rows: torch.Tensor) -> None:
        """Row i is about to become what row `rows[i]` is: what layers read for that is read while nothing has changed.
        Raises `StoreError`; the cache goes on then."""
        self.shared.check_open()
        try:
            for layer in self.offloaded:
                if layer.is_initialized and rows.tolist() != list(range(layer.batch)):
                    layer.settle_rows(rows)
        except StoreError:
            raise
        except BaseException:
            self.shared.storage.torn = True
            raise

    def _select_rows(self, change: str, argument: Any, rows: torch.Tensor) -> None:
        """Make sequence i the current sequence `rows[i]`, by calling each layer's method `change` with `argument`.
        Raises `UnsupportedModelError`, with nothing changed, if a layer has state that cannot follow."""
        batch = self._tokens.batch
        for layer in {type(kept): kept for kept in self.layers if not isinstance(kept, OffloadLayer)}.values():
            select_kept_rows(layer, rows, batch, change, argument)
        self._settle(rows)
        with self.shared.changing():
            for layer in self.layers:
                if isinstance(layer, OffloadLayer):
                    getattr(layer, change)(argument)
                else:
                    vars(layer).update(select_kept_rows(layer, rows, batch, change, argument))
            self.conversation.select_rows(rows, batch)
            self._tokens.select_rows(rows)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.take_back()
        self._check_rows(len(beam_idx))
        self._select_rows("reorder_cache", beam_idx, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.take_back()
        self._check_rows(self._tokens.batch * repeats)
        rows = torch.arange(self._tokens.batch, device="cpu").repeat_interleave(repeats)
        self._select_rows("batch_repeat_interleave", repeats, rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.take_back()
        indices = torch.as_tensor(indices, device="cpu")
        rows = indices.nonzero().reshape(-1) if indices.dtype == torch.bool else indices
        self._check_rows(len(rows))
        self._select_rows("batch_select_indices", indices, rows)

    def reset(self) -> None:
        """Forget everything; counters start anew. Also brings a cache back whose step was interrupted."""
        self.forget()
        self.recording = False
        self.shared.storage.reset_counters()

    def forget(self) -> None:
        """Drop all stored tokens, as `reset` does. Counters continue, and candidates are verified as before."""
        self.shared.mend()
        self.shared.check_open()
        super().reset()
        self.conversation.forget()
        self._renew_kept()
        self._cropped = None
        self._tokens.truncate(0)

    def _renew_kept(self) -> None:
        """transformers' own layers keep the batch size of their states: new ones take their places."""
        model = self.live_model()
        if model is None:
            return
        layers: list[Any] = list(DynamicCache(config=model.config).layers)
        for layer_idx, kept in enumerate(self.layers):
            if isinstance(kept, OffloadLayer):
                layers[layer_idx] = kept
            elif getattr(kept, "record_past", False):
                layers[layer_idx].activate_past_recording()
        self.set_layers(layers)

    def set_layers(self, layers: list[Any]) -> None:
        """Set the cache's layers; note which are offloaded, and which keep state in memory."""
        self._layers = Layers(layers)
        self.offloaded = [layer for layer in self.layers if isinstance(layer, OffloadLayer)]
        self._with_length = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        self.has_linear_state = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)
        self._kept = [
            layer
            for layer in self.layers
            if not isinstance(layer, OffloadLayer) or isinstance(layer, LinearAttentionCacheLayerMixin)
        ]

    def live_model(self) -> PreTrainedModel | None:
        """The model that the cache is of; None: it is gone."""
        raise NotImplementedError
