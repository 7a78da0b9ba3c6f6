"""ShadowKV on disk: keys of low rank in memory, from which keys are rebuilt; only values are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_offload_cache.errors import PromptError
from hf_offload_cache.model.attention_call import AttentionFunction
from hf_offload_cache.model.gradients import no_backward
from hf_offload_cache.model.tag import TAG

from .loki import leading_directions
from .selective import SelectiveCache, SelectiveLayer


class ShadowKVLayer(SelectiveLayer):
    """Sun et al. 2024 ("ShadowKV", section 4): a low-rank key cache, chunks of values fetched; KVSwap, sections 3.2
    ("Compared with prior K cache compression scheme") and 4.2.

    Two simplifications. Keys are factored after the rotary embedding, since an `update` sees no other, which costs
    fidelity. Chunks are ranked by their best rebuilt score, which saves the memory of ShadowKV's landmarks for more
    rank. Outlier chunks are not kept. The prompt comes in one piece, then single tokens.
    """

    joint = True

    def directions(self, moment: torch.Tensor, magnitude: torch.Tensor, rank: int) -> torch.Tensor:
        return leading_directions(moment, rank)

    def _clear(self) -> None:
        self._release_recent()
        super()._clear()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `OffloadLayer.update`; records hold values alone. Raises `PromptError` for a prompt in several pieces."""
        if self.length and (self.state != "tagged" or key_states.shape[2] > 1):
            raise PromptError(
                f"the ShadowKV baseline takes its prompt in one piece, then one token a step; layer {self.layer_idx} "
                f"holds {self.length} tokens and was given {key_states.shape[2]}"
            )
        before = self.history.num_groups if self.is_initialized else 0
        _, values = super().update(key_states[..., :0], value_states, *args, **kwargs)
        pending = key_states.detach()
        if self._recent is not None:
            pending = torch.cat([self._recent, pending], 2)
        sealed = (self.history.num_groups - before) * self.history.form.group_size
        self._sealed = [pending[:, :, :sealed]] if sealed else []
        self._release_recent()
        self._recent = pending[:, :, sealed:].clone()
        self.shared.storage.account.hold("rolling tail", self._recent.nbytes)
        keys = key_states.view_as(key_states)
        setattr(keys, TAG, getattr(values, TAG))
        return keys, values

    _recent: torch.Tensor | None = None
    """Keys (B, Hk, t, D) of the tokens that are in no record yet."""

    def _release_recent(self) -> None:
        if self._recent is not None:
            self.shared.storage.account.release("rolling tail", self._recent.nbytes)
            self._recent = None

    @property
    def _key_heads(self) -> int:
        return self.history.form.num_key_heads

    def decode(
        self,
        attention: AttentionFunction,
        module: torch.nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over the rebuilt keys and the fetched values of the selected chunks, and over the latest tokens."""
        buffer, group = self.buffer, self.history.form.group_size
        if buffer is None or self.summary is None or self._recent is None or mask is not None:
            raise PromptError("the ShadowKV baseline needs a prompt of some hundred tokens, and no padding")
        self.scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        buffer.see(None)
        groups = self.select(query, buffer)
        values = self.history.form.split(buffer.gather(self, groups))[1]
        positions = (groups[:, :, None] * group + np.arange(group)).reshape(len(groups), -1)
        rebuilt = self.summary.rebuild(torch.from_numpy(positions).to(self.history.device))
        keys = torch.cat([rebuilt.to(self._recent.dtype), self._recent], 2)
        counters = self.shared.storage.counters
        counters.tokens_visible += self.batch * self.length
        counters.tokens_attended += self.batch * keys.shape[2]
        with torch.no_grad():
            output, weights = attention(module, query, keys, values, None, *args, **kwargs)
        return no_backward(output, query), weights


class ShadowKVCache(SelectiveCache):
    """ShadowKV on disk, without reuse; chunks of 8 tokens, as the paper has them."""

    layer_class = ShadowKVLayer

    def __init__(self, model: Any, path: Any = None, config: Any = None, **fields: Any) -> None:
        if config is None:
            fields = {"group_size": 8, "reuse_capacity": 0, **fields}
        super().__init__(model, path, config, **fields)
