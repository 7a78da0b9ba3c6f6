"""On a CUDA GPU: all caches next to transformers' own, in time, memory and fidelity, and kernels against their floor.

    python -m eval.bench_gpu --json gpu.json

measures for three minutes and ends. The same command goes on with what is missing; each result is in the file at once.
`--parts` and `--caches` choose.

kernels: each kernel against the bytes that it moves.
text: SmolLM2 on 32K tokens of text. Its positions end at 8K, so only the times mean something: a prefill and a step.
quality: SmolLM2 within its positions: distance to `DynamicCache` on texts, and planted needles.
shape: steps of a few layers of Llama-3.1-8B's shape with random weights, filled with synthetic keys and values. Steps
of two numbers of layers give those of all 32 (rows of "scaled").
capped: the largest batch of all 32 layers, on a device that gives torch so much memory only. Many rows share the
records of few prompts, so that the host has room for them; on the device nothing is shared.
complete: as "shape", with all 32 layers, if device and host have the memory.

Our caches keep their records in host memory. On the device they get 1/13 of the full KV, and `SpecCache` its copy in 2
bits. `DiskSwapCache` is measured twice in "shape", "capped" and "complete": with steps that the host launches, and with
steps that are a CUDA graph, whose times are means of 16 steps, because one in each group of tokens is not replayed. A
third time, except for the quality, with `exact=True`, which attends to all tokens, as offloading by transformers does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, QuantizedCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from hf_offload_cache import SpecCache
from hf_offload_cache.config import parse_memory
from hf_offload_cache.console import load_default_model
from hf_offload_cache.core import OffloadCache
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.interop.graphed_step import GraphedStep, graphed_step
from hf_offload_cache.memory import free_memory
from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import CACHES, cache_class
from hf_offload_cache.tuning import distance, perplexity_over, sample_ids

from . import gpu_kernels
from .bench_text import Contender, text_rows
from .fidelity_tables import LONGEST_NEEDLES
from .gpu_kernels import times
from .gpu_summary import EXACT, SCALED, draw_kernels, draw_steps, next_batch, scaled, summary
from .needles import Needle, make_needles
from .replay import LIKENESS
from .studies.common import Rows, Study
from .studies.common import main as run_study
from .studies.contexts import follow, open_cache, prefill, reference_texts, replay
from .studies.quality_needles_budget import NEW_TOKENS, ask
from .synthetic import LLAMA_8B, Inputs, Shape, build_model, fill

DYNAMIC, STATIC, OFFLOADED = "DynamicCache", "StaticCache", "DynamicCache(offloading=True)"
QUANTISED: dict[str, tuple[str, dict[str, Any]]] = {
    "quanto, 4 bits": ("quanto", {"nbits": 4}),
    "hqq, 4 bits": ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "fp8": ("fp8", {}),
}
"""transformers' quantised caches: backend and its options."""
GRAPHED = "DiskSwapCache, graphed"
"""Its steps are replays of a CUDA graph, except those that seal."""
OURS = {cache_class(name).__name__: name for name in CACHES} | {GRAPHED: "disk-swap", EXACT: "disk-swap"}
NAMES = (DYNAMIC, STATIC, OFFLOADED, *QUANTISED, *OURS)
ROOM = 256
"""Tokens to come that caches are made for."""
SETTLES, MOST_SECONDS = 24, 30.0
"""Steps before those that count: our caches measure in them whether to look ahead. Slower steps are fewer, so that all
take about as many seconds."""
SEALED = 16
"""Graphed steps are measured by so many together, of which at least one seals: a group has no more tokens."""
SHARED = 1 << 17
"""Tokens of all prompts of rows within a cap; more rows share these prompts, and decode different tokens."""
SPEC_LIKENESS = 0.8
"""Likeness of successive tokens for `SpecCache`, which keeps entries until others have four times their attention. With
guesses that are right it gives about the hit rate on text, 0.8."""
PIECE = 65536
"""Tokens of all rows that a layer of ours gets at a time when it is filled."""
SHAPE: Shape = LLAMA_8B
CAPS: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (24, 32768, NAMES),
    *((48, tokens, (DYNAMIC, "SpecCache")) for tokens in (2048, 8192, 32768)),
)
"""GiB that torch gets, tokens of a row, and who is measured in them; 48 GB are those of SpeCache's table."""
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's attention without cuDNN's, which plans anew for each length, so that a step of `DynamicCache` would wait."""
ENDED = "a call of the command ended while this was measured"


def missing(name: str) -> str | None:
    """Why a contender cannot run on this machine; None: it can."""
    if name in OURS:
        return cache_class(OURS[name]).missing()
    if name not in QUANTISED:
        return None
    backend = QUANTISED[name][0]
    if backend == "fp8":
        known = hasattr(transformers.cache_utils, "Fp8QuantizedLayer")
        return None if known else f"transformers {transformers.__version__} does not have it"
    installed = is_optimum_quanto_available() if backend == "quanto" else is_hqq_available()
    return None if installed else f"needs {'optimum-quanto' if backend == 'quanto' else 'hqq'}, which is not installed"


def fields_of(name: str, model: Any, memory: str, tokens: int, batch: int, depth: int | None = None) -> dict[str, Any]:
    """Fields of one of ours with records in host memory, as planned for a share of the full KV of `depth` layers (None:
    of the model's). Without the limit itself, which a part of the layers would not come near to. Raises
    `BudgetError`."""
    cls = cache_class(OURS[name])
    if OURS[name] == "spec":
        return {"engine": "memory", "bits": 2, "max_context": tokens}
    own = {"engine": "memory"} | ({"exact": True} if name == EXACT else {})
    geometry = Geometry.of(model)
    depth = depth or len(geometry.layers)
    planned = dataclasses.replace(geometry, layers=geometry.layers[:1] * depth, num_blocks=depth)
    limit = parse_memory(memory, planned.full_kv_bytes(tokens, batch))
    try:
        config = cls.fit(planned, limit, tokens, batch, own)
    except BudgetError:  # a method whose budget counts the records
        config = cls.fit(planned, limit, tokens, batch, own | {"engine": "auto"})
    default = cls.config_class()
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    fields = {key: value for key, value in fields.items() if value != getattr(default, key)}
    return {key: value for key, value in fields.items() if key not in ("memory", "max_batch")} | own


@contextlib.contextmanager
def opened(name: str, model: Any, room: int, fields: dict[str, Any], path: str | None) -> Iterator[Cache]:
    """An empty cache of `NAMES` for `room` tokens. `fields`: those of one of ours."""
    if name in OURS:
        with cache_class(OURS[name])(model, path=path, **fields) as cache:
            yield cache
    elif name in QUANTISED:
        backend, options = QUANTISED[name]
        yield QuantizedCache(backend=backend, config=model.config, **options)
    elif name == STATIC:
        yield StaticCache(config=model.config, max_cache_len=room)
    else:
        yield DynamicCache(config=model.config, offloading=name == OFFLOADED)


# --- one call of the command -----------------------------------------------------------------------------------------


class Call:
    """Begins measurements, each of one row, until the seconds of this call are over; `rest`: some were not begun.
    Raises `ValueError` for rows of another GPU.

    A row is marked before it is measured. If a call ends meanwhile, the next one leaves it as failed and goes on."""

    def __init__(self, arguments: argparse.Namespace, rows: Rows) -> None:
        self.arguments, self.rows = arguments, rows
        self.rest = False
        self._ends = time.monotonic() + arguments.seconds
        self._gpu = torch.cuda.get_device_name()
        if others := {row["gpu"] for row in rows.rows if "gpu" in row} - {self._gpu}:
            known = f"{str(rows.target)!r} has rows of {others.pop()}"
            raise ValueError(f"{known}, and this is {self._gpu}: give another --json")
        if arguments.again:
            rows.rows = [row for row in rows.rows if "failed" not in row]

    def wants(self, **key: Any) -> bool:
        """Whether a row with this key is missing and there is time for it."""
        if self.rows.has(**key):
            return False
        late = time.monotonic() > self._ends
        self.rest |= late
        return not late

    def row(self, measure: Callable[[], dict[str, Any]], **key: Any) -> None:
        """Add what `measure` returns, if it is missing; or that it failed, and why. Raises `RuntimeError` if the device
        cannot be used any more."""
        if not self.wants(**key):
            return
        free_device()
        self.rows.rows.append({**key, "failed": ENDED})
        self.rows.write()
        lost = False
        try:
            found = measure()
        except torch.OutOfMemoryError as error:
            found = {"failed": f"out of device memory: {str(error).partition('. ')[0]}"}
        except MemoryError as error:
            found = {"failed": f"out of host memory: {error}"}
        except Exception as error:  # whatever one contender does, the others are measured
            found = {"failed": f"{type(error).__name__}: {str(error)[:400]}"}
            lost = isinstance(error, torch.AcceleratorError)
        self.rows.drop(**key)
        self.rows.add(**key, gpu=self._gpu, **found)
        if lost:
            raise RuntimeError(f"{found['failed']}: nothing runs on the device any more; the same command goes on")


def free_device() -> None:
    """Give memory back that no tensor uses: torch keeps it, also pinned memory of the host."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.accelerator.empty_host_cache()


@contextlib.contextmanager
def capped(gigabytes: float | None) -> Iterator[None]:
    """Inside, torch allocates at most so many GiB of the device; None: no limit. What CUDA itself takes is extra."""
    total = torch.cuda.mem_get_info()[1]
    if gigabytes is None or gigabytes * 2**30 >= total:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(gigabytes * 2**30 / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def memory_in_use() -> dict[str, int]:
    """Most bytes of tensors since the last reset, and bytes of the device that are in use now, by anyone."""
    free, total = torch.cuda.mem_get_info()
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "used_bytes": total - free}


def timed_steps(step: Callable[[int], Any], steps: int, together: int = 1) -> dict[str, float]:
    """Times of steps that follow `SETTLES` others; of fewer, at least three, where they are slow. `together`: so many
    steps count as one, by their mean."""
    seconds: list[float] = []
    begun, steps = time.monotonic(), steps if together == 1 else max(steps, 4 * together)
    while len(seconds) < SETTLES + steps:
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(len(seconds))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if time.monotonic() - begun > MOST_SECONDS and len(seconds) > 3:
            break
    settled = seconds[SETTLES:] if len(seconds) > SETTLES + 2 else seconds[-3:]
    parts = [settled[first : first + together] for first in range(0, len(settled) - together + 1, together)]
    return times([statistics.mean(part) for part in parts] if len(parts) > 2 else settled)


def stepping(name: str, model: Any, cache: Cache) -> Callable[[torch.Tensor], Any]:
    """A step for ids (B, 1) of one of `NAMES`."""
    if name == GRAPHED:
        assert isinstance(cache, OffloadCache)
        return graphed_step(model, cache)
    return lambda ids: model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def of_cache(cache: Cache) -> dict[str, Any]:
    """The account of one of ours: device and host together, and its hit rate."""
    if not isinstance(cache, OffloadCache):
        return {}
    report = cache.report()
    return {"account_bytes": report.memory_bytes, "full_kv_bytes": report.full_kv_bytes, "hit_rate": report.hit_rate}


# --- a model on text -------------------------------------------------------------------------------------------------


def text_model(loaded: Any, device: torch.device) -> Any:
    """`loaded`, which is on the device; or the default model there, and its tokenizer."""
    if loaded is not None:
        return loaded
    model, tokenizer = load_default_model(torch.bfloat16)
    return model.to(device), tokenizer


def measure_text(model: Any, ids: torch.Tensor, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prefills of ids (1, T) in pieces of `chunk`, each in a new cache, and steps after the last. The first prefill,
    which compiles, does not count."""
    tokens, seconds = arguments.text_tokens, list[float]()
    fields = fields_of(name, model, arguments.memory, tokens + ROOM, 1) if name in OURS else {}

    def new_cache() -> contextlib.AbstractContextManager[Cache]:
        return opened(name, model, tokens + ROOM, fields, arguments.path)

    def prefilled(cache: Cache) -> Contender:
        one = Contender(name, model, cache, ids, tokens)
        torch.cuda.synchronize()
        one.prefill(arguments.chunk)
        seconds.append(one.prefill_seconds)
        return one

    for _ in range(2):
        with new_cache() as cache:
            prefilled(cache)
        del cache
    torch.cuda.reset_peak_memory_stats()
    with new_cache() as cache:
        one = prefilled(cache)
        row: dict[str, Any] = {f"prefill_{key}": value for key, value in (times(seconds[1:]) | memory_in_use()).items()}
        torch.cuda.reset_peak_memory_stats()
        row |= timed_steps(lambda number: one.step(), arguments.steps) | memory_in_use() | of_cache(cache)
    row |= {"beyond_training": tokens > model.config.max_position_embeddings, "fields": fields}
    return row | {"tokens_per_second": 1 / row["median_seconds"]}


def text_part(call: Call, names: list[str], device: torch.device, loaded: Any) -> None:
    arguments = call.arguments
    key: dict[str, Any] = {"part": "text", "model": "SmolLM2-135M", "tokens": arguments.text_tokens, "batch": 1}
    names = [name for name in names if name != GRAPHED]
    if not any(call.wants(name=name, **key) for name in names):
        return
    model, tokenizer = text_model(loaded, device)
    length = arguments.text_tokens + SETTLES + arguments.steps + 1
    ids = text_rows(sample_ids(None, tokenizer)[0], 1, length).to(device)
    for name in names:
        call.row(functools.partial(measure_text, model, ids, name, arguments), name=name, **key)


def measure_quality(model: Any, ids: torch.Tensor, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Distance to `DynamicCache` on ids (1, tokens + followed), each cache after the same prefill in one piece."""
    tokens = arguments.quality_tokens
    context, new = prefill(model, ids[:, :tokens]), ids[:, tokens:]
    with open_cache(model, None, 0) as cache:
        reference = follow(model, replay(cache, model, context), new)
    fields = fields_of(name, model, arguments.memory, ids.shape[1], 1) if name in OURS else {}
    with opened(name, model, ids.shape[1], fields, arguments.path) as cache:
        logits = follow(model, replay(cache, model, context), new)
        row = of_cache(cache)
    return {**distance(reference, logits), "perplexity": perplexity_over(reference, logits, new), **row}


def quality_part(call: Call, names: list[str], device: torch.device, loaded: Any) -> None:
    arguments, tokens = call.arguments, call.arguments.quality_tokens
    names = [name for name in names if name not in (GRAPHED, EXACT) and (name in OURS or name in QUANTISED)]
    ours = [name for name in names if name in OURS]
    texts, documents = range(arguments.samples), range(arguments.documents)
    key: dict[str, Any] = {"part": "quality", "tokens": tokens}
    wanted = [call.wants(sample=sample, name=name, **key) for sample in texts for name in names]
    wanted += [wants_needle(call, tokens, document, ours) for document in documents]
    if not any(wanted):
        return
    model, tokenizer = text_model(loaded, device)
    for sample, ids in enumerate(reference_texts(tokenizer, len(texts), tokens + arguments.followed)):
        for name in names:
            measure = functools.partial(measure_quality, model, ids.to(device), name, arguments)
            call.row(measure, sample=sample, name=name, **key)
    needles = make_needles(tokenizer, len(documents), min(tokens, LONGEST_NEEDLES))
    for document, needle in zip(documents, needles, strict=True):
        for name in (DYNAMIC, *ours):
            if name == DYNAMIC or wants_needle(call, tokens, document, [name]):
                measure = functools.partial(measure_needle, model, tokenizer, needle, name, arguments)
                call.row(measure, part="needles", tokens=tokens, sample=document, name=name)


def wants_needle(call: Call, tokens: int, document: int, ours: list[str]) -> bool:
    """Whether somebody is still to be asked about a document: `DynamicCache`, and if it answers, the others."""
    key: dict[str, Any] = {"part": "needles", "tokens": tokens, "sample": document}
    if not (known := call.rows.where(name=DYNAMIC, **key)):
        return call.wants(name=DYNAMIC, **key)
    return bool(known[0].get("answered")) and any([call.wants(name=name, **key) for name in ours])


def measure_needle(
    model: Any, tokenizer: Any, needle: Needle, name: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Ask one contender for a needle: whether it "answered", and its text."""
    found, room = Rows(say=lambda line: None), arguments.quality_tokens + ROOM + NEW_TOKENS
    asked = {}
    if name in OURS:
        found.rows.append({"sample": 0, "name": DYNAMIC})  # who is not asked again
        asked[name] = {"cache": OURS[name], **fields_of(name, model, arguments.memory, room, 1)}
    ask(argparse.Namespace(path=arguments.path), found, asked, [needle], model, tokenizer)
    return {key: value for key, value in found.rows[-1].items() if key not in ("sample", "name")}


# --- a large model's shape -------------------------------------------------------------------------------------------


def build(layers: int, device: torch.device) -> Any:
    """A model of `SHAPE` with so many layers and random weights, made on the device."""
    with torch.device(device):
        return build_model(dataclasses.replace(SHAPE, layers=layers), device=device)


def similar_tokens(model: Any, steps: int, batch: int, likeness: float = LIKENESS) -> torch.Tensor:
    """Ids (steps, batch, 1) of successive tokens. Their embeddings, which this sets, are as similar from one step to
    the next as `likeness` says; random tokens would select anew in every step."""
    shape = dataclasses.replace(SHAPE, hidden=model.config.hidden_size)
    inputs, table = Inputs(shape, likeness, batch=batch), model.get_input_embeddings().weight
    steps = min(steps, len(table) // batch)
    rows = torch.cat([inputs.next()[:, 0] for _ in range(steps)])
    with torch.no_grad():
        table[: len(rows)].copy_(rows.to(table.device))
    return torch.arange(len(rows)).view(steps, batch, 1).to(table.device)


def check_host(name: str, nbytes: int) -> None:
    """Raise `MemoryError` if the host has no room for a contender's records."""
    free = free_memory()
    if (name in OURS or name == OFFLOADED) and free is not None and nbytes * 1.05 > free:
        raise MemoryError(f"the records need {nbytes / 2**30:.1f} GiB, and {free / 2**30:.1f} are free")


def measure_shape(
    model: Any, name: str, tokens: int, batch: int, arguments: argparse.Namespace, gigabytes: float | None = None
) -> dict[str, Any]:
    """Steps after synthetic keys and values were put into the cache; no attention is computed for these, so that is not
    the time of a prefill."""
    layers = model.config.num_hidden_layers
    shape = dataclasses.replace(SHAPE, layers=layers)
    full, prompts = batch * tokens * shape.token_bytes, batch
    if gigabytes is not None and name in (DYNAMIC, *OURS):
        prompts = max(1, min(batch, SHARED // tokens))
    check_host(name, full // batch * prompts)
    guesses = OURS.get(name) == "spec"
    with capped(gigabytes):
        fields = fields_of(name, model, arguments.memory, tokens + ROOM, batch, SHAPE.layers) if name in OURS else {}
        ids = similar_tokens(model, SETTLES + arguments.steps, batch, SPEC_LIKENESS if guesses else LIKENESS)
        weights = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad(), opened(name, model, tokens + ROOM, fields, arguments.path) as cache:
            start = time.perf_counter()
            fill(cache, model, shape, tokens, prompts, piece=max(64, PIECE // prompts))
            if prompts < batch:
                cache.batch_select_indices(torch.arange(batch, device=ids.device) % prompts)
            if isinstance(cache, OffloadCache):
                cache.storage.prefetcher.flush()
            torch.cuda.synchronize()
            row = {"filled_seconds": time.perf_counter() - start}
            row |= {f"filled_{key}": value for key, value in memory_in_use().items()}
            torch.cuda.reset_peak_memory_stats()

            one, together = stepping(name, model, cache), SEALED if name == GRAPHED else 1

            def step(number: int, one: Callable[[torch.Tensor], Any] = one) -> None:
                one(ids[number % len(ids)])
                if guesses:  # random weights guess no successor
                    assert isinstance(cache, SpecCache)
                    cache._guess = ids[(number + 2) % len(ids)]

            row |= timed_steps(step, arguments.steps, together) | memory_in_use() | of_cache(cache)
            if isinstance(one, GraphedStep):
                row |= {"replays": one.replays, "captures": one.captures, "not_replayed": one.reason}
            del step, one
        row |= {"weight_bytes": weights, "full_kv_bytes": full, "fields": fields, "prompts": prompts}
        row["device_share"] = (row["peak_bytes"] - weights) / full
    return row | {"tokens_per_second": batch / row["median_seconds"]}


def shape_rows(call: Call, names: Iterable[str], layers: int, device: torch.device, part: str) -> None:
    """Rows of a model of so many layers, which is made if one is missing, and freed."""
    arguments = call.arguments
    keys = [
        {"part": part, "layers": layers, "tokens": tokens, "batch": batch, "name": name}
        for tokens, batch, name in itertools.product(arguments.context, arguments.batch, names)
    ]
    if part == "complete":
        keys = [key for key in keys if fits_completely(key["name"], key["tokens"], key["batch"])]
    if not any(call.wants(**key) for key in keys):
        return
    free_device()
    model = build(layers, device)
    for key in keys:
        of_row = key["name"], key["tokens"], key["batch"]
        call.row(functools.partial(measure_shape, model, *of_row, arguments), **key, said=f"{layers} of {SHAPE.layers}")


def fits_completely(name: str, tokens: int, batch: int) -> bool:
    """Whether device and host have the memory for all layers, as far as can be told: a cache in 16 bits is copied layer
    by layer when it grows."""
    full, layers = batch * tokens * SHAPE.token_bytes, SHAPE.layers
    total, free = torch.cuda.mem_get_info()[1], free_memory()
    inner = 2 * SHAPE.hidden * (SHAPE.heads + SHAPE.kv_heads) * SHAPE.head_dim + 3 * SHAPE.hidden * SHAPE.intermediate
    weights = 2 * (layers * inner + SHAPE.vocabulary * SHAPE.hidden)
    away = name in OURS or name == OFFLOADED
    needed = weights + (full // 6 + 3 * full // layers if away else full + 3 * full // layers)
    return needed < 0.92 * total and not (away and free is not None and 1.05 * full > free)


def shape_part(call: Call, names: list[str], device: torch.device, loaded: Any) -> None:
    for layers in call.arguments.layers:
        shape_rows(call, names, layers, device, "shape")


def complete_part(call: Call, names: list[str], device: torch.device, loaded: Any) -> None:
    shape_rows(call, names, SHAPE.layers, device, "complete")


def capped_part(call: Call, names: list[str], device: torch.device, loaded: Any) -> None:
    """For each contender batches that double, and then halve the distance to the smallest that does not fit."""
    model = None
    total = torch.cuda.mem_get_info()[1]
    for gigabytes, tokens, who in CAPS:
        if gigabytes * 2**30 > 1.1 * total:
            call.rows.say(f"left out: the cap of {gigabytes} GiB: the device has {total / 2**30:.1f}")
            continue
        for name in (name for name in who if name in names):
            key: dict[str, Any] = {"part": "capped", "gigabytes": gigabytes, "tokens": tokens, "name": name}
            while (batch := next_batch(call.rows.where(**key), gigabytes * 2**30)) is not None:
                if not call.wants(batch=batch, **key):
                    return
                model = build(SHAPE.layers, device) if model is None else model
                measure = functools.partial(measure_shape, model, name, tokens, batch, call.arguments, gigabytes)
                call.row(measure, batch=batch, **key)


# --- kernels, and the command ----------------------------------------------------------------------------------------


def kernels_part(call: Call, names: list[str], device: torch.device, loaded: Any) -> None:
    sizes = gpu_kernels.QUICK if call.arguments.quick else gpu_kernels.Sizes()
    for name, measure in gpu_kernels.copies(sizes, device):
        call.row(measure, part="kernels", name=name)
    for name in gpu_kernels.every_name():
        if gpu_kernels.missing(name, device) is None:
            known = {row["name"]: row for row in call.rows.where(part="kernels")}
            call.row(functools.partial(gpu_kernels.measure, name, sizes, device, known), part="kernels", name=name)


PARTS: dict[str, Callable[[Call, list[str], torch.device, Any], None]] = {
    "kernels": kernels_part, "text": text_part, "shape": shape_part, "quality": quality_part, "capped": capped_part,
    "complete": complete_part,
}  # fmt: skip


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add rows of each part until the time of this call is over. `loaded`: a model on the device, and its tokenizer."""
    device, call = torch.device("cuda", torch.cuda.current_device()), Call(arguments, rows)
    left_out = {name: why for name in arguments.caches if (why := missing(name)) is not None}
    names = [name for name in arguments.caches if name not in left_out]
    if "kernels" in arguments.parts:
        without = {name: gpu_kernels.missing(name, device) for name in gpu_kernels.every_name()}
        left_out |= {name: why for name, why in without.items() if why is not None}
    for name, why in left_out.items():
        rows.say(f"left out: {name}: {why}")
    for part in arguments.parts:
        with contextlib.nullcontext() if part == "kernels" else sdpa_kernel(ATTENTION):
            PARTS[part](call, names, device, loaded)
    rows.drop(part=SCALED)
    for row in scaled(rows.where(part="shape"), SHAPE.layers):
        rows.add(**row)
    if call.rest:
        rows.say("the time of this call is over: the same command goes on")
    return {"complete": not call.rest, "left_out": left_out, **summary(rows.rows, list(OURS))}


STUDY = Study(
    "bench_gpu", __doc__, run,
    {
        "parts": (list(PARTS), "what to measure", PARTS),
        "caches": (list(NAMES), "contenders", NAMES),
        "seconds": (180, "begin no measurement after so many seconds of this call"),
        "again": (False, "measure again what failed"),
        "memory": ("1/13", "memory of our caches on the device: a share of the full KV"),
        "steps": (40, "steps that count"),
        "chunk": (8192, "tokens of a prefill call"),
        "text_tokens": (32768, "tokens of text for times"),
        "quality_tokens": (7936, "tokens of texts and of documents with needles, for fidelity"),
        "followed": (48, "tokens that follow a text"),
        "samples": (2, "texts"),
        "documents": (8, "documents with a needle"),
        "context": ([32768, 131072], "tokens of a row, of the large shape"),
        "batch": ([1, 8], "rows"),
        "layers": ([2, 8], "layers of the large shape, from which all follow"),
    },
    {"text_tokens": 1024, "quality_tokens": 1024, "followed": 8, "samples": 1, "documents": 1, "context": [2048],
     "batch": [1], "layers": [1, 2], "steps": 6, "parts": ["kernels", "text", "shape", "quality"]},
    plots={"plot": draw_steps, "plot-kernels": draw_kernels}, size=(11.0, 12.0), module="eval.bench_gpu",
    of_a_run=("parts", "caches", "seconds", "again", "samples", "documents", "context", "batch", "layers"),
)  # fmt: skip


def main(argv: Sequence[str] | None = None, loaded: Any = None) -> int:
    """The command; 2 without a CUDA device."""
    words = list(sys.argv[1:] if argv is None else argv)
    given = STUDY.parsed(words)
    if not torch.cuda.is_available():
        print("eval.bench_gpu needs a CUDA device, and torch finds none here", file=sys.stderr)
        return 2
    if given.json is not None and "--resume" not in words:
        words.append("--resume")
    run_study(STUDY, words, loaded)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
