"""A table in a file without a name: what was put in comes back, and nothing stays of it."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from store_cases import fails

from eval.memory import resident_bytes
from hf_offload_cache.errors import StoreError, StoreFullError
from hf_offload_cache.stores import MappedTable

SIZE = 3 << 20


def mapped_bytes(table: MappedTable) -> int:
    """Of this process's memory, what the table's file has."""
    address = table.array.ctypes.data
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and head == "Rss:":
            found = 1024 * int(line.split()[1])
    return found


def test_what_was_put_in_comes_back_after_it_rested(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8).reshape(3, -1)
    table = MappedTable(tmp_path, "a table", values)
    assert np.array_equal(table.array, values) and table.array.dtype == values.dtype
    table.array[1, 5] += 1
    assert mapped_bytes(table) >= SIZE
    table.rest()  # which waits until all of it is written, once
    assert mapped_bytes(table) == 0 == resident_bytes(table.descriptor, table.nbytes)
    table.will_need()
    values[1, 5] += 1
    assert np.array_equal(table.array, values)
    table.array[2, 7] = values[2, 7] = 1
    table.rest()
    assert np.array_equal(table.array, values)


def test_what_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on, since a second attempt would succeed with nothing written; nothing is let go of."""
    table = MappedTable(tmp_path, "a table", np.ones(SIZE, dtype=np.uint8))
    flushed: list[int] = []

    class Refusing:
        def flush(self) -> None:
            flushed.append(1)
            if len(flushed) == 1:
                raise OSError(errno.EIO, "was made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(table, "_map", Refusing())
        for _ in range(2):
            with pytest.raises(StoreError, match=r"a table: its table could not be written .*reset"):
                table.rest()
    assert flushed == [1] and mapped_bytes(table) >= SIZE and table.array.all()


def test_nothing_stays(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    table = MappedTable(tmp_path, "a table", np.zeros((2, 5), dtype=np.float16))
    array = table.array
    assert not list(tmp_path.iterdir())
    del table
    gc.collect()
    array[1, 4] = 3  # a view keeps it
    assert array.tolist() == [[0] * 5, [0, 0, 0, 0, 3]]
    del array
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    empty = MappedTable(tmp_path, "a table", np.zeros((2, 0, 5), dtype=np.float16))
    empty.rest()
    assert empty.array.shape == (2, 0, 5)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, StoreFullError), (errno.EIO, StoreError)])
def test_what_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StoreError]
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fails(number))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind, match=r"centroids of layer 3: no table of 4,096 bytes in "):
        MappedTable(tmp_path, "centroids of layer 3", np.zeros(4096, dtype=np.uint8))
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(StoreError, match="a table: no scratch file can be made in"):
        MappedTable(tmp_path / "none", "a table", np.zeros(3))
