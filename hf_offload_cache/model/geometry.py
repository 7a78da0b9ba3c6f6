"""The shapes of a model's keys and values, which determine how much memory a cache needs."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from ..errors import UnsupportedModelError
from ..history.records import RecordFormat
from ..memory.account import tensors_in
from .config_values import config_value
from .place import device_type, has_indexer, inner_model, is_offloaded
from .weights import total_bytes

_STATES = ("conv_states", "recurrent_states")
"""Attributes of transformers' layers with linear states."""


@dataclass(frozen=True)
class LayerShape:
    """One offloaded layer: heads and widths of its keys (B, Hk, T, Dk) and values (B, Hv, T, Dv). All are 0 in a layer
    that stores only an indexer's keys, and attends to what another layer stores."""

    num_heads: int
    """Query heads, H."""
    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    indexer_bytes: int = 0
    """Bytes a token of the keys of an indexer."""
    most_chosen: int = 0
    """The most tokens that the model's indexer chooses for a query; 0: it has none."""
    topk: int = 0
    """As of `indexer_topk`."""

    @property
    def has_history(self) -> bool:
        """Whether it stores keys and values."""
        return self.num_key_heads > 0


@dataclass(frozen=True)
class KeptLayer:
    """One layer that stays in memory: `fixed_bytes` per sequence, and `token_bytes` for each of the latest
    `most_tokens` tokens (None: all)."""

    fixed_bytes: int = 0
    token_bytes: int = 0
    most_tokens: int | None = None

    def nbytes(self, context: int, added: int = 0) -> int:
        """Bytes for one sequence of `context` tokens, of which the latest `added` are stored beyond a window."""
        held = context if self.most_tokens is None else min(context, self.most_tokens + added)
        return self.fixed_bytes + held * self.token_bytes


@dataclass(frozen=True)
class Geometry:
    """The facts of a model that determine memory: `Geometry.of(model)`, `Geometry.uniform(...)`, or created by hand."""

    layers: tuple[LayerShape, ...]
    """The offloaded layers, in order."""
    dtype: torch.dtype
    """Type of keys and values."""
    kept: tuple[KeptLayer, ...] = ()
    """Layers with a sliding window or a linear state, and the linear states of hybrids."""
    weight_bytes: int = 0
    num_blocks: int = 0
    """Decoder blocks, of any kind."""
    hidden_size: int = 0
    """Width of the residual stream."""
    device: str = "cpu"
    """Type of attention's device; on "cuda", entries read are stored on both sides."""
    rows_of_ids: int = 1
    """Rows of ids per sequence: see `rows_of_ids`."""
    vocab_size: int = 0
    """Logits of a token; 0: unknown."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """Geometry of a `PreTrainedModel`, or of one on the meta device (a configuration without weights).

        One token goes through a twin of the model on the meta device, which has no data: the `DynamicCache` then has
        the shapes, whatever the architecture. If the twin cannot run, the configuration's fields decide. Keeps the
        classes, configurations and results of the latest eight models, so that an equal model costs a millisecond.
        Raises `UnsupportedModelError` if neither tells the shapes.
        """
        from transformers.cache_utils import CacheLayerMixin, DynamicCache

        inner = inner_model(model)
        if inner.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"model {type(inner).__name__} is an encoder-decoder: this library serves decoder-only models"
            )
        text = inner.config.get_text_config(decoder=True)
        seen = DynamicCache(config=inner.config)
        longer: tuple[list[Any], ...] = ()
        stated = stated_shape(text)
        try:
            seen, longer = _probe(_Kind.of(inner, rows_of_ids(inner)))
        except Exception as error:  # a model may fail in any way on tensors without data
            if stated is None:
                raise UnsupportedModelError(
                    f"the shapes of {type(inner).__name__}'s keys cannot be known before it runs ({error}): "
                    "construct the cache without a budget"
                ) from error
        heads, chosen = config_value(text, "num_attention_heads"), _most_chosen(text)
        offloaded: list[LayerShape] = []
        kept: list[KeptLayer] = []
        item = inner.dtype.itemsize
        for layer_idx, layer in enumerate(seen.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            shape = stated
            if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == 4:
                sizes = (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
                shape = LayerShape(heads if isinstance(heads, int) else sizes[0], *sizes)
            full, others = is_offloaded(layer), _others_kept([layers[layer_idx] for layers in longer], item)
            if has_indexer(layer):
                others = KeptLayer(0, _bytes(_others(layer), item))  # of the one token
            if has_indexer(layer) and (shape is not None or others.token_bytes):
                fields = {"indexer_bytes": others.token_bytes, "most_chosen": chosen, "topk": indexer_topk(text)}
                shape, others = replace(shape or LayerShape(0, 0, 0, 0, 0), **fields), KeptLayer()
            if full and shape is not None:
                offloaded.append(shape)
            elif shape is not None and isinstance(layer, CacheLayerMixin):  # a dummy keeps nothing
                window = getattr(layer, "sliding_window", None)
                entry = shape.num_key_heads * shape.key_dim
                entry += 0 if keys is not None and keys is values else shape.num_value_heads * shape.value_dim
                kept.append(KeptLayer(0, entry * item, window and max(1, window - 1)))
            kept += [_linear_states(layer, item), others]
        kept = [layer for layer in kept if layer != KeptLayer(most_tokens=layer.most_tokens)]
        hidden, vocab = config_value(text, "hidden_size"), config_value(text, "vocab_size")
        return cls(
            layers=tuple(offloaded),
            dtype=inner.dtype,
            kept=tuple(kept),
            weight_bytes=total_bytes(inner),
            num_blocks=len(seen.layers),
            hidden_size=hidden if isinstance(hidden, int) else 0,
            device=device_type(inner),
            rows_of_ids=rows_of_ids(inner),
            vocab_size=vocab if isinstance(vocab, int) else 0,
        )

    @classmethod
    def uniform(
        cls, num_layers: int, num_heads: int, num_key_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16,
        **others: Any,
    ) -> Self:  # fmt: skip
        """`num_layers` equal offloaded layers; `others` are fields."""
        shape = LayerShape(num_heads, num_key_heads, head_dim, num_key_heads, head_dim)
        others = {"num_blocks": num_layers, "hidden_size": num_heads * head_dim, **others}
        return cls(layers=(shape,) * num_layers, dtype=dtype, **others)

    @property
    def is_indexed(self) -> bool:
        """Whether the model chooses by itself, in each offloaded layer, what a step attends to."""
        return bool(self.layers) and all(layer.most_chosen for layer in self.layers)

    def forms(self, group_size: int | None) -> list[RecordFormat]:
        """Record format of each offloaded layer."""
        return [
            RecordFormat.of_sizes(
                (shape.num_key_heads, shape.key_dim, shape.num_value_heads, shape.value_dim), self.dtype, group_size
            )
            for shape in self.layers
        ]

    def kept_bytes(self, context: int, batch: int, added: int = 0) -> int:
        """Bytes of the layers that stay in memory, in a step that adds `added` tokens; 0: after a prefill."""
        return batch * sum(layer.nbytes(context, added) for layer in self.kept)

    def full_kv_bytes(self, context: int, batch: int) -> int:
        """Memory of `DynamicCache` for `batch` sequences of `context` tokens."""
        return batch * context * self._entry_bytes + self.kept_bytes(context, batch)

    @functools.cached_property
    def shapes(self) -> tuple[LayerShape, ...]:
        """`layers`, of which equal ones are the same object."""
        known = dict(zip(self.layers, self.layers, strict=True))
        return tuple([known[shape] for shape in self.layers])

    @functools.cached_property
    def _entry_bytes(self) -> int:
        """Bytes of a token in all offloaded layers."""
        return sum(form.entry_bytes for form in self.forms(1)) + sum(layer.indexer_bytes for layer in self.layers)


@dataclass(frozen=True)
class _Kind:
    """Recipe of a twin. Equal configurations make equal kinds."""

    model_class: Any
    said: str
    """The configuration as text, at that time."""
    config: Any = field(compare=False)
    rows: int = 1
    """Rows of ids in its input."""

    @classmethod
    def of(cls, inner: Any, rows: int = 1) -> Self:
        return cls(type(inner), repr(inner.config.to_dict()), inner.config, rows)


_PROBED = torch.bfloat16
"""Type of a twin's weights, whatever the model's: some kernels have no other on the meta device."""
_TOKENS = 127, 255
"""Lengths of two longer probes. Both fill buffers that empty at powers of two as far as possible, so the line through
their sizes is an upper bound."""


@functools.lru_cache(maxsize=8)  # otherwise each request of a server takes half a second
def _probe(kind: _Kind) -> tuple[Any, tuple[list[Any], ...]]:
    """The `DynamicCache` of one token in a twin on the meta device, not to be changed. If layers store more than keys,
    values, linear states and an indexer's keys, also the layers after `_TOKENS` tokens."""
    from torch.fx.experimental import _config as fake_values
    from transformers.cache_utils import DynamicCache

    config = copy.deepcopy(kind.config)
    all_nonzero = fake_values.patch(meta_nonzero_assume_all_nonzero=True)  # an upper bound of what an indexer picks
    with torch.device("meta"), torch.no_grad(), all_nonzero:
        twin = kind.model_class._from_config(config, attn_implementation="eager").to(_PROBED).eval()

        def filled(tokens: int) -> Any:
            cache, ids = DynamicCache(config=config), torch.zeros(kind.rows, tokens, dtype=torch.long, device="meta")
            twin(input_ids=ids, past_key_values=cache, use_cache=True)
            return cache

        short = filled(1)
        others = tensors_in([_others(layer) for layer in short.layers if not has_indexer(layer)])
        longer = tuple(filled(tokens).layers for tokens in _TOKENS) if any(map(torch.numel, others)) else ()
    return short, longer


def rows_of_ids(model: Any) -> int:
    """Rows of ids that a model takes per sequence, found with one token in a twin: one, except for models with one per
    codebook (MusicGen)."""
    inner = inner_model(model)
    codebooks = config_value(inner.config.get_text_config(decoder=True), "num_codebooks")
    return _joined_rows(_Kind.of(inner, codebooks)) if isinstance(codebooks, int) and codebooks > 1 else 1


@functools.lru_cache(maxsize=8)
def _joined_rows(kind: _Kind) -> int:
    """Number of a twin's rows of ids that become one sequence; one, if it does not run."""
    try:
        layers = _probe(kind)[0].layers
    except Exception:  # a model may fail in any way on tensors without data
        return 1
    held = [one.keys.shape[0] for one in layers if isinstance(getattr(one, "keys", None), torch.Tensor)]
    return kind.rows // held[0] if held else 1


def seen_layers(model: Any) -> list[Any] | None:
    """Layers of the `DynamicCache` of one token in a twin without data, not to be changed; None: the twin cannot
    run."""
    inner = inner_model(model)
    try:
        layers: list[Any] = _probe(_Kind.of(inner, rows_of_ids(inner)))[0].layers
    except Exception:  # a model may fail in any way on tensors without data
        return None
    return layers


def unknown_shapes(model: Any) -> str | None:
    """Why the shapes of a model's keys are unknown before it runs; None: they are known."""
    if stated_shape(model.config.get_text_config(decoder=True)) is None:
        try:
            Geometry.of(model)
        except UnsupportedModelError:
            return "the shapes of its keys cannot be known before it runs"
    return None


def stated_shape(config: Any) -> LayerShape | None:
    """The configuration's shape of every layer; None if it states none, or if keys are expanded from a latent."""
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    heads, key_heads, hidden, dim = (config_value(config, name) for name in names)
    key_heads = key_heads or heads
    dim = dim or (hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None)
    if config_value(config, "kv_lora_rank"):
        return None
    if not (isinstance(heads, int) and isinstance(key_heads, int) and isinstance(dim, int)):
        return None
    return LayerShape(heads, key_heads, dim, key_heads, dim)


_UNLIMITED = 1 << 20


def _most_chosen(config: Any) -> int:
    """The most tokens that an indexer chooses for a query, from the fields of the configurations of models that have
    one; a number above all contexts if none says it."""
    topk, budget = config_value(config, "index_topk"), config_value(config, "indexer_budget")
    if isinstance(topk, int):
        return topk + (config_value(config, "index_kpool") or 1) - 1
    return budget + (config_value(config, "indexer_compress_ratio") or 1) - 1 if isinstance(budget, int) else _UNLIMITED


def indexer_topk(config: Any) -> int:
    """The tokens that an indexer chooses for a query if it scores each token by that token's key alone, from a
    configuration; 0: there is no indexer, or it scores blocks of tokens."""
    topk = config_value(config, "index_topk")
    return topk if isinstance(topk, int) and not config_value(config, "index_kpool") else 0


def _linear_states(layer: Any, item: int) -> KeptLayer:
    """Linear states of a layer for one sequence. They include the convolution inputs of tokens that may be taken back;
    this concerns only models without a recurrence, because a recurrence is never taken back."""
    conv, recurrent = (getattr(layer, name, {}) for name in _STATES)
    recorded = 0
    if not any(isinstance(state, torch.Tensor) for state in recurrent.values()):
        recorded = sum(_bytes(state[..., :1], item) for state in tensors_in(conv))
    return KeptLayer(_bytes([conv, recurrent], item), recorded, 0)


def _others(layer: Any) -> dict[str, Any]:
    """A layer's contents besides keys, values and linear states, e.g. an indexer's keys."""
    return {name: value for name, value in vars(layer).items() if name not in ("keys", "values", *_STATES)}


def _others_kept(longer: list[Any], item: int) -> KeptLayer:
    """Upper bound on those of one sequence, from the layer after each of `_TOKENS` tokens."""
    if not longer:
        return KeptLayer()
    (short, long), (fewer, more) = _TOKENS, (_bytes(_others(layer), item) for layer in longer)
    growth = -(-max(0, more - fewer) // (long - short))
    return KeptLayer(max(0, more - growth * long), growth)


def _bytes(tree: Any, item: int) -> int:
    """Bytes of the tensors of `tree`, which a twin left: tensors of the twin's type have the model's type in
    reality."""
    return sum(
        tensor.numel() * (item if tensor.dtype == _PROBED else tensor.element_size())
        for tensor in tensors_in(tree)
    )
