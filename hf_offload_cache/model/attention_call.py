"""One call of the attention function, carried as one value; and the function that a model would have called itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .place import no_backward
from .stream_attention import Block, stream_attention

# How attention finds the layer that it is over: a tag that rides on the keys and values that `update` returned

TAG = "_hf_offload_cache_tag"
"""The attribute of a tensor that holds its `Tag`. A tensor made of a tagged one has none: then nothing is replaced."""


@dataclass(eq=False)
class Tag:
    """One `update` of one layer; the keys and the values that it returned carry the same tag."""

    layer: Any
    """The layer, whose `attend` is called."""
    whole: bool
    """The tensors are the layer's whole history, not only what the step added."""


_SPECIAL = frozenset(("softcap", "s_aux", "output_attentions"))
"""Arguments that make attention more than a softmax, where they are not None."""
_UNKNOWN = frozenset(("position_bias", "indices", "sinks"))
"""Arguments that make attention something that we do not know, where they are not None."""
_sdpa = torch.nn.functional.scaled_dot_product_attention

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""(module, query, keys, values, mask, *args, **kwargs) -> output (B, q, H, Dv), and the weights, or None."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What a model's attention module asked for. The tensors are the model's: not to be changed, valid in the call."""

    function: AttentionFunction
    """The model's own."""
    module: torch.nn.Module
    query: torch.Tensor
    """(B, H, q, D)."""
    key: torch.Tensor
    """(B, Hkv, t, D), as `update` returned it."""
    value: torch.Tensor
    """(B, Hkv, t, Dv)."""
    mask: torch.Tensor | None
    """(·, 1, q, T), boolean (True: visible) or additive, as a rule; None: causal, nothing padded."""
    args: tuple[Any, ...] = ()
    """What came by position after the mask: a call with some is not attention as we know it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    """What `torch.autocast` was on with where the model called; None: it was off."""

    @property
    def num_queries(self) -> int:
        """q: queries a row and head."""
        return self.query.shape[2]

    @property
    def scaling(self) -> float:
        """What scores are multiplied with."""
        return self.kwargs.get("scaling") or self.query.shape[-1] ** -0.5

    @property
    def softcap(self) -> float | None:
        """What bounds scores by tanh."""
        return self.kwargs.get("softcap")

    @property
    def s_aux(self) -> torch.Tensor | None:
        """(H,): a logit a head that joins the denominator alone."""
        return self.kwargs.get("s_aux")

    @property
    def wants_weights(self) -> bool:
        """The caller asked for the attention weights (`output_attentions`, there or in the model's config): only `run`
        over everything gives them."""
        asked = self.kwargs.get("output_attentions")
        if asked is None:
            asked = getattr(getattr(self.module, "config", None), "output_attentions", False)
        return bool(asked)

    @property
    def tag(self) -> Tag | None:
        """The tag on the keys, whether the values carry it or not."""
        return getattr(self.key, TAG, None)

    def replaceable(self, length: int) -> bool:
        """Whether this call is attention as we know it: softmax over `length` columns under a mask shared by the heads,
        of the keys and the values of one `update`."""
        kwargs, mask = self.kwargs, self.mask
        if self.args or (not _UNKNOWN.isdisjoint(kwargs) and any(kwargs.get(name) is not None for name in _UNKNOWN)):
            return False
        key, value = self.key, self.value
        if getattr(value, TAG, None) is not getattr(key, TAG, None) or key.shape[-1] != self.query.shape[-1]:
            return False
        if mask is not None:
            return mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[-1] == length
        return self.query.shape[2] == 1 or self._causal

    @property
    def _causal(self) -> bool:
        causal = self.kwargs.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if causal is None else causal)

    def run(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The model's own attention of this query over other keys, values and a mask for these."""
        if self.autocast is None:
            keys, values = self._in_type(keys, values)
            return self.function(self.module, self.query, keys, values, mask, *self.args, **self.kwargs)
        with torch.autocast(self.query.device.type, self.autocast):  # which casts all of them
            return self.function(self.module, self.query, keys, values, mask, *self.args, **self.kwargs)

    def attend(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `run` gives for one query a row over keys and values (B, Hkv, t, D) under a mask (B, 1 or H, q, t).

        Where it is a plain softmax, the query heads of one key head go in as so many queries of it: keys and values are
        then not repeated for each, which is most of the time of a call this small. Equal up to rounding.
        """
        query, kwargs = self.query, self.kwargs
        batch, heads, num_queries, dim = query.shape
        special = not _SPECIAL.isdisjoint(kwargs) and (
            kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None or self.wants_weights
        )
        if special or self.args or num_queries != 1 or dim != values.shape[-1]:
            return self.run(keys, values, mask)
        if keys.dtype != query.dtype:
            keys, values = self._in_type(keys, values)
        key_heads = keys.shape[1]
        grouped = query.reshape(batch, key_heads, heads // key_heads, dim)
        if mask is not None:
            own = mask.shape[1] == heads and heads != key_heads  # a mask for each query head
            shared = heads // key_heads
            mask = mask.reshape(batch, key_heads, shared, -1) if own else mask.expand(-1, -1, shared, -1)
        output = _sdpa(grouped, keys, values, mask, scale=kwargs.get("scaling"))
        return output.reshape(batch, 1, heads, dim), None

    def _in_type(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the type of the query where they were kept in another, under `torch.autocast`."""
        dtype = self.query.dtype
        return (keys, values) if keys.dtype == values.dtype == dtype else (keys.to(dtype), values.to(dtype))

    def stream(
        self, history: Iterable[Block], own: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """`stream_attention` of this query under a mask; no weights. A backward pass through it raises."""
        special = partial(stream_attention, scaling=self.scaling, softcap=self.softcap, s_aux=self.s_aux)
        with torch.no_grad():
            output = special(self.query, history, own, mask, seen=seen)
        return no_backward(output, self.query), None
