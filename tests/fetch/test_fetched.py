"""Which of the gathered entries are attended to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hf_offload_cache.fetch import Areas, Choice, Extents, valid_entries
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.memory import MemoryAccount


def test_what_is_kept_of_a_unit_counts_through_its_runs() -> None:
    """`keep` names a unit's entries in the order of its runs: units of six entries in records of four."""
    extents = Extents(
        np.array([[7, 8, 9]]), np.array([[2, 0, 1]]), np.array([[2, 4, 3]]), np.array([[0, 0, 1]])
    )
    keep = np.array([[[True, False, True, True, False, True], [False, True, True, False, False, False]]])
    found = valid_entries(Choice(np.array([[0, 1]]), keep=keep), extents, 4, there=3)
    assert found is not None
    assert found.astype(int).tolist() == [[0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1]]
    whole = valid_entries(Choice(np.array([[0, 1]])), extents, 4, there=3)
    assert whole is not None
    assert whole.astype(int).tolist() == [[0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]]


def test_each_row_counts_for_itself() -> None:
    """Rows whose units have other runs: an entry of one says nothing of the other's; a missing record has none."""
    extents = Extents(
        np.array([[4, 5, 6], [7, 8, -1]]), None, np.array([[2, 2, 1], [2, 1, 2]]), np.array([[0, 0, 1], [0, 1, 2]])
    )
    keep = np.zeros((2, 3, 4), dtype=bool)
    keep[0, 0, 3] = keep[0, 1, 0] = keep[1, 0, 1] = keep[1, 1, 0] = keep[1, 2, :] = True
    found = valid_entries(Choice(np.array([[0, 1, -1], [0, 1, 2]]), keep=keep), extents, 2, there=5)
    assert found is not None
    assert found.astype(int).tolist() == [[0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 16, 2, 16), (1, 24, 1, 8), (3, 2, 1, 5)])
def test_a_view_unpacks_in_its_own_memory(rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Entries are those of the payloads, however many there are, in the memory that a plan counts for them. A form of
    the same sizes with other heads gets a view of its own."""
    account = MemoryAccount()
    areas, form = Areas(account), RecordFormat(*shape, dtype, 3, 8)
    for width, behind in ((1, 0), (1, 1), (2, 1), (5, 1), (17, 2), (40, 1)):
        torch.manual_seed(width)
        entries = torch.randn(rows * width, 3, form.entry_width).to(dtype)
        payloads = torch.empty(rows * width, form.payload_width, dtype=torch.uint8)
        form.pack(entries, payloads)
        view = areas.view(rows, width, behind, form, torch.device("cpu"), rows * (width + max(1, behind)))
        view.payloads.tensor[torch.from_numpy(view.target)] = payloads
        view.unpack()
        found = view.entries[:, : width * 3].reshape(rows * width, 3, form.entry_width)
        assert torch.equal(found, form.unpacked(payloads))
        assert account.by_owner["selection"] == rows * (width + max(1, behind)) * form.record_width * dtype.itemsize
        other = dataclasses.replace(form, num_key_heads=1, key_dim=form.key_width)
        assert (areas.view(rows, width, behind, other, torch.device("cpu"), 1) is view) == (other == form)
        areas.release()
