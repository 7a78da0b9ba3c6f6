"""A layer that keeps something of what it stores, to choose by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import shown
from ..history.base import Sealed
from ..model.attention_call import AttentionCall
from ..predictors.base import Learner
from ..stores.freezable import FreezableStore
from .selecting import Selecting
from .selective_plan import SelectivePlan
from .step import Step


class LearningLayer(SelectivePlan):
    """The side of `SelectiveLayer` that learns. `selecting` is set by the cache; None: the cache is exact, and nothing
    is learnt."""

    selecting: Selecting | None = None
    lesson: dict[str, Any] | None = None
    """What was learnt elsewhere of the queries of what this layer is about to be given: see `Learner.lesson`."""
    refused: str | None = None
    """Why what was learnt elsewhere was of no use."""

    def _clear(self) -> None:
        super()._clear()
        self.predictor: Learner | None = None

    def make_predictor(self) -> Learner:
        """The predictor of this layer's history, which has just been made; a learner if nobody asks it to `choose`."""
        raise NotImplementedError(f"{type(self).__name__} names no predictor")

    @property
    def tables_nbytes(self) -> int:
        return super().tables_nbytes + (0 if self.predictor is None else self.predictor.tables_nbytes)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if self.selecting is not None:
            self.predictor, lesson = self.make_predictor(), self.lesson
            if lesson is not None:
                self.teach(lesson)

    def teach(self, lesson: dict[str, Any]) -> None:
        """Learn anew of what is held, beginning with what was learnt elsewhere. A lesson that is none of this layer's
        is `refused`, and what was learnt stays."""
        self.lesson, self.refused = lesson, None
        if self.predictor is None:
            return
        taught = self.make_predictor()
        try:
            taught.restore({**lesson, "units": 0})
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            taught.close()
            what = f"{type(error).__name__}: {shown(str(error), 200)}"
            self.lesson, self.refused = None, f"layer {self.layer_idx} learns anew ({what})"
            return
        self.predictor.close()
        self.predictor = taught
        tokens, group = 0, self.history.form.group_size
        for block in self.history.blocks(self.history.units * group):
            tokens += block.keys.shape[2]
            stored = partial(self._keys, tokens)
            self.learn_keys(Sealed(tokens // group, tokens, [(block.keys, block.values)], stored))

    def learn_rest(self) -> None:
        """What was postponed is found out of all that is stored; without queries, which have gone."""
        if self.predictor is None or not (units := self.history.units) or self.predictor.ready(units):
            return
        tokens = units * self.history.form.group_size
        self.learn_keys(Sealed(units, tokens, [], partial(self._keys, tokens)))

    def _keys(self, tokens: int) -> Iterator[torch.Tensor]:
        return (block.keys for block in self.history.blocks(tokens))

    def learn(self, sealed: Sealed, call: AttentionCall, step: Step) -> None:
        if self.predictor is not None:
            self.predictor.learn(sealed, call.query.detach(), step.visible(call.mask))

    def learn_keys(self, sealed: Sealed) -> None:
        if self.predictor is not None:
            form, device = self.history.form, self.history.device
            shape = self.history.rows, form.num_key_heads, 0, form.key_dim
            self.predictor.learn(sealed, torch.empty(shape, dtype=form.dtype, device=device), None)

    # --- changes and contexts ----------------------------------------------------------------------------------

    def truncated(self, units: int) -> None:
        if self.predictor is not None:
            self.predictor.truncate(units)

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        if self.predictor is not None:
            self.predictor.select_rows(self.rows.expand(rows))

    def reset(self) -> None:
        super().reset()
        self.lesson = None

    def close(self) -> None:
        if self.predictor is not None:
            self.predictor.close()
        super().close()

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "predictor": None if self.predictor is None else self.predictor.capture()}

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        super().restore(tree, parts, device)
        if self.selecting is not None and self._filled:
            self.predictor = self.make_predictor()
            if tree["predictor"] is not None:
                self.predictor.restore({**tree["predictor"], "units": self.history.units})
