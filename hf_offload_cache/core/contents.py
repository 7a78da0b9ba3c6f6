"""What a cache holds, changed as one: its layers, the ids of the tokens, and what the model's code keeps for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from ..config import OffloadConfig
from ..contexts.open import select_kept_rows
from ..errors import SeamLostError, StoreError, UnsupportedModelError
from ..memory.account import RECORDS, storage_bytes
from ..model.conversation import Conversation
from ..model.plain_caches import crops_all
from .layer import OffloadLayer
from .layers import check_recorded, kept_state, settle
from .read_only import Layers
from .shared import SEAM_LOST, Shared
from .step import MOST_CANDIDATES, Step, begin, check_planned, kept_logits, repeats
from .token_log import TokenLog

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Contents:
    """Made by the cache, for the thread that runs the model. A change reaches all parts, or it is taken back, or the
    cache is not to be used until `reset`.

    Attributes:
        layers: one for each layer of the model: `OffloadLayer`s, and transformers' own. A list that cannot be changed.
        offloaded: the layers whose history lies in a store.
        with_length: the layers that have a length.
        kept: the layers that hold something which is not offloaded.
        has_linear_state: some layer keeps a state whose length cannot be asked for.
        tokens: the ids, and where padding is.
        conversation: what the model's own code keeps on the model for this cache.
        recording: candidates are being verified: forwards may be taken back by `crop`.
    """

    def __init__(self, config: OffloadConfig, shared: Shared, layers: list[Any]) -> None:
        self.config = config
        self.shared = shared
        self.tokens = TokenLog(shared.storage.account, config.max_context)
        self.conversation: Conversation  # set by the cache once the seams are on
        self.recording = False
        self._activated = False
        """`activate_past_recording` was called since the last step of decoding."""
        self._decoded = False
        """A step of decoding ended since the prompt."""
        self._prefilled = False
        """A forward ended since the prompt."""
        self._announced: bool | None = None
        """Whether `generate` has said that the coming step is its own; None: it has said nothing since recording
        began."""
        self._most_cropped: int | None = None
        """How many tokens a crop after the forward takes back at most, where that is a prompt of `generate`'s, within
        a budget that the recorded prompt would exceed. None: any number."""
        self._resumed = False
        """Restored, and not compared with what goes on yet."""
        self._cropped: int | None = None
        """Tokens that a crop which could not read was to leave: see `_end_crop`."""
        self.set_layers(layers)

    def set_layers(self, layers: list[Any]) -> None:
        """Set the layers; note which are offloaded, and which keep state in memory."""
        self.layers: list[Any] = Layers(layers)
        self.offloaded = [layer for layer in layers if isinstance(layer, OffloadLayer)]
        self.with_length = [layer for layer in layers if isinstance(layer, CacheLayerMixin)]
        self.has_linear_state = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        self.kept = [
            layer
            for layer in layers
            if not isinstance(layer, OffloadLayer) or isinstance(layer, LinearAttentionCacheLayerMixin)
        ]

    # --- lengths and bytes -------------------------------------------------------------------------------------

    def lengths(self) -> list[int]:
        """Tokens a sequence that each layer holds which has a length."""
        lengths = list[int]()
        layer: Any
        for layer in self.with_length:
            offloaded = isinstance(layer, OffloadLayer) and layer.is_filled
            lengths.append(layer.history.length if offloaded else layer.get_seq_length())
        return lengths

    def held(self) -> int:
        """Tokens a sequence held, whatever the kinds of layers."""
        return max(self.lengths(), default=self.tokens.length)

    def kept_bytes(self) -> int:
        """Bytes of everything that is not offloaded: layers with sliding windows, linear states or indexers, and
        hybrids' linear states. Each storage counts once."""
        return storage_bytes([kept_state(layer) for layer in self.kept])

    def settle_kept(self, *layers: Any) -> None:
        """Reduce layers that are not offloaded (none given: all) to the memory they need. transformers slices a window
        from the tokens that a forward added, and the slice keeps all of them in memory. While candidates are verified,
        the tokens that a crop may take back stay."""
        for layer in layers or self.kept:
            settle(layer, self._most_cropped)

    def account_live(self) -> None:
        """Bring to account what others allocate: transformers' own layers, and records that stores hold in memory."""
        storage = self.shared.storage
        storage.account.observe("layers not offloaded", self.kept_bytes())
        storage.account.observe(RECORDS, sum(store.memory_bytes for store in storage.stores))
        storage.account.observe("tables", sum(layer.tables_nbytes for layer in self.offloaded))
        self.shared.books_changed = False

    # --- candidates, which a crop may take back ----------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Candidates will be verified: after a first forward, steps of several queries may be of that kind."""
        self.recording, self._activated, self._announced = True, True, None

    def announce(self, *, first: bool) -> None:
        """`generate` makes the coming step, which verifies no candidates; `first`: of a prompt, or a piece of one."""
        self._announced = True
        if first:
            self._begin_generation()
            self._prefilled = False

    def _begin_generation(self) -> None:
        """A prompt comes. Where no candidates were announced since the last steps, there will be none: layers keep what
        they need."""
        if self._decoded and not self._activated:
            self.recording = False
            for layer in self.layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = False
        self._decoded = False

    def dropped(self, model: str, input_ids: Any, inputs_embeds: Any) -> str | None:
        """What to say where a model of this name begins anew; None: what it is given begins with what is held."""
        held = self.held()
        if not held or repeats(self.tokens, held, input_ids, inputs_embeds):
            return None
        return (
            f"{model} dropped the tokens that this cache held, and goes on without them, as it does with DynamicCache: "
            "its rotary embedding changes at this length, and transformers passed on only the latest tokens; begin "
            "such a text with a prompt that is longer than that"
        )

    # --- a forward, from its beginning to its end --------------------------------------------------------------

    def check_intact(self, intact: bool) -> None:
        """Before a forward. Raises where an earlier one was interrupted, or attention did not get its keys. `intact`:
        nobody has replaced the model's attention since the seams went on; else no interruption kept keys from it."""
        shared = self.shared
        if intact and shared.step is None and shared.unseen is None and self._cropped is None:
            return
        if intact:
            self.check_whole()
        shared.check_seam()
        if not intact and any(layer.state == "tagged" for layer in self.offloaded):
            raise SeamLostError(SEAM_LOST)
        self.check_whole()

    def begin(self, kwargs: dict[str, Any], lengths: list[int], held: int, rows_of_ids: int) -> Step | None:
        """The step that a forward with these arguments makes: see `step.begin`. `lengths`: of the layers now, of which
        the largest is `held`."""
        batch = None
        for layer in self.offloaded:
            if layer.is_filled:
                batch = layer.history.rows // layer.rows.heads
                break
        candidates = self.recording and self._prefilled and self._announced is not False
        announced, self._announced = self._announced, None if self._announced is None else False
        self.conversation.begin(held)
        step = begin(
            kwargs, self.config, self.tokens, lengths, batch, compare=self._resumed, candidates=candidates,
            rows_of_ids=rows_of_ids,
        )  # fmt: skip
        self._most_cropped = None
        if step is not None:
            if announced and self.config.memory is not None and step.tokens > MOST_CANDIDATES:
                self._most_cropped = kept_logits(kwargs)
            self.shared.step, self._resumed = step, False
        return step

    def end(self, step: Step | None) -> None:
        """A forward has run to its end: keep the ids."""
        if step is not None and step.ids is not None:
            self.tokens.append(step.ids, step.history, step.padding)
        self.shared.step = None
        self._prefilled = True
        if step is not None and step.selects:
            self._decoded, self._activated = True, False
        for layer in self.offloaded:
            if layer.state == "unknown":  # attention did not ask for what is held
                layer.end_step()

    def fail(self) -> None:
        """A forward has failed: what it has added is taken back at the next call; no guess of it counts any more."""
        self.conversation.fail()
        if self.shared.step is not None:
            self.shared.step.guessed = 0

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
        pairs = zip(self.with_length, lengths, step.lengths, strict=True)
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
        self.tokens.truncate(min(self.tokens.length, step.history))  # the step's, if it was at its very end
        shared.step = shared.unseen = shared.front = None
        return True

    def check_whole(self) -> None:
        """Raises `RuntimeError`, once, where a forward was interrupted: whoever calls has counted on what it added."""
        if self.take_back():
            raise RuntimeError(
                "an earlier forward was interrupted; what it had added to some layers was taken back, and the cache "
                f"holds {self.held():,} tokens a sequence again, as before it: call again, with what follows these"
            )

    # --- fewer tokens ------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """See `OffloadCache.crop`."""
        self.take_back()
        self.shared.check_open()
        for layer in self.kept:
            if tokens_to_remove and not crops_all(layer):
                raise UnsupportedModelError(
                    f"a {type(layer).__name__} cannot be cropped, because its crop leaves what it keeps besides keys "
                    "and values; nothing was cropped: reset() the cache, and give it the tokens to keep"
                )
        length = self.tokens.length
        kept = min(length, max(0, tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove))
        self.shared.books_changed = True
        for layer in self.kept:
            check_recorded(layer, length - kept)
        try:
            for layer in self.layers:
                layer.crop(tokens_to_remove)
            self.settle_kept()
        except BaseException as error:
            ours = all(isinstance(layer, OffloadLayer) for layer in self.layers) and not self.has_linear_state
            if not (ours and isinstance(error, StoreError) and set(self.lengths()) <= {length, kept}):
                self.shared.storage.torn = True
            else:
                self._cropped = kept
                error.add_note(f"some layers are cropped: the next call ends it, and the cache holds {kept:,} tokens")
            raise
        self.tokens.truncate(kept)

    def _end_crop(self) -> None:
        """Crop the layers that an earlier `crop` did not come to. Raises `StoreError`: the next call goes on."""
        assert self._cropped is not None
        self.shared.check_open()
        for layer in self.offloaded:
            if layer.length > self._cropped:
                layer.crop(self._cropped - layer.length)
        self.tokens.truncate(self._cropped)
        self._cropped = None

    def forget(self, model: PreTrainedModel | None) -> None:
        """Drop all tokens, and what was broken. `model`: the cache's, if it is still there."""
        self.shared.mend()
        self.shared.check_open()
        for layer in self.layers:
            layer.reset()
        self.conversation.forget()
        if model is not None:
            self._renew_kept(model)
        self._cropped = None
        self.tokens.truncate(0)

    def _renew_kept(self, model: PreTrainedModel) -> None:
        """transformers' own layers keep the batch size of their states: new ones take their places."""
        layers: list[Any] = list(DynamicCache(config=model.config).layers)
        for layer_idx, kept in enumerate(self.layers):
            if isinstance(kept, OffloadLayer):
                layers[layer_idx] = kept
            elif getattr(kept, "record_past", False):
                layers[layer_idx].activate_past_recording()
        self.set_layers(layers)

    # --- other rows --------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` is now."""
        self.take_back()
        self._select_rows("reorder_cache", beam_idx, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.take_back()
        rows = torch.arange(self.tokens.batch, device="cpu").repeat_interleave(repeats)
        self._select_rows("batch_repeat_interleave", repeats, rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows of these indices, or where a mask is true."""
        self.take_back()
        indices = torch.as_tensor(indices, device="cpu")
        rows = indices.nonzero().reshape(-1) if indices.dtype == torch.bool else indices
        self._select_rows("batch_select_indices", indices, rows)

    def _select_rows(self, change: str, argument: Any, rows: torch.Tensor) -> None:
        """Make sequence i the current sequence `rows[i]`, by calling each layer's method `change` with `argument`.
        Raises `BudgetError`, or `UnsupportedModelError` if a layer has state that cannot follow, with nothing changed.
        """
        batch = self.tokens.batch
        if len(rows) != batch:
            check_planned(self.config, len(rows), 0)
        for layer in {type(kept): kept for kept in self.layers if not isinstance(kept, OffloadLayer)}.values():
            select_kept_rows(layer, rows, batch, change, argument)
        self._settle_rows(rows)
        with self.shared.changing():
            for layer in self.layers:
                if isinstance(layer, OffloadLayer):
                    getattr(layer, change)(argument)
                else:
                    vars(layer).update(select_kept_rows(layer, rows, batch, change, argument))
            self.conversation.select_rows(rows, batch)
            self.tokens.select_rows(rows)

    def _settle_rows(self, rows: torch.Tensor) -> None:
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

    # --- contexts ----------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """All that is stored is immutable from now on, and on the disk. Raises what a write failed with.

        What records are streamed through is given back: a cache that was frozen may lie beside its forks for long."""
        self.take_back()
        self.shared.check_seam()
        self.conversation.check()
        self.shared.storage.release_stream_buffers()
        try:
            for layer in self.offloaded:
                layer.freeze()
        except Exception:
            raise
        except BaseException:  # a signal's can come between two lines
            self.shared.storage.torn = True
            raise

    def capture(self, sequences: int, tokens: int) -> dict[str, Any]:
        """What is held beside the layers: so many sequences of so many tokens; as a tree for `restore`."""
        return {"ids": self.tokens.capture(sequences, tokens), "model": self.conversation.capture()}

    def restore(self, tree: dict[str, Any]) -> None:
        """Hold what was captured; for a new cache."""
        self.tokens.restore(tree["ids"])
        self.conversation.restore(tree["model"], len(tree["ids"]))
        self._resumed = True

    def close(self) -> None:
        """Close the layers, and hold none."""
        for layer in self.offloaded:
            layer.close()
        self.tokens.truncate(0)
        self.set_layers([])
        self.account_live()
