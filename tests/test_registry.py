"""Caches by name."""

from __future__ import annotations

import sys
import types

import pytest

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.errors import ConfigError
from hf_offload_cache.registry import CACHES, cache_class, class_named


def test_every_registered_name_leads_to_a_class_of_its_own() -> None:
    classes = [cache_class(name) for name in CACHES]
    assert len(set(classes)) == len(classes) and DiskSwapCache in classes
    assert [class_named(cls.__name__) for cls in classes] == classes


def test_a_class_of_an_outsider(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("an_outsiders_module")
    module.Own = own = type("Own", (DiskSwapCache,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_outsiders_module", module)
    assert cache_class("an_outsiders_module:Own") is own
    assert class_named("Own") is None
    with pytest.raises(ConfigError, match="an_outsiders_module:Other"):
        cache_class("an_outsiders_module:Other")


def test_what_is_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no cache 'disk_swap'; did you mean 'disk-swap'\?"):
        cache_class("disk_swap")
    with pytest.raises(ConfigError, match="known: disk-swap"):
        cache_class("nothing alike")
    with pytest.raises(ConfigError, match="no_such_module:Cache"):
        cache_class("no_such_module:Cache")
