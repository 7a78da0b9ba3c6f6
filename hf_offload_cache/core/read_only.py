"""Read-only keys, values and layers for users: a write would be lost, so it raises."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch

from ..errors import ReadOnlyError

_INSTEAD = "methods that rewrite what a model has cached (kvpress) need transformers' DynamicCache"


class ReadOnlyTensor(torch.Tensor):
    """A copy of a layer's stored entries. You can read it like any tensor. Writing to it, or to a view of it, raises
    `ReadOnlyError`; numpy views of it are not writeable. Results of computations on it are plain tensors."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain, memory = [], set[int | None]()

            def unwrapped(value: Any) -> Any:
                if isinstance(value, ReadOnlyTensor):
                    plain.append((tensor := value.as_subclass(torch.Tensor), tensor._version))
                    memory.add(_memory(tensor))
                    return tensor
                if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
                    return type(value)(unwrapped(item) for item in value)
                return value

            result = function(
                *(unwrapped(item) for item in args),
                **{name: unwrapped(value) for name, value in (kwargs or {}).items()},
            )
            if any(tensor._version != before for tensor, before in plain) or function.__name__ == "__set__":
                raise ReadOnlyError(
                    "keys and values of an offloaded layer cannot be written to: they are a copy of the stored ones; "
                    f"clone() them for a tensor of your own; {_INSTEAD}"
                )

            def wrapped(value: Any) -> Any:
                if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
                    return type(value)(wrapped(item) for item in value)
                if isinstance(value, np.ndarray):
                    value.flags.writeable = False
                view = isinstance(value, torch.Tensor) and _memory(value) in memory
                return value.as_subclass(cls) if view and value.numel() else value

            return wrapped(result)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        """Wrap `tensor`, which nothing else may refer to."""
        return tensor.as_subclass(cls)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _memory(tensor: torch.Tensor) -> int | None:
    """Address of a tensor's storage; None if it has none, within a transformation of `torch.func`."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


class Layers(list[Any]):
    """A cache's layers, which are fixed: any change of the list raises `ReadOnlyError`."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_layers()

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = reverse = sort = _refuse

    def __copy__(self) -> list[Any]:
        return list(self)


def refuse_layers() -> NoReturn:
    """Raise the error for a change of a cache's layers."""
    raise ReadOnlyError(
        "the layers of an offloading cache cannot be replaced, added or removed, because update() uses no others; "
        f"{_INSTEAD}, and so do layers of your own"
    )


def refuse_copy(cache: Any) -> NoReturn:
    """Raise the error for a shallow copy of a cache."""
    raise TypeError(
        f"a {type(cache).__name__} cannot be copied shallowly: two caches cannot own one store; fork() it, or "
        "copy.deepcopy it, which is the same"
    )


def refuse_pickle(cache: Any) -> NoReturn:
    """Raise the error for pickling a cache."""
    raise TypeError(
        f"a {type(cache).__name__} cannot be pickled: its data lies in files of this process; fork() or deepcopy it "
        "in this process, save() it for another"
    )


def refuse_assignment(layer: str, name: str) -> NoReturn:
    """Raise the error for assigning `name` to an offloaded layer."""
    raise ReadOnlyError(
        f"{name} of {layer} cannot be assigned: the layer is offloaded, and its store has the model's keys and values. "
        "crop(-n) of the cache drops the latest n tokens, batch_select_indices(rows) keeps some sequences, reset() "
        f"drops everything; {_INSTEAD}"
    )
