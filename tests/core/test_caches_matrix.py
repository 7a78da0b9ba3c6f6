"""What every cache passes: those of the registry, and the example's. A new method is in here by its registry line."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from checked_cache import checked
from harness import CASES, PAD, SMALL, assert_exact, generate, prompt, reference, tiny
from long_llama import LENGTH, long_model, some
from pairwise import combinations

from hf_offload_cache.fetch import Fetcher
from hf_offload_cache.methods.spec import EntryReads
from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import CACHES, cache_class

METHODS = (*CACHES, "examples.own_method:PageCache")
ORDERS = (*METHODS, "shuffled_history:ShuffledCache")
"""With a history in no order, of rows that hold all key heads."""

REWRITING = ("padded_beams", "prompt_lookup", "second_turn")
"""Cases that reorder, crop or add to what is stored: each method runs them."""

EACH = pytest.mark.parametrize("method", METHODS)


def in_bits(bits: int | None) -> dict[str, Any]:
    """The field that stores entries in so many bits; None: in the model's type."""
    return {} if bits is None else {"entry_bits": bits}


FORMS = [(method, bits) for method in METHODS for bits in (None, 8)
         if bits is None or hasattr(cache_class(method).config_class, "entry_bits")]  # fmt: skip
"""Each method, with every format of its entries."""
EACH_FORM = pytest.mark.parametrize(("method", "bits"), FORMS)


@pytest.mark.parametrize(
    ("method", "case"), combinations(ORDERS, CASES.keys(), always=lambda method, case: case == "padded_beams")
)
def test_exact_in_every_way_of_decoding(method: str, case: str) -> None:
    """Streamed in blocks: `DynamicCache`'s tokens and logits."""
    with harness.unchanged(tiny("llama")), cache_class(method)(tiny("llama"), exact=True, **SMALL) as cache:
        assert_exact(reference("llama", case), CASES[case](tiny("llama"), cache))
        assert cache.report().layers["tagged"] == 3


@pytest.mark.parametrize(
    ("method", "name", "case"), combinations(ORDERS, ("llama", "gpt_oss"), ("greedy", "padded_beams"))
)
def test_bitwise(method: str, name: str, case: str) -> None:
    with cache_class(method)(tiny(name), exact="bitwise", **SMALL) as cache:
        assert_exact(reference(name, case), CASES[case](tiny(name), cache), bitwise=True)


@pytest.mark.parametrize(
    ("method", "case"),
    combinations(ORDERS, CASES.keys(), always=lambda method, case: case in REWRITING),
)
def test_all_of_it_selected_is_exact(method: str, case: str) -> None:
    """The path of a step that selects, with nothing left out: all gathers are right, and so are tokens and logits."""
    cls = checked(cache_class(method))
    everything = {**SMALL, "num_selected": 512, "reuse_capacity": 64, "look_ahead": method != "spec"}
    with harness.unchanged(tiny("llama")), cls(tiny("llama"), **everything) as cache:
        assert_exact(reference("llama", case), CASES[case](tiny("llama"), cache))
        assert cache.report().selected_fraction >= 1  # of units that are not full, places are counted
        assert len(cls.gathers) >= 3 * 3


def padded(rows: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mask = harness.padding(rows, LENGTH, 53)
    return prompt(long_model(), rows, LENGTH).masked_fill(mask == 0, PAD), {"attention_mask": mask}


@EACH_FORM
def test_every_sparse_gather_is_right(method: str, bits: int | None) -> None:
    """Padded beams, a second turn, candidates that are verified, and a crop into what was sealed; sinks always in."""
    cls, model = checked(cache_class(method)), long_model()
    fields = {**some(method), **in_bits(bits)} | ({"dense_layers": 2} if method == "abstract-tree" else {})
    with harness.unchanged(model), cls(model, **fields) as cache:
        ids, mask = padded(2)
        generate(model, cache, ids, num_beams=3, max_new_tokens=6, **mask)
        of_layers = [cls.config_class(**fields).for_layers(3).of_layer(place) for place in range(3)]
        selected = sum(own.attended(LENGTH) for own in of_layers) / 3 / LENGTH
        assert 0 < cache.report().selected_fraction < selected + 0.2
        cache.reset()
        out = generate(model, cache, prompt(model, 2, LENGTH), max_new_tokens=4)
        ids = torch.cat([out.tokens, prompt(model, 2, 9, seed=8)], 1)
        out = generate(model, cache, ids, max_new_tokens=4)
        cache.crop(-45)
        ids = torch.cat([out.tokens[:, : cache.tokens], prompt(model, 2, 3, seed=9)], 1)
        generate(model, cache, ids, max_new_tokens=4)
        cache.reset()
        repeated = harness.repetitive_prompt(model, LENGTH)
        generate(model, cache, repeated, prompt_lookup_num_tokens=4, max_new_tokens=16)
        assert 0 < cache.report().selected_fraction < selected + 0.2
    fetched = max(-(-own.tokens_fetched(LENGTH) // own.group_size) for own in of_layers)
    assert len(cls.gathers) >= 3 * (5 + 9)
    assert all(units.shape[1] <= 2 * (fetched + 2) for _, units in cls.gathers)
    chosen = [units for _, units in cls.gathers if units.shape[1]]
    assert all((units[:, 0] <= 53 // 4 + 1).all() for units in chosen)  # the sinks' unit, of padded rows too


@EACH_FORM
def test_a_budget_is_kept(method: str, bits: int | None) -> None:
    """`for_budget` finds fields whose plan fits; what is held never exceeds what was planned."""
    cls, model = cache_class(method), long_model()
    with cls.for_budget(model, memory="3/5", max_context=2 * LENGTH, max_batch=2, **in_bits(bits)) as cache:
        plan = cls.plan(Geometry.of(model), cache.config, 2 * LENGTH, 2)
        generate(model, cache, prompt(model, 2, 2 * LENGTH - 8), max_new_tokens=8)
        report = cache.report()
        cache.reorder_cache(torch.tensor([1, 1]))
        assert report.decode_steps == 7 and report.selected_fraction < 1
        assert cache.report().peak_memory_bytes <= plan.peak_bytes <= int(cache.config.memory)
        assert plan.peak_bytes <= Geometry.of(model).full_kv_bytes(2 * LENGTH, 2) * 3 // 5
        assert report.disk_bytes <= plan.disk_bytes * 9 // 8 + 2**26


def answer(cache: Any, steps: int = 4) -> str:
    """A digest of the logits of `steps` greedy steps after a question of nine tokens, given one row."""
    model = long_model()
    ids = torch.cat([cache.input_ids, prompt(model, len(cache.input_ids), 9, seed=8)], 1)
    out = generate(model, cache, ids, max_new_tokens=steps)
    return hashlib.sha256(out.logits.numpy().tobytes() + out.tokens.numpy().tobytes()).hexdigest()


_OPEN = """
import sys
from hf_offload_cache.registry import cache_class
from test_caches_matrix import answer, long_model
for method, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with cache_class(method).open(folder, long_model()) as cache:
            print(folder, answer(cache))
    except Exception as error:
        print(folder, repr(error))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int | None], dict[str, str]]:
    """By method and bits, what a cache, its fork and, in one new process, its saved context answer, or why they do not;
    and the context's folder."""
    folder, found, arguments = tmp_path_factory.mktemp("contexts"), {}, []
    for number, (method, bits) in enumerate(FORMS):
        fields = {**some(method), **in_bits(bits), "engine": "auto"}
        found[method, bits] = said = {"folder": str(folder / str(number)), "fork": "", "itself": ""}
        with cache_class(method)(long_model(), path=folder, **fields) as cache:
            generate(long_model(), cache, prompt(long_model(), 1, LENGTH), max_new_tokens=4)
            try:
                cache.save(said["folder"])
                with cache.fork() as twin:
                    said["fork"] = answer(twin)
                said["itself"] = answer(cache)
            except Exception as error:  # each has a test of its own, which says so
                said["itself"] = repr(error)
        arguments += [method, said["folder"]]
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    command = f"import sys\nsys.path[:0] = {paths}\n{_OPEN}"
    done = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    elsewhere = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    return {form: {**said, "elsewhere": elsewhere[said["folder"]]} for form, said in found.items()}


@EACH_FORM
def test_saved_opened_and_forked(
    method: str, bits: int | None, answers: dict[tuple[str, int | None], dict[str, str]], tmp_path: Path
) -> None:
    """A fork and the saved context, opened here and in a new process, answer to the bit as the cache does."""
    cls, said = cache_class(method), answers[method, bits]
    with cls.open(said["folder"], long_model(), path=tmp_path) as opened:
        assert type(opened) is cls and opened.tokens == LENGTH + 3
        here = answer(opened)
        assert opened.report().selected_fraction < 1
    assert {**said, "folder": ""} == {"folder": "", "fork": here, "itself": here, "elsewhere": here}


@EACH
def test_the_check_notices(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are one place off do not get through."""
    gather, bring = Fetcher.gather, EntryReads.bring

    def shifted(*given: Any) -> Any:
        found = gather(*given)
        return dataclasses.replace(found, entries=found.entries.roll(1, 1))

    def shifted_too(*given: Any) -> Any:
        return [dataclasses.replace(one, keys=one.keys.roll(1, 2)) for one in bring(*given)]

    monkeypatch.setattr(Fetcher, "gather", shifted)
    monkeypatch.setattr(EntryReads, "bring", shifted_too)
    with checked(cache_class(method))(long_model(), **some(method)) as cache, pytest.raises(AssertionError):
        generate(long_model(), cache, prompt(long_model(), 1, LENGTH), max_new_tokens=2)
