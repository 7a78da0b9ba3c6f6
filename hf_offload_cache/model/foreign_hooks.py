"""Hooks of other code on a model's modules: they must see only the caller's computation."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

_KNOWN = (
    "hf_offload_cache",
    "accelerate",
    "peft",
    "torch.distributed",
    "torch.nn.utils",
    "torch._dynamo",
    "transformers.distributed",
    "transformers.integrations",
    "transformers.modeling_utils",
    "transformers.utils.output_capturing",
)
"""Modules whose hooks place weights, adapt them or record outputs. An additional token in a forward changes nothing for
them; those that record outputs do it for the caller, who gets the output without that token."""
_LIBRARIES = ("torch", "transformers", "liger_kernel", "kernels")
"""Packages that may give a class another `forward`, and wrap modules: faster or compiled ones."""


class ForeignHooks:
    """Detects other code that watches the forwards of some modules, or of modules within these.

    Counts forward hooks and pre-hooks, hooks for all modules of the process, a `forward` that was put on a module or
    its class, and a module of another package around one of the model's; not hooks of accelerate and PEFT. Holds the
    modules weakly; for one thread.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._roots = [weakref.ref(module) for module in modules]
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._hooks: list[dict[int, Any]] = []
        self._parts: list[dict[str, Any]] = []
        self._classes: list[Any] = []
        self._seen: tuple[Any, ...] | None = None
        self._next_id = -1
        self._found: str | None = None

    def find(self) -> str | None:
        """Name of one hook that is on now, for a message; None: there is none.

        The last result stays valid until a hook is registered in the process, or a module gets other hooks, other parts
        or another `forward`.
        """
        for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
            for hook in getattr(torch_module, name, {}).values():
                if not _is_known(hook):
                    return f"{_name(hook)} on all modules"
        if self._seen is None or self._next_id != RemovableHandle.next_id or self._seen != self._state():
            self._next_id = RemovableHandle.next_id
            self._found = self._search()
            self._seen = self._state()
        return self._found

    def _state(self) -> tuple[Any, ...]:
        """Number of hooks, modules with their own `forward`, their parts, and the `forward` of their classes."""
        forwards, parts, of_classes = [], list[int](), []  # in loops: a step asks this for every layer
        for at, ref in enumerate(self._modules):
            if (module := ref()) is not None and "forward" in (own := vars(module)):
                forwards.append((at, own["forward"]))
        for held in self._parts:
            parts.extend(map(id, held.values()))
        for kind in self._classes:
            of_classes.append(kind.forward)
        return sum(map(len, self._hooks)), forwards, parts, of_classes

    def _search(self) -> str | None:
        self._modules, self._hooks, self._parts, found, classes = [], [], [], None, dict[Any, None]()
        for root in (ref() for ref in self._roots):
            for name, module in () if root is None else root.named_modules():
                self._modules.append(weakref.ref(module))
                self._hooks += (module._forward_pre_hooks, module._forward_hooks)
                if module._modules:
                    self._parts.append(module._modules)
                classes[type(module)] = None
                if found is None and (hook := _foreign_on(module)) is not None:
                    found = f"{_name(hook)} on {name or type(module).__name__}"
                elif found is None and root is not module and _is_around(module, type(root)):
                    found = f"{type(module).__name__} around {name}"
        self._classes = list(classes)
        return found


def _foreign_on(module: torch.nn.Module) -> Any | None:
    """Another code's hook or `forward` on this one module."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not _is_known(hook):
            return hook
    attributes = vars(module)
    for name in ("forward", "_old_forward"):  # accelerate keeps the replaced one
        forward = attributes.get(name)
        of_class = getattr(_plain(forward), "__func__", None) is type(module).forward
        if forward is not None and not _is_known(forward) and not of_class:
            return forward
    written = next(one for one in type(module).__mro__ if "forward" in vars(one))
    if not _is_of(_place(forward := vars(written)["forward"]), written) and not _is_known(forward):
        return forward  # put on the class
    placing = attributes.get("_hf_hook")
    for hook in () if placing is None else getattr(placing, "hooks", (placing,)):
        if not _is_known(hook):
            return hook
    return None


def _is_around(module: torch.nn.Module, model_class: Any) -> bool:
    """Whether `module`, of a package that is neither the model's nor known, wraps one of the model's modules."""
    place = type(module).__module__
    if _is_of(place, model_class) or any(place.startswith(f"{known}.") for known in _KNOWN):
        return False
    parts = (type(part).__module__ for part in module._modules.values())
    return any(part.startswith("transformers.models.") or part == model_class.__module__ for part in parts)


def _is_of(place: str, one: Any) -> bool:
    """Whether a Python module named `place` belongs to the package of class `one`, or to a library."""
    return place.partition(".")[0] in (*_LIBRARIES, one.__module__.partition(".")[0])


def _plain(hook: Any) -> Any:
    """The function under partial arguments and `torch.compile`."""
    while True:
        inner = hook.func if isinstance(hook, functools.partial) else getattr(hook, "_torchdynamo_orig_callable", None)
        if inner is None:
            return hook
        hook = inner


def _place(hook: Any) -> str:
    """The Python module where a function was written: `functools.wraps` gives it the name of another's."""
    plain = _plain(hook)
    function: Any = getattr(plain, "__func__", plain)
    written = getattr(function, "__globals__", None)
    return type(function).__module__ if written is None else str(written.get("__name__"))


def _is_known(hook: Any) -> bool:
    place = _place(hook)
    return any(place == known or place.startswith(f"{known}.") for known in _KNOWN)


def _name(hook: Callable[..., Any]) -> str:
    plain = _plain(hook)
    return str(getattr(plain, "__qualname__", type(plain).__qualname__))
