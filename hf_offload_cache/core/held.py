"""What a cache holds, as users and saved contexts see it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ..fetch.storage import Storage
from ..memory.account import RECORDS
from ..model.own_model import OwnModel
from ..model.peft_adapters import adapter_fields
from .cache_operations import CacheOperations

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Held(CacheOperations):
    """Figures of what is held now, and the verbs that take it out and put it back."""

    storage: Storage
    adapters: dict[str, str] | None
    _model: OwnModel
    _given: weakref.ref[Any]
    _resumed: bool

    # --- the model ---------------------------------------------------------------------------------------------

    def live_model(self) -> PreTrainedModel | None:
        return self._model()

    @property
    def model(self) -> PreTrainedModel:
        """The model that the cache is of. Raises `RuntimeError` when it is gone."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this cache is gone: open what was saved with a live one")
        return model

    @property
    def given_model(self) -> Any:
        """What the cache was constructed with: the model, or PEFT's or torch.compile's wrapper while there is one."""
        model = self.model
        given = self._given()
        return model if given is None else given

    # --- what is held ------------------------------------------------------------------------------------------

    @property
    def input_ids(self) -> torch.Tensor:
        """The ids held, padding included: int64 (B, tokens) in host memory, a copy; -1 where the model was given
        embeddings. A prompt continues the cache when it begins with them."""
        return self._tokens.ids

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 where a token is held and 0 where padding is: int64 (B, tokens) in host memory, a copy."""
        return self._tokens.visible.long()

    @property
    def tokens(self) -> int:
        """Tokens a sequence held, padding included."""
        return max((layer.length for layer in self.offloaded), default=self._tokens.length)

    @property
    def noted(self) -> int:
        """Tokens a sequence whose ids are known."""
        return self._tokens.length

    @property
    def sequences(self) -> int:
        """Sequences held, beams included."""
        return max((layer.batch for layer in self.offloaded), default=self._tokens.batch)

    @property
    def memory_bytes(self) -> int:
        """What the cache holds now in compute and host memory, all of it."""
        self.storage.check_process()
        self.account_live()
        return self.storage.account.current

    @property
    def host_bytes(self) -> int:
        """Of `memory_bytes`, records that budgets do not count: see `OffloadConfig.records_apart`."""
        self.account_live()
        return self.storage.account.apart

    @property
    def disk_bytes(self) -> int:
        """What lies on the disk for this cache, what it shares with others included."""
        self.storage.check_process()
        tables = sum(table.nbytes for table in self.storage.tables)
        return sum(store.disk_bytes for store in self.storage.stores) + tables

    @property
    def own_disk_bytes(self) -> int:
        """What of `disk_bytes` are records in files that only this cache ever had: nothing of what it was forked or
        saved with."""
        return sum(store.own_disk_bytes for store in self.storage.stores)

    def account_live(self) -> None:
        """Bring to account what others allocate: transformers' own layers, and records that stores hold in memory."""
        account = self.storage.account
        account.observe("layers not offloaded", self.kept_bytes())
        account.observe(RECORDS, sum(store.memory_bytes for store in self.storage.stores))
        account.observe("tables", sum(layer.tables_nbytes for layer in self.offloaded))
        self.shared.books_changed = False

    # --- taken out and put back --------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises `CacheClosedError`, `ForkedProcessError`, or `RuntimeError` where the cache is not to be used."""
        self.shared.check_open()

    def begin_context(self) -> None:
        """What is held begins with the forward that comes: remember which of PEFT's adapters made it."""
        self.adapters = adapter_fields(self.given_model, self.model)

    def end_part(self) -> None:
        """A forward ended before its last layer, as `Filling` had asked for: what is held is not taken back."""
        self.shared.step = self.shared.unseen = self.shared.front = None
        self.storage.timeline.end_step()

    def note_tokens(self, ids: torch.Tensor) -> None:
        """All layers hold ids (B, t) behind those that are known: see `Filling`."""
        if not self._tokens.length:
            self.begin_context()
        self._tokens.append(ids.to("cpu"), self._tokens.length)
        self.account_live()

    def freeze(self) -> None:
        """All that is stored is immutable from now on, and on the disk. Raises what a write failed with.

        What records are streamed through is given back: a cache that was frozen may lie beside its forks for long."""
        self.check_open()
        self.take_back()
        self.shared.check_seam()
        self.conversation.check()
        self.storage.release_stream_buffers()
        try:
            for layer in self.offloaded:
                layer.freeze()
        except Exception:
            raise
        except BaseException:  # a signal's can come between two lines
            self.storage.torn = True
            raise

    def capture(self) -> dict[str, Any]:
        """What is held beside the layers, as a tree of values and tensors for `restore`; good until the next change."""
        return {
            "ids": self._tokens.capture(self.sequences, self.tokens), "model": self.conversation.capture()
        }  # fmt: skip

    def restore(self, tree: dict[str, Any]) -> None:
        """Hold what was captured; for a new cache."""
        self._tokens.restore(tree["ids"])
        self.conversation.restore(tree.get("model", {}), len(tree["ids"]))
        self.begin_context()
        self._resumed = True
