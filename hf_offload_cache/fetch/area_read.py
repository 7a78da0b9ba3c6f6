"""A read into a borrowed area."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .staging import Staging
from .ticket import Ticket


@dataclass
class AreaRead:
    """Under way: row i of what comes is `records[i]` (distinct, ascending), whole or as its replica.

    Those that come whole are the first in the area, in order, and replicas lie behind them.
    """

    records: np.ndarray
    area: Staging
    ahead: bool
    ticket: Ticket | None
    """Of those that come whole; None: none do."""
    replicas: Ticket | None = None
    """Of those that come as replicas; None: none do."""
    come: np.ndarray | None = None
    """(n,) bool: which come as replicas; None: none do."""
    lent: bool = True
    """The area is not given back yet."""

    @property
    def tickets(self) -> list[Ticket]:
        """In the order in which they are waited for."""
        return [ticket for ticket in (self.replicas, self.ticket) if ticket is not None]

    @property
    def stalled(self) -> bool:
        """The device is stuck, and may still write to the area."""
        return any(ticket.stalled for ticket in self.tickets)
