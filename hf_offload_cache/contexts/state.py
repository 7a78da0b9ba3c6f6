"""States of a context: trees of values and tensors as safetensors files, with the tree as JSON. No pickle.

A tree consists of dictionaries (string or integer keys), lists, tuples, None, booleans, numbers, strings, dtypes,
devices and tensors. A layer's `capture` returns one.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..config import MOST_JSON_BYTES, parse_json
from ..errors import ContextError, CorruptRecordError, EncryptionKeyError, shown
from ..memory.machine import free_memory
from ..stores.base import FreezableStore
from ..stores.encryption import decrypt, key_check
from .folder import read_small
from .manifest import Manifest, StateFile

_TREE = "tree"
_PLAIN = (type(None), bool, int, float, str)


def pack(tree: Any) -> bytes:
    """`tree` as bytes; its tensors' devices are not stored. Raises `TypeError` for other leaves."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_without_tensors(tree, tensors)).encode()
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    for name, tensor in tensors.items():  # safetensors refuses tensors that share memory
        if memory.count(tensor.untyped_storage().data_ptr()) > 1:
            tensors[name] = tensor.clone()
    tensors[_TREE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return save(tensors)


def tensor_bytes(tree: Any) -> int:
    """Bytes of all tensors of `tree`."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return sum(tensor_bytes(part) for part in parts)


def unpack(data: bytes, device: torch.device, place: str) -> Any:
    """The tree that `pack` got, with its tensors on `device`, owned by the caller. Raises `ContextError`, which names
    `place`. Needs twice the bytes of `data` and a few MiB, whatever the content, because the tree has each tensor once.
    """
    try:
        header = int.from_bytes(data[:8], "little")
        if header > MOST_JSON_BYTES:  # of some hundred thousand empty tensors, a kilobyte each
            raise ValueError(f"a header of {header:,} bytes, above {MOST_JSON_BYTES:,}")
        tensors = load(data)
        tree = parse_json(tensors.pop(_TREE).numpy().tobytes())
        restored = _with_tensors(tree, tensors, device)
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {shown(str(error), 200)}"
        raise ContextError(f"{place}: the state cannot be read ({what})") from error
    if tensors:
        raise ContextError(f"{place}: the state cannot be read: {len(tensors)} of its tensors are not in its tree")
    return restored


def _without_tensors(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(tree, dict):
        if not all(type(key) in (str, int) for key in tree):
            raise TypeError(f"a context cannot store a dictionary with keys {list(tree)!r}")
        return {"dict": [[key, _without_tensors(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_without_tensors(value, tensors) for value in tree]}
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, torch.device):
        return {"device": tree.type}
    if isinstance(tree, _PLAIN):
        return tree
    raise TypeError(f"a context cannot store a {type(tree).__name__}: {tree!r}")


def _with_tensors(tree: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    if not isinstance(tree, dict):
        if not isinstance(tree, _PLAIN):
            raise ValueError(f"unexpected {type(tree).__name__}")
        return tree
    if len(tree) != 1:
        raise ValueError(f"unexpected entry with {sorted(tree)}")
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors.pop(value).to(device)  # pop: a name in many places would take memory each time
    if kind == "dict":
        return {key: _with_tensors(item, tensors, device) for key, item in value}
    if kind in ("list", "tuple"):
        items = [_with_tensors(item, tensors, device) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "dtype":
        dtype = getattr(torch, value, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {value!r}")
        return dtype
    if kind == "device":
        return device
    raise ValueError(f"unknown kind {kind!r}")


@runtime_checkable
class StoredLayer(Protocol):
    """A layer whose history is in a store, as contexts need it: its records as frozen stores, and all else as a tree.
    Other layers are transformers' own, whose attributes are kept."""

    @property
    def num_stores(self) -> int:
        """Stores that it will open for new tokens."""

    @property
    def length(self) -> int:
        """Tokens stored per sequence."""

    @property
    def batch(self) -> int:
        """Sequences stored; 0: nothing was ever stored."""

    @property
    def history_device(self) -> torch.device:
        """Device of keys and values; the CPU if nothing is stored."""

    def freeze(self) -> Sequence[FreezableStore]:
        """Make all records immutable and force them to the disk. The layer owns the stores; an empty one has none."""

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        """Whether each record of each frozen store is in use: (capacity,) bool."""

    def capture(self) -> dict[str, Any]:
        """All but the records, as views that are valid until the next change. A new layer's tree has the same keys,
        with values of the same kinds, or None for what the first token adds."""

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        """Give a new layer what was captured, over frozen stores, which it owns only once this has returned. Computes
        and reads nothing. Raises `ContextError` or `BudgetError` if the tree makes no sense."""


class NoRoomError(ContextError):
    """A state does not fit into memory now; it is unknown whether it is damaged."""


def most_of_cache(batch: int, tokens: int) -> int:
    """Upper bound on the bytes of a cache's state: 8-byte token ids, plus small parts."""
    return 64 * batch * tokens + 16 * 2**20


def check_key(manifest: Manifest, key: bytes | None, place: str) -> None:
    """Raise `EncryptionKeyError` unless the context was saved with `key`; None: without encryption."""
    if manifest.key_check is None:
        if key is not None:  # else what this cache saves would contain these records unencrypted
            raise EncryptionKeyError(f"{place}: the context is not encrypted: leave encryption_key out")
    elif key is None:
        raise EncryptionKeyError(f"{place}: the context is encrypted: give encryption_key, the one it was saved with")
    elif key_check(key) != manifest.key_check:
        raise EncryptionKeyError(f"{place}: encryption_key is not the one that the context was saved with")


class ContextReader:
    """Reads the states of the context that the caller's `folder_fd` is open on; errors call it `place`.

    `key` is the right one, or None without encryption. `taking` is called with the host memory that reading a state
    needs, before it is allocated.
    """

    def __init__(
        self, folder_fd: int, place: str, key: bytes | None, taking: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        self.folder_fd = folder_fd
        self.place = place
        self.key = key
        self._taking = taking
        self._free: int | None = None  # asked once: asking the system for every layer takes a third of opening

    def state(
        self, entry: StateFile, name: str, device: torch.device | str = "cpu", binding: bytes = b"",
        most: int | None = None,
    ) -> Any:  # fmt: skip
        """The tree of one state, with its tensors on `device`. `name`, and the manifest's `binding` for the cache's
        state, are those it was saved with. `most`: maximum bytes; None: unknown.

        Raises `CorruptRecordError` if it is not as it was written, and `ContextError` if it is too large.
        """
        if most is not None and entry.bytes > most:
            raise ContextError(
                f"{name}: its state in {self.place!r} has {entry.bytes:,} bytes, and {most:,} are enough for what the "
                "context holds: the manifest is damaged, or made elsewhere; save the context anew"
            )
        free = self._free = free_memory() if self._free is None else self._free
        if free is not None and 2 * entry.bytes > free:
            what = f"its state in {self.place!r} takes {2 * entry.bytes:,} bytes of memory, and {free:,} are free"
            raise NoRoomError(f"{name}: {what}: the manifest is damaged, or made elsewhere, or memory is short")
        if free is not None:
            self._free = free - entry.bytes  # its tensors stay
        self._taking(2 * entry.bytes)  # the bytes, and the tensors made of them
        try:
            data: Any = read_small(self.folder_fd, entry.file, entry.bytes)
        except FileNotFoundError as error:
            message = f"{name}: its state {entry.file} in {self.place!r} is missing; save the context anew"
            raise CorruptRecordError(errno.ENOENT, message) from error
        if len(data) != entry.bytes or f"{xxhash.xxh3_128_hexdigest(data)}.state" != entry.file:
            raise CorruptRecordError(
                errno.EIO, f"{name}: its state {entry.file} in {self.place!r} is not what was written; save it anew"
            )
        if self.key is not None:
            data = decrypt(self.key, data, name.encode() + b"\0" + binding)
        return unpack(data, torch.device(device), f"{name} in {self.place}")
