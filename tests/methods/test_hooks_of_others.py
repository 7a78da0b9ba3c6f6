"""Forward hooks of others see what the model computes for its caller: no guess of `SpecCache`, no look ahead."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from forward_calls import widths_of
from harness import PAD, prompt
from long_llama import long_model
from spec_fields import ALL
from transformers import DynamicCache

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache

LENGTH, NEW = 150, 10


def decoded(model: Any, cache: Any, ids: torch.Tensor, new: int = NEW) -> list[int]:
    with cache if hasattr(cache, "close") else contextlib.nullcontext():
        found = model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, pad_token_id=PAD)
    return found[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def steered(output: Any) -> Any:
    """The latest position's hidden state, turned: where a hook acts that steers a model."""
    hidden = (output[0] if isinstance(output, tuple) else output).clone()
    hidden[:, -1] += 3 * torch.sin(torch.arange(hidden.shape[-1]))
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@contextlib.contextmanager
def hooked(model: Any) -> Iterator[None]:
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: steered(output))
    yield
    handle.remove()


@contextlib.contextmanager
def hooked_before(model: Any) -> Iterator[None]:
    handle = model.model.layers[2].register_forward_pre_hook(
        lambda module, args, kwargs: ((steered(args[0]), *args[1:]), kwargs), with_kwargs=True
    )
    yield
    handle.remove()


@contextlib.contextmanager
def hooked_everywhere(model: Any) -> Iterator[None]:
    block = model.model.layers[1]
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: steered(output) if module is block else None
    )
    yield
    handle.remove()


@contextlib.contextmanager
def replaced(model: Any) -> Iterator[None]:
    block = model.model.layers[1]
    forward = block.forward

    @functools.wraps(forward)
    def own(*args: Any, **kwargs: Any) -> Any:
        return steered(forward(*args, **kwargs))

    block.forward = own
    yield
    del block.forward


class Around(torch.nn.Module):
    """As methods that steer a model put one around a block."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return steered(self.block(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


@contextlib.contextmanager
def wrapped(model: Any) -> Iterator[None]:
    block = model.model.layers[1]
    model.model.layers[1] = Around(block)
    yield
    model.model.layers[1] = block


@contextlib.contextmanager
def replaced_in_the_class(model: Any) -> Iterator[None]:
    block = model.model.layers[1]
    forward = type(block).forward

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        return steered(output) if self is block else output

    type(block).forward = own
    yield
    type(block).forward = forward


WAYS = [hooked, hooked_before, hooked_everywhere, replaced, wrapped, replaced_in_the_class]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_steered_as_with_a_dynamic_cache(way: Callable[[Any], Any]) -> None:
    model = long_model()
    ids = prompt(model, 1, LENGTH)
    plain = decoded(model, DynamicCache(config=model.config), ids)
    with way(model), widths_of(model.model.embed_tokens) as widths:
        expected = decoded(model, DynamicCache(config=model.config), ids)
        widths.clear()
        with pytest.warns(UserWarning, match="no guess is decoded while others' forward hooks are on the model"):
            found = decoded(model, SpecCache(model, **ALL), ids)
        assert widths == [LENGTH, *[1] * (NEW - 1)]
    assert found == expected != plain


def test_guesses_stop_and_go_on_as_hooks_come_and_go() -> None:
    model = long_model()
    ids, seen = prompt(model, 1, LENGTH), list[int]()

    def look(module: Any, args: Any, output: Any) -> None:
        seen.append(output.shape[1])

    with SpecCache(model, **ALL) as cache, torch.no_grad(), widths_of(model.model.embed_tokens) as widths:

        def steps(count: int) -> list[int]:
            widths.clear()
            for at in range(count):
                model(ids[:, at : at + 1], past_key_values=cache)
            return list(widths)

        model(ids, past_key_values=cache)
        assert steps(3) == [1, 2, 2, 2]
        handle = model.model.layers[0].mlp.register_forward_hook(look)
        with pytest.warns(UserWarning, match=r"look on model\.layers\.0\.mlp"):
            assert steps(2) == [1, 1]
        handle.remove()
        assert steps(2) == [1, 2, 2]
        handle = model.model.layers[2].mlp.register_forward_hook(look)
        assert steps(2) == [1, 1]
        handle.remove()
        told = [one for one in cache.report().warnings if "forward hooks" in one]
    assert seen == [1] * 4 and len(told) == 1


@pytest.mark.parametrize("way", [wrapped, replaced_in_the_class])
def test_a_model_that_is_steered_from_now_on_is_given_no_more_guesses(way: Callable[[Any], Any]) -> None:
    """Nothing was registered anywhere: parts and classes are looked at in each step."""
    model = long_model()
    ids = prompt(model, 1, LENGTH)
    with SpecCache(model, **ALL) as cache, torch.no_grad(), widths_of(model.model.embed_tokens) as widths:
        for one in (ids, *ids[:, :2].split(1, 1)):
            model(one, past_key_values=cache)
        with way(model):
            model(ids[:, 2:3], past_key_values=cache)
        model(ids[:, 3:4], past_key_values=cache)
        assert widths == [LENGTH, 1, 2, 2, 1, 1, 2]


def test_what_places_and_adapts_weights_is_no_hook_of_others() -> None:
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    model = copy.deepcopy(long_model())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    hook = accelerate.hooks.AlignDevicesHook("cpu")
    accelerate.hooks.add_hook_to_module(adapted.get_base_model().model.layers[1], hook, append=True)
    ids = prompt(model, 1, LENGTH)
    with SpecCache(adapted, **ALL) as cache, torch.no_grad(), widths_of(model.model.embed_tokens) as widths:
        for one in (ids, ids[:, :1], ids[:, :1]):
            adapted(input_ids=one, past_key_values=cache)
        assert widths == [LENGTH, 1, 2, 2]
        assert not any("hooks" in one for one in cache.report().warnings)


@pytest.mark.parametrize("cache_class", [DiskSwapCache, ClusterCache, AbstractTreeCache, SpecCache])
def test_modules_are_called_as_often_as_with_a_dynamic_cache(cache_class: Any) -> None:
    """Looking ahead calls norms and projections of the next layer: not those that somebody watches."""
    model = long_model()
    ids = prompt(model, 1, LENGTH)
    more = ALL if cache_class is SpecCache else {"look_ahead": True, "num_selected": 32}
    calls = []
    for make in (lambda: DynamicCache(config=model.config), lambda: cache_class(model, **more)):
        seen: list[tuple[str, int]] = []

        def look(module: Any, args: Any, output: Any, name: str, seen: list[tuple[str, int]] = seen) -> None:
            seen.append((name, output.shape[1]))

        handles = [
            module.register_forward_hook(functools.partial(look, name=name))
            for name, module in model.named_modules()
            if name.endswith(("q_proj", "input_layernorm", "mlp"))
        ]
        decoded(model, make(), ids)
        calls.append(seen)
        for handle in handles:
            handle.remove()
    assert calls[0] == calls[1]
