"""Replaces `model.generate` to supply a cache if the caller passes none."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import CacheUnusedError, PromptError
from .geometry import rows_of_ids
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


USE_CACHE_IS_FALSE = (
    "use_cache=False was given together with this cache, which would not be used: leave use_cache out, or leave "
    "past_key_values out to run without a cache"
)

MakeCache = Callable[[Request], AbstractContextManager[Any]]
"""A cache for one request, closed on leaving; None: the call stays as it is."""


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
        make: MakeCache | None,
        within: InRequest | None = None,
    ) -> None:
        super().__init__(model, given)
        self._make = make
        """None: all calls are left unchanged."""
        self._within = within or InRequest()

    def __reduce__(self) -> Any:
        return type(self), (self.model, self.given, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnGenerate:
        model = self.model
        return OwnGenerate(memo.get(id(model), model), copy.deepcopy(self.given, memo), None)

    def stop(self) -> None:
        """Leave all calls unchanged, even if another method was put over this one."""
        self._make = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _through(self._make, self._within, self.model, self.method(), args, kwargs)


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
    make: Callable[[PreTrainedModel, Request], AbstractContextManager[Any]], within: InRequest
) -> Iterator[None]:
    """Like `OwnGenerate`, for all models in this process, except the calls that a `generate` makes itself (an
    assistant's)."""
    from transformers import GenerationMixin

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            method = functools.partial(plain, model)
            if within.now:
                return method(*args, **kwargs)
            return _through(functools.partial(make, model), within, model, method, args, kwargs)

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
    make: MakeCache | None,
    within: InRequest,
    model: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of `method`, with a cache if its caller names none."""
    asked = _Asked(model, args, kwargs)
    named = kwargs.get("past_key_values") is not None or asked.by_caller("cache_implementation") is not None
    before, within.now = within.now, True
    try:
        # an assistant's result continues in its next call
        if make is None or named or asked.by_caller("use_cache") is False or asked("is_assistant"):
            return method(*args, **kwargs)
        with make(_request(model, args, kwargs, asked)) as cache:
            if cache is None:
                return method(*args, **kwargs)
            result = generate_with(cache, model, method, args, kwargs)
    finally:
        within.now = before
    if getattr(result, "past_key_values", None) is not None:
        result.past_key_values = None
    return result


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
    return Request(rows, int(end + ahead + 1 + virtual + _picture_tokens(model, kwargs)), ahead > 0)


def _picture_tokens(model: PreTrainedModel, kwargs: dict[str, Any]) -> int:
    """Tokens that a model puts before the prompt for a picture without placeholder ids. GIT's attention states their
    number, by which the model extends its masks."""
    if not isinstance(kwargs.get("pixel_values"), torch.Tensor):
        return 0
    counts = (getattr(module, "image_patch_tokens", None) for module in model.modules())
    return max((count for count in counts if isinstance(count, int)), default=0)
