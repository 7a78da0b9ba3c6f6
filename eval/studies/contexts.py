"""One expensive prefill for many caches: keys, values and last queries are taken once and put into each contender."""

from __future__ import annotations

import contextlib
import pydoc
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pydoc_data import topics
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from hf_offload_cache.console import load_default_model
from hf_offload_cache.core import OffloadCache, OffloadLayer
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.methods.disk_swap import QUERIES_SEEN
from hf_offload_cache.model import AttentionCall
from hf_offload_cache.registry import cache_class

from ..baselines.in_memory import IN_MEMORY
from ..synthetic import attend_to_nothing

LATEST = QUERIES_SEEN
"""Queries of the prompt's end that are kept: as many as the compact keys' coding looks at."""


def default_model(loaded: Any = None) -> Any:
    """`loaded`, or the default model in bfloat16 and its tokenizer."""
    return load_default_model(torch.bfloat16) if loaded is None else loaded


@dataclass(frozen=True)
class Context:
    """State after a prefill of token ids (1, T) in one piece: for each layer keys and values (1, Hk, T, D) as
    `DynamicCache` holds them, and the latest queries (1, H, at most LATEST, D); or that in several rows. Read only:
    contenders copy."""

    ids: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    def repeated(self, rows: int) -> Context:
        """The same in each of `rows` rows, without copies."""
        keys, values, queries = (
            [part.expand(rows, -1, -1, -1) for part in parts] for parts in (self.keys, self.values, self.queries)
        )
        return Context(self.ids.expand(rows, -1), keys, values, queries)


class _RecordingLayer(OffloadLayer):
    """Notes what the model's attention is called with; a prefill in one piece calls it with everything."""

    seen: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def attend(self, call: AttentionCall) -> Any:
        latest = call.query[:, :, -LATEST:]
        self.seen = call.key.detach().clone(), call.value.detach().clone(), latest.detach().clone()
        return super().attend(call)


class _RecordingCache(OffloadCache):
    layer_class = _RecordingLayer


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> Context:
    """Run ids (1, T) through `model` in one piece. Raises `ValueError` for a model with layers that are not offloaded:
    what these hold cannot be put into another cache."""
    with torch.no_grad(), _RecordingCache(model, exact=True, engine="memory") as cache:
        if len(cache.offloaded) < len(cache.layers):
            name = type(model).__name__
            raise ValueError(f"{name} has layers without full attention: a study cannot share its prefill")
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        seen = [layer.seen for layer in cache.layers]
        keys, values, queries = (list(part) for part in zip(*seen, strict=True))
    return Context(ids, keys, values, queries)


def replay(cache: Cache, model: Any, context: Context) -> Cache:
    """Put `context` into an empty cache, ours or transformers': it is then as after its own prefill in one piece. An
    offloaded layer gets the model's last queries, and an attention function that computes nothing."""
    own = isinstance(cache, OffloadCache)
    with torch.no_grad():
        if own:
            cache.begin_step(model, {"input_ids": context.ids})
        for layer_idx, (keys, values) in enumerate(zip(context.keys, context.values, strict=True)):
            returned, other = cache.update(keys, values, layer_idx)
            attend_to_nothing(cache, model, layer_idx, context.queries[layer_idx], returned, other)
        if own:
            cache.end_step(None)
            cache.storage.prefetcher.flush()
    return cache


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
        plan = {"memory": share(fields["memory"]), "max_context": max_context, "max_batch": max_batch}
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
    overlap where the text is long enough for that (about 90,000 tokens)."""
    text = "\n\n".join(pydoc.plain(topics.topics[name]) for name in sorted(topics.topics))
    paragraphs = {" ".join(part.split()): part for part in text.split("\n\n")}
    ids = tokenizer("\n\n".join(paragraphs.values()), return_tensors="pt", verbose=False)["input_ids"]
    if ids.shape[1] < tokens:
        raise ValueError(f"tokens must be at most {ids.shape[1]}, the length of the reference text, got {tokens}")
    starts = [index * (ids.shape[1] - tokens) // max(1, count - 1) for index in range(count)]
    return [ids[:, start : start + tokens] for start in starts]
