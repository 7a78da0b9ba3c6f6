"""A layer of `DiskSwapCache`: keys predict from memory, groups come from disk (KVSwap, sections 3.1 to 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..core.offload_layer import OffloadLayer
from ..core.shared import Shared
from ..errors import ContextError
from ..fetch.selection_buffer import SelectionBuffer
from ..model.attention import AttentionFunction, attend_once, no_backward, visible_columns
from ..predictors.directions import (
    fitting_bytes,
    parts,
    principal_directions,
    query_moment,
    reconstruction,
    roots_of,
    scaled_directions,
)
from ..predictors.layer_budgets import LATEST_QUERIES, SPACING
from ..predictors.low_rank import LowRankKeys, largest
from ..stores.freezable import FreezableStore
from .disk_swap_config import DiskSwapConfig

_REFIT = 8
"""An adapter from the prompt, and the 8-bit scale, are remade when the length has grown this many times."""
_LEAST_QUERIES = 32
"""Of one call, for them to tell in what metric keys are best approximated."""
_MEASURE_AGAIN = 2
"""Layer budgets are measured anew when the length has grown this many times."""


class DiskSwapLayer(OffloadLayer):
    """A layer with compact keys in memory, a reuse buffer, and groups selected anew for every query."""

    def __init__(self, shared: Shared, layer_idx: int, **kwargs: Any) -> None:
        assert isinstance(shared.config, DiskSwapConfig)
        self.settings = shared.config
        self.buffer: SelectionBuffer | None = None
        self.learn: Callable[[int, torch.Tensor], None] | None = None
        self.adapter: torch.Tensor | None = None
        self.scaling = 1.0
        self.summary: LowRankKeys | None = None
        self.latest_queries: torch.Tensor | None = None
        self._queries: torch.Tensor | None = None  # of the call under way, if they are many
        self._fitted_at = 0
        self._measured_at = 0
        self._candidates: np.ndarray | None = None
        super().__init__(shared, layer_idx, **kwargs)

    # --- the summary -------------------------------------------------------------------------------------------

    def _rank(self) -> int:
        width = self.history.form.key_width
        return min(width, self.settings.rank or max(16, min(160, width // 4)))

    def summarise(self, keys: list[torch.Tensor], visible: torch.Tensor | None) -> None:
        tokens = self.history.num_groups * self.history.form.group_size
        fresh = sum(part.shape[2] for part in keys)
        grown = tokens >= _REFIT * self._fitted_at
        if self.summary is not None and not grown and self.summary.tokens + fresh == tokens:
            for part in keys:
                self.summary.append(part)
        elif self.adapter is not None or tokens >= max(4 * self._rank(), 512):
            self.fit(lambda: iter(keys) if fresh == tokens else self._stored_keys(), visible, tokens)

    def _stored_keys(self) -> Iterator[torch.Tensor]:
        return (keys for keys, _ in self.history.blocks(self.history.num_groups))

    def fit(self, keys: Callable[[], Iterator[torch.Tensor]], visible: torch.Tensor | None, tokens: int) -> None:
        """Make the summary from all sealed keys: two passes over `keys`, which are (B, Hk, t, D) parts in order."""
        with self.shared.account.holding("fitting", fitting_bytes(self.history.form.key_width, self.batch)):
            adapter, queries, deviation = self._directions(keys(), visible, tokens)
        if self.summary is not None:
            self.summary.close()
        dtype, workspace = getattr(torch, self.settings.summary_dtype), self.buffer.workspace if self.buffer else None
        self.summary = LowRankKeys(
            adapter, deviation, dtype, self.history.form.num_key_heads, self.batch, self.shared.account, workspace,
            queries,
        )  # fmt: skip
        self.summary.reserve(max(tokens, self.settings.max_context or 0))
        for part in keys():
            self.summary.append(part)
        self._fitted_at = tokens

    def _directions(
        self, keys: Iterator[torch.Tensor], visible: torch.Tensor | None, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The adapter (Hk D, r) for `keys`, calibrated or made of them, the same for queries, and the deviation (r,) of
        the components of compact keys."""
        width = self.history.form.key_width
        moment = torch.zeros(width, width, device=self.history.device)
        position = 0
        for part in (piece for block in keys for piece in parts(block)):
            flat = part.transpose(1, 2).flatten(2).float()
            if visible is not None:
                flat = flat * visible[:, position : position + part.shape[2], None]
            position += part.shape[2]
            flat = flat.flatten(0, 1)
            moment.addmm_(flat.t(), flat)
        rows = self.batch * tokens if visible is None else max(1, int(visible[:, :tokens].expand(self.batch, -1).sum()))
        seen = self._queries
        if self.adapter is not None:
            adapter = self.adapter.to(self.history.device)
        elif seen is None or self.settings.selection != "default":
            adapter = principal_directions(moment, min(self._rank(), rows))
        else:
            roots = roots_of(query_moment(seen, self.history.form.num_key_heads))
            adapter = scaled_directions(moment, roots, min(self._rank(), rows))
        deviation = ((moment @ adapter * adapter).sum(0) / rows).clamp_min(0).sqrt()
        return adapter, reconstruction(moment, adapter), deviation

    # --- contexts ----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        return {
            **super().capture(),
            "summary": None if self.summary is None else self.summary.capture(),
            "adapter": self.adapter,
            "fitted_at": self._fitted_at,
            "measured_at": self._measured_at,
            "latest_queries": self.latest_queries,
            "scaling": self.scaling,
        }

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        summary = tree["summary"]
        if self.buffer is not None and summary is not None:
            self._check_summary(summary, **tree["history"])
            self.summary = LowRankKeys.restore(summary, self.shared.account, self.buffer.workspace)
            self.summary.reserve(self.settings.max_context or 0)
        if self.buffer is not None and tree["history"] is not None:
            self._check_learnt(tree["adapter"], tree["latest_queries"], **tree["history"])
        self.adapter = tree["adapter"]
        self._fitted_at, self._measured_at = tree["fitted_at"], tree["measured_at"]
        self.latest_queries, self.scaling = tree["latest_queries"], tree["scaling"]
        super().restore(tree, parts, device)

    def _check_learnt(
        self,
        adapter: torch.Tensor | None,
        queries: torch.Tensor | None,
        form: dict[str, Any],
        table: torch.Tensor,
        **rest: Any,
    ) -> None:
        """Raises `ContextError` unless a captured adapter and the latest queries are for the captured keys."""
        heads, dim = form["num_key_heads"], form["key_dim"]
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (adapter, queries)]
        right = adapter is None or (adapter.ndim == 2 and adapter.shape[0] == heads * dim)
        if queries is not None:
            right = right and queries.ndim == 4 and (queries.shape[0], queries.shape[3]) == (len(table), dim)
            right = right and queries.shape[1] % heads == 0
        if not right:
            raise ContextError(
                f"layer {self.layer_idx} of the context does not hold together: adapter and latest queries are "
                f"{shapes}, for {len(table)} sequences and {heads} key heads of {dim}"
            )

    def _check_summary(self, summary: dict[str, Any], form: dict[str, Any], table: torch.Tensor, **rest: Any) -> None:
        """Raises `ContextError` unless a captured summary belongs to the captured groups."""
        keys, adapter = summary["keys"], summary["adapter"]
        sealed, rank = table.shape[1] * form["group_size"], keys.shape[-1]
        if keys.shape != (len(table), sealed, rank) or adapter.shape != (form["num_key_heads"], form["key_dim"], rank):
            raise ContextError(
                f"layer {self.layer_idx} of the context does not hold together: its compact keys are "
                f"{tuple(keys.shape)}, by an adapter of {tuple(adapter.shape)}, for {len(table)} x {sealed} tokens"
            )

    # --- decoding ----------------------------------------------------------------------------------------------

    def attend(self, tag: Any, attention: AttentionFunction, module: torch.nn.Module, query: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        self.scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        if self.learn is not None:
            self.learn(self.layer_idx, query)
        measured = self.settings.layer_budgets == "measured" and self.settings.selection == "default"
        if measured and query.shape[2] > 1 and self.length >= _MEASURE_AGAIN * self._measured_at:
            self.latest_queries = query[:, :, -LATEST_QUERIES * SPACING :][:, :, ::SPACING].detach().clone()
        self._queries = query.detach() if query.shape[2] >= _LEAST_QUERIES else None
        try:
            return super().attend(tag, attention, module, query, *args, **kwargs)
        finally:
            self._queries = None

    def decode(
        self,
        attention: AttentionFunction,
        module: torch.nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over the selected groups and the tail, by the model's own function on the gathered keys."""
        buffer = self.buffer
        if buffer is not None:
            buffer.see(visible_columns(mask))
        if buffer is None or not self._ready(buffer):
            return super().decode(attention, module, query, mask, *args, **kwargs)
        self.shared.release_stream_buffers()
        groups = buffer.decided(self.layer_idx) if self.settings.selection == "paper" else None
        if groups is None:
            with self.shared.timeline.span("rank", self.layer_idx):
                groups = self.select(query, buffer)
        with self.shared.timeline.span("gather", self.layer_idx):
            entries = buffer.gather(self, groups)
        keys, values = self.history.form.split(entries)
        if mask is not None:
            mask = mask.expand(self.batch, -1, -1, -1).gather(-1, self._columns(groups)[:, None, None])
        counters = self.shared.counters
        counters.tokens_visible += self.batch * self.length
        counters.tokens_attended += entries.shape[0] * entries.shape[1]
        with torch.no_grad():
            output, weights = attend_once(attention, module, query, keys, values, mask, *args, **kwargs)
        return no_backward(output, query), weights

    def _ready(self, buffer: SelectionBuffer) -> bool:
        """Groups can be chosen: there is nothing to choose from, or the summary covers all of them."""
        if self.history.num_groups <= buffer.groups_selected(self):
            return True
        summarised = 0 if self.summary is None else self.summary.tokens
        return summarised == self.history.num_groups * self.history.form.group_size

    def _columns(self, groups: np.ndarray) -> torch.Tensor:
        """Positions (B, tokens) in the history of what `gather` returns for `groups`."""
        group = self.history.form.group_size
        chosen = (groups[:, :, None] * group + np.arange(group)).reshape(self.batch, -1)
        latest = np.arange(self.history.num_groups * group, self.length)
        columns = np.concatenate([chosen, np.broadcast_to(latest, (self.batch, len(latest)))], 1)
        return torch.from_numpy(columns).to(self.history.device)

    def select(self, query: torch.Tensor, buffer: SelectionBuffer, *, guess: bool = False) -> np.ndarray:
        """The groups (B, M), ascending, that query (B, H, 1, D) should attend to: sinks and the most important.

        `guess`: the query is one, so only what was a candidate in the last step is looked at.
        """
        group, count = self.history.form.group_size, self.history.num_groups
        wanted = buffer.groups_selected(self)
        if count <= wanted or self.summary is None:
            return np.broadcast_to(np.arange(count), (self.batch, count))
        if guess and self._candidates is not None and self.settings.selection == "default":
            among = self.summary.rank_among(query[:, :, 0], self.scaling, group, self._candidates)
            best = largest(among, min(wanted, among.shape[1]))
            return np.sort(np.take_along_axis(self._candidates, best, 1), 1)
        seen = None if buffer.visible is None else buffer.visible[:, : count * group].expand(self.batch, -1)
        if self.settings.selection == "random":
            importance = torch.rand(self.batch, count, generator=buffer.generator).numpy()
            return np.sort(largest(self._with_sinks(importance, seen, group), wanted), 1)
        tail = None if self.settings.target_mass is None else self._tail_scores(query, buffer)
        rule = self.settings.selection
        ranking = self.summary.rank(query[:, :, 0], self.scaling, group, wanted, rule, seen, tail)
        self._candidates = ranking.candidates
        mass = ranking.importance if self.settings.target_mass is None else ranking.importance.copy()
        chosen = largest(self._with_sinks(ranking.importance, seen, group), wanted)
        if self.settings.target_mass is not None and rule == "default":
            chosen = self._enough(chosen, ranking.importance, mass, ranking.rest, query.shape[1])
        return np.sort(chosen, 1)

    def _with_sinks(self, importance: np.ndarray, seen: torch.Tensor | None, group: int) -> np.ndarray:
        """`importance` (B, groups), in place: sinks are above all, padding below all."""
        sinks = self.settings.num_sinks
        if seen is None:
            importance[:, : -(-sinks // group)] = np.inf
        else:
            tokens = seen.cpu().numpy()
            importance[~tokens.reshape(*importance.shape, group).any(-1)] = -np.inf
            positions = tokens.argmax(-1)[:, None] + np.arange(sinks)
            np.put_along_axis(importance, positions.clip(max=tokens.shape[1] - 1) // group, np.inf, 1)
        return importance

    def _enough(
        self, chosen: np.ndarray, importance: np.ndarray, mass: np.ndarray, rest: np.ndarray, heads: int
    ) -> np.ndarray:
        """As many of the groups `chosen` (B, M), most important first, as every row needs for `target_mass`."""
        assert self.settings.target_mass is not None
        order = np.argsort(-np.take_along_axis(importance, chosen, 1), 1, kind="stable")
        chosen = np.take_along_axis(chosen, order, 1)
        captured = rest[:, None] + np.cumsum(np.take_along_axis(mass, chosen, 1).clip(min=0), 1)
        reached = captured >= self.settings.target_mass * heads
        needed = np.where(reached.any(1), reached.argmax(1) + 1, chosen.shape[1]).max()
        counters = self.shared.counters
        counters.mass_captured += float(captured[:, needed - 1].sum()) / heads
        counters.mass_steps += len(chosen)
        return chosen[:, :needed]

    def _tail_scores(self, query: torch.Tensor, buffer: SelectionBuffer) -> np.ndarray:
        """Scaled scores (B, H, t), float32, of query (B, H, ·, D)'s last token against the tail's keys."""
        keys = self.history.form.split(self.history.tail.entries)[0]
        grouped = query[:, :, -1].unflatten(1, (keys.shape[1], -1))
        scores = (grouped @ keys.transpose(-1, -2)).float().flatten(1, 2) * self.scaling
        if buffer.visible is not None:
            hidden = ~buffer.visible[:, self.length - keys.shape[2] :]
            scores = scores.masked_fill(hidden[:, None], -1e30)
        return scores.cpu().numpy()

    def density(self, most: int) -> np.ndarray | None:
        """(most + 1,): the share of attention mass that the tail and the m best groups capture, by the prompt's latest
        queries and the compact keys, mean over queries, heads and rows. None where there is nothing to tell by.

        Forgets those queries.
        """
        queries, self.latest_queries = self.latest_queries, None
        buffer = self.buffer
        if queries is None or buffer is None or self.summary is None or not self._ready(buffer):
            return None
        self._measured_at = self.length
        group, count, curves = self.history.form.group_size, self.history.num_groups, []
        if queries.shape[0] != self.batch:
            return None
        seen = None if buffer.visible is None else buffer.visible[:, : count * group].expand(self.batch, -1)
        for query in queries.split(1, 2):
            tail = self._tail_scores(query, buffer)
            ranking = self.summary.rank(query[:, :, 0], self.scaling, group, min(most, count), "default", seen, tail)
            mass = -np.sort(-np.take_along_axis(ranking.importance, ranking.candidates, 1), 1)[:, :most]
            captured = (ranking.rest[:, None] + np.cumsum(mass, 1)).mean(0) / query.shape[1]
            captured = np.concatenate([[ranking.rest.mean() / query.shape[1]], captured])
            curves.append(np.pad(captured, (0, most + 1 - len(captured)), "edge"))
        return np.mean(curves, 0)

    def prefetch_for(self, query: torch.Tensor) -> None:
        """Start reading what the guessed query (B, H, 1, D) selects and no slot holds."""
        if self.buffer is not None and self.is_initialized and self.state == "tagged" and self._ready(self.buffer):
            self.buffer.prefetch(self, self.select(query, self.buffer, guess=True))

    # --- batch operations --------------------------------------------------------------------------------------

    def dropped(self, records: np.ndarray) -> None:
        if self.buffer is not None:
            self.buffer.forget(self, records)

    @property
    def tables_nbytes(self) -> int:
        tables = super().tables_nbytes + (0 if self.buffer is None else self.buffer.table_nbytes(self))
        return tables + (0 if self.latest_queries is None else self.latest_queries.nbytes)

    def truncated(self, num_groups: int) -> None:
        self._candidates = None
        if self.summary is not None:
            self.summary.truncate(num_groups * self.history.form.group_size)

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        self._candidates = None
        if self.latest_queries is not None:
            self.latest_queries = self.latest_queries[rows.to(self.latest_queries.device)]
        if self.buffer is not None:
            self.buffer.rows_changed(self)
        if self.summary is not None:
            self.summary.select_rows(rows)

    def _clear(self) -> None:
        super()._clear()
        if self.summary is not None:
            self.summary.close()
            self.summary = None
        self._fitted_at = self._measured_at = 0
        self.latest_queries = self._candidates = None
        if self.buffer is not None:
            self.buffer.drop(self)
