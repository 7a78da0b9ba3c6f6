"""KVSwap's offline tuning (section 3.5 and appendix A): tables, profiles, the solver, and calibrated adapters."""

from .by_solver import coarse as coarse
from .by_solver import tune_by_solver as tune_by_solver
from .lookup import Reader as Reader
from .lookup import Selections as Selections
from .lookup import kept_mass as kept_mass
from .lookup import recorded as recorded
from .lookup import replay as replay
from .profile import random_keys_and_values as random_keys_and_values
from .profile import two_blocks as two_blocks
from .solve import CompressionTable as CompressionTable
from .solve import IoProfile as IoProfile
from .solve import Limits as Limits
from .solve import ModelProfile as ModelProfile
from .solve import ReuseTable as ReuseTable
from .solve import Solution as Solution
from .solve import along as along
