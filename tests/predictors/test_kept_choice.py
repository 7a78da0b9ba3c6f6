"""When a layer goes on with what it chose, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload_cache.errors import ContextError
from hf_offload_cache.fetch import Choice
from hf_offload_cache.methods.disk_swap import CONSECUTIVE, LEAST_CONSECUTIVE, NEVER, KeptChoice

ROWS, HEADS, DIM, BUDGET = 2, 3, 8, 4


def turned(states: torch.Tensor, cosine: float) -> torch.Tensor:
    """States (B, H, D) of that cosine to the given ones, all heads together."""
    flat = states.flatten(1)
    other = torch.randn(flat.shape, generator=torch.Generator().manual_seed(9))
    other -= (other * flat).sum(1, keepdim=True) / flat.square().sum(1, keepdim=True) * flat
    other *= flat.norm(dim=1, keepdim=True) / other.norm(dim=1, keepdim=True)
    return (cosine * flat + (1 - cosine**2) ** 0.5 * other).view_as(states)


def walk_of(cosine: float, steps: int) -> torch.Tensor:
    """Queries (1, H, steps, D), each of that cosine to the one before."""
    generator = torch.Generator().manual_seed(0)
    current = torch.nn.functional.normalize(torch.randn(HEADS * DIM, generator=generator), dim=0)
    found = [current]
    for _ in range(steps - 1):
        other = torch.randn(HEADS * DIM, generator=generator)
        other = torch.nn.functional.normalize(other - (other @ current) * current, dim=0)
        current = cosine * current + (1 - cosine**2) ** 0.5 * other
        found.append(current)
    return torch.stack(found).view(1, steps, HEADS, DIM).transpose(1, 2)


def states_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def kept(steps: int = 8, usual: float = 0.7) -> tuple[KeptChoice, Choice, torch.Tensor]:
    """With a choice that was made for `states_of()`."""
    found, states = KeptChoice(steps), states_of()
    found.usual = usual
    choice = Choice(np.arange(ROWS * BUDGET).reshape(ROWS, BUDGET))
    found.keep(choice, states, BUDGET)
    return found, choice, states


@pytest.mark.parametrize(("cosine", "moved"), [(0.75, []), (0.65, [0, 1]), (-0.5, [0, 1])])
def test_a_query_that_has_hardly_moved_goes_on(cosine: float, moved: list[int]) -> None:
    """Whatever its length is."""
    found, choice, states = kept()
    for times in (1.0, 5.0):
        assert found.moved(times * turned(states, cosine), BUDGET) == (choice, moved)


def test_rows_move_apart() -> None:
    found, choice, states = kept()
    other = states.clone()
    other[1] = turned(states, 0.2)[1]
    assert found.moved(other, BUDGET) == (choice, [1])
    anew = choice.with_rows([1], Choice(np.array([[20, 21, 22, 23]])))
    assert anew.units.tolist() == [[0, 1, 2, 3], [20, 21, 22, 23]]
    found.keep(anew, other, BUDGET, [1])
    assert found.moved(other, BUDGET) == (anew, [])
    assert found.moved(states, BUDGET) == (anew, [1])


def test_a_choice_is_attended_to_so_many_steps() -> None:
    """Of three, the one that made it included; a row that was chosen anew begins anew."""
    found, choice, states = kept(steps=3)
    assert found.moved(states, BUDGET)[1] == []
    found.went_on()
    assert found.moved(states, BUDGET)[1] == []
    found.keep(choice, states, BUDGET, [1])
    assert found.moved(states, BUDGET)[1] == [0]


def test_what_is_usual_is_told_by_the_prompt() -> None:
    """The lower quartile of the cosines of consecutive queries: a quarter of them count as moved."""
    found = KeptChoice(8)
    found.watch(walk_of(0.9, LEAST_CONSECUTIVE - 1))
    assert found.usual == NEVER
    found.watch(walk_of(0.9, LEAST_CONSECUTIVE))
    assert found.usual == pytest.approx(0.9, abs=1e-4)
    found.watch(walk_of(0.5, CONSECUTIVE - 1))  # a short question does not take the place of a prompt
    assert found.usual == pytest.approx(0.9, abs=1e-4)
    mixed = torch.randn(1, HEADS, CONSECUTIVE, DIM, generator=torch.Generator().manual_seed(3))
    flat = mixed[0].transpose(0, 1).flatten(1)
    cosines = torch.cosine_similarity(flat[1:], flat[:-1])
    found.watch(mixed)
    assert 0.2 <= float((cosines < found.usual).float().mean()) <= 0.3


def test_nothing_is_kept_before_anything_is_known() -> None:
    found, _, states = kept()
    found.usual = NEVER
    assert found.moved(states, BUDGET) == (None, [])
    fresh = KeptChoice(8)
    assert fresh.moved(states, BUDGET) == (None, [])


def test_one_step_a_choice_keeps_none() -> None:
    found, _, states = kept(steps=1)
    found.watch(walk_of(0.9, 300))
    assert found.usual == 0.7 and found.nbytes == 0
    assert found.moved(states, BUDGET) == (None, [])


def test_a_changed_budget_or_history_ends_it() -> None:
    found, _, states = kept()
    assert found.moved(states, BUDGET + 1) == (None, [])
    assert found.moved(states[:1], BUDGET) == (None, [])
    found.drop()
    assert found.moved(states, BUDGET) == (None, [])


def test_rows_take_their_choice_along() -> None:
    found, _, states = kept()
    found.select_rows(torch.tensor([1, 1, 0]))
    again, moved = found.moved(states[[1, 1, 0]], BUDGET)
    assert moved == [] and again is not None
    assert again.units.tolist() == [[4, 5, 6, 7], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert found.moved(states[[0, 1, 0]], BUDGET)[1] == [0]


def test_it_is_captured_and_goes_on() -> None:
    found, choice, states = kept(steps=3)
    found.went_on()
    again = KeptChoice(3)
    again.restore(found.capture(), ROWS, 8)
    other, moved = again.moved(states, BUDGET)
    assert other is not None and other.units.tolist() == choice.units.tolist() and moved == []
    again.went_on()
    assert again.moved(states, BUDGET)[1] == [0, 1] and found.moved(states, BUDGET)[1] == []
    nothing = KeptChoice(3)
    nothing.restore(KeptChoice(3).capture(), ROWS, 8)
    assert nothing.moved(states, BUDGET) == (None, [])


@pytest.mark.parametrize(
    "change",
    [
        {"usual": -1.5}, {"usual": 2.5}, {"usual": float("nan")}, {"usual": None}, {"queries": torch.zeros(1, 24)},
        {"queries": torch.zeros(2, 24, dtype=torch.float64)}, {"ages": torch.ones(3, dtype=torch.int64)},
        {"units": torch.full((2, 4), 8)}, {"units": torch.full((2, 4), -1)}, {"units": torch.ones(2, 4)},
        {"budget": 4.0}, {"importance": torch.ones(2, 3)},
    ],
)  # fmt: skip
def test_what_does_not_hold_together_is_refused(change: dict[str, object]) -> None:
    tree = kept()[0].capture()
    for name, value in change.items():
        (tree if name == "usual" else tree["choice"])[name] = value
    with pytest.raises(ContextError, match="chose last does not hold together"):
        KeptChoice(8).restore(tree, ROWS, 8)
