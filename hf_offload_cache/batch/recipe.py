"""How a worker makes the caches of its documents, and names their contexts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contexts.configuration import Text, encode, fields_in_states
from ..contexts.library import ContextLibrary, model_digest, prefix_name
from ..core.cache import OffloadCache
from ..errors import BudgetError
from ..interop.offload import FLOOR, budgets, in_floor
from ..interop.reuse import opened_within
from ..model.fingerprint import full_fingerprint
from ..model.geometry import Geometry
from ..stores.encryption import load_key

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Recipe:
    """The same for all documents of a worker. The caller closes the caches.

    A document whose share of memory is too small for a cache gets `floor` bytes, unless `strict`.
    """

    model: Any
    cls: type[OffloadCache]
    memory: int | str | None = None
    path: str | Path | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    floor: int | str = FLOOR
    strict: bool = False

    def make(self, most: int) -> OffloadCache:
        """An empty cache for one sequence of up to `most` tokens. Raises the errors of making one."""
        if self.memory is None:
            return self.cls(self.model, path=self.path, **self.fields)
        return self._budgeted(
            most, lambda memory: self.cls.for_budget(self.model, memory, most, path=self.path, **self.fields)
        )

    def check(self) -> None:
        """Raises the errors of making a cache for any document: `StoreError` for a folder that cannot be written to,
        `ConfigError`, `UnsupportedModelError`, `EncryptionKeyError`."""
        fields = self.fields
        if self.memory is not None:  # the budget determines the others, which may contradict the defaults
            fields = {name: fields[name] for name in ("engine", "encryption_key") if name in fields}
        self.cls(self.model, path=self.path, **fields).close()

    def open(self, directory: Path, most: int) -> OffloadCache:
        """The context saved in `directory`, with room for `most` tokens. Raises the errors of `OffloadCache.open`."""
        stored = fields_in_states(self.cls.config_class)
        fields = {name: value for name, value in self.fields.items() if name not in stored} | {"path": self.path}
        if self.memory is None:
            return self.cls.open(directory, self.model, **fields)
        return self._budgeted(
            most, lambda memory: self.cls.open(directory, self.model, memory=memory, max_context=most, **fields)
        )

    def open_beginning(self, library: ContextLibrary, ids: torch.Tensor, most: int) -> tuple[OffloadCache, int] | None:
        """The longest beginning of ids (1, T) that `library` has, in a cache with room for `most` tokens, and the
        number of its tokens, at most T - 1; None: there is none. Raises the errors of `ContextLibrary.open`."""
        limits = budgets(self.model, most, 1, self.memory, self.floor, self.strict)
        fields = {**self.fields, "path": self.path, "max_context": most}
        return opened_within(limits, library, ids, self.model, self.cls, **fields)

    def _budgeted(self, most: int, make: Callable[[int | str], OffloadCache]) -> OffloadCache:
        assert self.memory is not None
        try:
            return make(self.memory)
        except BudgetError as error:
            if self.strict:
                raise
            full = Geometry.of(self.model).full_kv_bytes(most, 1)
            return in_floor(make, error, self.memory, full, 1, self.floor)

    @functools.cached_property
    def key(self) -> bytes | None:
        """The field `encryption_key`, loaded; None: nothing is encrypted."""
        given = self.fields.get("encryption_key")
        return None if given is None else load_key(given)

    @functools.cached_property
    def _of_model(self) -> str:
        return model_digest(full_fingerprint(self.model))

    def name(self, ids: torch.Tensor, level: str | None = None) -> str:
        """32 hex digits, equal for equal ids (1, T), models, cache classes, levels and fields that affect stored data.
        With a key, nobody without it can derive the name from the ids.

        It depends on the fields as given, not on those that a budget leads to: the budget covers all tokens, and a
        later question may be longer.
        """
        stored = {"exact", *self.cls.config_class.stored_format}
        asked = {name: repr(value) for name, value in sorted(self.fields.items()) if name in stored}
        asked |= {"memory": repr(self.memory), "floor": repr(self.floor), "level": repr(level)}
        return prefix_name(self.cls.__name__, self._of_model, asked, Text(encode(ids, None)), self.key)
