"""The experiments on the remainder run; without one, attention is the model's."""

from __future__ import annotations

import pytest
import torch
from letters import Letters
from long_llama import long_model

from eval.remainder.attention import Plan, follow
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


def test_the_study_runs_quickly() -> None:
    arguments = STUDY.parsed(["--quick", "--tokens", "400", "--steps", "16", "--bytes", "8"])
    summary = run(arguments, Rows(say=lambda line: None), (long_model(), Letters()))
    assert set(summary["plans"]) == set(STUDY.quick["plans"]) <= set(PLANS)
    assert all(row["kl"] > 0 for row in summary["plans"].values())
