"""The low-bit copy C' of keys and values, and the selection of tokens by attention over it (SpeCache, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from ...errors import not_whole
from ...history.base import Sealed
from ...history.records import RecordFormat
from ...history.state import Array, State
from ...kernels import low_bit
from ...kernels.low_bit import BLOCK, pack, row_bytes
from ...kernels.mixed_attention import share
from ...kernels.on_a_device import has_step, plans_step
from ...kernels.ranking import MOST_UNITS, pick
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.base import Learner

# Memory layout of a low-bit copy (KIVI; SpeCache, section 3.4)

@dataclass(frozen=True)
class LowBitForm:
    """KIVI's groups: keys per channel, `group` tokens each; values per token, at most `group` channels each. A group is
    a row of `kernels.low_bit`.

    Attributes:
        plain: 1-bit groups by equation 2 (KIVI) instead of equation 3, for comparison (SpeCache, table 5).
    """

    entry: RecordFormat
    bits: int
    group: int
    plain: bool = False

    @cached_property
    def value_dim(self) -> int:
        """Channels of a value, padded to a multiple of 8."""
        return -(-self.entry.value_dim // 8) * 8

    @cached_property
    def value_group(self) -> int:
        """Channels of a value's group."""
        return max(size for size in range(8, self.group + 1, 8) if self.value_dim % size == 0)

    def layout(self, rows: int, tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes in bytes for `rows` rows of `tokens` tokens, complete groups: keys (rows, Hk, groups, Dk, row bytes)
        and values (rows, Hv, groups of channels, tokens, row bytes)."""
        entry, parts = self.entry, self.value_dim // self.value_group
        key_row, value_row = (row_bytes(group, self.bits) for group in (self.group, self.value_group))
        return {
            "keys": (rows, entry.num_key_heads, tokens // self.group, entry.key_dim, key_row),
            "values": (rows, entry.num_value_heads, parts, tokens, value_row),
        }


_PIECE = 512
"""Tokens of a row quantised at a time, unless a kernel does it, which needs no memory."""
_QUANTISED = {"cuda": 16 * _PIECE}
"""Device type -> tokens of all rows quantised at a time without a kernel, enough to keep it busy. Others: `_PIECE`."""


def _at_once(device_type: str) -> int:
    return _QUANTISED.get(device_type, _PIECE)


def fitting_bytes(form: LowBitForm, rows: int, tokens: int, device_type: str, kernels: bool) -> int:
    """Bytes in use while `tokens` tokens a row are quantised: three float32 copies of a piece, and its codes. With
    `kernels`: a group whose tokens come from two parts, with these tokens."""
    if kernels:
        return 2 * rows * min(tokens, form.group) * form.entry.entry_bytes
    width = max(form.entry.key_width, form.entry.entry_width - form.entry.key_width)
    return min(rows * tokens, _at_once(device_type)) * width * 13


class LowBitCopy:
    """The low-bit copy C' of `rows` rows of tokens, complete groups, on the history's device.

    The account books it as "low-bit copy". For the thread that runs the model. Products and sums are computed block by
    block, so it is never unpacked completely.

    Args:
        reserve: tokens a row to allocate at once. 0: room grows with the tokens, by an eighth more each time.
    """

    STATE: ClassVar[State] = State(
        "low-bit copy",
        "low-bit copy",
        {"tokens": "tokens", "groups": "groups"},
        keys=Array("rows key_heads groups key_dim key_bytes", torch.uint8, at="_keys"),
        values=Array("rows value_heads parts tokens value_bytes", torch.uint8, at="_values"),
    )

    def __init__(
        self, form: LowBitForm, rows: int, device: torch.device, account: MemoryAccount, reserve: int = 0
    ) -> None:
        self.form, self.rows, self.tokens, self.device = form, rows, 0, device
        self._account, self._reserve = account, reserve // form.group * form.group
        self._keys, self._values = (
            account.empty("low-bit copy", *shape, dtype=torch.uint8, device=device)
            for shape in form.layout(rows, 0).values()
        )

    @property
    def groups(self) -> int:
        """Groups of tokens a row."""
        return self.tokens // self.form.group

    @property
    def keys(self) -> torch.Tensor:
        """All groups of keys, shaped as in `LowBitForm.layout`: a view, valid until the next change, as `values`."""
        return self._keys[:, :, : self.tokens // self.form.group]

    @property
    def values(self) -> torch.Tensor:
        return self._values[:, :, :, : self.tokens]

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All memory of keys and values, shaped as in `LowBitForm.layout`, of which the first `tokens` are defined."""
        return self._keys, self._values

    def _need(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row. Raises `BudgetError` and changes nothing then."""
        if tokens > self._values.shape[3]:
            more = 0 if self._reserve or not self.tokens else tokens // 8 // self.form.group * self.form.group
            room = max(tokens + more, self._reserve)
            self.STATE.remake(self, tokens=room, groups=room // self.form.group)

    def rehearse(self, run: DryRun, tokens: int) -> None:
        """Take the size for `tokens` tokens a row, in a dry run."""
        self._need(tokens)
        if self.rows > 1:
            run.moves(self.STATE.nbytes(self))
        kernels = plans_step(self.device.type)
        many, few = (
            fitting_bytes(self.form, self.rows, min(tokens, count), self.device.type, kernels)
            for count in (tokens, self.form.group)
        )
        run.passes("fitting", prefill=many, decode=few)

    # --- quantise ----------------------------------------------------------------------------------------------

    def append(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> None:
        """Quantise and add `parts`, up to `tokens` tokens in total, complete groups: Quant of algorithms 1 and 3.

        A part is keys (rows, Hk, ·, Dk) and values (rows, Hv, ·, Dv), valid until the next part. Raises `BudgetError`,
        and any error of `parts`; the copy is unchanged then.
        """
        self._need(tokens)
        quantised, kernels = self.tokens, has_step(self.device)
        fitting = fitting_bytes(self.form, self.rows, tokens - quantised, self.device.type, kernels)
        at_once = self.rows * tokens if kernels else _at_once(self.device.type)
        with self._account.holding("fitting", fitting):
            for keys, values in _pieces(parts, tokens if kernels else _PIECE, self.form.group):
                self._quantise(quantised, keys, values, max(1, at_once // keys.shape[2]))
                quantised += keys.shape[2]
        self.tokens = quantised

    def _quantise(self, first: int, keys: torch.Tensor, values: torch.Tensor, rows: int) -> None:
        """Quantise complete groups as the tokens from `first` on, so many rows at a time."""
        form, group, stop = self.form, self.form.group, first + keys.shape[2]
        key_rows, value_rows = self._keys[:, :, first // group : stop // group], self._values[:, :, :, first:stop]
        for start in range(0, self.rows, rows):
            some = slice(start, start + rows)
            pack(keys[some], values[some], form.bits, form.plain, key_rows[some], value_rows[some])

    # --- attend ------------------------------------------------------------------------------------------------

    def scores(self, queries: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Products of queries (rows, Hk, n, Dk) float32 with the keys, in `out` (rows, Hk, n, tokens) float32."""
        low_bit.scores(queries, self.keys, self.form.bits, out)
        return out

    def weighted(self, shares: torch.Tensor) -> torch.Tensor:
        """Sums of the values by `shares` (rows, Hv, n, tokens) float32: (rows, Hv, n, Dv) float32."""
        total = low_bit.weighted(shares, self.values, self.form.bits, self.form.group)
        return total[..., : self.form.entry.value_dim]

    # --- changes and contexts ----------------------------------------------------------------------------------

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of every row, complete groups."""
        self.STATE.truncate(self, tokens=tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self.STATE.select_rows(self, rows)
        self.rows = len(rows)

    def capture(self) -> dict[str, Any]:
        """Views, valid until the next change."""
        return self.STATE.capture(self)

    def restore(self, tree: dict[str, Any], tokens: int, name: str) -> None:
        """Load a captured `tree` of `tokens` tokens a row, by copying. Raises `ContextError`, `BudgetError`."""
        sizes: dict[str, int] = {}
        for part, shape in self.form.layout(self.rows, tokens).items():
            sizes.update(zip(self.STATE.entries[part].sizes, shape, strict=True))
        self.STATE.check(self.STATE.own(tree), name, **sizes)
        self._need(tokens)
        self.tokens = tokens
        self.STATE.restore(self, tree)

    def close(self) -> None:
        """Free the memory. The copy may be filled again."""
        self.tokens = 0
        self.STATE.remake(self, tokens=0, groups=0)


def _pieces(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]], size: int, group: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`parts` cut into complete groups, at most `size` tokens at a time: views, or a copy of a group that begins in one
    part and ends in another."""
    begun: list[tuple[torch.Tensor, torch.Tensor]] = []
    lacks = 0  # tokens of the group that has begun
    for keys, values in parts:
        first, count = min(lacks, keys.shape[2]), keys.shape[2]
        if first < lacks:
            begun.append((keys.clone(), values.clone()))
            lacks -= first
            continue
        if first:
            yield _joined([*begun, (keys[:, :, :first], values[:, :, :first])])
        stop = count - (count - first) % group
        for start in range(first, stop, size):
            end = min(start + size, stop)
            yield keys[:, :, start:end], values[:, :, start:end]
        begun = [(keys[:, :, stop:].clone(), values[:, :, stop:].clone())] if stop < count else []
        lacks = (stop - count) % group


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)


# Selection by attention over the copy: ArgTopK (SpeCache, algorithms 2 and 3)

LOYALTY = 4
"""Weight of resident entries in the next selection. This saves reads, and among tokens with similar shares it matters
little which are in full precision."""


@dataclass(frozen=True)
class Scores:
    """Scores of a call on a device, by which the next tokens are selected: see `kernels.mixed_attention.share`."""

    scores: torch.Tensor
    """(B, Hk, n, tokens) float32, of the copy's tokens."""
    logarithm: torch.Tensor
    """(B, Hk, n) float32."""
    queries: int
    """Queries a sequence; those that are asked about are `first` to `stop`, the guess last."""
    first: int
    stop: int
    exist: torch.Tensor | None = None
    """() int64 on the device: number of the tokens that exist; None: all."""

    def importance(self, held: torch.Tensor | None, sinks: int, begin: torch.Tensor | None) -> torch.Tensor:
        """As `kernels.mixed_attention.share`."""
        asked = self.queries, self.first, self.stop
        return share(self.scores, self.logarithm, *asked, held, LOYALTY, sinks, begin, self.exist)


class LowBitPredictor(Learner):
    """Owner of the copy. It selects the tokens with most attention (ArgTopK of algorithms 2 and 3). See `Learner`.

    Args:
        reserve: tokens a row that the copy allocates at once; 0: it grows.
    """

    def __init__(
        self, form: LowBitForm, rows: int, num_sinks: int, device: torch.device, account: MemoryAccount, name: str,
        reserve: int = 0,
    ) -> None:  # fmt: skip
        self.copy, self._num_sinks, self._name = LowBitCopy(form, rows, device, account, reserve), num_sinks, name

    @staticmethod
    def scored_bytes(form: LowBitForm, tokens: int, rows: int, heads: int, queries: int, scores: int) -> int:
        """Bytes that attention over `tokens` tokens of the copy needs: `scores` float32 scores of each head and token,
        shares of `queries` queries of `heads` heads, and one unpacked block of a head with its scores."""
        key_heads, block = form.entry.num_key_heads, min(tokens, BLOCK)
        width = max(form.entry.key_dim, form.value_group) * 4 + form.entry.key_dim * 4 // form.group
        spread = max(form.entry.key_dim, form.value_group) // 4 if form.bits == 1 else 0
        unpacked = block * (width + spread + 4 * queries * heads // key_heads)
        among = rows * key_heads * (tokens + 2)  # whether each token is replaced
        return rows * 4 * (tokens + 1) * (heads * scores + key_heads * queries) + among + unpacked

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        """Declare the copy for `context` tokens a row. The layer declares the scores. See `Learner.rehearse`."""
        self.copy.rehearse(run, context // self.copy.form.group * self.copy.form.group)

    def ready(self, units: int) -> bool:
        return self.copy.tokens == units * self.copy.form.entry.group_size

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Quantise the sealed units, which follow the copy's tokens (algorithm 1, Quant). See `Learner.learn`."""
        assert self.copy.tokens + sealed.fresh == sealed.tokens, "tokens are missing"
        self.copy.append(sealed.parts, sealed.tokens)

    def most(
        self, shares: torch.Tensor | Scores, visible: torch.Tensor | None, count: int, held: torch.Tensor | None = None
    ) -> torch.Tensor:
        """ArgTopK of SpeCache: the at most `count` tokens (rows, heads, m) int64 with the largest shares of attention.

        The sinks are always among them. A token that is not `visible` becomes -1. If one of a head's shares is NaN, all
        are, and its attention too, whatever is selected. Then these are any tokens; on a device they are the first.

        Args:
            shares: (rows, heads, tokens) float32; changed in place. Scores on a device, for which nothing waits: then
                the tokens are ascending, and may be int32.
            visible: (B or 1, T) bool, excludes padding.
            held: resident tokens (rows, heads, n), -1: none; their shares count `LOYALTY` times.
        """
        if isinstance(shares, Scores):
            return self._most_on_device(shares, visible, count, held)
        sinks, count = min(self._num_sinks, shares.shape[2]), min(count, shares.shape[2])
        if not count:
            return shares.new_zeros(*shares.shape[:2], 0, dtype=torch.int64)
        if held is not None:
            times = torch.ones_like(held, dtype=shares.dtype).masked_fill_(held >= 0, LOYALTY)  # distinct tokens
            shares.scatter_reduce_(2, held.clamp(min=0), times, "prod")
        if visible is None:
            shares[:, :, :sinks] = torch.inf
        else:
            begin = visible[:, : shares.shape[2]].to(shares.device).int().argmax(1)
            first = (begin[:, None] + torch.arange(sinks, device=shares.device)).clamp(max=shares.shape[2] - 1)
            shares.scatter_(2, first[:, None].expand(len(shares), shares.shape[1], -1), torch.inf)
        best = shares.topk(count, 2, sorted=False).indices
        return best if visible is None else _seen(best, visible)

    def _most_on_device(
        self, scores: Scores, visible: torch.Tensor | None, count: int, held: torch.Tensor | None
    ) -> torch.Tensor:
        rows, heads, _, tokens = scores.scores.shape
        sinks, count = min(self._num_sinks, tokens), min(count, tokens)
        if not count:
            return scores.scores.new_zeros(rows, heads, 0, dtype=torch.int64)
        begin = None if visible is None else visible[:, :tokens].int().argmax(1)
        importance = scores.importance(held, sinks, begin)
        if tokens > MOST_UNITS:
            best = importance.topk(count, 1, sorted=False).indices
        else:
            best, _, _ = pick(importance, count, count)
        best = best.view(rows, heads, count)
        return best if visible is None else _seen(best.long(), visible)

    def truncate(self, units: int) -> None:
        self.copy.truncate(units * self.copy.form.entry.group_size)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.copy.select_rows(rows)

    def capture(self) -> dict[str, Any]:
        return self.copy.capture()

    def restore(self, tree: dict[str, Any]) -> None:
        tokens = tree["units"] * self.copy.form.entry.group_size
        if tokens % self.copy.form.group:
            raise not_whole(self._name, f"its {tokens} tokens are not complete groups of {self.copy.form.group}")
        self.copy.restore(tree, tokens, self._name)

    def close(self) -> None:
        self.copy.close()


def _seen(tokens: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`tokens` (rows, heads, m) int64, with padding as -1, even if few tokens remain. `visible`: as of `most`."""
    seen = visible.to(tokens.device)
    of_row = torch.arange(len(tokens), device=tokens.device)[:, None, None] % len(seen)
    return torch.where(seen[of_row, tokens], tokens, -1)
