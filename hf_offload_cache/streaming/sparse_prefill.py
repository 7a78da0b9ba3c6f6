"""Attention of a prompt over its active blocks alone, instead of over everything. It is lossy."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch

from ..core.offload_layer import OffloadLayer, Output
from ..model.attention_call import AttentionCall
from ..model.stream_attention import stream_attention
from .active_blocks import ActiveBlocks
from .flex_blocks import attend_blocks, has_kernel


class SparsePrefill:
    """For `Filling.compute`; in the thread that runs the model.

    On a GPU FlexAttention leaves out what is not active, in one kernel. Elsewhere blocks are gathered, a key head and a
    block of queries at a time, and merged with the block's own tokens: on a CPU that is faster than compiling a kernel
    for a mask. So it is done where the kernel cannot be made, too, after a warning. Calls that are more than a softmax,
    or whose queries do not begin with a block, and layers without active blocks are attended to whole, as is what there
    is no memory for.
    """

    def __init__(self, blocks: ActiveBlocks, warn: Callable[[str], None] = warnings.warn) -> None:
        """`warn`: the cache's method, which also adds the warning to its report."""
        self._blocks, self._warn = blocks, warn
        self._gathered = self._visible = 0
        self._kernel = True

    @property
    def share(self) -> float:
        """Of the blocks that queries could see in the calls so far, how many they attended to; 1.0: there were none."""
        return self._gathered / self._visible if self._visible else 1.0

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self._blocks.block

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
                except Exception as error:  # whatever a compiler has against this machine
                    self._kernel = False
                    self._warn(f"FlexAttention cannot be used here, blocks are gathered: {error}")
            return self._attend(active, call, keys, values, before), None

    def _by_kernel(
        self, active: np.ndarray, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, before: int
    ) -> torch.Tensor:
        dtype, own = call.query.dtype, torch.from_numpy(active).to(keys.device)
        keys, values, scaling = keys.to(dtype), values.to(dtype), call.scaling
        return attend_blocks(
            call.query, keys, values, own, before, self._blocks.block, scaling=scaling, softcap=call.softcap
        )

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
                of_head = slice(head, head + 1)
                history = []
                if len(chosen):
                    at = (chosen[:, None] * block + inside).reshape(-1)
                    history = [(keys[:, of_head].index_select(2, at), values[:, of_head].index_select(2, at))]
                asked = slice(head * groups, (head + 1) * groups)
                output[:, begin : begin + block, asked] = stream_attention(
                    query[:, asked, begin : begin + block], history, (keys[:, of_head, own], values[:, of_head, own]),
                    None, scaling=call.scaling, softcap=call.softcap,
                )  # fmt: skip
        return output
