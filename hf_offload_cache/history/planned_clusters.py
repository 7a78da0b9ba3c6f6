"""What a `ClusterHistory` will hold."""

from __future__ import annotations

from ..config import OffloadConfig, parse_size
from ..memory.plan import LayerPlan, Planned
from .append_buffer import AppendBuffer
from .cluster_bytes import planned_packing, streaming
from .cluster_form import ClusterForm
from .cluster_pages import ClusterPages
from .packing import sealed_groups, together
from .partition import Partition
from .record_format import RecordFormat
from .rolling_tail import RollingTail


def planned_clusters(
    form: RecordFormat, config: OffloadConfig, clusters: ClusterForm, context: int, rows: int
) -> tuple[LayerPlan, int]:
    """What `rows` rows of `context` tokens take at most, and how many records of a store they have."""
    tokens = sealed_groups(form, config, context) * form.group_size
    count = clusters.most_clusters(tokens, form.group_size)
    tail = RollingTail.planned(form, rows, config.num_recent + together(form, config) * form.group_size)
    waiting = AppendBuffer.planned(form, rows, clusters.append_buffer + clusters.together(form.group_size))
    labels = (2 if count < 1 << 16 else 4) * (tokens * 5 // 4 + 64 if config.max_context is None else tokens)
    tables, means = Partition.planned(count, form.key_width, rows)
    tables += ClusterPages.planned(count, rows) + rows * (labels + 8 * count) + (0 if clusters.mapped else means)
    records = rows * clusters.most_places(tokens, form.group_size)
    tables += 2 * records
    own = Planned.always({"rolling tail": tail, "append buffer": waiting, "tables": tables})
    moving = {"moving rows": tail + waiting} if rows > 1 else {}
    packings = planned_packing(form, clusters, tokens, parse_size(config.write_queue))
    block = max(1, config.block_tokens // form.group_size) * form.group_size
    places = streaming(form, rows * (tokens // form.group_size + count), rows * block, tokens)
    shared = Planned(*({**moving, "packing": max(packing, places)} for packing in packings))
    return LayerPlan(own, shared, means if clusters.mapped else 0), records
