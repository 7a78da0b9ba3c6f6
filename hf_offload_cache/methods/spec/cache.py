"""`SpecCache` (SpeCache, section 3.3): the speculative token, pre-decoding (algorithm 2), and the step with a guess."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...config import OffloadConfig
from ...core.layer import OffloadLayer
from ...core.layers import has_linear_state
from ...core.selective_cache import SelectiveCache
from ...core.step import Step
from ...errors import not_whole, shown
from ...memory.fit import LEAST_RECENT, SHORT_TAIL, Search
from ...model.foreign_hooks import ForeignHooks
from ...model.geometry import Geometry
from ...model.look_ahead import length_dependent, rotary_kinds
from .attention import UNDER_WAY
from .config import SpecConfig
from .layer import SpecLayer, TopUp

# The speculative token: a guess of the next token, decoded with each token; the model's caller never sees it

_OF_TOKENS = ("position_ids", "cache_position")
"""Arguments with an entry for each new token on their last axis."""
_ALIKE = ("token_type_ids", "mm_token_type_ids")
"""Likewise; a guess gets the entry of the token before it."""
_KNOWN = {"input_ids", "attention_mask", *_OF_TOKENS, *_ALIKE}
_OF_ALL_TOKENS = ("output_attentions", "output_router_logits")
"""Outputs that cover all tokens of a forward, a guess included. An argument or the model's config requests them."""


def reason_against_guesses(model: Any, layers: list[Any]) -> str | None:
    """Reason why a model cannot decode a guess with its token; None: it can."""
    if not getattr(model, "can_generate", lambda: False)():
        return "it does not generate text"
    keep = 0
    for layer in layers:
        known = type(layer).__module__ == "transformers.cache_utils" or isinstance(layer, OffloadLayer)
        keep += has_linear_state(layer) or not known
    if keep:
        return f"{keep} of its layers cannot process two tokens and keep only one"
    return length_dependent(model)


def most_positions(model: Any) -> int | None:
    """Number of a model's positions. None: rotary embeddings, which have no upper limit."""
    if rotary_kinds(model):
        return None
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def most_ids(model: Any) -> int | None:
    """Number of ids that a model has embeddings for; None: unknown."""
    try:
        known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:
        known = None
    return getattr(model.config.get_text_config(), "vocab_size", None) if known is None else known


def is_a_guess(guess: Any, sequences: int, model: Any) -> bool:
    """True if `guess` is int64 ids (sequences, 1) that the model has embeddings for."""
    if not isinstance(guess, torch.Tensor) or guess.dtype != torch.int64 or guess.shape != (sequences, 1):
        return False
    known = most_ids(model)
    return bool((guess >= 0).all()) and (known is None or bool((guess < known).all()))


def record_past(layers: list[Any]) -> list[Any]:
    """Let transformers' own layers record the tokens that a guess pushes out of their windows. Returns the layers that
    did not record before."""
    silent = [layer for layer in layers if getattr(layer, "record_past", True) is False]
    for layer in silent:
        layer.activate_past_recording()
    return silent


def may_guess(call: dict[str, Any], config: Any) -> bool:
    """True if a guess can be added to this call: it has one token a sequence, known arguments, and outputs that a guess
    can be removed from. `config`: the model's."""
    ids, mask, keep = (call.get(name) for name in ("input_ids", "attention_mask", "logits_to_keep"))
    if ids is None or ids.ndim != 2 or ids.shape[1] != 1 or call.get("return_dict") is False:
        return False
    if isinstance(keep, torch.Tensor) or (mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2)):
        return False
    for name in _OF_ALL_TOKENS:
        requested = call.get(name)
        if getattr(config, name, False) if requested is None else requested:
            return False
    others = (value for name, value in call.items() if name not in _KNOWN)
    return not any(isinstance(value, torch.Tensor) for value in others)


def with_guess(call: dict[str, Any], guess: torch.Tensor) -> dict[str, Any]:
    """The call with `guess`, ids (B, 1), after its token."""
    ids, mask, keep = call["input_ids"], call.get("attention_mask"), call.get("logits_to_keep")
    changed = {**call, "input_ids": torch.cat([ids, guess.to(ids.device)], 1)}
    if mask is not None:
        changed["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, -1:])], 1)
    for name in _OF_TOKENS:
        if (places := call.get(name)) is not None:
            changed[name] = torch.cat([places, places[..., -1:] + 1], -1)
    for name in _ALIKE:
        if (kinds := call.get(name)) is not None:
            changed[name] = torch.cat([kinds, kinds[..., -1:]], -1)
    if keep:
        changed["logits_to_keep"] = keep + 1
    return changed


def guess_of(output: Any, known: int | None) -> torch.Tensor | None:
    """Most likely token (B, 1) after the last one of a model's output. None if the output has no logits, or logits of
    more than the `known` ids (codes that no text id stands for)."""
    logits = getattr(output, "logits", None)
    if logits is None or (known is not None and logits.shape[-1] > known):
        return None
    return logits[:, -1].argmax(-1, keepdim=True)


def without_guess(output: Any) -> Any:
    """Remove the guess from a model's output, in place."""
    output.logits = output.logits[:, :-1]
    if (states := getattr(output, "hidden_states", None)) is not None:
        output.hidden_states = tuple(hidden[..., :-1, :] for hidden in states)
    return output


# The best fields of `SpecCache` for a budget

_COPIES = ((4, 64), (2, 32), (2, 64), (1, 32), (1, 64))
"""`bits` and `quant_group` of a copy, best first."""


def fit_spec(search: Search[SpecConfig]) -> SpecConfig:
    """The copy with most bits that fits, then as many full-precision entries as fit, up to 256 a key head.

    If not even the smallest copy fits, `num_recent` shrinks, then `num_selected`. Raises `BudgetError` with the minimum
    memory needed.
    """
    chosen = search.first_fit(_tried(search))
    return search.config(search.wider_streams(search.most(chosen, "num_selected", 256)))


def _tried(search: Search[SpecConfig]) -> Iterator[dict[str, Any]]:
    copies = [{"bits": bits, "quant_group": group} for bits, group in _COPIES]
    for copy in copies:
        yield from search.group([{"num_selected": 64, **copy, **streams} for streams in search.all_streams()])
    for selected in (64, 32, 16, 8, 4):
        for copy in copies[:-3:-1]:  # with few tokens, those that wait to be quantised weigh more
            tails = search.least_streams(SHORT_TAIL), search.least_streams(LEAST_RECENT)
            yield from search.group([{"num_selected": selected, **copy, **streams} for streams in tails])


class SpecCache(SelectiveCache):
    """SpeCache: keeps the KV cache on disk and a low-bit copy of it in memory.

    `model.generate(..., past_key_values=SpecCache(model))`. See `SpecConfig` for the fields. Prefill is exact. A
    decoding step attends to every token. The first, the latest and the top-k tokens are in full precision, the others
    come from the copy. A guess of the next token is decoded with each token and predicts the next step's top-k, which
    is prefetched while the rest of the step runs.
    """

    config_class: ClassVar[type[OffloadConfig]] = SpecConfig
    layer_class: ClassVar[type[OffloadLayer]] = SpecLayer
    config: SpecConfig

    def __init__(
        self, model: Any, path: str | Path | None = None, config: OffloadConfig | str | Path | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        self._guess: torch.Tensor | None = None
        """Ids (B, 1) that are decoded with the next token."""
        self._can_guess = True
        self._most_positions: int | None = None
        self._most_ids: int | None = None
        self._watchers, self._told_of_watchers = ForeignHooks([]), False
        self._top_up = TopUp(False)
        self._recording: list[Any] = []
        """Transformers' own layers that record, for this step, the tokens that a guess pushes out."""
        super().__init__(model, path, config, **fields)

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        self._most_positions, self._most_ids = most_positions(model), most_ids(model)
        self._watchers, self._top_up = ForeignHooks([model]), TopUp(self.config.top_up)
        for layer in self.selective:
            if isinstance(layer, SpecLayer):
                layer.top_up = self._top_up
        if self.selecting is None or not self.config.speculative or not self.config.chosen:
            return
        if reason := reason_against_guesses(model, self.layers):
            self._can_guess = False
            self.warn(f"speculative=False for {type(model).__name__}: {reason}")
            return
        layers = [layer for layer in self.selective if isinstance(layer, SpecLayer)]
        for place, layer in enumerate(layers):
            layer.collects = layers[(place - UNDER_WAY) % len(layers)]

    graph_tokens = 2

    @property
    def reads_ahead(self) -> int:
        return UNDER_WAY if self.config.speculative else 0

    @classmethod
    def shortfalls(cls, config: Any, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        """None: a step attends to every token, however few it fetches."""
        return []

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        return fit_spec(search)

    # --- the step ----------------------------------------------------------------------------------------------

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Add the guess to the call: [T_t, T'_t+1] of SpeCache, section 3.3. Pre-decode if there is none (algorithm 2).
        """
        self._stop_recording()  # after a step that failed
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
        """Whether this step decodes a guess with its token."""
        config = self.config
        selecting = self.selecting
        if selecting is None or not selecting.worthwhile or self.contents.recording:
            return False
        if not (config.speculative and config.chosen and self._can_guess):
            return False
        fits = self._most_positions is None or step.history + 2 <= self._most_positions
        if not fits or not step.selects or step.tokens != 1 or not may_guess(call, model_config):
            return False
        if not any(isinstance(layer, SpecLayer) and layer.has_copy for layer in self.selective):
            return False  # there is nothing to prefetch
        return not self._is_watched()

    def why_no_graph(self) -> str | None:
        if not self.config.chosen:
            return super().why_no_graph()
        if self._guess is None:
            return "there is no guess of the next token"
        return "steps are topped up" if self._top_up.on else super().why_no_graph()

    def _is_watched(self) -> bool:
        """Whether other code's forward hooks would see the guess as the latest token. Warns once."""
        hook = self._watchers.find()
        if hook is not None and not self._told_of_watchers:
            self._told_of_watchers = True
            self.warn(
                f"no guess is decoded while others' forward hooks are on the model ({hook}), because they would see it "
                "as the latest token: remove them for guesses, or pass speculative=False"
            )
        return hook is not None

    def _decode_before(self, model: torch.nn.Module, call: dict[str, Any]) -> torch.Tensor | None:
        """Algorithm 2, pre-decoding: decode the token once for a first guess, and prefetch the token's top-k. The step
        itself leaves no tokens and no counts. None if the model's output gives no guess."""
        with torch.no_grad():
            output = model.forward(**call)
        self._take_back_guess()
        guess = guess_of(output, self._most_ids)
        self._can_guess = guess is not None
        return guess

    def _take_back_guess(self) -> None:
        """Remove the guess from the layers that are not ours. Our own layers never stored it."""
        layer: Any
        for layer in self.contents.with_length:
            if not isinstance(layer, OffloadLayer):
                layer.crop(-1)
        self._stop_recording()

    def _stop_recording(self) -> None:
        for layer in self._recording:
            layer.record_past = False
        self._recording = []

    def end_step(self, output: Any = None) -> Any:
        """Keep the last token, T'_t+2, as the next step's guess, and hide the guess from the model's caller."""
        step = self.shared.step
        seconds = 0.0 if step is None or step.started is None else time.perf_counter() - step.started
        if step is not None and step.guessed:
            self._guess = guess_of(output, self._most_ids)
            self._take_back_guess()
            output = without_guess(output)
        changed = super().end_step(output)
        if warning := self._top_up.end_step(seconds):
            self.warn(warning)
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
        """Replace row i of the guess by row `rows[i]`. A guess with several rows a sequence is dropped."""
        if self._guess is not None:
            self._guess = self._guess[rows.to(self._guess.device)] if self._rows_of_ids == 1 else None

    def forget(self) -> None:
        self._stop_recording()
        super().forget()

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "guess": self._guess if self._rows_of_ids == 1 else None}

    def restore(self, tree: dict[str, Any]) -> None:
        super().restore(tree)
        guess = tree["guess"]
        if guess is not None and not is_a_guess(guess, len(tree["ids"]), self.model):
            reason = f"its guess is {shown(guess)}, not a known token for each of {len(tree['ids'])} sequences"
            raise not_whole("the state", reason)
        self._guess = guess
