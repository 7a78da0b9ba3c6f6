"""State that a cache's selective layers share: read buffers, a step's budget, and whether rows are padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config import SelectiveConfig
from ..fetch.areas import Areas
from ..fetch.choice import Choice
from ..fetch.storage import Storage
from ..history.records import RecordFormat
from ..memory.account import Workspace
from ..predictors.sinks import sink_units


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
