"""Saved contexts: how soon the first token comes, how that grows, what forks take, and what checking costs.

Each opening runs in its own process, with the context's files dropped from the page cache. Imports and the loading of
the weights are not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import bundled_text

from .replay import LIKENESS
from .studies.common import Options, one_run, write_json
from .synthetic import SMOLLM2, Inputs, build_model, decode_step, fill


@dataclass(frozen=True)
class Opening:
    """A child's task: open `directory` with the real model or one of SmolLM2's shape, and make one token."""

    directory: str
    real: bool
    question: list[int]
    """Token ids after what is held; of a model with random weights nothing but their number matters."""


def child(opening: Opening) -> dict[str, Any]:
    """Seconds of opening and of the first token, and what was read."""
    model = load_default_model(torch.bfloat16)[0] if opening.real else build_model(SMOLLM2)
    with torch.no_grad():
        model(torch.tensor([[5]]), use_cache=False)  # weights are paged in, threads are awake
    started = time.perf_counter()
    with DiskSwapCache.open(opening.directory, model) as cache:
        opened = time.perf_counter()
        held = cache.input_ids.clamp(min=0)
        ids = torch.cat([held, torch.tensor([opening.question])], 1)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
        finished = time.perf_counter()
        report = cache.report()
    return {
        "open_seconds": opened - started, "first_token_seconds": finished - started, "bytes_read": report.bytes_read,
        "token": int(out[0, -1]), "store": report.store,
    }  # fmt: skip


def open_in_child(opening: Opening, repetitions: int) -> dict[str, Any]:
    """The median of cold runs; "spread" is (most - least) / median of the time to the first token."""
    found = []
    for _ in range(repetitions):
        _drop_pages(Path(opening.directory))
        command = [sys.executable, "-m", "eval.bench_contexts", "--child", json.dumps(asdict(opening))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the child failed:\n{done.stdout}\n{done.stderr}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    times = [one["first_token_seconds"] for one in found]
    middle = statistics.median(times)
    medians = {"first_token_seconds": middle, "open_seconds": statistics.median(one["open_seconds"] for one in found)}
    return {**found[0], **medians, "spread": (max(times) - min(times)) / middle}


def _drop_pages(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def first_token(folder: Path, tokens: int, repetitions: int) -> dict[str, Any]:
    """The real model: prefill and first token, in memory and with the cache, against a saved context of the same
    tokens. Forks of it are made on the way, for what they take on the disk.
    """
    model, tokenizer = load_default_model(torch.bfloat16)
    ids = tokenizer(bundled_text(), return_tensors="pt").input_ids[:, :tokens]
    found: dict[str, Any] = {"tokens": tokens}
    prefills = []
    for _ in range(max(1, repetitions // 2)):
        for name, cache in (("dynamic", DynamicCache(config=model.config)), ("own", DiskSwapCache(model, path=folder))):
            started = time.perf_counter()
            model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
            prefills.append((name, time.perf_counter() - started))
            if name == "own":
                cache.close()
    for name in ("dynamic", "own"):
        found[f"prefill_seconds_{name}"] = statistics.median(seconds for one, seconds in prefills if one == name)
    with DiskSwapCache(model, path=folder) as cache:
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        started = time.perf_counter()
        cache.save(folder / "real")
        found["save_seconds"] = time.perf_counter() - started
        stored = cache.disk_bytes
        forks = [cache.fork() for _ in range(8)]
        by_forking = sum(fork.own_disk_bytes for fork in forks)
        for seed, fork in enumerate(forks):
            question = torch.randint(100, 1000, (1, 12), generator=torch.Generator().manual_seed(seed))
            turn = torch.cat([ids[:, :-1], question], 1)
            model.generate(turn, past_key_values=fork, max_new_tokens=16, do_sample=False)
        by_answers = sum(fork.own_disk_bytes for fork in forks)
        # What is new in each: 12 tokens of a question and 16 of an answer, in complete groups.
        found["forks"] = {"stored_bytes": stored, "added_by_forking": by_forking, "added_share": by_answers / stored}
        for fork in forks:
            fork.close()
    last, question = ids[0, -1:].tolist(), ids[0, 100:120].tolist()
    for name, asked in (("one_token", last), ("question_of_20", question)):
        found[name] = open_in_child(Opening(str(folder / "real"), True, asked), repetitions)
        found[name]["faster_than_dynamic"] = found["prefill_seconds_dynamic"] / found[name]["first_token_seconds"]
        found[name]["faster_than_own"] = found["prefill_seconds_own"] / found[name]["first_token_seconds"]
    return found


def _save(model: Any, folder: Path, name: str, tokens: int) -> int:
    """Save a context of so many tokens; its bytes on the disk."""
    with DiskSwapCache(model, path=folder) as cache:
        fill(cache, model, SMOLLM2, tokens)
        decode_step(model, cache, Inputs(SMOLLM2, LIKENESS).next())
        cache.save(folder / name)
        return cache.disk_bytes


def growth(folder: Path, lengths: list[int], repetitions: int) -> dict[str, Any]:
    """SmolLM2's shape with random weights: the time to the first token by tokens held."""
    rows = []
    for tokens in lengths:
        stored = _save(build_model(SMOLLM2), folder, f"synthetic-{tokens}", tokens)
        opening = Opening(str(folder / f"synthetic-{tokens}"), False, [7])
        rows.append({"tokens": tokens, "stored_bytes": stored, **open_in_child(opening, repetitions)})
    ratio = rows[-1]["first_token_seconds"] / rows[0]["first_token_seconds"]
    return {"rows": rows, "growth": ratio}


def checking(folder: Path, tokens: int, steps: int, repetitions: int) -> dict[str, Any]:
    """Decode steps over one saved context with and without checks, in turns, forth and back."""
    model = build_model(SMOLLM2)
    _save(model, folder, "checked", tokens)
    times: dict[bool, list[float]] = {True: [], False: []}
    caches = {verify: DiskSwapCache.open(folder / "checked", model, verify=verify) for verify in (True, False)}
    inputs = {verify: Inputs(SMOLLM2, LIKENESS) for verify in caches}
    try:
        for repetition in range(-1, repetitions):  # the first one is to get under way
            for verify in (True, False) if repetition % 2 else (False, True):
                started = time.perf_counter()
                for _ in range(steps):
                    decode_step(model, caches[verify], inputs[verify].next())
                if repetition >= 0:
                    times[verify].append((time.perf_counter() - started) / steps)
        hit_rate = caches[True].report().hit_rate
    finally:
        for cache in caches.values():
            cache.close()
    checked, trusted = (statistics.median(times[verify]) for verify in (True, False))
    pairs = [a / b - 1 for a, b in zip(times[True], times[False], strict=True)]
    costs = {"cost": statistics.median(pairs), "cost_least": min(pairs), "cost_most": max(pairs)}
    return {"step_seconds_checked": checked, "step_seconds_trusted": trusted, **costs, "hit_rate": hit_rate}


OPTIONS: Options = {"only": (["first_token", "growth", "checking"], "parts", ("first_token", "growth", "checking"))}


def main(argv: Sequence[str] | None = None) -> None:
    """Saved contexts: time to the first token, its growth, what forks take, and the cost of checks."""
    arguments = one_run(main.__doc__, OPTIONS, argv)
    quick = arguments.quick
    lengths = [1024, 4096] if quick else [1024, 4096, 8192, 16384, 32768]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.path) as name:
        folder = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "first_token": lambda: first_token(folder, 1024 if quick else 7168, 2 if quick else 5),
            "growth": lambda: growth(folder, lengths, 2 if quick else 5),
            "checking": lambda: checking(folder, 4096 if quick else 32768, 10 if quick else 20, 2 if quick else 10),
        }
        for part in arguments.only:
            found[part] = parts[part]()
            print(json.dumps({part: found[part]}, indent=1), flush=True)
    if arguments.json:
        write_json(arguments.json, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(Opening(**json.loads(sys.argv[2])))))
    else:
        main()
