"""Codes of a prompt's keys, and maps from these codes to values: they are fitted for estimates of the remainder.

Shapes: Hk key heads, R query heads of each, T tokens, D elements, r components of a code, n latest queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_offload_cache.methods.disk_swap import Coding, fit_coding

GROUP, RECENT, SINKS = 16, 32, 1
"""Tokens of a group; the least tokens at the end, and groups at the start, that each step attends to."""
HIDDEN = -1e4
QUERIES = 128
"""Most queries used, the prompt's latest."""


@dataclass(frozen=True)
class Codes:
    """One layer's keys as `DiskSwapCache` codes them."""

    coding: Coding
    heads: int

    @classmethod
    def of(cls, keys: torch.Tensor, queries: torch.Tensor, nbytes: int) -> Codes:
        """Fit codes to keys (Hk, T, D) in the metric of queries (Hk R, n, D), with `nbytes` bytes a token."""
        heads, tokens, _ = keys.shape
        return cls(fit_coding([keys[None]], tokens, heads, None, nbytes, queries[None]), heads)

    def components(self, keys: torch.Tensor) -> torch.Tensor:
        """(T, r): what the codes of keys (Hk, T, D) say of each component."""
        codes = self.coding.encode(keys.transpose(0, 1).flatten(1))
        return self.coding.unpacked(codes).t().float() + torch.from_numpy(self.coding.offsets)

    def decoded(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys (Hk, T, D) as their codes have them."""
        projection = (self.coding.queries.float() * self.coding.query_scale).t()
        flat = self.coding.mean + self.components(keys) @ projection
        return flat.view(keys.shape[1], self.heads, -1).transpose(0, 1)


def causal(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """(n, tokens): what a query at each of `positions` may see."""
    return torch.arange(tokens)[None] <= positions[:, None]


def candidates(positions: torch.Tensor, groups: int) -> torch.Tensor:
    """(n, groups): those that a step chooses among; it attends to the others, first and last ones, in any case."""
    tail = ((positions + 1 - RECENT) // GROUP * GROUP).clamp(min=SINKS * GROUP)
    group = torch.arange(groups)[None]
    return (group >= SINKS) & (group * GROUP < tail[:, None])


def weights(queries: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, top: torch.Tensor | None = None) -> tuple:
    """exp(score - top) of queries (Hk, R, n, D) over keys (Hk, T, D), and `top` (Hk, R, n, 1): the largest score, or
    the one that is given."""
    scores = torch.einsum("hrnd,htd->hrnt", queries, keys) * queries.shape[-1] ** -0.5
    scores.masked_fill_(~seen, HIDDEN)
    top = scores.amax(-1, keepdim=True) if top is None else top
    return (scores - top).clamp_(max=60).exp_(), top


def chosen(
    approximate: torch.Tensor, exact: torch.Tensor, among: torch.Tensor, count: int, by_mass: bool, per_head: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each group is selected, (1 or Hk, n, groups), and the importances (likewise) that decide. A group counts
    by its best token, or by its mass, of weights by codes (Hk, R, n, groups, GROUP), relative to what a step attends to
    in any case. Heads choose together, or each key head for itself."""
    worth = (approximate.sum(-1) if by_mass else approximate.amax(-1)) * among
    fixed = (exact.sum(-1) * ~among).sum(-1, keepdim=True)
    share = worth / (worth.sum(-1, keepdim=True) + fixed)
    importance = (share.sum(1) if per_head else share.sum((0, 1))[None]).masked_fill(~among, -1)
    best = importance.topk(min(count, importance.shape[-1]), -1).indices
    return torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, best, True) & among, importance


@dataclass
class Fit:
    """One layer's, from the prompt's latest queries."""

    ratio: torch.Tensor
    """(Hk, R, 1): the remainder's mass over the mass by codes."""
    direction: torch.Tensor
    """(Hk, R, 1, D): the mean value of the remainder, weighted by its share."""
    shrinkage: torch.Tensor
    """(Hk, R, 1, 1): how far from the selected tokens' mean to `direction` the remainder's value is."""
    center: torch.Tensor
    scale: torch.Tensor
    map: torch.Tensor
    """(Hk, r + 1, D): of standardised components, and 1, to a value."""
    mix: torch.Tensor
    """(Hk, R, 1, 2): shares of `direction` and of the mapped value, both less the selected tokens' mean."""

    def values(self, components: torch.Tensor) -> torch.Tensor:
        """(Hk, T, D): values as codes (T, r) predict them."""
        ones = torch.ones(len(components), 1)
        return torch.cat([(components - self.center) / self.scale, ones], 1) @ self.map

    @classmethod
    def of(
        cls, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, codes: Codes, plan: tuple[int, bool]
    ) -> Fit:
        """Fit to keys and values (Hk, T, D) and the latest queries (Hk R, n, D), for steps of `plan`: so many groups,
        and whether each key head chooses for itself."""
        heads, length, dim = keys.shape
        every = max(1, queries.shape[1] // QUERIES)
        positions = torch.arange(length - queries.shape[1], length)[::every]
        asked = queries[:, ::every].float().view(heads, -1, len(positions), dim)
        components = codes.components(keys)
        tokens = -(-length // GROUP) * GROUP
        keys, values = (torch.nn.functional.pad(part.float(), (0, 0, 0, tokens - length)) for part in (keys, values))
        seen, among = causal(positions, tokens), candidates(positions, tokens // GROUP)
        exact, top = weights(asked, keys, seen)
        total = exact.sum(-1, keepdim=True)
        exact = exact / total
        coded = weights(asked, codes.decoded(keys), seen, top)[0] / total
        grouped = [part.unflatten(-1, (-1, GROUP)) for part in (exact, coded)]
        selected, _ = chosen(grouped[1], grouped[0], among, plan[0], False, plan[1])
        left = (among & ~selected)[:, None, :, :, None]
        rest, rest_coded = ((part * left).flatten(-2) for part in grouped)
        mass, mass_coded = rest.sum(-1, keepdim=True), rest_coded.sum(-1, keepdim=True)
        near = mean_value(exact - rest, values)
        target = mean_value(rest, values)
        direction = (mass * target).sum(2, keepdim=True) / mass.sum(2, keepdim=True).clamp(min=1e-9)
        pull, wanted = (direction - near) * mass, (target - near) * mass
        shrinkage = (pull * wanted).sum((2, 3), keepdim=True) / (pull * pull).sum((2, 3), keepdim=True).clamp(min=1e-12)

        past = components[GROUP:]  # the first tokens are always read, and unlike the others
        center, scale = past.mean(0), past.std(0).clamp(min=1e-6)
        inputs = torch.cat([(past - center) / scale, torch.ones(len(past), 1)], 1)
        attended = rest.sum((1, 2))[:, GROUP:length]
        attended = attended / attended.mean(-1, keepdim=True).clamp(min=1e-12) + 0.1
        weighted = inputs.t() * attended[:, None]
        level = 1e-4 * length * torch.eye(inputs.shape[1])
        mapping = torch.linalg.solve(weighted @ inputs + level, weighted @ values[:, GROUP:length])

        fit = cls(
            mass.sum(2) / mass_coded.sum(2).clamp(min=1e-9), direction, shrinkage, center, scale, mapping,
            torch.zeros(*direction.shape[:3], 2),
        )  # fmt: skip
        guessed = mean_value(rest_coded[..., :length], fit.values(components))
        both = torch.stack([pull, (guessed - near) * mass], -1).flatten(2, 3)
        gram = both.transpose(-1, -2) @ both
        gram = gram + (0.02 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] + 1e-12) * torch.eye(2)
        solved = torch.linalg.solve(gram, both.transpose(-1, -2) @ wanted.flatten(2)[..., None])
        fit.mix = solved.squeeze(-1)[:, :, None]
        return fit


def mean_value(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(Hk, R, n, D): the mean of values (Hk, T, D) by weights (Hk, R, n, T)."""
    return torch.einsum("hrnt,htd->hrnd", weight, values) / weight.sum(-1, keepdim=True).clamp(min=1e-12)
