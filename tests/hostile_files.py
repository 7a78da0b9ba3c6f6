"""Contexts and published folders as somebody would make them who may write to them: digests and names are right.

Random bytes never get past a digest. This module reads and writes the formats with code of its own, by what
docs/on-disk-format.md says, changes one thing, and has every digest and name follow. No tests in here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load, save

Path_ = tuple[Any, ...]
"""Where in a tree something is: keys and indexes."""

NUMBERS = (
    -1, 0, 1, 3, 17, 64, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, -(2**62), 2**63 - 1, 2**64, 10**30, True, None, "x",
    1.5, math.nan, math.inf,
)  # fmt: skip
"""Stand in the place of a value."""


# --- the formats ------------------------------------------------------------------------------------------------------


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["manifest"]
    return found


def digest_of(manifest: Any) -> str:
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return xxhash.xxh3_128_hexdigest(canonical)


def sign(folder: Path, manifest: Any) -> None:
    """Let the manifest of a context say this, with the digest that goes with it."""
    write(folder / "manifest.json", json.dumps({"manifest": manifest, "digest": digest_of(manifest)}))


def write(path: Path, content: str | bytes) -> None:
    """A file of its own of that name."""
    path.unlink(missing_ok=True)  # copies of a context share files
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o600)


def state_of(data: bytes) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors of a state by name, and its tree, in which they are named."""
    tensors = load(data)
    return tensors, json.loads(tensors.pop("tree").numpy().tobytes())


def packed(tensors: dict[str, torch.Tensor], tree: Any) -> bytes:
    text = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    whole: bytes = save({**{name: tensor.contiguous() for name, tensor in tensors.items()}, "tree": text})
    return whole


def replace_state(folder: Path, manifest: dict[str, Any], layer: int | None, data: bytes) -> None:
    """Let a layer's state, or the cache's, be `data`, under its digest; the manifest is still to be signed."""
    entry = manifest["state"] if layer is None else manifest["layers"][layer]["state"]
    entry["file"], entry["bytes"] = f"{xxhash.xxh3_128_hexdigest(data)}.state", len(data)
    write(folder / entry["file"], data)


def rename_records(folder: Path, manifest: dict[str, Any], layer: int) -> None:
    """Let files of records have the names that follow from their tags, as the state has them now."""
    entry = manifest["layers"][layer]
    tensors, tree = state_of((folder / entry["state"]["file"]).read_bytes())
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
        tags = dict(tree["dict"])["tags"]["list"]
        for part, tag in zip(entry["parts"], tags, strict=True):
            digest = xxhash.xxh3_128(f"{part['guard']} {part.get('record_bytes') or entry['record_bytes']} ".encode())
            digest.update(tensors[tag["tensor"]].numpy().tobytes())
            if (name := f"{digest.hexdigest()}.records") != part["file"]:
                os.rename(folder / part["file"], folder / name)
                part["file"] = name


def leaves(tree: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Where in a state's tree the values are: behind {"dict": [[key, value]...]}, {"list": [...]}, {"tensor": name}."""
    if not isinstance(tree, dict):
        yield path
        return
    ((kind, inner),) = tree.items()
    if kind == "dict":
        for place, (_, value) in enumerate(inner):
            yield from leaves(value, (*path, kind, place, 1))
    elif kind in ("list", "tuple"):
        for place, value in enumerate(inner):
            yield from leaves(value, (*path, kind, place))
    else:
        yield (*path, kind)


def named(tree: Any, path: Path_) -> str:
    """A path as a reader has it: the keys on the way."""
    words = []
    for step in path:
        if isinstance(tree, list) and len(tree) == 2 and step == 1 and isinstance(tree[0], str | int):
            words.append(str(tree[0]))
        tree = tree[step]
    return ".".join(words)


def at(tree: Any, path: Path_) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def put(tree: Any, path: Path_, value: Any) -> None:
    at(tree, path[:-1])[path[-1]] = value


# --- changes ----------------------------------------------------------------------------------------------------------


def changed(tensor: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, str]:
    """A tensor with other values, of another shape or of another type; and what was done to it."""
    kind = rng.choice(["value", "all", "bytes", "order", "shape", "type", "nothing"])
    flat = tensor.clone().reshape(-1)
    if kind == "nothing" or not flat.numel():
        return (flat[:0] if flat.numel() else torch.zeros(3, dtype=tensor.dtype)), "nothing"
    if kind == "shape":
        count = rng.choice([flat.numel() // 2, flat.numel() + 7, 1])
        return torch.cat([flat, flat.repeat(8)])[:count].reshape(rng.choice([(-1,), (1, -1), (-1, 1)])), kind
    if kind == "type":
        types = torch.float32, torch.int64, torch.uint8, torch.int32, torch.bool, torch.bfloat16
        return tensor.to(rng.choice(types)), kind
    if kind == "order":
        order = list(range(flat.numel()))
        rng.shuffle(order)
        return flat[order].reshape(tensor.shape), kind
    if kind == "bytes":
        raw = torch.tensor(list(rng.randbytes(min(flat.nbytes, 4096))), dtype=torch.uint8)
        raw = raw.repeat(-(-flat.nbytes // len(raw)))[: flat.nbytes]
        return (raw > 127 if tensor.dtype == torch.bool else raw.view(tensor.dtype)).reshape(tensor.shape), kind
    if tensor.dtype.is_floating_point:
        value: Any = rng.choice([-1e30, 3e38, math.nan, math.inf, 0.0])
    elif tensor.dtype == torch.bool:
        value = rng.random() < 0.5
    else:
        value = rng.choice([torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max, 0, 1])
    flat[slice(None) if kind == "all" else rng.randrange(flat.numel())] = value
    return flat.reshape(tensor.shape), f"{kind} {value}"


def change_state(data: bytes, rng: random.Random, index: int | None = None) -> tuple[bytes, str]:
    """A state of which one leaf is something else, that at `index` or any; and what. `ValueError`: it cannot be written
    so."""
    tensors, tree = state_of(data)
    paths = list(leaves(tree))
    path = rng.choice(paths) if index is None else paths[index]
    what, leaf = named(tree, path), at(tree, path)
    if path[-1] == "tensor":
        tensors[leaf], how = changed(tensors[leaf], rng)
    elif path[-1] in ("dtype", "device"):
        how = rng.choice(["float32", "int64", "nope", "complex64", "__class__", "load"])
        put(tree, path, how)
    else:
        value = rng.choice(NUMBERS)
        put(tree, path, value)
        how = repr(value)
    return packed(tensors, tree), f"{what}: {how}"


Leaf = tuple[int | None, int]
"""A layer, or None for the cache, and the index of a leaf in its state."""


def leaves_of(folder: Path, layer: int | None) -> list[Leaf]:
    """Those of one state of a context."""
    manifest = manifest_of(folder)
    entry = manifest["state"] if layer is None else manifest["layers"][layer]["state"]
    _, tree = state_of((folder / entry["file"]).read_bytes())
    return [(layer, index) for index, _ in enumerate(leaves(tree))]


def change_context(folder: Path, rng: random.Random, leaf: Leaf | None = None) -> str:
    """Change one thing in a context: `leaf`, or anything in a state or in its manifest. Says what."""
    manifest = manifest_of(folder)
    if leaf is None and rng.random() < 0.2:
        what = _change_manifest(manifest, rng)
    else:
        layer, index = leaf or (rng.choice([None, *range(len(manifest["layers"]))]), None)
        entry = manifest["state"] if layer is None else manifest["layers"][layer]["state"]
        data, what = change_state((folder / entry["file"]).read_bytes(), rng, index)
        replace_state(folder, manifest, layer, data)
        if layer is not None:
            rename_records(folder, manifest, layer)
        what = f"{'cache' if layer is None else f'layer {layer}'}.{what}"
    sign(folder, manifest)
    return what


def _change_manifest(manifest: Any, rng: random.Random) -> str:
    """A number or a field of it is something else."""
    found: list[Path_] = [("config", name) for name in manifest["config"]] + [("tokens",), ("batch",)]
    for place, layer in enumerate(manifest["layers"]):
        found += [("layers", place, "record_bytes"), ("layers", place, "kind"), ("layers", place, "state", "bytes")]
        found += [("layers", place, "parts", part, "records") for part in range(len(layer["parts"]))]
    path, value = rng.choice(found), rng.choice(NUMBERS)
    put(manifest, path, value)
    return f"manifest.{'.'.join(map(str, path))}: {value!r}"


def blake_name(data: bytes) -> str:
    """The name of an object of a published context."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


# --- what comes of them -----------------------------------------------------------------------------------------------

LONGEST = 60
"""Seconds after which a case is interrupted, and counts as a fault: the machine may be busy."""


@dataclass(frozen=True)
class Verdict:
    """What came of one case: "answered", "refused" by an error of the library, or anything else, which is a fault."""

    case: str
    kind: str
    text: str
    peak: int
    """Bytes that the process had held more than at its begin, up to the end of this case."""


def judged(cases: Iterable[tuple[str, Callable[[], object]]], most_bytes: int) -> list[Verdict]:
    """What comes of the cases, each with a name, run one after the other in one child of this process, which may not
    take more address space than `most_bytes` beyond what it has. A child that dies is the last one's fault."""
    from hf_offload_cache import errors

    ours = tuple(one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception))
    reader, writer = os.pipe()
    if not (child := os.fork()):
        code = 1
        try:
            os.close(reader)
            _run(cases, most_bytes, ours, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as lines:
        told = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    verdicts, begun = [], ""
    for one in told:
        if "begun" in one:
            begun = one["begun"]
        else:
            verdicts.append(Verdict(**one))
    if status:
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        verdicts.append(Verdict(begun, "died", how, 0))
    return verdicts


def _run(
    cases: Iterable[tuple[str, Callable[[], object]]], most_bytes: int, ours: tuple[type[Exception], ...], writer: int
) -> None:
    def late(*_: Any) -> None:
        raise TimeoutError(f"it took more than {LONGEST} s")

    signal.signal(signal.SIGALRM, late)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + most_bytes, size + most_bytes))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    held = _peak()

    def tell(**values: Any) -> None:
        os.write(writer, json.dumps(values).encode() + b"\n")

    for case, run in cases:
        tell(begun=case)
        signal.alarm(LONGEST)
        try:
            run()
            kind, text = "answered", ""
        except ours as error:
            kind, text = "refused", f"{type(error).__name__}: {error}"[:300]
        except BaseException as error:
            kind, text = "fault", f"{type(error).__name__}: {error}"[:300]
        signal.alarm(0)
        tell(case=case, kind=kind, text=text, peak=_peak() - held)


def _peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def faults(verdicts: list[Verdict], most_peak: int) -> list[Verdict]:
    """Those that are neither answered nor refused, or took too much."""
    return [one for one in verdicts if one.kind not in ("answered", "refused") or one.peak > most_peak]
