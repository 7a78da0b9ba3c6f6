"""The head of a GGUF file, written here byte by byte."""

import struct

import pytest

from hf_offload_cache.console import read_header


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


HEAD = struct.pack("<4sIQQ", b"GGUF", 3, 2, 5)
VALUES = [
    text("general.architecture") + struct.pack("<I", 8) + text("llama"),
    text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("ä") + text("bcd"),
    text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
    text("count") + struct.pack("<Ii", 5, -7),
    text("rate") + struct.pack("<If", 6, 0.5),
]
TENSORS = [
    text("a.weight") + struct.pack("<IQQIQ", 2, 3, 5, 0, 0),
    text("b.weight") + struct.pack("<IQIQ", 1, 7, 3, 64),
]
WHOLE = b"".join([HEAD, *VALUES, *TENSORS])


def test_values_and_shapes(tmp_path):
    (tmp_path / "m.gguf").write_bytes(WHOLE + b"weights that nobody reads")
    header = read_header(tmp_path / "m.gguf")
    assert header.values == {"general.architecture": "llama", "count": -7, "rate": 0.5}
    assert header.shapes == {"a.weight": (3, 5), "b.weight": (7,)}
    assert header.num_weights == 22


@pytest.mark.parametrize(
    "content",
    [
        b"",
        WHOLE[:-1],
        WHOLE[:50],
        b"GGML" + WHOLE[4:],
        struct.pack("<4sIQQ", b"GGUF", 1, 2, 5) + WHOLE[24:],
        struct.pack("<4sIQQ", b"GGUF", 3, 2, 2**40),
        HEAD + text("x") + struct.pack("<I", 99),
        HEAD + struct.pack("<Q", 2**60),
        HEAD + text("x") + struct.pack("<IIQ", 9, 10, 2**58),
        HEAD + struct.pack("<Q", 2**21) + bytes(2**21),
        b"".join([HEAD, *VALUES, text("a.weight"), struct.pack("<I", 2**31), bytes(4096)]),
    ],
)
def test_what_is_no_gguf_file(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.gguf' is not a GGUF file"):
        read_header(tmp_path / "m.gguf")
