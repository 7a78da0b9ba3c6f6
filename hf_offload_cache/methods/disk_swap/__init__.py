"""`DiskSwapCache`: KVSwap. Compact keys in memory rank the groups on disk.

A decoding step in reading order: `predictor.py` selects groups (`select`). `fitted_keys.py` ranks them by their
compact keys (`compact_keys.py`, `ranking.py`). `core` and `fetch` gather them for the attention,
and guess the next layer's query. Keys that leave the latest tokens become compact keys (`learn`). `coding.py` fits the
coding to the prompt, `cache.py` coordinates the layers, and `fit.py` fits a budget.

Where to find the paper:

* section 3.2, the adapter A by SVD: `principal_directions`; offline, from sample text: `calibrate` in
  `methods.disk_swap.tuning`
* section 3.2, the compressed K cache: `LowRankKeys`
* section 3.3, equation 1, the low-rank query: `LowRankKeys.low_rank_query`
* section 3.3, online prediction by the previous layer's input: `LookAhead.predict` in `model`,
  `SelectiveCache.leave_attention` in `core`
* section 3.3, scoring, ReduceMax within groups and TopK: `rank_units`, `CompactKeys.best_of_units`,
  `LowRankPredictor.select`
* section 3.4.1, the rolling buffer: `RollingTail` in `history`
* section 3.4.3, the reuse buffer, its slot table and FIFO: `SlotTier`, `SlotTable`, `FirstIn` in `fetch`
* section 3.4.4, one view of slots, reads and rolling buffer: `Fetcher.gather` in `fetch`
* appendix A.1, lookup tables: `ReuseTable`, `CompressionTable`, `Reader` in `methods.disk_swap.tuning`
* appendix A.3, profiles: `IoProfile`, `ModelProfile` in `methods.disk_swap.tuning`
* appendix A.4, the solver: `tune_by_solver`, `solve` in `methods.disk_swap.tuning`

Beyond the paper:

* keys in mixed bits, fitted to the prompt in the metric of its queries: `CodedKeys`, `fit_coding`, `scaled_directions`
* exact scores of sinks and latest tokens, and a softmax of each head before heads are summed: `rank_units`
* steps that rank only candidates: `rank_among`, `LowRankPredictor`
* a choice for each key head: `DiskSwapConfig.heads_apart`
* fields for a budget without a profile: `fit_disk_swap`
"""

from .cache import DiskSwapCache as DiskSwapCache
from .cache import DiskSwapLayer as DiskSwapLayer
from .coding import QUERIES_SEEN as QUERIES_SEEN
from .coding import Coding as Coding
from .coding import Directions as Directions
from .coding import allocate as allocate
from .coding import bytes_of as bytes_of
from .coding import coding_bytes as coding_bytes
from .coding import default_summary_bytes as default_summary_bytes
from .coding import fit_coding as fit_coding
from .coding import fitting_bytes as fitting_bytes
from .coding import most_bytes as most_bytes
from .coding import most_components as most_components
from .coding import part_sizes as part_sizes
from .coding import principal_directions as principal_directions
from .coding import query_moment as query_moment
from .coding import reconstruction as reconstruction
from .coding import roots_of as roots_of
from .coding import scaled_directions as scaled_directions
from .compact_keys import BLOCK as BLOCK
from .compact_keys import HIDDEN as HIDDEN
from .compact_keys import CodedKeys as CodedKeys
from .compact_keys import CompactKeys as CompactKeys
from .compact_keys import multiplied as multiplied
from .compact_keys import rounded as rounded
from .config import DiskSwapConfig as DiskSwapConfig
from .fit import fit_disk_swap as fit_disk_swap
from .fit import needles_lost as needles_lost
from .fit import worth as worth
from .fitted_keys import FittedKeys as FittedKeys
from .fitted_keys import LowRankShared as LowRankShared
from .fitted_keys import Rules as Rules
from .low_rank_keys import LowRankKeys as LowRankKeys
from .predictor import LowRankPredictor as LowRankPredictor
from .ranking import CANDIDATES as CANDIDATES
from .ranking import few_of_many as few_of_many
from .ranking import rank_among as rank_among
from .ranking import rank_units as rank_units
