"""The head of a GGUF file: its metadata and the shapes of its tensors. Numbers and texts alone: no weights."""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> how `struct` calls it."""
_STRING, _ARRAY = 8, 9
_MOST_VALUES = 10**5
"""Values or tensors that a head may claim to have."""
_MOST_TEXT = 2**20
"""Bytes of a text: names are short, and the longest value is a chat template."""
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class GgufHeader:
    """`values` are the metadata, lists (the vocabulary) left out; `shapes` the tensors', as the file has them."""

    values: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def num_weights(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_header(path: Path) -> GgufHeader:
    """Raises `OSError` where the file cannot be read, `ValueError` where it is no GGUF file of version 2 or 3."""
    with open(path, "rb") as file:
        try:
            magic, version, num_tensors, num_values = struct.unpack("<4sIQQ", _read(file, 24))
            if magic != b"GGUF" or version not in (2, 3) or max(num_tensors, num_values) > _MOST_VALUES:
                raise ValueError(f"it begins with {magic!r}, version {version}")
            values = {}
            for _ in range(num_values):
                name = _text(file)
                value = _value(file, _number(file, "I"))
                if value is not None:
                    values[name] = value
            shapes = {}
            for _ in range(num_tensors):
                name, dimensions = _text(file), _number(file, "I")
                if dimensions > _MOST_DIMENSIONS:
                    raise ValueError(f"a tensor has {dimensions:,} dimensions")
                shapes[name] = tuple(_number(file, "Q") for _ in range(dimensions))
                _read(file, 12)  # its type and its place
        except (ValueError, struct.error) as error:
            raise ValueError(f"{str(path)!r} is no GGUF file of version 2 or 3: {error}") from error
    return GgufHeader(values, shapes)


def _value(file: BinaryIO, kind: int) -> Any:
    """The next value; None for a list, which is passed over."""
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _scalar(kind))
    kind, count = _number(file, "I"), _number(file, "Q")
    if kind == _STRING:
        for _ in range(count):
            _pass(file, _number(file, "Q"))
    else:
        _pass(file, count * struct.calcsize("<" + _scalar(kind)))
    return None


def _pass(file: BinaryIO, size: int) -> None:
    """Read on behind the next `size` bytes."""
    if size > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError("it ends too early")
    file.seek(size, os.SEEK_CUR)


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value is of the unknown type {kind}")
    return _SCALARS[kind]


def _text(file: BinaryIO) -> str:
    return _read(file, _number(file, "Q")).decode("utf-8")


def _number(file: BinaryIO, kind: str) -> Any:
    return struct.unpack("<" + kind, _read(file, struct.calcsize("<" + kind)))[0]


def _read(file: BinaryIO, size: int) -> bytes:
    if size > _MOST_TEXT:
        raise ValueError(f"a value claims {size:,} bytes")
    data = file.read(size)
    if len(data) < size:
        raise ValueError("it ends too early")
    return data
