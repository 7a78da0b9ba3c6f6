"""Guesses the next layer's query, or its indexer's arguments, one layer early, from the residual stream (KVSwap,
section 3.3, "Online prediction").

The recipe of a layer is found once, during prefill. Without a recipe there is no guess; only prefetching depends on it.
There is also no guess while hooks of other code are on the modules that it would call, because these hooks are for the
model's own calls.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import BudgetError
from ..kernels.on_a_device import to_host
from ..memory.account import MemoryAccount
from .foreign_hooks import ForeignHooks

# The recipe of a layer's query: found by trying its modules

_UNSUITABLE = RuntimeError, TypeError, ValueError, IndexError, AttributeError
"""Exceptions by which modules may fail on unsuitable input."""
_FOUND = 0.999
"""Cosine similarity from which a recomputed tensor counts as the model's own (bf16 rounding stays above 0.9999)."""


@dataclass(frozen=True)
class QueryRecipe:
    """The steps from a residual stream to a query. Holds names, no modules."""

    norm: str
    """The block's norm; "" for none."""
    projection: Projection
    scale: float

    def modules(self, block: torch.nn.Module, attention: torch.nn.Module) -> list[torch.nn.Module]:
        """Modules that `query` calls."""
        norm = [block.get_submodule(self.norm)] if self.norm else []
        return [*norm, *self.projection.modules(attention)]

    def query(
        self, block: torch.nn.Module, attention: torch.nn.Module, hidden: torch.Tensor, rotary: Any
    ) -> torch.Tensor | None:
        """The query (B, H, 1, D) for `hidden` (B, 1, hidden) under the rotary cosines and sines of its position."""
        normed = block.get_submodule(self.norm)(hidden) if self.norm else hidden
        query = self.projection(attention, normed, rotary)
        return None if query is None else query * self.scale


def find_recipe(
    block: torch.nn.Module,
    attention: torch.nn.Module,
    residual: torch.Tensor,
    normed: torch.Tensor,
    rotary: Any,
    query: torch.Tensor,
) -> QueryRecipe | None:
    """The recipe that computes `query` (B, H, 1, D) from the stream `residual`, which entered `attention` as `normed`
    (both (B, 1, hidden)); None if no attempt does."""
    norms = [(name, normed, part, (residual,)) for name, part in _norms(block)]
    projections = [
        (projection, query, projection, (attention, normed, rotary))
        for projection in _projections(attention, *query.shape[1:4:2])
    ]
    likely = _scales([_attempted(*tries[0][1:]) for tries in (norms, projections) if tries])  # a device waits once

    def first(tries: list[Any], scale: float | None) -> tuple[Any, float] | None:
        for which, target, attempt, arguments in tries:
            if which is not tries[0][0]:
                (scale,) = _scales([_attempted(target, attempt, arguments)])
            if scale is not None:
                return which, scale
        return None

    if (norm := first(norms, likely[0])) is None or not projections:
        return None
    found = first(projections, likely[1])
    return None if found is None else QueryRecipe(norm[0], *found)


def _attempted(
    target: torch.Tensor, attempt: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The result of `attempt(*arguments)`, and `target`, if both have the same shape."""
    try:
        with torch.no_grad():
            candidate = attempt(*arguments)
    except _UNSUITABLE:
        return None
    return (candidate, target) if isinstance(candidate, torch.Tensor) and candidate.shape == target.shape else None


def _scales(attempts: list[tuple[torch.Tensor, torch.Tensor] | None]) -> list[float | None]:
    """The factor from the first to the second tensor of each pair if they are parallel, else None; None for no pair."""
    flat = [torch.stack([one.float().flatten() for one in pair]) for pair in attempts if pair is not None]
    products = iter(to_host(*(both @ both.t() for both in flat)))
    scales: list[float | None] = []
    for pair in attempts:
        scale = None
        if pair is not None:
            (own, product), (_, other) = next(products).tolist()
            scale = product / own if product >= _FOUND * max(1e-16, own * other) ** 0.5 else None
        scales.append(scale)
    return scales


def _norms(block: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Direct children that are norms by their class's name, or have one weight vector, in order of definition."""
    for name, child in block.named_children():
        weight = getattr(child, "weight", None)
        vector = isinstance(weight, torch.Tensor) and weight.ndim == 1 and not list(child.children())
        if vector or "norm" in type(child).__name__.lower():
            yield name, child
    yield "", torch.nn.Identity()


def _projections(attention: torch.nn.Module, heads: int, dim: int) -> Iterator[Projection]:
    for rotate in ("all", "part", "none"):
        for linear in ("q_proj", "query", "wq", "qkv_proj", "query_key_value"):
            if isinstance(getattr(attention, linear, None), torch.nn.Module):
                yield Projection(linear, heads, dim, rotate, interleaved=False)
                yield Projection(linear, heads, dim, rotate, interleaved=True)


@dataclass(frozen=True)
class Projection:
    """normed (B, 1, hidden) through one projection, the query norm if there is one, and the rotary embedding.

    A fused projection has the queries first, or `interleaved`: query, key and value head by head. The rotary embedding
    rotates "all" of a head, the "part" as wide as its cosines, or "none".
    """

    linear: str
    heads: int
    dim: int
    rotate: str
    interleaved: bool

    def modules(self, attention: torch.nn.Module) -> list[torch.nn.Module]:
        """Modules that the projection calls."""
        norm = _query_norm(attention)
        return [getattr(attention, self.linear), *([] if norm is None else [norm])]

    def __call__(self, attention: torch.nn.Module, normed: torch.Tensor, rotary: Any) -> torch.Tensor | None:
        rotation = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if self.rotate != "none" and (rotary is None or rotation is None):
            return None
        flat = getattr(attention, self.linear)(normed)
        if self.interleaved:
            if flat.shape[-1] != 3 * self.heads * self.dim:
                return None
            query = flat.unflatten(-1, (self.heads, 3 * self.dim))[..., : self.dim]
        else:
            if flat.shape[-1] < self.heads * self.dim:
                return None
            query = flat[..., : self.heads * self.dim].unflatten(-1, (self.heads, self.dim))
        norm = _query_norm(attention)
        if norm is not None:
            width = getattr(norm, "weight", query).shape[-1]
            query = norm(query) if width == self.dim else norm(query.flatten(-2)).view_as(query)
        query = query.transpose(1, 2)
        if self.rotate == "none" or rotation is None:
            return query
        turning = self.dim if self.rotate == "all" else min(rotary[0].shape[-1], self.dim)
        turned = rotation(query[..., :turning], query[..., :turning], *rotary)[0]
        return turned if turning == self.dim else torch.cat([turned, query[..., turning:]], -1)


def _query_norm(attention: torch.nn.Module) -> Any:
    return getattr(attention, "q_norm", None) or getattr(attention, "q_layernorm", None)


# The recipe of an indexer's arguments

@dataclass(frozen=True)
class IndexerRecipe:
    """The steps from a residual stream to the arguments of an indexer's forward. Holds names, no modules."""

    norm: str
    """The block's norm; "" for none."""
    roles: IndexerRoles

    def modules(self, block: torch.nn.Module, attention: torch.nn.Module) -> list[torch.nn.Module]:
        """Modules that a guess calls."""
        norm = [block.get_submodule(self.norm)] if self.norm else []
        return [*norm, *(attention.get_submodule(name) for name in self.roles.path), attention.get_submodule("indexer")]

    def query(
        self, block: torch.nn.Module, attention: torch.nn.Module, hidden: torch.Tensor, others: dict[str, Any]
    ) -> IndexerGuess:
        """The guess for `hidden` (B, 1, hidden). `others`: arguments that the indexer shares with those of earlier
        layers."""
        normed, roles = block.get_submodule(self.norm)(hidden) if self.norm else hidden, self.roles
        given = {**others, roles.stream: normed}
        if roles.latent:
            given[roles.latent] = _along(attention, roles.path, normed) * roles.scale
        return IndexerGuess(attention.get_submodule("indexer"), given, roles.caches)


@dataclass(frozen=True)
class IndexerGuess:
    """An indexer with its probable arguments for one token, without the cache. For one step."""

    indexer: torch.nn.Module
    given: dict[str, Any]
    caches: tuple[str, ...]

    def arguments(self, cache: Any) -> dict[str, Any]:
        """All arguments by name, with this cache."""
        return {**self.given, **dict.fromkeys(self.caches, cache)}


@dataclass(frozen=True)
class IndexerRoles:
    """Roles of the arguments of an indexer's forward."""

    caches: tuple[str, ...]
    """Names of the arguments that are the cache."""
    stream: str
    """Name of the one with the normed stream."""
    latent: str = ""
    """Name of the one with the low-rank latent from which attention makes its query; "" for none."""
    path: tuple[str, ...] = ()
    """Modules of the attention that make it from the normed stream, in order."""
    scale: float = 1.0

    def others(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments that depend on no layer: masks and positions."""
        own = (*self.caches, self.stream, self.latent)
        return {name: value for name, value in given.items() if name not in own}


def _along(attention: torch.nn.Module, path: tuple[str, ...], tensor: Any) -> Any:
    for name in path:
        tensor = attention.get_submodule(name)(tensor)
    return tensor


def find_roles(attention: torch.nn.Module, normed: torch.Tensor, given: dict[str, Any]) -> IndexerRoles | None:
    """The roles of an indexer's arguments by name. One of them is the stream, whose latest token is `normed` (B, 1,
    hidden); None: none is."""
    caches = tuple(name for name, value in given.items() if hasattr(value, "update_indexer"))
    latest = {
        name: value[:, -1:].detach()
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.ndim == 3 and value.is_floating_point()
    }
    stream = next((name for name, one in latest.items() if one.shape == normed.shape and torch.equal(one, normed)), "")
    for name, latent in latest.items() if stream else ():
        if name != stream and (found := _find_path(attention, normed, latent)) is not None:
            return IndexerRoles(caches, stream, name, *found)
    return IndexerRoles(caches, stream) if stream else None


def _find_path(
    attention: torch.nn.Module, normed: torch.Tensor, latent: torch.Tensor
) -> tuple[tuple[str, ...], float] | None:
    """The one or two modules of the attention that make `latent` (B, 1, width) from the normed stream, and a factor."""
    parts = [name for name, _ in attention.named_children() if name != "indexer"]
    weights = ((name, getattr(part, "weight", None)) for name, part in attention.named_children())
    norms = [name for name, weight in weights if isinstance(weight, torch.Tensor) and weight.shape == latent.shape[2:]]
    for first in parts:
        made = _attempted(latent, _along, (attention, (first,), normed))
        for path in () if made is None else (*((first, norm) for norm in norms), (first,)):
            (scale,) = _scales([_attempted(latent, _along, (attention, path, normed))])
            if scale is not None:
                return path, scale
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same: tensors in the same memory, or equal values."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        places = ((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (one, other))
        return next(places) == next(places)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)


# Rotary embeddings whose frequencies depend on the length

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose frequencies depend on the last position of a forward; transformers finds the first in longer names."""


def _kinds_of(module: Any) -> list[tuple[str, str]]:
    """Kind, and type of its layers ("": all), of a module with rotary embeddings."""
    kind = getattr(module, "rope_type", None)
    if kind is None:
        return []
    return [(str(one), layers) for layers, one in kind.items()] if isinstance(kind, dict) else [(str(kind), "")]


def _by_length(kind: str) -> str | None:
    return next((one for one in _BY_LENGTH if one in kind), None)


def rotary_kinds(model: Any) -> set[str]:
    """Kinds in transformers' words; empty if positions are encoded in another way."""
    return {kind for module in model.modules() for kind, _ in _kinds_of(module)}


def length_dependent(model: Any) -> str | None:
    """Why keys differ between forwards of different lengths; None: they do not."""
    kinds = sorted(kind for kind in rotary_kinds(model) if _by_length(kind))
    return f"its rotary embedding ({kinds[0]}) depends on how many tokens there are" if kinds else None


def state_by_length(module: torch.nn.Module) -> set[str]:
    """Attributes in which a rotary embedding stores the longest text that it has seen."""
    return {
        (f"{layers}_" if layers else "") + name
        for kind, layers in _kinds_of(module)
        if _by_length(kind) == "dynamic"
        for name in ("inv_freq", "max_seq_len_cached")
    }


def stretch(model: Any) -> float:
    """Longest text over the configuration's positions: the factor of "dynamic" embeddings, or 1."""
    factors = [
        float(_parameters(module.config, layers).get("factor") or 1) if _by_length(kind) == "dynamic" else 1.0
        for module in model.modules()
        for kind, layers in _kinds_of(module)
    ]
    return max(factors, default=1.0)


def _parameters(config: Any, layers: str) -> dict[str, Any]:
    """Parameters of the rotary embedding for a type of layers."""
    given = getattr(config, "rope_parameters", None) or {}
    parameters: dict[str, Any] = given.get(layers, given) if layers else given
    return parameters


def _limits(model: Any) -> Iterator[tuple[str, int]]:
    """Each kind that depends on the length, and the positions up to which it does not."""
    for module in model.modules():
        for kind, layers in _kinds_of(module):
            if (by := _by_length(kind)) is not None:
                given = _parameters(module.config, layers) if by == "longrope" else {}
                yield by, int(given.get("original_max_position_embeddings") or module.config.max_position_embeddings)


def reason_against_pieces(model: Any, first: int, total: int) -> str | None:
    """The reason why a text of `total` tokens must not go through `model` in several forwards of which the first ends
    after `first` tokens (tokens of earlier turns count): its keys would differ from those of one forward. None: they
    would not.

    With "longrope" a forward that ends beyond the original positions rotates all of its keys by other frequencies, with
    "dynamic" by frequencies of its own length.
    """
    if first >= total:
        return None
    for kind, limit in _limits(model):
        if total > limit and (kind == "dynamic" or first <= limit):
            return (
                f"its rotary embedding ({kind}) depends on the length of the forward if a text is longer than "
                f"{limit:,} tokens, and this one has {total:,}: in pieces, its keys would have different rotations"
            )
    return None


_OWNER = "look-ahead"


@dataclass
class Sight:
    """The latest observations of one layer, and the recipe of its query."""

    block: weakref.ref[torch.nn.Module] | None = None
    attention: weakref.ref[torch.nn.Module] | None = None
    residual: torch.Tensor | None = None
    """(B, 1, hidden): a copy of the stream's latest token, for one step."""
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    """The model's own tensors, for one step."""
    rotary_from: int | None = None
    """The first layer with the same rotary tensors, or an indexer with the same `others`, if it comes earlier; None: no
    earlier layer."""
    rotated: bool = False
    others: dict[str, Any] | None = None
    """Arguments of the layer's indexer that other layers' may share: the model's own tensors, for one step."""
    roles: IndexerRoles | None = None
    """Of its indexer's arguments; None: it has no indexer, or they are not known."""
    recipe: QueryRecipe | IndexerRecipe | None = None
    learned: bool = False
    """Whether a recipe was searched for."""
    watchers: ForeignHooks | None = None
    """Detects foreign hooks on the modules that a guess calls."""


class LookAhead:
    """One per cache, used on the thread that runs the model. Holds copies of the latest token's stream for one step.

    Args:
        account: books the copies, as "look-ahead". A copy beyond its budget is not made, and that query is not guessed.
    """

    def __init__(self, account: MemoryAccount) -> None:
        self.sights: dict[int, Sight] = {}
        self._account = account
        self._held = 0
        self._normed: tuple[int, torch.Tensor] | None = None  # of the current layer, until its query is known

    @staticmethod
    def planned(num_blocks: int, hidden_size: int, itemsize: int, batch: int) -> dict[str, int]:
        """Upper bound on its bytes: the stream before every block, and after one block's norm."""
        return {_OWNER: (num_blocks + 1) * batch * hidden_size * itemsize}

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        """Before a block, with the stream (B, q, hidden)."""
        sight = self.sights.get(layer_idx)
        if sight is None:
            sight = self.sights[layer_idx] = Sight()
        if self._normed is not None:
            self._drop_normed()
        if sight.residual is not None:  # left by a step that did not end
            self._release(sight.residual)
            sight.residual = None
        sight.residual = self._copy(hidden)
        if sight.block is None:
            sight.block = weakref.ref(block)

    def enter_attention(
        self, layer_idx: int, attention: torch.nn.Module, hidden: torch.Tensor, rotary: Any
    ) -> None:
        """Before a block's attention, with the normed stream (B, q, hidden) and the rotary cosines and sines."""
        sight = self.sights.get(layer_idx)
        if sight is None:
            sight = self.sights[layer_idx] = Sight()
        if sight.attention is None:
            sight.attention = weakref.ref(attention)
        sight.rotary = rotary if isinstance(rotary, tuple) and len(rotary) == 2 else None
        if not sight.learned:
            self._drop_normed()
            normed = self._copy(hidden)
            self._normed = None if normed is None else (layer_idx, normed)

    def learn(self, layer_idx: int, query: torch.Tensor) -> bool:
        """Find the recipe of this layer's new query (B, H, q, D) from the observations before it. Returns whether no
        later call can find more."""
        sight = self.sights.get(layer_idx)
        if sight is None or sight.learned or sight.attention is None:
            return sight is not None and sight.learned
        block = sight.block() if sight.block is not None else None
        attention = sight.attention()
        if block is not None and ForeignHooks([block]).find() is not None:
            self._drop_normed()
            return False  # they would see the attempts
        sight.learned = True
        normed = self._normed[1] if self._normed is not None and self._normed[0] == layer_idx else None
        if block is not None and attention is not None and sight.residual is not None and normed is not None:
            sight.rotated = sight.rotary is not None
            if sight.rotary is not None:
                cosines = sight.rotary[0]
                earlier = [i for i, one in self.sights.items() if one.rotary is not None and one.rotary[0] is cosines]
                sight.rotary_from = min((i for i in earlier if i < layer_idx), default=None)
            rotary = None if sight.rotary is None else tuple(part[:, -1:] for part in sight.rotary)
            latest = query[:, :, -1:].detach()
            sight.recipe = find_recipe(block, attention, sight.residual, normed, rotary, latest)
        del normed
        self._drop_normed()
        return True

    def enter_indexer(self, layer_idx: int, given: dict[str, Any]) -> None:
        """Before a layer's indexer runs with `given` arguments: keep those that later layers share, for this step, and
        find its recipe once."""
        sight = self.sights.get(layer_idx)
        if sight is None or sight.residual is None:  # nobody watches this step, or the stream has another form
            return
        if not sight.learned and self._normed is not None and self._normed[0] == layer_idx:
            self._learn_indexer(sight, self._normed[1], given)
            self._drop_normed()
        if sight.roles is not None:
            sight.others = sight.roles.others(given)

    def _learn_indexer(self, sight: Sight, normed: torch.Tensor, given: dict[str, Any]) -> None:
        block = sight.block() if sight.block is not None else None
        attention = sight.attention() if sight.attention is not None else None
        if block is None or attention is None or ForeignHooks([block]).find() is not None:
            return  # hooks would see the attempts
        sight.learned, sight.rotated = True, True
        sight.roles = roles = find_roles(attention, normed, given)
        if roles is None:
            return
        others = roles.others(given)
        known = [(i, one.others) for i, one in self.sights.items() if one.others is not None and one is not sight]
        sight.rotary_from = min((i for i, theirs in known if _same(theirs, others)), default=None)
        for name, part in _norms(block):
            if _scales([_attempted(normed, part, (sight.residual,))])[0] is not None:
                sight.recipe = IndexerRecipe(name, roles)
                return

    def predict(self, layer_idx: int, attention_output: torch.Tensor) -> Any:
        """The query (B, H, 1, D) that layer `layer_idx` will probably ask, guessed in the layer before it, whose
        attention has just added `attention_output` (B, 1, hidden); of a layer with an indexer an `IndexerGuess`. None
        if nothing can be guessed."""
        sight, previous = self.sights.get(layer_idx), self.sights.get(layer_idx - 1)
        if sight is None or previous is None or sight.recipe is None or previous.residual is None:
            return None
        block = sight.block() if sight.block is not None else None
        attention = sight.attention() if sight.attention is not None else None
        if block is None or attention is None:
            return None
        source = None if sight.rotary_from is None else self.sights[sight.rotary_from]
        rotary: Any = None if source is None else source.rotary if sight.roles is None else source.others
        if sight.rotated and rotary is None:
            return None
        hidden, before = previous.residual, None if previous.block is None else previous.block()
        adds = None
        if before is not None and hasattr(before, "post_feedforward_layernorm"):  # it normalises its addition
            adds = before.get_submodule("post_attention_layernorm")
        if sight.watchers is None:
            called = sight.recipe.modules(block, attention)
            sight.watchers = ForeignHooks(called if adds is None else [*called, adds])
        if sight.watchers.find() is not None:
            return None
        with torch.no_grad():
            if adds is not None:
                attention_output = adds(attention_output)
            hidden = hidden + attention_output[:, -1:].to(hidden.device)
            return sight.recipe.query(block, attention, hidden, rotary)

    def call(
        self, layer_idx: int, attention_output: torch.Tensor, run: Callable[[IndexerGuess], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """The result of `run` for the guess of a layer's indexer; None: there is no guess. An indexer that cannot be
        called so is not guessed again."""
        if (guess := self.predict(layer_idx, attention_output)) is None:
            return None
        try:
            return run(guess)
        except _UNSUITABLE as error:
            if isinstance(error, (OSError, BudgetError)):
                raise
            self.sights[layer_idx].recipe = None
            return None

    def end_step(self) -> None:
        """Release the step's tensors."""
        for sight in self.sights.values():
            sight.residual = sight.rotary = sight.others = None
        self._normed = None
        self._account.release(_OWNER, self._held)
        self._held = 0

    def _copy(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """A copy of the latest token only: a view would keep a complete prompt's activations. None: there is no
        room."""
        latest = hidden[:, -1:].detach()
        try:
            self._account.hold(_OWNER, latest.nbytes)
        except BudgetError:
            return None
        self._held += latest.nbytes
        return latest.clone()

    def _release(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self._account.release(_OWNER, tensor.nbytes)
            self._held -= tensor.nbytes

    def _drop_normed(self) -> None:
        if self._normed is not None:
            (_, normed), self._normed = self._normed, None
            self._release(normed)
