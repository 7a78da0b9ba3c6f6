"""Compact keys in memory, of each head by itself or of all heads joined: what the baselines predict from."""

from __future__ import annotations

from typing import Any

import torch

from hf_offload_cache.memory import MemoryAccount, lasting_empty

_CLIP = 5.0
"""An 8-bit component spans this many root mean squares to either side, as `LowRankKeys`' does."""


class CompactKeys:
    """Keys (B, Hk, T, D) as (B, T, P, r) in `dtype`, P projections of r components: P = Hk, or 1 for joined heads.

    Plain torch, one row at a time; for the thread that runs the model. Held in `account` as "compact keys" and
    "adapters".

    Args:
        projection: (P, W, r) float32, W = D for each head by itself, Hk D for joined heads.
        deviation: (P, r) float32, root mean square of each component, which fixes the 8-bit scale.
        dtype: torch.int8, or a floating type.
        num_key_heads: Hk.
        sequences: B.
    """

    def __init__(
        self,
        projection: torch.Tensor,
        deviation: torch.Tensor,
        dtype: torch.dtype,
        num_key_heads: int,
        sequences: int,
        account: MemoryAccount,
    ) -> None:
        self.projection = projection
        self.num_key_heads = num_key_heads
        self.scale = (deviation * (_CLIP / 127)).clamp_min(1e-12) if dtype == torch.int8 else torch.ones_like(deviation)
        self.tokens = 0
        self._account = account
        parts, _, rank = projection.shape
        self._keys = lasting_empty(sequences, 0, parts, rank, dtype=dtype, device=projection.device)
        account.hold("adapters", projection.nbytes)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row; grows by a little beyond what is asked once there is something."""
        if tokens > self._keys.shape[1]:
            room = tokens if not self.tokens else tokens + max(128, tokens // 32)
            shape = (self._keys.shape[0], room, *self._keys.shape[2:])
            grown = lasting_empty(*shape, dtype=self._keys.dtype, device=self._keys.device)
            grown[:, : self.tokens] = self._keys[:, : self.tokens]
            self._account.hold("compact keys", grown.nbytes - self._keys.nbytes)
            self._keys = grown

    def append(self, keys: torch.Tensor) -> None:
        """Project keys (B, Hk, t, D), or with the heads folded into the batch (B Hk, 1, t, D), and add them."""
        stop = self.tokens + keys.shape[2]
        self.reserve(stop)
        for row, own in enumerate(keys.reshape(-1, self.num_key_heads, *keys.shape[2:])):
            flat = own.transpose(0, 1).float().reshape(own.shape[1], self.projection.shape[0], -1)
            low = torch.einsum("tpw,pwr->tpr", flat, self.projection)
            if self._keys.dtype == torch.int8:
                low = (low / self.scale).round_().clamp_(-127, 127)
            self._keys[row, self.tokens : stop] = low
        self.tokens = stop

    def scores(self, query: torch.Tensor, row: int) -> torch.Tensor:
        """Approximate q k^T of query (H, D) of sequence `row` against all tokens: (H, T) float32, not scaled."""
        heads = query.float().unflatten(0, (self.num_key_heads, -1))
        adapter = self.projection.reshape(self.num_key_heads, heads.shape[-1], -1)
        scale = self.scale.expand(self.num_key_heads, -1)[:, None]
        low = ((heads @ adapter) * scale).to(torch.bfloat16)  # (Hk, H / Hk, r)
        keys = self._keys[row, : self.tokens].to(torch.bfloat16).permute(1, 2, 0)  # (P, r, T)
        return (low @ keys).flatten(0, 1).float()

    def rebuild(self, positions: torch.Tensor) -> torch.Tensor:
        """Keys (B, Hk, n, D) float32 of tokens `positions` (B, n), as far as the projection kept them."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        low = self._keys[rows, positions].float() * self.scale
        flat = torch.einsum("bnpr,pwr->bnpw", low, self.projection).flatten(2)
        return flat.unflatten(2, (self.num_key_heads, -1)).transpose(1, 2)

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of every row."""
        self.tokens = min(self.tokens, tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        old, self._keys = self._keys, self._keys.index_select(0, rows.to(self._keys.device))
        self._account.hold("compact keys", self._keys.nbytes - old.nbytes)

    def capture(self) -> dict[str, Any]:
        """What is held, as a tree for `restore`: no copies, valid until the next change."""
        names = ("projection", "scale", "num_key_heads")
        return {"keys": self._keys[:, : self.tokens], **{name: getattr(self, name) for name in names}}

    @classmethod
    def restore(cls, tree: dict[str, Any], account: MemoryAccount) -> CompactKeys:
        """A copy of what `tree` was captured of."""
        keys, projection = tree["keys"], tree["projection"]
        compact = cls(projection, tree["scale"], keys.dtype, tree["num_key_heads"], len(keys), account)
        compact.scale = tree["scale"]
        compact.reserve(keys.shape[1])
        compact._keys[:], compact.tokens = keys, keys.shape[1]
        return compact

    def close(self) -> None:
        """Give the memory back."""
        self._account.release("compact keys", self._keys.nbytes)
        self._account.release("adapters", self.projection.nbytes)
        self._keys, self.tokens = self._keys[:, :0], 0
