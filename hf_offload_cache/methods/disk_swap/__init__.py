"""`DiskSwapCache`: KVSwap. Compact keys in memory rank the groups on disk.

Where to find the paper:

* section 3.2, low-rank keys and queries: `LowRankKeys`, or, in mixed bits, `CodedKeys` and `fit_coding`
* section 3.3, groups by their scores: `LowRankPredictor.select`, `rank_units`
* section 3.4.1, the rolling buffer: `RollingTail` in `history`
* section 3.4.3, the reuse buffer: `SlotTier` and `FirstIn` in `fetch`
* section 3.1, groups are read ahead by a guess of the next query: `SelectiveCache.leave_attention` in `core`
* appendix A, fields for a budget: `fit_disk_swap`
"""

from .cache import DiskSwapCache as DiskSwapCache
from .cache import DiskSwapLayer as DiskSwapLayer
from .coding import QUERIES_SEEN as QUERIES_SEEN
from .coding import Coding as Coding
from .coding import allocate as allocate
from .coding import bytes_of as bytes_of
from .coding import default_summary_bytes as default_summary_bytes
from .coding import fit_coding as fit_coding
from .coding import most_bytes as most_bytes
from .coding import most_components as most_components
from .coding import principal_directions as principal_directions
from .coding import query_moment as query_moment
from .coding import reconstruction as reconstruction
from .coding import roots_of as roots_of
from .coding import scaled_directions as scaled_directions
from .compact_keys import BLOCK as BLOCK
from .compact_keys import HIDDEN as HIDDEN
from .compact_keys import CodedKeys as CodedKeys
from .compact_keys import CompactKeys as CompactKeys
from .compact_keys import LowRankKeys as LowRankKeys
from .config import DiskSwapConfig as DiskSwapConfig
from .fit import fit_disk_swap as fit_disk_swap
from .fit import worth as worth
from .integer_product import multiplied as multiplied
from .integer_product import rounded as rounded
from .learnt_keys import LearntKeys as LearntKeys
from .learnt_keys import LowRankShared as LowRankShared
from .learnt_keys import Rules as Rules
from .predictor import LowRankPredictor as LowRankPredictor
from .ranking import CANDIDATES as CANDIDATES
from .ranking import few_of_many as few_of_many
from .ranking import rank_among as rank_among
from .ranking import rank_units as rank_units
