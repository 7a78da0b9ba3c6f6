"""The copy in a few bits: what it holds, and products and sums with it, against elements unpacked one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from fake_device import CUDA, Fake, fake_cuda, values_of
from low_bits import entry, made, states, stood_for

from hf_offload_cache.errors import BudgetError, ContextError
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.spec import LowBitCopy, LowBitForm


def check(copy: LowBitCopy, keys: torch.Tensor, values: torch.Tensor) -> None:
    assert copy.tokens == keys.shape[2]
    low_keys, low_values = stood_for(copy.form, keys, values)
    queries = torch.randn(len(keys), 2, 3, keys.shape[3], generator=torch.Generator().manual_seed(1))
    scores = copy.scores(queries, torch.empty(len(keys), 2, 3, copy.tokens))
    torch.testing.assert_close(scores, queries @ low_keys.transpose(2, 3), rtol=1e-5, atol=1e-4)
    shares = scores.softmax(-1)
    torch.testing.assert_close(copy.weighted(shares), shares @ low_values, rtol=1e-5, atol=1e-5)


def nbytes(form: LowBitForm, rows: int, tokens: int) -> int:
    return sum(math.prod(shape) for shape in form.layout(rows, tokens).values())


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("plain", [False, True])
def test_products_and_sums(bits: int, group: int, plain: bool) -> None:
    form = LowBitForm(entry(), bits, group, plain)
    keys, values = states(32 * group, form.entry)
    copy = made(form)
    copy.append([(keys[:, :, : 18 * group], values[:, :, : 18 * group])], 18 * group)
    check(copy, keys[:, :, : 18 * group], values[:, :, : 18 * group])
    edges = [18 * group, 18 * group + 5, 20 * group, 32 * group]
    parts = [(keys[:, :, a:b], values[:, :, a:b]) for a, b in itertools.pairwise(edges)]
    copy.append(iter(parts), 32 * group)
    check(copy, keys, values)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 48), (7, 3)])
def test_heads_of_any_width(dims: tuple[int, int]) -> None:
    form = LowBitForm(entry(*dims), 2, 64)
    assert form.value_dim % form.value_group == 0 and form.value_group <= 64
    keys, values = states(128, form.entry)
    copy = made(form)
    copy.append([(keys, values)], 128)
    check(copy, keys, values)


@pytest.mark.parametrize(("edges", "launches"), [
    ([0, 320], 1), ([0, 64, 320], 2), ([0, 100, 101, 320], 3 + 3 * 2), ([0, 10, 320], 2 + 2 * 2),
])  # fmt: skip
def test_a_device_packs_each_part_in_one_launch(edges: list[int], launches: int) -> None:
    """And a group of several parts, which is joined first. Its memory is booked."""
    form = LowBitForm(entry(), 2, 64)
    keys, values = states(320, form.entry)
    host = made(form)
    host.append([(keys, values)], 320)
    with fake_cuda() as counts:
        account = MemoryAccount()
        copy = LowBitCopy(form, 2, CUDA, account, 320)
        parts = [(Fake(keys[:, :, a:b]), Fake(values[:, :, a:b])) for a, b in itertools.pairwise(edges)]
        copy._need(320)
        before = account.current
        counts.clear()
        copy.append(parts, 320)
        assert counts.launches.total() == launches and not counts.syncs.total()
        assert account.peak - before == 2 * keys[:, :, :64].nbytes + 2 * values[:, :, :64].nbytes
        assert torch.equal(values_of(copy.keys), host.keys) and torch.equal(values_of(copy.values), host.values)


def test_it_takes_what_it_says() -> None:
    """2 bits, groups of 64, head width 64: 2 and .5 bits an element; in the account, and given back."""
    form, account = LowBitForm(entry(64, 64), 2, 64), MemoryAccount()
    keys, values = states(640, form.entry)
    copy = made(form, account=account, reserve=700)
    copy.append([(keys, values)], 640)
    assert nbytes(form, 1, 64) * 8 == 64 * 2 * 2 * 64 * 2.5
    assert account.by_owner["low-bit copy"] == nbytes(form, 2, 640) == copy._keys.nbytes + copy._values.nbytes
    copy.close()
    assert account.by_owner["low-bit copy"] == 0 and copy.tokens == 0
    copy.append([(keys, values)], 640)
    check(copy, keys, values)


def test_rows_are_selected_and_tokens_cut() -> None:
    form, account = LowBitForm(entry(), 1, 32), MemoryAccount()
    keys, values = states(320, form.entry, rows=3)
    copy = made(form, rows=3, account=account)
    copy.append([(keys, values)], 320)
    copy.truncate(256)
    for rows in ([2, 0, 0], [1, 0], [0, 0, 1, 1, 0]):
        copy.select_rows(torch.tensor(rows))
        keys, values = keys[rows, :, :256], values[rows, :, :256]
        check(copy, keys, values)
        assert account.by_owner["low-bit copy"] == copy._keys.nbytes + copy._values.nbytes
    copy.append([(keys[:, :, :64], values[:, :, :64])], 320)
    check(copy, torch.cat([keys, keys[:, :, :64]], 2), torch.cat([values, values[:, :, :64]], 2))


def test_what_fails_changes_nothing() -> None:
    form, account = LowBitForm(entry(), 2, 32), MemoryAccount()
    keys, values = states(3200, form.entry)
    copy = made(form, account=account)
    copy.append([(keys[:, :, :1600], values[:, :, :1600])], 1600)

    def fails() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield keys[:, :, 1600:1700], values[:, :, 1600:1700]
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        copy.append(fails(), 3200)
    check(copy, keys[:, :, :1600], values[:, :, :1600])
    account.limit = account.current + 1000
    with pytest.raises(BudgetError):
        copy.append([(keys, values)], 4800)
    check(copy, keys[:, :, :1600], values[:, :, :1600])


def test_captured_and_restored() -> None:
    form = LowBitForm(entry(), 2, 32)
    keys, values = states(320, form.entry)
    copy, other = made(form), made(form)
    copy.append([(keys, values)], 320)
    tree = copy.capture()
    other.restore(tree, 320, "layer 0")
    check(other, keys, values)
    for name in tree:
        with pytest.raises(ContextError, match=name):
            made(form).restore({**tree, name: tree[name][..., :-1]}, 320, "layer 0")
        with pytest.raises(ContextError, match=name):
            made(form).restore({**tree, name: None}, 320, "layer 0")
