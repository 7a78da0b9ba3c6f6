"""One layer of an offloaded cache: what its `update` returns, and attention over what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from ..errors import PromptError
from ..history.position_history import History
from ..history.record_format import RecordFormat
from ..model.attention import AttentionFunction, no_backward, stream_attention, visible_columns
from ..stores.freezable import FreezableStore
from .shared import Shared

TAG = "_hf_offload_cache_tag"


@dataclass(eq=False)
class Tag:
    """Rides on the keys and values that an `update` returns, so that attention finds their layer."""

    layer: OffloadLayer
    whole: bool
    """The tensors are the layer's whole history, not only what the step added."""


class OffloadLayer(CacheLayerMixin):
    """A full-attention layer whose history lives in the store; the base of every method's layer.

    States (`state`): "unknown": `update` returns the whole history, tagged, which is right under any attention.
    "tagged": attention was seen to bring the tag back; `update` returns what the step added, and `attend` finds the
    rest. "full": attention is not ours to replace; `update` returns the whole history, brought back from the store.

    A method overrides `summarise`, `decode`, and what must follow changes (`dropped`, `truncated`, `select_rows`).
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, shared: Shared, layer_idx: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shared = shared
        self.layer_idx = layer_idx
        self.state = "full" if shared.config.exact == "bitwise" else "unknown"
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self._before: tuple[int, torch.Tensor] | None = None
        self._sealed: list[torch.Tensor] = []

    history: History
    """What is held; there is none before the first `update`."""

    @property
    def keys(self) -> torch.Tensor | None:
        """What `DynamicLayer` would hold, brought back whole: for models that look into a cache's layers."""
        return self.history.whole()[0] if self.is_initialized else None

    @keys.setter
    def keys(self, nothing: torch.Tensor | None) -> None:
        """transformers' constructors set this to None; there is nothing to keep."""

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`."""
        return self.history.whole()[1] if self.is_initialized else None

    @values.setter
    def values(self, nothing: torch.Tensor | None) -> None:
        """As `keys`."""

    @property
    def length(self) -> int:
        """Tokens a sequence."""
        return self.history.length if self.is_initialized else 0

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first `update`."""
        return self.history.batch if self.is_initialized else 0

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the books that are kept on where the history lies, and on what was written there."""
        return self.history.table.nbytes + self.history.store.tables_bytes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        form = RecordFormat.of(key_states, value_states, self.shared.config.group_size)
        self.history = History(self.shared, form, key_states.shape[0], key_states.device, self.layer_idx)
        self.is_initialized = True

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys (B, Hk, t, Dk) and values (B, Hv, t, Dv); return what the model's attention should be given.

        Returned are views of the arguments ("tagged", or an empty history), else new tensors with the whole history.
        The arguments are copied: the caller may reuse them after attention. Raises `SeamLostError`, `PromptError` and
        `StoreFullError` before anything is taken in.
        """
        self.shared.check_open()
        self.shared.check_seam()
        keys, values = key_states.detach(), value_states.detach()
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if keys.shape[0] != self.batch:
            raise PromptError(
                f"layer {self.layer_idx} holds {self.batch} sequences and was given {keys.shape[0]}: "
                "use a new cache, or reset(), for a batch of another size"
            )
        if self.state == "tagged":
            self.shared.check_front(self.layer_idx, self.length)
        history = self.history
        whole = self.length == 0 or self.state != "tagged"
        if not self.length:  # as DynamicCache returns them: the layout decides the last bits of some kernels
            key_states, value_states = key_states.contiguous(), value_states.contiguous()
        elif whole:
            old_keys, old_values = history.whole()
            key_states = torch.cat([no_backward(old_keys, key_states), key_states], 2)
            value_states = torch.cat([no_backward(old_values, value_states), value_states], 2)
        if (freed := history.sweep()) is not None:
            self.dropped(freed)
        several = not whole and keys.shape[2] > 1
        self._before = (history.num_groups, history.tail.entries.clone()) if several else None
        with self.shared.timeline.span("append", self.layer_idx):
            sealed = history.append(keys, values)
        if self.state == "full":
            return key_states, value_states
        self._sealed = [] if self.shared.config.exact else sealed
        tag = Tag(self, whole)
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        setattr(key_states, TAG, tag)
        setattr(value_states, TAG, tag)
        if not whole:
            self.shared.unseen = self.layer_idx
        return key_states, value_states

    # --- attention ---------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def attend(
        self,
        tag: Tag,
        attention: AttentionFunction,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the model's `attention` would return over the layer's whole history (a sparse method: over its choice).

        Called with what `update` returned in this step, once or (KV sharing) several times.
        """
        self.shared.unseen = None
        with self.shared.changing():  # an error in here leaves this layer ahead of those behind it
            return self._attend(tag, attention, module, query, key, value, mask, *args, **kwargs)

    def _attend(
        self,
        tag: Tag,
        attention: AttentionFunction,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        replaceable = getattr(value, TAG, None) is tag and (
            not args and self._replaceable(module, query, key, mask, kwargs)
        )
        self.state = "tagged" if replaceable and self.state != "full" else "full"
        replaceable = replaceable and not kwargs.get("dropout")  # of a training step: not for good
        sealed, self._sealed = self._sealed, []
        if sealed and replaceable:
            with self.shared.timeline.span("summarise", self.layer_idx):
                self.summarise(sealed, visible_columns(mask))
        if not replaceable and not tag.whole:
            key, value = (no_backward(tensor, query) for tensor in self.history.whole())
        if not replaceable or tag.whole:
            return attention(module, query, key, value, mask, *args, **kwargs)
        if query.shape[2] == 1:
            return self.decode(attention, module, query, mask, *args, **kwargs)
        output = self.stream(attention, module, query, key, value, mask, *args, **kwargs)
        if not self.shared.keys_are_shared:
            self._before = None
        return output

    def _replaceable(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict
    ) -> bool:
        """Whether this call is attention as we know it: softmax over all columns under a mask shared by the heads."""
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return (
            key.shape[-1] == query.shape[-1]
            and kwargs.get("position_bias") is None
            and kwargs.get("indices") is None
            and kwargs.get("sinks") is None
            and (mask is not None or causal or query.shape[2] == 1)
            and (mask is None or (mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[-1] == self.length))
        )

    def decode(
        self,
        attention: AttentionFunction,
        module: torch.nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one query a row over everything held; a sparse method overrides this."""
        if self.length <= self.shared.config.block_tokens:
            keys, values = (no_backward(tensor, query) for tensor in self.history.whole())
            return attention(module, query, keys, values, mask, *args, **kwargs)
        history = self.history
        blocks = history.blocks(history.num_groups)
        own = history.form.split(history.tail.entries)
        return self._merge(query, blocks, own, mask, **kwargs), None

    def stream(
        self,
        attention: AttentionFunction,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of several queries over the history before them, block by block, and over their own tokens."""
        assert self._before is not None
        num_groups, tail = self._before
        blocks = self.history.blocks(num_groups, tail)
        if self.length <= self.shared.config.block_tokens:
            parts = [(no_backward(k.clone(), query), no_backward(v.clone(), query)) for k, v in blocks]
            keys, values = zip(*parts, (key, value), strict=True)
            return attention(module, query, torch.cat(keys, 2), torch.cat(values, 2), mask, *args, **kwargs)
        return self._merge(query, blocks, (key, value), mask, **kwargs), None

    def _merge(
        self,
        query: torch.Tensor,
        blocks: Iterator[tuple[torch.Tensor, torch.Tensor]],
        own: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        with torch.no_grad():
            output = stream_attention(
                query, blocks, own, mask, scaling=scaling, softcap=softcap, s_aux=s_aux
            )
        return no_backward(output, query)

    # --- contexts ----------------------------------------------------------------------------------------------

    def freeze(self) -> Sequence[FreezableStore]:
        """See `History.freeze`; nothing for a layer that holds nothing. What no row names any more is given up."""
        if not self.is_initialized:
            return ()
        if len(freed := self.history.table.sweep()):
            self.dropped(freed)
        return self.history.freeze()

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        """See `History.live`; `parts` are what `freeze` gave."""
        return self.history.live(parts) if self.is_initialized else []

    def capture(self) -> dict[str, Any]:
        """All that is held beside the records, as a tree of values and tensors for `restore`; valid until the next
        change, and not to be changed."""
        state = "unknown" if self.shared.config.exact == "bitwise" else self.state
        return {"state": state, "history": self.history.capture() if self.is_initialized else None}

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        """Hold what `tree` was captured of, over its frozen stores. Reads nothing back, computes nothing.

        Raises `ContextError`, `BudgetError`; `parts` belong to this layer only once it has returned.
        """
        if tree["history"] is not None:
            self.history = History.restore(self.shared, tree["history"], parts, device, self.layer_idx)
            self.is_initialized = True
        if self.shared.config.exact != "bitwise":
            self.state = tree["state"]

    # --- what a method adds ------------------------------------------------------------------------------------

    def summarise(self, keys: list[torch.Tensor], visible: torch.Tensor | None) -> None:
        """Keys (B, Hk, n G, Dk) of groups sealed since the last call, in order; `visible` (·, T) leaves padding out."""

    def dropped(self, records: np.ndarray) -> None:
        """These records hold nothing of ours any more."""

    # --- transformers' interface -------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The full logical length, so that each step's mask covers the history, padding included."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the latest `-tokens_to_remove` tokens (a positive number: keep as many). Reads a few groups back where
        the tail does not hold them."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        if tokens_to_remove > 0:  # and means the length to keep, as earlier ones did
            tokens_to_remove = min(0, tokens_to_remove - self.length)
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        self._before = None
        freed = self.history.truncate(max(0, self.length + tokens_to_remove))
        if freed is not None:
            self.truncated(self.history.num_groups)
            self.dropped(freed)

    def truncated(self, num_groups: int) -> None:
        """Only the first `num_groups` groups stay sealed."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row `beam_idx[i]` is now; moves no stored data."""
        if self.is_initialized and beam_idx.tolist() != list(range(self.batch)):
            self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.select_rows(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            indices = torch.as_tensor(indices)
            self.select_rows(indices.nonzero().reshape(-1) if indices.dtype == torch.bool else indices)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now, in every place that holds rows."""
        self._before = None
        self.history.select_rows(rows)

    def reset(self) -> None:
        """Forget everything; the layer can be used anew. Its file and buffers are given back."""
        self.close()
        if self.shared.config.exact != "bitwise":
            self.state = "unknown"

    def end_step(self) -> None:
        """Let go of what only the step needed."""
        self._before, self._sealed = None, []

    def close(self) -> None:
        """Give back the file and the buffers."""
        if self.is_initialized:
            self.history.close()
            self._clear()
            del self.history

    def offload(self) -> None:
        """Nothing to do: the history is offloaded as it comes."""

    def prefetch(self) -> None:
        """Nothing to do: the cache prefetches by itself."""
