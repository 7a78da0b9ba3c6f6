"""One forward of the whole model, as all layers see it: made once, at its beginning, and passed down."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import OffloadConfig
from ..errors import BudgetError, CacheUnusedError, PromptError, UnsupportedModelError
from ..model import attach
from ..model.masks import seen_before, shown
from ..model.own_generate import USE_CACHE_IS_FALSE
from ..model.place import OwnModel, model_text
from ..model.seam import unwrapped
from .token_log import TokenLog

# The end of a forward whose further layers are not needed

class ForwardEnded(BaseException):
    """For `Filling` alone, which asks for it and catches it: no `except Exception` of a model does."""


MOST_CANDIDATES = 32
"""Queries of a candidate verification (assisted decoding, prompt lookup) that are selected for."""


def kept_logits(kwargs: dict[str, Any]) -> int | None:
    """Number of latest tokens for which a forward with these arguments returns logits; None: all, or unknown.
    `generate` takes back fewer tokens than these."""
    asked = kwargs.get("logits_to_keep")
    return asked if type(asked) is int and asked > 0 else None


@dataclass
class Step:
    """Valid until the step has ended. Made by the cache; a layer that is driven without a model makes its own."""

    sequences: int
    history: int
    """Tokens a sequence that were held before it."""
    tokens: int
    """Tokens a sequence that it adds: queries a sequence."""
    selects: bool
    """A sparse method attends to its choice; else to everything."""
    started: float | None = None
    """`time.perf_counter()` at its beginning, for steps that count as decoding; None: it is none."""
    ids: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    """Of the tokens it adds, which are none: bool (B, tokens) in host memory; None: no padding."""
    lengths: list[int] = field(default_factory=list)
    """What each layer that has a length held before it."""
    guessed: int = 0
    """Of the tokens that the model is given, how many at the end are guesses: attended to, and kept by no layer. They
    are not among `tokens`."""
    entered: bool = False
    """A decoder block was entered."""
    _masks: list[tuple[torch.Tensor, torch.Tensor | None, bool]] = field(default_factory=list)
    _streamed: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = field(default_factory=list)

    @classmethod
    def alone(cls, sequences: int, history: int, tokens: int) -> Step:
        """Of a layer that is driven by itself."""
        return cls(sequences, history, tokens, selects=tokens == 1 and history > 0)

    @property
    def decodes(self) -> bool:
        """It counts as a step of decoding."""
        return self.started is not None

    @property
    def seen(self) -> torch.Tensor | None:
        """What `visible` last gave, in this step."""
        return self._masks[-1][1] if self._masks else None

    def visible(self, mask: Any) -> torch.Tensor | None:
        """What the last query sees of the T columns of a mask (·, 1, q, T): bool (·, T), None: all of them.

        Looked at once a step for each mask that the model made: models hand one mask to all layers of a kind, and
        eager attention makes one that hides nothing.
        """
        return None if mask is None else self._look(mask)[0]

    def changes(self, mask: Any) -> bool:
        """Whether a mask hides something of the last query, or has a bias for it: else attention is as well without."""
        return mask is not None and self._look(mask)[1]

    def streamed(self, mask: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What `stream_attention` is to be given as its mask and `seen` instead of a mask that has a row for each
        query: see `masks.seen_before`. Looked at once a step for each mask."""
        for known, *found in self._streamed:
            if known is mask:
                return found[0], found[1]
        own: torch.Tensor | None = mask
        seen: torch.Tensor | None = None
        if (alike := seen_before(mask)) is not None:
            seen, causal = alike
            if causal:
                own, seen = None, None if bool(seen.all()) else seen
        self._streamed.append((mask, own, seen))
        return own, seen

    def _look(self, mask: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        for known, seen, changes in self._masks:
            if known is mask:
                return seen, changes
        last = mask[:, 0, -1]
        seen = shown(last)
        hides = not bool(seen.all())
        found = seen if hides else None, hides or (last.dtype != torch.bool and bool(last.any()))
        self._masks.append((mask, *found))
        return found


# Whether what a model is given continues what its cache holds: checked before anything is taken in

def check_prompt(
    tokens: TokenLog, held: int, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None
) -> None:
    """`generate` is about to drop the first `held` of ids (B, P), or of embeddings (B, P, hidden) where it is given
    these. Raises `PromptError` unless those are held, as far as ids tell."""
    if not held:
        return
    count = input_ids.shape[1] if inputs_embeds is None else inputs_embeds.shape[1]
    if count <= held:
        raise PromptError(
            f"the prompt has {count} tokens and the cache already holds {held}: pass the whole "
            "conversation with at least one new token, or reset() the cache for a new one"
        )
    position = None if inputs_embeds is not None else tokens.first_difference(input_ids[:, :held])
    if position is not None:
        raise PromptError(
            f"the prompt differs from what the cache holds at token {position} of {held}: "
            "it does not continue this cache; reset() it, or use a new one for an unrelated prompt"
        )


def repeats(
    tokens: TokenLog, held: int, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> bool:
    """Whether ids (B, t), or embeddings (B, t, hidden), begin with the `held` tokens, as far as ids tell."""
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None or given.shape[1] < held:
        return False
    return input_ids is None or tokens.first_difference(input_ids[:, :held]) is None


def check_uses_cache(own: OwnModel, kwargs: dict[str, Any]) -> None:
    """Before a forward with these arguments, raise `PromptError` or `UnsupportedModelError` if the model would get the
    cache but not use it."""
    if kwargs.get("use_cache") is False:
        raise PromptError(USE_CACHE_IS_FALSE)
    if own.checkpointing and own.checkpoints_gradients():
        raise UnsupportedModelError(
            f"model {type(own()).__name__} is in training mode with gradient checkpointing, which gives its layers no "
            "cache: call model.eval(), or model.gradient_checkpointing_disable(), before it runs with this cache"
        )


def check_was_used(cache: Any, step: Step, layers: list[Any], output: Any) -> None:
    """After the `step`, raise `CacheUnusedError` if none of the `layers`, which have a length, took its tokens, or if
    the output continues with another cache."""
    theirs = getattr(output, "past_key_values", None)
    if theirs is not None and theirs is not cache and unwrapped(theirs) is not cache:
        raise CacheUnusedError(
            f"the model was given this cache and returned another, {type(theirs).__name__}: generate would go on with "
            "that one; run this model without this cache"
        )
    if not layers or not step.tokens:
        return
    for layer, before in zip(layers, step.lengths, strict=True):
        if layer.get_seq_length() != before:
            return
    raise CacheUnusedError(
        f"the model was given this cache and {step.tokens:,} tokens, and none of its layers used the cache: what it "
        "returned would not follow what is held; something in the model or around it drops past_key_values"
    )


def sparse_warning(layers: list[Any], warnings: list[str], own: OwnModel) -> str | None:
    """What to say, once, of offloaded layers that cannot be sparse; None: nothing. `warnings`: those said before."""
    dense = []
    for layer in layers:
        if layer.state != "tagged":
            dense.append(layer.layer_idx)
    if not dense or (model := own()) is None or any("cannot be sparse" in warning for warning in warnings):
        return None
    why = "their attention is not a plain softmax over the keys that the cache gets"
    if not attach.replaced(model):
        name = model.config._attn_implementation
        why = f"the implementation {name!r} of this model's attention cannot be replaced: 'sdpa' or 'eager' can, "
        why += "if the model offers them"
    return f"layers {dense} cannot be sparse ({why}); they are exact, read completely in every step"


def check_positions(positions: Any, mask: Any, held: int) -> None:
    """Raises `PromptError` for a step over `held` tokens whose positions begin at 0.

    Not for rows that hold only padding so far; and what is itself masked has no position, so that each row begins with
    its first token that is none. `mask`: (B, T), or (B, 1, q, T), or another kind, which tells nothing.
    """
    if positions.ndim != 2 or bool((positions[:, 0] != 0).all()):
        return
    count = positions.shape[1]
    there = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
    if isinstance(mask, torch.Tensor) and mask.ndim in (2, 4) and mask.shape[-1] == held + count:
        seen = mask != 0 if mask.ndim == 2 else shown(mask)
        if mask.ndim == 4:  # a query that sees itself is no padding; one that sees nothing held begins a row
            first, seen = seen[:, 0, :, :held], seen[:, 0, :, held:].diagonal(dim1=1, dim2=2)
            holds = first.any(-1)
        else:
            holds, seen = seen[:, :held].any(1, keepdim=True), seen[:, held:]
        there = (seen & holds).to(positions.device).expand(positions.shape)
    rows = there.any(1)
    begins = positions.gather(1, there.int().argmax(1, keepdim=True))[:, 0]
    if not bool(rows.any()) or bool((begins[rows] != 0).any()):
        return
    raise PromptError(
        f"the step starts at position 0 and the cache already holds {held} tokens: transformers would append "
        "the prompt to them; reset() the cache for a new prompt, or pass only the tokens that are new"
    )


def padding_of(tokens: TokenLog, mask: Any, held: int, length: int, *, compare: bool) -> torch.Tensor | None:
    """Where the step's own tokens, [held, length), are padding: bool (B, t) in host memory, or None.

    With `compare`, raises `PromptError` for a mask (B, length) that shows padding which is held; a mask that is missing
    where there is some is always refused. To hide tokens that are held is right, and so is, for us, a mask of another
    kind.
    """
    if mask is None:
        if held and tokens.padded and tokens.length == held:
            raise PromptError(
                "attention_mask is missing, and what the cache holds has padding: pass the mask of the whole "
                "conversation, as `cache.attention_mask` begins it"
            )
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape[1:] != (length,):
        return None
    if compare and held and tokens.length == held:
        shown = ((mask[:, :held].to("cpu") != 0) & ~tokens.visible).nonzero()
        if len(shown):
            row, position = shown[0].tolist()
            raise PromptError(
                f"attention_mask shows token {position} of sequence {row}, which is padding in what the cache holds: "
                "pass the mask of the whole conversation, as `cache.attention_mask` begins it"
            )
    return mask[:, held:].detach().to("cpu") == 0


def check_model(own: OwnModel, other: torch.nn.Module | None) -> None:
    """Raises `PromptError` for a forward of `other`, unless that is the cache's own model, or one within the other."""
    if other is not None and other not in own.parts and not own.includes(other):
        mine = own()
        raise PromptError(
            f"this cache was made for {'a model that is gone' if mine is None else model_text(mine)} and was given to "
            f"{model_text(other)}: what it holds means nothing there; make a cache with that model"
        )


def check_planned(config: OffloadConfig, batch: int, length: int) -> None:
    """Raises `BudgetError` where `batch` sequences or `length` tokens a sequence are beyond what was planned."""
    for name, asked, most in (("max_batch", batch, config.max_batch), ("max_context", length, config.max_context)):
        if most is not None and asked > most:
            unit = "sequences" if name == "max_batch" else "tokens a sequence"
            raise BudgetError(
                f"{name} is {most:,} and this step would make it {asked:,} {unit}; nothing was added: make the "
                f"cache with {name}={asked} or more, or reset() it for a new context"
            )


# The beginning of a step: whether it continues what the cache holds, and what kind of step it is

def begin(
    kwargs: dict[str, Any],
    config: OffloadConfig,
    tokens: TokenLog,
    lengths: list[int],
    batch: int | None,
    *,
    compare: bool,
    candidates: bool,
    rows_of_ids: int = 1,
) -> Step | None:
    """The step that a forward with these arguments makes; None: it has neither ids nor embeddings.

    Args:
        lengths: number of tokens in each layer that has a length.
        batch: number of stored sequences; None: none.
        compare: compare the mask with the stored one, however short the step.
        candidates: a step of several queries over a history may verify candidates.
        rows_of_ids: rows of ids for one sequence.

    Raises `PromptError` and `BudgetError` before anything is added.
    """
    ids, embeds, mask = kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
    given = ids if ids is not None else embeds
    if given is None:
        return None
    sequences, count = given.shape[:2]
    if ids is not None and ids.ndim == 2:
        sequences //= rows_of_ids
    history = max(lengths, default=tokens.length)
    if history:
        if batch is not None and sequences != batch:
            raise PromptError(
                f"the cache holds {batch} sequences and the model was given {sequences}: "
                "use a new cache, or reset(), for a batch of another size"
            )
        if (positions := kwargs.get("position_ids")) is not None:
            check_positions(positions, mask, history)
    if config.max_context is not None or config.max_batch is not None:
        check_planned(config, sequences, history + count)
    told = ids is not None and ids.ndim == 2 and rows_of_ids == 1  # several codes stand for a token, else
    padding = None
    ours = not isinstance(mask, torch.Tensor) or len(mask) != sequences * rows_of_ids or rows_of_ids == 1
    if ours and (mask is not None or tokens.padded):
        padding = padding_of(tokens, mask, history, history + count, compare=compare or count > 1)
    several = candidates and not config.exact and count <= min(MOST_CANDIDATES, config.num_recent)
    selects = history > 0 and (count == 1 or several)
    return Step(
        sequences,
        history,
        count,
        selects,
        started=time.perf_counter() if selects else None,
        ids=ids if told else torch.full((sequences, count), TokenLog.UNKNOWN, device="cpu"),
        padding=padding,
        lengths=lengths,
    )
