"""A read for a gather to come."""

from __future__ import annotations

from dataclasses import dataclass

from .area_read import AreaRead
from .choice import Choice


@dataclass
class ReadAhead:
    """Under way, for what `choice` wants."""

    choice: Choice
    read: AreaRead
