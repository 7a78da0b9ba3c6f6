"""`AbstractTreeCache`: LeoAM. Summaries of chunks choose what is read, layer by layer."""

from .cache import AbstractTreeCache as AbstractTreeCache
from .config import AbstractTreeConfig as AbstractTreeConfig
