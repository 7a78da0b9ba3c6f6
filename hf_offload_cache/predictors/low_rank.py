"""KVSwap's predictor: keys of all heads joined and projected to a low rank, scored against a low-rank query."""

from __future__ import annotations

import numpy as np
import torch

from ..buffers import lasting_empty
from ..report import MemoryAccount

_CLIP = 5.0
"""An 8-bit component spans this many root mean squares to either side; what lies beyond is clipped."""

_CANDIDATES = 4
"""Times the groups wanted: of how many the mass is estimated."""
_GUESS_EVERY = 4
"""Of so many tokens one is scored when the query is a guess."""
_BELOW = 1e4
"""Puts what is no candidate below all candidates."""


def principal_directions(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """The `rank` leading eigenvectors (W, rank), float32, of a second moment K^T K (W, W): the right singular vectors
    of K (KVSwap, section 3.2), most energy first."""
    vectors = torch.linalg.eigh(moment.float())[1]
    return vectors[:, -rank:].flip(-1).contiguous()


class LowRankKeys:
    """The compact keys of one layer: (B, tokens, r) in `dtype`, on the device of the keys.

    Args:
        adapter: (Hk D, r) float32, the projection; kept by reference.
        deviation: (r,) float32, root mean square of each component, which fixes the 8-bit scale.
        dtype: torch.int8, or a floating type.
        num_key_heads: Hk.
    """

    def __init__(
        self,
        adapter: torch.Tensor,
        deviation: torch.Tensor,
        dtype: torch.dtype,
        num_key_heads: int,
        batch: int,
        account: MemoryAccount,
    ) -> None:
        self.adapter = adapter.view(num_key_heads, -1, adapter.shape[-1])
        self.scale = (deviation * (_CLIP / 127)).clamp_min(1e-12) if dtype == torch.int8 else torch.ones_like(deviation)
        self.tokens = 0
        self._account = account
        self._keys = lasting_empty(batch, 0, adapter.shape[-1], dtype=dtype, device=adapter.device)
        account.hold("adapters", adapter.nbytes)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row; grows by a little beyond what is asked once there is something."""
        if tokens > self._keys.shape[1]:
            room = tokens if not self.tokens else tokens + max(128, tokens // 32)
            shape = (self._keys.shape[0], room, self._keys.shape[2])
            grown = lasting_empty(*shape, dtype=self._keys.dtype, device=self._keys.device)
            grown[:, : self.tokens] = self._keys[:, : self.tokens]
            self._account.hold("compact keys", grown.nbytes - self._keys.nbytes)
            self._keys = grown

    def append(self, keys: torch.Tensor) -> None:
        """Project keys (B, Hk, t, D) and add them."""
        stop = self.tokens + keys.shape[2]
        self.reserve(stop)
        flat = keys.transpose(1, 2).flatten(2).float() @ self.adapter.flatten(0, 1)
        if self._keys.dtype == torch.int8:
            flat = (flat / self.scale).round_().clamp_(-127, 127)
        self._keys[:, self.tokens : stop] = flat
        self.tokens = stop

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of every row."""
        self.tokens = min(self.tokens, tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        old = self._keys
        self._keys = lasting_empty(len(rows), *old.shape[1:], dtype=old.dtype, device=old.device)
        torch.index_select(old, 0, rows.to(old.device), out=self._keys)
        self._account.hold("compact keys", self._keys.nbytes - old.nbytes)

    def close(self) -> None:
        self._account.release("compact keys", self._keys.nbytes)
        self._account.release("adapters", self.adapter.nbytes)
        self._keys, self.tokens = self._keys[:, :0], 0

    def low_rank_query(self, query: torch.Tensor) -> torch.Tensor:
        """query (B, H, D) times the adapter of its key head: (B, H, r) float32 (equation 1)."""
        grouped = query.detach().float().unflatten(1, (self.adapter.shape[0], -1))
        # a product a head: a batched one wakes torch's worker threads, which takes longer than the arithmetic
        parts = [part @ head for part, head in zip(grouped.unbind(1), self.adapter, strict=True)]
        return torch.cat(parts, 1) * self.scale

    def scores(self, query: torch.Tensor, every: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Low-rank queries (B, h, r) against compact keys: raw scores (B, tokens // every, h), and factors (B, 1, h)
        that they are to be multiplied by. 8-bit keys on a CPU are multiplied as integers, by the query in 8 bits."""
        keys = self._keys[:, : self.tokens : every]
        if keys.dtype == torch.int8 and keys.device.type == "cpu":
            unit = query.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
            query8 = (query / unit).round_().to(torch.int8).transpose(1, 2).contiguous()
            raw = [torch._int_mm(row, row_query) for row, row_query in zip(keys, query8, strict=True)]
            return raw[0][None] if len(raw) == 1 else torch.stack(raw), unit.transpose(1, 2)
        dtype = torch.bfloat16 if keys.dtype == torch.int8 else keys.dtype
        return keys.to(dtype) @ query.to(dtype).transpose(1, 2), query.new_ones(1, 1, 1)

    def group_importance(
        self,
        query: torch.Tensor,
        scaling: float,
        group_size: int,
        rule: str,
        wanted: int | None,
        visible: torch.Tensor | None = None,
    ) -> np.ndarray:
        """How much each group matters to query (B, H, D): (B, tokens // group_size) float32, to be compared in a row;
        the order is right among the `wanted` best. `visible` (·, tokens) leaves padding out of all of it.

        "default": the group's estimated attention mass, summed over heads. Heads count alike: those with large raw
        scores do not drown the others. The best token of each group, a pass over integers, finds the candidates;
        exponentials are taken of these alone. Without `wanted`, for a guess, the best of every fourth token decides: a
        quarter of the bytes.
        "paper": raw scores summed over heads, then the maximum in the group (section 3.3, "Scoring and selection");
        the sum is linear, so one vector stands for all heads.

        The keys' device makes the scores and their maxima; the rest is small, and done by numpy on the host, where
        each of ten operations costs a few microseconds instead of waking torch's threads.
        """
        low = self.low_rank_query(query)
        every = _GUESS_EVERY if wanted is None and rule == "default" and group_size % _GUESS_EVERY == 0 else 1
        raw, unit = self.scores(low.sum(1, keepdim=True) if rule == "paper" else low, every)
        if visible is not None:
            visible = visible[:, ::every]
            least = -(2**30) if raw.dtype == torch.int32 else torch.finfo(raw.dtype).min / 2
            raw = raw.masked_fill(~visible[:, :, None], least)
        grouped = raw.unflatten(1, (-1, group_size // every))
        best = _host(grouped.amax(2).transpose(1, 2).contiguous())  # (B, h, groups)
        if rule == "paper":
            return best[:, 0]
        factor = _host(unit * scaling).transpose(0, 2, 1)
        best *= factor
        top = best.max(-1, keepdims=True)
        peaks = _exp(best - top)
        total = peaks.sum(-1, keepdims=True)
        rough = np.matmul(1 / total.transpose(0, 2, 1), peaks)[:, 0]
        if wanted is None:
            return rough
        candidates = largest(rough, min(_CANDIDATES * wanted, rough.shape[1]))
        indices = torch.from_numpy(candidates).to(raw.device)
        chosen = [row.index_select(0, of) for row, of in zip(grouped, indices, strict=True)]
        scores = _host(torch.stack(chosen).permute(0, 3, 1, 2).contiguous())  # (B, h, candidates, G)
        mass = _exp(scores * factor[..., None] - top[..., None]).sum(-1)
        total += (mass - np.take_along_axis(peaks, candidates[:, None], 2)).sum(-1, keepdims=True)
        importance = rough - _BELOW
        np.put_along_axis(importance, candidates, np.matmul(1 / total.transpose(0, 2, 1), mass)[:, 0], 1)
        return importance


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Positions (B, count) of the largest of values (B, n), in no order."""
    return np.argpartition(values, values.shape[1] - count, 1)[:, values.shape[1] - count :]


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()


def _exp(values: np.ndarray) -> np.ndarray:
    """exp of values at most 0; those too small for a normal number take many times longer and count for nothing."""
    return np.exp(np.maximum(values, -80.0, dtype=np.float32))
