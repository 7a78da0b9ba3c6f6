"""Attention over the low-bit copy, with chosen entries replaced in full precision (SpeCache, equation 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.captured import NOT_THERE, SEALS, SHORT, CapturedLayer, GraphStep
from ...history.records import RecordFormat
from ...kernels.mixed_attention import MOST_EXCHANGED, attend, attention_bytes
from ...kernels.on_a_device import has_step, plans_step
from ...model.attention_call import AttentionCall
from ...predictors.base import DeviceSizes
from .chosen_entries import Entries
from .config import SpecConfig
from .copy import LowBitCopy, Scores

# `MixedAttention` in one GPU kernel

class FusedAttention:
    """`MixedAttention` in one GPU kernel. `latest` has one or two parts. Nothing is kept between two calls.

    Products are in single precision, those with 16-bit entries by tensor cores.
    """

    def __init__(
        self, copy: LowBitCopy, query: torch.Tensor, scaling: float,
        latest: Sequence[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor | None, softcap: float | None = None,
        s_aux: torch.Tensor | None = None, sizes: DeviceSizes | None = None,
    ) -> None:  # fmt: skip
        self._sizes = sizes  # in a captured step
        self._copy, self._query, self._latest, self._mask = copy, query, latest, mask
        self._scaling, self._softcap, self._s_aux = scaling, softcap, s_aux

    @staticmethod
    def fits(form: RecordFormat, device: torch.device) -> bool:
        """True if the kernel runs on `device`, with entries of `form`."""
        return has_step(device, form.key_dim, form.value_dim) and form.dtype.itemsize <= 4

    @staticmethod
    def plans(form: RecordFormat, device_type: str) -> bool:
        """As `fits`, for a plan: on a machine without CUDA, it is for a machine elsewhere that has the kernel."""
        return plans_step(device_type, form.key_dim, form.value_dim) and form.dtype.itemsize <= 4

    def attend(
        self, replaced: Sequence[Entries], asked: Sequence[int] = (), *, last: bool = True
    ) -> tuple[torch.Tensor, list[Scores]]:
        """As `MixedAttention.attend`, with the output in the query's type, and with the scores of all queries of
        `asked`, which are adjacent, instead of their shares. More calls may follow the `last`."""
        copy, form = self._copy, self._copy.form.entry
        if len(replaced) == 1:
            tokens, keys, values = replaced[0].tokens, replaced[0].keys, replaced[0].values
        elif replaced:
            parts = zip(*((entries.tokens, entries.keys, entries.values) for entries in replaced), strict=True)
            tokens, keys, values = (torch.cat(part, 2) for part in parts)
        else:
            shape = *self._query.shape[:1], form.num_key_heads, 0
            tokens = self._query.new_empty(shape, dtype=torch.int64)
            keys, values = (self._query.new_empty(*shape, dim) for dim in (form.key_dim, form.value_dim))
        (latest_keys, latest_values), *more = self._latest
        guess_keys, guess_values = more[0] if more else (None, None)
        stored, exist, count = (copy.keys, copy.values), None, None
        if self._sizes is not None:
            stored, exist, count = copy.memory, self._sizes.units, self._sizes.recent
        output, scores, logarithm = attend(
            self._query, *stored, copy.form.bits, tokens, keys, values, latest_keys, latest_values,
            guess_keys, guess_values, self._mask, self._s_aux, self._scaling, self._softcap, bool(asked),
            exist, count,
        )  # fmt: skip
        if scores is None:
            return output, []
        return output, [Scores(scores, logarithm, self._query.shape[2], asked[0], asked[-1] + 1, exist)]


class MixedAttention:
    """Attention of one call's queries (B, H, q, D) over the copy and the latest tokens, in one softmax (equation 1).

    Valid until the copy changes. Scores and shares are float32. The query heads of a key head are adjacent: (B, Hk, n,
    ...) with n = H / Hk q, head by head.

    Args:
        latest: keys (B, Hk, t, Dk) and values (B, Hk, t, Dv) of all tokens after the copy's; the queries' own are last.
        mask: (·, 1, q, tokens), boolean (True: visible) or additive; None: causal, aligned at the lower right.
    """

    def __init__(
        self, copy: LowBitCopy, query: torch.Tensor, scaling: float, latest: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        heads = copy.form.entry.num_key_heads
        self._copy, self._mask, self._softcap = copy, mask, softcap
        self._count = query.shape[2]
        self._states = (query.float() * scaling).unflatten(1, (heads, -1)).flatten(2, 3)
        self._aux = None
        if s_aux is not None:
            self._aux = s_aux.float().view(heads, -1).repeat_interleave(self._count, 1)[None, ..., None]
        self._keys, self._values = latest
        shape = *self._states.shape[:3], copy.tokens + 1  # the last one is for empty places (-1)
        self._scores = self._states.new_full((1,), -torch.inf).expand(shape).contiguous()
        scores = self._scores[..., :-1]
        copy.scores(self._states, scores)
        if softcap is not None:
            self._cap(scores, softcap)
        if mask is not None:
            self._hide(scores, mask[..., : copy.tokens])
        self._recent = self._states @ self._keys.float().transpose(2, 3)
        if softcap is not None:
            self._cap(self._recent, softcap)
        if mask is not None:
            self._hide(self._recent, mask[..., copy.tokens :])
        else:
            by_query = self._recent.unflatten(2, (-1, self._count))
            for before in range(1, self._count):
                by_query[:, :, :, -before - 1, -before:] = -torch.inf

    @staticmethod
    def stored_bytes(form: RecordFormat, rows: int, heads: int, queries: int, entries: int) -> int:
        """Bytes in use while `queries` queries of `heads` heads attend to `entries` full-precision tokens a row: their
        entries, joined and in float32, and their scores, places and shares."""
        joined = form.entry_bytes + form.entry_bytes // form.dtype.itemsize * 4
        return rows * entries * (joined + heads * queries * 20)

    @staticmethod
    def _cap(scores: torch.Tensor, softcap: float) -> None:
        """Apply softcap to scores, in place."""
        scores.div_(softcap).tanh_().mul_(softcap)

    def _hide(self, scores: torch.Tensor, mask: torch.Tensor) -> None:
        """Apply a mask (·, 1, q, m) to scores (B, Hk, n, m), in place."""
        by_query, mask = scores.unflatten(2, (-1, self._count)), mask[:, :, None]  # (B, Hk, G, q, m)
        if mask.dtype == torch.bool:
            by_query.masked_fill_(~mask, -torch.inf)
        else:
            by_query += mask

    def attend(
        self, replaced: Sequence[Entries], asked: Sequence[int] = (), *, last: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Attention with the distinct tokens of `replaced` in full precision instead of the copy's (equation 1).

        Returns the output (B, q, H, Dv) float32. For each query of `asked` it also returns the shares (B, Hk, tokens)
        float32 of the copy's tokens, summed over the query heads of each key head. No call may follow the `last`.
        """
        scores, none = self._scores if last else self._scores.clone(), self._copy.tokens
        parts = [scores.new_zeros(*scores.shape[:2], 0, dtype=torch.int64)], [self._keys[:, :, :0]], [self._values]
        for entries in replaced:
            parts[0].append(entries.tokens)
            parts[1].append(entries.keys)
            parts[2].insert(-1, entries.values)
        tokens, keys, values = torch.cat(parts[0], 2), torch.cat(parts[1], 2), torch.cat(parts[2], 2).float()
        places = tokens.masked_fill(tokens < 0, none)
        every = places[:, :, None].expand(-1, -1, scores.shape[2], -1)
        full = self._states @ keys.float().transpose(2, 3)
        if self._softcap is not None:
            self._cap(full, self._softcap)
        if self._mask is not None and self._mask.dtype != torch.bool:  # an entry's bias is its token's
            bias = self._mask[:, :, :, : none + 1].expand(len(full), full.shape[1], -1, -1)
            bias = bias.gather(3, places[:, :, None].expand(-1, -1, self._count, -1))  # (B, Hk, q, m)
            full.unflatten(2, (-1, self._count)).add_(bias[:, :, None])
        full.masked_fill_(scores.gather(3, every) == -torch.inf, -torch.inf)  # hidden, or an empty place
        scores.scatter_(3, every, -torch.inf)
        exact = torch.cat([full, self._recent], 3)
        most = torch.maximum(scores.amax(3, keepdim=True), exact.amax(3, keepdim=True))
        if self._aux is not None:
            most = torch.maximum(most, self._aux)
        most.clamp_(min=torch.finfo(torch.float32).min)  # a query that sees nothing
        scores.sub_(most).exp_()
        exact.sub_(most).exp_()
        total = scores.sum(3, keepdim=True) + exact.sum(3, keepdim=True)
        if self._aux is not None:
            total += (self._aux - most).exp()
        total.masked_fill_(total == 0, 1)
        scores /= total
        exact /= total
        output = self._copy.weighted(scores[..., :-1]) + exact @ values
        output = output.unflatten(2, (-1, self._count)).flatten(1, 2).transpose(1, 2)
        low, high = scores.unflatten(2, (-1, self._count)), exact.unflatten(2, (-1, self._count))
        shares = []
        for query in asked:
            of_copy, stored = low[:, :, :, query].sum(2), high[:, :, :, query].sum(2)
            shares.append(of_copy.scatter_add_(2, places, stored[..., : places.shape[2]])[..., :-1])
        return output, shares


# Sizes, and the bytes of a step's transient memory

UNDER_WAY = 2
"""Reads for the next step in flight at a time: layer i's read is collected when layer i + UNDER_WAY selects."""
TOGETHER = 2
"""Queries scored at a time: a token and its guess."""


def scores_of(config: SpecConfig, queries: int) -> int:
    """Scores of each head and token of the copy that are in memory at a time: twice `queries` if scores are kept."""
    return 2 * queries if keeps_scores(config) else queries


def keeps_scores(config: SpecConfig) -> bool:
    """True if scores are kept for a second attention of the same step. Otherwise they are computed again."""
    return bool(config.top_up) or not config.speculative


def read_together(form: RecordFormat, config: SpecConfig) -> int:
    """Records a row that are read at a time: a third of all key heads' entries, because most of them are resident."""
    return -(-form.num_key_heads * config.chosen // 3)


def picked_bytes(form: RecordFormat, rows: int, config: SpecConfig) -> int:
    """Bytes of entries outside `ChosenEntries`: those on their way from records, those for this step only, and those
    that were added to the copy in this step."""
    return rows * (config.chosen + config.quant_group) * form.entry_bytes


def stored_bytes(form: RecordFormat, rows: int, heads: int, queries: int, config: SpecConfig, latest: int) -> int:
    """`MixedAttention.stored_bytes` for all full-precision entries of a step: the chosen ones, those fetched only for
    this step, those that were added to the copy in it, and the `latest` ones."""
    entries = config.chosen * (2 if config.top_up else 1) + config.quant_group + latest
    return MixedAttention.stored_bytes(form, rows, heads, queries, entries)


def fused_bytes(
    form: RecordFormat, rows: int, heads: int, queries: int, config: SpecConfig, tokens: int, latest: int
) -> int:
    """Bytes in use on a device while `queries` queries of `heads` heads attend to `tokens` of the copy, to the entries
    instead of some, and to the `latest` ones, and select."""
    entries = config.chosen * (2 if config.top_up else 1) + config.quant_group
    return attention_bytes(rows, heads, form.num_key_heads, queries, tokens, entries, latest, form.value_dim)


def joined_bytes(form: RecordFormat, rows: int, config: SpecConfig) -> int:
    """Bytes of all entries instead of the copy's in one tensor, with their tokens, in a step of a device that has some
    besides the chosen ones."""
    entries = config.chosen * (2 if config.top_up else 1) + config.quant_group
    return rows * entries * (form.entry_bytes + 8 * form.num_key_heads)


# A step in a CUDA graph

class CapturedSpecLayer(CapturedLayer):
    """A `SpecLayer` in a captured step: it attends to all tokens of the copy with a token and its guess, and exchanges
    the chosen entries for those that the guess wants. The reads run on their own stream until the end of the step."""

    def why_not(self) -> str | None:
        layer, chosen = self.layer, self.layer.chosen
        history, selecting, wanted = layer.history, layer.selecting, layer.config.chosen
        there = layer.is_filled and layer.has_copy and history.device.type == "cuda" and history.store.in_memory
        if not there or selecting is None or not selecting.worthwhile:
            return f"{layer.name} {NOT_THERE}"
        copy = layer.predictor.copy
        if not FusedAttention.fits(copy.form.entry, history.device) or wanted > MOST_EXCHANGED:
            return f"{layer.name} has entries, or so many of them, that its kernels do not take"
        if layer.shares_keys:
            return f"several layers attend to the keys of {layer.name}"
        if copy.tokens < wanted or not layer.can_choose():
            return SHORT
        if history.room < 1:
            return SEALS
        if wanted and (self.lost or chosen.empty or chosen.wanted is not None or layer.addresses is None):
            return "entries were chosen on the host, or not yet"
        return None

    @property
    def lost(self) -> bool:
        chosen, wanted = self.layer.chosen, self.layer.config.chosen
        return bool(wanted) and (chosen is None or chosen.count < wanted)

    @property
    def units(self) -> int:
        return int(self.layer.predictor.copy.tokens)

    @property
    def room(self) -> int:
        return int(self.layer.predictor.copy.memory[1].shape[3])

    def parts(self) -> list[Any]:
        layer, chosen = self.layer, self.layer.chosen
        own = [] if chosen is None else [chosen.tokens, chosen.keys, chosen.values, layer.addresses]
        fixed = layer.history.rows, layer.config.chosen, layer.scaling
        return [layer.history.tail.memory, *layer.predictor.copy.memory, *own, *fixed]

    def join(self) -> None:
        if self.layer.chosen is not None:
            self.layer.chosen.join()

    def abandon(self) -> None:
        if self.layer.chosen is not None:
            self.layer.chosen.abandon()

    def count_later(self, counts: torch.Tensor, told: Callable[[], object]) -> None:
        counters, pinned, history = self.layer.shared.storage.counters, self.layer.pinned, self.layer.history

        def were_read(entries: int) -> None:
            counters.units_selected += entries
            counters.units_ready += entries
            pinned.count(history, entries)
            told()

        counters.tell_later(were_read, counts[0])
        counters.tell_later(counters.count_ready, counts[1])

    def attended(self, call: AttentionCall) -> tuple[torch.Tensor, GraphStep]:
        layer, (rows, heads, queries), count = self.layer, call.query.shape[:3], self.layer.config.chosen
        copy, chosen, memory = layer.predictor.copy, layer.chosen, layer.history.tail.memory
        form, tail = copy.form.entry, memory.shape[1] + queries - 1
        latest = [form.split(memory)]
        if queries > 1:
            latest.append(tuple(part[:, :, 1:].to(memory.dtype) for part in (call.key, call.value)))
        sizes = rows, heads, form.num_key_heads, queries, self.room, count, tail, form.value_dim
        nbytes, account = attention_bytes(*sizes), layer.shared.storage.account
        with account.holding("scores", nbytes):
            query, softcap, sink = call.query, call.softcap, call.s_aux
            mixed = FusedAttention(copy, query, call.scaling, latest, None, softcap, sink, self.sizes)
            output, scores = mixed.attend([chosen.entries] if count else [], range(queries) if count else [])
            counts = torch.zeros(2, rows, dtype=torch.int64, device=query.device)
            if count:
                wanted = layer.wanted_of(layer.shares_of(scores), None)
                read = layer.pinned.exchange(layer.history, chosen, wanted, complete=True)
                counts[0] = read.sum(1)
                counts[1] = wanted[0].numel() - counts[0]
        return output, GraphStep(counts, count, nbytes)
