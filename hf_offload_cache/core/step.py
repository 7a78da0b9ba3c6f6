"""One forward of the complete model, made once at its beginning and passed to all layers."""

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

# The end of a forward whose later layers are not needed

class ForwardEnded(BaseException):
    """Raised and caught only by `Filling`: a model's `except Exception` does not catch it."""


MOST_CANDIDATES = 32
"""Maximum queries of a candidate verification (assisted decoding, prompt lookup) that selects."""
NO_CANDIDATES = (
    "candidates is False: this cache has no memory for the candidates of an assistant or a prompt lookup. Make it with "
    "candidates=True, or generate without them; nothing was added"
)


def kept_logits(kwargs: dict[str, Any]) -> int | None:
    """Number of latest tokens for which a forward with these arguments returns logits; None: all, or unknown.
    `generate` removes fewer tokens than these."""
    asked = kwargs.get("logits_to_keep")
    return asked if type(asked) is int and asked > 0 else None


@dataclass
class Step:
    """Valid until the step has ended. Made by the cache; a layer that runs without a model makes its own."""

    sequences: int
    history: int
    """Stored tokens a sequence before the step."""
    tokens: int
    """Tokens a sequence that the step adds: queries a sequence."""
    selects: bool
    """A sparse method attends to its selection; otherwise to everything."""
    started: float | None = None
    """`time.perf_counter()` at its beginning, for decoding steps; None for all others."""
    ids: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    """Mask of added padding: bool (B, tokens), see `padding_of`; None: no padding."""
    lengths: list[int] = field(default_factory=list)
    """Lengths before the step, of the layers that have a length."""
    guessed: int = 0
    """Number of guesses at the end of the model's input: layers attend to them and do not store them. `tokens` does not
    include them."""
    entered: bool = False
    """Whether a decoder block was entered."""
    _masks: list[tuple[torch.Tensor, torch.Tensor | None, bool]] = field(default_factory=list)
    _streamed: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = field(default_factory=list)

    @classmethod
    def alone(cls, sequences: int, history: int, tokens: int) -> Step:
        """The step of a layer that runs by itself."""
        return cls(sequences, history, tokens, selects=tokens == 1 and history > 0)

    @property
    def decodes(self) -> bool:
        """Whether it counts as a decoding step."""
        return self.started is not None

    @property
    def seen(self) -> torch.Tensor | None:
        """The last result of `visible` in this step."""
        return self._masks[-1][1] if self._masks else None

    def visible(self, mask: Any) -> torch.Tensor | None:
        """The T columns of a mask (·, 1, q, T) that the last query sees: bool (·, T); None: all of them.

        Computed once a step for each mask: models hand one mask to all layers of a kind, and eager attention makes one
        that hides nothing.
        """
        return None if mask is None else self._look(mask)[0]

    def changes(self, mask: Any) -> bool:
        """Whether a mask hides something from the last query, or has a bias for it; otherwise it is not needed."""
        return mask is not None and self._look(mask)[1]

    def streamed(self, mask: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The mask and `seen` for `stream_attention`, instead of a mask that has a row for each query: see
        `masks.seen_before`. Computed once a step for each mask."""
        for known, *result in self._streamed:
            if known is mask:
                return result[0], result[1]
        needed: torch.Tensor | None = mask
        seen: torch.Tensor | None = None
        if (common := seen_before(mask)) is not None:
            seen, causal, wholly = common
            if causal:
                needed, seen = None, None if wholly else seen
        self._streamed.append((mask, needed, seen))
        return needed, seen

    def _look(self, mask: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        for known, seen, changes in self._masks:
            if known is mask:
                return seen, changes
        result: tuple[torch.Tensor | None, bool]
        last = mask[:, 0, -1]
        if not mask.is_cpu and (streamed := self.streamed(mask))[0] is None:
            hides = streamed[1] is not None  # a device was waited for once, for both
            result = shown(last) if hides else None, hides
        else:
            seen = shown(last)
            hides = not bool(seen.all())
            result = seen if hides else None, hides or (last.dtype != torch.bool and bool(last.any()))
        self._masks.append((mask, *result))
        return result


# Checks that a model's input continues its cache, before anything is added

def check_prompt(
    tokens: TokenLog, held: int, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None
) -> None:
    """Check the first `held` of ids (B, P), or of embeddings (B, P, hidden), which `generate` is about to drop. Raises
    `PromptError` unless they are stored, as far as ids show."""
    if not held:
        return
    count = input_ids.shape[1] if inputs_embeds is None else inputs_embeds.shape[1]
    if count <= held:
        raise PromptError(
            f"the prompt has {count} tokens and the cache already holds {held}: pass the complete "
            "conversation with at least one new token, or reset() the cache for a new one"
        )
    position = None if inputs_embeds is not None else tokens.first_difference(input_ids[:, :held])
    if position is not None:
        raise PromptError(
            f"the prompt differs from the stored tokens at token {position} of {held}: "
            "it does not continue this cache; reset() it, or use a new one for an unrelated prompt"
        )


def repeats(
    tokens: TokenLog, held: int, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> bool:
    """Whether ids (B, t), or embeddings (B, t, hidden), begin with the `held` stored tokens, as far as ids show."""
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
    """After the `step`, raise `CacheUnusedError` if none of the `layers`, which have a length, added its tokens, or if
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
        f"the model was given this cache and {step.tokens:,} tokens, and none of its layers used the cache: its output "
        "would not continue the stored tokens; something in the model or around it drops past_key_values"
    )


def sparse_warning(layers: list[Any], warnings: list[str], own: OwnModel) -> str | None:
    """A warning, once, about offloaded layers that cannot be sparse; None: no warning. `warnings`: earlier ones."""
    dense = []
    for layer in layers:
        if layer.state != "tagged" and layer.is_filled:  # one that takes the keys of another stays empty
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
    """Raise `PromptError` for a step over `held` tokens whose positions begin at 0.

    Rows that contain only padding so far may begin at 0. Masked tokens have no position, so each row begins with its
    first token that is not padding. `mask`: (B, T) or (B, 1, q, T); one of another kind is ignored.
    """
    if positions.ndim != 2 or bool((positions[:, 0] != 0).all()):
        return
    count = positions.shape[1]
    real = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
    if isinstance(mask, torch.Tensor) and mask.ndim in (2, 4) and mask.shape[-1] == held + count:
        seen = mask != 0 if mask.ndim == 2 else shown(mask)
        if mask.ndim == 4:  # a query that sees itself is not padding; one that sees no stored token begins a row
            first, seen = seen[:, 0, :, :held], seen[:, 0, :, held:].diagonal(dim1=1, dim2=2)
            holds = first.any(-1)
        else:
            holds, seen = seen[:, :held].any(1, keepdim=True), seen[:, held:]
        real = (seen & holds).to(positions.device).expand(positions.shape)
    rows = real.any(1)
    begins = positions.gather(1, real.int().argmax(1, keepdim=True))[:, 0]
    if not bool(rows.any()) or bool((begins[rows] != 0).any()):
        return
    raise PromptError(
        f"the step starts at position 0 and the cache already holds {held} tokens: transformers would append "
        "the prompt to them; reset() the cache for a new prompt, or pass only the tokens that are new"
    )


def padding_of(tokens: TokenLog, mask: Any, held: int, length: int, *, compare: bool) -> torch.Tensor | None:
    """Mask of padding among the step's own tokens, [held, length): bool (B, t), or None. In host memory, but on the
    mask's device in a step of one token, which need not wait for it.

    With `compare`, raises `PromptError` for a mask (B, length) that shows stored padding. A missing mask always raises
    it if there is padding. A mask that hides stored tokens is allowed, and so is a mask of another kind.
    """
    if mask is None:
        if held and tokens.length == held and tokens.has_padding():
            raise PromptError(
                "attention_mask is missing, and the stored tokens include padding: pass the mask of the complete "
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
                f"attention_mask shows token {position} of sequence {row}, which is stored as padding: pass the mask "
                "of the complete conversation, as `cache.attention_mask` begins it"
            )
    own = mask[:, held:].detach()
    return (own if held and length - held == 1 else own.to("cpu")) == 0


def check_model(own: OwnModel, other: torch.nn.Module | None) -> None:
    """Raise `PromptError` for a forward of `other`, unless it is the cache's own model, or one is part of the other."""
    if other is not None and other not in own.parts and not own.includes(other):
        mine = own()
        raise PromptError(
            f"this cache was made for {'a model that is gone' if mine is None else model_text(mine)} and was given to "
            f"{model_text(other)}: a cache works only with its own model; make a cache with that model"
        )


def check_planned(config: OffloadConfig, batch: int, length: int) -> None:
    """Raise `BudgetError` if `batch` sequences or `length` tokens a sequence exceed the planned limits."""
    for name, asked, most in (("max_batch", batch, config.max_batch), ("max_context", length, config.max_context)):
        if most is not None and asked > most:
            unit = "sequences" if name == "max_batch" else "tokens a sequence"
            raise BudgetError(
                f"{name} is {most:,} and this step would make it {asked:,} {unit}; nothing was added: make the "
                f"cache with {name}={asked} or more, or reset() it for a new context"
            )


# The beginning of a step: whether it continues the cache, and what kind of step it is

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
    if candidates and history and count > 1 and not config.candidates:
        raise BudgetError(NO_CANDIDATES)
    known = ids is not None and ids.ndim == 2 and rows_of_ids == 1  # otherwise several codes stand for a token
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
        ids=ids if known else torch.full((sequences, count), TokenLog.UNKNOWN, device="cpu"),
        padding=padding,
        lengths=lengths,
    )
