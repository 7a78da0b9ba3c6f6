"""Compact keys: the keys of all heads joined and projected to a low rank, which a low-rank query is scored against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import ContextError
from ..memory.account import MemoryAccount
from ..memory.buffers import Workspace, lasting_empty
from ..memory.plan import LayerPlan, Planned
from .directions import PART, parts

_CLIP = 5.0
"""An 8-bit component spans this many root mean squares to either side; what lies beyond is clipped."""

_WIDE = 2**16
"""Elements of a projection above which expanding it to float32 takes longer than the rest of the product."""

EXPANDED = 4096
"""Compact keys that are taken to a wider type at a time, where the product is none of integers."""


def default_rank(key_width: int) -> int:
    """The width of a compact key when none is given: a quarter of the joined key width, from 16 to 160."""
    return min(key_width, max(16, min(160, key_width // 4)))


class LowRankKeys:
    """The compact keys of one layer: (B, tokens, r) in `dtype`, on the device of the keys.

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
        kept = torch.float32 if dtype == torch.float32 else torch.bfloat16
        shape = (num_key_heads, -1, adapter.shape[-1])
        self.adapter = adapter.to(kept).view(shape)
        self._plain = queries is None
        self._queries = (self.adapter if queries is None else queries.to(kept).view(shape)).cpu()
        self._as_it_is = kept == torch.bfloat16 and self._queries.numel() > _WIDE and multiplies_bfloat16()
        self._set_scale(
            (deviation * (_CLIP / 127)).clamp_min(1e-12) if dtype == torch.int8 else torch.ones_like(deviation)
        )
        self.tokens = 0
        self._account = account
        self._workspace = Workspace(account, "scores") if workspace is None else workspace
        self._keys = lasting_empty(batch, 0, adapter.shape[-1], dtype=dtype, device=adapter.device)
        self._adapter_bytes = self.adapter.nbytes + (0 if self._queries is self.adapter else self._queries.nbytes)
        account.hold("adapters", self._adapter_bytes)
        self._lent = 0  # so many first tokens of `_keys` are looked at by others too, and are not to be written to

    @staticmethod
    def planned(
        width: int, rank: int, dtype: torch.dtype, tokens: int, rows: int, heads: int, group_size: int
    ) -> LayerPlan:
        """What the compact keys of one layer take for `rows` rows of `tokens` tokens, `width` their keys' elements."""
        keys = rows * tokens * rank * dtype.itemsize
        kept = 4 if dtype == torch.float32 else 2
        own = Planned.always({"compact keys": keys, "adapters": 2 * width * rank * kept})
        moving = {"moving rows": keys} if rows > 1 else {}  # old keys stay until the new ones are made
        scores = {"scores": heads * (tokens + -(-tokens // group_size)) * 4}
        return LayerPlan(own, Planned(moving, {**moving, **scores}))

    def _set_scale(self, scale: torch.Tensor) -> None:
        self.scale = scale
        self._host_scale = scale.float().cpu().numpy()

    def capture(self) -> dict[str, Any]:
        """What is held, as a tree for `restore`: no copies, not to be changed. Who holds it sees no later change."""
        self._lent = max(self._lent, self.tokens)
        return {
            "adapter": self.adapter,
            "queries": None if self._plain else self._queries,
            "scale": self.scale,
            "keys": self._keys[:, : self.tokens],
        }

    @classmethod
    def restore(cls, tree: dict[str, Any], account: MemoryAccount, workspace: Workspace | None = None) -> LowRankKeys:
        """What `tree` was captured of. Keys are shared with whoever else holds the tree until one of them changes; each
        one's account counts them. Raises `ContextError` where the tree does not hold together."""
        keys = tree["keys"]
        scale, projection = tree["scale"], tree["adapter"]
        queries = projection if tree["queries"] is None else tree["queries"]
        fits = keys.shape[-1] > 0 and scale.shape == keys.shape[-1:] and queries.shape == projection.shape
        kinds = all(each.is_floating_point() for each in (projection, queries, scale))
        if not fits or not kinds or not (keys.dtype == torch.int8 or keys.is_floating_point()):
            found = [f"{tuple(each.shape)} {each.dtype}" for each in (keys, scale, projection, queries)]
            raise ContextError(
                f"compact keys, scale and projections of a context do not hold together: they are {', '.join(found)}; "
                "save the context anew"
            )
        flat = {name: tree[name].flatten(0, 1) for name in ("adapter", "queries") if tree[name] is not None}
        compact = cls(
            flat["adapter"], torch.ones_like(tree["scale"]), keys.dtype, tree["adapter"].shape[0], keys.shape[0],
            account, workspace, flat.get("queries"),
        )  # fmt: skip
        compact._set_scale(tree["scale"])
        account.hold("compact keys", keys.nbytes)
        compact._keys = keys
        compact._lent = compact.tokens = keys.shape[1]
        return compact

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row; grows by a little beyond what is asked once there is something."""
        if tokens > self._keys.shape[1] or (tokens > self.tokens and self.tokens < self._lent):
            room = tokens if not self.tokens else tokens + max(128, tokens // 32)
            shape = (self._keys.shape[0], room, self._keys.shape[2])
            self._account.hold("compact keys", shape[0] * shape[1] * shape[2] * self._keys.element_size())
            grown = lasting_empty(*shape, dtype=self._keys.dtype, device=self._keys.device)
            grown[:, : self.tokens] = self._keys[:, : self.tokens]
            self._account.release("compact keys", self._keys.nbytes)
            self._keys, self._lent = grown, 0

    def append(self, keys: torch.Tensor) -> None:
        """Project keys (B, Hk, t, D) and add them."""
        self.reserve(self.tokens + keys.shape[2])
        for part in parts(keys):
            stop = self.tokens + part.shape[2]
            flat = part.transpose(1, 2).flatten(2).float() @ self.adapter.flatten(0, 1).float()
            if self._keys.dtype == torch.int8:
                flat = flat.div_(self.scale).round_().clamp_(-127, 127)
            self._keys[:, self.tokens : stop] = flat
            self.tokens = stop

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of every row."""
        self.tokens = min(self.tokens, tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now; in place where the number of rows stays."""
        rows = rows.to(self._keys.device)
        if len(rows) == self._keys.shape[0] and not self._lent:
            for part in self._keys[:, : self.tokens].split(PART, 1):
                part.copy_(part.index_select(0, rows))
            return
        old, shape = self._keys, (len(rows), *self._keys.shape[1:])
        self._account.hold("compact keys", len(rows) * old[0].nbytes)
        self._keys = lasting_empty(*shape, dtype=old.dtype, device=old.device)
        torch.index_select(old, 0, rows, out=self._keys)
        self._lent = 0
        self._account.release("compact keys", old.nbytes)

    def close(self) -> None:
        self._account.release("compact keys", self._keys.nbytes)
        self._account.release("adapters", self._adapter_bytes)
        self._keys, self.tokens = self._keys.new_empty(self._keys.shape[0], 0, self._keys.shape[2]), 0

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

    def scores(self, low: np.ndarray, keys: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Low-rank queries (h, r) against compact keys (n, r): raw scores (h, n), in `out` if given, and factors (h, 1)
        float32 that they are to be multiplied by. 8-bit keys on a CPU are multiplied as integers, by the query in 8
        bits."""
        if keys.dtype == torch.int8 and keys.device.type == "cpu":
            unit = np.maximum(np.maximum.reduce(np.abs(low), -1, keepdims=True), 1e-30) / 127
            query8 = torch.from_numpy(np.rint(low / unit).astype(np.int8))
            return torch._int_mm(query8, keys.t(), **({} if out is None else {"out": out})), unit
        dtype = torch.bfloat16 if keys.dtype == torch.int8 else keys.dtype
        raw = expanded_product(torch.from_numpy(low).to(keys.device, dtype), keys, out)
        return raw, np.ones((len(low), 1), dtype=np.float32)

    def row_scores(self, low: np.ndarray, row: int, visible: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        """As `scores`, of low-rank queries (h, r) against all keys of one row: (h, tokens), valid until the next call.
        `visible` (·, tokens) puts padding below everything."""
        keys, out = self._keys[row, : self.tokens], None
        if keys.dtype == torch.int8:
            kind = torch.int32 if keys.device.type == "cpu" else torch.bfloat16
            out = self._workspace.take(low.shape[0], self.tokens, dtype=kind, device=keys.device)
        raw, unit = self.scores(low, keys, out)
        if visible is not None:
            least = -(2**30) if raw.dtype == torch.int32 else torch.finfo(raw.dtype).min / 2
            raw.masked_fill_(~visible[min(row, len(visible) - 1), : self.tokens], least)
        return raw, unit

    def of_units(self, row: int, units: torch.Tensor, unit_size: int) -> torch.Tensor:
        """Compact keys (n * unit_size, r) of one row's `units` (n,), a copy."""
        return self._keys[row, : self.tokens].unflatten(0, (-1, unit_size)).index_select(0, units).flatten(0, 1)

    @property
    def device(self) -> torch.device:
        return self._keys.device


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies small matrices of bfloat16 faster than it takes them to float32 first.

    With AVX-512 in 0.5 to 0.8 of the time, with AVX2 alone in 4 to 7 times as much.
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def expanded_product(queries: torch.Tensor, keys: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """queries (h, r) times keys (n, r), maybe of a narrower type: (h, n) in the queries' type, in `out` if given.

    Keys are taken to the queries' type some at a time: a copy of all would be twice as large, and in no account.
    """
    if keys.dtype == queries.dtype:
        return torch.mm(queries, keys.t())
    raw = queries.new_empty(len(queries), len(keys)) if out is None else out
    for start in range(0, len(keys), EXPANDED):
        part = keys[start : start + EXPANDED]
        raw[:, start : start + len(part)] = queries @ part.to(queries.dtype).t()
    return raw
