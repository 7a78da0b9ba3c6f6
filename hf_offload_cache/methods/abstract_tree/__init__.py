"""`AbstractTreeCache`: LeoAM. Summaries of chunks choose what is read, layer by layer.

Where to find the paper:

* section 4.2, chunks judged by bounds of their keys: `AbstractTreePredictor.select`, `bounds`, `likely`; chunk sizes by
  layer: `best_size`
* section 4.3, abstracts on the disk: `AbstractPages`, `StoredAbstractsPredictor`; three tiers:
  `AbstractTreeLayer.make_tiers`, with `MostUsed` in `fetch`
* section 4.4, abstracts are read a layer early: `AbstractTreeLayer.begin_look`; a part of the traffic in 4 bits:
  `Replicas`, with `Link` in `fetch`
"""

from .cache import AbstractTreeCache as AbstractTreeCache
from .config import SIZES as SIZES
from .config import AbstractTreeConfig as AbstractTreeConfig
from .config import best_size as best_size
from .config import expected_judged as expected_judged
from .history import AbstractPages as AbstractPages
from .history import ChunkHistory as ChunkHistory
from .history import page_size as page_size
from .layer import AbstractTreeLayer as AbstractTreeLayer
from .predictor import AbstractTreePredictor as AbstractTreePredictor
from .predictor import StoredAbstractsPredictor as StoredAbstractsPredictor
from .predictor import best_tokens as best_tokens
from .predictor import bounds as bounds
from .predictor import front as front
from .predictor import likely as likely
from .predictor import shares as shares
from .predictor import standing as standing
from .replicas import ReplicaFormat as ReplicaFormat
from .replicas import Replicas as Replicas
