"""Caches by name: the registered ones, and a class from outside."""

import importlib
import sys

import pytest

import hf_offload_cache
from hf_offload_cache import DiskSwapCache, registry
from hf_offload_cache.errors import ConfigError
from hf_offload_cache.registry import CACHES, cache_class, class_named, name_of


def test_every_registered_class_is_there_under_its_name():
    for name, place in CACHES.items():
        cls = cache_class(name)
        assert f"{cls.__module__}:{cls.__name__}" == place
        assert class_named(cls.__name__) is cls and name_of(cls.__name__) == name
    assert cache_class("disk-swap") is DiskSwapCache
    assert class_named("NoSuchCache") is None and name_of("DiskSwap") is None


def test_a_line_is_all_that_a_method_takes(monkeypatch, tmp_path):
    (tmp_path / "my_method.py").write_text(
        "from hf_offload_cache import DiskSwapCache\n\n\nclass MyCache(DiskSwapCache):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cls = cache_class("my_method:MyCache")
    assert cls.__name__ == "MyCache" and issubclass(cls, DiskSwapCache)
    assert class_named("MyCache") is None
    monkeypatch.setitem(registry.CACHES, "mine", "my_method:MyCache")
    assert cache_class("mine") is cls is class_named("MyCache")
    assert hf_offload_cache.MyCache is cls  # what the package offers follows from the same line


def test_windows_is_named_at_once(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="hf_offload_cache needs Linux or macOS, and this is Windows"):
        importlib.reload(hf_offload_cache)
    monkeypatch.undo()
    assert importlib.reload(hf_offload_cache).DiskSwapCache is DiskSwapCache


def test_what_the_package_offers_is_there():
    assert "DiskSwapCache" in hf_offload_cache.__all__ and "DiskSwapConfig" in hf_offload_cache.__all__
    for name in hf_offload_cache.__all__:
        assert getattr(hf_offload_cache, name).__name__ == name
    assert set(hf_offload_cache.__all__) <= set(dir(hf_offload_cache))
    with pytest.raises(AttributeError, match="no attribute 'DiskSwopCache'"):
        hf_offload_cache.DiskSwopCache  # noqa: B018


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("disk-swop", "cluster, spec, other, or module:Class, got 'disk-swop': did you mean 'disk-swap'?"),
        ("othr", "did you mean 'other'?"),
        ("zzz", "name one of these"),
        ("", "got ''"),
        (":Class", "got ':Class'"),
        ("module:", "got 'module:'"),
        ("module:a.b", "got 'module:a.b'"),
        ("no.such.module:Class", "there is no module 'no': put the folder"),
        ("json:Class", "got nothing of that name"),
        ("json:JSONDecoder", "must be a subclass of OffloadCache, got <class"),
        ("json:dumps", "must be a subclass of OffloadCache, got <function"),
    ],
)
def test_what_is_no_cache(name, words):
    with pytest.raises(ConfigError) as caught:
        cache_class(name, others=("other",))
    assert words in str(caught.value)


def test_a_module_that_lacks_another_says_so_itself(monkeypatch, tmp_path):
    (tmp_path / "lacking.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        cache_class("lacking:Class")
