"""Which blocks of keys a prompt's queries attend to: those that together have most of the attention mass (SparKV,
section IV-C)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..caches.disk_swap import DiskSwapCache
from ..core.filling import Filling
from ..core.offload_layer import OffloadLayer, Output
from ..errors import ContextError, shown
from ..history.captured_history import is_tensor
from ..model.attention_call import AttentionCall

BLOCK = 128
"""Tokens, of queries and of keys."""
_LEAST, _MOST = 16, 8192
"""Of a block: a larger one says nothing, and of smaller ones there are so many that attending to all is faster."""


@dataclass(frozen=True)
class ActiveBlocks:
    """Of one context. A layer that is not among `layers` is attended to whole.

    Attributes:
        block: tokens of a block, of queries and of keys; the last one may be shorter.
        layers: by index (key heads, blocks, blocks) bool: of a block of queries the blocks of keys, its own among them.
    """

    block: int
    layers: dict[int, np.ndarray]

    def attended(self, layer_idx: int, start: int, stop: int) -> float:
        """Tokens that a query of tokens `start` to `stop`, whole blocks, attends to: a mean over queries and heads."""
        active = self.layers.get(layer_idx)
        if active is None:
            return (start + stop) / 2
        own = active[:, start // self.block : -(-stop // self.block)]
        return float(own.sum(2).mean()) * self.block - self.block / 2  # of its own block a query sees half

    @property
    def share(self) -> float:
        """Of all blocks of all layers that have some, up to the query's own, how many are active."""
        blocks = [np.tril(np.ones(active.shape[1:])).sum() * len(active) for active in self.layers.values()]
        return float(sum(active.sum() for active in self.layers.values()) / sum(blocks)) if blocks else 1.0

    def captured(self) -> dict[str, Any]:
        """As a tree for `contexts.state.pack`."""
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
                right = type(idx) is int and 0 <= idx < layers
                if not right or not is_tensor(bits, (heads, blocks, -(-blocks // 8)), torch.uint8):
                    raise ValueError(f"layer {shown(idx)} has {shown(bits)}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ContextError(f"active blocks are not of this context: {error}") from error
        taking(len(packed) * heads * blocks**2)
        found, before = {}, np.tri(blocks, dtype=bool)
        for idx in list(packed):
            active = np.unpackbits(packed.pop(idx).numpy(), axis=-1, count=blocks).view(bool)
            active[:, np.arange(blocks), np.arange(blocks)] = True
            active &= before
            found[idx] = active
        return cls(block, found)


def measure_active_blocks(
    model: Any, ids: torch.Tensor, mass: float, block: int = BLOCK, most: float = 0.7, path: str | Path | None = None
) -> ActiveBlocks:
    """By one more prefill of ids (T,), with all weights of attention. A query's own block is always active.

    Args:
        mass: of the attention of a block's queries and a key head, that its active blocks have at least.
        most: a layer of which a larger share of blocks is active is left out: it is faster whole.
    """
    found: dict[int, list[np.ndarray]] = {}

    def attend(layer: OffloadLayer, call: AttentionCall) -> Output:
        keys, values = layer.joined(call)
        if call.query.shape[0] == 1:
            blocks = _active(call, keys, mass, block)
            found.setdefault(layer.layer_idx, []).extend(blocks)
        return call.run(keys, values, call.mask)

    size = max(1, 2048 // block) * block
    with DiskSwapCache(model, exact=True, path=path) as cache:
        filling = Filling(cache)
        for part in ids[None].to(cache.model.device).split(size, 1):
            filling.compute(part, lambda layer: True, attend)
    blocks = -(-len(ids) // block)
    layers = {}
    for idx, rows in found.items():
        active = np.zeros((rows[0].shape[0], blocks, blocks), dtype=bool)
        for place, row in enumerate(rows):
            active[:, place, : row.shape[1]] = row
        if active.sum() <= most * np.tril(np.ones((blocks, blocks))).sum() * len(active):
            layers[idx] = active
    return ActiveBlocks(block, layers)


def _active(call: AttentionCall, keys: torch.Tensor, mass: float, block: int) -> list[np.ndarray]:
    """(key heads, blocks up to its own) bool, of each block of queries."""
    query, heads = call.query[0].float(), keys.shape[1]
    before, found = keys.shape[2] - query.shape[1], []
    for begin in range(0, query.shape[1], block):
        part = query[:, begin : begin + block]
        last = before + begin + part.shape[1]
        own = torch.arange(before + begin, last, device=keys.device)
        scores = part.reshape(heads, -1, part.shape[-1]) @ keys[0, :, :last].float().mT * call.scaling
        scores = scores.unflatten(1, (-1, part.shape[1]))
        scores.masked_fill_(torch.arange(last, device=keys.device) > own[:, None], -torch.inf)
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
        found.append(active)
    return found
