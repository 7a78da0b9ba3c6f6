"""A read for a gather to come."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .choice import Choice
from .staging import Staging
from .ticket import Ticket


@dataclass
class ReadAhead:
    """Under way, for what `choice` wants: row i of the area gets `records[i]` (ascending)."""

    choice: Choice
    records: np.ndarray
    ticket: Ticket
    area: Staging
