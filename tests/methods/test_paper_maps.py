"""Each method says where its paper's parts are: the names exist."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module

import pytest

from hf_offload_cache.registry import CACHES

ROOMS = sorted(place.split(":")[0].rpartition(".")[0] for place in CACHES.values())


@pytest.mark.parametrize("room", ROOMS)
def test_the_names_are_there(room: str) -> None:
    module = import_module(room)
    assert module.__doc__ is not None
    text = module.__doc__.partition("Where to find the paper:")[2]
    places = re.findall(r"((?:`[\w.]+`(?:,| and|)\s*)+)(?:in\s+`([\w.]+)`)?", text)
    names = [(name, home) for group, home in places for name in re.findall(r"`([\w.]+)`", group)]
    assert (len(names) >= 8 and text.count("section") >= 3) or "algorithm 3" in text
    for name, home in names:
        owner = import_module(f"hf_offload_cache.{home}") if home else module
        assert reduce(getattr, name.split("."), owner) is not None
