"""A layer of `SpecCache`: attention over the low-bit copy with the top-k replaced (SpeCache, algorithm 3)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...core.device_step import NO_KERNELS, NOT_PINNED, why_on_disk
from ...core.layer import Output
from ...core.plan import LayerKind
from ...core.selecting import Selecting
from ...core.selective_layer import SelectiveLayer
from ...core.shared import Shared
from ...core.step import Step
from ...errors import BudgetError
from ...fetch.fetcher import Fetcher
from ...history.base import Sealed
from ...history.records import RecordFormat, latest_tokens
from ...history.state import Array, State
from ...kernels.mixed_attention import MOST_EXCHANGED
from ...memory.dry_run import DryRun
from ...model.attention_call import AttentionCall
from ...report.trace import NOTHING
from ...stores.base import FreezableStore
from .attention import (
    TOGETHER,
    UNDER_WAY,
    CapturedSpecLayer,
    FusedAttention,
    MixedAttention,
    fused_bytes,
    joined_bytes,
    keeps_scores,
    picked_bytes,
    read_together,
    scores_of,
    stored_bytes,
)  # fmt: skip
from .chosen_entries import ChosenEntries, Entries, EntryReads, PinnedEntries
from .config import SpecConfig
from .copy import LowBitForm, LowBitPredictor, Scores

# Fetching within a step the entries that a guess missed; beyond the paper

TRIED = 8
"""Steps in which the store's speed is measured."""


class TopUp:
    """Decides for one cache whether steps are topped up: only if the store is fast enough.

    It is if the reads of the first `TRIED` steps took no longer than the rest of those steps. For the thread that runs
    the model.

    Args:
        asked: `SpecConfig.top_up`; "always": at any speed.
    """

    def __init__(self, asked: bool | str) -> None:
        self.on = bool(asked)
        """True if the next step is topped up."""
        self._left = TRIED if asked is True else 0
        self._read = self._reading = self._took = 0.0

    @contextlib.contextmanager
    def reading(self, device: torch.device) -> Iterator[None]:
        """Time a top-up's reads, inside the `with`. While the speed is being measured, this synchronises `device`."""
        measures = self._left > 0 and device.type == "cuda"
        if measures:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        yield
        if measures:
            torch.cuda.synchronize(device)
        self._reading += time.perf_counter() - started

    def end_step(self, seconds: float) -> str | None:
        """Note that a step ended after `seconds`. Returns the warning if top-ups stop now, else None."""
        read, self._reading = self._reading, 0.0
        if not self._left or not read:
            return None
        self._left, self._read, self._took = self._left - 1, self._read + read, self._took + seconds
        if self._left or self._read <= self._took - self._read:
            return None
        self.on = False
        read, other = (1e3 * each / TRIED for each in (self._read, self._took - self._read))
        return (
            f"steps are topped up no more: reading the entries that a guess missed took {read:.0f} ms a step, the rest "
            f"of the step {other:.0f} ms. Pass top_up='always' to read them on a slow store, too"
        )


_CHOICE = State("choice", chosen=Array("rows heads wanted", torch.int64, low=-1, below="held"))
_LEAST_ROOM = 10
"""Binary logarithm of the chosen entries to allocate at first, at most `SpecConfig.chosen`."""


class SpecLayer(SelectiveLayer):
    """A layer whose steps attend to all tokens: to the chosen and the latest ones in full precision, to the others by
    the copy."""

    config: SpecConfig
    predictor: LowBitPredictor | None
    needs_slots = False
    captured_class = CapturedSpecLayer

    def __init__(self, shared: Shared, layer_idx: int, place: int | None = None, **kwargs: Any) -> None:
        super().__init__(shared, layer_idx, place, **kwargs)
        self.top_up = TopUp(False)
        """The cache's; set by the cache."""
        self.collects: SpecLayer | None = None
        """The layer whose read for the next step is collected when this layer selects; set by the cache."""

    def _clear(self) -> None:
        super()._clear()
        self.chosen: ChosenEntries | None = None
        """The resident top-k in full precision; None before the first selection."""
        self._entry_reads: EntryReads | None = None
        self._at_once: int | None = None  # records a row read at a time
        self._leaving: Entries | None = None
        """Entries added to the copy in this step, in full precision, because no step can have selected them yet."""
        self.shares_keys = False
        """True if several layers attend to one `update`, as the prompt has shown. They share `_leaving`, too."""
        self._attended = False
        """True after this step's first attention. Another layer that shares these keys does not select again."""

    @property
    def tables_nbytes(self) -> int:
        return super().tables_nbytes + (0 if self._entry_reads is None else self._entry_reads.pinned.nbytes)

    @property
    def slots(self) -> int:
        return 0 if self.config.records_apart else super().slots

    @property
    def fetcher(self) -> Fetcher:
        fetcher = super().fetcher
        if self._at_once is None:
            self._at_once = read_together(self.history.form, self.config)
        fetcher.most_records = fetcher.read_at_once = self._at_once
        return fetcher

    # --- the copy ----------------------------------------------------------------------------------------------

    @classmethod
    def copy_form(cls, form: RecordFormat, config: SpecConfig) -> LowBitForm:
        """Memory layout of the copy for a history of `form`."""
        return LowBitForm(form, config.bits, config.quant_group)

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        config, form, rows = self.config, kind.form, kind.rows
        self.rehearse_history(run, kind, context)
        self.selecting = Selecting(config, self.shared.storage, UNDER_WAY if config.speculative else 0, kind.layers)
        self.predictor = predictor = self.make_predictor()
        tokens = max(0, context - config.num_recent) // config.quant_group * config.quant_group
        asked = kind.num_heads, TOGETHER, scores_of(config, TOGETHER)  # candidates need no more
        predictor.rehearse(run, tokens, kind.num_heads, 0)
        latest = latest_tokens(form, config)
        if FusedAttention.plans(form, kind.device):
            scored = fused_bytes(form, rows, kind.num_heads, TOGETHER, config, tokens, latest)
            stored = joined_bytes(form, rows, config)
        else:
            scored = predictor.scored_bytes(predictor.copy.form, tokens, rows, *asked)
            stored = stored_bytes(form, rows, kind.num_heads, TOGETHER, config, latest)
        run.passes("scores", decode=max(0, scored - run.passing("fitting")[1]))  # never at the same time
        if config.records_apart and kind.device == "cuda":
            run.keeps("tables", 8 * rows * self.history.units)  # records' addresses
        run.decoding()
        chosen = ChosenEntries(form, rows, config.chosen, torch.device("meta"), run)
        if rows > 1:
            run.moves(chosen.nbytes)
        if (config.reuse_capacity or config.host_slots is not None) and not config.records_apart:
            self.rehearse_slots(run)
        if config.engine == "memory":  # only the selected entries of a record are copied
            area = EntryReads.area_bytes(form, rows * config.chosen)
            run.stages("staging", decode=area)
        else:
            wanted = read_together(form, config)
            self.rehearse_gather(run, kind, context, wanted, wanted)
        run.passes("picked entries", decode=picked_bytes(form, rows, config))
        run.passes("stored entries", decode=stored)

    def make_predictor(self) -> LowBitPredictor:
        history, config = self.history, self.config
        reserve = max(0, (config.max_context or 0) - config.num_recent)
        made_of = history.rows, config.num_sinks, history.device, self.shared.storage.account, self.name, reserve
        return LowBitPredictor(self.copy_form(history.form, config), *made_of)

    def learn(self, sealed: Sealed, call: AttentionCall, step: Step) -> None:
        predictor = self.predictor
        if predictor is None:
            return
        if step.selects:
            keys, values = (torch.cat(parts, 2) for parts in zip(*sealed.parts, strict=True))
            tokens = torch.arange(sealed.tokens - sealed.fresh, sealed.tokens, device=keys.device)
            self._leaving = Entries(tokens.expand(keys.shape[:3]), keys, values, sealed.fresh)
        if predictor.copy.tokens + sealed.fresh == sealed.tokens:
            super().learn(sealed, call, step)
        else:  # some units were sealed while another attention ran
            predictor.copy.truncate(0)
            blocks = ((block.keys, block.values) for block in self.history.blocks(sealed.tokens))
            predictor.copy.append(blocks, sealed.tokens)

    @property
    def has_copy(self) -> bool:
        """True if this layer runs its attention and its copy has tokens."""
        return self.state == "tagged" and self.predictor is not None and self.predictor.copy.tokens > 0

    def can_choose(self) -> bool:
        predictor, units = self.predictor, self.history.units
        return predictor is not None and predictor.ready(units)

    # --- choosing ----------------------------------------------------------------------------------------------

    def _latest(self, call: AttentionCall) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the latest tokens, in one part, and of guesses, in a second one."""
        (keys, values), guessed = self.history.form.split(self.history.recent), self.guessed
        if not guessed:
            return [(keys, values)]
        guesses = call.key[:, :, -guessed:], call.value[:, :, -guessed:]
        return [(keys, values), (guesses[0].to(keys.dtype), guesses[1].to(keys.dtype))]

    # --- entries in full precision: selected, fetched, evicted --------------------------------------------------

    def _held(self) -> ChosenEntries:
        """`chosen`, with room for as many entries as a step may select. Raises `BudgetError`."""
        if self.chosen is not None and self.chosen.count >= self.config.chosen:
            return self.chosen
        history, most = self.history, 1 << max(_LEAST_ROOM, (self.held - 1).bit_length())  # no more to select
        count = min(self.config.chosen, most)
        if self.chosen is None:
            made_of = count, history.device, self.shared.storage.account
            self.chosen = ChosenEntries(history.form, history.rows, *made_of)
        elif self.chosen.count < count:
            self.chosen.grow(count)
        return self.chosen

    @property
    def _reads(self) -> EntryReads:
        assert self.selecting is not None
        if self._entry_reads is None or self._entry_reads.areas is not self.selecting.areas:
            self._entry_reads = EntryReads(self.shared.storage, self.selecting.areas)
        return self._entry_reads

    @property
    def pinned(self) -> PinnedEntries:
        """Reads of entries in pinned host memory."""
        return self._reads.pinned

    @property
    def addresses(self) -> torch.Tensor | None:
        """The addresses (rows, units or more) int64 of all records for a step in a graph; None: they are not known."""
        return self._reads.pinned.latest(self.history)

    def _bring(self, absent: torch.Tensor) -> list[Entries]:
        """Entries of the `absent` tokens, prefetched or read now. Raises as `Fetcher.gather`."""
        return self._reads.bring(self.fetcher, self.history, absent)

    def wanted_of(self, shares: torch.Tensor | Scores, visible: torch.Tensor | None) -> torch.Tensor:
        """The top-k tokens by `shares` (ArgTopK); resident ones are weighted x4. See `LowBitPredictor.most`."""
        assert self.predictor is not None
        return self.predictor.most(shares, visible, self.config.chosen, self._held().entries.tokens)

    def _fetch(self, wanted: torch.Tensor, *, at_once: bool, complete: bool) -> None:
        """Prefetch the `wanted` tokens for the next step (algorithm 3, Pre-fetch). `at_once`: others may be evicted;
        `complete`: none is -1."""
        counters, history, fetched = self.shared.storage.counters, self.history, None
        reads = self._reads
        if at_once:
            fetched = reads.pinned.exchange(history, self._held(), wanted, complete=complete)
        if fetched is None:
            reads.ahead(self.fetcher, history, self._want(wanted.long()))
            return

        def told(read: int) -> None:
            counters.units_resident -= read
            reads.pinned.count(history, read)

        counters.tell_later(told, fetched)
        if complete:
            counters.count_ready(wanted.numel())
        else:
            counters.tell_later(counters.count_ready, (wanted >= 0).sum())

    def _want(self, wanted: torch.Tensor) -> torch.Tensor:
        """Let the next `collect` make the `wanted` tokens resident. Returns the absent ones."""
        absent = self._held().want(wanted)
        selected = (wanted >= 0).sum()
        resident = selected - (absent >= 0).sum()
        self.shared.storage.counters.later(units_selected=selected, units_resident=resident, units_ready=resident)
        return absent

    def collect(self) -> None:
        """Make the wanted tokens resident in `chosen`. Raises as `Fetcher.gather`; call it again then."""
        chosen = self.chosen
        if chosen is not None and chosen.absent is not None:
            chosen.take(self._bring(chosen.absent))

    def collect_soon(self) -> None:
        """`collect` before attention needs it. A failed read is left to the step that needs it."""
        absent = None if self.chosen is None else self.chosen.absent
        with contextlib.suppress(OSError, BudgetError):
            self.collect()
            if absent is not None and not self.history.store.in_memory:
                self.shared.storage.counters.later(units_ready=(absent >= 0).sum())

    def why_over_host(self) -> str | None:
        history = self.history
        if history.device.type != "cuda":
            return "the layer is on a CPU"
        if not FusedAttention.fits(history.form, history.device):
            return NO_KERNELS
        if not history.store.in_memory:
            return why_on_disk(self.config)
        if self.config.chosen > MOST_EXCHANGED:
            return f"a step selects more than {MOST_EXCHANGED} tokens"
        return None if self._entry_reads is None or self._entry_reads.pinned.readable else NOT_PINNED

    # --- attention ---------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._leaving, self._attended = None, False
        return super().update(key_states, value_states, *args, **kwargs)

    def _attend(self, call: AttentionCall) -> Output:
        self.shares_keys |= self._attended
        try:
            return super()._attend(call)
        finally:
            self._attended = True
            if not self.shares_keys:
                self._leaving = None

    def attend_sparsely(self, call: AttentionCall, visible: torch.Tensor | None) -> Output:
        """SpeCache's algorithm 3 for one layer: attend to all tokens in one softmax, select the next step's top-k by
        the guess, and prefetch it. With candidates, the latest one is the guess. `TOGETHER` queries are scored at a
        time."""
        assert self.predictor is not None
        account, form, step = self.shared.storage.account, self.history.form, self.shared.step
        if step is not None and call.mask is not None and call.mask.shape[2] == call.query.shape[2]:
            mask, seen = step.streamed(call.mask)
            if mask is None and seen is None:  # the mask is plain causal
                call = replace(call, mask=None)
        picked = picked_bytes(form, self.history.rows, self.config)
        account.hold("picked entries", picked)
        try:
            return self._attend_to_all(call, visible), None
        finally:
            account.release("picked entries", picked)

    def _attend_to_all(self, call: AttentionCall, visible: torch.Tensor | None) -> torch.Tensor:
        assert self.predictor is not None
        storage, copy, (heads, queries) = self.shared.storage, self.predictor.copy, call.query.shape[1:3]
        account, timeline, layer_idx = storage.account, storage.timeline, self.layer_idx
        with timeline.span("gather", layer_idx) if timeline.on else NOTHING:
            if not self._attended:
                if self.collects is not None:
                    self.collects.collect_soon()
                self.collect()
        together = min(queries, TOGETHER)
        latest = self.history.recent.shape[1] + self.guessed
        if call.query.is_cuda and FusedAttention.fits(copy.form.entry, call.query.device):
            form, joins = copy.form.entry, self._leaving is not None or self.top_up.on
            scored = fused_bytes(form, copy.rows, heads, together, self.config, copy.tokens, latest)
            stored = joined_bytes(form, copy.rows, self.config) if joins else 0
        else:
            asked = heads, together, scores_of(self.config, together)
            scored = LowBitPredictor.scored_bytes(copy.form, copy.tokens, copy.rows, *asked)
            stored = stored_bytes(self.history.form, copy.rows, heads, together, self.config, latest)
        with timeline.span("attend", layer_idx) if timeline.on else NOTHING, contextlib.ExitStack() as booked:
            for owner, nbytes in (("scores", scored), ("stored entries", stored)):
                account.hold(owner, nbytes)
                booked.callback(account.release, owner, nbytes)
            begin, before = queries - together, []
            output, replaced, wanted = self._last(call, begin, visible)
            for start in range(0, begin, together):
                before.append(self._over(call, start, min(start + together, begin)).attend(replaced)[0])
            if wanted is not None:  # last, because entries evicted for the next step must not be needed in this one
                self._fetch(wanted, at_once=not self.shares_keys, complete=visible is None)
        return (torch.cat([*before, output], 1) if before else output).to(call.query.dtype)

    def _over(self, call: AttentionCall, start: int, stop: int) -> MixedAttention | FusedAttention:
        """Attention for the queries `start` to `stop` of a call, over all tokens up to the last of them."""
        assert self.predictor is not None
        later, query, copy = call.query.shape[2] - stop, call.query[:, :, start:stop], self.predictor.copy
        mask = None if call.mask is None else call.mask[:, :, start:stop, : call.mask.shape[3] - later]
        latest, softcap, s_aux = self._latest(call), call.softcap, call.s_aux
        fused = query.is_cuda and FusedAttention.fits(copy.form.entry, query.device)
        if fused and not later:
            return FusedAttention(copy, query, self.scaling, latest, mask, softcap, s_aux)
        keys, values = latest[0]
        if len(latest) > 1:
            keys, values = torch.cat([keys, latest[1][0]], 2), torch.cat([values, latest[1][1]], 2)
        keys, values = keys[:, :, : keys.shape[2] - later], values[:, :, : values.shape[2] - later]
        if fused:
            return FusedAttention(copy, query, self.scaling, [(keys, values)], mask, softcap, s_aux)
        return MixedAttention(copy, query, self.scaling, (keys, values), mask, softcap, s_aux)

    def _last(
        self, call: AttentionCall, begin: int, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Entries], torch.Tensor | None]:
        """Attend with a call's queries from `begin` on: the softmax A, ArgTopK and output O of SpeCache's algorithm 3.

        Returns the output, the entries that replaced the copy's, and the tokens to fetch for the next step (None: there
        is nothing to prefetch). Raises as `Fetcher.gather`.
        """
        assert self.predictor is not None
        config, queries, guessed = self.config, call.query.shape[2], self.guessed
        mixed = self._over(call, begin, queries)
        replaced = [] if self._leaving is None else [self._leaving]
        if not config.chosen or self._attended:
            if config.chosen:
                replaced = [self._held().entries, *replaced]
            self.attends_to(call, replaced)
            return mixed.attend(replaced)[0], replaced, None
        asked, real = queries - begin - 1, queries - guessed
        chosen, ahead = self._held(), queries > 1 or guessed > 0
        if real and (self.top_up.on or not ahead or chosen.empty):
            keeps = keeps_scores(config)
            (shares,) = mixed.attend([chosen.entries, *replaced], [asked - guessed], last=not keeps)[1]
            if not keeps:
                del mixed  # free its scores before others are computed
                mixed = self._over(call, begin, queries)
            if ahead and not chosen.empty:
                wanted = self.predictor.most(shares, visible, config.chosen)
                first = self.predictor.copy.tokens - (0 if self._leaving is None else self._leaving.tokens.shape[2])
                with self.top_up.reading(self.history.device):
                    replaced += self._bring(chosen.absent_of(wanted.masked_fill(wanted >= first, -1).long()))
            else:  # tokens in `_leaving` are selected or read from the copy, for layers sharing these keys too
                self._want(self.wanted_of(shares, visible).long())
                self.collect()
                replaced, self._leaving = [], None
        replaced = [chosen.entries, *replaced]
        output, shares_ahead = mixed.attend(replaced, range(asked + 1) if ahead else [])
        self.attends_to(call, replaced)
        if shares_ahead:
            return output, replaced, self.wanted_of(self.shares_of(shares_ahead), visible)
        return output, replaced, None

    def shares_of(self, shares: list[Any]) -> Any:
        """Scores by which the next step's tokens are selected (rows, heads, tokens).

        They sum the guess's attention, the token's, and the token's shifted by one, because some heads attend to the
        successors of what they attended to. The paper uses only the guess. `shares`: attention of each query of a call,
        the guess last; changed in place. On a device a call's `Scores`, which stay as they are.
        """
        *before, guess = shares
        for each in before:
            guess += each
            guess[..., 1:] += each[..., :-1]
        return guess

    def attends_to(self, call: AttentionCall, stored: list[Entries]) -> None:
        """Count the tokens that this call attends to in full precision: `stored` and the latest ones."""
        counters = self.shared.storage.counters
        queries = call.query.shape[0] * (call.query.shape[2] - self.guessed)
        counters.attend(queries, self.history.length, self.history.recent.shape[1])
        for entries in stored:
            if entries.count is not None:
                counters.tokens_attended += queries * entries.count
            elif entries.tokens.numel():
                counters.later(tokens_attended=queries * (entries.tokens >= 0).sum(2).amax())

    # --- changes -----------------------------------------------------------------------------------------------

    def drop_chosen(self) -> None:
        """Free the chosen entries."""
        if self.chosen is not None:
            self.chosen.close()
            self.chosen = None

    def truncated(self, units: int) -> None:
        self._settle()
        super().truncated(units)
        tokens = units * self.history.form.group_size
        if self.chosen is not None:
            self.chosen.truncate(tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        self._settle()
        super().select_rows(rows)
        if self.chosen is not None:
            self.chosen.select_rows(rows)

    def dropped(self, records: np.ndarray) -> None:
        self._settle()
        super().dropped(records)

    def freeze(self) -> Sequence[FreezableStore]:
        self._settle()
        return super().freeze()

    def _settle(self) -> None:
        """Wait for reads on other streams, and forget the records' addresses."""
        if self.chosen is not None:
            self.chosen.settle()
        if self._entry_reads is not None:
            self._entry_reads.pinned.forget()

    def close(self) -> None:
        self._settle()
        self.drop_chosen()
        super().close()

    # --- contexts ---------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """As `OffloadLayer.capture`. A copy that lacks units, sealed while another attention ran, is not captured; the
        next attention quantises it anew."""
        tree, chosen = super().capture(), self.chosen
        tokens = None if chosen is None else chosen.entries.tokens if chosen.wanted is None else chosen.wanted
        predictor = tree["predictor"] if self.is_filled and self.can_choose() else None
        return {**tree, "predictor": predictor, "chosen": None if tokens is None else tokens.cpu().clone()}

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        """As `OffloadLayer.restore`. The chosen entries are read when attention needs them."""
        super().restore(tree, parts, device)
        wanted = tree["chosen"]
        if wanted is None or self.selecting is None or not self.is_filled or not self.config.chosen:
            return
        sizes = {"rows": self.history.rows, "heads": self.history.form.num_key_heads, "held": self.held}
        _CHOICE.check({"chosen": wanted}, self.name, **sizes)
        self._held().want(wanted[:, :, : self.config.chosen].to(device))
