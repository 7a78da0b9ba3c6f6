"""`SpecCache`: SpeCache. A low-bit copy in memory and a guess of the next token select the entries to prefetch.

A decoding step in reading order: `cache.py` adds the guess to the call (`begin_step`). In `layer.py`, each layer runs
`attend_sparsely` and `_attend_to_all`, which first collects the entries prefetched for this step. `_last` attends over
the copy and these entries (`attention.py`, `copy.py`) and selects the next step's top-k, and `_fetch` prefetches it
(`chosen_entries.py`). Last, `cache.py` keeps the next guess (`end_step`); it also fits a budget.

Where to find the paper:

* section 3.4, equations 2 and 3, KIVI and its 1-bit form: `LowBitForm`, `LowBitCopy`; one row: `packed` in
  `kernels.low_bit`
* algorithm 1, prefilling, Quant: `LowBitPredictor.learn`, `LowBitCopy.append`; Offload: `PositionHistory` in `history`
* algorithm 2, pre-decoding, one step for the first guess: `SpecCache.begin_step`
* section 3.3, decoding, a token and its speculative token in one forward: `SpecCache.begin_step`, `SpecCache.end_step`
* algorithm 3, decoding, one layer: `SpecLayer.attend_sparsely`, `SpecLayer._attend_to_all`; A, ArgTopK and O:
  `SpecLayer._last`
* algorithm 3 and equation 1, attention over the copy with the top-k replaced: `MixedAttention`, `FusedAttention`
* algorithm 3, ArgTopK of the guess's row: `LowBitPredictor.most`, `SpecLayer.shares_of`
* algorithm 3, Pre-fetch: `SpecLayer._fetch`, `EntryReads.ahead`, or, from pinned host memory, `PinnedEntries.exchange`
* section 3.3, the top-k in full precision, and eviction of the others: `ChosenEntries`

Beyond the paper:

* the token's attention also selects, and resident entries count more: `SpecLayer.shares_of`, `LOYALTY`
* entries that a guess missed, fetched within the step: `TopUp`
"""

from .attention import FusedAttention as FusedAttention
from .attention import MixedAttention as MixedAttention
from .cache import SpecCache as SpecCache
from .chosen_entries import ChosenEntries as ChosenEntries
from .chosen_entries import Entries as Entries
from .chosen_entries import EntryReads as EntryReads
from .chosen_entries import PinnedEntries as PinnedEntries
from .chosen_entries import picked as picked
from .chosen_entries import records_of as records_of
from .config import SpecConfig as SpecConfig
from .copy import LOYALTY as LOYALTY
from .copy import LowBitCopy as LowBitCopy
from .copy import LowBitForm as LowBitForm
from .copy import LowBitPredictor as LowBitPredictor
from .copy import Scores as Scores
from .layer import TRIED as TRIED
from .layer import SpecLayer as SpecLayer
from .layer import TopUp as TopUp
