"""`MixedAttention` in a few kernels, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..fetch.chosen_entries import Entries
from ..kernels.on_a_device import has_kernels
from .low_bit_copy import LowBitCopy


class FusedAttention:
    """As `MixedAttention`, where `fits` says so; `latest` may come in parts. Products with the copy are of half
    precision, sums of single; those with stored entries in TF32, which has all of 16 bits, or of 32 bits in 32. Nothing
    is kept between two calls."""

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
        """A mask says of each token alone whether it is seen: of the copy's all queries see the same."""
        entry = copy.form.entry
        if softcap is not None or s_aux is not None or not has_kernels(query.device, entry.key_dim, entry.value_dim):
            return False
        from ..kernels.mixed_attention_triton import MOST_QUERIES

        queries = query.shape[1] // entry.num_key_heads * query.shape[2]
        return queries <= MOST_QUERIES and (mask is None or mask.dtype == torch.bool)

    def attend(
        self, replaced: Sequence[Entries], asked: Sequence[int] = (), *, last: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `MixedAttention.attend`; `asked` are adjacent, and any call may be the `last`."""
        with torch.cuda.device_of(self._queries):  # a kernel is launched on the current one
            return self._attend(replaced, asked)

    def _attend(
        self, replaced: Sequence[Entries], asked: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        from ..kernels.mixed_attention_triton import Parts

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
            replaced = [self._seen(one, hidden) for one in replaced]
        for one in replaced:  # the last column is for tokens that are none
            hidden.scatter_(2, one.tokens.masked_fill(one.tokens < 0, tokens), 1)
        given = self._queries, self._scaling, self._count, form.entry.value_dim, hidden
        parts = Parts(*given, len(replaced) + len(self._latest), form.group)
        held = self._copy.capture()
        parts.copy(held["keys"], held["values"], form.bits)
        for one in replaced:
            parts.stored(one.keys, one.values, one.tokens)
        after, first = sum(keys.shape[2] for keys, _ in self._latest), 0
        for keys, values in self._latest:
            stop = first + keys.shape[2]
            parts.latest(keys, values, None if seen is None else seen[:, first:stop].contiguous(), after - stop)
            first = stop
        output = parts.merged()
        return output, list(parts.shares(asked[0], len(asked))) if asked else []

    @staticmethod
    def _seen(held: Entries, hidden: torch.Tensor) -> Entries:
        """Those that are not hidden; the others are none."""
        places = held.tokens.masked_fill(held.tokens < 0, hidden.shape[2] - 1)
        return Entries(held.tokens.masked_fill(hidden.gather(2, places) != 0, -1), held.keys, held.values)
