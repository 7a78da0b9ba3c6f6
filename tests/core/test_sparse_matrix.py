"""Sparse decoding on every kind of model: what attention is given is what was put in, whatever happened in between.

`checked_gathers` keeps a copy of all that comes in, moved along with every change, and holds every gathered entry
against it. It serves the other tests of sparse caches too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
import transformers
import walk
from harness import PAD, generate, prompt, unchanged
from transformers.cache_utils import LinearAttentionLayer

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.caches.disk_swap import DiskSwapLayer
from hf_offload_cache.core.offload_layer import OffloadLayer
from hf_offload_cache.fetch.selection_buffer import SelectionBuffer
from hf_offload_cache.history.position_history import History

POSITIONS = 2048
"""Positions of the models in here: the matrix's own have too few for a prompt that an adapter is made of."""

SPARSE: dict[str, Any] = {
    "group_size": 4,
    "num_recent": 8,
    "block_tokens": 64,
    "num_selected": 32,
    "look_ahead": True,
    "layer_budgets": "uniform",
    "rank": 8,
    "engine": "memory",
}
"""Fields of a cache that selects an eighteenth of a prompt of `LENGTH`."""

LENGTH = 620
"""Tokens of a prompt: more than the 512 that an adapter is made of."""


# ---------------------------------------------------------------------------------------------- models


@contextlib.contextmanager
def positions() -> Iterator[None]:
    """The walk's tiny models have `POSITIONS` positions in here."""
    before = dict(walk.SIZES)
    walk.SIZES.update({name: POSITIONS for name, size in before.items() if size == walk.POSITIONS})
    try:
        yield
    finally:
        walk.SIZES.update(before)


def walked(name: str) -> Any:
    """A new tiny model of any architecture, with `POSITIONS` positions."""
    with positions(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return walk.tiny_model(walk.architectures()[name])


def long_fresh(name: str, seed: int = 0, **fields: Any) -> Any:
    """A new tiny model of the matrix with `POSITIONS` positions and `fields`."""
    prefix, own = harness.TINY[name]
    config_class = getattr(transformers, harness._CLASS_OF_CONFIG.get(prefix, f"{prefix}Config"))
    fields = {**harness.COMMON, **own, "max_position_embeddings": POSITIONS, **fields}
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    return harness.build(model_class, config_class(**copy.deepcopy(fields)), seed)


@functools.cache
def long_tiny(name: str) -> Any:
    """The model of that name, of the matrix or else of the walk, shared by all tests: close what is attached."""
    return long_fresh(name) if name in harness.TINY else walked(name)


MATRIX = ("llama", "qwen3", "gemma3", "mistral", "phi3", "opt", "gpt_neox", "gpt_oss", "deepseek_v2")
MODELS = (*MATRIX, "phi", "stablelm", "falcon_h1", "qwen3_next")
TAGGED = {name: 3 for name in MATRIX} | {"gemma3": 2, "gpt_oss": 2, "phi": 4, "stablelm": 4, "falcon_h1": 4}
TAGGED |= {"qwen3_next": 2, "deepseek_v2": 0}
"""Name -> layers that are sparse. DeepSeek-V2 caches what keys are made of, and gets it back whole."""

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be sparse")


# ---------------------------------------------------------------------------------------------- the check


@dataclass
class Gathers:
    """What was gathered while the check was on."""

    calls: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """(layer, groups (B, M)) of every gather that was found right."""

    def __len__(self) -> int:
        return len(self.calls)


@contextlib.contextmanager
def checking(strict: bool = True) -> Iterator[Gathers]:
    """Every gather is compared, to the bit, with the history read back whole and with a copy of what came in.

    `strict`: the groups are also distinct, ascending and sealed.
    """
    seen = Gathers()
    copies: dict[int, tuple[History, torch.Tensor, torch.Tensor]] = {}
    append, select_rows, truncate, gather = (
        History.append,
        History.select_rows,
        History.truncate,
        SelectionBuffer.gather,
    )

    def held(history: History) -> tuple[torch.Tensor, torch.Tensor] | None:
        kept = copies.get(id(history))
        return None if kept is None or kept[0] is not history else kept[1:]

    def watched_append(history: History, keys: torch.Tensor, values: torch.Tensor) -> Any:
        old = held(history)
        result = append(history, keys, values)
        both = (keys.detach().clone(), values.detach().clone())
        if old is not None:
            both = (torch.cat([old[0], both[0]], 2), torch.cat([old[1], both[1]], 2))
        if old is not None or history.length == keys.shape[2]:
            copies[id(history)] = (history, *both)
        return result

    def watched_select(history: History, rows: torch.Tensor) -> Any:
        result = select_rows(history, rows)
        if (old := held(history)) is not None:
            copies[id(history)] = (history, old[0][rows], old[1][rows])
        return result

    def watched_truncate(history: History, length: int) -> Any:
        result = truncate(history, length)
        if (old := held(history)) is not None:
            copies[id(history)] = (history, old[0][:, :, :length], old[1][:, :, :length])
        return result

    def watched_gather(buffer: SelectionBuffer, layer: Any, groups: np.ndarray) -> torch.Tensor:
        entries = gather(buffer, layer, groups)
        history = layer.history
        chosen = np.array(groups)
        if strict:
            assert chosen.shape[0] == layer.batch
            assert (np.diff(chosen, axis=1) > 0).all()
            assert chosen.size == 0 or 0 <= chosen.min() <= chosen.max() < history.num_groups
        columns = layer._columns(groups)[:, None, :, None]
        got = history.form.split(entries)
        own = held(history)
        for truth in [history.whole()] + ([] if own is None else [own]):
            for part, whole in zip(got, truth, strict=True):
                assert whole.shape[2] == layer.length
                assert torch.equal(part, whole.gather(2, columns.expand(-1, whole.shape[1], -1, whole.shape[3])))
        seen.calls.append((layer.layer_idx, chosen))
        return entries

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "append", watched_append)
        patch.setattr(History, "select_rows", watched_select)
        patch.setattr(History, "truncate", watched_truncate)
        patch.setattr(SelectionBuffer, "gather", watched_gather)
        yield seen


@pytest.fixture
def checked_gathers() -> Iterator[Gathers]:
    """`checking` for a whole test."""
    with checking() as seen:
        yield seen


# ---------------------------------------------------------------------------------------------- driving


class Driver:
    """Feeds a cache random tokens of a padded batch, and keeps the mask along."""

    def __init__(self, model: Any, cache: Any, rows: int = 3, length: int = LENGTH, step: int = 53) -> None:
        self.model, self.cache, self.seed = model, cache, 0
        self.start(rows, length, step)

    def start(self, rows: int, length: int, step: int) -> None:
        """A prompt in an empty cache; row i has i * step padded positions."""
        self.mask = torch.ones(rows, 0, dtype=torch.long)
        self.feed(length, harness.padding(rows, length, step))

    def feed(self, tokens: int = 1, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The logits (B, vocabulary) of the last of `tokens` new tokens."""
        rows, self.seed = len(self.mask), self.seed + 1
        new = torch.ones(rows, tokens, dtype=torch.long) if mask is None else mask
        self.mask = torch.cat([self.mask, new], 1)
        places = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -tokens:]
        ids = prompt(self.model, rows, tokens, self.seed).masked_fill(new == 0, PAD)
        options = {"attention_mask": self.mask} if not bool(self.mask.all()) else {}
        with torch.no_grad():
            logits = self.model(ids, past_key_values=self.cache, position_ids=places, **options).logits[:, -1]
        assert logits.isfinite().all()
        assert self.cache.get_seq_length() == self.mask.shape[1]
        return logits

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.mask = self.mask[rows]

    def repeat(self, repeats: int) -> None:
        self.cache.batch_repeat_interleave(repeats)
        self.mask = self.mask.repeat_interleave(repeats, 0)

    def select(self, rows: list[int]) -> None:
        self.cache.batch_select_indices(torch.tensor(rows))
        self.mask = self.mask[rows]

    def crop(self, tokens: int) -> None:
        self.cache.crop(-tokens)
        self.mask = self.mask[:, :-tokens]


def croppable(cache: DiskSwapCache) -> bool:
    """No layer slid over its tokens or holds a state that cannot go back."""
    return all(isinstance(layer, OffloadLayer) and layer.is_croppable for layer in cache.layers)


def linear(cache: DiskSwapCache) -> bool:
    """A layer holds a linear-attention state, alone or beside keys and values."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)


def sparse(model: Any, **fields: Any) -> DiskSwapCache:
    return DiskSwapCache(model, **{**SPARSE, **fields})


REUSE = {"none": {"reuse_capacity": 0}, "some": {"reuse_capacity": 40}, "default": {}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_sparse(model_name: str, cache: DiskSwapCache, seen: Gathers, steps: int) -> None:
    """Every layer that can be sparse was, in all of the steps; less than everything was attended."""
    report = cache.report()
    assert report.layers["tagged"] == TAGGED[model_name]
    assert len(seen) == steps * TAGGED[model_name]
    if not TAGGED[model_name]:
        assert report.selected_fraction is None
        return
    assert 0 < report.selected_fraction < 0.5
    assert all(layer.summary is not None for layer in cache.offloaded if isinstance(layer, DiskSwapLayer)
               and layer.state == "tagged")  # fmt: skip


# ---------------------------------------------------------------------------------------------- tests


COMBINATIONS = [
    (name, selection, engine, reuse)
    for name in MODELS
    for selection in ("default", "paper")
    for engine in ("memory", "direct")
    for reuse in REUSE
]
THROUGHOUT = ("llama", "gemma3", "gpt_oss")
PICKED = [
    ("default", "memory", "none"),
    ("default", "direct", "some"),
    ("paper", "memory", "default"),
    ("paper", "direct", "none"),
]
"""What models other than `THROUGHOUT` run by default."""


@pytest.mark.parametrize(
    ("name", "selection", "engine", "reuse"),
    [
        pytest.param(*one, marks=[] if one[0] in THROUGHOUT or one[1:] in PICKED else pytest.mark.slow)
        for one in COMBINATIONS
    ],
)
def test_changes_of_the_batch(
    name: str, selection: str, engine: str, reuse: str, tmp_path: Path, checked_gathers: Gathers
) -> None:
    """Three padded rows; beams' copies, repetition, selection, a crop into sealed groups, and a reset in between.

    Then a batch of another size without padding.
    """
    model, seen = long_tiny(name), checked_gathers
    fields = {"selection": selection, "engine": engine, "path": tmp_path, **REUSE[reuse]}
    with unchanged(model), sparse(model, **fields) as cache:
        driver = Driver(model, cache)
        steps = 0

        def feed() -> None:
            nonlocal steps
            for _ in range(2):
                driver.feed()
            steps += 2

        feed()
        driver.reorder([2, 0, 0])
        feed()
        if not linear(cache):  # transformers' own linear states can neither be repeated nor selected
            driver.repeat(2)
            feed()
            driver.select([5, 0, 3])
            feed()
        driver.feed(9)
        feed()
        if croppable(cache):
            driver.crop(45)
            feed()
            driver.feed(30)
            feed()
        assert_sparse(name, cache, seen, steps)
        cache.reset()
        seen.calls.clear()
        driver.start(3 if linear(cache) else 2, 560, 0)
        steps = 0
        for _ in range(2):
            feed()
        assert_sparse(name, cache, seen, steps)


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_reset_beside_linear_states(name: str, checked_gathers: Gathers) -> None:
    """A batch of another size after `reset`, which is what `PromptError` tells users to call for one."""
    model = long_tiny(name)
    ids = prompt(model, 2, LENGTH)
    with sparse(model) as cache:
        Driver(model, cache).feed()
        cache.reset()
        result = generate(model, cache, ids, max_new_tokens=5)
        assert_sparse(name, cache, Gathers(checked_gathers.calls[TAGGED[name] :]), 4)
    with sparse(model) as cache:
        harness.assert_exact(generate(model, cache, ids, max_new_tokens=5), result)


@pytest.mark.parametrize("selection", ["default", "paper"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, selection: str, checked_gathers: Gathers) -> None:
    """Greedy, a left-padded batch, and beams of a padded batch, with the default reuse buffer."""
    model = long_tiny(name)
    mask = harness.padding(3, LENGTH, 101)
    ids = prompt(model, 3, LENGTH).masked_fill(mask == 0, PAD)
    cases: tuple[tuple[int, dict[str, Any]], ...] = (
        (1, {}),
        (3, {"attention_mask": mask}),
        (2, {"attention_mask": mask[:2], "num_beams": 3}),
    )
    for rows, options in cases:
        with unchanged(model), sparse(model, selection=selection) as cache:
            out = generate(model, cache, ids[:rows], max_new_tokens=6, **options)
            assert not out.logits.isnan().any()
            assert out.tokens.shape == (rows, LENGTH + 6)
            assert_sparse(name, cache, checked_gathers, 5)
        checked_gathers.calls.clear()


@pytest.mark.parametrize("name", MODELS)
def test_everything_selected_is_exact(name: str, checked_gathers: Gathers) -> None:
    """The same gathers, with room for all groups: what `DynamicCache` gives. The adapter exists."""
    model = long_tiny(name)
    mask = harness.padding(2, LENGTH, 101)
    ids = prompt(model, 2, LENGTH).masked_fill(mask == 0, PAD)
    options: dict[str, Any] = {"attention_mask": mask, "num_beams": 2, "max_new_tokens": 6}
    expected = generate(model, transformers.DynamicCache(config=model.config), ids, **options)
    with unchanged(model), sparse(model, num_selected=1024) as cache:
        harness.assert_exact(expected, generate(model, cache, ids, **options))
        assert len(checked_gathers) == 5 * TAGGED[name]
        assert cache.report().selected_fraction == (1 if TAGGED[name] else None)


@pytest.mark.parametrize("wrong", ["stale slots", "rows", "tail"])
def test_the_check_notices(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is broken on purpose does not get through `checking`."""
    model = long_tiny("llama")
    if wrong == "stale slots":
        monkeypatch.setattr(DiskSwapLayer, "dropped", lambda layer, records: None)
    elif wrong == "rows":
        monkeypatch.setattr(History, "select_rows", lambda history, rows: history.tail.select_rows(rows))
    else:
        gather = SelectionBuffer.gather

        def shifted(buffer: SelectionBuffer, layer: Any, groups: np.ndarray) -> torch.Tensor:
            return gather(buffer, layer, groups).roll(1, 1)

        monkeypatch.setattr(SelectionBuffer, "gather", shifted)
    with checking(), sparse(model, num_selected=1024, reuse_capacity=1024) as cache:
        with pytest.raises(AssertionError):
            driver = Driver(model, cache, rows=3, step=0)
            driver.feed()
            driver.reorder([2, 0, 1])
            driver.feed()
            driver.crop(60)
            driver.feed(70)
            driver.feed()
        cache.reset()
