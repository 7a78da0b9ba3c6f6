"""One layer of an offloaded cache: takes keys and values in, keeps them in store and tail, attends over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from .attention import AttentionFunction, stream_attention, visible_columns
from .block_table import BlockTable
from .errors import PromptError
from .records import RecordFormat
from .shared import Shared, Tag
from .stores.base import aligned_empty
from .tail import RollingTail

TAG = "_hf_offload_cache_tag"
_PIECE_BYTES = 1 << 20
"""Bytes that prefill packs and hands to the writer at a time."""


class OffloadLayer(CacheLayerMixin):
    """A full-attention layer whose history lives in the store; the base of every method's layer.

    States (`state`): "unknown": `update` returns the whole history, tagged, which is right under any attention.
    "tagged": attention was seen to bring the tag back; `update` returns what the step added, and `attend` finds the
    rest. "full": attention is not ours to replace; `update` returns the whole history, brought back from the store.

    A method overrides `summarise` and `decode`, and what must follow batch operations (`select_rows`, `truncate`).
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, shared: Shared, layer_idx: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shared = shared
        self.layer_idx = layer_idx
        self.state = "full" if shared.config.exact == "bitwise" else "unknown"
        self.batch = 0
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self.length = 0
        self._before: tuple[int, torch.Tensor] | None = None
        self._sealed: list[torch.Tensor] = []

    # --- data in -----------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        config = self.shared.config
        self.device = key_states.device
        self.batch = key_states.shape[0]
        self.form = RecordFormat.of(key_states, value_states, config.group_size)
        self.store = self.shared.open_store(self.form.record_bytes, self.layer_idx)
        self.table = BlockTable(self.store, self.batch)
        self.tail = RollingTail(self.form, self.batch, config.num_recent, self.device, self.shared.account)
        self.is_initialized = True

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys (B, Hk, t, Dk) and values (B, Hv, t, Dv); return what the model's attention should be given.

        Returned are views of the arguments ("tagged", or an empty history), else new tensors with the whole history.
        The arguments are copied: the caller may reuse them. Raises `SeamLostError` before anything is taken in;
        `StoreFullError` likewise.
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
        whole = self.length == 0 or self.state != "tagged"
        if whole and self.length:
            old_keys, old_values = self.whole()
            key_states = torch.cat([no_backward(old_keys, key_states), key_states], 2)
            value_states = torch.cat([no_backward(old_values, value_states), value_states], 2)
        self._append(keys, values)
        if self.state == "full":
            return key_states, value_states
        tag = Tag(self, whole)
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        setattr(key_states, TAG, tag)
        setattr(value_states, TAG, tag)
        if not whole:
            self.shared.unseen = tag
        return key_states, value_states

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put new tokens behind the tail; seal the oldest groups beyond `num_recent`."""
        group = self.form.group_size
        old = self.tail.entries
        total = old.shape[1] + keys.shape[2]
        count = max(0, total - self.shared.config.num_recent) // group
        several = keys.shape[2] > 1 and self.state == "tagged"
        self._before = (self.table.num_groups, old.clone()) if several else None
        if count:
            if self.table.garbage > self.table.ids.size:
                self.dropped(self.table.sweep())
            ids = self.table.append(count)
            if self.state != "full" and not self.shared.config.exact:
                held = old[:, : count * group].clone()
                self._sealed = [self.form.split(held)[0], keys[:, :, : count * group - held.shape[1]]]
        if total <= self.tail.capacity:
            self.tail.append(keys, values)
            if count:
                self._seal(ids, self.tail.entries[:, : count * group])
                self.tail.drop_first(count * group)
        else:
            piece = max(1, _PIECE_BYTES // (self.batch * self.form.record_bytes))
            for start in range(0, count, piece):
                stop = min(start + piece, count)
                self._seal(ids[:, start:stop], self._join(old, keys, values, start * group, stop * group))
            self.tail.replace(self._join(old, keys, values, count * group, total))
        self.length += keys.shape[2]

    def _join(
        self, old: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """Entries [start, stop) of old entries followed by new keys and values, as a new tensor."""
        held = old.shape[1]
        joined = torch.empty(self.batch, stop - start, self.form.entry_width, dtype=self.form.dtype, device=self.device)
        split = min(max(held - start, 0), stop - start)
        joined[:, :split] = old[:, start : start + split]
        rest = slice(max(start - held, 0), max(stop - held, 0))
        self.form.entries(keys[:, :, rest], values[:, :, rest], joined[:, split:])
        return joined

    def _seal(self, ids: np.ndarray, entries: torch.Tensor) -> None:
        """Hand entries (B, n G, entry_width) to the writer as records `ids` (B, n)."""
        records = aligned_empty(ids.size, self.form.record_bytes)
        typed = records.view(self.form.dtype)
        typed[:, self.form.payload_width :] = 0
        shape = (self.batch, ids.shape[1], self.form.group_size, self.form.entry_width)
        typed[:, : self.form.payload_width].view(shape).copy_(entries.reshape(shape))
        self.shared.prefetcher.write(self.store, ids.reshape(-1), records)

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
        replaceable = getattr(value, TAG, None) is tag and (
            not args and self._replaceable(module, query, key, mask, kwargs)
        )
        self.state = "tagged" if replaceable and self.state != "full" else "full"
        sealed, self._sealed = self._sealed, []
        if sealed and replaceable:
            self.summarise(sealed, visible_columns(mask))
        if not replaceable and not tag.whole:
            key, value = (no_backward(tensor, query) for tensor in self.whole())
        if not replaceable or tag.whole:
            return attention(module, query, key, value, mask, *args, **kwargs)
        if query.shape[2] == 1:
            return self.decode(attention, module, query, mask, *args, **kwargs)
        return self.stream(attention, module, query, key, value, mask, *args, **kwargs)

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
            and not kwargs.get("dropout")
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
            keys, values = (no_backward(tensor, query) for tensor in self.whole())
            return attention(module, query, keys, values, mask, *args, **kwargs)
        blocks = self.history(self.table.num_groups)
        own = self.form.split(self.tail.entries)
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
        blocks = self.history(num_groups, tail)
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

    # --- data back ---------------------------------------------------------------------------------------------

    def history(
        self, num_groups: int, tail: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the first `num_groups` groups in blocks of `block_tokens`, then of `tail` entries.

        Each block is valid until the next; the following one is read meanwhile.
        """
        group = self.form.group_size
        step = max(1, self.shared.config.block_tokens // group)
        edges = range(0, num_groups, step)
        ids = [self.table.ids[:, start : min(start + step, num_groups)] for start in edges]
        flat = np.concatenate([part.reshape(-1) for part in ids]) if ids else np.empty(0, dtype=np.int64)
        for records in self.shared.stream(self.store, flat, step * self.batch, self.device):
            payload = self.form.payload(records)
            yield self.form.split(payload.reshape(self.batch, -1, self.form.entry_width))
        if tail is not None and tail.shape[1]:
            yield self.form.split(tail)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole history as new contiguous keys (B, Hk, T, Dk) and values (B, Hv, T, Dv): bitwise what came in."""
        form = self.form
        keys = torch.empty(
            self.batch, form.num_key_heads, self.length, form.key_dim, dtype=form.dtype, device=self.device
        )
        values = torch.empty(
            self.batch, form.num_value_heads, self.length, form.value_dim, dtype=form.dtype, device=self.device
        )
        start = 0
        for block_keys, block_values in self.history(self.table.num_groups, self.tail.entries):
            stop = start + block_keys.shape[2]
            keys[:, :, start:stop] = block_keys
            values[:, :, start:stop] = block_values
            start = stop
        return keys, values

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
        """Forget the latest `-tokens_to_remove` tokens. Reads a few groups back where the tail does not hold them."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, got {tokens_to_remove}")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        self._before = None
        remaining = max(0, self.length + tokens_to_remove)
        group = self.form.group_size
        sealed = self.table.num_groups * group
        if remaining >= sealed:
            self.tail.drop_last(self.length - remaining)
        else:
            keep = max(0, remaining - self.shared.config.num_recent) // group
            ids = self.table.ids[:, keep : -(-remaining // group)].reshape(-1)
            for records in self.shared.stream(self.store, ids, max(1, len(ids)), self.device):
                entries = self.form.payload(records).reshape(self.batch, -1, self.form.entry_width)
                self.tail.replace(entries[:, : remaining - keep * group])
            if not len(ids):
                self.tail.drop_last(self.tail.length)
            self.truncated(keep)
            self.dropped(self.table.truncate(keep))
        self.length = remaining

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
        self.table.select_rows(rows.cpu().numpy())
        self.tail.select_rows(rows)
        self.batch = len(rows)

    def reset(self) -> None:
        """Forget everything; the layer can be used anew. Its file and buffers are given back."""
        if self.is_initialized:
            self.shared.prefetcher.cancel(self.store)
            self.store.close()
            self.shared.stores.remove(self.store)
            self.tail.close()
        if self.state == "tagged":
            self.state = "unknown"
        self._clear()

    def close(self) -> None:
        """Let go of the buffers; the cache has closed the store."""
        if self.is_initialized:
            self.tail.close()
            self._clear()

    def offload(self) -> None:
        """Nothing to do: the history is offloaded as it comes."""

    def prefetch(self) -> None:
        """Nothing to do: the cache prefetches by itself."""


class _HybridMethods:
    """Puts transformers' own linear-attention state beside what an `OffloadLayer` offloads (see `hybrid`)."""

    is_croppable = LinearAttentionLayer.is_croppable

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)  # type: ignore[arg-type]
        else:
            super().lazy_initialization(*args)  # type: ignore[misc]

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)  # type: ignore[arg-type]
        super().reset()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        super().reorder_cache(beam_idx)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)  # type: ignore[arg-type]
        super().crop(tokens_to_remove)  # type: ignore[misc]


def hybrid(layer_class: type[OffloadLayer]) -> type[OffloadLayer]:
    """The class of layers that hold linear-attention states beside what `layer_class` offloads."""
    bases = (_HybridMethods, layer_class, LinearAttentionAndFullAttentionLayer)
    return type(f"Hybrid{layer_class.__name__}", bases, {})


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "no gradient flows through a history that hf_offload_cache brought back from its store: "
            "run the forward under torch.no_grad(), or train with DynamicCache"
        )


def no_backward(tensor: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """`tensor` (a leaf), whose values joined a graph that `beside` is part of: a backward pass that comes here raises
    instead of being silently wrong."""
    if not (torch.is_grad_enabled() and beside.requires_grad):
        return tensor
    return _NoBackward.apply(tensor.requires_grad_())
