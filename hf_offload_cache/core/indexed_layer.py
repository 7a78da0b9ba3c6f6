"""A layer whose model chooses by an indexer what it attends to: exact, and sparse at the same time.

DeepSeek V3.2 and its successors. The indexer's keys stay in memory, all else lies in the store. The model's code runs
as with `DynamicCache`, except that attention gets only the entries that the indexer chose.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import torch

from ..config import OffloadConfig, SelectiveConfig
from ..errors import BudgetError, not_whole, shown
from ..fetch.areas import records_soon
from ..fetch.choice import Choice
from ..fetch.fetcher import Fetcher
from ..fetch.tier import slot_tiers
from ..history.records import stored_dtype
from ..kernels.on_a_device import to_device
from ..memory.account import LATENTS
from ..memory.dry_run import DryRun
from ..memory.plan import LayerPlan
from ..model.attention_call import TAG, AttentionCall, untraced
from ..model.chosen_latents import attend_to_latents, bytes_of_call, planned_bytes
from ..model.look_ahead import IndexerGuess, LookAhead
from ..model.masks import shown as visible_in
from ..model.place import no_backward
from ..model.stream_attention import Block
from ..report.trace import NOTHING
from ..stores.base import FreezableStore
from . import device_step
from .gathered_mask import additive, choice_of, complete_mask, gather_tokens, marked, seen_by, units_of
from .indexer_keys import (
    OWNER,
    CodedIndexerKeys,
    IndexerKeys,
    StoredIndexerKeys,
    StreamedIndexerKeys,
    parts_of,
)
from .layer import OffloadLayer, Output, Rows
from .plan import LayerKind, indexed_form, place_bytes, stream_bytes, streamed
from .selecting import Asked, Guessing, Indexing, most_slots
from .shared import Shared
from .step import MOST_CANDIDATES, ForwardEnded, Step


class IndexedLayer(OffloadLayer):
    """The model's indexer chooses for every query, and attention sees nothing else: with `DynamicCache` the model hides
    the other tokens by a mask. So steps read only what was chosen, and are exact in spite of that.

    A step of one query, or of few, gathers the chosen entries. One of more queries streams the history in blocks, and
    attends to what any of its queries chose.
    """

    keeps_more = True
    selects = True
    """Its steps read what the indexer chose."""

    config: OffloadConfig

    def __init__(
        self, shared: Shared, layer_idx: int, place: int | None = None, topk: int = 0, **kwargs: Any
    ) -> None:
        """`topk`: tokens that its indexer chooses, if it scores each by that token's key alone; otherwise 0."""
        if shared.indexing is None:
            shared.indexing = Indexing(shared.config, shared.storage)
        self.indexing: Indexing = shared.indexing
        self.topk, self._asked = topk, cast("Asked | None", None)
        self.indexer = self._new_indexer(shared, layer_idx)
        self.most_chosen = 0
        """The most tokens that an indexer chose for a query."""
        super().__init__(shared, layer_idx, place, **kwargs)
        if self.config.stored_bits is not None:
            self.config = replace(self.config, entry_bits=None)  # type: ignore[call-arg]  # these layers are exact
        self.indexing.layers.append(weakref.ref(self))

    def _new_indexer(self, shared: Shared, layer_idx: int) -> IndexerKeys:
        config = shared.config
        if config.indexer_bits is None or not self.topk:
            return IndexerKeys(shared.storage.account, config.max_context)
        kind = CodedIndexerKeys if config.indexer_bits else StreamedIndexerKeys
        return kind(shared.storage, config, self.indexing.areas, layer_idx, f"layer {layer_idx}")

    def _clear(self) -> None:
        super()._clear()
        self._fetcher: Fetcher | None = None
        self._made_for = 0, 0  # rows, slots
        self.on_device, self.device_slots, self.over_host = False, None, None  # as of a `SelectiveLayer`
        self._ends = False
        """The forward ends here as soon as its indexer's keys are added, or attention shows that there are none."""
        self.read_early = False
        """Reads for the latest step of one query began in the layer before it, or before the first one."""

    # --- what the model's code uses ----------------------------------------------------------------------------

    def _shown(self, part: int) -> torch.Tensor | None:
        """As in `OffloadLayer`. Within a forward, where the code of models asks for sizes, a tensor without data."""
        if not self.is_filled or self.shared.step is None:
            return super()._shown(part)
        form, rows = self.history.form, (self.batch, self.history.length)
        heads, dim = ((form.num_key_heads, form.key_dim), (form.num_value_heads, form.value_dim))[part]
        return torch.empty(rows[0], heads, rows[1], dim, dtype=form.dtype, device="meta")

    @untraced
    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Add the indexer's keys (B, t, D) of a step; returns those of all tokens (B, T, D), valid until the next call.
        Within `run_indexer`, which calls the model's code several times, they are added once, and what is returned is
        what it asks for. Raises `BudgetError` and `StoreError`, after which the step's tokens are removed."""
        if torch.compiler.is_dynamo_compiling():
            return cast(torch.Tensor, IndexedLayer.update_indexer.outside(self, indexer_key_states))
        step = self.shared.step
        if step is None:
            self.shared.check_open()
        asked, indexer = self._asked, self.indexer
        held = indexer.length if step is None else min(indexer.length, step.history)
        if asked is not None:
            if not asked.added:
                asked.add(indexer_key_states)
                asked.added = True
            return asked.keys()
        try:
            if self._ends:
                indexer.add(indexer_key_states, held)
                self._end()
            return indexer.append(indexer_key_states, held)
        except BaseException as error:
            self.shared.step_failed(error, taken=True)
            raise

    def run_indexer(self, forward: Callable[..., torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
        """What `forward`, a forward of the model's indexer with these arguments, returns. With keys in a store, in a
        step of few queries: indices (B, q, K) by scores of the keys in parts. Raises as `update_indexer` does."""
        indexer, step = self.indexer, self.shared.step
        if not isinstance(indexer, StoredIndexerKeys):
            return forward(**given)
        mask, held = given.get("attention_mask"), 0 if step is None else min(indexer.length, step.history)
        if step is None or not held or not isinstance(mask, torch.Tensor) or mask.ndim != 3:
            return forward(**given)
        count = min(self.topk, held + step.tokens)
        plain = not step.selects or self.config.exact == "bitwise"
        if plain or mask.shape[2] != held + step.tokens or mask.shape[2] == count:
            with self.shared.storage.account.holding(OWNER, indexer.whole_bytes(held + step.tokens)):
                return forward(**given)
        self._asked = asked = Asked(partial(indexer.add, held=held))
        try:
            return indexer.choose(asked, forward, given, mask, self.topk)
        except BaseException as error:
            self.shared.step_failed(error, taken=True)
            raise
        finally:
            self._asked = None

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions (p, B, T) of the stored tokens, which some models keep here; None: there are none."""
        positions = self.indexer.positions
        return None if positions is None or not self.length else positions[..., : self.length]

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor | None) -> None:
        self.indexer.keep_positions(positions)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """As in `OffloadLayer`; all heads attend to the same tokens, so they have the same rows."""
        self.rows = Rows()
        sizes = (key_states.shape[1], key_states.shape[3], value_states.shape[1], value_states.shape[3])
        form = indexed_form(sizes, stored_dtype(key_states, value_states), self.config)
        self._hold(self.make_history(form, key_states.shape[0], key_states.device))
        self.on_device = device_step.reads_chosen(self)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `OffloadLayer`. In a sparse step the tensors have one token, whose tag has what the step added: the
        model's code makes keys and values of it, and hands these to attention."""
        step, self._ends = self.shared.step, False
        if not self.indexing.is_sparse(step) and self.state == "tagged":
            self.state = "unknown"  # attention says so again
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        tag = getattr(keys, TAG, None)
        if tag is None or tag.whole:
            return keys, values
        tag.own = key_states, value_states
        keys, values = (tensor[:, :, :1].view_as(tensor[:, :, :1]) for tensor in (keys, values))
        keys.__dict__[TAG] = values.__dict__[TAG] = tag
        return keys, values

    def end_forward(self) -> None:
        """As of `OffloadLayer`: models add an indexer's keys before or after this layer's, or none."""
        self._ends = self.indexer.length != self.length
        if not self._ends:
            self._end()

    def _end(self) -> NoReturn:
        self._ends = False
        raise ForwardEnded

    def take(self, keys: torch.Tensor, values: torch.Tensor, indexer: torch.Tensor | None = None) -> None:
        """As of `OffloadLayer`, with its own `indexer`'s keys (B, t, D)."""
        held = self.length
        super().take(keys, values)
        if indexer is not None:
            with self.shared.changing():
                self.indexer.add(indexer, held)

    # --- attention ---------------------------------------------------------------------------------------------

    def _attend(self, call: AttentionCall) -> Output:
        tag, step = call.tag, self.shared.step
        assert tag is not None
        self._sealed = None
        if self._ends:
            self._end()
        if tag.whole:
            if self.state != "full":
                known = call.kwargs.get("indices") is None and call.replaceable(self.history.length)
                self.state = "tagged" if known else "full"
            self._rest()
            return call.run(call.key, call.value, call.mask)
        assert tag.own is not None and step is not None
        with torch.no_grad():
            output, weights = self._attend_sparsely(call, step)
        return no_backward(output, call.query) if call.query.requires_grad else output, weights

    def _attend_sparsely(self, call: AttentionCall, step: Step) -> Output:
        """Attention to what the indexer chose."""
        chosen, storage, queries = self.indexing.chosen, self.shared.storage, call.num_queries
        if chosen is None:
            assert call.mask is not None
            self.most_chosen = max(self.most_chosen, int(visible_in(call.mask).sum(3).max()))
        else:
            self.most_chosen = max(self.most_chosen, chosen.shape[2])
        if call.wants_weights or call.kwargs.get("dropout"):
            mask = complete_mask(call, chosen, self.length)
            return call.run(*self.expanded(call, *self.whole()), mask)
        if not step.selects:
            self._rest()
        if step.selects and storage.stream_buffers and not isinstance(self.indexer, StreamedIndexerKeys):
            storage.release_stream_buffers()
        if queries == 1 and chosen is not None and self.on_device:
            output: Output | None = device_step.attend_to_chosen(self, call, chosen)
            if output is not None:
                return output
        if self.device_slots is not None:
            self.indexing.rest()
        if queries == 1:
            return self._attend_once(call, self._seen_once(call, chosen))
        mask = complete_mask(call, chosen, self.length)
        before = self.length - queries
        seen: np.ndarray = visible_in(mask).any(2)[:, 0, :before].cpu().numpy()
        if step.selects and units_of(self.history, seen).sum(1).max(initial=0) <= 2 * self.most_chosen:
            return self._attend_several(call, seen, mask)
        return self._attend_streamed(call, seen, mask)

    def _rest(self) -> None:
        if self._fetcher is not None or self.device_slots is not None:
            self.indexing.rest()

    def _seen_once(self, call: AttentionCall, chosen: torch.Tensor | None) -> np.ndarray:
        """Tokens that the call's one query attends to, (B, T) bool."""
        batch, length, mask = call.query.shape[0], self.length, call.mask
        hides = mask is not None and mask.shape[-1] == length
        if chosen is None:
            assert mask is not None and hides
            return visible_in(mask[:, 0, 0]).expand(batch, -1).cpu().numpy()
        places = chosen[:, 0].long()
        if hides:
            assert mask is not None
            seen = visible_in(mask[:, 0, 0]).expand(batch, -1).gather(1, places.clamp_min(0)) & (places >= 0)
            places = places.masked_fill(~seen, -1)
        return marked(places, length)

    def _gather(self, seen: np.ndarray) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """As `gather_tokens`."""
        history, storage = self.history, self.shared.storage
        storage.counters.attend(len(seen), history.length, int(seen.sum(1).max(initial=0)))
        span = storage.timeline.span("gather", self.layer_idx) if storage.timeline.on else NOTHING
        return gather_tokens(history, self.fetcher(), seen, span)

    def expanded(self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, Any]:
        """Keys and values for attention, of stored ones or of stored latents."""
        tag, dtype, device = call.tag, call.query.dtype, call.query.device
        assert tag is not None
        if not keys.dtype == values.dtype == dtype:
            keys, values = keys.to(dtype), values.to(dtype)
        if tag.expand is None:
            return keys, values
        with torch.autocast(device.type, call.autocast) if call.autocast is not None else NOTHING:
            return tag.expand(keys, values)

    def _attend_once(self, call: AttentionCall, seen: np.ndarray) -> Output:
        """Attention of one query to the tokens that are `seen` (B, T)."""
        entries, _, valid = self._gather(seen)
        keys, values = self.expanded(call, *self.history.form.split(entries))
        mask = None
        if not valid.all():
            there = to_device(valid, call.query.device)[:, None, None]
            mask = there if call.mask is None or call.mask.dtype == torch.bool else additive(there, call.query.dtype)
        timeline = self.shared.storage.timeline
        with timeline.span("attend", self.layer_idx) if timeline.on else NOTHING:
            return call.run(keys, values, mask)

    def _attend_several(self, call: AttentionCall, seen: np.ndarray, mask: torch.Tensor) -> Output:
        """Attention of a few queries to the stored tokens that any of them has `seen` (B, n), and to their own."""
        assert call.tag is not None and call.tag.own is not None
        entries, places, valid = self._gather(seen)
        device, own = call.query.device, call.tag.own
        stored = self.history.form.split(entries)
        keys, values = self.expanded(call, *(torch.cat([old, new], 2) for old, new in zip(stored, own, strict=True)))
        columns = to_device(np.where(valid, places, 0), device)[:, None, None]
        there = to_device(valid, device)[:, None, None]
        least = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        before = mask.gather(3, columns.expand(-1, -1, mask.shape[2], -1)).masked_fill(~there, least)
        return call.run(keys, values, torch.cat([before, mask[..., seen.shape[1] :]], 3))

    def _attend_streamed(self, call: AttentionCall, seen: np.ndarray, mask: torch.Tensor) -> Output:
        """As `_attend_several`, with the stored tokens streamed in blocks. Keys and values are made of those that any
        query sees, or of none, if each query sees few of them."""
        tag = call.tag
        assert tag is not None and tag.own is not None
        wanted, device = cast(np.ndarray, seen.any(0)), call.query.device
        own, asked = self.expanded(call, *tag.own), call.query.dtype
        if own[0].dtype != asked:  # `torch.autocast` makes keys of another type, to which it casts a query
            call = replace(call, query=call.query.to(own[0].dtype))
        width = own[1].shape[3]
        more = max(0, own[0].shape[3] - width)  # as wide as the keys, for which there is a faster kernel

        def widened(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return keys, torch.nn.functional.pad(values, (0, more))

        history = self.blocks(seen.shape[1], True)
        first = next(history)  # its buffers come before memory that is used only if there is room
        history = itertools.chain([first], history)

        def blocks() -> Iterator[Block]:
            begin = 0
            for keys, values, _ in history:
                stop = begin + keys.shape[2]
                places = to_device(wanted[begin:stop].nonzero()[0], device)
                if places.numel():
                    used = self.expanded(call, keys.index_select(2, places), values.index_select(2, places))
                    yield *widened(*used), places + begin
                begin = stop

        chosen, attended, account = self.indexing.chosen, None, self.shared.storage.account
        if chosen is not None and tag.expand is not None:
            latents, sizes = tag.own, (int(wanted.sum()), wanted.size, first[0].shape[2], width)
            nbytes = bytes_of_call(call, chosen, latents, *sizes)
            if nbytes is not None and account.has_room(nbytes):
                with account.holding(LATENTS, nbytes):
                    attended = attend_to_latents(call, partial(self.expanded, call), chosen, mask, latents, history)
        if attended is not None:
            attended = torch.nn.functional.pad(attended[0], (0, more)), attended[1]
        output, weights = call.stream(blocks() if attended is None else (), widened(*own), mask, None, attended)
        return output[..., :width].to(asked), weights

    # --- reading ahead -----------------------------------------------------------------------------------------

    def read_ahead(self, look_ahead: LookAhead, output: torch.Tensor) -> None:
        """Prefetch what this layer will probably attend to, in the layer before it, whose attention returned `output`
        (B, 1, hidden): what its indexer chooses of the stream so far or, without an indexer, what the latest one chose.
        A guess that fails is dropped."""
        indexing, chosen = self.indexing, self.indexing.chosen
        self.read_early = False
        if self.on_device:  # nothing is guessed
            return
        if not self.is_filled or not self.most_chosen or not indexing.is_sparse(self.shared.step):
            return
        account = self.shared.storage.account
        with account.not_sparing(), contextlib.suppress(OSError, BudgetError), torch.no_grad():
            if self.indexer.batch:  # streamed keys would be read once more
                streams = isinstance(self.indexer, StreamedIndexerKeys)
                chosen = None if streams else look_ahead.call(self.layer_idx, output, self._guessed)
            if chosen is not None:
                self._prefetch(choice_of(self.history, seen_by(chosen, self.length + 1)[:, : self.length]))

    def _guessed(self, guess: IndexerGuess) -> torch.Tensor | None:
        """The tokens that the guessed indexer chooses, of the stored ones and the next; None: all, or it is not known.
        """
        keys, length, given = self.indexer, self.length + 1, guess.arguments(Guessing(self))
        mask, stored = given.get("attention_mask"), isinstance(keys, StoredIndexerKeys)
        if stored and (not isinstance(mask, torch.Tensor) or mask.shape[1:] != (1, length) or length <= self.topk):
            return None
        self._asked = asked = Asked(keys.add_guess, keys=lambda: keys.parts[0][:, :length])
        try:
            if isinstance(keys, StoredIndexerKeys):
                return keys.choose(asked, guess.indexer, given, cast(torch.Tensor, mask), self.topk, exact=False)
            return cast(torch.Tensor, guess.indexer(**given))
        finally:
            self._asked = None
            keys.truncate(self.length)

    def prefetch_again(self) -> None:
        """Prefetch what the last step chose and no slot has: some of it is chosen again."""
        if self._fetcher is not None and (latest := self._fetcher.latest) is not None and self.state == "tagged":
            with self.shared.storage.account.not_sparing(), contextlib.suppress(OSError, BudgetError):
                self._prefetch(latest)

    def _prefetch(self, choice: Choice) -> None:
        self.fetcher().ahead(self.history, choice)
        self.read_early = True

    # --- slots -------------------------------------------------------------------------------------------------

    @property
    def most_units(self) -> int:
        """Units a row that slots are made for: as many as there will soon be."""
        return most_slots(cast(Any, self.config), self.history.form.group_size, self.history.records)

    @property
    def slots(self) -> int:
        """Slots a row: those of `reuse_capacity`, and what is lent."""
        tokens = self.config.reuse_capacity + self.indexing.lent if isinstance(self.config, SelectiveConfig) else 0
        return min(-(-tokens // self.history.form.group_size), self.most_units) if tokens else 0

    def why_over_host(self) -> str | None:
        """As of `device_step`."""
        return device_step.why_chosen_over_host(self)

    def fetcher(self) -> Fetcher:
        """This layer's fetcher, with the slots that its history allows now. Raises `BudgetError`."""
        history, storage = self.history, self.shared.storage
        if self._fetcher is not None and self._fetcher.closed:  # its memory was needed elsewhere
            self.drop_fetcher()
        slots, most = self.slots, self.indexing.over_host
        slots = history.rows * (slots if most is None or not self.on_device else min(slots, most))
        made_for = history.rows, slots
        if self._fetcher is None or made_for != self._made_for:
            self.drop_fetcher()
            tiers = slot_tiers(history.form, history.device, storage.account, slots, slots)
            self._fetcher = Fetcher(storage, self.indexing.areas, tiers, self.most_chosen, self.layer_idx)
            self._made_for, self.shared.books_changed = made_for, True
        self._fetcher.most_records = self._fetcher.read_at_once = self.most_chosen
        return self._fetcher

    def drop_slots_beyond(self) -> None:
        """As of `SelectiveLayer`."""
        if self._fetcher is not None and (self.on_device or self.history.rows * self.slots < self._made_for[1]):
            self.drop_fetcher()
        if (slots := self.device_slots) is not None and device_step.slots_of_chosen(self) < slots.count:
            self.drop_fetcher()

    def drop_fetcher(self) -> None:
        """Free the slots."""
        if self.device_slots is not None:
            self.device_slots.close()
            self.device_slots = None
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    # --- memory ------------------------------------------------------------------------------------------------

    @property
    def num_stores(self) -> int:  # type: ignore[override]
        return 1 + isinstance(self.indexer, StoredIndexerKeys)

    @property
    def tables_nbytes(self) -> int:
        own = sum(one.tables_nbytes for one in (self._fetcher, self.device_slots) if one is not None)
        return super().tables_nbytes + self.indexer.tables_nbytes + own

    @property
    def full_bytes(self) -> int:
        return super().full_bytes + self.indexer.full_bytes

    @classmethod
    def plan(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        """As of `SelectiveLayer`."""
        plan = super().plan(kind, config, context)
        if not plan.alone:
            return plan
        own = config if config.memory is None else replace(cast(SelectiveConfig, config), reuse_capacity=0)
        return replace(plan, over_host=super().plan(replace(kind, over_host=True), own, context))

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        """Rehearse the history, if the layer has one, the indexer's keys, slots, and a step's gather."""
        if kind.has_history:
            self.rehearse_history(run, kind, context)
        if kind.has_history and kind.topk and kind.form.num_key_heads == 1 and kind.device == "cpu":
            block, width = streamed(kind, self.config, self._records(kind)), kind.form.entry_width
            sizes = kind.num_heads, width, kind.most_chosen, block * kind.form.group_size
            nbytes = planned_bytes(kind.batch, context, *sizes)
            run.passes(LATENTS, prefill=nbytes)
        self.topk = kind.topk if kind.indexer_bytes else 0  # otherwise it shares the indexer of an earlier layer
        self.indexer = self._new_indexer(self.shared, self.layer_idx)
        streams = self.config.exact or self.config.candidates or isinstance(self.indexer, StreamedIndexerKeys)
        if kind.has_history and streams:  # more queries than a gather has room for
            run.stages("stream buffers", decode=stream_bytes(kind, self.config, self._records(kind)))
            run.passes("stream buffers", decode=place_bytes(kind, self.config, self._records(kind)), together=True)
        self.indexer.rehearse(run, kind, context)
        run.decoding()
        area, view, kept = self.indexer.areas(kind)  # whose gathers take turns with the history's
        if not kind.has_history or device_step.rehearse_chosen(self, run, kind, context):
            self.indexing.areas.rehearse(run, area, (view, view), (kept, kept))
            return
        history, form, rows = self.history, kind.form, kind.rows
        self.most_chosen = chosen = min(kind.most_chosen, context)
        for tier in slot_tiers(form, history.device, run, rows * self.slots, rows * self.slots):
            tier.rehearse(cast(Any, history.store).records)
            run.keeps("tables", tier.tables_nbytes)
        records, latest = min(chosen, records_soon(history.records)), -(-history.recent.shape[1] // form.group_size)
        record = rows * form.record_width * form.dtype.itemsize
        several = min(2 * chosen, records_soon(history.records)) if self.config.candidates else records
        views = [max(view, (count + latest) * record) for count in (records, several)]
        usual, most = (
            rows * (count + latest * form.group_size) * form.entry_bytes
            for count in (chosen, MOST_CANDIDATES * chosen if self.config.candidates else chosen)
        )
        most = min(most, rows * several * form.group_size * form.entry_bytes + usual)
        area = max(area, rows * records * form.record_bytes)
        self.indexing.areas.rehearse(run, area, (views[0], views[1]), (max(usual, kept), max(most, kept)))

    # --- changes -----------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        count = int(tokens_to_remove)
        super().crop(count)
        if self.is_filled:
            self.indexer.truncate(self.length)
        elif count:  # of a layer that shares another's keys only the indexer's are stored
            self.indexer.truncate(count if count > 0 else max(0, self.indexer.length + count))

    def truncated(self, units: int) -> None:
        if self.device_slots is not None:  # other units will have the same numbers
            self.drop_fetcher()

    def dropped(self, records: np.ndarray) -> None:
        if self._fetcher is not None:
            self._fetcher.forget(records)

    @property
    def stored_batch(self) -> int:
        return self.batch or self.indexer.batch

    def select_rows(self, rows: torch.Tensor) -> None:
        if self.is_filled:
            super().select_rows(rows)
        self.indexer.select_rows(rows)
        if self._fetcher is not None:
            self._fetcher.rows_changed()
        if self.device_slots is not None:
            self.device_slots.select_rows(rows)

    def close(self) -> None:
        self.drop_fetcher()
        self.indexer.close()
        super().close()

    # --- contexts ----------------------------------------------------------------------------------------------

    def freeze(self) -> Sequence[FreezableStore]:
        if self.device_slots is not None:
            self.drop_fetcher()
        if self._fetcher is not None:
            self._fetcher.drop_reads()
        return [*super().freeze(), *self.indexer.freeze()]

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        own = len(parts) - self.indexer.num_parts
        return [*super().live(parts[:own]), *self.indexer.live(parts[own:])]

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "indexer": self.indexer.capture()}

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        indexer = tree["indexer"]
        if not isinstance(indexer, dict) or indexer.keys() != {"keys", "positions"}:
            raise not_whole(self.name, f"its indexer's state is {shown(indexer, 200)}")
        rows = None if tree["history"] is None else len(tree["history"]["tail"])
        own = len(parts) - parts_of(indexer, self.name, len(parts))
        try:
            self.indexer.restore(indexer, self.name, rows, parts[own:], device)
            super().restore(tree, parts[:own], device)
            self.on_device = self.is_filled and device_step.reads_chosen(self)
            if self.is_filled and indexer["keys"] is not None and self.indexer.length != self.length:
                raise not_whole(self.name, f"its indexer has {self.indexer.length} of {self.length} tokens")
        except BaseException:
            self.indexer.close()
            raise
