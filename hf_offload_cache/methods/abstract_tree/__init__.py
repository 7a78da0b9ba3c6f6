"""`AbstractTreeCache`: LeoAM. Abstracts of chunks select what is read, one layer after another.

A decoding step in reading order: `predictor.py` ranks chunks and selects tokens in them, and `layer.py` fetches them
through its tiers. On a GPU that reads records by itself, `DevicePredictor` does so with `kernels/bounds.py`.
`history.py` and `replicas.py` store chunks, abstracts and 4-bit replicas. `cache.py` coordinates the layers and fits a
budget.

Where to find the paper:

* section 4.1, token importance by column sums of the attention: `shares`, `best_tokens`
* section 4.2, upper and lower bounds of chunks: `bounds`, or an estimate: `likely`; the priority queues of the heads:
  `standing`; the important chunks at the front of a queue: `front`; a step: `AbstractTreePredictor.select`,
  `AbstractTreePredictor.look_into`
* section 4.2, dynamic chunk resizing, equations 2 and 3: `expected_judged`, `best_size`; early steps:
  `AbstractTreeConfig.early_steps`; the first two layers: `AbstractTreeConfig.dense_layers`
* section 4.3, abstracts: `AbstractTreePredictor.summarise`; on disk: `AbstractPages`, `StoredAbstractsPredictor`; three
  tiers: `AbstractTreeLayer.make_tiers`; the access-frequency table: `MostUsed` in `fetch`, on a device `exchange`
  in `kernels.slots`
* section 4.4, abstracts are read one layer early: `AbstractTreeLayer.begin_look`; chunks:
  `SelectiveCache.leave_attention` in `core`; dynamic KV compression: `ReplicaFormat`, `Replicas`; the share theta:
  `Link`, `LinkRates` in `fetch`

One thing differs from section 4.2: no tree is built. A step scores the tokens of the front chunks directly, which needs
fewer evaluations than splitting and merging chunks and finds the same tokens.
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
from .predictor import DevicePredictor as DevicePredictor
from .predictor import StoredAbstractsPredictor as StoredAbstractsPredictor
from .predictor import best_tokens as best_tokens
from .predictor import bounds as bounds
from .predictor import front as front
from .predictor import likely as likely
from .predictor import shares as shares
from .predictor import standing as standing
from .replicas import ReplicaFormat as ReplicaFormat
from .replicas import Replicas as Replicas
