"""One expensive prefill for many caches: keys, values and last queries are taken once and put into each contender."""

from __future__ import annotations

import contextlib
import pydoc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pydoc_data import topics
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from hf_offload_cache.config import parse_memory
from hf_offload_cache.console import load_default_model
from hf_offload_cache.core import OffloadCache, OffloadLayer
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.methods.disk_swap import QUERIES_SEEN
from hf_offload_cache.model import AttentionCall, Geometry
from hf_offload_cache.registry import cache_class

from ..baselines.in_memory import IN_MEMORY
from ..gemma import load_gemma
from ..synthetic import attend_to_nothing

LATEST = QUERIES_SEEN
"""Queries of the prompt's end that are kept: as many as the compact keys' coding looks at."""


PIECE = 2048
"""Tokens of a forward, in the prefill of a model with windows: in one piece, transformers' attention of a layer with a
window computes scores of all pairs of tokens."""

MODELS: dict[str, Callable[[torch.dtype], Any]] = {"gemma": load_gemma}
"""Models besides the default one, by the names that `--model` takes."""

MODEL: dict[str, tuple[Any, ...]] = {"model": (str, "another model than the default one", list(MODELS))}
"""The option of studies that can measure on `MODELS`. A share of the full KV is then one of the layers with full
attention; windows are counted apart, and added to a memory budget that is a share."""


def default_model(loaded: Any = None, name: str | None = None) -> Any:
    """`loaded`; or the model `name` of `MODELS`, without a name the default one, in bfloat16, and its tokenizer."""
    if loaded is not None:
        return loaded
    return (load_default_model if name is None else MODELS[name])(torch.bfloat16)


@dataclass(frozen=True)
class Context:
    """State after a prefill of token ids (1, T): for each layer keys and values (1, Hk, T, D) as `DynamicCache` holds
    them, and the latest queries (1, H, at most LATEST, D); or that in several rows. A layer with a window has fewer
    tokens, the latest, and no queries. Read only: contenders copy."""

    ids: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    windows: frozenset[int] = frozenset()
    """Indices of the layers with a window."""

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    @property
    def full(self) -> list[int]:
        """Indices of the layers with full attention."""
        return [layer_idx for layer_idx in range(len(self.keys)) if layer_idx not in self.windows]

    @property
    def full_bytes(self) -> int:
        """Bytes of the keys and values of these layers."""
        return sum(self.keys[layer_idx].nbytes + self.values[layer_idx].nbytes for layer_idx in self.full)

    def repeated(self, rows: int) -> Context:
        """The same in each of `rows` rows, without copies."""
        keys, values, queries = (
            [part.expand(rows, -1, -1, -1) for part in parts] for parts in (self.keys, self.values, self.queries)
        )
        return replace(self, ids=self.ids.expand(rows, -1), keys=keys, values=values, queries=queries)


class _RecordingLayer(OffloadLayer):
    """Notes what the model's attention is called with for the tokens of each forward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def attend(self, call: AttentionCall) -> Any:
        parts = call.key[:, :, -call.num_queries :], call.value[:, :, -call.num_queries :], call.query[:, :, -LATEST:]
        self.seen.append(tuple(part.detach().clone() for part in parts))  # type: ignore[arg-type]
        return super().attend(call)

    def recorded(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and latest queries of all forwards, which are forgotten."""
        seen, self.seen = self.seen, []
        keys, values, queries = seen[0] if len(seen) == 1 else (torch.cat(own, 2) for own in zip(*seen, strict=True))
        return keys, values, queries[:, :, -LATEST:]


class _RecordingCache(OffloadCache):
    layer_class = _RecordingLayer


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> Context:
    """Run ids (1, T) through `model`, in one piece, or in pieces of `PIECE` tokens if it has windows. Raises
    `ValueError` for a model with states of other kinds, which cannot be put into another cache."""
    with torch.no_grad(), _RecordingCache(model, exact=True, engine="memory") as cache:
        kinds = {type(layer) for layer in cache.layers if not isinstance(layer, _RecordingLayer)}
        if any(kind is not DynamicSlidingWindowLayer for kind in kinds):
            name, kind = type(model).__name__, ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"{name} has layers with neither full attention nor a window ({kind}): a study cannot "
                             "share its prefill")  # fmt: skip
        for piece in ids.split(PIECE if kinds else ids.shape[1], 1):
            model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        held = [
            layer.recorded() if isinstance(layer, _RecordingLayer) else (layer.keys, layer.values, layer.keys[:, :, :0])
            for layer in cache.layers
        ]
        windows = {index for index, layer in enumerate(cache.layers) if not isinstance(layer, _RecordingLayer)}
    keys, values, queries = (list(part) for part in zip(*held, strict=True))
    return Context(ids, keys, values, queries, frozenset(windows))


def replay(cache: Cache, model: Any, context: Context) -> Cache:
    """Put `context` into an empty cache, ours or transformers': it is then as after its own prefill in one piece. An
    offloaded layer gets the model's last queries, and an attention function that computes nothing."""
    own = isinstance(cache, OffloadCache)
    with torch.no_grad():
        if own:
            cache.begin_step(model, {"input_ids": context.ids})
        for layer_idx, (keys, values) in enumerate(zip(context.keys, context.values, strict=True)):
            returned, other = cache.update(keys, values, layer_idx)
            if layer_idx in context.windows:
                _lengthen(cache.layers[layer_idx], context.tokens)
            attend_to_nothing(cache, model, layer_idx, context.queries[layer_idx], returned, other)
        if own:
            cache.end_step(None)
            cache.storage.prefetcher.flush()
    return cache


def _lengthen(layer: Any, tokens: int) -> None:
    """Tell a layer that got the window of a context how many tokens the context has. Raises `TypeError` for a layer
    that keeps them in another order than `DynamicCache`'s."""
    if not isinstance(layer, DynamicSlidingWindowLayer):
        raise TypeError(f"a window cannot be put into a {type(layer).__name__}: only into DynamicCache's layers")
    layer.cumulative_length = tokens


def budget(model: Any, memory: Any, max_context: int, max_batch: int = 1) -> Any:
    """`memory` for `for_budget`. A share is one of the KV of the layers with full attention: windows, if the model has
    some, are added to it. Anything else is as it is."""
    memory = share(memory)
    if not isinstance(memory, str) or "/" not in memory:
        return memory
    geometry = Geometry.of(model)
    if not (windows := geometry.kept_bytes(max_context, max_batch)):
        return memory
    return windows + parse_memory(memory, geometry.full_kv_bytes(max_context, max_batch) - windows)


def peak_share(cache: OffloadCache) -> dict[str, Any]:
    """ "peak_share": the most memory of a cache in use, over the full KV, both without windows; with windows also their
    bytes, "window_bytes"."""
    report, windows = cache.report(), cache.contents.kept_bytes()
    found = {"peak_share": (report.peak_memory_bytes - windows) / (report.full_kv_bytes - windows)}
    return {**found, "window_bytes": windows} if windows else found


def share(memory: Any) -> Any:
    """ "1/6.5" as a fraction of whole numbers, "2/13"; anything else as it is."""
    top, slash, below = str(memory).partition("/")
    return str(Fraction(top) / Fraction(below)) if slash else memory


@contextlib.contextmanager
def open_cache(
    model: PreTrainedModel, fields: dict[str, Any] | None, max_context: int, path: str | None = None, max_batch: int = 1
) -> Iterator[Cache]:
    """A contender, closed on leaving: `DynamicCache` for None, else one of `fields`, of which "cache" names the class
    as the console does, or one of `IN_MEMORY` (`DiskSwapCache` without it). With "memory" among them the cache is
    planned for that budget and `max_batch` sequences of `max_context` tokens.

    Raises `BudgetError` where the memory is too little, which is an answer, and `RuntimeError` where a plan did not
    hold, which is a fault of ours.
    """
    if fields is None:
        yield DynamicCache(config=model.config)
        return
    if (made := IN_MEMORY.get(fields.get("cache", ""))) is not None:
        yield made(model, share(fields["memory"]), max_context)
        return
    others = {name: value for name, value in fields.items() if name not in ("memory", "cache")}
    cls = cache_class(fields.get("cache", "disk-swap"))
    if fields.get("memory") in (None, "none"):
        cache = cls(model, path=path, **others)
    else:
        memory = budget(model, fields["memory"], max_context, max_batch)
        plan = {"memory": memory, "max_context": max_context, "max_batch": max_batch}
        cache = cls.for_budget(model, path=path, **plan, **others)
    with cache:
        try:
            yield cache
        except BudgetError as error:
            raise RuntimeError(f"the plan of {cls.__name__} for {fields} did not hold: {error}") from error


def follow(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    """Decode ids (1, S) one by one, whatever the model would say (teacher forcing): logits (S, V), float32."""
    with torch.no_grad():
        steps = [model(input_ids=token, past_key_values=cache, use_cache=True) for token in ids.split(1, 1)]
    return torch.stack([step.logits[0, -1] for step in steps]).float()


def answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, cache: Cache, ids: torch.Tensor, max_new_tokens: int = 24
) -> str:
    """The greedy answer to the prompt ids (1, T), of which the cache holds the first ones."""
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=max_new_tokens,
        do_sample=False, num_beams=1, temperature=None, top_p=None, top_k=None, pad_token_id=padding,
    )  # fmt: skip
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def reference_texts(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int) -> list[torch.Tensor]:
    """`count` stretches (1, tokens) of Python's help texts, each paragraph once: prose, code and tables. They do not
    overlap where the text is long enough for that (about 90,000 tokens). If the tokenizer begins a text with a token of
    its own, each stretch does: without that, Gemma's perplexity is a third higher."""
    text = "\n\n".join(pydoc.plain(topics.topics[name]) for name in sorted(topics.topics))
    paragraphs = {" ".join(part.split()): part for part in text.split("\n\n")}
    ids = tokenizer("\n\n".join(paragraphs.values()), return_tensors="pt", verbose=False)["input_ids"]
    if ids.shape[1] < tokens:
        raise ValueError(f"tokens must be at most {ids.shape[1]}, the length of the reference text, got {tokens}")
    starts = [index * (ids.shape[1] - tokens) // max(1, count - 1) for index in range(count)]
    stretches = [ids[:, start : start + tokens] for start in starts]
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None or int(ids[0, 0]) != first:
        return stretches
    return [torch.cat([ids[:, :1], stretch[:, 1:]], 1) for stretch in stretches]
