"""State that a model's own code stores on its modules from one step to the next, for each conversation on the model.

M-RoPE's `rope_deltas` are an example. transformers computes them from a prompt with a picture, leaves them on the
model, and computes later positions from them. Without this module a second conversation would use those of the first.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import os
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import ContextMismatchError, UnsupportedModelError, not_whole
from .look_ahead import state_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ABSENT: Any = object()
"""The value of an attribute that is not there."""
_DEPTH, _MOST = 3, 10_000
"""Levels of an object that are searched for tensors, and objects."""
_WATCHED = 2
"""Forwards of a new conversation after which the model is searched for what cannot be followed: its prompt, and one
step over a history."""
_POSITIONS = "rope_deltas"
"""Name of the attribute with the offset of positions behind pictures."""
_OF_MODULES = frozenset(vars(torch.nn.Module()))


@dataclass(frozen=True)
class _Slot:
    """One attribute of one module."""

    key: str
    """Path of the module and name, as `named_parameters` has them."""
    module: weakref.ref[torch.nn.Module]
    name: str
    begins: Any
    """The value for a new conversation: None, or `_ABSENT`, which stands for the value that others left."""
    has_rows: bool = True

    def get(self) -> Any:
        module = self.module()
        if module is None:
            return _ABSENT
        attributes = vars(module)
        return attributes[self.name] if self.name in attributes else attributes["_buffers"].get(self.name, _ABSENT)

    def set(self, value: Any) -> None:
        module = self.module()
        if module is None or self.get() is value:
            return
        if value is _ABSENT:
            vars(module).pop(self.name, None)
        else:
            setattr(module, self.name, value)

    def first(self, others: Any) -> Any:
        """The value in a new conversation. What others left is copied: code may change a tensor in place."""
        if self.begins is None:
            return None
        return others.clone() if isinstance(others, torch.Tensor) else others

    @property
    def device(self) -> torch.device | None:
        """The device of the module; None: unknown."""
        module = self.module()
        held = None if module is None else next(iter((*module.parameters(), *module.buffers())), None)
        return None if held is None or held.device.type == "meta" else held.device


class ModelState:
    """State that conversations store on one model. Holds its modules weakly; any thread.

    The conversation that ran last has its values on the model, also after its step, as with transformers' own caches.
    The next conversation gets its own values back.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.slots = tuple(_slots(model))
        self.name = type(model).__name__
        self.unfollowed: dict[str, str] = {}
        """Attributes that a forward changes and that are not followed, with their types."""
        self._locks: dict[int, threading.RLock] = {}
        self._model = weakref.ref(model)
        self._others: dict[str, Any] = {}
        self._left: dict[str, Any] | None = None
        """Our last cache's values on the model; None: the values there are others'."""
        self._ran: weakref.ref[Conversation] | None = None

    @property
    def lock(self) -> threading.RLock:
        """Lock for the values on the model, in this process: a forked child does not wait for a thread of its
        parent."""
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def begin(self, conversation: Conversation, continues: bool) -> None:
        """Put the values of `conversation` on the model. Raises `UnsupportedModelError` if it `continues`, another one
        ran in between, and the model stores state that cannot be followed."""
        ran = None if self._ran is None else self._ran()
        if self.unfollowed and continues and ran is not conversation:
            self.refuse("another conversation has run since, and its values are there now: let one end before the next")
        self._keep_running()
        self._ran = weakref.ref(conversation)
        if self.slots:
            self._note_others()
            held = {} if conversation.values is None else conversation.values
            for slot in self.slots:
                if slot.key not in held:
                    held[slot.key] = slot.first(self._others[slot.key])
            conversation.values = held
            self._put(held)
            self._left = dict(conversation.values)

    def end(self, conversation: Conversation) -> None:
        """Store for `conversation` the values that the model's code has left. If another thread's conversation has
        begun since, they were stored then, and the values on the model belong to that one."""
        if self.slots and self._ran is not None and self._ran() is conversation:
            values = {slot.key: slot.get() for slot in self.slots}
            for key, value in values.items():
                if not _is_followed(value):
                    self.unfollowed.setdefault(key, type(value).__name__)
            conversation.values, self._left = values, dict(values)

    def turn_to_others(self) -> None:
        """Restore the values of code that runs the model without a cache of this library."""
        if self._left is None:
            self._ran = None
            return
        with self.lock:
            self._keep_running()
            self._ran = None
            self._note_others()
            self._put(self._others)
            self._left = None

    def _keep_running(self) -> None:
        """Store the values of the conversation that ran last, if its forward is still under way in another thread."""
        ran = None if self._ran is None else self._ran()
        if ran is not None and ran.running > 0:
            self.end(ran)

    def _note_others(self) -> None:
        left = {} if self._left is None else self._left
        for slot in self.slots:
            value = slot.get()
            if slot.key not in left or left[slot.key] is not value:
                self._others[slot.key] = value

    def _put(self, values: dict[str, Any]) -> None:
        for slot in self.slots:
            slot.set(values.get(slot.key, _ABSENT))

    def refuse(self, why: str) -> None:
        """Raise `UnsupportedModelError` that names the state which cannot be followed."""
        key, kind = next(iter(self.unfollowed.items()))
        raise UnsupportedModelError(
            f"{self.name} keeps {key!r} (a {kind}) on itself from step to step, and no cache can follow it: {why}"
        )

    # --- state that cannot be followed ------------------------------------------------------------------------

    def contents(self) -> dict[str, tuple[Any, ...]]:
        """Objects in attributes that are not followed, each with its content."""
        model, contents = self._model(), dict[str, tuple[Any, ...]]()
        if model is None:
            return contents
        home = type(model).__module__
        followed = {slot.key for slot in self.slots}
        walked: dict[int, tuple[Any, ...]] = {}  # every block refers to the configuration
        for path, module in model.named_modules():
            kind: Any = type(module)
            names = _mentioned(kind, home)
            for name, value in vars(module).items():
                key = f"{path}.{name}".lstrip(".")
                if name in names and name not in _OF_MODULES and key not in followed and _may_hold_tensors(value):
                    if id(value) not in walked:
                        walked[id(value)] = tuple(itertools.islice(_within(value, _DEPTH), _MOST))
                    contents[key] = walked[id(value)]
            rotary = hasattr(module, "rope_type")  # "longrope" writes its frequencies at each forward
            for name, value in (*vars(module).items(), *module._buffers.items()):
                key, tensor = f"{path}.{name}".lstrip("."), isinstance(value, torch.Tensor)
                if tensor and name in names and key not in followed and not (rotary and value.is_floating_point()):
                    contents[key] = (value, None if value.is_inference() else value._version)
        return contents

    def compare(self, before: dict[str, tuple[Any, ...]]) -> None:
        """Note changes since `contents`: an object that has other tensors or numbers now, or a tensor that was written
        to. A tensor replaced by another does not count: tables of positions grow that way."""
        for key, now in self.contents().items():
            old = before.get(key, ())
            if isinstance(now[0], torch.Tensor):
                changed = len(old) == 2 and now[0] is old[0] and now[1] != old[1]
            else:
                changed = any(isinstance(one, torch.Tensor | int | float) for one in _new(now, old))
            if changed:
                self.unfollowed.setdefault(key, type(now[0]).__name__)


class Conversation:
    """State that a model stores for one cache. For the thread that runs the model."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self.values: dict[str, Any] | None = None
        """By the slots' keys: the values before and after the model's code; None: a new conversation."""
        self._settled: dict[str, Any] | None = None
        """The same after the last forward that ended: a failed forward has no effect."""
        self._prepared = False
        """The model's code has prepared the coming forward."""
        self.running = 0
        """Forwards under way, each within the one before."""
        self._watched = 0
        self._before: dict[str, tuple[Any, ...]] | None = None

    def forget(self) -> None:
        """Reset the state, because the cache is empty again."""
        self.values, self._settled, self._prepared, self.running, self._watched = None, None, False, 0, 0

    def forget_positions(self) -> None:
        """Forget the offset of later positions, because other pictures precede them now. The model's code computes it
        again from a complete prompt."""
        if self._settled is not None:
            self._settled = {key: value for key, value in self._settled.items() if not key.endswith(_POSITIONS)}

    def _continue(self, held: int) -> None:
        if not held:
            self._settled, self._watched = None, 0
        self.values = self._settled

    @contextlib.contextmanager
    def preparing(self, held: int, *, begins: bool) -> Iterator[None]:
        """Context while the model's code prepares a forward over `held` tokens; `begins`: it is the first step of a
        generation."""
        with self._state.lock:
            if begins or not self._prepared:
                self._continue(held)
            self._prepared = True
            self._state.begin(self, held > 0)
            try:
                yield
            finally:
                self._state.end(self)

    def begin(self, held: int) -> None:
        """Call before a forward over `held` tokens. Raises the errors of `ModelState.begin`."""
        with self._state.lock:
            if not self._prepared:
                self._continue(held)
            self._prepared = False
            self._state.begin(self, held > 0)
            self.running += 1
            self._before = self._state.contents() if self._watched < _WATCHED else None

    def end(self) -> None:
        """Call after the forward."""
        if not self.running:
            return
        with self._state.lock:
            self.running -= 1
            self._state.end(self)
            self._settled = self.values
            if self._before is not None:
                self._state.compare(self._before)
                self._before, self._watched = None, self._watched + 1

    def fail(self) -> None:
        """Call if the forward raised, or if a prepared forward does not run."""
        self.running, self._before, self._prepared = max(0, self.running - 1), None, False

    def check(self) -> None:
        """Raise `UnsupportedModelError` if the model stores state that cannot be saved or copied to a twin."""
        if self._state.unfollowed:
            self._state.refuse("this cache can be neither saved nor forked: create a new one, and prefill again")

    def select_rows(self, rows: torch.Tensor, batch: int) -> None:
        """Make row i of the state for `batch` sequences the current row `rows[i]`.

        This applies to positions: whole numbers, or one number, for each sequence or for each of its beams or samples.
        Floating-point states of the model are unchanged, as with transformers' own caches.
        """
        if self._settled is None:
            return
        for slot in self._state.slots:
            value = self._settled.get(slot.key)
            if not slot.has_rows or not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            if value.is_floating_point() and value.numel() > len(value):
                continue
            if len(value) > 1 and batch % len(value) == 0:
                each = value.repeat_interleave(batch // len(value), 0)
                self._settled = {**self._settled, slot.key: each[rows.to(value.device)]}

    def capture(self) -> dict[str, Any]:
        """The state as a tree for `restore`. Raises `UnsupportedModelError`."""
        self.check()
        held = {} if self._settled is None else self._settled
        new = {slot.key: slot.begins for slot in self._state.slots}
        return {key: value for key, value in held.items() if value is not _ABSENT and value is not new[key]}

    def restore(self, tree: Any, batch: int) -> None:
        """Continue with the state captured for `batch` sequences. Raises `ContextMismatchError` for state that this
        model does not store, and `ContextError`."""
        if not isinstance(tree, dict):
            raise not_whole("the state", f"the state of the model is a {type(tree).__name__}")
        slots = {slot.key: slot for slot in self._state.slots}
        for key, value in tree.items():
            if key not in slots:
                raise ContextMismatchError(
                    f"the context has {key!r} of its model, and {self._state.name} has none: open it with a model of "
                    "the class that made it"
                )
            if not _is_followed(value) or (isinstance(value, torch.Tensor) and not _fits(value, slots[key], batch)):
                raise not_whole("the state", f"{key!r} is {type(value).__name__} {getattr(value, 'shape', value)}")
        self._settled = {
            key: value.to(slots[key].device, copy=True) if isinstance(value, torch.Tensor) else value
            for key, value in tree.items()
        }


def beyond_positions(tree: dict[str, Any]) -> bool:
    """Whether a captured state has more than the offset of later positions, which is each sequence's own, and which the
    model's code computes again from a complete prompt."""
    return any(not key.endswith(_POSITIONS) for key in tree)


def _is_followed(value: Any) -> bool:
    if value is None or value is _ABSENT or isinstance(value, int | float):
        return not isinstance(value, float) or value == value  # code leaves no nan
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def _fits(value: torch.Tensor, slot: _Slot, batch: int) -> bool:
    """Whether a tensor fits `slot`: it has the kind of the current value, or rows for `batch` sequences."""
    current = slot.get()
    if not bool(value.isfinite().all()):
        return False
    if isinstance(current, torch.Tensor) and not slot.has_rows:
        return value.shape == current.shape and value.dtype == current.dtype
    return value.ndim == 0 or (len(value) > 0 and (value.is_floating_point() or batch % len(value) == 0))


# ---------------------------------------------------------------------------------------------- where to look


def _slots(model: PreTrainedModel) -> Iterator[_Slot]:
    """Module attributes that the model's own code writes after construction, if they are, or may become, numbers and
    tensors; and the longest text that rotary embeddings remember."""
    home = type(model).__module__
    classes: set[Any] = {type(module) for module in model.modules()}
    anywhere = frozenset().union(*(_assigned(one, home)[0] for one in classes))
    for path, module in model.named_modules():
        attributes, cls = vars(module), cast(Any, type(module))
        by_length = state_by_length(module)
        names = _assigned(cls, home)[1] | (anywhere & attributes.keys())
        for name in sorted(names | by_length):
            buffer = attributes["_buffers"].get(name, _ABSENT)
            table = buffer is not None and not (isinstance(buffer, torch.Tensor) and not buffer.is_floating_point())
            held = name in attributes["_parameters"] or name in attributes["_modules"]
            held = held or (buffer is not _ABSENT and table)
            value = attributes.get(name, buffer)
            if name not in by_length:
                unlike = isinstance(value, bool) or not _is_followed(value)
                default = inspect.getattr_static(cls, name, None)  # of the class: excludes methods and properties
                if held or unlike or name in _OF_MODULES or not _is_followed(default):
                    continue
            begins = None if name in _none_at_first(cls) or buffer is None else _ABSENT
            key = f"{path}.{name}".lstrip(".")
            yield _Slot(key, weakref.ref(module), name, begins, has_rows=name not in by_length)


@functools.lru_cache(maxsize=1024)
def _functions(cls: Any, home: str) -> tuple[tuple[str, types.CodeType], ...]:
    """Code of a model's functions: those of its library's classes and of transformers' models."""
    codes = []
    for one in cls.__mro__:
        place, package = one.__module__, one.__module__.partition(".")[0]
        of_library = package == home.partition(".")[0] and package not in ("torch", "transformers")
        if of_library or place.startswith("transformers.models."):
            for name, value in vars(one).items():
                plain: Any = getattr(value, "__func__", value)
                for function in (value.fget, value.fset) if isinstance(value, property) else (plain,):
                    if isinstance(own_code := inspect.unwrap(function) if function else None, types.FunctionType):
                        codes += [(name, code) for code in _nested(own_code.__code__)]
    return tuple(codes)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _nested(one)


@functools.lru_cache(maxsize=1024)
def _assigned(cls: type, home: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names of attributes that the class's code assigns on any object, except in `__init__`; and those on `self`."""
    anywhere, on_self = set[str](), set[str]()
    for name, code in _functions(cls, home):
        steps = list(dis.get_instructions(code)) if name != "__init__" else []
        for before, one in itertools.pairwise(steps):
            if one.opname == "STORE_ATTR":  # the object is loaded last, alone or with the value
                loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
                anywhere.add(one.argval)
                if before.opname.startswith("LOAD_FAST") and loaded == "self":
                    on_self.add(one.argval)
    return frozenset(anywhere), frozenset(on_self)


@functools.lru_cache(maxsize=1024)
def _mentioned(cls: type, home: str) -> frozenset[str]:
    """Names that the class's code uses, except in `__init__`."""
    return frozenset(used for name, code in _functions(cls, home) if name != "__init__" for used in code.co_names)


@functools.lru_cache(maxsize=1024)
def _none_at_first(cls: type) -> frozenset[str]:
    """Names of attributes that the class's `__init__` sets to None."""
    names = set()
    for one in cls.__mro__:
        init: Any = vars(one).get("__init__")
        init = None if init is None else inspect.unwrap(init)
        code = list(dis.get_instructions(init)) if isinstance(init, types.FunctionType) else []
        for value, _, stores in zip(code, code[1:], code[2:], strict=False):
            if stores.opname == "STORE_ATTR" and value.opname == "LOAD_CONST" and value.argval is None:
                names.add(stores.argval)
    return frozenset(names)


def _may_hold_tensors(value: Any) -> bool:
    plain = value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.dtype, torch.device))
    return not plain and not isinstance(value, (torch.Tensor, torch.nn.Module)) and not callable(value)


def _new(now: tuple[Any, ...], old: tuple[Any, ...]) -> list[Any]:
    """Objects of `now` that are not in `old`."""
    if len(now) == len(old):
        return [one for one, other in zip(now, old, strict=True) if one is not other]
    known = {id(one) for one in old}
    return [one for one in now if id(one) not in known]


def _within(value: Any, depth: int) -> Iterator[Any]:
    """An object, its contents, and their contents, down to `depth` levels."""
    yield value
    if depth and _may_hold_tensors(value):
        inner: Any = tuple(value.values()) if isinstance(value, dict) else ()
        inner = tuple(value) if isinstance(value, (list, set, deque, tuple)) else inner
        for one in (*inner, *getattr(value, "__dict__", {}).values()):
            yield from _within(one, depth - 1)
