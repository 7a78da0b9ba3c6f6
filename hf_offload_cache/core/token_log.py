"""The token ids that a cache was given, so that a prompt that does not continue them can be detected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from ..history.state import Array, State
from ..kernels.on_a_device import to_host
from ..memory.account import MemoryAccount
from ..model.media import Medium


class TokenLog:
    """Ids (B, length), int64, in host memory, and which are padding; `UNKNOWN` where the model was given embeddings.

    Allocates room for `max_context` ids a row at once, if that is known. Ids on a CUDA device are copied when they are
    needed, or are more than `_MOST_THERE`, so that calls do not wait for the device.
    """

    # A padding id is stored as -3 minus the id: this works for UNKNOWN too, and no second array has to follow changes.

    UNKNOWN = -1
    _MOST_THERE = 1 << 14
    STATE: ClassVar[State] = State(
        "token ids", "token ids", {"tokens": "length"}, ids=Array("rows tokens", torch.int64, at="_ids")
    )

    def __init__(self, account: MemoryAccount, max_context: int | None = None) -> None:
        self._account = account
        self._most = max_context
        self._ids = torch.empty(0, 0, dtype=torch.int64, device="cpu")
        self.length = 0
        self.media: tuple[Medium, ...] = ()
        """Pictures and sounds whose placeholders are among the ids, as far as they are known."""
        self._there: list[tuple[int, torch.Tensor]] = []  # a position, and ids from there on, as stored, on a device
        self.padded = False
        """Some stored token is padding, or may be, because a device has not said: see `has_padding`."""

    @staticmethod
    def planned(context: int, batch: int) -> int:
        """Bytes for `batch` sequences of `context` tokens."""
        return batch * context * 8

    @property
    def batch(self) -> int:
        return self._ids.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes in use, room to grow included."""
        return self._ids.nbytes

    def _forget(self) -> None:
        """Free the ids; an empty view would keep the memory."""
        self._account.free("token ids", self._ids)
        self._there, self.media = [], ()
        self._ids = torch.empty(0, 0, dtype=torch.int64, device="cpu")
        self.padded = False

    @property
    def ids(self) -> torch.Tensor:
        """A copy (B, length)."""
        held = self._known()
        return torch.where(held < self.UNKNOWN, -3 - held, held)

    def _known(self) -> torch.Tensor:
        """(B, length) as stored, after the copies from a device: a view."""
        if self._there:
            (copied,) = to_host(torch.cat([ids for _, ids in self._there], 1))
            for (at, ids), own in zip(
                self._there, copied.split([ids.shape[1] for _, ids in self._there], 1), strict=True
            ):
                self._ids[:, at : at + ids.shape[1]] = own
            self._there = []
        return self._ids[:, : self.length]

    def has_padding(self) -> bool:
        """Whether some stored token is padding; may wait for a device."""
        self._look_for_padding()
        return self.padded

    @property
    def visible(self) -> torch.Tensor:
        """Mask of tokens that are not padding: bool (B, length)."""
        return self._known() >= self.UNKNOWN

    def capture(self, batch: int, length: int) -> torch.Tensor:
        """The known ids of `length` tokens a sequence, for `restore`: a view, valid until the next change, or a copy. A
        model may store another number of keys than it was given ids."""
        if (self.batch, self.length) == (batch, length):
            return self._known()
        held = torch.full((batch, length), self.UNKNOWN, device="cpu")
        if self.batch == batch:
            known = min(self.length, length)
            held[:, :known] = self._known()[:, :known]
        return held

    def restore(self, held: torch.Tensor, media: Iterable[Medium] = ()) -> None:
        """Take over a captured state, in an empty log, and the media in it."""
        self.append(held, 0)
        self.media = tuple(media)
        self.padded = True  # perhaps
        self._look_for_padding()

    def append(self, ids: torch.Tensor, at: int, padding: torch.Tensor | None = None) -> None:
        """Add ids (B, t) of a step that began at position `at`; ids missing before it are unknown. `padding`: bool
        (B, t), True for padding, on the ids' device or the host. Ids on a CUDA device are copied there first."""
        stop = at + ids.shape[1]
        there = sum(one.numel() for _, one in self._there) + ids.numel() if self._there else ids.numel()
        if self._there and (at < self.length or there > self._MOST_THERE or ids.shape[0] != self.batch):
            self._known()
        self.length = min(self.length, at)
        if self.media:
            self.media = tuple(medium for medium in self.media if medium.stop <= at)
        if stop > self._ids.shape[1] or ids.shape[0] != self._ids.shape[0]:
            self.length = self.length if ids.shape[0] == self.batch else 0
            if not self.length:
                self._forget()
            room = max(stop, self._most or stop + stop // 8 + 64)  # with a known maximum, allocated once
            self.STATE.remake(self, rows=ids.shape[0], tokens=room)
        self._ids[:, self.length : at] = self.UNKNOWN
        self.length, ids = stop, ids.detach()
        stored = ids if padding is None else torch.where(padding.to(ids.device), -3 - ids, ids)
        if ids.device.type == "cuda" and ids.numel() <= self._MOST_THERE:
            self._there.append((at, stored.clone() if padding is None else stored))
            self.padded = self.padded or padding is not None
            return
        self.padded = self.padded or (padding is not None and bool(padding.any()))
        self._ids[:, at:stop] = stored

    def truncate(self, length: int) -> None:
        """Keep the first `length` ids of every row."""
        self._known()
        self.length = min(self.length, length)
        self.media = tuple(medium for medium in self.media if medium.stop <= length)
        if not self.length:
            self._forget()
        self._look_for_padding()

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by the present row `rows[i]`."""
        self._known()
        if self.length:
            rows = rows.nonzero().reshape(-1) if rows.dtype == torch.bool else rows
            self.STATE.select_rows(self, rows)
            if self.media:
                each = enumerate(rows.tolist())
                self.media = tuple(one._replace(row=to) for to, row in each for one in self.media if one.row == row)
        self._look_for_padding()

    def _look_for_padding(self) -> None:
        self.padded = self.padded and not bool(self.visible.all())

    def first_difference(self, ids: torch.Tensor) -> int | None:
        """The first position where ids (B, t) differ from the known ids of the first t tokens; None: no difference. Ids
        of another shape are not compared."""
        if ids.ndim != 2 or self.batch != ids.shape[0]:
            return None
        known = self.ids[:, : ids.shape[1]]
        ids = ids[:, : known.shape[1]].to("cpu")
        wrong = ((known != ids) & (known != self.UNKNOWN)).any(0).nonzero()
        return int(wrong[0]) if len(wrong) else None
