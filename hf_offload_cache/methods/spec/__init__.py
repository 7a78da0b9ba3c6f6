"""`SpecCache`: SpeCache. A low-bit copy in memory guesses what the next token attends to."""

from .cache import SpecCache as SpecCache
from .config import SpecConfig as SpecConfig
