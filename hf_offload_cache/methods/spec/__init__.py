"""`SpecCache`: SpeCache. A low-bit copy in memory guesses what the next token attends to."""

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
