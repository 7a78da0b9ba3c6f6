"""A layer's stored tokens: entries in records, the latest ones in memory, in the order that a method chooses."""

from .base import Block as Block
from .base import History as History
from .base import Sealed as Sealed
from .position_history import PositionHistory as PositionHistory
from .records import TARGET_RECORD_BYTES as TARGET_RECORD_BYTES
from .records import RecordFormat as RecordFormat
from .records import autocast_dtype as autocast_dtype
from .records import places_within as places_within
from .records import sealed_groups as sealed_groups
from .records import without_autocast as without_autocast
from .state import Array as Array
from .state import Number as Number
from .state import State as State
from .state import Table as Table
from .tail import BlockTable as BlockTable
from .tail import RollingTail as RollingTail
