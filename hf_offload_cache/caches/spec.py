"""`SpecCache`: SpeCache (section 3). A copy in a few bits guesses, what was stored answers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from ..config import OffloadConfig
from ..core.guessed_token import (
    guess_of,
    is_a_guess,
    may_guess,
    most_ids,
    most_positions,
    reason_against_guesses,
    record_past,
    with_guess,
    without_guess,
)
from ..core.offload_layer import OffloadLayer
from ..core.selective_cache import SelectiveCache
from ..core.step import Step
from ..errors import not_whole, shown
from ..memory.search import Search
from ..model.foreign_hooks import ForeignHooks
from ..model.geometry import Geometry
from .spec_config import SpecConfig
from .spec_fit import fit_spec
from .spec_layer import SpecLayer
from .spec_plan import UNDER_WAY
from .spec_top_up import TopUp


class SpecCache(SelectiveCache):
    """Keeps the KV cache on disk, and in memory a copy of it in a few bits.

    `model.generate(..., past_key_values=SpecCache(model))`. See `SpecConfig` for the fields. Prefill is exact. A step
    of decoding attends to every token: to the first and the latest ones, and to those that matter most, as they were
    stored, to the others as the copy has them. Which matter most a guess of the next token says, which is decoded
    beside each token, so that they are read while the rest of the step is computed.
    """

    config_class: ClassVar[type[OffloadConfig]] = SpecConfig
    layer_class: ClassVar[type[OffloadLayer]] = SpecLayer
    config: SpecConfig

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        self._guess: torch.Tensor | None = None
        self._can_guess, self._most_positions, self._most_ids = True, most_positions(model), most_ids(model)
        self._watchers, self._told_of_watchers = ForeignHooks([model]), False
        self._top_up = TopUp(self.config.top_up)
        for layer in self.selective:
            if isinstance(layer, SpecLayer):
                layer.top_up = self._top_up
        if self.config.records_apart and any(weight.is_cuda for weight in model.parameters()):
            self.storage.pinned = True
        self._recording: list[Any] = []
        """Layers of transformers' own that keep, for this step, what a guess pushes out."""
        if self.config.exact or not self.config.speculative or not self.config.chosen:
            return
        if reason := reason_against_guesses(model, self.layers):
            self._can_guess = False
            self._warn(f"speculative=False for {type(model).__name__}: {reason}")
            return
        layers = [layer for layer in self.selective if isinstance(layer, SpecLayer)]
        for place, layer in enumerate(layers):
            layer.collects = layers[(place - UNDER_WAY) % len(layers)]

    @property
    def reads_ahead(self) -> int:
        return UNDER_WAY if self.config.speculative else 0

    @classmethod
    def shortfalls(cls, config: Any, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        return []

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        return super().choose_fields(search, geometry) if search.fields.get("exact") else fit_spec(search)

    # --- the step ----------------------------------------------------------------------------------------------

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        self._stop_recording()  # of a step that failed
        changed = super().begin_step(model, kwargs)
        step = self.shared.step
        call = kwargs if changed is None else changed
        if step is None or not self._guesses(step, call, model.config):
            self._guess = None
            return changed
        step.guessed = 1
        self._recording = record_past(self.layers)
        if self._guess is None:
            self._guess = self._decode_before(model, call)
            if self._guess is None:
                step.guessed = 0
                return changed
            self._recording = record_past(self.layers)
            step.started = time.perf_counter()
        return with_guess(call, self._guess)

    def _guesses(self, step: Step, call: dict[str, Any], model_config: Any) -> bool:
        """Whether a guess is decoded beside the token of this step."""
        config = self.config
        selecting = self.selecting
        if selecting is None or not selecting.worthwhile or self.recording:
            return False
        if not (config.speculative and config.chosen and self._can_guess):
            return False
        there = self._most_positions is None or step.history + 2 <= self._most_positions
        if not there or not step.selects or step.tokens != 1 or not may_guess(call, model_config):
            return False
        if not any(isinstance(layer, SpecLayer) and layer.has_copy for layer in self.selective):
            return False  # nothing could be fetched for it
        return not self._is_watched()

    def _is_watched(self) -> bool:
        """Whether hooks of others would see the guess as the latest token. The cache says so once."""
        hook = self._watchers.find()
        if hook is not None and not self._told_of_watchers:
            self._told_of_watchers = True
            self._warn(
                f"no guess is decoded while others' forward hooks are on the model ({hook}), because they would see it "
                "as the latest token: remove them for guesses, or pass speculative=False"
            )
        return hook is not None

    def _decode_before(self, model: torch.nn.Module, call: dict[str, Any]) -> torch.Tensor | None:
        """Decode the token once, so that there is a guess of the next, and what it attends to is fetched; nothing of it
        is kept, counted or seen."""
        with torch.no_grad():
            output = model.forward(**call)
        self._take_back_guess()
        guess = guess_of(output, self._most_ids)
        self._can_guess = guess is not None
        return guess

    def _take_back_guess(self) -> None:
        """What other layers hold of the guess is gone; ours have kept nothing of it."""
        layer: Any
        for layer in self._with_length:
            if not isinstance(layer, OffloadLayer):
                layer.crop(-1)
        self._stop_recording()

    def _stop_recording(self) -> None:
        for layer in self._recording:
            layer.record_past = False
        self._recording = []

    def end_step(self, output: Any = None) -> Any:
        step = self.shared.step
        seconds = 0.0 if step is None or step.started is None else time.perf_counter() - step.started
        if step is not None and step.guessed:
            self._guess = guess_of(output, self._most_ids)
            self._take_back_guess()
            output = without_guess(output)
        changed = super().end_step(output)
        if told := self._top_up.end_step(seconds):
            self._warn(told)
        return output if changed is None and step is not None and step.guessed else changed

    # --- changes -----------------------------------------------------------------------------------------------

    def rest(self) -> None:
        super().rest()
        for layer in self.selective:
            assert isinstance(layer, SpecLayer)
            layer.drop_chosen()

    def crop(self, tokens_to_remove: int) -> None:
        self._guess = None
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._select_guess(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        before = self.sequences
        super().batch_repeat_interleave(repeats)
        self._select_guess(torch.arange(before, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_guess(torch.as_tensor(indices, device="cpu"))

    def _select_guess(self, rows: torch.Tensor) -> None:
        """Row i of the guess becomes what row `rows[i]` is; a guess of several rows a sequence is dropped."""
        if self._guess is not None:
            self._guess = self._guess[rows.to(self._guess.device)] if self._rows_of_ids == 1 else None

    def forget(self) -> None:
        self._stop_recording()
        super().forget()

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "guess": self._guess if self._rows_of_ids == 1 else None}

    def restore(self, tree: dict[str, Any]) -> None:
        super().restore(tree)
        guess = tree.get("guess")  # contexts of before have none
        if guess is not None and not is_a_guess(guess, len(tree["ids"]), self.model):
            what = f"the guess is {shown(guess)}, and no token of the model's for each of {len(tree['ids'])} sequences"
            raise not_whole("the state", what)
        self._guess = guess
