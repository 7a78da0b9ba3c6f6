"""What a cache will hold, summed from what each owner says: before anything is allocated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..config import OffloadConfig, parse_size
from ..fetch.staging import Staging
from ..history.record_format import RecordFormat
from ..memory.plan import LayerPlan, MemoryPlan, Planned
from ..model.geometry import Geometry, LayerShape
from ..report.trace import Trace
from ..stores.encryption import Encryption
from ..stores.file import LARGEST_STEP_BYTES, SMALLEST_STEP_RECORDS
from ..stores.guard import Checksums
from ..stores.memory import CHUNK_BYTES
