"""A simulated decoding step over all keys and values: it attends to a choice of groups, and estimates the remainder.
Tokens are fed in pieces, and each query makes its own choice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..studies.contexts import Context
from .fit import GROUP, Codes, Fit, candidates, causal, chosen, mean_value, weights

NAME = "eval_remainder"
PIECE = 64
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries (H, n, D), keys (Hk, n, D), values) of new tokens -> (H, n, D)."""
ESTIMATES = ("dropped", "direction", "codes", "both", "means", "true")


@dataclass(frozen=True)
class Plan:
    """The entries that a step reads, and its estimate of the rest."""

    tokens: int | None = None
    """Selected, besides the first and last ones; None: it attends to everything."""
    estimate: str = "dropped"
    """One of `ESTIMATES`: none; a direction a head; values from the codes of keys; both; means of groups; the values
    themselves, which is the limit for any."""
    among: int | None = None
    """Most groups, the best ones, whose remainder is estimated; the others count as dropped. None: all."""
    by_mass: bool = False
    per_head: bool = False


@dataclass
class Step:
    """One layer's state: keys and values of all tokens with room for new ones, and what was fitted to the prompt."""

    keys: torch.Tensor
    values: torch.Tensor
    codes: Codes | None = None
    coded: torch.Tensor | None = None
    fit: Fit | None = None
    mapped: torch.Tensor | None = None

    @classmethod
    def of(cls, context: Context, layer: int, room: int, plan: Plan, nbytes: int) -> Step:
        keys, values, queries = (part[layer][0] for part in (context.keys, context.values, context.queries))
        wide = [torch.nn.functional.pad(part.float(), (0, 0, 0, room + GROUP)) for part in (keys, values)]
        step = cls(*wide)
        if plan.tokens is None:
            return step
        step.codes = Codes.of(keys, queries, nbytes)
        step.coded = step.codes.decoded(wide[0])
        if plan.estimate != "dropped":
            last = queries[:, -(keys.shape[1] // 2) :]
            step.fit = Fit.of(keys, values, last, step.codes, (plan.tokens // GROUP, plan.per_head))
            step.mapped = step.fit.values(step.codes.components(wide[0]))
        return step

    def put(self, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New tokens (Hk, n, D) at position `at`."""
        there = slice(at, at + keys.shape[1])
        self.keys[:, there], self.values[:, there] = keys.float(), values.float()
        if self.codes is not None and self.coded is not None:
            self.coded[:, there] = self.codes.decoded(keys.float())
        if self.fit is not None and self.mapped is not None and self.codes is not None:
            self.mapped[:, there] = self.fit.values(self.codes.components(keys.float()))

    def attend(self, plan: Plan, at: int, queries: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Outputs for queries (H, n, D) of tokens from `at` on, and the mean share of attention that is not read."""
        heads, count = self.keys.shape[0], queries.shape[1]
        tokens = -(-(at + count) // GROUP) * GROUP
        positions = torch.arange(at, at + count)
        seen, among = causal(positions, tokens), candidates(positions, tokens // GROUP)
        asked, values = queries.float().view(heads, -1, count, queries.shape[-1]), self.values[:, :tokens]
        exact, top = weights(asked, self.keys[:, :tokens], seen)
        if plan.tokens is None or self.coded is None:
            return mean_value(exact, values).view(queries.shape), 0.0
        coded, _ = weights(asked, self.coded[:, :tokens], seen, top)
        groups, coded_groups = (part.unflatten(-1, (-1, GROUP)) for part in (exact, coded))
        best = plan.tokens // GROUP
        selected, importance = chosen(coded_groups, groups, among, best, plan.by_mass, plan.per_head)
        left = among & ~selected
        read = (groups * ~left[:, None, :, :, None]).flatten(-2)
        near, mass = mean_value(read, values), read.sum(-1, keepdim=True)
        lost = float((1 - mass / exact.sum(-1, keepdim=True)).mean())
        if plan.estimate == "dropped" or self.fit is None:
            return near.reshape(queries.shape), lost
        if plan.among is not None:
            least = importance.topk(min(plan.among, importance.shape[-1]), -1).values[..., -1:]
            left = left & (importance >= least)
        rest = (coded_groups * left[:, None, :, :, None]).flatten(-2)
        rest_mass = rest.sum(-1, keepdim=True) * self.fit.ratio[..., None]
        share = rest_mass / (mass + rest_mass)
        return ((1 - share) * near + share * self._estimate(plan, rest, near, values)).reshape(queries.shape), lost

    def _estimate(self, plan: Plan, rest: torch.Tensor, near: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """(Hk, R, n, D): the value of a remainder of weights `rest` (Hk, R, n, T)."""
        assert self.fit is not None and self.mapped is not None
        if plan.estimate == "direction":
            return near + self.fit.shrinkage * (self.fit.direction - near)
        if plan.estimate == "true":
            return mean_value(rest, values)
        if plan.estimate == "means":
            means = values.unflatten(1, (-1, GROUP)).mean(2)
            return mean_value(rest.unflatten(-1, (-1, GROUP)).sum(-1), means)
        mapped = mean_value(rest, self.mapped[:, : rest.shape[-1]])
        if plan.estimate == "codes":
            return mapped
        mix = self.fit.mix
        return near + mix[..., :1] * (self.fit.direction - near) + mix[..., 1:] * (mapped - near)


@contextlib.contextmanager
def attending(model: PreTrainedModel, attention: Attention) -> Iterator[None]:
    """`model` attends by `attention` until the end, without a cache."""

    def call(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple:
        output = attention(module.layer_idx, query[0], key[0], value[0]).to(query.dtype)
        return output.transpose(0, 1)[None], None

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, call)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def follow(
    model: PreTrainedModel, context: Context, new: torch.Tensor, plan: Plan, nbytes: int = 24, dense: int = 0
) -> tuple[torch.Tensor, float]:
    """Logits (S, V) after each token of new (1, S) behind `context`, teacher-forced, and the mean share of attention
    that steps did not read. The first `dense` tokens attend to everything. Raises `ValueError` for a model with
    windows."""
    if context.windows:
        raise ValueError(f"{type(model).__name__} has layers with windows: this attention has none")
    steps = [Step.of(context, layer, new.shape[1], plan, nbytes) for layer in range(len(context.keys))]
    at, now, lost = context.tokens, Plan(), list[float]()

    def attention(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        steps[layer].put(at, keys, values)
        output, share = steps[layer].attend(now, at, queries)
        lost.extend([share] if now.tokens is not None else [])
        return output

    logits = []
    with torch.inference_mode(), attending(model, attention):
        for part in [*new[:, :dense].split(PIECE, 1), *new[:, dense:].split(PIECE, 1)]:
            if not part.shape[1]:
                continue
            now = Plan() if at - context.tokens < dense else plan
            places = torch.arange(at, at + part.shape[1])[None]
            logits.append(model(input_ids=part, position_ids=places, use_cache=False).logits[0].float())
            at += part.shape[1]
    return torch.cat(logits), sum(lost) / max(1, len(lost))
