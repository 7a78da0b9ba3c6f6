"""What lies in memory for an object: every tensor and numpy array that can be reached from it, by its storage."""

from __future__ import annotations

import gc
import mmap
import types
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_ATOMS = (str, bytes, int, float, bool, complex, type(None), type, types.ModuleType, np.dtype, torch.dtype)


@dataclass(frozen=True)
class Storage:
    """A range of addresses that something keeps alive: `nbytes` from `address` on; `path` says how it was found."""

    address: int
    nbytes: int
    path: str


def _of_tensor(tensor: torch.Tensor, path: str) -> Storage:
    storage = tensor.untyped_storage()
    return Storage(storage.data_ptr(), storage.nbytes(), path)


def _of_array(array: np.ndarray, path: str) -> Storage | None:
    """The memory behind an array, however long the chain of views; None for a mapped file."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    while isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, torch.Tensor):
        return _of_tensor(base, path)
    if isinstance(base, np.ndarray):
        return Storage(base.__array_interface__["data"][0], base.nbytes, path)
    if isinstance(base, bytes | bytearray):
        return Storage(np.frombuffer(base, dtype=np.uint8).__array_interface__["data"][0], len(base), path)
    assert isinstance(base, mmap.mmap), f"{path}: an array over a {type(base).__name__}"
    return None


def storages_of(root: Any, *without: Any) -> list[Storage]:
    """Each storage that is reachable from `root`, once; nothing that lies behind one of `without` is followed."""
    found: dict[int, Storage] = {}
    seen = {id(one) for one in without}
    todo: deque[tuple[Any, str]] = deque([(root, type(root).__name__)])
    keep: list[Any] = []  # an object made on the way must not give its id to another
    while todo:
        one, path = todo.popleft()
        if id(one) in seen or isinstance(one, _ATOMS):
            continue
        seen.add(id(one))
        keep.append(one)
        storage = None
        if isinstance(one, torch.Tensor):
            storage = None if one.device.type == "meta" else _of_tensor(one, path)
        elif isinstance(one, np.ndarray) and not one.dtype.hasobject:
            storage = _of_array(one, path)
        if storage is not None and storage.nbytes:
            known = found.get(storage.address)
            if known is None or known.nbytes < storage.nbytes:
                found[storage.address] = storage
        if isinstance(one, types.FunctionType):
            inner: list[tuple[Any, str]] = [(cell, f"{path}()") for cell in one.__closure__ or ()]
            inner += [(value, f"{path}()") for value in one.__defaults__ or ()]
        elif isinstance(one, dict):
            inner = [(value, f"{path}[{key!r:.30}]") for key, value in one.items()]
            inner += [(key, path) for key in one]
        elif hasattr(one, "__dict__") and not isinstance(one, type):
            inner = [(value, f"{path}.{name}") for name, value in vars(one).items()]
            inner += [(value, f"{path}>{type(value).__name__}") for value in gc.get_referents(one)
                      if value is not vars(one)]  # fmt: skip
        else:
            inner = [(value, f"{path}>{type(value).__name__}") for value in gc.get_referents(one)]
        todo.extend(inner)
    return list(found.values())


def bytes_of(storages: list[Storage]) -> int:
    """Bytes of all, those that lie in each other counted once."""
    total, end = 0, 0
    for one in sorted(storages, key=lambda storage: storage.address):
        stop = one.address + one.nbytes
        total += max(0, stop - max(one.address, end))
        end = max(end, stop)
    return total
