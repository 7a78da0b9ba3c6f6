"""A cache's contents, changed together: its layers, the token ids, and what the model's own code keeps for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from ..config import OffloadConfig
from ..contexts.open import select_kept_rows
from ..errors import BudgetError, SeamLostError, StoreError, UnsupportedModelError
from ..memory.account import RECORDS, storage_bytes
from ..model.conversation import Conversation
from ..model.media import Medium
from ..model.plain_caches import crops_all
from ..report.progress import PromptProgress
from .layer import OffloadLayer
from .layers import check_recorded, kept_state, settle
from .read_only import Layers
from .shared import SEAM_LOST, Shared
from .step import MOST_CANDIDATES, NO_CANDIDATES, Step, begin, check_planned, check_prompt, kept_logits, repeats
from .token_log import TokenLog

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Contents:
    """Made by the cache, for the thread that runs the model. A change reaches all parts, or it is undone, or the cache
    cannot be used until `reset`.

    Attributes:
        layers: one for each layer of the model: `OffloadLayer`s, and transformers' own. An immutable list.
        offloaded: the layers whose history lies in a store.
        with_length: the layers that have a length.
        kept: the layers with state that is not offloaded.
        has_linear_state: some layer has a linear state, which does not tell its length.
        tokens: the ids and the padding.
        conversation: state that the model's own code keeps on the model for this cache.
        recording: candidates are being verified, so `crop` may undo a forward.
        is_reading: `generate` passes a prompt: see `Attachable.reading`.
    """

    def __init__(self, config: OffloadConfig, shared: Shared, layers: list[Any]) -> None:
        self.config = config
        self.shared = shared
        self.tokens = TokenLog(shared.storage.account, config.max_context)
        self.conversation: Conversation
        """Set by the cache once the seams are on."""
        self.recording = self.is_reading = False
        self._activated = False
        """`activate_past_recording` was called since the last decoding step."""
        self._decoded = False
        """A decoding step ended since the prompt."""
        self._prefilled = False
        """A forward ended since the prompt."""
        self._announced: bool | None = None
        """Whether `generate` announced the coming step as its own; None: no announcement since recording began."""
        self._most_cropped: int | None = None
        """Maximum tokens that a crop after the forward removes; None: no limit. Set for a prompt of `generate` under a
        budget that the recorded prompt would exceed."""
        self._resumed = False
        """Restored, and not yet compared with the next step."""
        self._cropped: int | None = None
        """The length that an unfinished crop has to reach, after a failed read: see `_end_crop`."""
        self.set_layers(layers)
        self._progress = PromptProgress(len(layers)) if config.progress else None

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
        """Number of stored tokens a sequence, for each layer that has a length."""
        lengths = list[int]()
        layer: Any
        for layer in self.with_length:
            offloaded = isinstance(layer, OffloadLayer) and layer.is_filled
            lengths.append(layer.history.length if offloaded else layer.get_seq_length())
        return lengths

    def held(self) -> int:
        """Number of stored tokens a sequence, for any kinds of layers."""
        return max(self.lengths(), default=self.tokens.length)

    def kept_bytes(self) -> int:
        """Bytes of all state that is not offloaded: layers with sliding windows, linear states or indexers, and
        hybrids' linear states. Each storage counts once."""
        return storage_bytes([kept_state(layer) for layer in self.kept])

    def settle_kept(self, *layers: Any) -> None:
        """Reduce layers that are not offloaded (none given: all) to the memory they need. transformers slices a window
        from the tokens that a forward added, and the slice keeps all of them in memory. While candidates are verified,
        the tokens that a crop may remove stay."""
        for layer in layers or self.kept:
            settle(layer, self._most_cropped)

    def account_live(self) -> None:
        """Book what others allocate: transformers' own layers, and records that stores keep in memory."""
        storage = self.shared.storage
        storage.account.observe("layers not offloaded", self.kept_bytes())
        storage.account.observe(RECORDS, sum(store.memory_bytes for store in storage.stores))
        storage.account.observe("tables", sum(layer.tables_nbytes for layer in self.offloaded))
        self.shared.books_changed = False

    # --- candidates, which a crop may remove -------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """See `OffloadCache.activate_past_recording`."""
        if not self.config.candidates and not self.held():  # with tokens, `generate` may only want to take one back
            raise BudgetError(NO_CANDIDATES)
        self.recording, self._activated, self._announced = True, True, None

    def announce(self, *, first: bool) -> None:
        """Announce a step of `generate`, which verifies no candidates. `first`: a prompt's, or a chunk's of one."""
        self._announced = True
        if first:
            self._begin_generation()
            self._prefilled = False

    def _begin_generation(self) -> None:
        """Begin a prompt. If no candidates were announced since the last steps, none will follow, and layers keep only
        the state they need."""
        if self._decoded and not self._activated:
            self.recording = False
            for layer in self.layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = False
        self._decoded = False

    def dropped(self, model: str, input_ids: Any, inputs_embeds: Any) -> str | None:
        """The warning if a model of this name drops the stored tokens; None if its input begins with them."""
        held = self.held()
        if not held or repeats(self.tokens, held, input_ids, inputs_embeds):
            return None
        return (
            f"{model} dropped the tokens stored in this cache, and continues without them, as with DynamicCache: "
            "its rotary embedding changes at this length, and transformers passed on only the latest tokens; begin "
            "such a text with a prompt that is longer than that"
        )

    # --- a forward, from its beginning to its end --------------------------------------------------------------

    def check_intact(self, intact: bool) -> None:
        """Before a forward: raise if an earlier one was interrupted, or attention did not get its keys. `intact`: the
        model's attention was not replaced since the seams were attached. If it was, that, and not an interruption, kept
        the keys from it."""
        shared = self.shared
        if intact and shared.step is None and shared.unseen is None and self._cropped is None:
            return
        if intact:
            self.check_whole()
        shared.check_seam()
        if not intact and any(layer.state == "tagged" for layer in self.offloaded):
            raise SeamLostError(SEAM_LOST)
        self.check_whole()

    def check_prompt(self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None) -> None:
        """See `step.check_prompt`."""
        self.check_whole()
        check_prompt(self.tokens, self.held(), input_ids, inputs_embeds)

    def begin(self, kwargs: dict[str, Any], lengths: list[int], held: int, rows_of_ids: int) -> Step | None:
        """The step that a forward with these arguments makes: see `step.begin`. `lengths`: the layers' present lengths,
        of which `held` is the largest."""
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
        if self._progress is not None and self.shared.ends_after in (None, self._progress.layer):  # not `Filling`'s
            reads = step is not None and step.tokens > 1 and not step.selects
            self.shared.ends_after = self._progress.layer if reads else None
            if step is not None and reads:
                self._progress.begin(step.tokens)
        return step

    @contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """See `Attachable.reading`."""
        new = tokens - self.held()
        self.is_reading = True
        try:
            with nullcontext() if self._progress is None or new < 2 else self._progress.prompt(new):
                yield
        finally:
            self.is_reading = False

    def _end_progress(self, *, failed: bool) -> None:
        if self._progress is not None and self.shared.ends_after == self._progress.layer:
            self.shared.ends_after = None
            self._progress.fail() if failed else self._progress.end()

    def end(self, step: Step | None) -> None:
        """Keep the ids of a forward that ran to its end."""
        if step is not None and step.ids is not None:
            self.tokens.append(step.ids, step.history, step.padding)
        self.shared.step = None
        if self.shared.indexing is not None:
            self.shared.indexing.chosen = None  # of a long piece, as large as a layer's latents
        if self._progress is not None:
            self._end_progress(failed=False)
        self._prefilled = True
        if step is not None and step.selects:
            self._decoded, self._activated = True, False
        for layer in self.offloaded:
            if layer.state == "unknown":  # attention did not ask for the history
                layer.end_step()

    def fail(self) -> None:
        """Undo at the next call what a failed forward has added; its guesses no longer count."""
        self.conversation.fail()
        self._end_progress(failed=True)
        if self.shared.step is not None:
            self.shared.step.guessed = 0

    # --- undoing a forward -------------------------------------------------------------------------------------

    def take_back(self) -> bool:
        """Remove what an unfinished forward has added to some layers; returns whether there was anything to remove.

        Raises `RuntimeError` if that is impossible: a change was interrupted, or one of transformers' own layers is
        ahead, whose window or state cannot go back. Raises `StoreError` if a layer's read for it fails now; the next
        call removes the rest.
        """
        shared, step = self.shared, self.shared.step
        if self._cropped is not None:
            self._end_crop()
        if step is None:
            return False
        if not step.history:  # a layer may have room, or an indexer's keys, for sequences that are not there
            for one in self.offloaded:
                if not one.length:
                    one.reset()
        lengths = self.lengths()
        if lengths == step.lengths and not (step.entered and self.has_linear_state):
            shared.step = shared.unseen = shared.front = None  # it ended before it added anything
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
        self.tokens.truncate(min(self.tokens.length, step.history))  # removes the step's ids if they were added
        shared.step = shared.unseen = shared.front = None
        return True

    def check_whole(self) -> None:
        """Raise `RuntimeError`, once, if a forward was interrupted: the caller relies on what it added."""
        if self.take_back():
            raise RuntimeError(
                "an earlier forward was interrupted; the tokens that it had added were removed, and the cache holds "
                f"{self.held():,} tokens a sequence again, as before it: call again with the tokens that follow"
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
                error.add_note(f"some layers are cropped: after the next call the cache holds {kept:,} tokens")
            raise
        self._truncate(kept)

    def _truncate(self, kept: int) -> None:
        """Keep the first `kept` ids, and their media."""
        if any(medium.stop > kept for medium in self.tokens.media):
            self.conversation.forget_positions()
        self.tokens.truncate(kept)

    def _end_crop(self) -> None:
        """Crop the layers that an earlier `crop` did not reach. Raises `StoreError`; the next call continues."""
        assert self._cropped is not None
        self.shared.check_open()
        for layer in self.offloaded:
            if layer.length > self._cropped:
                layer.crop(self._cropped - layer.length)
        self._truncate(self._cropped)
        self._cropped = None

    def forget(self, model: PreTrainedModel | None) -> None:
        """Drop all tokens and errors. `model`: the cache's, if it still exists."""
        self.shared.mend()
        self.shared.check_open()
        for layer in self.layers:
            layer.reset()
        self.conversation.forget()
        if model is not None:
            self._renew_kept(model)
        self._cropped = None
        self.tokens.truncate(0)
        self.account_live()

    def _renew_kept(self, model: PreTrainedModel) -> None:
        """Replace transformers' own layers, which would keep their states' batch size, by new ones."""
        layers: list[Any] = list(DynamicCache(config=model.config).layers)
        for layer_idx, kept in enumerate(self.layers):
            if isinstance(kept, OffloadLayer):
                layers[layer_idx] = kept
            elif getattr(kept, "record_past", False):
                layers[layer_idx].activate_past_recording()
        self.set_layers(layers)

    # --- other rows --------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row i by the present row `beam_idx[i]`."""
        self.take_back()
        self._select_rows("reorder_cache", beam_idx, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.take_back()
        rows = torch.arange(self.tokens.batch, device="cpu").repeat_interleave(repeats)
        self._select_rows("batch_repeat_interleave", repeats, rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows with these indices, or those where a mask is true."""
        self.take_back()
        indices = torch.as_tensor(indices, device="cpu")
        rows = indices.nonzero().reshape(-1) if indices.dtype == torch.bool else indices
        self._select_rows("batch_select_indices", indices, rows)

    def _select_rows(self, change: str, argument: Any, rows: torch.Tensor) -> None:
        """Replace sequence i by the present sequence `rows[i]`: calls each layer's method `change` with `argument`.

        Raises `BudgetError` for more rows than `max_batch`, or `UnsupportedModelError` if a layer's state cannot
        follow, with nothing changed. Without `max_batch` a layer may exceed `memory` halfway: then `BudgetError` leaves
        a cache that needs `reset`."""
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
        """Read what layers need before row i becomes the present row `rows[i]`, while nothing has changed. Raises
        `StoreError`; the cache stays usable then."""
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
        """Make all stored records immutable, and write them to the disk. Raises the error of a failed write.

        Frees the stream buffers, because a frozen cache may exist next to its forks for long."""
        self.take_back()
        self.shared.check_seam()
        self.conversation.check()
        self.shared.storage.release_stream_buffers()
        try:
            for layer in self.offloaded:
                layer.freeze()
        except Exception:
            raise
        except BaseException:  # a signal can strike between two lines
            self.shared.storage.torn = True
            raise

    def capture(self, sequences: int, tokens: int) -> dict[str, Any]:
        """The state besides the layers, for `sequences` of `tokens` tokens, as a tree for `restore`."""
        tree = {"ids": self.tokens.capture(sequences, tokens), "model": self.conversation.capture()}
        return tree if not self.tokens.media else {**tree, "media": list(map(tuple, self.tokens.media))}

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a captured state; for a new cache."""
        self.tokens.restore(tree["ids"], (Medium(*one) for one in tree.get("media", ())))
        self.conversation.restore(tree["model"], len(tree["ids"]))
        self._resumed = True

    def close(self) -> None:
        """Close the layers and drop them. A forward that did not end is dropped, too: the next one raises."""
        self.shared.step = None
        for layer in self.offloaded:
            layer.close()
        self.tokens.truncate(0)
        self.set_layers([])
        self.account_live()
