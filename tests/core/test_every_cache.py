"""What every cache of the registry passes beside the matrix: interrupted and closed."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checked_cache import checked
from harness import DEVICE, Decoded, assert_exact, compare, generate, prompt
from long_llama import LENGTH, long_model, some
from long_models import long_fresh
from pairwise import combinations, in_full
from transformers import DynamicCache

from hf_offload_cache.errors import StoreError
from hf_offload_cache.fetch import Ticket
from hf_offload_cache.registry import CACHES, cache_class
from hf_offload_cache.testing import open_descriptors

EACH = pytest.mark.parametrize("method", CACHES)


@pytest.mark.parametrize(
    ("method", "engine"), combinations(CACHES.keys(), ("auto", "direct", "mapped", "memory"), times=2)
)
def test_nothing_is_left_after_close(method: str, engine: str, tmp_path: Any) -> None:
    """No thread, descriptor, file or hook, after a prompt, steps, a fork and a crop."""
    model, before = long_model(), (open_descriptors(), threading.active_count())
    hooked = hooks(model)  # transformers leaves some of its own where hidden states were asked for
    with cache_class(method)(model, path=tmp_path, **{**some(method), "engine": engine}) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=4)
        twin = cache.fork()
        cache.crop(-50)
        twin.close()
    assert (open_descriptors(), threading.active_count()) == before and list(tmp_path.iterdir()) == []
    assert hooks(model) == hooked


def hooks(model: Any) -> list[Any]:
    modules = list(model.modules())
    return [hook for one in modules for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values())]


@EACH
def test_a_long_call_whose_reads_fail_loses_itself_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, model = cache_class(method), long_model()
    ids, wait, fails = prompt(model, 2, LENGTH), Ticket.wait, False

    def failing(ticket: Ticket) -> float:
        waited = wait(ticket)
        if fails:
            raise StoreError(errno.EIO, "read was made to fail")
        return waited

    def call(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, past_key_values=cache, logits_to_keep=1).logits

    with cls(model, **some(method)) as cache, cls(model, **some(method)) as twin:
        for held in (cache, twin):
            call(held, ids)
        monkeypatch.setattr(Ticket, "wait", failing)
        with monkeypatch.context() as patch:
            attend = cache.layers[1].attend

            def broken(given: Any) -> Any:
                nonlocal fails
                fails = True
                return attend(given)

            patch.setattr(cache.layers[1], "attend", broken)
            with pytest.raises(StoreError, match="made to fail") as failed:
                call(cache, prompt(model, 2, 100, seed=3))
            patch.delattr(cache.layers[1], "attend")
        assert any("not removed yet" in note for note in failed.value.__notes__)
        with pytest.raises(StoreError, match="made to fail"):
            cache.crop(-1)
        fails = False
        with pytest.raises(RuntimeError, match=f"holds {LENGTH} tokens a sequence again"):
            call(cache, ids[:, :1])
        assert cache.tokens == LENGTH
        expected, found = (call(held, prompt(model, 2, 40, seed=5)) for held in (twin, cache))
        torch.testing.assert_close(found, expected)


def one_read_fails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The read is waited for in vain that is as many waits away as the list that comes back says; 0: none is."""
    wait, left = Ticket.wait, [0]

    def failing(ticket: Ticket) -> float:
        waited = wait(ticket)
        left[0] -= 1
        if left[0] == 0:
            raise StoreError(errno.EIO, "one read was made to fail")
        return waited

    monkeypatch.setattr(Ticket, "wait", failing)
    return left


CHANGES: dict[str, Callable[[Any], object]] = {
    "crop": lambda cache: cache.crop(-30),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0, 0, 1])),
}


@pytest.mark.parametrize(
    ("method", "change", "numbers"),
    [
        *(pytest.param(method, "crop", (3,), id=f"{method}-crop") for method in CACHES),
        *(pytest.param(*one.values, "crop", (1, 2, 4, 5, 7), id=f"{one.id}-crop at others", marks=one.marks)
          for one in in_full(CACHES.keys())),
        *(pytest.param(*one.values, (1,), id=one.id, marks=one.marks)
          for one in combinations(CACHES.keys(), sorted(CHANGES.keys() - {"crop"}))),
    ],
)  # fmt: skip
def test_a_change_one_of_whose_reads_fails(
    method: str, change: str, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crop is ended by the next call: nothing is lost, whichever read it is. Other changes wait for none."""
    cls, model, left = cache_class(method), long_model(), one_read_fails(monkeypatch)

    def call(cache: Any, seed: int, count: int = 1) -> torch.Tensor:
        with torch.no_grad():
            return model(prompt(model, cache.sequences or 2, count, seed=seed), past_key_values=cache).logits[:, -1:]

    failed = 0
    for number in numbers:
        with cls(model, **some(method)) as cache, cls(model, **some(method)) as twin:
            for held in (cache, twin):
                call(held, 0, LENGTH)
                call(held, 1, 17)
                for step in range(3):
                    call(held, step)
            left[0] = number
            try:
                CHANGES[change](cache)
            except StoreError as error:
                failed += 1
                assert any(f"holds {LENGTH - 10} tokens" in note for note in error.__notes__)
            left[0] = 0
            CHANGES[change](twin)
            for step in range(3):
                torch.testing.assert_close(call(cache, 50 + step), call(twin, 50 + step))
            assert cache.tokens == twin.tokens
    assert bool(failed) == (change == "crop")


@EACH
def test_an_update_without_a_forward_that_fails(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has taken nothing in, or the cache says that it is not to be used."""
    cls, model, left = cache_class(method), long_model(), one_read_fails(monkeypatch)
    made = torch.Generator().manual_seed(0)
    geometry = model.config.num_key_value_heads, model.config.head_dim

    def states(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.randn(2, 1, geometry[0], count, geometry[1], generator=made).unbind(0)
        return keys, values

    fields, torn = {**some(method), "exact": True}, 0
    if method == "cluster":  # whose short calls come in parts, each of which reads
        fields |= {"join_every": 8, "append_buffer": 0, "cluster_size": 8}
    for number in range(1, 30):
        with cls(model, **fields) as cache:
            cache.update(*states(400), 0)
            left[0], new = number, states(100)
            try:
                cache.update(*new, 0)
            except StoreError:
                left[0] = 0
                if cache.layers[0].length != 400:
                    torn += 1
                    with pytest.raises(RuntimeError, match="reset"):
                        cache.update(*new, 0)
            left[0] = 0
    assert torn or method != "cluster"


@pytest.mark.parametrize(("method", "number"), combinations(CACHES.keys(), (0, 1, 2)))
def test_ctrl_c_while_waiting(method: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, model = checked(cache_class(method)), long_model()
    ids, steps = prompt(model, 2, LENGTH), prompt(model, 2, 6, seed=11)
    wait, waits = Ticket.wait, 0

    def interrupted(ticket: Ticket) -> float:
        nonlocal waits
        waits += 1
        if waits == number + 1:
            raise KeyboardInterrupt
        return wait(ticket)

    def step(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, past_key_values=cache, logits_to_keep=1).logits

    fields = {**some(method), "reuse_capacity": 0}  # a step waits for what it reads
    if method == "spec":  # which it does not of host memory
        fields["engine"] = "auto"
    if method == "abstract-tree":
        fields["resident_layers"] = 0
    with cls(model, **fields) as cache, cls(model, **fields) as twin:
        for held in (cache, twin):
            step(held, ids)
            step(held, steps[:, :1])
            if method == "spec":
                held.rest()  # what it holds is given back, so that each layer has to read in the next step
        expected = [step(twin, steps[:, place : place + 1]) for place in range(1, 6)]
        cache.storage.prefetcher.flush()
        told = False
        with monkeypatch.context() as patch:
            patch.setattr(Ticket, "wait", interrupted)
            try:
                step(cache, steps[:, 1:2])
            except KeyboardInterrupt:
                told = True
        assert waits > number and told
        try:
            found = [step(cache, steps[:, place : place + 1]) for place in range(1, 6)]
        except RuntimeError as refusal:
            assert "reset" in str(refusal)
        else:
            torch.testing.assert_close(found, expected)
        cache.reset()
        healed = generate(model, cache, ids, max_new_tokens=4)
        twin.reset()
        assert_exact(generate(model, twin, ids, max_new_tokens=4), healed)


@pytest.mark.parametrize(
    ("method", "fields"),
    combinations(
        CACHES.keys(),
        {"exact": {"exact": True}, "bitwise": {"exact": "bitwise"}, "all": {"num_selected": LENGTH}, "some": {}},
    ),
)
def test_autocast(method: str, fields: dict[str, Any]) -> None:
    """`torch.autocast` covers the model's own attention, and nothing that is fitted, stored or selected by."""
    model, asked = long_fresh("llama"), {"max_new_tokens": 3}
    ids, cls = prompt(model, 2, LENGTH), checked(cache_class(method))
    with torch.autocast(DEVICE.type, torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        expected = generate(model, DynamicCache(config=model.config), ids, **asked)
        with cls(model, **{**some(method), "reuse_capacity": 0, **fields}) as cache:
            found = generate(model, cache, ids, **asked)
            assert bool(cache.report().selected_fraction) == ("exact" not in fields)
    assert found.logits.isfinite().all()
    if fields:
        close = compare(Decoded(expected.tokens, expected.logits[:2]), Decoded(expected.tokens, found.logits[:2]))
        assert close.deviation <= 0.1, "more than sums in bfloat16 in another order"
