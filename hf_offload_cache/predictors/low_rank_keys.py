"""Compact keys: the keys of all heads joined and projected to a low rank, which a low-rank query is scored against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import ContextError, shown
from ..history.captured_history import DTYPES, is_tensor
from ..memory.account import MemoryAccount
from ..memory.buffers import Workspace
from ..memory.plan import LayerPlan, Planned
from .compact_keys import Asked, CompactKeys, scored_at_once
from .directions import parts
from .integer_product import multiplied, rounded
from .token_rows import TokenRows

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

    @staticmethod
    def planned(
        width: int, rank: int, dtype: torch.dtype, tokens: int, rows: int, heads: int, unit_size: int, wanted: int
    ) -> LayerPlan:
        """What the compact keys of one layer take for `rows` rows of `tokens` tokens, `width` their keys' elements;
        `wanted` units are looked at closely."""
        keys = rows * tokens * rank * dtype.itemsize
        kept = 4 if dtype == torch.float32 else 2
        own = Planned.always({"compact keys": keys, "adapters": 2 * width * rank * kept})
        moving = {"moving rows": keys} if rows > 1 else {}  # old keys stay until the new ones are made
        most = max(scored_at_once(tokens), wanted * unit_size)
        scores = {"scores": 4 * heads * (most + -(-tokens // unit_size))}
        return LayerPlan(own, Planned(moving, {**moving, **scores}))

    def _set_scale(self, scale: torch.Tensor) -> None:
        self.scale = scale
        self._host_scale = scale.float().cpu().numpy()

    def capture(self) -> dict[str, Any]:
        return {
            "adapter": self.adapter,
            "queries": None if self._plain else self._queries,
            "scale": self.scale,
            "keys": self._rows.lend(),
        }

    def lesson(self) -> dict[str, Any]:
        return {**self.capture(), "keys": self._rows.data[:, :0].clone()}

    @classmethod
    def restore(cls, tree: dict[str, Any], account: MemoryAccount, workspace: Workspace | None = None) -> LowRankKeys:
        """What `tree` was captured of. Keys are shared with whoever else holds the tree until one of them changes; each
        one's account counts them. Raises `ContextError` where the tree does not hold together."""
        keys = tree["keys"]
        scale, projection = tree["scale"], tree["adapter"]
        queries = projection if tree["queries"] is None else tree["queries"]
        fits = is_tensor(projection, (None, None, None), *DTYPES)
        fits = fits and 0 < projection.shape[2] <= projection.shape[0] * projection.shape[1]
        fits = fits and is_tensor(queries, tuple(projection.shape), *DTYPES)
        fits = fits and is_tensor(scale, (projection.shape[2],), *DTYPES)
        if not fits or not is_tensor(keys, (None, None, projection.shape[2]), torch.int8, *DTYPES):
            found = [shown(each) for each in (keys, scale, projection, queries)]
            raise ContextError(
                f"compact keys, scale and projections of a context do not hold together: they are {', '.join(found)}; "
                "save the context anew"
            )
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

    def fits(self, rows: int, tokens: int, num_key_heads: int, key_dim: int) -> bool:
        held = (*self._rows.data.shape[:2], *self.adapter.shape[:2])
        return held == (rows, tokens, num_key_heads, key_dim)

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
