"""Caches that models make for themselves, in calls where no `generate` could pass a cache of this library."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from .method_on_model import replaced_method
from .own_generate import InRequest
from .place import inner_model, is_model
from .seam import is_attachable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# transformers' own cache: the reference of exact caches, and the source of layers that are not offloaded

def dynamic_cache(model: Any) -> DynamicCache:
    """transformers' own cache, new, for `model`."""
    return DynamicCache(config=inner_model(model).config)


def crops_all(layer: Any) -> bool:
    """Whether a layer's `crop` takes back all of its state: the class that last defined the state has its own
    `crop`."""
    classes = type(layer).__mro__
    made, cropped = (
        next((place for place, one in enumerate(classes) if name in vars(one)), len(classes))
        for name in ("__init__", "crop")
    )
    return cropped <= made


def may_crop(model: Any) -> bool:
    """Whether every cache of `model` can be cropped: it has no window and no state."""
    return not any(
        getattr(layer, "is_sliding", False)
        or isinstance(layer, LinearAttentionCacheLayerMixin)
        or not crops_all(layer)
        for layer in dynamic_cache(model).layers
    )


OWN_LOOP = "its generate runs a loop of its own, which makes its own cache"
FORWARD = "it was called with use_cache=True and no past_key_values: pass a cache of this library to offload that"
CONTINUOUS = (
    "continuous batching has pages of its own: to offload, call generate instead of generate_batch, or leave "
    "--continuous-batching out of transformers serve"
)


@contextmanager
def plain_caches(
    told: Callable[[PreTrainedModel, str], None], within: InRequest,
    managed: Callable[[PreTrainedModel, Any], None] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Within the `with`, `told` is called with a model and the reason when that model begins a generation with its own
    cache, in any thread that is not `within` a request. If `told` raises, the caller gets the exception before the
    model runs.

    Detects a loop in a model's own `generate`, a forward with `use_cache=True` and no cache, and continuous batching.
    `managed` is called with a model and its `ContinuousBatchingManager`, before the manager's first request.
    """
    from transformers import Cache, GenerationMixin

    def tell(model: PreTrainedModel, why: str) -> None:
        before, within.now = within.now, True  # `told` may create a cache
        try:
            told(model, why)
        finally:
            within.now = before

    latest = _Latest()

    def look(cache: Any) -> None:
        if within.now or is_attachable(cache) or latest.has_another_half(cache):
            return
        if (found := _maker()) is not None:
            tell(*found)

    def wrap_init(plain: Callable[..., Any]) -> Callable[..., Any]:
        def init(cache: Any, *args: Any, **kwargs: Any) -> None:
            plain(cache, *args, **kwargs)
            if not torch.compiler.is_compiling():  # compiled code is not seen, and runs without this line
                look(cache)

        return init

    def wrap_continuous(plain: Callable[..., Any]) -> Callable[..., Any]:
        def init_continuous_batching(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            tell(model, CONTINUOUS)
            manager = plain(model, *args, **kwargs)
            if managed is not None:
                managed(model, manager)
            return manager

        return init_continuous_batching

    with (
        replaced_method(Cache, "__init__", wrap_init),
        replaced_method(GenerationMixin, "init_continuous_batching", wrap_continuous),
    ):
        yield


class _Latest(threading.local):
    """The latest cache that was made in this thread, and where."""

    cache: Any = staticmethod(lambda: None)
    """A reference to it."""
    frame = 0
    instruction = -1

    def has_another_half(self, cache: Any) -> bool:
        """Whether `cache` is made by the same call as the latest one, after it: a decoder with cross-attention makes
        two."""
        made: Any = sys._getframe(1)
        while made is not None and _constructs(made, cache):
            made = made.f_back
        frame, instruction = (0, -1) if made is None else (id(made), made.f_lasti)
        half = self.cache() is not None and frame == self.frame and instruction > self.instruction
        self.cache, self.frame, self.instruction = weakref.ref(cache), frame, instruction
        return half


def _constructs(frame: Any, cache: Any) -> bool:
    """Whether a frame belongs to this package's wrappers, or to the constructors of `cache`."""
    if frame.f_globals.get("__package__") == __package__:
        return True
    return "self" in frame.f_code.co_varnames and frame.f_locals.get("self") is cache


def _maker() -> tuple[PreTrainedModel, str] | None:
    """The model that makes a cache for itself now, to generate, and how; None: none does."""
    outermost: tuple[PreTrainedModel, dict[str, Any]] | None = None
    frame = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(caller, torch.nn.Module) and is_model(caller):
            if frame.f_code.co_name == "generate":
                return caller, OWN_LOOP
            outermost = caller, frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    if outermost is None:
        return None
    model, given = outermost
    asked = given.get("use_cache", given.get("kwargs", {}).get("use_cache"))
    return (model, FORWARD) if asked is True else None
