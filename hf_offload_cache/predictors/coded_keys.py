"""Compact keys of a few bits a component, which are unpacked some at a time and multiplied as whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import ContextError, shown
from ..history.captured_history import is_tensor
from ..memory.account import MemoryAccount
from ..memory.buffers import Workspace
from ..memory.plan import LayerPlan, Planned
from .coding import Coding, most_bytes, most_components
from .compact_keys import Asked, CompactKeys, scored_at_once
from .integer_product import multiplied, rounded
from .token_rows import TokenRows

_ENCODED = 1 << 17
"""Elements of keys that are taken to float32 at a time."""


class CodedKeys(CompactKeys):
    """`CompactKeys` by a `Coding`: (B, bytes * tokens of a unit, units) uint8, on the device of the keys, so that each
    class of bits is unpacked, and the best token of each unit found, by a few operations on whole rows.

    Args:
        unit_size: tokens of a unit; 1: of any, whose tokens lie side by side.
        workspace: for what is unpacked and the scores of it; shared by layers.
    """

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

    @staticmethod
    def planned(
        width: int, nbytes: int, tokens: int, rows: int, heads: int, unit_size: int, wanted: int
    ) -> LayerPlan:
        """What one layer takes for `rows` rows of `tokens` tokens, `width` their keys' elements; `wanted` units are
        looked at closely."""
        keys = rows * -(-tokens // unit_size) * unit_size * min(nbytes, most_bytes(width))
        own = Planned.always({"compact keys": keys, "adapters": Coding.planned(width)})
        moving = {"moving rows": keys} if rows > 1 else {}  # old keys stay until the new ones are made
        most = max(scored_at_once(tokens), wanted * unit_size)
        rank = most_components(width)
        scores = most * (rank + 4 * heads) + 4 * heads * -(-tokens // unit_size)
        return LayerPlan(own, Planned(moving, {**moving, "scores": scores}))

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

    def fits(self, rows: int, tokens: int, num_key_heads: int, key_dim: int) -> bool:
        held = self._rows.data.shape[0], self.tokens, self._key_heads, len(self.coding.mean)
        return held == (rows, tokens, num_key_heads, num_key_heads * key_dim)

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
        return {"coding": self.coding.capture(), "codes": self._rows.lend()}

    def lesson(self) -> dict[str, Any]:
        return {"coding": self.coding.capture(), "codes": self._rows.data[..., :0].clone()}

    @classmethod
    def restore(
        cls, tree: dict[str, Any], num_key_heads: int, account: MemoryAccount, workspace: Workspace, unit_size: int
    ) -> CodedKeys:
        """What `tree` was captured of. Codes are shared with whoever else holds the tree until one of them changes
        (those of a context of version 2 are laid anew); each one's account counts them. Raises `ContextError` where
        the tree does not hold together, `BudgetError`."""
        coding, codes = Coding.restore(tree["coding"]), tree["codes"]
        if not is_tensor(codes, (None, None, None), torch.uint8):
            raise ContextError(f"coded keys of a context are {shown(codes)}: save the context anew")
        by_token = codes.ndim == 3 and codes.shape[1] == coding.nbytes and codes.shape[2] % unit_size == 0
        if unit_size > 1 and by_token:
            with account.holding("moving rows", codes.nbytes):  # in version 2 of the format tokens lie side by side
                codes = codes.unflatten(2, (-1, unit_size)).transpose(2, 3).flatten(1, 2)
        if codes.shape[1] != coding.nbytes * unit_size:
            raise ContextError(
                f"coded keys of a context are {tuple(codes.shape)} {codes.dtype}, and their coding has "
                f"{coding.nbytes} bytes for each of {unit_size} tokens: save the context anew"
            )
        found = cls(coding, num_key_heads, 0, account, workspace, unit_size)
        found._rows = TokenRows.shared(codes, 2, account, unit_size)
        return found
