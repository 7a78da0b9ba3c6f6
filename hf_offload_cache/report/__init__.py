"""What a cache did and is doing: counters, the report, the timeline, progress."""

from .counters import Counters as Counters
from .progress import Progress as Progress
from .report import CacheReport as CacheReport
from .report import StreamReport as StreamReport
from .report import least_size_text as least_size_text
from .trace import NO_TIMELINE as NO_TIMELINE
from .trace import Timeline as Timeline
from .trace import Trace as Trace
