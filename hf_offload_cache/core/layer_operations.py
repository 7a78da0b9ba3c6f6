"""What a layer does for transformers beside `update`: lengths, masks, and changes of what it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from ..history.base import History, Sealed
from .read_only import ReadOnlyTensor, refuse_assignment
from .rows import Rows
from .shared import Shared


class LayerOperations(CacheLayerMixin):
    """A layer over a history; `OffloadLayer` adds what comes in and attention."""

    is_sliding = False
    is_croppable = True
    offloaded = True
    """Its history lies in a store: it is captured and restored, not copied."""
    num_stores = 1
    """Stores that it opens, each of which has a file of its own on a disk."""
    dtype: torch.dtype | None = None
    """Of keys and values; None before the first `update`."""
    device: torch.device | None = None
    """Where keys and values come from, and where `keys` and `values` are; None before the first `update`."""
    _filled = False
    """There is a history."""

    def __init__(self, shared: Shared, layer_idx: int, place: int | None = None, **kwargs: Any) -> None:
        """`place`: which of the offloaded layers it is; None: as many are before it as layers."""
        self.name = f"layer {layer_idx}"
        super().__init__(**kwargs)
        self.shared = shared
        self.layer_idx = layer_idx
        self.config = shared.config.of_layer(layer_idx if place is None else place)
        self.state = "full" if self.config.exact == "bitwise" else "unknown"
        self._clear()

    def _clear(self) -> None:
        self._filled = False
        self.rows = Rows()
        self._sealed: Sealed | None = None

    history: History
    """What is held; there is none before the first `update`."""

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys (B, Hk, T, Dk) as `DynamicLayer` would hold them, a copy brought back whole; None before the first
        `update`. For models and methods that read a cache's layers: assigning them, or writing into the copy, raises
        `ReadOnlyError`."""
        return self._shown(0)

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keep("keys", keys is None and not self._filled)

    @property
    def values(self) -> torch.Tensor | None:
        """Values (B, Hv, T, Dv), as `keys`."""
        return self._shown(1)

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._keep("values", values is None and not self._filled)

    @property
    def is_initialized(self) -> bool:
        """A first `update` came since construction or `reset`. Assigning another value raises `ReadOnlyError`."""
        return self._filled

    @is_initialized.setter
    def is_initialized(self, initialized: bool) -> None:
        self._keep("is_initialized", initialized == self._filled)

    def _keep(self, name: str, same: bool) -> None:
        """transformers' constructors assign what a new layer has already; anything else is refused."""
        if not same:
            refuse_assignment(self.name, name)

    def _shown(self, part: int) -> torch.Tensor | None:
        if not self._filled:
            return None
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode do not tell of writes
            return ReadOnlyTensor.of(self.whole()[part])

    @property
    def length(self) -> int:
        """Tokens a sequence."""
        return self.history.length if self._filled else 0

    @property
    def history_device(self) -> torch.device:
        """Where keys and values come from; the CPU where nothing is held."""
        return self.history.device if self._filled else torch.device("cpu")

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first `update`."""
        return self.history.rows // self.rows.heads if self._filled else 0

    def whole(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, Hk, T, Dk) and values of everything before token `stop` (None: all), new and contiguous."""
        keys, values = self.history.whole(stop)
        return self.rows.unfold(keys), self.rows.unfold(values)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take in keys (B, Hk, t, Dk) and values (B, Hv, t, Dv) that were computed elsewhere, behind what is held: as
        `update` and attention after it, but for what a method learns of queries. They are copied. Raises as `update`;
        nothing was taken in then, or the cache is not to be used until `reset`."""
        self.shared.check_open()
        if not self._filled:
            self.lazy_initialization(keys, values)
        held = self.history.length
        try:
            sealed = self.history.append(*self._kept(keys, values))
            self.shared.books_changed = True
            self._sealed = sealed if sealed.keys else None
            self.learn_alone()
        except BaseException:
            self.shared.storage.torn |= self.history.length != held
            raise

    def _kept(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the history keeps them."""
        dtype = self.history.form.dtype
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        if not keys.dtype == values.dtype == dtype:
            keys, values = keys.to(dtype), values.to(dtype)
        return (keys, values) if self.rows.heads == 1 else (self.rows.fold(keys), self.rows.fold(values))

    def learn_alone(self) -> None:
        """What was sealed is learnt of, though no attention comes that has queries."""
        sealed, self._sealed = self._sealed, None
        if sealed is not None:
            self.learn_keys(sealed)

    def learn_keys(self, sealed: Sealed) -> None:
        """As `learn`, of what came without queries."""

    def get_seq_length(self) -> int:
        return self.history.length if self._filled else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The full logical length, so that each step's mask covers the history, padding included."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the latest `-tokens_to_remove` tokens (a positive number: keep as many). Reads a few units back where
        the tail does not hold them."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        if tokens_to_remove > 0:  # and means the length to keep, as earlier ones did
            tokens_to_remove = min(0, tokens_to_remove - self.length)
        if tokens_to_remove == 0 or not self._filled:
            return
        self._sealed = None
        freed = self.history.truncate(max(0, self.length + tokens_to_remove))
        if freed is not None:
            self.truncated(self.history.units)
            self.dropped(freed)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row `beam_idx[i]` is now; moves no stored data, but what `settle_rows` reads."""
        if self._filled and beam_idx.tolist() != list(range(self.batch)):
            self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._filled:
            self.select_rows(torch.arange(self.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._filled:
            indices = torch.as_tensor(indices, device="cpu")
            self.select_rows(indices.nonzero().reshape(-1) if indices.dtype == torch.bool else indices)

    def settle_rows(self, rows: torch.Tensor) -> None:
        """What `select_rows` would have to read first is read: it raises nothing that `StoreError` is then. Raises it,
        with nothing changed that a step would see."""

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make sequence i what sequence `rows[i]` is now, in every place that holds rows."""
        self._sealed = None
        self.history.select_rows(self.rows.expand(rows))

    def reset(self) -> None:
        """Forget everything; the layer can be used anew. Its file and buffers are given back."""
        self.close()
        if self.config.exact != "bitwise":
            self.state = "unknown"

    def end_step(self) -> None:
        """Let go of what only the step needed: attention may not have asked for it."""
        self._sealed = None

    def close(self) -> None:
        """Give back the file and the buffers."""
        if self._filled:
            self.history.close()
            self._clear()
            del self.history

    def offload(self) -> None:
        """Nothing to do: the history is offloaded as it comes."""

    def prefetch(self) -> None:
        """Nothing to do: the cache prefetches by itself."""

    def dropped(self, records: np.ndarray) -> None:
        """These records hold nothing of ours any more."""

    def truncated(self, units: int) -> None:
        """Only the first `units` units stay sealed."""
