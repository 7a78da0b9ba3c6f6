"""State that a cache's selective layers share: read buffers, a step's budget, and whether rows are padded; and that of
layers whose model chooses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..config import OffloadConfig, SelectiveConfig
from ..fetch.areas import Areas
from ..fetch.choice import Choice
from ..fetch.storage import Storage
from ..history.records import RecordFormat
from ..memory.account import Workspace
from ..model.look_ahead import LookAhead
from ..predictors.sinks import sink_units
from .step import Step


@dataclass
class Selecting:
    """Made by the cache; for the thread that runs the model."""

    settings: SelectiveConfig
    storage: Storage
    reads_ahead: int = 1
    """Maximum number of prefetches in flight."""
    layers: int = 1
    """Number of layers that select."""
    padded: bool = False
    """Some row has padding, so its sinks may begin anywhere in a unit."""
    watch: Callable[[int, Choice], None] | None = None
    """Called with a layer's index and its step's choice, after the gather."""

    postponed: bool = False
    """More of a prompt follows: slow fitting to all keys waits for the last chunk."""

    widened: bool = False
    """Steps may select up to twice as many units: see `widen`."""

    worthwhile: bool = True
    """Selecting needs less memory than the full KV. False: steps attend to everything."""

    slot_share: float = 1.0
    """Share of the configured slots that fit below the full KV."""

    lent: int = 0
    """Tokens a layer of slots in addition to the configured ones: memory that a step leaves of the budget."""

    over_host: int | None = None
    """Most slots a row of a layer whose steps run on a device, while they go over the host: what their buffers leave
    of the budget. None: unlimited."""

    version: int = 0
    """Increases whenever a budget may have changed; values derived from a budget are valid while it stays the same."""

    def __post_init__(self) -> None:
        self.areas = Areas(self.storage.account, self.reads_ahead)
        self.looks = Areas(self.storage.account)
        self.workspace = Workspace(self.storage.account, "scores")

    def units(self, config: SelectiveConfig, unit_size: int, held: int, *, usual: bool = False) -> int:
        """Units a row that a step selects in a layer of `config` with `held` tokens a row outside its tail, sinks
        included; `usual`: in steps that are not widened."""
        wide = self.widened and not usual
        fetched = config.most_tokens_fetched(held) if wide else config.tokens_fetched(held)
        return -(-fetched // unit_size) + sink_units(config.num_sinks, unit_size, self.padded)

    def slots(self, config: SelectiveConfig, unit_size: int, units: int) -> int:
        """Slots a row for a layer of `units` units: at most what the layer can fill."""
        fixed = config.reuse_capacity > self.settings.reuse_capacity  # a layer that is kept resident
        slots = -(-(config.reuse_capacity + (0 if fixed else self.lent)) // unit_size)
        if not slots:
            return 0
        most = min(slots + -(-config.num_sinks // unit_size), most_slots(config, unit_size, units))
        return most if fixed else int(self.slot_share * most)

    def host_slots(self, config: SelectiveConfig, form: RecordFormat, rows: int, units: int, near: int) -> int:
        """Slots in host memory for a layer of `units` units a row, besides `near` ones on the device, which they do
        not duplicate."""
        room = config.host_bytes_of(self.layers) // form.payload_bytes
        return max(0, min(room, rows * most_slots(config, form.group_size, units) - near)) if room else 0

    def limit(self, worthwhile: bool, slot_share: float) -> None:
        """Set `worthwhile` and `slot_share` for the steps from now on."""
        if slot_share != self.slot_share:
            self.slot_share = slot_share
            self.version += 1
        self.worthwhile = worthwhile

    def lend(self, tokens: int, over_host: int | None = None) -> None:
        """Set `lent` and `over_host` for the steps from now on."""
        if (tokens, over_host) != (self.lent, self.over_host):
            self.lent, self.over_host = tokens, over_host
            self.version += 1

    def widen(self, wide: bool) -> None:
        """Let steps select up to twice as many units, as their layer's configuration says, or no longer. They use the
        memory of a verification of candidates, so nothing is prefetched for them."""
        if wide != self.widened:
            self.widened = wide
            self.version += 1

    def see_padding(self) -> None:
        """Note that some row has padding."""
        if not self.padded:
            self.padded = True
            self.version += 1

    def rest(self) -> None:
        """Free the memory that only selecting needs, before a step that does not select. Layers free their slots."""
        self.areas.release()
        self.looks.release()
        self.workspace.release()

    def reset(self) -> None:
        """Return to the state of an empty cache."""
        self.padded = False
        self.widened, self.worthwhile, self.slot_share, self.lent, self.over_host = False, True, 1.0, 0, None
        self.version += 1
        self.areas.reset()
        self.looks.reset()
        self.workspace.release()


def most_slots(config: SelectiveConfig, unit_size: int, units: int) -> int:
    """Slots a row that a layer of `units` units a row can use.

    The number of units is rounded up to a power of two, so that slots are seldom allocated again, and limited by
    `max_context`. A layer that is kept resident gets all of them at once."""
    room = 1 << max(units - 1, 0).bit_length()
    if config.max_context is None:
        return room
    known = max(units, config.max_context // unit_size)
    return known if config.reuse_capacity >= config.max_context else min(room, known)


# Layers whose model chooses

def reads_ahead(config: OffloadConfig) -> bool:
    """Whether steps of such a cache may read what later layers probably attend to."""
    return isinstance(config, SelectiveConfig) and not config.exact and config.look_ahead is not False


class Indexing:
    """State that a cache's indexed layers share. For the thread that runs the model.

    Attributes:
        layers: each `IndexedLayer`, held weakly.
        areas: memory that they read into.
        chosen: indices (B, q, K) of the tokens that the step's latest indexer chose, -1 for none; None: no indexer has
            told any. Layers without an indexer of their own attend to what the latest one chose.
        lent, over_host: as of `Selecting`.
    """

    def __init__(self, config: OffloadConfig, storage: Storage) -> None:
        self.layers: list[weakref.ref[Any]] = []
        self.areas = Areas(storage.account, int(reads_ahead(config)))
        self.look_ahead: LookAhead | None = None
        """Guesses what the next layer's indexer chooses; None: nothing is read ahead. Set by the cache."""
        self.chosen: torch.Tensor | None = None
        self.lent, self.over_host = 0, cast("int | None", None)
        self._step: weakref.ref[Step] | None = None
        self._sparse = False

    def is_sparse(self, step: Step | None) -> bool:
        """Whether layers give attention only what it attends to in this `step`: all of them or none, because layers may
        share keys and indexers."""
        if step is None or self._step is None or self._step() is not step:
            self._step, self.chosen = None if step is None else weakref.ref(step), None
            filled = [layer for layer in self._present() if layer.is_filled]
            ready = all(layer.state == "tagged" for layer in filled)
            self._sparse = step is not None and step.history > 0 and bool(filled) and ready
        return self._sparse

    def chose(self, chosen: torch.Tensor, step: Step | None) -> torch.Tensor | None:
        """As `Attachable.leave_indexer`. In a sparse step the model goes on with one index, that of the one token whose
        keys it gets, so that it hides nothing by itself. A mask needs no exchange."""
        if chosen.dtype == torch.bool or not self.is_sparse(step):
            return None
        self.chosen = chosen
        return chosen.new_zeros(*chosen.shape[:2], 1)

    def run(
        self, layer_idx: int, forward: Callable[..., torch.Tensor], given: dict[str, Any]
    ) -> torch.Tensor:
        """As `Attachable.run_indexer`."""
        if self.look_ahead is not None:
            self.look_ahead.enter_indexer(layer_idx, given)
        layer = next((one for one in self._present() if one.layer_idx == layer_idx), None)
        return forward(**given) if layer is None else layer.run_indexer(forward, given)

    def rest(self) -> None:
        """Free the memory that only sparse steps of few queries need."""
        for layer in self._present():
            layer.drop_fetcher()
            layer.indexer.drop_fetcher()
        self.areas.release()

    def _present(self) -> list[Any]:
        return [layer for reference in self.layers if (layer := reference()) is not None]


@dataclass
class Asked:
    """What `update_indexer` does while a forward of an indexer runs several times, or for a guess: `add` the step's
    keys if they are not `added`, and return `keys()`. `dtype`: of the indices that the forward returned."""

    add: Callable[[torch.Tensor], object]
    added: bool = False
    keys: Callable[[], torch.Tensor] = lambda: torch.empty(0, dtype=torch.float32, device="cpu")
    dtype: torch.dtype = torch.int32


class Guessing:
    """Replaces the cache for a guess of a layer's indexer: shows it the stored tokens and the step's one."""

    def __init__(self, layer: Any) -> None:
        self.layers, self._layer = {layer.layer_idx: self}, layer
        self.keys = torch.empty(layer.batch, 1, layer.length + 1, 1, dtype=layer.dtype, device="meta")

    def get_seq_length(self) -> int:
        return self.keys.shape[2]

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return cast(torch.Tensor, self._layer.update_indexer(keys))
