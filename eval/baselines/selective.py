"""What the selective baselines share: compact keys made of a prompt's keys, by which units are ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_offload_cache.config import OffloadConfig, SelectiveConfig
from hf_offload_cache.core import LayerKind, SelectiveCache, SelectiveLayer
from hf_offload_cache.fetch import Choice
from hf_offload_cache.history import Sealed
from hf_offload_cache.memory import LayerPlan, MemoryAccount, Planned
from hf_offload_cache.predictors import Query, largest, with_sinks

from .compact_keys import CompactKeys

LEAST_TOKENS = 512
"""Sealed tokens that projections are made of."""
_PIECE = 4096
"""Tokens that are projected at a time: what bounds float32 copies."""

Directions = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Projections (P, W, rank) float32, from second moments (P, W, W) and mean absolute values (P, W) of keys."""


@dataclass(frozen=True)
class BaselineConfig(SelectiveConfig):
    """One token a record and no reuse, unless a method has it otherwise."""

    stored_format: ClassVar[tuple[str, ...]] = (*SelectiveConfig.stored_format, "rank", "summary_dtype")

    group_size: int | None = 1
    reuse_capacity: int = 0
    rank: int | None = None
    """Width of one projection. None: an eighth of the width of what is projected."""
    summary_dtype: str = "int8"
    """Type of the compact keys: "int8", "bfloat16" or "float32"."""


class ProjectedKeys:
    """A predictor with compact keys of each head, or of all heads joined, whose projections `directions` makes of the
    prompt. All rows of a batch must be of one length. See `Predictor`.

    Args:
        group_size: tokens a unit.
        heads: Hk, those of a sequence.
        apart: key heads that each have rows of their own; 1: they lie together.
        joint: one projection of all key heads joined, instead of one a head.
    """

    def __init__(
        self, directions: Directions, joint: bool, group_size: int, heads: int, apart: int, config: BaselineConfig,
        account: MemoryAccount,
    ) -> None:  # fmt: skip
        self.directions, self.joint = directions, joint
        self.group_size, self.heads, self.apart, self.config = group_size, heads, apart, config
        self.account = account
        self.compact: CompactKeys | None = None

    def ready(self, units: int) -> bool:
        return self.compact is not None and self.compact.tokens == units * self.group_size

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """As `Predictor.learn`. Raises `ValueError` for rows with padding."""
        if visible is not None and not bool(visible[:, : sealed.tokens].all()):
            raise ValueError("a baseline takes rows of one length: leave padding out")
        known = 0 if self.compact is None else self.compact.tokens
        if self.compact is not None and known + sealed.fresh == sealed.tokens:
            self._take(sealed.keys)
        elif sealed.tokens >= LEAST_TOKENS:
            keys = (lambda: iter(sealed.keys)) if sealed.fresh == sealed.tokens else sealed.stored
            self._fit(keys, sealed.tokens, len(queries))

    def _fit(self, keys: Callable[[], Iterator[torch.Tensor]], tokens: int, sequences: int) -> None:
        """Make the compact keys from all sealed keys: two passes."""
        self.close()
        moment: Any = 0.0
        magnitude: Any = 0.0
        for flat in self._pieces(keys(), sequences):
            moment = moment + torch.einsum("tpw,tpv->pwv", flat, flat)
            magnitude = magnitude + flat.abs().sum(0)
        rows, width = sequences * tokens, moment.shape[-1]
        projection = self.directions(moment, magnitude / rows, min(width, self.config.rank or width // 8))
        deviation = torch.einsum("pwr,pwv,pvr->pr", projection, moment, projection).div(rows).clamp_min(0).sqrt()
        dtype = getattr(torch, self.config.summary_dtype)
        self.compact = CompactKeys(projection, deviation, dtype, self.heads, sequences, self.account)
        self.compact.reserve(tokens)
        self._take(keys())

    def _take(self, keys: Iterable[torch.Tensor]) -> None:
        assert self.compact is not None
        for part in keys:
            for start in range(0, part.shape[2], _PIECE):
                self.compact.append(part[:, :, start : start + _PIECE])

    def _pieces(self, keys: Iterator[torch.Tensor], sequences: int) -> Iterator[torch.Tensor]:
        """Keys as float32 (t, P, W)."""
        for part in keys:
            for own in part.reshape(sequences, -1, *part.shape[2:]):
                for start in range(0, own.shape[1], _PIECE):
                    flat = own[:, start : start + _PIECE].transpose(0, 1).float()
                    yield flat.flatten(1)[:, None] if self.joint else flat

    def select(self, query: Query, budget: int, guess: bool) -> Choice:
        """Sinks, and the units with the most important token by attention weights, summed over the heads of a row."""
        assert self.compact is not None
        if query.visible is not None:
            raise ValueError("a baseline takes rows of one length: leave padding out")
        rows = []
        for row, states in enumerate(query.states):
            weights = torch.softmax(self.compact.scores(states, row) * query.scaling, -1)
            rows.append(weights.unflatten(0, (self.apart, -1)).sum(1).unflatten(1, (-1, self.group_size)).amax(2))
        importance = with_sinks(torch.cat(rows).cpu().numpy(), self.config.num_sinks, self.group_size)
        units = np.sort(largest(importance, min(budget, importance.shape[1])), 1)
        return Choice(units, importance=np.take_along_axis(importance, units, 1))

    def truncate(self, units: int) -> None:
        if self.compact is not None:
            self.compact.truncate(units * self.group_size)

    def select_rows(self, rows: torch.Tensor) -> None:
        if self.compact is not None:
            self.compact.select_rows(rows[:: self.apart] // self.apart)

    def lesson(self) -> dict[str, Any] | None:
        return None

    def capture(self) -> dict[str, Any]:
        return {"compact": None if self.compact is None else self.compact.capture()}

    def restore(self, tree: dict[str, Any]) -> None:
        if tree["compact"] is not None:
            self.compact = CompactKeys.restore(tree["compact"], self.account)

    @property
    def tables_nbytes(self) -> int:
        return 0

    def close(self) -> None:
        if self.compact is not None:
            self.compact.close()
            self.compact = None


class BaselineLayer(SelectiveLayer):
    """A layer with a `ProjectedKeys`. A method gives `directions`, and says how heads go together."""

    directions: ClassVar[Directions]
    joint: ClassVar[bool] = False

    def make_predictor(self) -> ProjectedKeys:
        config, form, apart = self.shared.config, self.history.form, self.rows.heads
        assert isinstance(config, BaselineConfig)
        account = self.shared.storage.account
        directions, heads = type(self).directions, form.num_key_heads * apart
        return ProjectedKeys(directions, self.joint, form.group_size, heads, apart, config, account)

    @classmethod
    def plan_predictor(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        assert isinstance(config, BaselineConfig)
        width = kind.form.key_width if cls.joint else kind.form.key_dim
        parts = kind.rows * kind.form.key_width // width  # projected keys of a token, all sequences'
        rank, item = min(width, config.rank or width // 8), getattr(torch, config.summary_dtype).itemsize
        room = context + max(128, context // 32)
        held = {"compact keys": parts * room * rank * item, "adapters": parts // kind.batch * width * rank * 4}
        return LayerPlan(Planned.always(held))


class BaselineCache(SelectiveCache):
    """A cache of such layers; every layer has the same share, as the papers' methods have it."""

    config_class: ClassVar[type[OffloadConfig]] = BaselineConfig
