"""Attention of a prompt over its active blocks only, those with most of the attention mass (SparKV, section IV-C)."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.filling import Filling
from ..core.layer import OffloadLayer, Output
from ..errors import ContextError, shown
from ..history.state import is_tensor
from ..methods.disk_swap.cache import DiskSwapCache
from ..model.attention_call import AttentionCall
from ..model.stream_attention import stream_attention

BLOCK = 128
"""Tokens of a block, of queries and of keys."""
_LEAST, _MOST = 16, 8192
"""Limits of a block's tokens that are accepted from others: with smaller blocks, attending to everything is faster."""


@dataclass(frozen=True)
class ActiveBlocks:
    """The active blocks of one context. In layers without an entry, queries attend to everything.

    Attributes:
        block: tokens of a block, of queries and of keys; the last one may be shorter.
        layers: by index, (key heads, blocks of queries, blocks of keys) bool; a block of queries includes its own keys.
    """

    block: int
    layers: dict[int, np.ndarray]

    def attended(self, layer_idx: int, start: int, stop: int) -> float:
        """Mean number of tokens that a query of the blocks from token `start` to `stop` attends to, over all heads."""
        active = self.layers.get(layer_idx)
        if active is None:
            return (start + stop) / 2
        own = active[:, start // self.block : -(-stop // self.block)]
        return float(own.sum(2).mean()) * self.block - self.block / 2  # a query sees half of its own block

    @property
    def share(self) -> float:
        """Share of active blocks among those that queries can see, in all layers with an entry."""
        blocks = [np.tril(np.ones(active.shape[1:])).sum() * len(active) for active in self.layers.values()]
        return float(sum(active.sum() for active in self.layers.values()) / sum(blocks)) if blocks else 1.0

    def captured(self) -> dict[str, Any]:
        """A tree for `contexts.state.pack`."""
        bits = {idx: torch.from_numpy(np.packbits(active, axis=-1)) for idx, active in self.layers.items()}
        return {"block": self.block, "layers": bits}

    @classmethod
    def restored(
        cls, tree: dict[str, Any], tokens: int, layers: int, heads: int,
        taking: Callable[[int], object] = lambda nbytes: None,
    ) -> ActiveBlocks:  # fmt: skip
        """Restore the active blocks of a context with so many tokens. `taking` is called with the bytes they take,
        eight times those of `tree`, before the memory is allocated. Raises `ContextError` for data that cannot belong
        to the context, and the errors of `taking`."""
        try:
            block, packed = tree["block"], dict(tree["layers"])
            if type(block) is not int or not _LEAST <= block <= _MOST:
                raise ValueError(f"blocks of {shown(block)} tokens")
            blocks = -(-tokens // block)
            for idx, bits in packed.items():
                known = type(idx) is int and 0 <= idx < layers
                if not known or not is_tensor(bits, (heads, blocks, -(-blocks // 8)), torch.uint8):
                    raise ValueError(f"layer {shown(idx)} has {shown(bits)}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ContextError(f"active blocks are not of this context: {error}") from error
        taking(len(packed) * heads * blocks**2)
        restored, before = {}, np.tri(blocks, dtype=bool)
        for idx in list(packed):
            active = np.unpackbits(packed.pop(idx).numpy(), axis=-1, count=blocks).view(bool)
            active[:, np.arange(blocks), np.arange(blocks)] = True
            active &= before
            restored[idx] = active
        return cls(block, restored)


def measure_active_blocks(
    model: Any, ids: torch.Tensor, mass: float, block: int = BLOCK, most: float = 0.7, path: str | Path | None = None
) -> ActiveBlocks:
    """Measure active blocks by another prefill of ids (T,), from all attention weights. A query's own block is always
    active.

    Args:
        mass: least share of the attention mass of a block of queries and a key head that its active blocks have.
        most: a layer with a larger share of active blocks gets no entry, because attending to everything is faster.
    """
    measured: dict[int, list[np.ndarray]] = {}

    def attend(layer: OffloadLayer, call: AttentionCall) -> Output:
        keys, values = layer.joined(call)
        if call.query.shape[0] == 1:
            measured.setdefault(layer.layer_idx, []).extend(_active(call, keys, mass, block))
        return call.run(keys, values, call.mask)

    size = max(1, 2048 // block) * block
    with DiskSwapCache(model, exact=True, path=path) as cache:
        filling = Filling(cache)
        for part in ids[None].to(cache.model.device).split(size, 1):
            filling.compute(part, lambda layer: True, attend)
    blocks = -(-len(ids) // block)
    layers = {}
    for idx, rows in measured.items():
        active = np.zeros((rows[0].shape[0], blocks, blocks), dtype=bool)
        for place, row in enumerate(rows):
            active[:, place, : row.shape[1]] = row
        if active.sum() <= most * np.tril(np.ones((blocks, blocks))).sum() * len(active):
            layers[idx] = active
    return ActiveBlocks(block, layers)


def _active(call: AttentionCall, keys: torch.Tensor, mass: float, block: int) -> list[np.ndarray]:
    """For each block of queries, (key heads, blocks up to its own) bool."""
    query, heads = call.query[0].float(), keys.shape[1]
    before, rows = keys.shape[2] - query.shape[1], []
    for begin in range(0, query.shape[1], block):
        part = query[:, begin : begin + block]
        last = before + begin + part.shape[1]
        positions = torch.arange(before + begin, last, device=keys.device)
        scores = part.reshape(heads, -1, part.shape[-1]) @ keys[0, :, :last].float().mT * call.scaling
        scores = scores.unflatten(1, (-1, part.shape[1]))
        scores.masked_fill_(torch.arange(last, device=keys.device) > positions[:, None], -torch.inf)
        of_keys = scores.softmax(-1).sum((1, 2))  # (key heads, last)
        padded = torch.nn.functional.pad(of_keys, (0, -last % block))
        of_blocks = padded.unflatten(1, (-1, block)).sum(2).cpu().numpy()
        order = np.argsort(-of_blocks, 1, kind="stable")
        reached = np.take_along_axis(of_blocks, order, 1).cumsum(1)
        needed = (reached < mass * of_blocks.sum(1, keepdims=True)).sum(1) + 1
        active = np.zeros(of_blocks.shape, dtype=bool)
        for head, count in enumerate(needed):
            active[head, order[head, :count]] = True
        active[:, -1] = True
        rows.append(active)
    return rows


def has_kernel(device: torch.device) -> bool:
    """Whether FlexAttention has a kernel for this device that skips blocks. On a CPU, compiling one takes longer than
    many a prefill."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def attend_blocks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, active: torch.Tensor, before: int, block: int, *,
    scaling: float, softcap: float | None, compiled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """FlexAttention over active blocks, in one kernel, of query (1, H, q, D): the last q tokens of keys (1, Hk, T, D)
    and values (1, Hk, T, Dv).

    Args:
        active: (Hk, blocks of queries, blocks of keys) bool, on the query's device, each query's own block included.
        before: number of tokens before the queries, complete blocks.
        compiled: a kernel that skips inactive blocks; False: all scores, and a mask.

    Returns (1, q, H, Dv), contiguous.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    groups = query.shape[1] // keys.shape[1]
    first = before // block
    of_heads = active.repeat_interleave(groups, 0)
    offset = torch.tensor(before, device=query.device)  # as a number it would be compiled in

    def visible(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return of_heads[head, row // block, key // block] & (row + offset >= key)

    def capped(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    own = torch.zeros_like(of_heads)
    places = torch.arange(of_heads.shape[1], device=own.device)
    own[:, places, places + first] = True
    partial, full = _indices(own), _indices(of_heads & ~own)
    mask = BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=block, mask_mod=visible, seq_lengths=(query.shape[2], keys.shape[2])
    )
    attend = _compiled() if compiled else flex_attention
    output = attend(query, keys, values, capped, mask, scale=scaling, enable_gqa=groups > 1)
    return output.transpose(1, 2).contiguous()


def _indices(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For (H, Q, K) bool, the number of true elements of each row, (1, H, Q), and their indices first, (1, H, Q, K)."""
    order = dense.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    return dense.sum(-1, dtype=torch.int32)[None], order.to(torch.int32)[None]


@functools.cache
def _compiled() -> Any:
    """Compiled for the first length, and when another one occurs, for all."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


class SparsePrefill:
    """Attention for `Filling.compute`, in the thread that runs the model.

    On a GPU one FlexAttention kernel skips the inactive blocks. Elsewhere, and after a warning if the kernel fails,
    blocks are gathered for each key head and block of queries, and merged with the block's own tokens: on a CPU that is
    faster than compiling a kernel for a mask. Everything is attended to in calls with attention sinks, in calls that do
    not begin with a block, in layers without active blocks, and if there is no memory for the blocks.
    """

    def __init__(self, blocks: ActiveBlocks, warn: Callable[[str], None] = warnings.warn) -> None:
        """`warn`: for example the cache's method, which also adds the warning to its report."""
        self._blocks, self._warn = blocks, warn
        self._gathered = self._visible = 0
        self._kernel = True

    @property
    def share(self) -> float:
        """Share of the visible blocks that queries have attended to so far; 1.0: there were none."""
        return self._gathered / self._visible if self._visible else 1.0

    def attended(self, layer_idx: int, start: int, stop: int) -> float:
        """See `ActiveBlocks.attended`."""
        return self._blocks.attended(layer_idx, start, stop)

    def __call__(self, layer: OffloadLayer, call: AttentionCall) -> Output:
        active, block = self._blocks.layers.get(layer.layer_idx), self._blocks.block
        before, account = layer.before(call), layer.shared.storage.account
        nbytes = 2 * (call.key.nbytes + call.value.nbytes) * (before + call.key.shape[2]) // call.key.shape[2]
        plain = call.query.shape[0] == 1 and call.s_aux is None and call.num_queries == call.key.shape[2]
        if active is None or not plain or before % block or not account.has_room(nbytes):
            return layer.exact(call)
        with account.holding("streaming", nbytes), torch.no_grad():
            keys, values = layer.joined(call)
            rows = np.arange(before // block, -(-keys.shape[2] // block))
            self._visible += len(active) * int((rows + 1).sum())
            self._gathered += int(active[:, rows].sum())
            if self._kernel and has_kernel(call.query.device):
                try:
                    return self._by_kernel(active[:, rows, : rows[-1] + 1], call, keys, values, before), None
                except Exception as error:  # compilers fail in many ways
                    self._kernel = False
                    self._warn(f"FlexAttention fails here, so blocks are gathered: {error}")
            return self._attend(active, call, keys, values, before), None

    def _by_kernel(
        self, active: np.ndarray, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, before: int
    ) -> torch.Tensor:
        return attend_blocks(
            call.query, keys.to(call.query.dtype), values.to(call.query.dtype),
            torch.from_numpy(active).to(keys.device), before, self._blocks.block,
            scaling=call.scaling, softcap=call.softcap,
        )  # fmt: skip

    def _attend(
        self, active: np.ndarray, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, before: int
    ) -> torch.Tensor:
        block, query = self._blocks.block, call.query
        heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
        output = query.new_empty(1, query.shape[2], query.shape[1], values.shape[-1])
        inside = torch.arange(block, device=keys.device)
        for begin in range(0, query.shape[2], block):
            own = slice(before + begin, min(before + begin + block, keys.shape[2]))
            place = (before + begin) // block
            for head in range(heads):
                chosen = torch.from_numpy(active[head, place, :place].nonzero()[0]).to(keys.device)
                of_head, history = slice(head, head + 1), []
                if len(chosen):
                    at = (chosen[:, None] * block + inside).reshape(-1)
                    history = [(keys[:, of_head].index_select(2, at), values[:, of_head].index_select(2, at))]
                queries = slice(head * groups, (head + 1) * groups)
                output[:, begin : begin + block, queries] = stream_attention(
                    query[:, queries, begin : begin + block], history, (keys[:, of_head, own], values[:, of_head, own]),
                    None, scaling=call.scaling, softcap=call.softcap,
                )  # fmt: skip
        return output
