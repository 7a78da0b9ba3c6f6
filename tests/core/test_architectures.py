"""The walk: every causal language model that transformers ships is exact, or `DynamicCache` cannot generate with it.

The default run takes 16 representatives, and all models when the version of transformers is not the pinned one.

With the environment variable WALK_JSON set, the summary of the short walk is written to that path.
"""

from __future__ import annotations

import harness
import pytest
import transformers
import walk
from packaging.version import Version
from pairwise import combinations
from transformers.cache_utils import DynamicLayer

MIN_GENERATING, MIN_EXACT, MIN_TAGGED = 170, 130, 105
"""Of transformers 5.23; the walk is empty-handed when fewer generate, whatever the cache does."""

IN_FURTHER_CASES = ("bloom", "gemma3n_text")
"""What the default run takes through them; the exactness matrix does with others."""

NEWEST = Version(transformers.__version__) >= Version("5.23")


@pytest.fixture(scope="module")
def results() -> dict[str, walk.Result]:
    """What the tests of this module have walked over so far."""
    return {}


def check(result: walk.Result, bitwise: bool = True) -> None:
    """Fails on a wrong architecture; skips, with the reason, where there is nothing to compare with."""
    if not result.generates:
        pytest.skip(f"{result.status}: {result.reason}")
    assert result.status == "exact", result
    assert result.bitwise is (True if bitwise else None), result


@pytest.mark.parametrize("name", walk.architectures_by_default())
def test_architecture(name: str, results: dict[str, walk.Result]) -> None:
    """Beams of padded rows, or three other cases if `DynamicCache` refuses these; representatives also bitwise."""
    architecture, bitwise = walk.architectures()[name], name in walk.REPRESENTATIVES
    cases = walk.SHORT_CASES if bitwise else ("padded_beams",)
    if walk.beams_are_wrong(name):
        cases = ("greedy", "left_padding")
    results[name] = walk.walk_one(architecture, cases, bitwise=bitwise)
    if "padded_beams" in results[name].refused:
        results[name] = walk.walk_one(architecture, ("greedy", "beams", "left_padding"), bitwise=bitwise)
    check(results[name], bitwise)


@pytest.mark.parametrize("name", walk.usually(IN_FURTHER_CASES, walk.architectures()))
def test_architecture_in_further_cases(name: str) -> None:
    """All other ways of decoding, wherever `DynamicCache` runs them."""
    cases = [case for case in walk.FURTHER_CASES if "beams" not in case or not walk.beams_are_wrong(name)]
    check(walk.walk_one(walk.architectures()[name], ("greedy", *cases)))


@pytest.mark.parametrize(
    ("layer_class", "name"),
    combinations(
        {broken.__name__: broken for broken in (harness.OnlyNewTokens, harness.StaleGroup, harness.NoReorder)},
        ("gpt2", "llama", "gemma3_text", "deepseek_v3", "bloom"),
    ),
)
def test_the_walk_notices_a_broken_cache(name: str, layer_class: type[DynamicLayer]) -> None:
    """A cache that loses, damages or mixes up its history is "wrong"."""
    result = walk.walk_one(walk.architectures()[name], make=lambda model, exact: harness.broken(model, layer_class))
    assert result.status == "wrong", result


def test_the_walk_as_a_whole(results: dict[str, walk.Result], capsys: pytest.CaptureFixture[str]) -> None:
    """The counts that the project promises; prints what could not be compared."""
    if len(results) < len(walk.architectures()):
        pytest.skip("only a part of the walk was run")
    summary = walk.write_summary(results.values())
    with capsys.disabled():
        print("\n" + walk.as_text(summary))
    assert summary["wrong"] == 0
    assert summary["exact"] == summary["generating"]
    if NEWEST:
        assert summary["generating"] >= MIN_GENERATING
        assert summary["exact"] >= MIN_EXACT
        assert summary["tagged_throughout"] >= MIN_TAGGED
