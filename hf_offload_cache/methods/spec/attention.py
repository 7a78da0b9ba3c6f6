"""Attention over the low-bit copy, with chosen entries replaced in full precision (SpeCache, equation 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...history.records import RecordFormat
from ...kernels.on_a_device import has_kernels
from .chosen_entries import Entries
from .copy import LowBitCopy

# `MixedAttention` in a few GPU kernels

class FusedAttention:
    """`MixedAttention` in GPU kernels, for calls that `fits`. `latest` may have several parts.

    Products with the copy are in half precision, with sums in float32. Products with full-precision entries are in
    TF32, which is exact for 16-bit entries, or in float32 for 32-bit entries. Nothing is kept between two calls.
    """

    def __init__(
        self, copy: LowBitCopy, query: torch.Tensor, scaling: float,
        latest: Sequence[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor | None,
    ) -> None:  # fmt: skip
        heads = copy.form.entry.num_key_heads
        self._copy, self._scaling, self._latest, self._mask = copy, scaling, latest, mask
        self._count = query.shape[2]
        self._queries = query.unflatten(1, (heads, -1)).flatten(2, 3).contiguous()

    @staticmethod
    def fits(
        copy: LowBitCopy, query: torch.Tensor, mask: torch.Tensor | None, softcap: float | None,
        s_aux: torch.Tensor | None,
    ) -> bool:  # fmt: skip
        """True if the kernels support this call. For the copy's tokens they read only the last row of a boolean mask,
        because all queries see the same ones."""
        entry = copy.form.entry
        if softcap is not None or s_aux is not None or not has_kernels(query.device, entry.key_dim, entry.value_dim):
            return False
        from ...kernels.mixed_attention_triton import MOST_QUERIES

        queries = query.shape[1] // entry.num_key_heads * query.shape[2]
        return queries <= MOST_QUERIES and (mask is None or mask.dtype == torch.bool)

    def attend(
        self, replaced: Sequence[Entries], asked: Sequence[int] = (), *, last: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `MixedAttention.attend`. `asked` are adjacent queries, and more calls may follow the `last`."""
        with torch.cuda.device_of(self._queries):  # kernels start on the current device
            return self._attend(replaced, asked)

    def _attend(
        self, replaced: Sequence[Entries], asked: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        from ...kernels.mixed_attention_triton import Parts

        tokens, form, mask = self._copy.tokens, self._copy.form, self._mask
        rows, heads = self._queries.shape[:2]
        hidden = torch.empty(rows, heads, tokens + 1, dtype=torch.uint8, device=self._queries.device)
        seen = None
        if mask is None:
            hidden.zero_()
        else:
            hidden[:, :, :tokens] = ~mask[:, :1, -1, :tokens]
            hidden[:, :, tokens] = 1
            seen = mask[:, 0, -1, tokens:].byte().expand(rows, -1).contiguous()
            replaced = [self._seen(entries, hidden) for entries in replaced]
        for entries in replaced:  # the last column is for empty places (-1)
            hidden.scatter_(2, entries.tokens.masked_fill(entries.tokens < 0, tokens), 1)
        given = self._queries, self._scaling, self._count, form.entry.value_dim, hidden
        parts = Parts(*given, len(replaced) + len(self._latest), form.group)
        parts.copy(self._copy.keys, self._copy.values, form.bits)
        for entries in replaced:
            parts.stored(entries.keys, entries.values, entries.tokens)
        after, first = sum(keys.shape[2] for keys, _ in self._latest), 0
        for keys, values in self._latest:
            stop = first + keys.shape[2]
            parts.latest(keys, values, None if seen is None else seen[:, first:stop].contiguous(), after - stop)
            first = stop
        output = parts.merged()
        return output, list(parts.shares(asked[0], len(asked))) if asked else []

    @staticmethod
    def _seen(entries: Entries, hidden: torch.Tensor) -> Entries:
        """The entries with -1 as the token of each hidden one. `hidden` (rows, heads, tokens + 1) uint8."""
        places = entries.tokens.masked_fill(entries.tokens < 0, hidden.shape[2] - 1)
        return Entries(entries.tokens.masked_fill(hidden.gather(2, places) != 0, -1), entries.keys, entries.values)


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
