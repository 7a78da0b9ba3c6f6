"""How the caches of many documents are made, and what a document's context is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contexts.configuration import encode, fields_in_states
from ..contexts.library import model_digest, prefix_name
from ..core.cache import OffloadCache
from ..errors import BudgetError
from ..interop.offload import FLOOR, in_floor
from ..model.fingerprint import full_fingerprint
from ..model.geometry import Geometry
from ..stores.encryption import load_key

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Recipe:
    """One for all documents of a worker. Whoever gets a cache closes it.

    A document that is too short for a share of it to hold a cache has `floor` bytes, unless `strict`.
    """

    model: Any
    cls: type[OffloadCache]
    memory: int | str | None = None
    path: str | Path | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    floor: int | str = FLOOR
    strict: bool = False

    def make(self, most: int) -> OffloadCache:
        """An empty cache for one sequence of up to `most` tokens. Raises as the class does, and `for_budget`."""
        if self.memory is None:
            return self.cls(self.model, path=self.path, **self.fields)
        return self._budgeted(
            most, lambda memory: self.cls.for_budget(self.model, memory, most, path=self.path, **self.fields)
        )

    def check(self) -> None:
        """Raises what making a cache does whatever the document is: `StoreError` for a folder that cannot be written
        to, `ConfigError`, `UnsupportedModelError`, `EncryptionKeyError`."""
        fields = self.fields
        if self.memory is not None:  # by which the others are chosen: alone they may contradict defaults
            fields = {name: fields[name] for name in ("engine", "encryption_key") if name in fields}
        self.cls(self.model, path=self.path, **fields).close()

    def open(self, directory: Path, most: int) -> OffloadCache:
        """What was saved in `directory`, with room for `most` tokens. Raises as `OffloadCache.open`."""
        stored = fields_in_states(self.cls.config_class)
        own = {name: value for name, value in self.fields.items() if name not in stored}
        if self.memory is None:
            return self.cls.open(directory, self.model, path=self.path, **own)
        return self._budgeted(
            most,
            lambda memory: self.cls.open(
                directory, self.model, memory=memory, max_context=most, path=self.path, **own
            ),
        )  # fmt: skip

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
        """Of `encryption_key`; None: nothing is encrypted."""
        given = self.fields.get("encryption_key")
        return None if given is None else load_key(given)

    @functools.cached_property
    def _of_model(self) -> str:
        return model_digest(full_fingerprint(self.model))

    def name(self, ids: torch.Tensor, level: str | None = None) -> str:
        """32 hex digits, equal for equal ids (1, T) of an equal model, in a cache of this class with equal fields that
        decide what is stored. With a key nobody without it can tell the name from the ids.

        Of what was asked for and not of what came of it, since a budget is of all tokens, and a later question may be
        longer. `level`: what is kept of keys and values.
        """
        stored = {"exact", *self.cls.config_class.stored_format}
        asked = {name: repr(value) for name, value in sorted(self.fields.items()) if name in stored}
        asked |= {"memory": repr(self.memory), "floor": repr(self.floor), "level": repr(level)}
        return prefix_name(self.cls.__name__, self._of_model, asked, encode(ids, None), self.key)
