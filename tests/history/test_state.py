"""A part that declares its arrays once: captured, checked, restored, grown, cut, and moved with rows."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.contexts import pack, unpack
from hf_offload_cache.errors import BudgetError, ContextError
from hf_offload_cache.history import Array, Number, State, Table
from hf_offload_cache.memory import MemoryAccount

CPU = torch.device("cpu")


class Part:
    """Holds one of everything. Of 6 groups of 2 tokens `tokens` are in use; the rest is NaN."""

    STATE = State(
        "part",
        "the part",
        {"tokens": "tokens", "groups": "groups"},
        keys=Array("rows heads tokens dim", at="_keys"),
        codes=Array("rows bytes groups", torch.uint8, torch.int8, at="_codes", booked=3),
        scale=Array("rows *shape", torch.float32, low=0, high=9, optional=True),
        ids=Table("rows entries", torch.int32, low=0, below="records", at="_ids"),
        latest=Table("rows ranked", torch.float32, optional=True),
        since=Number(4, at="_since"),
        elsewhere=Table("rows others", torch.int64, at="other.ids"),
    )

    def __init__(self, rows: int, tokens: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self._account, self.tokens = MemoryAccount(), tokens
        self._keys = torch.full((rows, 2, 12, 3), math.nan, dtype=dtype)
        self._keys[:, :, :tokens] = torch.arange(rows * 2 * tokens * 3).reshape(rows, 2, tokens, 3)
        self._codes = torch.randint(0, 256, (rows, 5, 6), dtype=torch.uint8)
        self.scale: torch.Tensor | None = torch.rand(rows, 3, 2)
        self._ids = np.arange(rows * 4, dtype=np.int32).reshape(rows, 4)
        self.latest: np.ndarray | None = None
        self._since = 3
        self.other = SimpleNamespace(ids=np.ones((rows, 2), dtype=np.int64))
        self._account.hold("the part", self.booked)

    @property
    def groups(self) -> int:
        return -(-self.tokens // 2)

    @property
    def booked(self) -> int:
        scale = 0 if self.scale is None else self.scale.nbytes
        return self._keys.nbytes + 3 * self._codes.nbytes + scale

    def check(self, tree: Any, dtype: torch.dtype = torch.float32, **sizes: Any) -> dict[str, Any]:
        return self.STATE.check(tree, "layer 7", dtype, **{"records": 12, "shape": (3, 2), **sizes})


def assert_same(one: dict[str, Any], other: dict[str, Any], rows: list[int] | None = None) -> None:
    """`one` has what `other` has, or its `rows`."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        expected = other[name]
        if isinstance(expected, torch.Tensor):
            expected = expected if rows is None else expected[rows]
            assert value.dtype == expected.dtype and torch.equal(value, expected), name
        else:
            assert value == expected, name


def copy_of(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in tree.items()}


@pytest.mark.parametrize("latest", [None, np.ones((2, 3), dtype=np.float32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_captured_is_restored(dtype: torch.dtype, latest: np.ndarray | None) -> None:
    part = Part(2, 7, dtype=dtype)
    part.latest = latest
    tree = unpack(pack(part.STATE.capture(part)), CPU, "here")
    assert tree["keys"].shape == (2, 2, 7, 3) and tree["codes"].shape == (2, 5, 4)
    sizes = part.check(tree, dtype, rows=2)
    assert {name: sizes[name] for name in ("heads", "tokens", "groups", "entries")} == {
        "heads": 2, "tokens": 7, "groups": 4, "entries": 4,
    }  # fmt: skip
    twin = Part(2, 0, dtype=dtype)
    before, twin.tokens, twin._since, twin.scale = twin._keys, 7, 0, None
    twin.STATE.restore(twin, {**tree, "elsewhere": None})
    assert_same(twin.STATE.capture(twin), part.STATE.capture(part))
    assert twin._keys is before and twin.scale is tree["scale"]
    for name in ("keys", "codes", "ids"):
        tree[name].fill_(0)
    assert_same(twin.STATE.capture(twin), part.STATE.capture(part))


def test_captured_are_views_of_what_is_in_use() -> None:
    part = Part(2, 5)
    tree = part.STATE.capture(part)
    part._keys[1, 1, 4, 2], part._ids[1, 3] = 77, 66
    assert tree["keys"][1, 1, 4, 2] == 77 and tree["ids"][1, 3] == 66 and tree["keys"].shape[2] == 5
    assert tree["elsewhere"].data_ptr() == part.other.ids.ctypes.data


def test_own_entries_of_a_larger_tree() -> None:
    part = Part(1, 4)
    tree = {**part.STATE.capture(part), "another": 3}
    part.check(part.STATE.own(tree))
    with pytest.raises(ContextError, match=r"entries of its part are .*another"):
        part.check(tree)


@pytest.mark.parametrize(
    ("entry", "wrong", "said"),
    [
        ("keys", lambda held: held.double(), r"torch.float64, expected \(rows=2, heads, tokens, dim\) torch.float32"),
        ("keys", lambda held: held[..., 0], "expected"),
        ("keys", lambda held: held[:1], "expected"),
        ("keys", lambda held: held.numpy(), "expected"),
        ("keys", lambda held: None, "None, expected"),
        ("codes", lambda held: held.int(), "torch.uint8 or torch.int8"),
        ("codes", lambda held: held[:1], "expected"),
        ("scale", lambda held: held[:, :2], "expected"),
        ("scale", lambda held: held - 1, "float32 from 0 to 9"),
        ("scale", lambda held: held + 9, "from 0 to 9"),
        ("scale", lambda held: held * math.nan, "from 0 to 9"),
        ("ids", lambda held: held.long(), "int64, expected"),
        ("ids", lambda held: held - 1, "from 0 to 11"),
        ("ids", lambda held: held + 5, "from 0 to 11"),
        ("ids", lambda held: [1, 2], "expected"),
        ("latest", lambda held: torch.zeros(3, 2), "expected"),
        ("since", lambda held: 4, "4, expected a whole number below 4"),
        ("since", lambda held: -1, "expected"),
        ("since", lambda held: True, "expected"),
        ("since", lambda held: 1.0, "expected"),
        ("since", lambda held: None, "expected"),
        ("elsewhere", lambda held: held.int(), "expected"),
    ],
)
def test_what_is_not_as_declared_is_refused(entry: str, wrong: Any, said: str) -> None:
    part = Part(2, 6)
    tree = part.STATE.capture(part)
    part.check(tree, rows=2)
    with pytest.raises(ContextError, match=f"layer 7 of the context .*: {entry} of its part is .*{said}"):
        part.check({**tree, entry: wrong(tree[entry])}, rows=2)


@pytest.mark.parametrize("change", [lambda tree: tree.pop("ids"), lambda tree: tree.update(more=1)])
def test_entries_that_are_missing_or_too_many(change: Any) -> None:
    part = Part(2, 6)
    tree = part.STATE.capture(part)
    change(tree)
    with pytest.raises(ContextError, match="entries of its part are"):
        part.check(tree)


@pytest.mark.parametrize("tree", [None, [], 3, torch.zeros(2), "keys"])
def test_what_is_no_tree(tree: Any) -> None:
    with pytest.raises(ContextError, match="entries of its part are"):
        Part(2, 6).check(tree)


@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0, 1]])
def test_as_many_rows_change_places_where_they_lie(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A few at a time; nothing else is held meanwhile."""
    monkeypatch.setattr("hf_offload_cache.history.state._AT_ONCE", 24)
    part = Part(2, 7)
    before, tensors, held = copy_of(part.STATE.capture(part)), (part._keys, part._codes), part._account.current
    part.STATE.select_rows(part, torch.tensor(rows))
    assert_same({**part.STATE.capture(part), "elsewhere": before["elsewhere"][rows]}, before, rows)
    assert part._keys is tensors[0] and part._codes is tensors[1]
    assert part._account.peak == part._account.current == held


@pytest.mark.parametrize("rows", [[1], [1, 0, 1], [0, 0, 0, 0], []])
@pytest.mark.parametrize("tokens", [0, 7, 12])
def test_other_numbers_of_rows(rows: list[int], tokens: int) -> None:
    """The account has both while there are both; room stays, and the others' rows do."""
    part = Part(2, tokens)
    before, old = copy_of(part.STATE.capture(part)), part.booked
    part.STATE.select_rows(part, torch.tensor(rows, dtype=torch.int64))
    after = part.STATE.capture(part)
    assert len(after.pop("elsewhere")) == 2 and before.pop("elsewhere").shape == (2, 2)
    assert_same(after, before, rows)
    assert part._keys.shape == (len(rows), 2, 12, 3) and part._codes.shape == (len(rows), 5, 6)
    assert part._account.current == part.booked == old * len(rows) // 2
    assert part._account.peak == old + part.booked


def test_new_tensors_where_others_look_at_the_old_ones() -> None:
    part = Part(2, 7)
    before = part.STATE.capture(part)
    expected = copy_of(before)
    part.STATE.select_rows(part, torch.tensor([1, 0]), in_place=False)
    assert torch.equal(before["keys"], expected["keys"]) and torch.equal(part._keys[0, :, :7], expected["keys"][1])


@pytest.mark.parametrize("change", ["rows", "room"])
def test_without_memory_nothing_changes(change: str) -> None:
    part = Part(2, 7)
    part._account.limit = part.booked * 2
    before, expected = part.STATE.capture(part), copy_of(part.STATE.capture(part))
    with pytest.raises(BudgetError, match="the part needs"):
        if change == "rows":
            part.STATE.select_rows(part, torch.tensor([0, 1, 1]))
        else:
            part.STATE.remake(part, tokens=14, groups=7)
    assert part.STATE.capture(part)["keys"].data_ptr() == before["keys"].data_ptr()
    assert_same(part.STATE.capture(part), expected)
    assert part._account.current == part.booked


def test_without_a_devices_memory_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(2, 7)
    keys, held = part._keys, part._account.current

    def fails(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if dtype == torch.uint8:
            raise torch.OutOfMemoryError("no")
        return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr("hf_offload_cache.history.state.lasting_empty", fails)
    with pytest.raises(torch.OutOfMemoryError):
        part.STATE.remake(part, tokens=40, groups=20)
    assert part._keys is keys and part._account.current == held


def test_room_for_more() -> None:
    part = Part(2, 7)
    before, old = copy_of(part.STATE.capture(part)), part.booked
    part.STATE.remake(part, tokens=40, groups=20)
    assert part._keys.shape == (2, 2, 40, 3) and part._codes.shape == (2, 5, 20)
    assert_same(part.STATE.capture(part), before)
    assert part._account.current == part.booked > old and part._account.peak == part.booked + old


def test_new_tensors_may_be_written_to_outside_inference_mode() -> None:
    part = Part(2, 7)
    with torch.inference_mode():
        part.STATE.remake(part, tokens=20, groups=10)
        part.STATE.select_rows(part, torch.tensor([0]))
        part.STATE.select_rows(part, torch.tensor([0]))
    part._keys[:] = 1
    assert not part._keys.is_inference() and not part._codes.is_inference()


def test_cut() -> None:
    """Tensors keep their room, tables what is left alone; what is not there is not cut."""
    part = Part(2, 7)
    part.latest = np.arange(10, dtype=np.float32).reshape(2, 5)
    before = copy_of(part.STATE.capture(part))
    part.STATE.truncate(part, tokens=4, ranked=3)
    after = part.STATE.capture(part)
    assert torch.equal(after["keys"], before["keys"][:, :, :4])
    assert torch.equal(after["codes"], before["codes"][:, :, :2])
    assert part._keys.shape[2] == 12 and part.latest.base is None
    assert np.array_equal(part.latest, before["latest"][:, :3]) and part._ids.shape == (2, 4)
    part.latest = None
    part.STATE.truncate(part, tokens=9, ranked=1)
    assert part.tokens == 4 and part.latest is None


def test_given_back() -> None:
    part = Part(3, 7)
    kept = part._keys
    part.STATE.close(part)
    assert part._account.current == 0 and len(part._keys) == len(part._codes) == 0
    assert part._keys.untyped_storage().nbytes() == 0 and kept.numel()
    part.STATE.close(part)
    assert part._account.current == 0


def test_a_view_is_booked_with_all_that_it_keeps() -> None:
    part, whole = Part(2, 6), torch.zeros(2, 2, 100, 3)
    more = whole.nbytes - part._keys.nbytes
    part._account.hold("the part", more)
    part._keys = whole[:, :, 20:32]
    assert part.STATE.nbytes(part) == part._account.current
    part.STATE.remake(part)
    assert part._account.current == part.booked and part._keys.shape == (2, 2, 12, 3)
