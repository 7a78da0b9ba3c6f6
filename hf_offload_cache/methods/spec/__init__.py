"""`SpecCache`: SpeCache. A low-bit copy in memory guesses what the next token attends to.

Where to find the paper:

* section 3.4, keys and values in a few bits: `LowBitForm`, `LowBitCopy`
* algorithm 1, prefilling: `LowBitPredictor.learn`
* algorithm 2, pre-decoding: `SpecCache.begin_step`
* algorithm 3, a token and the guess beside it: `SpecLayer.attend_sparsely`; attention over the copy with the top-k
  replaced: `MixedAttention`, `FusedAttention`; ArgTopK: `LowBitPredictor.most`; Pre-fetch: `EntryReads.ahead`
* what was fetched: `ChosenEntries`
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
from .layer import TRIED as TRIED
from .layer import SpecLayer as SpecLayer
from .layer import TopUp as TopUp
