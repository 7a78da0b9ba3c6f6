"""What a cache offers so that it can be saved, opened and forked: contexts know it by these names alone.

A cache is a list of layers and what it holds beside them. A layer that keeps keys and values in a store is a
`StoredLayer`; any other is one of transformers' own, of which all attributes are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import torch

from ..config import OffloadConfig
from ..memory.account import MemoryAccount
from ..model.geometry import Geometry
from ..stores.base import FreezableStore


@runtime_checkable
class StoredLayer(Protocol):
    """A layer whose history lies in a store: it gives its records as frozen stores, and all else as a tree.

    A tree is made of what `contexts.state` packs: dictionaries, lists, tuples, plain values and tensors.
    """

    @property
    def num_stores(self) -> int:
        """Stores that it opens for what comes to it."""

    @property
    def length(self) -> int:
        """Tokens a sequence held."""

    @property
    def batch(self) -> int:
        """Sequences held; 0: nothing was ever held."""

    @property
    def history_device(self) -> torch.device:
        """Where keys and values come from and go to; the CPU where nothing is held."""

    def freeze(self) -> Sequence[FreezableStore]:
        """Make all that is stored immutable and force it to the disk; the frozen stores, which the layer owns. None
        for a layer that holds nothing."""

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        """Of each of the stores that `freeze` gave, which records are in use: (capacity,) bool."""

    def capture(self) -> dict[str, Any]:
        """All that is held beside the records, for `restore`: views, valid until the next change. A new layer's has
        the same keys, with values of the same kinds, or None for what comes with the first token."""

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        """Let a new layer hold what was captured, over frozen stores. Computes nothing, reads nothing back.

        Checks that what it takes makes sense: raises `ContextError`, `BudgetError`; `parts` belong to the layer only
        once this has returned.
        """


class ContextStorage(Protocol):
    """What the layers of one cache store their records with."""

    @property
    def directory(self) -> Path:
        """The folder of the cache's own files, absolute."""

    @property
    def engine(self) -> str:
        """How records are read here; never "auto"."""

    @property
    def ring(self) -> Any:
        """The io_uring that the stores of the cache share, or None."""

    @property
    def pinned(self) -> bool:
        """Stores in host memory are where a GPU reads by itself."""

    @property
    def key(self) -> bytes | None:
        """What is stored is encrypted with this; None: it is not encrypted."""

    @property
    def account(self) -> MemoryAccount:
        """What the cache holds in memory."""

    def on_damage(self, told: Callable[[str], object]) -> None:
        """Register `told` to be called, in any thread, with the reason when an opened file is found damaged."""


class ContextCache(Protocol):
    """A cache that can be saved, opened and forked."""

    config_class: ClassVar[type[OffloadConfig]]

    def __init__(
        self, model: Any, path: str | Path | None = None, config: Any = None, **fields: Any
    ) -> None: ...

    @property
    def config(self) -> OffloadConfig: ...

    @property
    def storage(self) -> ContextStorage: ...

    @property
    def layers(self) -> list[Any]:
        """One for each layer of the model: `StoredLayer`s and transformers' own."""

    @property
    def model(self) -> Any:
        """The PreTrainedModel itself."""

    @property
    def given_model(self) -> Any:
        """What the cache was made with: the model, or PEFT's or torch.compile's wrapper of it."""

    @property
    def adapters(self) -> dict[str, str] | None:
        """`model.peft_adapters.adapter_fields` when what is held began; None: nothing is held."""

    @property
    def tokens(self) -> int:
        """Tokens a sequence held, padding included."""

    @property
    def sequences(self) -> int:
        """Sequences held."""

    @property
    def input_ids(self) -> torch.Tensor:
        """Ids (B, tokens) held, int64; -1 where the model was given embeddings."""

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 where a token is held, 0 where padding is: (B, tokens) int64."""

    def check_open(self) -> None:
        """Raises unless the cache may be used."""

    def warn(self, message: str, stacklevel: int = 2) -> None:
        """Issue a warning about this cache and add it to the report."""

    def freeze(self) -> None:
        """All that is stored is immutable from now on, and on the disk."""

    def capture(self) -> dict[str, Any]:
        """What is held beside the layers, as a tree for `restore`: "ids" has the token ids, -3 minus the id where that
        is padding; int64 (B, tokens)."""

    def restore(self, tree: dict[str, Any]) -> None:
        """Let a new cache hold what was captured. Where the configuration says what the tree says too, the
        configuration decides: what was captured fills what it leaves open."""

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the latest `-tokens_to_remove` tokens."""

    def save(self, directory: Any, *, overwrite: bool = False, tokenizer: Any = None) -> str:
        """Publish the cache's content as a context. Returns its digest."""

    def close(self) -> None:
        """Give everything back."""

    @classmethod
    def open(cls, directory: Any, model: Any, **fields: Any) -> Self:
        """A cache that holds what a context holds."""

    @classmethod
    def plan(cls, geometry: Geometry, config: Any, context: int, batch: int) -> Any:
        """What a cache of `config` holds at most for `batch` sequences of `context` tokens; it has `peak_bytes`."""

    @classmethod
    def fit(cls, geometry: Geometry, memory: int, max_context: int, max_batch: int, fields: dict[str, Any]) -> Any:
        """The best configuration within `memory` bytes; `fields` stay as they are. Raises `BudgetError`."""

    @classmethod
    def notes(cls, plan: Any, config: Any, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        """Notes for the user about a plan; `given`: the fields that the user chose."""

    @classmethod
    def stored_fields(cls, config: Any, geometry: Geometry) -> dict[str, Any]:
        """The values of `config.kept_on_open` for `fit`: what the configuration left to the model's shape is named, as
        the stored layers have it; fields that are None otherwise are left out."""
