"""What the selective layers of one cache share: areas, budgets of their own, and whether rows are padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import SelectiveConfig
from ..errors import ContextError
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
    shares: dict[int, float] = field(default_factory=dict)
    """By layer index: what of the mean budget a layer has; 1 where it is not named."""
    given: dict[int, float] = field(default_factory=dict)
    """Those of the configuration, which apply whatever was measured or captured."""

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
        self.generator = torch.Generator().manual_seed(0)

    def units(self, layer_idx: int | None, config: SelectiveConfig, unit_size: int, held: int) -> int:
        """Units a row and step of a layer of `config` that holds `held` tokens a row, sinks included; None: of the
        layer with the largest budget, in steps that are not widened."""
        share = max(self.shares.values(), default=1.0) if layer_idx is None else self.shares.get(layer_idx, 1.0)
        wide = self.widened and layer_idx is not None
        brought = config.brought_at_most(held) if wide else config.brought(held)
        selected = -(-round(share * brought) // unit_size)
        return selected + sink_units(config.num_sinks, unit_size, self.padded)

    def slots(self, layer_idx: int, config: SelectiveConfig, unit_size: int, units: int) -> int:
        """Slots a row of a layer that has `units` units: no more than it may come to have."""
        share = self.shares.get(layer_idx, 1.0)
        slots = -(-round(share * config.reuse_capacity) // unit_size)
        if not slots:
            return 0
        most = min(slots + -(-config.num_sinks // unit_size), most_slots(config, unit_size, units))
        return int(self.slot_share * most)

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

    def spread(self, tokens: dict[int, int], *, given: bool = False) -> None:
        """Give layers (by index) budgets of their own: `num_selected` becomes `tokens`, `reuse_capacity` in proportion.

        A layer that is not named keeps the mean. Valid until the next `spread`, or until the cache holds nothing; then
        those that were `given` apply again.
        """
        self.shares = {layer_idx: count / self.settings.num_selected for layer_idx, count in tokens.items()}
        self.version += 1
        if given:
            self.given = dict(self.shares)

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
        self.shares = dict(self.given)
        self.widened, self.worthwhile, self.slot_share = False, True, 1.0
        self.version += 1
        self.generator.manual_seed(0)
        self.areas.reset()
        self.looks.reset()
        self.workspace.release()

    def capture(self) -> dict[str, Any]:
        """What is known of the rows and was measured of the layers, as a tree for `restore`."""
        return {"padded": self.padded, "share": dict(self.shares), "given": dict(self.given)}

    def restore(self, tree: dict[str, Any], *, measured: bool) -> None:
        """Go on with what was captured: budgets only where the configuration has them `measured`. Raises
        `ContextError`."""
        shares = [*tree["share"].values(), *tree["given"].values()]
        if not isinstance(tree["padded"], bool) or not all(type(one) is float and 0 <= one < 2**31 for one in shares):
            raise ContextError(f"budgets of the layers in a context must be numbers from 0, got {shares[:8]!r}")
        self.padded = tree["padded"]
        self.version += 1
        if measured and not tree["given"]:
            self.shares = dict(tree["share"])


def most_slots(config: SelectiveConfig, unit_size: int, units: int) -> int:
    """Slots a row that a layer of `units` units a row has use for: for a power of two of units, so that they are not
    made anew with each of these, and where it is known how much is to come for no more than that; at once, where all
    of it is to stay."""
    room = 1 << max(units - 1, 0).bit_length()
    if config.max_context is None:
        return room
    known = max(units, config.max_context // unit_size)
    return known if config.reuse_capacity >= config.max_context else min(room, known)
