"""Compact keys of one layer: what all kinds of them have in common, and what a ranking asks them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ...errors import not_whole, shown
from ...history.state import DTYPES, Array, State
from ...memory.account import MemoryAccount, Workspace
from ...memory.dry_run import DryRun
from .coding import Coding, most_bytes, most_components, parts
from .integer_product import multiplied, rounded

# Memory for something of every token of every row, which grows along the tokens and may be looked at by others

_ALONG = {
    axis: State("compact keys", "compact keys", {"places": "places"}, data=Array(shape, at="_data"))
    for axis, shape in ((1, "rows places width"), (2, "rows width places"))
}


class TokenRows:
    """A tensor with rows first and tokens along `axis`, and room for more. What it takes is in the account as
    "compact keys".

    Args:
        shape: (rows, 0, n) or (rows, n, 0), as `axis` says: 1 or 2.
        each: tokens of a unit; units and not tokens lie side by side along axis 2, and the tokens of each below each
            other: (rows, n * each, room). A maximum over a unit's tokens is one over whole rows then.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        axis: int,
        dtype: torch.dtype,
        device: torch.device,
        account: MemoryAccount,
        each: int = 1,
    ) -> None:
        self.axis, self.each, self.tokens = axis, each, 0
        self._account = account
        self._lent = 0  # so many first tokens are looked at by others too, and are not to be written to
        self._data = account.empty("compact keys", *shape, dtype=dtype, device=device)

    @classmethod
    def shared(cls, data: torch.Tensor, axis: int, account: MemoryAccount, each: int = 1) -> TokenRows:
        """Adopt all of `data`, complete units that others also use: it is copied before it is changed. The account
        counts the complete storage behind it, which it keeps in memory."""
        rows = cls((0, 0, 0), axis, data.dtype, data.device, account, each)
        account.hold("compact keys", data.untyped_storage().nbytes())
        rows._data = data
        rows._lent = rows.tokens = data.shape[axis] * each
        return rows

    def _places(self, tokens: int) -> int:
        """Places along the axis that so many tokens take."""
        return -(-tokens // self.each)

    @property
    def places(self) -> int:
        """Places along the axis that are in use."""
        return self._places(self.tokens)

    @property
    def data(self) -> torch.Tensor:
        """What is held, a view: valid until the next change."""
        return self._data.narrow(self.axis, 0, self._places(self.tokens))

    def of_units(self, row: int, units: np.ndarray, unit_size: int) -> torch.Tensor:
        """What is held of the tokens of `units` (n,) of a row, in their order: a copy, of one axis fewer. Units of
        `each` tokens, where that is not 1."""
        axis, held = self.axis - 1, self.data[row]
        unit_size //= self.each
        shape = [*held.shape[:axis], len(units) * unit_size, *held.shape[axis + 1 :]]
        parted = held.view(*held.shape[:axis], -1, unit_size, *held.shape[axis + 1 :])
        if held.is_cpu and held.dtype != torch.bfloat16:  # numpy is done before torch's threads are awake
            return torch.from_numpy(parted.numpy().take(units, axis).reshape(shape))
        return parted.index_select(axis, torch.from_numpy(units).to(held.device)).view(shape)

    def lend(self) -> torch.Tensor:
        """`data`, for who goes on looking at it: no later change is seen there."""
        self._lent = max(self._lent, self.tokens)
        return self.data

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row; grows by a little beyond what is asked once there is something."""
        room = self._data.shape[self.axis]
        if self._places(tokens) > room or (tokens > self.tokens and self.tokens < self._lent):
            more = max(128, tokens // 32) if self.tokens else 0
            _ALONG[self.axis].remake(self, places=self._places(tokens + more))
            self._lent = 0

    def rehearse(self, run: DryRun, tokens: int) -> None:
        """Be of `tokens` tokens a row, in a dry run."""
        self.reserve(tokens)
        if len(self._data) > 1:
            run.moves(self._data.nbytes)

    def append(self, more: torch.Tensor) -> None:
        """Add what is of further tokens, side by side; room was reserved."""
        first, count, each = self.tokens, more.shape[self.axis], self.each
        if each == 1:
            self._data.narrow(self.axis, first, count).copy_(more)
        else:
            parted = self._data.unflatten(1, (-1, each))
            head = min(count, -first % each)  # what fills a unit that was begun
            whole = (count - head) // each * each
            begun, units, rest = more.split([head, whole, count - head - whole], 2)
            place = self._places(first)
            if head:
                parted[..., first % each : first % each + head, place - 1] = begun
            parted[..., place : place + whole // each] = units.unflatten(2, (-1, each)).transpose(2, 3)
            if rest.shape[2]:
                parted[..., : rest.shape[2], place + whole // each] = rest
        self.tokens += count

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of every row."""
        self.tokens = min(self.tokens, tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now; in place where the number of rows stays."""
        _ALONG[self.axis].select_rows(self, rows, in_place=not self._lent)
        self._lent = 0

    def close(self) -> None:
        """Give the memory back."""
        self.tokens = 0
        _ALONG[self.axis].close(self)


BLOCK = 4096
"""Tokens that are scored at a time: what is made of them stays in the processor's cache. Twice as many of more than
four times as many: there the calls cost more than the memory does."""
HIDDEN = np.float32(-1e30)
"""The score of padding."""


class Asked(NamedTuple):
    """Low-rank queries on their way to scores."""

    queries: torch.Tensor
    """(h, components), as they are multiplied: in 8 bits where products are whole numbers."""
    factor: np.ndarray
    """(h, 1) float32: products times `factor`, plus `constant`, are scores."""
    constant: np.ndarray


def scored_at_once(tokens: int) -> int:
    """How many of so many tokens are scored at a time at most."""
    return min(tokens, BLOCK if tokens <= 4 * BLOCK else 2 * BLOCK)


class CompactKeys(ABC):
    """Something small of every key of every row, which tells about what a query's product with it is.

    For the thread that runs the model. What it holds is in the account. Scores are not scaled yet.
    """

    def __init__(self, rows: TokenRows) -> None:
        self._rows = rows

    @property
    def tokens(self) -> int:
        """Tokens a row that are held."""
        return self._rows.tokens

    @property
    def device(self) -> torch.device:
        return self._rows.data.device

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row. Raises `BudgetError`."""
        self._rows.reserve(tokens)

    @abstractmethod
    def append(self, keys: torch.Tensor) -> None:
        """Add keys (B, Hk, t, D). Raises `BudgetError`."""

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of every row."""
        self._rows.truncate(tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        self._rows.select_rows(rows)

    @abstractmethod
    def low_rank_query(self, query: torch.Tensor) -> np.ndarray:
        """(B, H, ·) float32, linear in query (B, H, D): what the scores are asked with, row by row."""

    @property
    def has_rough_form(self) -> bool:
        """Some of what is held says roughly what scores are, in less time."""
        return False

    @abstractmethod
    def _asked(self, low: np.ndarray, roughly: bool) -> Asked:
        """Low-rank queries (h, ·); `roughly`: those components that say most are enough."""

    @abstractmethod
    def _products(self, asked: Asked, some: torch.Tensor) -> torch.Tensor:
        """(h, n), of any type, with what is held of n tokens of a row: valid until the next. Where units lie side by
        side, the first tokens of all come first, then the second."""

    def best_of_units(
        self,
        low: np.ndarray,
        row: int,
        unit_size: int,
        visible: torch.Tensor | None,
        roughly: bool = False,
        units: np.ndarray | None = None,
    ) -> np.ndarray:
        """(h, n) float32: the largest score in each of `units` (n,) of `row`, None: of all, for low-rank queries
        (h, ·). `visible` (·, tokens) puts padding below everything. `roughly`: by those components that say most, if
        that is faster."""
        rows, asked = self._rows, self._asked(low, roughly)
        held = rows.data[row] if units is None else rows.of_units(row, units, unit_size)
        axis, heads, each = rows.axis - 1, len(low), rows.each
        tokens, found = held.shape[axis] * each, []
        seen = None if visible is None else self._seen(visible, row, units, unit_size)
        block = (scored_at_once(tokens) // unit_size or 1) * unit_size
        for first in range(0, tokens, block):
            count = block if first + block <= tokens else tokens - first
            raw = self._products(asked, held if count == tokens else held.narrow(axis, first // each, count // each))
            if seen is not None:
                least = -(2**30) if asked.queries.dtype == torch.int8 else torch.finfo(raw.dtype).min / 2
                raw.masked_fill_(~self._in_order(seen[first : first + count]), least)
            found.append(raw.view(heads, -1, unit_size).amax(2) if each == 1 else _largest(raw.view(heads, each, -1)))
        best: np.ndarray = (found[0] if len(found) == 1 else torch.cat(found, 1)).float().numpy(force=True)
        best *= asked.factor
        best += asked.constant
        return best

    def _seen(self, visible: torch.Tensor, row: int, units: np.ndarray | None, unit_size: int) -> torch.Tensor:
        """What of the tokens of `units` of a row is no padding, one after the other."""
        seen = visible[min(row, len(visible) - 1), : self.tokens]
        if units is None:
            return seen
        return seen.unflatten(0, (-1, unit_size))[torch.from_numpy(units).to(seen.device)].flatten()

    def _in_order(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n,) of tokens one after the other, in the order in which products come."""
        return tokens if self._rows.each == 1 else tokens.view(-1, self._rows.each).t().flatten()

    @abstractmethod
    def lesson(self) -> dict[str, Any]:
        """As `capture`, of no tokens: how keys are made compact."""

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """All that is held, as a tree to restore: no copies, not to be changed. Who holds it sees no later change."""

    def close(self) -> None:
        """Give the memory back."""
        self._rows.close()


def _largest(products: torch.Tensor) -> torch.Tensor:
    """(h, n) of (h, tokens of a unit, n): over the tokens."""
    if products.device.type != "cpu" or products.dtype == torch.bfloat16:
        return products.amax(1)
    return torch.from_numpy(np.maximum.reduce(products.numpy(), 1))


# Compact keys of a few bits a component, which are unpacked some at a time and multiplied as whole numbers

_ENCODED = 1 << 17
"""Elements of keys that are taken to float32 at a time."""


class CodedKeys(CompactKeys):
    """`CompactKeys` by a `Coding`: (B, bytes * tokens of a unit, units) uint8, on the device of the keys, so that each
    class of bits is unpacked, and the best token of each unit found, by a few operations on whole rows.

    Args:
        unit_size: tokens of a unit; 1: of any, whose tokens lie side by side.
        workspace: for what is unpacked and the scores of it; shared by layers.
    """

    STATE: ClassVar[State] = State("coded keys", codes=Array("rows bytes places", torch.uint8))

    def __init__(
        self,
        coding: Coding,
        num_key_heads: int,
        batch: int,
        account: MemoryAccount,
        workspace: Workspace,
        unit_size: int = 1,
    ) -> None:
        shape = batch, coding.nbytes * unit_size, 0
        super().__init__(TokenRows(shape, 2, torch.uint8, coding.keys.device, account, unit_size))
        self.coding = coding
        self._key_heads = num_key_heads
        self._account, self._workspace = account, workspace
        self._rank, self._offsets = coding.rank, coding.offsets
        self._queries, self._scale = coding.queries.numpy(), coding.query_scale.numpy()
        self._mean = coding.mean.numpy(force=True)
        self._coding_bytes = coding.own_bytes
        account.hold("adapters", self._coding_bytes)

    @classmethod
    def rehearse(
        cls, run: DryRun, width: int, nbytes: int, tokens: int, rows: int, heads: int, unit_size: int, wanted: int
    ) -> None:
        """Hold what `rows` rows of `tokens` tokens take in a dry run, before it is known how keys of `width` elements
        are coded. `heads`: query heads; `wanted`: units that are looked at closely."""
        nbytes, cpu = min(nbytes, most_bytes(width)), torch.device("cpu")
        codes = TokenRows((rows, nbytes * unit_size, 0), 2, torch.uint8, cpu, run, unit_size)
        codes.rehearse(run, tokens)
        run.keeps("adapters", Coding.most_own_bytes(width))
        most = max(scored_at_once(tokens), wanted * unit_size)
        scores = most * (most_components(width) + 4 * heads) + 4 * heads * -(-tokens // unit_size)
        run.passes("scores", decode=scores)

    def append(self, keys: torch.Tensor) -> None:
        self.reserve(self.tokens + keys.shape[2])
        rows, heads, _, dim = keys.shape
        for part in keys.split(max(1, _ENCODED // (rows * heads * dim)), 2):
            flat = part.transpose(1, 2).flatten(2)
            self._rows.append(torch.stack([self.coding.encode(row) for row in flat]))

    def close(self) -> None:
        super().close()
        self._account.release("adapters", self._coding_bytes)
        self._coding_bytes = 0

    # --- scores ------------------------------------------------------------------------------------------------

    def low_rank_query(self, query: torch.Tensor) -> np.ndarray:
        """(B, H, r + 1) float32: the last is the product with the mean."""
        heads = self._key_heads
        batch, _, dim = query.shape
        states = query.float().numpy(force=True).reshape(batch, heads, -1, dim)
        low = np.empty((*states.shape[:3], self._rank + 1), dtype=np.float32)
        np.matmul(states, self._queries.astype(np.float32).reshape(heads, dim, -1), out=low[..., :-1])
        low[..., :-1] *= self._scale
        np.matmul(states, self._mean.reshape(heads, dim, 1), out=low[..., -1:])
        return low.reshape(batch, query.shape[1], -1)

    @property
    def has_rough_form(self) -> bool:
        return self.coding.rough < self._rank

    def _asked(self, low: np.ndarray, roughly: bool) -> Asked:
        count = self.coding.rough if roughly else self._rank
        queries, unit, used = rounded(low[:, :count], self.device)
        return Asked(queries, unit, low[:, -1:] + (used @ self._offsets[:count])[:, None] * unit)

    def _products(self, asked: Asked, some: torch.Tensor) -> torch.Tensor:
        (heads, rank), each = asked.queries.shape, self._rows.each
        held, places = some.shape
        count = places * each
        wide, most = 4 * heads * count, max(count, scored_at_once(self._rows.tokens))
        memory = self._workspace.take(most * (self._rank + 4 * heads), dtype=torch.uint8, device=some.device)
        codes, out = some.view(held // each, each, places), memory[wide : wide + rank * count]
        unpacked = self.coding.unpacked(codes, out.view(rank, each, places))
        return multiplied(asked.queries, unpacked.view(rank, count), memory)

    # --- contexts ----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        return {**self.lesson(), "codes": self._rows.lend()}

    def lesson(self) -> dict[str, Any]:
        return {"coding": self.coding.capture(), "codes": self._rows.data[..., :0].clone()}

    @classmethod
    def restore(
        cls, tree: dict[str, Any], num_key_heads: int, account: MemoryAccount, workspace: Workspace, unit_size: int, /,
        **sizes: int,
    ) -> CodedKeys:  # fmt: skip
        """What `tree` was captured of, with these `sizes`: rows, places, and the width of the keys. Codes are shared
        with whoever else holds the tree until one of them changes; each one's account counts them. Raises
        `ContextError` where the tree does not hold together, `BudgetError`."""
        coding, codes = Coding.restore(tree["coding"], **sizes), tree["codes"]
        cls.STATE.check({"codes": codes}, "a layer", bytes=coding.nbytes * unit_size, **sizes)
        found = cls(coding, num_key_heads, 0, account, workspace, unit_size)
        found._rows = TokenRows.shared(codes, 2, account, unit_size)
        return found


# Compact keys: the keys of all heads joined and projected to a low rank, which a low-rank query is scored against

_CLIP = 5.0
"""An 8-bit component spans this many root mean squares to either side; what lies beyond is clipped."""

_WIDE = 2**16
"""Elements of a projection above which expanding it to float32 takes longer than the rest of the product."""

_ZERO, _ONE = np.zeros((1, 1), dtype=np.float32), np.ones((1, 1), dtype=np.float32)


def default_rank(key_width: int) -> int:
    """The width of a compact key when none is given: a quarter of the joined key width, from 16 to 160."""
    return min(key_width, max(16, min(160, key_width // 4)))


class LowRankKeys(CompactKeys):
    """`CompactKeys` as in the paper: (B, tokens, r) in `dtype`, on the device of the keys.

    Args:
        adapter: (Hk D, r) float32, the projection; kept by reference.
        deviation: (r,) float32, root mean square of each component, which fixes the 8-bit scale.
        dtype: torch.int8, or a floating type.
        num_key_heads: Hk.
        workspace: for the scores of one row, (H, tokens) in 32 bits; None: one of its own.
        queries: (Hk D, r) float32, the same for queries (see `reconstruction`); None: `adapter`, for orthonormal ones.

    Both projections are kept in bfloat16 where the keys are compact, which changes scores by less than 8 bits do; that
    of queries on the host. Kept in float32 it would take the place of three of forty components at a thirteenth of the
    full KV, and facts are lost with those. So a wide one is multiplied as it is, where the processor does that fast,
    and else it is taken to float32 at each ranking: microseconds for a narrow one.
    """

    STATE: ClassVar[State] = State(
        "compact keys",
        adapter=Array("heads dim rank", *DTYPES),
        queries=Array("heads dim rank", *DTYPES, optional=True),
        scale=Array("rank", *DTYPES),
        keys=Array("rows tokens rank", torch.int8, *DTYPES),
    )

    def __init__(
        self,
        adapter: torch.Tensor,
        deviation: torch.Tensor,
        dtype: torch.dtype,
        num_key_heads: int,
        batch: int,
        account: MemoryAccount,
        workspace: Workspace | None = None,
        queries: torch.Tensor | None = None,
    ) -> None:
        super().__init__(TokenRows((batch, 0, adapter.shape[-1]), 1, dtype, adapter.device, account))
        kept = torch.float32 if dtype == torch.float32 else torch.bfloat16
        shape = (num_key_heads, -1, adapter.shape[-1])
        self.adapter = adapter.to(kept).view(shape)
        self._plain = queries is None
        self._queries = (self.adapter if queries is None else queries.to(kept).view(shape)).cpu()
        self._as_it_is = kept == torch.bfloat16 and self._queries.numel() > _WIDE and multiplies_bfloat16()
        self._set_scale(
            (deviation * (_CLIP / 127)).clamp_min(1e-12) if dtype == torch.int8 else torch.ones_like(deviation)
        )
        self._account = account
        self._workspace = Workspace(account, "scores") if workspace is None else workspace
        self._adapter_bytes = self.adapter.nbytes + (0 if self._queries is self.adapter else self._queries.nbytes)
        account.hold("adapters", self._adapter_bytes)

    @classmethod
    def rehearse(
        cls, run: DryRun, width: int, rank: int, dtype: torch.dtype, tokens: int, rows: int, heads: int,
        unit_size: int, wanted: int,
    ) -> None:  # fmt: skip
        """Hold what `rows` rows of `tokens` tokens take in a dry run. `width`: elements of a key; `heads`: query heads;
        `wanted`: units that are looked at closely."""
        keys = TokenRows((rows, 0, rank), 1, dtype, torch.device("cpu"), run)
        keys.rehearse(run, tokens)
        run.keeps("adapters", 2 * width * rank * (4 if dtype == torch.float32 else 2))
        most = max(scored_at_once(tokens), wanted * unit_size)
        run.passes("scores", decode=4 * heads * (most + -(-tokens // unit_size)))

    def _set_scale(self, scale: torch.Tensor) -> None:
        self.scale = scale
        self._host_scale = scale.float().cpu().numpy()

    def capture(self) -> dict[str, Any]:
        return {**self.lesson(), "keys": self._rows.lend()}

    def lesson(self) -> dict[str, Any]:
        made_by = {"adapter": self.adapter, "queries": None if self._plain else self._queries, "scale": self.scale}
        return {**made_by, "keys": self._rows.data[:, :0].clone()}

    @classmethod
    def restore(
        cls, tree: dict[str, Any], account: MemoryAccount, workspace: Workspace | None = None, /, **sizes: int
    ) -> LowRankKeys:
        """What `tree` was captured of, with these `sizes`: rows, tokens, heads, dim. Keys are shared with whoever else
        holds the tree until one of them changes; each one's account counts them. Raises `ContextError` where the tree
        does not hold together."""
        sizes = cls.STATE.check(tree, "a layer", **sizes)
        if not 0 < sizes["rank"] <= sizes["heads"] * sizes["dim"]:
            raise not_whole("a layer", f"adapter of its compact keys is {shown(tree['adapter'])}")
        keys = tree["keys"]
        flat = {name: tree[name].flatten(0, 1) for name in ("adapter", "queries") if tree[name] is not None}
        compact = cls(
            flat["adapter"], torch.ones_like(tree["scale"]), keys.dtype, tree["adapter"].shape[0], 0, account,
            workspace, flat.get("queries"),
        )  # fmt: skip
        compact._set_scale(tree["scale"])
        compact._rows = TokenRows.shared(keys, 1, account)
        return compact

    def append(self, keys: torch.Tensor) -> None:
        self.reserve(self.tokens + keys.shape[2])
        for part in parts(keys):
            flat = part.transpose(1, 2).flatten(2).float() @ self.adapter.flatten(0, 1).float()
            if self._rows.data.dtype == torch.int8:
                flat = flat.div_(self.scale).round_().clamp_(-127, 127)
            self._rows.append(flat)

    def close(self) -> None:
        super().close()
        self._account.release("adapters", self._adapter_bytes)
        self._adapter_bytes = 0

    def low_rank_query(self, query: torch.Tensor) -> np.ndarray:
        """query (B, H, D) times the projection of its key head (equation 1) and the 8-bit scale: (B, H, r) float32."""
        batch, heads, dim = query.shape
        key_heads = self._queries.shape[0]
        if self._as_it_is:
            grouped = query.to("cpu", torch.bfloat16).view(batch, key_heads, -1, dim).transpose(0, 1).flatten(1, 2)
            low = torch.bmm(grouped, self._queries).float().view(key_heads, batch, -1, self._queries.shape[2])
            return low.transpose(0, 1).flatten(1, 2).numpy(force=True) * self._host_scale
        # By numpy: products this small are done before torch's threads are awake.
        states = query.float().numpy(force=True).reshape(batch, key_heads, -1, dim)
        return (np.matmul(states, self._queries.float().numpy()) * self._host_scale).reshape(batch, heads, -1)

    def _asked(self, low: np.ndarray, roughly: bool) -> Asked:
        if self._rows.data.dtype == torch.int8:
            return Asked(*rounded(low, self.device)[:2], _ZERO)
        return Asked(torch.from_numpy(low).to(self.device, self._rows.data.dtype), _ONE, _ZERO)

    def _products(self, asked: Asked, some: torch.Tensor) -> torch.Tensor:
        if some.dtype != torch.int8:
            return asked.queries @ some.t()
        size = 4 * len(asked.queries) * len(some)
        return multiplied(
            asked.queries, some.t(), self._workspace.take(size, dtype=torch.uint8, device=some.device)
        )


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies small matrices of bfloat16 faster than it takes them to float32 first.

    With AVX-512 in 0.5 to 0.8 of the time, with AVX2 alone in 4 to 7 times as much.
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
