"""Memory that the layers of a cache share while they select: staging to read into, and one view for attention."""

from __future__ import annotations

from typing import Any

import torch

from ..memory.account import MemoryAccount
from ..memory.buffers import lasting_empty
from .staging import Staging
from .view import Filled, View


def records_soon(records: int) -> int:
    """How many there may be soon where there are `records` a row: areas are made for no more."""
    return records * 9 // 8 + 8


class Areas:
    """Staging areas that fetchers borrow, and the view that gathered entries lie in. For the model's thread.

    Held in the account as "staging", "selection" and, what is kept of that, "kept". An area belongs to who borrowed it
    until it is given back; it may outlive a step. One that a stalled read may still write to is not given back: `reset`
    takes it, when the read has ended, or what is stuck holds its memory. The view is good until the next `view`.

    Args:
        ahead: the most areas that are lent for reads ahead at a time.
    """

    def __init__(self, account: MemoryAccount, ahead: int = 1) -> None:
        self._account = account
        self._most_ahead = ahead
        self._lent = 0
        self._free: list[Staging] = []
        self._borrowed: list[Staging] = []
        self._view: torch.Tensor | None = None
        self._widened = False
        account.spare(self)
        self._parted: tuple[tuple[Any, ...], View] | None = None  # the view as it was last parted, and how
        self._kept: torch.Tensor | None = None
        self.filled: Filled | None = None
        """What lies in the view, if whoever filled it may want it again; None after the next `view`."""

    @staticmethod
    def planned(
        area_bytes: int, view_bytes: int, widest_bytes: int, ahead: int, device_type: str,
        kept_bytes: tuple[int, int] = (0, 0),
    ) -> dict[str, int]:  # fmt: skip
        """The most that areas of `area_bytes` take, one for what a gather misses and `ahead` more, and the view: of
        `view_bytes`, or of `widest_bytes` in a step that reads nothing ahead into them; and with each of these
        `kept_bytes` for what of it is kept."""
        area = area_bytes * Staging.sides(device_type)
        usual = {"staging": (1 + ahead) * area, "selection": view_bytes, "kept": kept_bytes[0]}
        widest = {"staging": area, "selection": widest_bytes, "kept": kept_bytes[1]}
        most = max(usual, widest, key=lambda held: sum(held.values()))
        return {owner: nbytes for owner, nbytes in most.items() if nbytes or owner != "kept"}

    def borrow(self, nbytes: int, device: torch.device) -> Staging:
        """An area of at least `nbytes` for `device`. Raises `BudgetError`."""
        for index, area in enumerate(self._free):
            if area.fits(nbytes, device):
                del self._free[index]
                break
        else:
            if self._free:  # the old memory goes before the new one comes
                self._free.pop().release()
            area = Staging(nbytes, device, self._account, "staging")
        self._borrowed.append(area)
        return area

    def borrow_ahead(self, nbytes: int, device: torch.device) -> Staging | None:
        """As `borrow`; None where as many are lent as may be, or there is no memory: reading ahead is never needed."""
        free = any(area.fits(nbytes, device) for area in self._free)
        if self._lent >= self._most_ahead or not (free or self._account.has_room(nbytes * Staging.sides(device.type))):
            return None
        area = self.borrow(nbytes, device)
        self._lent += 1
        return area

    def give_back(self, area: Staging, *, ahead: bool = False) -> None:
        """Nobody reads into `area` any more; copies from it are done or in the stream's order."""
        self._lent -= ahead
        self._borrowed.remove(area)
        self._free.append(area)

    def view(self, rows: int, width: int, behind: int, form: Any, device: torch.device, room: int) -> View:
        """An uninitialised `View`, valid until the next one; its memory is made for `room` payloads at once. One that
        needs more, for a verification of candidates, takes the place of areas that nobody borrows, until `narrow`.
        Raises `BudgetError`."""
        self.filled = None
        parts = rows, width, behind, form.group_size, form.entry_width, form.dtype, device
        if self._parted is not None and self._parted[0] == parts:
            return self._parted[1]
        size, memory = rows * (width + behind) * form.payload_width, self._view
        room *= form.payload_width
        if memory is None or memory.dtype != form.dtype or memory.device != device or memory.numel() < size:
            memory = None  # the old one goes before the new one comes
            self._drop_view()
            if size > room:
                self._release_free()
                self._drop_kept()
                self._widened, room = True, size
            self._account.hold("selection", room * form.dtype.itemsize)
            memory = self._view = lasting_empty(room, dtype=form.dtype, device=device)
        view = View(memory, rows, width, behind, form)
        self._parted = parts, view
        return view

    def kept(self, rows: int, chosen: int, latest: int, form: Any, device: torch.device) -> torch.Tensor:
        """Uninitialised entries (rows, chosen + latest, entry width), valid until the next; with room for the latest
        ones to become whole units, as they will. Raises `BudgetError`."""
        entries = chosen + latest
        size, memory = rows * entries * form.entry_width, self._kept
        if memory is None or memory.dtype != form.dtype or memory.device != device or memory.numel() < size:
            self._drop_kept()
            room = rows * (chosen * form.entry_width + -(-latest // form.group_size) * form.payload_width)
            self._account.hold("kept", room * form.dtype.itemsize)
            memory = self._kept = lasting_empty(room, dtype=form.dtype, device=device)
        return memory[:size].view(rows, entries, form.entry_width)

    def narrow(self) -> None:
        """A step that needs no more than usual begins: what the view needed more is given back."""
        if self._widened:
            self._drop_view()

    def _drop_view(self) -> None:
        self._parted, self._widened, self.filled = None, False, None
        if self._view is not None:
            self._account.release("selection", self._view.nbytes)
            self._view = None

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self._account.release("kept", self._kept.nbytes)
            self._kept = None

    def reset(self) -> None:
        """Nobody borrows anything any more: what an interrupted fetcher still had is let go of too."""
        self._lent = 0
        self._free += self._borrowed
        self._borrowed = []
        self.release()

    def release(self) -> None:
        """Give back what nobody borrows, the view, and what is kept of it, until they are wanted again."""
        self._release_free()
        self._drop_view()
        self._drop_kept()

    def free_memory(self) -> None:
        """As `Spare.free_memory`: areas that nobody borrows."""
        self._release_free()

    def _release_free(self) -> None:
        for area in self._free:
            area.release()
        self._free = []
