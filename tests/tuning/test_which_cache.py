"""Which cache is chosen of those that fit, by hand-made tables; and the shipped one."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_offload_cache import registry
from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.model import Geometry
from hf_offload_cache.tuning import ComparedPlan, compare_plans, measured_caches
from hf_offload_cache.tuning.which_cache import which_cache

PLANS = compare_plans(Geometry.uniform(4, 8, 2, 32, torch.bfloat16), None, 4096, 1, {})


def fitting(*names: str) -> list[ComparedPlan]:
    """Plans that fit, of these names, and refusals of the registry's others."""
    found = []
    for plan in PLANS:
        assert plan.plan is not None
        if plan.name in names:
            found.append(plan)
        else:
            found.append(ComparedPlan(plan.name, None, None, "too little"))
    return found


def cell(cache: str, **values: Any) -> dict[str, Any]:
    usual = {"tokens": 4096, "memory": "1/13", "kl": 0.01, "perplexity": 1.0, "seconds": 0.1, "found": 10, "known": 10}
    return {"cache": cache, **usual, "long_kl": 0.01, **values}


def test_notes_are_found_for_who_reads_them() -> None:
    """They cost many plans, and a choice needs them of one cache."""
    plans, asked = compare_plans(Geometry.uniform(4, 8, 2, 32), None, 4096, 1, {}), list[int]()
    assert not any("notes" in vars(plan) for plan in plans)
    plan = dataclasses.replace(plans[0], noting=lambda: asked.append(1) or ["a note"])
    assert plan == plans[0] and not asked
    assert plan.to_dict()["notes"] == plan.notes == ("a note",) and asked == [1]


BOTH = ("disk-swap", "cluster")


@pytest.mark.parametrize(
    ("first", "second", "goal", "hint", "wanted"),
    [
        ({"kl": 0.01}, {"kl": 0.02}, "fidelity", "long-prompt", "disk-swap"),
        ({"kl": 0.02}, {"kl": 0.01}, "fidelity", "long-prompt", "cluster"),
        # two needles in ten are worth more than any distance, one is not, nor is one in a hundred
        ({"kl": 0.02}, {"kl": 0.01, "found": 8}, "fidelity", "long-prompt", "disk-swap"),
        ({"kl": 0.02}, {"kl": 0.01, "found": 9}, "fidelity", "long-prompt", "cluster"),
        ({"kl": 0.02, "found": 100, "known": 100}, {"found": 99, "known": 100}, "fidelity", "long-prompt", "cluster"),
        ({"long_kl": 0.3}, {"long_kl": 0.2, "kl": 1.0, "found": 0}, "fidelity", "long-output", "cluster"),
        ({"seconds": 0.05, "kl": 0.048}, {}, "speed", "long-prompt", "disk-swap"),
        ({"seconds": 0.05, "kl": 0.05, "perplexity": 1.0}, {}, "speed", "long-prompt", "cluster"),
        ({"seconds": 0.05, "kl": 0.2}, {"kl": 0.1}, "speed", "long-prompt", "disk-swap"),
    ],
)
def test_the_best_by_what_counts(first: dict, second: dict, goal: str, hint: str, wanted: str) -> None:
    cells = [cell("disk-swap", **first), cell("cluster", **second)]
    for order in (cells, cells[::-1]):
        chosen = which_cache(fitting(*BOTH), order, 1 / 13, 4096, goal, hint)
        assert (chosen.name, chosen.plan.refused) == (wanted, None)


def test_what_does_not_fit_is_not_chosen_and_said() -> None:
    cells = [cell("disk-swap", kl=0.5), cell("cluster"), cell("spec")]
    chosen = which_cache(fitting("disk-swap"), cells, 1 / 13, 4096)
    assert chosen.name == "disk-swap"
    lines = chosen.why.splitlines()
    assert lines[0].startswith("disk-swap: at 4,096 tokens and 1/13: KL 0.5, perplexity 1.000")
    assert "cluster: left out: too little" in lines and len(lines) == len(registry.CACHES)
    with pytest.raises(BudgetError, match="no cache fits this memory: disk-swap: too little; "):
        which_cache(fitting(), cells, 1 / 13, 4096)


def test_caches_are_compared_in_one_memory_and_context() -> None:
    """The nearest that most of them have: one that was refused in a smaller memory gains nothing by its larger one."""
    cells = [cell("disk-swap", kl=0.02), cell("cluster", kl=0.01), cell("disk-swap", memory="1/34", kl=0.5)]
    cells += [cell("disk-swap", tokens=1024, kl=0.1), cell("cluster", tokens=1024, kl=0.2)]
    assert which_cache(fitting(*BOTH), cells, 1 / 12, 5000).name == "cluster"
    assert which_cache(fitting(*BOTH), cells, 1 / 12, 1000).name == "disk-swap"
    assert which_cache(fitting(*BOTH), cells, 1 / 34, 5000).name == "cluster"  # both at 1/13, not one at 1/34
    assert which_cache(fitting("disk-swap"), cells, 1 / 34, 5000).why.startswith("disk-swap: at 4,096 tokens and 1/34")


def test_long_outputs_that_were_measured_in_another_memory_say_nothing() -> None:
    cells = [cell("disk-swap", long_kl=0.3), cell("cluster", long_kl=0.2, kl=0.02, seconds=0.2)]
    for share in (2 / 13, 1 / 7, 1 / 25, 1 / 26 - 1e-9):
        chosen = which_cache(fitting(*BOTH), cells, share, 4096, hint="long-output")
        assert chosen.name == "cluster" and "KL 0.2 after a long output" in chosen.why.splitlines()[0]
    for share in (1 / 6, 1 / 27):
        chosen = which_cache(fitting(*BOTH), cells, share, 4096, hint="long-output")
        assert chosen.name == "disk-swap"
        assert chosen.why.splitlines()[0].endswith("; no measurement after a long output at this memory")
    assert which_cache(fitting(*BOTH), cells, 1 / 13, 4096, "speed", "long-output").name == "disk-swap"
    for one in cells:
        del one["seconds"]
    unmeasured = which_cache(fitting(*BOTH), cells, 1 / 13, 4096, "speed", "long-output").why.splitlines()[0]
    assert unmeasured.endswith("because none has a measurement of speed")


def test_needles_are_said_with_the_lengths_at_which_they_were_asked_for() -> None:
    cells = [cell("disk-swap", needle_tokens=[2048, 4096]), cell("cluster")]
    lines = which_cache(fitting(*BOTH), cells, 1 / 13, 4096).why.splitlines()
    assert "10 of 10 needles in contexts of 2,048, 4,096 tokens, " in lines[0]
    assert "10 of 10 needles, KL" in next(line for line in lines if line.startswith("cluster"))


def test_where_nothing_was_measured_that_is_said() -> None:
    unmeasured = which_cache(fitting("cluster", "spec"), [cell("disk-swap")], 1 / 13, 4096)
    assert unmeasured.why.startswith("cluster: the first that fits, because none has a measurement of fidelity")
    cells = [{name: value for name, value in cell("spec").items() if name != "seconds"}, cell("cluster", seconds=9.0)]
    chosen = which_cache(fitting("cluster", "spec"), cells, 1 / 13, 4096, "speed")
    assert chosen.name == "cluster" and "spec: no measurement there" in chosen.why
    needles_unknown = [cell("cluster", found=0, kl=0.5), cell("spec", known=0)]
    assert which_cache(fitting("cluster", "spec"), needles_unknown, 1 / 13, 4096).name == "cluster"
    assert which_cache(fitting("spec"), needles_unknown, 1 / 13, 4096).name == "spec"


@pytest.mark.parametrize("wrong", [{"goal": "fast"}, {"hint": "long"}])
def test_another_goal_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be one of"):
        which_cache(fitting(*BOTH), [], 1 / 13, 4096, **wrong)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"cells": [{"cache": "spec"}]}', '{"cells": [{"cache": "spec", "tokens": 0, "memory": "1"}]}',
        '{"cells": [{"cache": "spec", "tokens": 9, "memory": "1/0"}]}', "[" * 1000 + "]" * 1000,
        '{"cells": [{"cache": "spec", "tokens": 9, "memory": "1e-999999999"}]}',
        '{"cells": [{"cache": "spec", "tokens": 1' + "0" * 400 + ', "memory": "1"}]}',
        '{"cells": [{"cache": "spec", "tokens": 9, "memory": "1/2", "kl": NaN, "perplexity": 1}]}',
        '{"cells": [{"cache": "spec", "tokens": 9, "memory": "1/2", "kl": 0}]}',
        '{"cells": [{"cache": "spec", "tokens": 9, "memory": "1/2", "needle_tokens": [0]}]}',
        '{"cells": [{"cache": "spec", "tokens": 9, "memory": "1/2", "needle_tokens": "all"}]}',
    ],
)
def test_a_file_that_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(ConfigError, match="measured must be a file that `tune --compare` wrote"):
        measured_caches(tmp_path / "table.json")
    with pytest.raises(ConfigError, match="measured must be a file"):
        measured_caches(tmp_path / "none.json")


def test_cells_with_num_selected_are_ignored(tmp_path: Path) -> None:
    """Earlier files have them for steps that select more tokens than by default."""
    usual, table = [cell("disk-swap", kl=0.02), cell("cluster", kl=0.03)], tmp_path / "table.json"
    more = [cell("cluster", kl=0.01, num_selected=800), cell("spec", num_selected="many", kl="unknown")]
    table.write_text(json.dumps({"cells": [usual[0], *more, usual[1]]}))
    cells = measured_caches(table)
    assert cells == usual and which_cache(fitting(*BOTH), cells, 1 / 13, 4096).name == "disk-swap"


def test_the_shipped_table_has_every_cache() -> None:
    cells = measured_caches()
    for name in registry.CACHES:
        own = [each for each in cells if each["cache"] == name]
        for field in ("kl", "perplexity", "seconds", "long_kl", "long_perplexity"):
            assert any(field in each for each in own), (name, field)
        assert len({each["tokens"] for each in own}) > 1 and len({each["memory"] for each in own}) > 1
    for each in cells:
        assert ("found" in each) == ("needle_tokens" in each)
        assert 0 < Fraction(each["memory"]) <= 1 and each.get("found", 0) <= each.get("known", 0)
        assert all(each.get(field, 0) >= 0 for field in ("kl", "long_kl")) and each.get("seconds", 1) > 0
    json.dumps(cells, allow_nan=False)


def test_needles_of_the_shipped_table_are_of_the_same_questions_wherever_caches_are_compared() -> None:
    asked: dict[tuple[int, str], set[tuple[int, ...]]] = {}
    for each in measured_caches():
        if "known" in each:
            place = asked.setdefault((each["tokens"], each["memory"]), set())
            place.add((each["known"], *each["needle_tokens"]))
    assert all(len(place) == 1 for place in asked.values()), asked
    assert {7168} < set().union(*(one[1:] for place in asked.values() for one in place))  # as long as was asked
