"""Case s3: somebody without the key exchanges parts of encrypted contexts, or edits the manifest and signs it anew."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import manifest_of, sign
from long_llama import feed, long_model, some

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache
from hf_offload_cache.errors import ContextError, EncryptionKeyError, StoreError

CACHES = (DiskSwapCache, ClusterCache, SpecCache, AbstractTreeCache)
TOKENS = 300


def key() -> bytes:
    return bytes(range(1, 33))


def ids(seed: int) -> torch.Tensor:
    return torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def answer(cache: Any, steps: int = 6) -> list[int]:
    """Greedy tokens after token 5."""
    tokens = [5]
    for _ in range(steps):
        tokens.append(int(feed(cache, torch.tensor([[tokens[-1]]])).argmax()))
    return tokens[1:]


Change = Callable[[dict[str, Any], Path], object]


def changes(one: dict[str, Any], other: dict[str, Any], later: dict[str, Any]) -> Iterator[tuple[str, Change]]:
    """Names of changes, and what makes each in a manifest and its folder. `other`: manifest of another text's context;
    `later`: of the same text some tokens on. Files of all three lie in the folder."""
    for index, layer in enumerate(one["layers"]):

        def of_layer(index: int = index, **fields: Any) -> Change:
            return lambda manifest, folder: manifest["layers"][index].update(fields)

        yield f"layer {index} has another text's state", of_layer(state=other["layers"][index]["state"])
        yield f"layer {index} is another text's", of_layer(**other["layers"][index])
        yield f"layer {index} is a later save's", of_layer(**later["layers"][index])
        yield f"layer {index} is the next one", of_layer(**one["layers"][(index + 1) % len(one["layers"])])
        if layer["parts"]:
            plain = [{**part, "guard": {"kind": "xxh3_64"}} for part in layer["parts"]]
            yield f"layer {index} has plain checksums", of_layer(parts=plain)
            salted = [
                {**part, "guard": theirs["guard"]}
                for part, theirs in zip(layer["parts"], other["layers"][index]["parts"], strict=False)
            ]
            yield f"layer {index} has another text's salt", of_layer(parts=salted)
            yield (
                f"layer {index} has its records shuffled",
                lambda manifest, folder, index=index: shuffle(  # type: ignore[misc]
                    folder / manifest["layers"][index]["parts"][0]["file"], manifest["layers"][index]["record_bytes"]
                ),
            )
    for name, value in {
        "another text's state": {"state": other["state"]}, "a later save's state": {"state": later["state"]},
        "no check of its key": {"key_check": None}, "another version": {"version": one["version"] + 1},
        "another field": {"config": {**one["config"], "num_sinks": one["config"]["num_sinks"] + 4}},
        "another day": {"created": "2000-01-01T00:00:00+00:00"}, "fewer tokens": {"tokens": one["tokens"] - 1},
        "another model": {"identity": {**one["identity"], "x": "1"}},
    }.items():  # fmt: skip
        yield name, lambda manifest, folder, value=value: manifest.update(value)  # type: ignore[misc]


def shuffle(path: Path, size: int) -> None:
    data, order = path.read_bytes(), list(range(path.stat().st_size // size))
    random.Random(0).shuffle(order)
    path.unlink()  # copies of a context share files
    path.write_bytes(b"".join(data[place * size : (place + 1) * size] for place in order))
    path.chmod(0o600)


@pytest.mark.parametrize("cls", [DiskSwapCache, *(pytest.param(cls, marks=pytest.mark.slow) for cls in CACHES[1:])])
def test_nothing_that_is_exchanged_changes_a_token(cls: Any, tmp_path: Path) -> None:
    """Each change raises one of the library's errors, or the answer is the one before it."""
    fields = {**some(cls), "engine": "mapped"} if cls is not SpecCache else {"engine": "memory"}
    fields = {"encryption_key": key} if cls in (SpecCache, ClusterCache) else {**fields, "encryption_key": key}
    for name, seed in (("one", 1), ("other", 2)):
        with cls(long_model(), path=tmp_path, **fields) as cache:
            feed(cache, ids(seed))
            cache.save(tmp_path / name)
            if name == "one":
                answer(cache, 40)
                cache.save(tmp_path / "later")

    def opened(folder: Path) -> list[int]:
        with cls.open(folder, long_model(), path=tmp_path, encryption_key=key) as cache:
            return answer(cache)

    expected = opened(tmp_path / "one")
    one, other, later = (manifest_of(tmp_path / name) for name in ("one", "other", "later"))
    told = 0
    for name, change in changes(one, other, later):
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "one", folder)
        for others in ("other", "later"):
            for file in set(os.listdir(tmp_path / others)) - set(os.listdir(folder)):
                shutil.copy(tmp_path / others / file, folder)
        manifest = copy.deepcopy(one)
        change(manifest, folder)
        sign(folder, manifest)
        try:
            found = opened(folder)
        except (ContextError, EncryptionKeyError, StoreError):
            told += 1
        else:
            assert found == expected, name
    assert told > 20
