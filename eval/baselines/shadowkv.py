"""ShadowKV on disk: keys of low rank in memory, from which keys are rebuilt; only values are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_offload_cache.errors import PromptError
from hf_offload_cache.fetch import Choice, Fetched, Storage
from hf_offload_cache.history import Block, PositionHistory, RecordFormat, Sealed
from hf_offload_cache.model import AttentionCall

from .loki import leading_directions
from .selective import BaselineCache, BaselineConfig, BaselineLayer, ProjectedKeys


class ValueHistory(PositionHistory):
    """Records of values alone. Sealed keys are the predictor's; those of the tail are kept beside it."""

    def __init__(self, storage: Storage, form: RecordFormat, rows: int, device: torch.device, *others: Any) -> None:
        super().__init__(storage, dataclasses.replace(form, key_dim=0), rows, device, *others)
        self.account = storage.account
        self.recent_keys = torch.empty(rows, form.num_key_heads, 0, form.key_dim, dtype=form.dtype, device=device)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        sealed = super().append(keys[..., :0], values)
        keys = torch.cat([self.recent_keys, keys], 2)
        count = keys.shape[2] - self.recent.shape[1]
        self.keep(keys[:, :, count:].clone())
        return dataclasses.replace(sealed, parts=[(keys[:, :, :count], values[:, :, :count])] if count else [])

    def keep(self, keys: torch.Tensor) -> None:
        """Hold `keys` (rows, Hk, t, D), the caller's own, as those of the tail."""
        self.account.hold("rolling tail", keys.nbytes - self.recent_keys.nbytes)
        self.recent_keys = keys

    def blocks(self, stop: int | None = None) -> Iterator[Block]:
        raise PromptError(
            f"the ShadowKV baseline takes its prompt in one piece, of some hundred tokens, then one token a step: "
            f"its keys are not stored, and {self.length} tokens are held"
        )

    def truncate(self, length: int) -> np.ndarray | None:
        cut = self.recent_keys.shape[2] - (self.length - length)
        if cut < 0:
            raise PromptError("the ShadowKV baseline cannot take sealed tokens back: their keys are not stored")
        freed = super().truncate(length)
        self.keep(self.recent_keys[:, :, :cut].clone())
        return freed

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        self.keep(self.recent_keys[rows.to(self.device)])

    def close(self) -> None:
        super().close()
        self.keep(self.recent_keys[:, :, :0].clone())


class ShadowKVLayer(BaselineLayer):
    """Sun et al. 2024 ("ShadowKV", section 4): a low-rank key cache, chunks of values fetched; KVSwap, sections 3.2
    ("Compared with prior K cache compression scheme") and 4.2.

    Two simplifications. Keys are factored after the rotary embedding, since an `update` sees no other, which costs
    fidelity. Chunks are ranked by their best rebuilt score, which saves the memory of ShadowKV's landmarks for more
    rank. Outlier chunks are not kept. The prompt comes in one piece, then single tokens. What is planned counts keys
    in the records too.
    """

    joint = True
    directions = staticmethod(leading_directions)
    history: ValueHistory

    def make_history(self, form: RecordFormat, rows: int, device: torch.device) -> ValueHistory:
        return ValueHistory(self.shared.storage, form, rows, device, self.shared.config, self.name)

    @property
    def full_bytes(self) -> int:
        """Keys are as wide as values."""
        return 2 * super().full_bytes

    def combine(
        self, call: AttentionCall, choice: Choice, fetched: Fetched, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over the rebuilt keys and the fetched values of the chosen chunks, and over the latest tokens."""
        history, predictor = self.history, self.predictor
        assert isinstance(predictor, ProjectedKeys)
        if predictor.compact is None or call.num_queries > 1 or visible is not None:
            raise PromptError("the ShadowKV baseline needs a prompt of some hundred tokens, and no padding")
        values = history.form.split(fetched.entries)[1]
        rebuilt = predictor.compact.rebuild(torch.from_numpy(history.positions(choice.units)).to(history.device))
        keys = torch.cat([rebuilt.to(history.form.dtype), history.recent_keys], 2)
        return call.attend(keys, values, None)


@dataclass(frozen=True)
class ShadowKVConfig(BaselineConfig):
    """Chunks of 8 tokens, as the paper has them."""

    group_size: int | None = 8


class ShadowKVCache(BaselineCache):
    """ShadowKV on disk, without reuse."""

    config_class = ShadowKVConfig
    layer_class = ShadowKVLayer
