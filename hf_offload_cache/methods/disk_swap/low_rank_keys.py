"""The paper's compact keys: the keys of all heads are joined and projected to a low rank (KVSwap, section 3.2)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import not_whole, shown
from ...history.state import DTYPES, Array, State
from ...memory.account import MemoryAccount, Workspace
from ...memory.dry_run import DryRun
from .coding import PART, parts
from .compact_keys import Asked, CompactKeys, multiplied, multiplies_bfloat16, rounded, scored_at_once
from .token_rows import TokenRows

_CLIP = 5.0
"""Root mean squares to either side that an 8-bit component spans; values beyond are clipped."""

_WIDE = 2**16
"""Elements of a projection above which its conversion to float32 takes longer than the product."""

_ZERO, _ONE = np.zeros((1, 1), dtype=np.float32), np.ones((1, 1), dtype=np.float32)


def default_rank(key_width: int) -> int:
    """Default rank of a compact key: a quarter of the joined key width, from 16 to 160."""
    return min(key_width, max(16, min(160, key_width // 4)))


class LowRankKeys(CompactKeys):
    """The paper's compact keys, K_lr = Flatten(K) A (KVSwap, section 3.2): (B, tokens, r) in `dtype`.

    They are on the keys' device.

    Args:
        adapter: A, (Hk D, r) float32; kept by reference.
        deviation: (r,) float32, root mean square of each component, which sets the 8-bit scale.
        dtype: torch.int8, or a floating type.
        num_key_heads: Hk.
        workspace: for the scores of one row, (H, tokens) in 32 bits; None: a new one.
        queries: (Hk D, r) float32, projection of queries (see `reconstruction`); None: `adapter`, if it is orthonormal.

    Unless `dtype` is float32, both projections are stored in bfloat16, which changes scores by less than 8-bit keys do.
    The projection of queries is on the host. In float32 it would cost three of forty components at 1/13 of the full KV
    cache, and those components retrieve needles. A wide projection is multiplied in bfloat16 if the processor does that
    fast. Otherwise it is converted to float32 at each ranking, which takes microseconds for a narrow one.
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
        """Declare the memory for `rows` rows of `tokens` tokens in a dry run. `width`: elements of a key; `heads`:
        query heads; `wanted`: candidate units that are scored with all components."""
        keys = TokenRows((rows, 0, rank), 1, dtype, torch.device("cpu"), run)
        keys.rehearse(run, tokens)
        run.keeps("adapters", 2 * width * rank * (4 if dtype == torch.float32 else 2))
        most = max(scored_at_once(tokens), wanted * unit_size)
        run.passes("scores", decode=4 * heads * (most + -(-tokens // unit_size)))

    def _set_scale(self, scale: torch.Tensor) -> None:
        self.scale = scale
        self._host_scale = scale.float().cpu().numpy()

    def capture(self) -> dict[str, Any]:
        return {**self.fitted_state(), "keys": self._rows.lend()}

    def fitted_state(self) -> dict[str, Any]:
        made_by = {"adapter": self.adapter, "queries": None if self._plain else self._queries, "scale": self.scale}
        return {**made_by, "keys": self._rows.data[:, :0].clone()}

    @classmethod
    def restore(
        cls, tree: dict[str, Any], account: MemoryAccount, workspace: Workspace | None = None, /, **sizes: int
    ) -> LowRankKeys:
        """The keys that `tree` was captured from, with these `sizes`: rows, tokens, heads, dim.

        Other holders of `tree` share the keys until one of them changes; each account books them. Raises
        `ContextError` if `tree` is inconsistent, `BudgetError`.
        """
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

    def append(self, keys: torch.Tensor, part: int = PART) -> None:
        self.reserve(self.tokens + keys.shape[2])
        for piece in parts(keys, part):
            self._rows.append(self._projected(piece))

    def close(self) -> None:
        super().close()
        self._account.release("adapters", self._adapter_bytes)
        self._adapter_bytes = 0

    def low_rank_query(self, query: torch.Tensor) -> np.ndarray:
        """Query (B, H, D) times its key head's projection (Q_h A_g(h) of KVSwap's equation 1) and the 8-bit scale:
        (B, H, r) float32."""
        batch, heads, dim = query.shape
        key_heads = self._queries.shape[0]
        if self._as_it_is:
            grouped = query.to("cpu", torch.bfloat16).view(batch, key_heads, -1, dim).transpose(0, 1).flatten(1, 2)
            low = torch.bmm(grouped, self._queries).float().view(key_heads, batch, -1, self._queries.shape[2])
            return low.transpose(0, 1).flatten(1, 2).numpy(force=True) * self._host_scale
        # numpy finishes products this small before torch's threads wake
        states = query.float().numpy(force=True).reshape(batch, key_heads, -1, dim)
        return (np.matmul(states, self._queries.float().numpy()) * self._host_scale).reshape(batch, heads, -1)

    def _asked(self, low: np.ndarray, roughly: bool) -> Asked:
        if self._rows.data.dtype == torch.int8:
            return Asked(*rounded(low, self.device)[:2], _ZERO)
        return Asked(torch.from_numpy(low).to(self.device, self._rows.data.dtype), _ONE, _ZERO)

    @property
    def rank(self) -> int:
        return self._rows.data.shape[2]

    def components(self, rows: slice, tokens: torch.Tensor) -> torch.Tensor:
        return self._rows.data[rows].index_select(1, tokens).transpose(1, 2)

    def _projected(self, keys: torch.Tensor) -> torch.Tensor:
        """Components (B, t, r) float32 of keys (B, Hk, t, D), in 8-bit steps if they are stored so."""
        flat = keys.transpose(1, 2).flatten(2).float() @ self.adapter.flatten(0, 1).float()
        return flat.div_(self.scale).round_().clamp_(-127, 127) if self._rows.data.dtype == torch.int8 else flat

    def _products(
        self, asked: Asked, stored: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if stored.dtype != torch.int8:
            return asked.queries @ stored.t(), stored.t()
        size = 4 * len(asked.queries) * len(stored)
        if memory is None:
            memory = self._workspace.take(size, dtype=torch.uint8, device=stored.device)
        return multiplied(asked.queries, stored.t(), memory), stored.t()
