"""Every predictor that there is does what `PredictorTests` asks."""

from __future__ import annotations

import pytest
import torch

from examples.own_method import PageConfig, PagePredictor
from hf_offload_cache.memory import MemoryAccount, Workspace
from hf_offload_cache.methods.disk_swap import LowRankPredictor, LowRankShared, Rules
from hf_offload_cache.testing import PredictorTests


class TestLowRankPredictor(PredictorTests):
    rules = Rules(torch.float32, PredictorTests.num_sinks, 8, reserve=PredictorTests.tokens)

    def make_predictor(self, rows: int, account: MemoryAccount) -> LowRankPredictor:
        shared = LowRankShared(account, Workspace(account, "scores"))
        return LowRankPredictor(self.form, rows, self.rules, shared, "layer 0")

    def test_what_a_guess_goes_by_is_counted(self) -> None:
        """The importance of all units, which the latest choice leaves behind."""
        predictor, keys = self.fitted_predictor(3)
        before = predictor.tables_nbytes
        self.chosen(predictor, self.query(3, keys))
        held, least = predictor.tables_nbytes, 3 * (self.tokens // self.form.group_size) * 4
        assert held - before >= least
        predictor.close()
        assert held - predictor.tables_nbytes >= least


class TestLowRankPredictorIn8Bits(TestLowRankPredictor):
    rules = Rules(torch.int8, PredictorTests.num_sinks, 6, reserve=PredictorTests.tokens)


class TestLowRankPredictorWithCodes(TestLowRankPredictor):
    rules = Rules(None, PredictorTests.num_sinks, summary_bytes=4, reserve=PredictorTests.tokens)


class TestPagePredictor(PredictorTests):
    def make_predictor(self, rows: int, account: MemoryAccount) -> PagePredictor:
        config = PageConfig(group_size=4, num_sinks=self.num_sinks, max_context=self.tokens + 32)
        return PagePredictor(self.form, rows, config, account)


class _KeepsOthers(PagePredictor):
    def truncate(self, units: int) -> None:
        """Nothing is forgotten."""


class _MixesRows(PagePredictor):
    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(torch.zeros_like(rows))


class _Unsorted(PagePredictor):
    def select(self, *given: object) -> object:
        found = super().select(*given)
        return type(found)(found.units[:, ::-1])


@pytest.mark.parametrize(
    ("kind", "test"), [(_KeepsOthers, "truncate"), (_MixesRows, "select_rows"), (_Unsorted, "choices")]
)
def test_the_suite_notices(kind: type[PagePredictor], test: str) -> None:
    class Suite(TestPagePredictor):
        def make_predictor(self, rows: int, account: MemoryAccount) -> PagePredictor:
            return kind(self.form, rows, PageConfig(group_size=4, num_sinks=self.num_sinks), account)

    with pytest.raises(AssertionError):
        getattr(Suite(), f"test_{test}")()
