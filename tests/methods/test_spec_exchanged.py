"""`SpecCache` where what is chosen for the next step comes at once, as on a GPU: on a CPU, by what is done there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checked_cache import checked
from harness import Decoded, assert_exact, generate, prompt
from long_llama import long_model
from shared_keys import gemma3n
from spec_fields import SMALL
from transformers import DynamicCache

from hf_offload_cache import SpecCache
from hf_offload_cache.methods.spec import ChosenEntries, EntryReads, PinnedEntries

MEMORY: dict[str, Any] = {**SMALL, "group_size": 32, "engine": "memory"}


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries came, of each exchange."""
    came = list[int]()

    def exchange(
        self: PinnedEntries, history: Any, chosen: ChosenEntries, wanted: torch.Tensor, *, complete: bool
    ) -> torch.Tensor:
        assert not complete or bool((wanted >= 0).all())
        absent = chosen.want(wanted).cpu().numpy()
        most = int((absent >= 0).sum(2).max(initial=0))
        chosen.take([EntryReads._parts(self.reads, history, absent[:, :, :most])] if most else [])
        came.append(int((absent >= 0).sum()))
        return torch.tensor(came[-1])

    monkeypatch.setattr(PinnedEntries, "exchange", exchange)
    init = EntryReads.__init__

    def with_reads(reads: EntryReads, *given: Any) -> None:
        init(reads, *given)
        reads.pinned.reads = reads  # type: ignore[attr-defined]

    monkeypatch.setattr(EntryReads, "__init__", with_reads)
    return came


def both(fields: dict[str, Any], **options: Any) -> tuple[Decoded, Decoded]:
    model, ids = long_model(), prompt(long_model(), 1, 20).repeat(1, 10)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=40, **options)
    with SpecCache(model, **{**MEMORY, "num_selected": 1000, **fields}) as cache:
        return expected, generate(model, cache, ids, max_new_tokens=40, **options)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 6}], ids=str)
@pytest.mark.parametrize("fields", [{}, {"top_up": "always"}], ids=str)
def test_where_all_is_as_it_was_stored(exchanges: list[int], options: Any, fields: Any) -> None:
    """It is `DynamicCache`: no candidate attends to what was chosen for the step after."""
    assert_exact(*both(fields, **options))
    assert sum(exchanges) > 0


def test_layers_that_share_keys_attend_to_each_token_once(exchanges: list[int]) -> None:
    cls, model = checked(SpecCache), gemma3n()
    with cls(model, num_selected=20, **MEMORY) as cache:
        generate(model, cache, prompt(model, 1, 400), max_new_tokens=40)
    assert len(cls.gathers) > 40 and sum(exchanges) > 0
