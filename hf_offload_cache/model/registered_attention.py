"""Attention that a model looks up, led to ours: in the files of its classes, while caches are on it.

A model asks transformers' table of attention functions by its config's name, "sdpa" or "eager", and some models compare
that name. So the name stays as it is. In the globals that the model's own code reads, a table of ours stands before
transformers', and gives for each name a function that looks for our tag on the keys. Keys without it, of another cache
or another model, go to the function that transformers' table gives, with the same arguments.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch

from ..history.autocast import autocast_dtype
from .attention_call import TAG, AttentionCall, AttentionFunction, Tag
from .untraced import untraced

_TABLE = "ALL_ATTENTION_FUNCTIONS"
"""What the code of each model calls transformers' table."""
_HOME = "transformers.modeling_utils"
"""Where it is defined: files that are imported meanwhile take it from there."""
_ALWAYS = ("sdpa", "eager")
"""Implementations that every transformers has."""
_OWN_KERNELS = ("flash", "flex", "paged")
"""Parts of names whose masks are of another kind, or whose names transformers treats in a way of its own."""

Globals = dict[str, Any]
"""The names that functions of a file read."""


def replaceable(implementation: str | None) -> bool:
    """Whether attention by `implementation` can go through ours. None is "eager"."""
    return implementation is None or implementation in _replaceable_names()


def _replaceable_names() -> frozenset[str]:
    """Names of attention functions whose masks we read, too."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = {*_ALWAYS, *(name for name in ALL_ATTENTION_FUNCTIONS if name in ALL_MASK_ATTENTION_FUNCTIONS)}
    return frozenset(name for name in known if not any(part in name for part in _OWN_KERNELS))


class AttentionTable(MutableMapping[str, AttentionFunction]):
    """transformers' `table`, whose functions look for our tag first. What is set goes to that table."""

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


def put_tables(model: torch.nn.Module, tables: list[Globals]) -> None:
    """Put our table before transformers' in the globals of each file that defines a module of `model`, once, and note
    these in `tables` as it is done."""
    for names in globals_of(model):
        tables.append(names)
        if not isinstance(names[_TABLE], AttentionTable):
            names[_TABLE] = AttentionTable(names[_TABLE])


def take_tables(tables: Iterable[Globals], others: Iterable[Globals]) -> None:
    """Give each file its table back, but for those that `others`, of models with caches, still need."""
    needed = {id(names) for names in others}
    for names in tables:
        if id(names) not in needed and isinstance(names[_TABLE], AttentionTable):
            names[_TABLE] = names[_TABLE].table


def all_led(tables: list[Globals], names: Iterable[str | None]) -> bool:
    """Whether our table is in each of the globals, and gives functions of ours by these names."""
    put = [one[_TABLE] for one in tables]
    if not all(isinstance(table, AttentionTable) for table in put):
        return False
    return all(name is None or all(name in table.names for table in put) for name in names)


def globals_of(model: torch.nn.Module) -> Iterator[Globals]:
    """Globals, each once, that hold a table: of the classes of `model`'s modules and their bases, and of functions that
    somebody put instead of a `forward`."""
    seen = set[int]()
    for names in _globals_read(model):
        if isinstance(names.get(_TABLE), MutableMapping) and names.get("__name__") != _HOME and id(names) not in seen:
            seen.add(id(names))
            yield names


def _globals_read(model: torch.nn.Module) -> Iterator[Globals]:
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        if kind.__module__ in sys.modules:
            yield vars(sys.modules[kind.__module__])
        yield _of_function(vars(kind).get("forward"))
    for module in model.modules():
        yield _of_function(vars(module).get("forward"))


def _of_function(function: Any) -> Globals:
    found: Globals = getattr(inspect.unwrap(function), "__globals__", {}) if callable(function) else {}
    return found


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
    autocast = autocast_dtype(query.device)
    return _attend(tag, AttentionCall(own, module, query, key, value, attention_mask, args, kwargs, autocast))


@untraced  # whatever a method does in its layer's `attend`, it is not traced
def _attend(tag: Tag, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    return tag.layer.attend(call)
