"""Transfers of several stores as one."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import StalledError
from .transfer import Transfer


class JointTransfer(Transfer):
    """Several transfers as one. The first that fails is what `finish` raises, when the others have ended."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers
        self._error: Exception | None = None
        self.runs = any(transfer.runs for transfer in transfers)

    @property
    def finished_at(self) -> float | None:  # type: ignore[override]
        ends = [transfer.finished_at for transfer in self._transfers]
        return None if None in ends else max(end for end in ends if end is not None)

    def done(self) -> bool:
        return all([transfer.done() for transfer in self._transfers])  # a list: each is looked at

    def drop(self) -> None:
        for transfer in self._transfers:
            transfer.drop()

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            for transfer in self._transfers:
                transfer.finish()
        except StalledError:  # under way: to be waited for again
            raise
        except Exception as error:
            cancel_all(self._transfers)
            self._error = error
            raise


def cancel_all(transfers: Sequence[Transfer]) -> None:
    """Give them up: nothing is under way when this returns. Raises `StalledError` where something still is."""
    for transfer in transfers:
        transfer.drop()
    for transfer in transfers:
        transfer.wait()
