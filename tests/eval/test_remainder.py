"""The experiments on the remainder run, and estimates come closer to full attention than dropping it."""

from __future__ import annotations

import pytest
import torch
from letters import Letters
from long_llama import long_model

from eval.remainder.attention import ESTIMATES, Plan, follow
from eval.remainder.study import PLANS, STUDY, run
from eval.studies.common import Rows
from eval.studies.contexts import prefill


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(0))


def test_full_attention_is_the_models() -> None:
    """Also where all groups are selected, and the remainder is empty."""
    model, text = long_model(), ids(330)
    context, new = prefill(model, text[:, :300]), text[:, 300:]
    with torch.no_grad():
        expected = model(text).logits[0, 300:]
    for plan in (Plan(), Plan(400), Plan(400, "both"), Plan(400, per_head=True)):
        found, lost = follow(model, context, new, plan)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert lost == pytest.approx(0, abs=1e-6)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_every_estimate_is_finite(estimate: str) -> None:
    model, text = long_model(), ids(340)
    context, new = prefill(model, text[:, :320]), text[:, 320:]
    found, lost = follow(model, context, new, Plan(64, estimate, among=8))
    assert torch.isfinite(found).all() and 0 < lost < 1


def test_true_values_are_closest() -> None:
    """The limit for any estimate comes closer to full attention than dropping does."""
    model, text = long_model(), ids(360)
    context, new = prefill(model, text[:, :320]), text[:, 320:]
    reference, _ = follow(model, context, new, Plan())
    errors = {name: float((follow(model, context, new, Plan(32, name))[0] - reference).norm()) for name in
              ("dropped", "true")}  # fmt: skip
    assert errors["true"] < errors["dropped"]


def test_the_study_runs_quickly() -> None:
    arguments = STUDY.parsed(["--quick", "--tokens", "400", "--steps", "16", "--bytes", "8"])
    summary = run(arguments, Rows(say=lambda line: None), (long_model(), Letters()))
    assert set(summary["plans"]) == set(STUDY.quick["plans"]) <= set(PLANS)
    assert all(row["kl"] > 0 for row in summary["plans"].values())
