"""One call of the attention function as one value, and the tables that lead a model's calls to this library."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..history.records import autocast_dtype
from .place import no_backward
from .stream_attention import Attended, Block, stream_attention

# Functions that `torch.compile` must not trace, at the price of one check if nothing is compiled

Function = TypeVar("Function", bound=Callable[..., Any])

_UNTRACED: list[Any] = []  # decorated functions, in import order; nothing else changes it


def untraced(function: Function) -> Any:
    """`function`, with an attribute `outside`: the same, but a graph that is being traced breaks at it, once `ready`
    was called. `function`, or whoever calls it, asks `torch.compiler.is_dynamo_compiling()`, and calls that one then.

    `torch.compiler.disable` alone costs ten calls at each of its own even if nothing is compiled, and imports the
    compiler when a module is imported. A wrapper that asks would cost one call in every layer of a step.
    """
    marked: Any = function
    marked.outside = function
    _UNTRACED.append(marked)
    return marked


def ready() -> None:
    """Prepare for models that may be compiled from now on. Idempotent; any thread."""
    for function in _UNTRACED:
        if function.outside is function:
            function.outside = torch.compiler.disable(function)


# A tag on the keys and values returned by `update`, by which attention finds their layer

TAG = "_hf_offload_cache_tag"
"""The attribute of a tensor that holds its `Tag`. A tensor computed from a tagged one has none: then nothing is
replaced."""


@dataclass(eq=False)
class Tag:
    """One `update` of one layer; the keys and values that it returned carry the same tag."""

    layer: Any
    """The layer whose `attend` is called."""
    whole: bool
    """The tensors are the layer's complete history, not only what the step added."""
    own: tuple[torch.Tensor, torch.Tensor] | None = None
    """What the step added, (B, heads, q, D) each, where the tensors stand for it with their first token; None: they are
    it, or include it."""
    expand: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Makes keys and values of latents, which are stored; None: keys and values are stored."""


_SPECIAL = frozenset(("softcap", "s_aux", "output_attentions"))
"""Arguments, not None, that make attention more than a softmax."""
_UNKNOWN = frozenset(("position_bias", "indices", "sinks"))
"""Arguments, not None, that make attention unknown to us."""
_sdpa = torch.nn.functional.scaled_dot_product_attention

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""(module, query, keys, values, mask, *args, **kwargs) -> output (B, q, H, Dv), and the weights, or None."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The request of a model's attention module. The tensors are the model's: not to be changed, valid during the
    call."""

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
    """(·, 1, q, T), usually boolean (True: visible) or additive; None: causal, nothing padded."""
    args: tuple[Any, ...] = ()
    """Positional arguments after the mask: a call with some is not attention as we know it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    """The type of the caller's `torch.autocast`; None: it was off."""

    @property
    def num_queries(self) -> int:
        """q: queries per row and head."""
        return self.query.shape[2]

    @property
    def scaling(self) -> float:
        """Factor of the scores."""
        return self.kwargs.get("scaling") or self.query.shape[-1] ** -0.5

    @property
    def softcap(self) -> float | None:
        """Bound on scores, by tanh. None also where the model's own attention drops it: Gemma 2's with "sdpa", which
        older versions of transformers allow."""
        return None if self.function is sdpa_attention_forward else self.kwargs.get("softcap")

    @property
    def s_aux(self) -> torch.Tensor | None:
        """(H,): a logit per head that joins the denominator only."""
        return self.kwargs.get("s_aux")

    @property
    def wants_weights(self) -> bool:
        """The caller asked for the attention weights (`output_attentions`, there or in the model's config): only `run`
        over everything returns them."""
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
        with the keys and values of one `update`."""
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
        with torch.autocast(self.query.device.type, self.autocast):  # it casts all of them
            return self.function(self.module, self.query, keys, values, mask, *self.args, **self.kwargs)

    def attend(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Like `run`, for one query per row over keys and values (B, Hkv, t, D) under a mask (B, 1 or H, q, t).

        If it is a plain softmax, the query heads of one key head become that many queries. Keys and values are then not
        repeated for each head, which is most of the time of such a small call. Equal up to rounding.
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
        """Keys and values in the query's type, if `torch.autocast` stored them in another."""
        dtype = self.query.dtype
        return (keys, values) if keys.dtype == values.dtype == dtype else (keys.to(dtype), values.to(dtype))

    def stream(
        self, history: Iterable[Block], own: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None,
        seen: torch.Tensor | None, attended: Attended | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """`stream_attention` of this query under a mask; no weights. A backward pass through it raises."""
        special = partial(stream_attention, scaling=self.scaling, softcap=self.softcap, s_aux=self.s_aux)
        with torch.no_grad():
            output = special(self.query, history, own, mask, seen=seen, attended=attended)
        return no_backward(output, self.query), None


# Attention tables in the files of a model's classes, replaced while caches are on the model

_TABLE = "ALL_ATTENTION_FUNCTIONS"
"""The usual name of the table in the code of a model."""
_HOME = "transformers.modeling_utils"
"""The file that defines it. Files imported while caches are on a model take the table from there."""
_ALWAYS = ("sdpa", "eager")
"""Implementations in every transformers version."""
_OWN_KERNELS = ("flash", "flex", "paged")
"""Parts of names whose masks are of another kind, or whose names transformers treats specially."""

Globals = dict[str, Any]
"""The names that functions of a file read."""
Place = tuple[Globals, str]
"""A name of a file under which it has the table."""


def replaceable(implementation: str | None) -> bool:
    """Whether attention by `implementation` can go through ours. None is "eager"."""
    return implementation is None or implementation in _replaceable_names()


def _replaceable_names() -> frozenset[str]:
    """Names of attention functions whose masks we can read."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = {*_ALWAYS, *(name for name in ALL_ATTENTION_FUNCTIONS if name in ALL_MASK_ATTENTION_FUNCTIONS)}
    return frozenset(name for name in known if not any(part in name for part in _OWN_KERNELS))


class AttentionTable(MutableMapping[str, AttentionFunction]):
    """transformers' `table`, whose functions look for our tag first. Assignments go to that table."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.names = _replaceable_names()

    def get_interface(self, attn_implementation: str | None, default: AttentionFunction) -> AttentionFunction:
        """As `AttentionInterface.get_interface`. "eager" is in no table: it is the caller's `default`."""
        function = self.table.get_interface(attn_implementation, default)
        led = attn_implementation is None or attn_implementation in self.names
        return functools.partial(_attention, function) if led else function

    def get(self, key: str, default: Any = None) -> Any:
        function = self.table.get(key, default)
        return functools.partial(_attention, function) if function is not None and key in self.names else function

    def __getitem__(self, key: str) -> AttentionFunction:
        function: AttentionFunction = self.table[key]
        return functools.partial(_attention, function) if key in self.names else function

    def __setitem__(self, key: str, value: AttentionFunction) -> None:
        self.table[key] = value

    def __delitem__(self, key: str) -> None:
        del self.table[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("table"), name)


def put_tables(model: torch.nn.Module, tables: list[Place]) -> None:
    """Replace transformers' table in each file that defines a module of `model`, and note each place in `tables` as it
    is done."""
    for place in places_of(model):
        tables.append(place)
        names, name = place
        if isinstance(names[name], AttentionTable):
            names[name].names = _replaceable_names()  # a function may have been registered since
        else:
            names[name] = AttentionTable(names[name])


def take_tables(tables: Iterable[Place], others: Iterable[Place]) -> None:
    """Give each file its table back, except those that `others`, of models with caches, still need."""
    needed = {(id(names), name) for names, name in others}
    for names, name in tables:
        if (id(names), name) not in needed and isinstance(names.get(name), AttentionTable):
            names[name] = names[name].table


def all_led(tables: list[Place], configs: list[Any]) -> bool:
    """Whether each of the places has our table, and it leads the names in these `configs` to functions of ours."""
    for names, at in tables:
        table = names.get(at)
        if not isinstance(table, AttentionTable):
            return False
        for config in configs:
            name = config._attn_implementation_internal
            if name is not None and name not in table.names:
                return False
    return True


def places_of(model: torch.nn.Module) -> Iterator[Place]:
    """Places of transformers' table, whatever its name there, in the files that define the classes of `model`'s
    modules, their bases, and functions put instead of a `forward`. Each place comes once."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = set[int]()
    for names in _globals_read(model):
        if id(names) in seen or names.get("__name__") == _HOME:
            continue
        seen.add(id(names))
        for name, value in list(names.items()):
            own = name == _TABLE and isinstance(value, MutableMapping)  # a file may have made a table itself
            if own or value is ALL_ATTENTION_FUNCTIONS or type(value) is AttentionTable:
                yield names, name


def _globals_read(model: torch.nn.Module) -> Iterator[Globals]:
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        if kind.__module__ in sys.modules:
            yield vars(sys.modules[kind.__module__])
        yield _of_function(vars(kind).get("forward"))
    for module in model.modules():
        yield _of_function(vars(module).get("forward"))


def _of_function(function: Any) -> Globals:
    names: Globals = getattr(inspect.unwrap(function), "__globals__", {}) if callable(function) else {}
    return names


def _attention(
    own: AttentionFunction,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tag = getattr(key, TAG, None)
    if tag is None:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    autocast = autocast_dtype(query.device) if torch.is_autocast_enabled(query.device.type) else None
    call = AttentionCall(own, module, query, key, value, attention_mask, args, kwargs, autocast)
    if torch.compiler.is_dynamo_compiling():
        return _attend.outside(tag, call)
    return tag.layer.attend(call)


@untraced  # a layer's `attend` is not traced
def _attend(tag: Tag, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    return tag.layer.attend(call)
