"""One layer of an offloaded cache: its `update`, and attention over its stored tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from ..config import BLOCK_TOKENS, OffloadConfig
from ..errors import PromptError, not_whole
from ..fetch.storage import DryStorage
from ..history.base import History, Sealed
from ..history.position_history import PositionHistory
from ..history.records import RecordFormat, unpacking_bytes, without_autocast
from ..kernels.on_a_device import to_device
from ..memory.account import RECORDS
from ..memory.dry_run import DryRun
from ..memory.plan import LayerPlan
from ..model.attention_call import TAG, AttentionCall, Tag
from ..model.masks import hiding
from ..model.place import no_backward
from ..stores.base import FreezableStore
from .plan import LayerKind, place_bytes, stream_bytes, streamed
from .read_only import ReadOnlyTensor, refuse_assignment
from .shared import Shared
from .step import ForwardEnded, Step

# Rows of a history: sequences, or the key heads of sequences, each with its own records

@dataclass(frozen=True)
class Rows:
    """Mapping of key heads to rows. `heads` 1: a sequence's key heads share a row. Otherwise each key head is a row,
    sequence by sequence."""

    heads: int = 1

    def fold(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B, Hk, t, D) as (B Hk, 1, t, D)."""
        return tensor if self.heads == 1 else tensor.flatten(0, 1).unsqueeze(1)

    def unfold(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B Hk, 1, t, D) as (B, Hk, t, D)."""
        return tensor if self.heads == 1 else tensor.squeeze(1).unflatten(0, (-1, self.heads))

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """Row indices of the sequences with these indices."""
        if self.heads == 1:
            return rows
        return (rows[:, None] * self.heads + torch.arange(self.heads, device=rows.device)).reshape(-1)


STATES = ("unknown", "tagged", "full")

Output = tuple[torch.Tensor, torch.Tensor | None]
"""(B, q, H, Dv), and the attention weights if the model's own function returned some."""


class OffloadLayer(CacheLayerMixin):
    """A full-attention layer whose history lies in a store; the base of every method's layer.

    States (`state`): "unknown": `update` returns the complete history, tagged, which is correct under any attention.
    "tagged": attention has returned the tag; `update` returns only the step's tokens, and `attend` reads the others.
    "full": attention cannot be replaced; `update` returns the complete history, read from the store.
    """

    is_sliding = False
    is_croppable = True
    offloaded = True
    """Its history lies in a store: it is captured and restored, not copied."""
    keeps_more = False
    """It keeps more in memory than keys and values, which every token adds to: an indexer's keys."""
    num_stores = 1
    """Number of stores that it opens, each with its own file on a disk."""

    def __init__(self, shared: Shared, layer_idx: int, place: int | None = None, **kwargs: Any) -> None:
        """`place`: index among the offloaded layers; default `layer_idx`."""
        self.name = f"layer {layer_idx}"
        self.history: History
        """The stored tokens; not set before the first `update`."""
        self.is_filled = False
        """It has a history; `is_initialized`, which transformers' constructor assigns, shows it."""
        super().__init__(**kwargs)
        self.shared = shared
        self.layer_idx = layer_idx
        self.config = shared.config.of_layer(layer_idx if place is None else place)
        self.state = "full" if self.config.exact == "bitwise" else "unknown"
        self.dtype: torch.dtype | None = None
        """Type of keys and values; None before the first `update`."""
        self.device: torch.device | None = None
        """Device of the added keys and values, and of `keys` and `values`; None before the first `update`."""
        self._clear()

    def _clear(self) -> None:
        """Become empty, as a new layer is."""
        self.is_filled = False
        self.rows = Rows()
        self._sealed: Sealed | None = None
        self._rows_moved = False
        """Rows were selected since unused records were last freed."""

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys (B, Hk, T, Dk) as in a `DynamicLayer`, a complete copy; None before the first `update`.

        For models and methods that read a cache's layers. Assigning them, or writing to the copy, raises
        `ReadOnlyError`."""
        return self._shown(0)

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keep("keys", keys is None and not self.is_filled)

    @property
    def values(self) -> torch.Tensor | None:
        """Values (B, Hv, T, Dv), as for `keys`."""
        return self._shown(1)

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._keep("values", values is None and not self.is_filled)

    @property
    def is_initialized(self) -> bool:
        """Whether `update` was called since construction or `reset`. Assigning another value raises `ReadOnlyError`."""
        return self.is_filled

    @is_initialized.setter
    def is_initialized(self, initialized: bool) -> None:
        self._keep("is_initialized", initialized == self.is_filled)

    def _keep(self, name: str, same: bool) -> None:
        """Allow assignments that change nothing, as transformers' constructors make; refuse all others."""
        if not same:
            refuse_assignment(self.name, name)

    def _shown(self, part: int) -> torch.Tensor | None:
        if not self.is_filled:
            return None
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode do not count writes
            return ReadOnlyTensor.of(self.whole()[part])

    @property
    def length(self) -> int:
        """Number of stored tokens a sequence."""
        return self.history.length if self.is_filled else 0

    @property
    def history_device(self) -> torch.device:
        """Device of the added keys and values; the CPU if the layer is empty."""
        return self.history.device if self.is_filled else torch.device("cpu")

    @property
    def batch(self) -> int:
        """Number of sequences; 0 before the first `update`."""
        return self.history.rows // self.rows.heads if self.is_filled else 0

    @property
    def stored_batch(self) -> int:
        """As `batch`, also if it stores something else than keys and values."""
        return self.batch

    def whole(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, Hk, T, Dk) and values of everything before token `stop` (None: all), new and contiguous."""
        keys, values = self.history.whole(stop)
        return self.rows.unfold(keys), self.rows.unfold(values)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add keys (B, Hk, t, Dk) and values (B, Hv, t, Dv) that were computed elsewhere, behind the stored ones.

        As `update` and attention after it, except that a method learns nothing from queries. Copies its arguments.
        Raises as `update` does; then nothing was added, or the cache cannot be used until `reset`."""
        self.shared.check_open()
        if not self.is_filled:
            self.lazy_initialization(keys, values)
        held = self.history.length
        try:
            sealed = self.history.append(*self.kept(keys, values))
            self.shared.books_changed = True
            self._sealed = sealed if sealed.parts else None
            self.learn_alone()
        except BaseException:
            self.shared.storage.torn |= self.history.length != held
            raise

    def kept(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the history's type and rows."""
        dtype = self.history.form.dtype
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        if not keys.dtype == values.dtype == dtype:
            keys, values = keys.to(dtype), values.to(dtype)
        if self.rows.heads == 1:
            return keys, values
        return keys.flatten(0, 1).unsqueeze(1), values.flatten(0, 1).unsqueeze(1)  # as `Rows.fold`

    def learn_alone(self) -> None:
        """Learn from sealed units without queries."""
        sealed, self._sealed = self._sealed, None
        if sealed is not None:
            self.learn_keys(sealed)

    def learn_keys(self, sealed: Sealed) -> None:
        """As `learn`, for units that were added without queries."""

    def get_seq_length(self) -> int:
        return self.history.length if self.is_filled else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The complete logical length, so that each step's mask covers the history, padding included."""
        return (self.history.length if self.is_filled else 0) + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the latest `-tokens_to_remove` tokens (a positive number: keep that many). Reads a few units back if the
        tail is too short."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        if tokens_to_remove > 0:  # the length to keep, as in earlier versions
            tokens_to_remove = min(0, tokens_to_remove - self.length)
        if tokens_to_remove == 0 or not self.is_filled:
            return
        self._sealed = None
        self.cropped()
        freed = self.history.truncate(max(0, self.length + tokens_to_remove))
        if freed is not None:
            self.truncated(self.history.units)
            self.dropped(freed)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace row i by the present row `beam_idx[i]`; moves no stored data, except what `settle_rows` reads."""
        if self.stored_batch and beam_idx.tolist() != list(range(self.stored_batch)):
            self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.stored_batch:
            self.select_rows(torch.arange(self.stored_batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.stored_batch:
            indices = torch.as_tensor(indices, device="cpu")
            self.select_rows(indices.nonzero().reshape(-1) if indices.dtype == torch.bool else indices)

    def settle_rows(self, rows: torch.Tensor) -> None:
        """Read what `select_rows` would have to read first, so that it cannot raise `StoreError`. Raises `StoreError`
        with nothing changed that a step would see."""

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace sequence i by the present sequence `rows[i]`, in every part that has rows."""
        self._sealed, self._rows_moved = None, True
        self.history.select_rows(self.rows.expand(rows))

    def reset(self) -> None:
        """Drop all tokens and free the file and the buffers; the layer can be used again."""
        self.close()
        if self.config.exact != "bitwise":
            self.state = "unknown"

    def end_forward(self) -> None:
        """End the forward, as soon as this layer has all that it adds. Raises `ForwardEnded`."""
        raise ForwardEnded

    def end_step(self) -> None:
        """Drop what only the step needed, in case attention did not use it."""
        self._sealed = None

    def close(self) -> None:
        """Free the file and the buffers."""
        if self.is_filled:
            self.history.close()
            self._clear()
            del self.history

    def offload(self) -> None:
        """Do nothing: entries are offloaded as they are added."""

    def prefetch(self) -> None:
        """Do nothing: the cache prefetches by itself."""

    def dropped(self, records: np.ndarray) -> None:
        """Handle records that were freed: they contain none of the layer's tokens any more."""

    def cropped(self) -> None:
        """Prepare for a crop of the latest tokens."""

    def truncated(self, units: int) -> None:
        """Keep only the first `units` sealed units."""

    # --- memory ------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Number of tokens a row that have left the tail."""
        return self.history.length - self.history.recent.shape[1]

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the tables that say where the history lies and what was written there."""
        return self.history.tables_nbytes if self.is_filled else 0

    @property
    def full_bytes(self) -> int:
        """Bytes that `DynamicCache` would need for this layer now."""
        return self.history.rows * self.length * self.history.form.entry_bytes if self.is_filled else 0

    @property
    def replica_bytes(self) -> int:
        """Bytes on the disk of copies in fewer bits of other stored entries."""
        return 0

    # --- adding tokens -----------------------------------------------------------------------------------------

    @classmethod
    def plan(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        """Maximum memory of a layer with `context` tokens a row: a dry run of its constructors, which allocates no
        tensor and opens no file. `config`: the layer's own."""
        storage: Any = DryStorage(config, kind.device)
        layer = cls(Shared(config, storage), 0)
        layer.config = config
        rehearse = OffloadLayer.rehearse if config.exact and not cls.keeps_more else cls.rehearse
        rehearse(layer, storage.account, kind, context)
        plan: LayerPlan = storage.plan
        return plan

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        """Make all parts as large as `context` tokens a row can make them, in a dry run. A method with more parts
        extends this, for steps that select."""
        self.rehearse_history(run, kind, context)
        run.stages("stream buffers", decode=stream_bytes(kind, self.config, self._records(kind)))
        run.passes("stream buffers", decode=place_bytes(kind, self.config, self._records(kind)), together=True)

    def rehearse_history(self, run: DryRun, kind: LayerKind, context: int) -> None:
        """Rehearse the history, its stores, and the buffers that a prefill streams it through."""
        self.rows = Rows(kind.rows // kind.batch)
        self._hold(self.make_history(kind.form, kind.rows, torch.device(kind.device)))
        self.history.rehearse(run, context)
        run.keeps("tables", self.history.tables_nbytes)
        run.keeps(RECORDS, sum(store.memory_bytes for store in self.shared.storage.stores))
        records = self._records(kind)
        run.stages("stream buffers", prefill=stream_bytes(kind, self.config, records))
        run.passes("stream buffers", prefill=place_bytes(kind, self.config, records), together=True)
        unpacked = unpacking_bytes(kind.form, kind.rows * streamed(kind, self.config, records))
        run.passes("unpacked entries", prefill=unpacked)

    def _records(self, kind: LayerKind) -> int:
        """Records a row, at most, of a rehearsed history."""
        store: Any = self.history.store
        records: int = -(-store.records // kind.rows)
        return records

    def make_history(self, form: RecordFormat, rows: int, device: torch.device) -> History:
        """An empty history; a method with its own order overrides this and `restore_history`."""
        return PositionHistory(self.shared.storage, form, rows, device, self.config, self.name)

    def restore_history(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> History:
        """The history that `tree` was captured from, over the frozen `parts`."""
        return PositionHistory.restore(self.shared.storage, tree, parts, device, self.config, self.name)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.rows = Rows(key_states.shape[1] if self.config.heads_apart else 1)
        keys, values = self.rows.fold(key_states), self.rows.fold(value_states)
        form = RecordFormat.of(keys, values, self.config.group_size, self.config.stored_bits)
        self._hold(self.make_history(form, keys.shape[0], keys.device))

    def _hold(self, history: History) -> None:
        self.history, self.is_filled = history, True
        self.dtype, self.device = history.form.dtype, history.device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys (B, Hk, t, Dk) and values (B, Hv, t, Dv); return the tensors for the model's attention.

        These are views of the arguments ("tagged", or an empty history), else new tensors with the complete history.
        The arguments are copied: the caller may reuse them after attention. Keys and values of two types, as
        `torch.autocast` makes them, are stored in the type that attention casts both to. Raises `SeamLostError`,
        `PromptError` and `StoreFullError` before anything is added. After a `StoreError` the tokens already added are
        removed, or, without a forward around it, the cache cannot be used until `reset`.
        """
        shared, storage, kind = self.shared, self.shared.storage, key_states.device.type
        if shared.step is None or storage.torn or storage.prefetcher.interrupted_by is not None:
            shared.check_open()
        if shared.unseen is not None:
            shared.check_seam()
        if not self.is_filled:
            self.lazy_initialization(key_states.detach(), value_states.detach())
        if key_states.shape[0] * self.rows.heads != self.history.rows:
            raise PromptError(
                f"layer {self.layer_idx} holds {self.batch} sequences and was given {key_states.shape[0]}: "
                "use a new cache, or reset(), for a batch of another size"
            )
        held = self.history.length
        if self.state == "tagged":
            front = shared.front
            if front is not None and self.layer_idx > front[0] and held != front[1]:
                shared.differ()
            shared.front = self.layer_idx, held
        try:
            if torch.is_autocast_enabled(kind) or torch.is_autocast_enabled("cpu"):
                with without_autocast(key_states.device):
                    return self._take_in(key_states, value_states)
            return self._take_in(key_states, value_states)
        except BaseException as error:
            shared.step_failed(error, taken=self.history.length != held)
            raise

    def _take_in(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        history, step = self.history, self.shared.step
        guessed = 0 if step is None else step.guessed
        keys, values = self.kept(key_states, value_states)
        if guessed:
            keys, values = keys[:, :, :-guessed], values[:, :, :-guessed]
        length = history.length
        whole = length == 0 or self.state != "tagged"
        if not length:  # as in DynamicCache: the layout decides the last bits of some kernels' results
            key_states, value_states = key_states.contiguous(), value_states.contiguous()
        elif whole:
            old_keys, old_values = self.whole()
            key_states = torch.cat([no_backward(old_keys, key_states), key_states], 2)
            value_states = torch.cat([no_backward(old_values, value_states), value_states], 2)
        if self._rows_moved and (freed := history.sweep()) is not None:
            self._rows_moved = False
            self.dropped(freed)
        timeline = self.shared.storage.timeline
        if timeline.on:
            with timeline.span("append", self.layer_idx):
                sealed = history.append(keys, values)
        else:
            sealed = history.append(keys, values)
        if sealed.parts:
            self.shared.books_changed = True
        if self.state == "full":
            return key_states, value_states
        self._sealed = sealed if sealed.parts else None
        tag = Tag(self, whole)
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        key_states.__dict__[TAG] = value_states.__dict__[TAG] = tag
        if not whole:
            self.shared.unseen = self.layer_idx
        return key_states, value_states

    @property
    def guessed(self) -> int:
        """As `Step.guessed`."""
        step = self.shared.step
        return 0 if step is None else step.guessed

    # --- attention ---------------------------------------------------------------------------------------------

    def attend(self, call: AttentionCall) -> Output:
        """The model's attention over the layer's complete history (a sparse method: over its selection).

        Called with what `update` returned in this step, once or (KV sharing) several times. An error loses the step
        and nothing else.
        """
        self.shared.unseen, kind = None, call.query.device.type
        try:
            if torch.is_autocast_enabled(kind) or torch.is_autocast_enabled("cpu"):
                with without_autocast(call.query.device):
                    return self._attend(call)
            return self._attend(call)
        except BaseException as error:
            self.shared.step_failed(error, taken=True)
            raise

    def _attend(self, call: AttentionCall) -> Output:
        tag, kwargs, step = getattr(call.key, TAG, None), call.kwargs, self.shared.step
        assert tag is not None
        replaceable = call.replaceable(self.history.length + (0 if step is None else step.guessed))
        self.state = "tagged" if replaceable and self.state != "full" else "full"
        sealed, self._sealed = self._sealed, None
        if step is None:
            step = Step.alone(self.batch, self.length - call.key.shape[2], call.key.shape[2])
        if sealed is not None and replaceable:
            with self.shared.storage.timeline.span("summarise", self.layer_idx):
                self.learn(sealed, call, step)
        if not replaceable or call.wants_weights or kwargs.get("dropout"):  # the last two only concern this step
            keys, values = call.key, call.value
            if not tag.whole:
                keys, values = self.joined(call)
            return call.run(keys, values, call.mask)
        if self.shared.attend_prompt is not None and call.query.shape[2] > 1:
            return self.shared.attend_prompt(self, call)
        return self.exact(call) if tag.whole or not step.selects else self.decode(call, step)

    def decode(self, call: AttentionCall, step: Step) -> Output:
        """Attention in a step that selects; here over all tokens."""
        return self.exact(call)

    def exact(self, call: AttentionCall) -> Output:
        """Attention over all stored tokens: by the model's own function if they fit one block, else streamed.

        A layer that shares another's KV may attend with its last token only, so there may be more keys than queries.
        """
        dtype, before = self.history.form.dtype, self.before(call)
        if (tag := call.tag) is not None and tag.whole:
            return call.run(call.key, call.value, call.mask)
        if before + call.key.shape[2] <= (self.config.block_tokens or BLOCK_TOKENS):
            return call.run(*self.joined(call), call.mask)
        step, mask, seen, added = self.shared.step, call.mask, None, call.key.shape[2]
        if step is not None and mask is not None and call.num_queries == mask.shape[2] == added:
            mask, seen = step.streamed(mask)
        asked = call.query.dtype
        if asked != dtype:
            call = dataclasses.replace(call, query=call.query.to(dtype))
        added_kv = call.key.to(dtype), call.value.to(dtype)
        output, weights = call.stream(self.blocks(before, mask is None is seen), added_kv, mask, seen)
        return output.to(asked), weights

    def before(self, call: AttentionCall) -> int:
        """Number of stored tokens before the call's own."""
        return self.length + self.guessed - call.key.shape[2]

    def joined(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """All stored tokens and the call's own: the latter as stored for one query, as given for several."""
        if call.num_queries == 1 and not self.guessed:
            keys, values = (no_backward(tensor, call.query) for tensor in self.whole())
            return keys, values
        if not self.before(call):
            return call.key, call.value
        held = zip(self.whole(self.before(call)), (call.key, call.value), strict=True)
        keys, values = (torch.cat([no_backward(old, call.query), new], 2) for old, new in held)
        return keys, values

    def blocks(
        self, stop: int, plain: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Keys and values (B, Hkv, t, D) before token `stop`, in blocks, and their positions, (B, Hkv, t) or (B, t).
        `plain`: no mask needs the positions. A block without empty entries is then given without, and on a CUDA device
        one with some has a mask in their place: see `stream_attention`."""
        heads, device = self.rows.heads, self.history.device
        for block in self.history.blocks(stop):
            positions, places = block.positions, None
            if positions is not None and self.config.heads_apart:
                positions = positions.reshape(-1, heads, positions.shape[1])
            empty = None if positions is None or not plain else positions < 0
            if empty is not None and not empty.any():
                positions = None
            if positions is not None and device.type == "cuda" and empty is not None and not empty.all(-1).any():
                of_heads = empty.reshape(len(empty), -1, empty.shape[-1])
                places = hiding(of_heads, self.history.form.dtype, device)
            elif positions is not None:
                places = to_device(positions, device) if device.type == "cuda" else torch.from_numpy(positions)
            yield self.rows.unfold(block.keys), self.rows.unfold(block.values), places

    # --- for a method to override ------------------------------------------------------------------------------

    def learn(self, sealed: Sealed, call: AttentionCall, step: Step) -> None:
        """Learn from the units that the `update` before this call sealed."""

    # --- contexts ----------------------------------------------------------------------------------------------

    def freeze(self) -> Sequence[FreezableStore]:
        """As `History.freeze`; does nothing for an empty layer. Frees unused records first."""
        if not self.is_filled:
            return ()
        if (freed := self.history.sweep(always=True)) is not None and len(freed):
            self.dropped(freed)
        return self.history.freeze()

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        """As `History.live`; `parts` are what `freeze` returned."""
        return self.history.live(parts) if self.is_filled else []

    def capture(self) -> dict[str, Any]:
        """All state besides the records, as a tree of values and tensors for `restore`: not to be changed, and valid
        until the next change."""
        state = "unknown" if self.config.exact == "bitwise" else self.state
        tree = {"state": state, "history": self.history.capture() if self.is_filled else None}
        return {**tree, "heads": self.rows.heads} if self.config.heads_apart else tree

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        """Take over a captured `tree`, over its frozen stores. Reads and computes nothing.

        Raises `ContextError`, `BudgetError`; the layer owns `parts` only after it has returned.
        """
        if tree["state"] not in STATES or (tree["history"] is None and parts):
            what = f"its state is {tree['state']!r}, expected one of {STATES}, with {len(parts)} files of records"
            raise not_whole(self.name, what)
        if tree["history"] is not None:
            heads = tree["heads"] if self.config.heads_apart else 1
            rows = tree["history"]["tail"].shape[0]
            if type(heads) is not int or heads < 1 or rows % heads:
                raise not_whole(self.name, f"it has {rows} rows, for {heads!r} heads each")
            self._hold(self.restore_history(tree["history"], parts, device))
            self.rows = Rows(heads)
        if self.config.exact != "bitwise":
            self.state = tree["state"]
