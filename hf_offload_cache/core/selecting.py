"""What the selective layers of one cache share: areas, the budget of a step, and whether rows are padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config import SelectiveConfig
from ..fetch.areas import Areas
from ..fetch.choice import Choice
from ..fetch.storage import Storage
from ..memory.account import Workspace
from ..predictors.sinks import sink_units


@dataclass
class Selecting:
    """Made by the cache; for the thread that runs the model."""

    settings: SelectiveConfig
    storage: Storage
    reads_ahead: int = 1
    """The most reads ahead that are under way at a time."""
    padded: bool = False
    """Some row has padding: its sinks may begin anywhere in a unit."""
    watch: Callable[[int, Choice], None] | None = None
    """Told the layer's index and what its step attends to, after it was gathered."""

    postponed: bool = False
    """More of a prompt comes: what is found out of all its keys, and takes long, waits for the last of it."""

    widened: bool = False
    """See `widen`."""

    worthwhile: bool = True
    """Selecting takes less memory than the full KV. False: steps attend to everything."""

    slot_share: float = 1.0
    """Share of the slots that the configuration names which fit below the full KV."""

    version: int = 0
    """Changes whenever a budget may have: what was derived from one is good as long as it stays."""

    def __post_init__(self) -> None:
        self.areas = Areas(self.storage.account, self.reads_ahead)
        self.looks = Areas(self.storage.account)
        self.workspace = Workspace(self.storage.account, "scores")

    def units(self, config: SelectiveConfig, unit_size: int, held: int, *, usual: bool = False) -> int:
        """Units a row and step of a layer of `config` that holds `held` tokens a row, sinks included; `usual`: in steps
        that are not widened."""
        wide = self.widened and not usual
        brought = config.brought_at_most(held) if wide else config.brought(held)
        return -(-brought // unit_size) + sink_units(config.num_sinks, unit_size, self.padded)

    def slots(self, config: SelectiveConfig, unit_size: int, units: int) -> int:
        """Slots a row of a layer that has `units` units: no more than it may come to have."""
        slots = -(-config.reuse_capacity // unit_size)
        if not slots:
            return 0
        most = min(slots + -(-config.num_sinks // unit_size), most_slots(config, unit_size, units))
        fixed = config.reuse_capacity > self.settings.reuse_capacity  # of a layer that keeps everything
        return most if fixed else int(self.slot_share * most)

    def limit(self, worthwhile: bool, slot_share: float) -> None:
        """Set `worthwhile` and `slot_share` for the steps from now on."""
        if slot_share != self.slot_share:
            self.slot_share = slot_share
            self.version += 1
        self.worthwhile = worthwhile

    def widen(self, wide: bool) -> None:
        """Let steps from now on choose from up to twice as many units, as their layer's configuration says, or no
        longer. They take the memory that a verification of candidates has: nothing is read ahead for them."""
        if wide != self.widened:
            self.widened = wide
            self.version += 1

    def see_padding(self) -> None:
        """Some row has padding."""
        if not self.padded:
            self.padded = True
            self.version += 1

    def rest(self) -> None:
        """A step that selects nothing comes: give back what only selecting needs; slots are the layers'."""
        self.areas.release()
        self.looks.release()
        self.workspace.release()

    def reset(self) -> None:
        """The cache holds nothing any more."""
        self.padded = False
        self.widened, self.worthwhile, self.slot_share = False, True, 1.0
        self.version += 1
        self.areas.reset()
        self.looks.reset()
        self.workspace.release()


def most_slots(config: SelectiveConfig, unit_size: int, units: int) -> int:
    """Slots a row that a layer of `units` units a row has use for: for a power of two of units, so that they are not
    made anew with each of these, and where it is known how much is to come for no more than that; at once, where all
    of it is to stay."""
    room = 1 << max(units - 1, 0).bit_length()
    if config.max_context is None:
        return room
    known = max(units, config.max_context // unit_size)
    return known if config.reuse_capacity >= config.max_context else min(room, known)
