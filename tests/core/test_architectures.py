"""The walk: every causal language model that transformers ships is exact, or `DynamicCache` cannot generate with it.

With the environment variable WALK_JSON set, the summary of the short walk is written to that path.
"""

from __future__ import annotations

import harness
import pytest
import transformers
import walk
from packaging.version import Version
from transformers.cache_utils import DynamicLayer

MIN_GENERATING, MIN_EXACT, MIN_TAGGED = 170, 130, 105
"""Of transformers 5.23; the walk is empty-handed when fewer generate, whatever the cache does."""

NEWEST = Version(transformers.__version__) >= Version("5.23")


@pytest.fixture(scope="module")
def results() -> dict[str, walk.Result]:
    """What the tests of this module have walked over so far."""
    return {}


def check(result: walk.Result) -> None:
    """Fails on a wrong architecture; skips, with the reason, where there is nothing to compare with."""
    if not result.generates:
        pytest.skip(f"{result.status}: {result.reason}")
    assert result.status == "exact", result
    assert result.bitwise, result


@pytest.mark.parametrize("name", walk.architectures())
def test_architecture(name: str, results: dict[str, walk.Result]) -> None:
    """Beams of padded rows within the tolerance, and of representatives greedy; greedy bitwise with `exact="bitwise"`;
    model restored. Greedy, beams, and padded rows, where `DynamicCache` does not run beams of padded rows."""
    cases = walk.SHORT_CASES if name in walk.REPRESENTATIVES else ("padded_beams",)  # the others' greedy is slow, below
    results[name] = walk.walk_one(walk.architectures()[name], cases)
    if "padded_beams" in results[name].refused:
        results[name] = walk.walk_one(walk.architectures()[name], ("greedy", "beams", "left_padding"))
    check(results[name])


@pytest.mark.parametrize("name", walk.usually(walk.WITH_EVERY_CACHE, walk.architectures()))
def test_architecture_in_further_cases(name: str) -> None:
    """Greedy, beams, left padding, sampling, batches, chunked prefill, prompt lookup and a second turn, wherever
    `DynamicCache` runs them."""
    check(walk.walk_one(walk.architectures()[name], ("greedy", *walk.FURTHER_CASES)))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3_text", "deepseek_v3", "bloom"])
@pytest.mark.parametrize("layer_class", [harness.OnlyNewTokens, harness.StaleGroup, harness.NoReorder])
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
