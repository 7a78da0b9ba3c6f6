"""Replaces `model.generate` to supply a cache if the caller passes none."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from ..errors import CacheUnusedError, PromptError
from .geometry import rows_of_ids
from .media import Media, has_tensor
from .method_on_model import MethodOnModel, replaced_method
from .peft_adapters import prompt_adapter
from .seam import Attachable, is_attachable, unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Request(NamedTuple):
    """Upper bound on the size of a `generate` call."""

    rows: int
    """Sequences, beams included."""
    tokens: int
    """Tokens per sequence: the prompt, an adapter's virtual tokens, a picture's, the generated ones, and candidates
    that may be dropped."""
    candidates: bool = False
    """It verifies candidates."""
    ids: torch.Tensor | None = None
    """The prompt's token ids (B, T), if they identify all of its content but its media; `rows` is a multiple of B."""
    mask: torch.Tensor | None = None
    """Its attention mask (B, T), 0 at padding."""
    has_others: bool = False
    """The call has other tensors besides, such as pictures."""
    media: Media = Media()
    """The prompt's pictures and sounds, once `Reuse` has told them apart."""
    identity: dict[str, str] | None = None
    """The model's fingerprint before the request, if a library is to be used."""


USE_CACHE_IS_FALSE = (
    "use_cache=False was given together with this cache, which would not be used: leave use_cache out, or leave "
    "past_key_values out to run without a cache"
)

Run = Callable[..., Any]
"""Generates with the cache that it is given, or as the caller asked (None). Keywords replace the caller's arguments."""
Serve = Callable[[Request, Run, Mapping[str, Any]], Any]
"""The result of a request: calls the `Run`, once or again. The mapping has the caller's keyword arguments."""


class InRequest(threading.local):
    """Whether this thread is within a counted `generate`: calls within it are not separate requests."""

    now = False


class OwnGenerate(MethodOnModel):
    """Replaces a model's `generate` until `unlink`. A copy of the model has a plain one again.

    A call is left unchanged if it names `past_key_values` or a `cache_implementation`, wants no cache, or looks for
    candidates (for an assistant, or for this model exiting early). Otherwise the result has no `past_key_values`,
    because the cache is closed by then.
    """

    name = "generate"

    def __init__(
        self,
        model: PreTrainedModel,
        given: Callable[..., Any] | None,
        serve: Serve | None,
        within: InRequest | None = None,
    ) -> None:
        super().__init__(model, given)
        self._serve = serve
        """None: all calls are left unchanged."""
        self._within = within or InRequest()

    def __reduce__(self) -> Any:
        return type(self), (self.model, self.given, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnGenerate:
        model = self.model
        return OwnGenerate(memo.get(id(model), model), copy.deepcopy(self.given, memo), None)

    def stop(self) -> None:
        """Leave all calls unchanged, even if another method was put over this one."""
        self._serve = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _through(self._serve, self._within, self.model, self.method(), args, kwargs)


class GivenCache(MethodOnModel):
    """Replaces a model's `generate` while a cache lives: a call that is given a cache uses it (see `generate_with`);
    every other call is left unchanged."""

    name = "generate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if not is_attachable(cache):
            return self.method()(*args, **kwargs)
        return generate_with(cache, self.model, self.method(), args, kwargs)


@contextmanager
def every_generate(
    serve: Callable[[PreTrainedModel, Request, Run, Mapping[str, Any]], Any], within: InRequest
) -> Iterator[None]:
    """Like `OwnGenerate`, for all models in this process, except the calls that a `generate` makes itself (an
    assistant's)."""
    from transformers import GenerationMixin

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            method = functools.partial(plain, model)
            if within.now:
                return method(*args, **kwargs)
            return _through(functools.partial(serve, model), within, model, method, args, kwargs)

        return generate

    with replaced_method(GenerationMixin, "generate", wrap):
        yield


def generate_with(
    cache: Attachable, model: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Result of `method`, a generation with `cache`, whatever cache the model's configuration requests.

    Raises `PromptError` if the caller wants no cache, before the model runs, and `CacheUnusedError` if the generation
    continued with another one.
    """
    asked = _Asked(model, args, kwargs)
    if asked.by_caller("use_cache") is False:
        raise PromptError(USE_CACHE_IS_FALSE)
    changed: dict[str, Any] = {"past_key_values": cache}
    if asked.by_caller("cache_implementation") is None and asked("cache_implementation") is not None:
        changed["cache_implementation"] = None
    if asked("use_cache") is False:
        changed["use_cache"] = True
    try:
        result = method(*args, **{**kwargs, **changed})
    except BaseException:
        cache.fail_step()  # forget the preparation of a step that does not run
        raise
    theirs = getattr(result, "past_key_values", None)
    if theirs is not None and unwrapped(theirs) is not cache:
        raise CacheUnusedError(
            f"generate of {type(model).__name__} was given this cache and continued with another, "
            f"{type(theirs).__name__}: run this model without this cache"
        )
    return result


class _Asked:
    """The arguments of a `generate` call."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kwargs = kwargs
        self._given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        self._default = getattr(model, "generation_config", None)

    def __call__(self, name: str) -> Any:
        """The value that `generate` finds: in its arguments, its configuration, or the model's."""
        values = (self._kwargs.get(name), getattr(self._given, name, None), getattr(self._default, name, None))
        return next((value for value in values if value is not None), None)

    def by_caller(self, name: str) -> Any:
        """Like a call, without the model's configuration: a pipeline passes a copy of that."""
        if (value := self._kwargs.get(name)) is not None:
            return value
        value = getattr(self._given, name, None)
        return None if value == getattr(self._default, name, None) else value


def _through(
    serve: Serve | None,
    within: InRequest,
    model: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of `method`, with a cache if its caller names none."""

    def run(cache: Attachable | None, **changed: Any) -> Any:
        if cache is None:
            return method(*args, **{**kwargs, **changed})
        result = generate_with(cache, model, method, args, {**kwargs, **changed})
        if getattr(result, "past_key_values", None) is not None:
            result.past_key_values = None
        return result

    asked = _Asked(model, args, kwargs)
    named = kwargs.get("past_key_values") is not None or asked.by_caller("cache_implementation") is not None
    before, within.now = within.now, True
    try:
        # an assistant's result continues in its next call
        if serve is None or named or asked.by_caller("use_cache") is False or asked("is_assistant"):
            return method(*args, **kwargs)
        return serve(_request(model, args, kwargs, asked), run, kwargs)
    finally:
        within.now = before


def _request(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Callable[[str], Any]
) -> Request:
    given = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
    shapes = [one.shape[:2] for one in given if isinstance(one, torch.Tensor) and one.ndim > 1]
    if not shapes:  # `generate` then begins each row with one token
        others = [one for one in kwargs.values() if isinstance(one, torch.Tensor) and one.ndim > 1]
        shapes = [torch.Size((len(others[0]) if others else 1, 1))]
    rows, prompt = (max(sizes) for sizes in zip(*shapes, strict=True))
    if (each := rows_of_ids(model)) > 1:  # both halves of its guidance are sequences of one forward
        rows = max(1, rows // each) * (2 if (asked("guidance_scale") or 1) > 1 else 1)
    rows *= max(asked("num_beams") or 1, asked("num_return_sequences") or 1)
    new, most = asked("max_new_tokens"), asked("max_length")
    end = prompt + new if new is not None else max(prompt + 20, most or 0)  # 20 is the default of transformers
    looked_up = asked("prompt_lookup_num_tokens") or 0
    early_exit = asked("assistant_early_exit") is not None
    assisted = kwargs.get("assistant_model") is not None or early_exit or asked("use_mtp")
    ahead = max(looked_up, (asked("num_assistant_tokens") or 20) if assisted or looked_up else 0)
    adapter = prompt_adapter(model, model)
    virtual = 0 if adapter is None else adapter.num_virtual_tokens
    most = int(end + ahead + 1 + virtual + _picture_tokens(model, kwargs))
    ids, mask = (None, None) if virtual else _text_of(model, args, kwargs, rows)
    return Request(rows, most, ahead > 0, ids, mask, any(has_tensor(one) for one in beside_text(kwargs).values()))


TEXT = ("inputs", "input_ids", "attention_mask")
"""Arguments of `generate` with a prompt's ids and their mask."""


def beside_text(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `generate` call besides the ids and their mask."""
    return {name: value for name, value in kwargs.items() if name not in TEXT}


def _text_of(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Ids and attention mask of a prompt of one sequence of ids for each row; else None."""
    given = [*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")]
    prompts = [one for one in given if isinstance(one, torch.Tensor)]
    mask = kwargs.get("attention_mask")
    if len(prompts) != 1 or prompts[0].ndim != 2 or prompts[0].is_floating_point():
        return None, None
    ids = prompts[0]
    if not ids.numel() or rows % len(ids) or rows_of_ids(model) > 1:
        return None, None
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
        return None, None
    return ids, mask


def _picture_tokens(model: PreTrainedModel, kwargs: dict[str, Any]) -> int:
    """Tokens that a model puts before the prompt for a picture without placeholder ids. GIT's attention states their
    number, by which the model extends its masks."""
    if not isinstance(kwargs.get("pixel_values"), torch.Tensor):
        return 0
    counts = (getattr(module, "image_patch_tokens", None) for module in model.modules())
    return max((count for count in counts if isinstance(count, int)), default=0)


# ------------------------------------------------------------------------------------------- a request once more


class Replay:
    """A generation that is repeated with another cache if its first one could not be read.

    The second one draws the same random numbers. It begins with the tokens that a streamer already has, and that one
    gets none twice.
    """

    def __init__(self, model: Any, kwargs: Mapping[str, Any]) -> None:
        self._kwargs = kwargs
        self._device = next(model.parameters()).device
        self._random = torch.get_rng_state(), _device_random(self._device)
        self._streamer = None if kwargs.get("streamer") is None else _Streamer(kwargs["streamer"])

    @property
    def first(self) -> dict[str, Any]:
        """Arguments that the first generation has instead of the caller's."""
        return {} if self._streamer is None else {"streamer": self._streamer}

    def second(self) -> dict[str, Any]:
        """Those of the second one; sets the random numbers back."""
        torch.set_rng_state(self._random[0])
        if self._random[1] is not None:
            getattr(torch, self._device.type).set_rng_state(self._random[1], self._device)
        if self._streamer is None:
            return {}
        given = [*(self._kwargs.get("logits_processor") or ()), self._streamer.begin_again()]
        return {"streamer": self._streamer, "logits_processor": LogitsProcessorList(given)}


def _device_random(device: torch.device) -> torch.Tensor | None:
    own: Any = getattr(torch, device.type, None)
    return own.get_rng_state(device) if hasattr(own, "get_rng_state") else None


class _Streamer(BaseStreamer):
    """Passes a generation's prompt and tokens on to a streamer. If the generation is repeated, each token is passed on
    once."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._prompt: torch.Size | None = None
        self._passed: list[int] = []
        self._skipped = 0
        """How many of `_passed` the present generation does not pass on."""

    def begin_again(self) -> LogitsProcessor:
        """Pass on only what follows the present tokens. The processor makes a generation begin with them."""
        self._skipped = len(self._passed)
        rows, prompt = self._prompt or (1, 0)
        return _Again(torch.tensor(self._passed[rows * prompt :], device="cpu").reshape(-1, rows), prompt)

    def put(self, value: torch.Tensor) -> None:
        if self._prompt is None:
            self._prompt = value.shape
        known = min(self._skipped, value.numel())
        self._skipped -= known
        if known < value.numel():
            new = value if not known else value.reshape(-1)[known:]
            self._passed += new.reshape(-1).tolist()
            self._streamer.put(new)

    def end(self) -> None:
        self._streamer.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)


class _Again(LogitsProcessor):
    """Chooses these tokens (steps, B) after a prompt of `start` tokens; later steps are left as they are."""

    def __init__(self, tokens: torch.Tensor, start: int) -> None:
        self._tokens = tokens
        self._start = start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self._start
        if step >= len(self._tokens):
            return scores
        chosen = self._tokens[step].to(scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)
