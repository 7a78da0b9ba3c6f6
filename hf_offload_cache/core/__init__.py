"""The parts that all methods share: the cache, its layers, and the decisions of a step."""

from ..config import SelectiveConfig as SelectiveConfig
from ..predictors.summaries import SummaryPredictor as SummaryPredictor
from .budget import FORMAT as FORMAT
from .budget import counts_for_fidelity as counts_for_fidelity
from .budget import load_config as load_config
from .budget import missed_goal as missed_goal
from .budget import nearest as nearest
from .cache import OffloadCache as OffloadCache
from .filling import Filling as Filling
from .filling import piece_size as piece_size
from .gathered_mask import chosen_at_edge as chosen_at_edge
from .layer import OffloadLayer as OffloadLayer
from .layer import Rows as Rows
from .layers import hybrid as hybrid
from .plan import LayerKind as LayerKind
from .selective_cache import Pace as Pace
from .selective_cache import SelectiveCache as SelectiveCache
from .selective_layer import SelectiveLayer as SelectiveLayer
from .shared import Shared as Shared
from .step import Step as Step
from .token_log import TokenLog as TokenLog
