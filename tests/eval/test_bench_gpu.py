"""The benchmark of a GPU, each part tiny on the device that only counts; and what follows from its rows."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import CUDA, Stream, moved, on_the_device, values_of
from harness import COMMON, build
from transformers import LlamaConfig, LlamaForCausalLM
from words import words

from eval import bench_gpu, gpu_kernels, gpu_summary
from eval.replay import LIKENESS
from eval.studies.common import Rows
from eval.studies.common import main as run_study
from eval.synthetic import Shape, build_model
from hf_offload_cache.kernels import on_a_device
from hf_offload_cache.registry import cache_class

TINY = Shape(layers=3, heads=4, kv_heads=2, head_dim=64, hidden=48, intermediate=64, vocabulary=512)
GIB = 2**30
OURS = [name for name in bench_gpu.OURS if name not in (bench_gpu.GRAPHED, bench_gpu.EXACT)]


class _Stream(Stream):
    """As a `torch.Stream`, which `DynamicCache(offloading=True)` enters."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A text model on the device and its tokenizer, and sizes of a device whose memory nobody uses."""
    generator = torch.Generator
    for name, value in {
        "mem_get_info": (60 * GIB, 80 * GIB), "max_memory_allocated": 3 * GIB, "memory_allocated": GIB,
        "reset_peak_memory_stats": None, "set_per_process_memory_fraction": None, "empty_cache": None,
        "get_device_name": "a counting device",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None)
    monkeypatch.setattr(torch, "Stream", _Stream)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr(bench_gpu, "SHAPE", TINY)
    monkeypatch.setattr(bench_gpu, "SETTLES", 2)
    monkeypatch.setattr(bench_gpu, "PIECE", 256)
    monkeypatch.setattr(bench_gpu, "build", lambda layers, device: moved(build_model(replace(TINY, layers=layers))))
    sizes = {**COMMON, "max_position_embeddings": 512, "num_hidden_layers": 2}
    made = build(LlamaForCausalLM, LlamaConfig(**sizes))
    with on_the_device(made) as (model, _):
        yield model, words()


def words_of(target: Path, *more: str) -> list[str]:
    """Options of a tiny run."""
    sizes = "--quick --steps 3 --text-tokens 640 --quality-tokens 640 --followed 4 --context 640 --memory 2/1"
    return [*sizes.split(), "--chunk", "320", "--path", str(target.parent), "--json", str(target), *more]


def rows_of(target: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(target.read_text())["rows"]
    return rows


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_gpu.main(["--quick"]) == 2
    said = capsys.readouterr()
    assert said.err == "eval.bench_gpu needs a CUDA device, and torch finds none here\n" and not said.out


EXPECTED = {name for name in bench_gpu.NAMES if name not in bench_gpu.QUANTISED} | {"fp8"}
FEW = ["DynamicCache", "DiskSwapCache", "SpecCache"]
NAMES = {
    "text": [*FEW, "StaticCache", bench_gpu.EXACT], "shape": [*FEW, bench_gpu.GRAPHED], "capped": FEW,
    "quality": [*OURS, "fp8"],
}  # fmt: skip


@pytest.mark.parametrize("part", ["text", "shape", "quality", "complete", "capped", "kernels"])
def test_a_part_measures_every_contender(
    part: str, device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None fails; a second call measures nothing and draws the plots."""
    if part != "text":  # planning takes longer than all else here
        monkeypatch.setattr(bench_gpu, "fields_of", lambda *_: {"engine": "memory", "num_selected": 64})
    if part == "capped":
        monkeypatch.setattr(bench_gpu, "CAPS", ((24, 640, bench_gpu.NAMES),))
        monkeypatch.setattr(bench_gpu, "SHARED", 700)
        monkeypatch.setattr(bench_gpu, "next_batch", lambda rows, limit: None if len(rows) == 2 else 1 + len(rows))
    target, few = tmp_path / "gpu.json", ["--caches", *NAMES[part]] if part in NAMES else []
    assert bench_gpu.main(words_of(target, "--parts", part, *few), device) == 0
    rows = rows_of(target)
    assert not [row for row in rows if "failed" in row]
    whole = json.loads(target.read_text())
    assert whole["summary"]["complete"] and whole["machine"]["gpu"] == "a counting device"
    if not few:
        assert ("quanto, 4 bits" in whole["summary"]["left_out"]) is (bench_gpu.missing("quanto, 4 bits") is not None)
    _CHECKS[part](rows)
    for row in rows:
        if "median_seconds" in row:
            assert 0 < row["least_seconds"] <= row["median_seconds"] <= row["most_seconds"] and row["repetitions"] >= 3
    plots = {}
    if find_spec("matplotlib"):
        plots = {option: tmp_path / f"{option}.png" for option in ("plot", "plot-kernels")}
    monkeypatch.setattr(bench_gpu, "times", None)  # nothing is timed again
    more = [word for option, path in plots.items() for word in (f"--{option}", str(path))]
    assert bench_gpu.main(words_of(target, "--parts", part, *few, *more), device) == 0
    assert rows_of(target) == rows
    assert all(path.stat().st_size > 1000 for path in plots.values())


def test_one_command_measures_all_parts_in_pieces(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command, until nothing is missing: each call adds rows, and keeps those of earlier calls."""
    monkeypatch.setattr(bench_gpu, "fields_of", lambda *_: {"engine": "memory", "num_selected": 64})
    monkeypatch.setattr(bench_gpu, "CAPS", ((24, 640, bench_gpu.NAMES),))
    monkeypatch.setattr(bench_gpu, "next_batch", lambda rows, limit: None if rows else 1)
    few = {name: gpu_kernels.CASES[name] for name in (*gpu_kernels.OF_TORCH, "slots.attend")}
    monkeypatch.setattr(gpu_kernels, "CASES", few)
    monkeypatch.setattr(gpu_kernels, "every_name", lambda: list(few))
    clock = itertools.count()  # each look at it is a second later
    ticks = SimpleNamespace(monotonic=lambda: float(next(clock)), perf_counter=time.perf_counter)
    monkeypatch.setattr(bench_gpu, "time", ticks)
    target, known, calls, complete, of_all = tmp_path / "gpu.json", list[Any](), 0, False, gpu_summary.SCALED
    parts = "kernels", "text", "shape", "quality", "capped", "complete"
    command = words_of(target, "--parts", *parts, "--caches", "DynamicCache", "DiskSwapCache", "--seconds", "25")
    while not complete:
        assert bench_gpu.main(command, device) == 0
        complete, before, known = json.loads(target.read_text())["summary"]["complete"], known, rows_of(target)
        kept = [row for row in before if row["part"] != of_all]
        assert len(known) > len(before) and known[: len(kept)] == kept
        calls += 1
    assert calls > 2 and not [row for row in known if "failed" in row]
    assert {row["part"] for row in known} == {*parts, "needles", of_all}


def _check_text(rows: list[dict[str, Any]]) -> None:
    assert [row["name"] for row in rows] == NAMES["text"]
    for row in rows:
        assert row["beyond_training"] and row["prefill_repetitions"] == 2 and row["peak_bytes"] == 3 * GIB
        assert row["used_bytes"] == 20 * GIB and row["tokens_per_second"] == pytest.approx(1 / row["median_seconds"])
    fields = {row["name"]: row["fields"] for row in rows}
    assert fields["SpecCache"] == {"engine": "memory", "bits": 2, "max_context": 640 + bench_gpu.ROOM}
    assert fields["DiskSwapCache"]["engine"] == "memory" and fields["DynamicCache"] == {}
    exact = fields[bench_gpu.EXACT]
    assert exact["exact"] and exact["engine"] == "memory" and "exact" not in fields["DiskSwapCache"]


def _check_shape(rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if row["part"] == "shape"]
    names = NAMES["shape"]
    assert [(row["layers"], row["name"]) for row in measured] == [(layers, name) for layers in (1, 2) for name in names]
    for row in (row for row in measured if row["name"] == bench_gpu.GRAPHED):
        assert row["replays"] > 40 and row["captures"] >= 1 and row["repetitions"] == 4
    assert {row["said"] for row in measured} == {"1 of 3", "2 of 3"}
    of_all = {row["name"]: row for row in rows if row["part"] == gpu_summary.SCALED}
    assert all((row["said"], row["layers"]) == ("computed from 1 and 2 layers", 3) for row in of_all.values())
    full = 640 * 2 * TINY.token_bytes // TINY.layers
    assert all(row["full_kv_bytes"] == full for row in measured if row["layers"] == 2)


def _check_complete(rows: list[dict[str, Any]]) -> None:
    assert {row["name"] for row in rows} >= EXPECTED and {row["layers"] for row in rows} == {TINY.layers}
    rates = {row["name"]: row.get("hit_rate") for row in rows}
    assert all(0 <= rates[name] <= 1 for name in OURS if name != "SpecCache")  # for which this is too short to select
    assert all(row["device_share"] == pytest.approx(2 * GIB / row["full_kv_bytes"]) for row in rows)


def _check_quality(rows: list[dict[str, Any]]) -> None:
    read = {row["name"]: row for row in rows if row["part"] == "quality"}
    assert read.keys() >= set(OURS) and all(0 <= row["top1"] <= 1 for row in read.values())
    assert read["fp8"]["kl"] < 1 and all(row["kl"] < 5 for row in read.values())
    asked = [row for row in rows if row["part"] == "needles"]
    assert [row["name"] for row in asked][:1] == [bench_gpu.DYNAMIC] and asked[0]["sample"] == 0


def _check_capped(rows: list[dict[str, Any]]) -> None:
    assert [(row["name"], row["batch"]) for row in rows] == [(name, batch) for name in FEW for batch in (1, 2)]
    assert {row["gigabytes"] for row in rows} == {24} and {row["prompts"] for row in rows} == {1}
    assert [row["full_kv_bytes"] for row in rows] == [640 * TINY.token_bytes, 2 * 640 * TINY.token_bytes] * len(FEW)


def _check_kernels(rows: list[dict[str, Any]]) -> None:
    by_name = {row["name"]: row for row in rows}
    assert list(by_name)[:3] == [gpu_kernels.DEVICE, gpu_kernels.BUS, gpu_kernels.GATHERED]
    copy, attended = by_name[gpu_kernels.DEVICE], by_name[gpu_kernels.GATHERED]
    assert copy["nbytes"] == 2 * gpu_kernels.QUICK.copied == 2 * by_name[gpu_kernels.BUS]["nbytes"]
    assert attended["nbytes"] == 2 * 2 * 64 * 64 * 2
    floor = attended["nbytes"] * copy["median_seconds"] / copy["nbytes"]
    assert attended["share"] == pytest.approx(floor / attended["median_seconds"])
    assert by_name.keys() >= on_a_device.TWINS.keys()
    units, codes, entry = 256 // 4, 112, 2 * 2 * 64 * 2  # of 4 tokens; bytes of a token's codes, and of its entry
    assert by_name["ranking.score"]["nbytes"] == 4 * units * codes + 4 * 4 * units
    read, projection = 256 * (entry // 2 + codes), 2 * 64 * (192 + 4) + 4 * 192  # with the mean and the scale
    assert by_name["ranking.encode"]["nbytes"] == read + projection
    of_copy = 2 * 2 * 256 * 20 + 2 * 2 * (68 + 64 + 1) * 64 * 2  # rows of 64 codes in 2 bits; entries
    assert by_name["mixed_attention.attend"]["nbytes"] == of_copy + 4 * 4 * 2 * 256
    assert by_name["low_bit.pack"]["nbytes"] == 256 * entry + 2 * 2 * 256 * 20
    assert by_name["low_bit.unpack_replicas"]["nbytes"] == 64 * entry // 128 * 36 + 64 * entry
    assert by_name["slots.bring"]["nbytes"] == 32 * entry and by_name["slots.bring"]["floor"] == gpu_kernels.BUS
    assert by_name["slots.attend"]["nbytes"] == 64 * entry == attended["nbytes"]
    chunks, examined = 2 * 256 // 64, 2 * min(256, 4 * 64)  # of two key heads
    assert by_name["bounds.limits"]["nbytes"] == chunks * 2 * 64 * 2 + 2 * 4 * 2 * chunks
    assert by_name["bounds.look"]["nbytes"] == examined * 64 * 2 + 2 * 32 * 64 * 2
    assert by_name["slots.attend"]["compared_with"] == gpu_kernels.GATHERED
    points, labels, centroids = 2 * 256 * 64 * 2, 2 * 256 * 4, 2 * (256 // 12) * 64 * 4
    assert by_name["clusters.assign"]["nbytes"] == points + centroids + labels
    assert by_name["clusters.assign"]["compared_with"] == gpu_kernels.PRODUCTS
    assert by_name["clusters.means"]["nbytes"] == points + labels + 2 * centroids + centroids // 64
    assert by_name["clusters.apart"]["nbytes"] == points + centroids + 2 * labels
    assert by_name["clusters.parted"]["nbytes"] == 2 * labels
    scores, tables = 2 * 21 * 2 * 4, 3 * 2 * 21 * 4  # of two query heads for each of two key heads
    assert by_name["clusters.score"]["nbytes"] == 2 * 21 * 64 * 2 + tables + scores
    assert by_name["clusters.choose"]["nbytes"] == scores + tables + 2 * tables // 3
    maps = 2 * 65 * 64
    assert by_name["clusters.rest"]["nbytes"] == scores + 2 * 21 * 64 * 2 + tables + tables // 3 + maps
    assert by_name["mixed_attention.merge"]["nbytes"] == 4 * 256 * (64 * (4 + 4 + 2) + 3 * 4)
    assert by_name[gpu_kernels.PRODUCTS]["nbytes"] == 2 * points + centroids + 2 * 256 * 21 * 4  # in float32


_CHECKS = {
    "text": _check_text, "shape": _check_shape, "quality": _check_quality, "complete": _check_complete,
    "capped": _check_capped, "kernels": _check_kernels,
}  # fmt: skip


@pytest.mark.kernels
def test_cases_call_the_kernels_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: their results are those of the twins, on what a case makes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sizes, device = gpu_kernels.QUICK, torch.device("cpu")
    torch.manual_seed(0)  # no point is as near to two centroids
    ranking = ("ranking.project", "ranking.score", "ranking.share", "ranking.pick", "ranking.rest", "slots.attend")
    chunks = ("bounds.limits", "bounds.stand", "bounds.front", "bounds.look")
    copy = "mixed_attention.attend", "mixed_attention.share"
    for name in (*copy, *ranking, *chunks, *(name for name in gpu_kernels.CASES if name.startswith("clusters."))):
        twin = gpu_kernels.CASES[name](sizes, device).run
        module, _, function = name.partition(".")
        kernel = getattr(importlib.import_module(f"hf_offload_cache.kernels.{module}_triton"), function)
        torch.testing.assert_close(kernel(*twin.args), twin(), rtol=1e-3, atol=0.05)
    twin = gpu_kernels.CASES["ranking.encode"](sizes, device).run
    *given, codes, group, first = twin.args
    found = codes.clone()
    importlib.import_module("hf_offload_cache.kernels.ranking_triton").encode(*given, found, group, first)
    twin()  # which changes `codes`
    assert (found != codes).float().mean() < 1e-3  # a product near an integer may be rounded to either side of it
    for function, written, apart in (("pack", 2, 0.0), ("unpack_replicas", 1, 2**-7)):  # bfloat16 is cut
        twin = gpu_kernels.CASES[f"low_bit.{function}"](sizes, device).run
        given, tensors = twin.args, [isinstance(one, torch.Tensor) for one in twin.args]
        before, copied = ([one.clone() if isinstance(one, torch.Tensor) else one for one in given] for _ in range(2))
        getattr(importlib.import_module("hf_offload_cache.kernels.low_bit_triton"), function)(*copied)
        twin()
        compared = list(itertools.compress(zip(before, copied, given, strict=True), tensors))
        assert sum(not torch.equal(old, new) for old, _, new in compared) == written
        for _, found, new in compared:
            torch.testing.assert_close(found, new, rtol=apart, atol=0)


def test_a_kernel_of_the_package_is_compared(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a case is held against its floor and another call; one without is named."""

    def twice(rows: torch.Tensor) -> torch.Tensor:
        return 2 * rows

    monkeypatch.setattr(on_a_device, "TWINS", {"step.twice": (twice, 1), "step.other": (twice, 1)})
    calls = {name: gpu_kernels.CASES[name] for name in gpu_kernels.OF_TORCH}
    monkeypatch.setattr(gpu_kernels, "CASES", calls)

    @gpu_kernels.case("step.twice")
    def make(sizes: gpu_kernels.Sizes, device: torch.device) -> gpu_kernels.Case:
        rows = torch.ones(sizes.tokens, device=device)
        return gpu_kernels.Case(lambda: twice(rows), rows.nbytes, gpu_kernels.BUS, 0.8, gpu_kernels.GATHERED, 1.5)

    target = tmp_path / "gpu.json"
    bench_gpu.main(words_of(target, "--parts", "kernels"), device)
    found = json.loads(target.read_text())
    (row,) = [row for row in found["rows"] if row["name"] == "step.twice"]
    assert row["floor"] == gpu_kernels.BUS and row["nbytes"] == 4 * gpu_kernels.QUICK.tokens
    other = next(row for row in found["rows"] if row["name"] == gpu_kernels.GATHERED)
    assert row["over"] == pytest.approx(row["median_seconds"] / other["median_seconds"])
    judged = {one["figure"]: one for one in found["summary"]["must_reach"]}
    assert judged["share of the floor, step.twice"]["measured"] == row["share"]
    assert judged["share of the floor, step.twice"]["at_least"] == 0.8
    assert judged[f"step.twice over {gpu_kernels.GATHERED}"]["at_most"] == 1.5
    assert found["summary"]["left_out"]["step.other"] == "eval.gpu_kernels has no case for it"
    with monkeypatch.context() as patched:  # undone before the device's
        patched.setattr(on_a_device, "_has_marked", lambda: False)
        assert gpu_kernels.missing("step.twice", CUDA) == "Triton's kernels do not run here"
    assert gpu_kernels.missing(gpu_kernels.GATHERED, CUDA) is None


# --- one call after the other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("likeness", [LIKENESS, bench_gpu.SPEC_LIKENESS])
def test_a_model_of_the_shape_gets_similar_tokens(likeness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many layers in bfloat16 where it is asked for; embeddings of successive ids are as similar as inputs are."""
    monkeypatch.setattr(bench_gpu, "SHAPE", replace(TINY, hidden=256))
    model = bench_gpu.build(2, torch.device("cpu"))
    assert model.config.num_hidden_layers == 2 and model.dtype == torch.bfloat16 and not model.training
    ids = bench_gpu.similar_tokens(model, 300, 4, likeness)
    assert ids.shape == (128, 4, 1) and ids.flatten().tolist() == list(range(512))  # as many as it has
    rows = model.get_input_embeddings()(ids)[:, :, 0].detach().float()
    for apart, similar in ((1, likeness), (10, likeness**10)):
        found = torch.nn.functional.cosine_similarity(rows[:-apart], rows[apart:], dim=2).mean()
        assert float(found) == pytest.approx(similar, abs=0.03)


def test_rows_within_a_cap_share_prompts(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have so many tokens, row by row, and each decodes its own; guesses are the tokens that follow."""
    monkeypatch.setattr(bench_gpu, "SHARED", 2 * 640)
    monkeypatch.setattr(bench_gpu, "fields_of", lambda *_: {"engine": "memory", "num_selected": 16, "num_recent": 64})
    monkeypatch.setattr(bench_gpu, "check_host", lambda name, nbytes: asked.append(nbytes))
    asked, filled, guessed, cls = [], [], [], cache_class("spec")
    plain = cls.begin_step, bench_gpu.fill

    def begin_step(cache: Any, model: Any, kwargs: Any) -> Any:
        changed = plain[0](cache, model, kwargs)
        if changed is not None and changed["input_ids"].shape[1] == 2:
            guessed.append(values_of(changed["input_ids"]))
        return changed

    monkeypatch.setattr(cls, "begin_step", begin_step)
    monkeypatch.setattr(bench_gpu, "fill", lambda *given, **sizes: filled.append(given[4]) or plain[1](*given, **sizes))
    arguments = bench_gpu.STUDY.parsed(words_of(tmp_path / "gpu.json"))
    model = bench_gpu.build(2, CUDA)
    row = bench_gpu.measure_shape(model, "SpecCache", 640, 3, arguments, 48)
    a_row = 640 * replace(TINY, layers=2).token_bytes
    assert row["prompts"] == 2 and filled == [2] and asked == [2 * a_row] and row["full_kv_bytes"] == 3 * a_row
    assert row["tokens_per_second"] == pytest.approx(3 / row["median_seconds"])
    following = [ids for ids in guessed if ids[0, 1] == ids[0, 0] + 3]
    assert len(following) >= len(guessed) - 2 >= 2 and all(ids[:, 0].unique().numel() == 3 for ids in guessed)
    assert bench_gpu.measure_shape(model, "SpecCache", 640, 3, arguments)["prompts"] == 3  # without a cap


@pytest.mark.parametrize("name", OURS)
def test_a_plan_is_that_of_all_layers(name: str, tmp_path: Path) -> None:
    """For two layers of 32: the fields that 32 have, with records in host memory and without a limit."""
    shape = Shape(layers=2, heads=8, kv_heads=4, head_dim=64, hidden=64, intermediate=64, vocabulary=64)
    few, many = build_model(shape), build_model(replace(shape, layers=32))
    fields = bench_gpu.fields_of(name, few, "1/5", 8192, 2, 32)
    assert fields == bench_gpu.fields_of(name, many, "1/5", 8192, 2)
    assert fields["engine"] == "memory" and not fields.keys() & {"memory", "max_batch"}
    with cache_class(bench_gpu.OURS[name])(few, path=tmp_path, **fields) as cache:
        assert cache.storage.engine == "memory" and cache.config.memory is None


def measured(target: Path, monkeypatch: pytest.MonkeyPatch, device: Any, *more: str) -> list[dict[str, Any]]:
    run_study(bench_gpu.STUDY, [*words_of(target, "--parts", "complete", *more), "--resume"], device)
    return rows_of(target)


def test_a_contender_that_fails_is_a_row(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory, or for another reason: the others are measured. `--again` measures what failed."""
    target, plain = tmp_path / "gpu.json", bench_gpu.measure_shape
    errors = {
        bench_gpu.DYNAMIC: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        bench_gpu.STATIC: MemoryError("the records need 9.0 GiB, and 8.0 are free"),
        "fp8": TypeError("no such dtype"),
    }

    def fails(model: Any, name: str, *others: Any) -> dict[str, Any]:
        if name in errors:
            raise errors[name]
        return plain(model, name, *others)

    monkeypatch.setattr(bench_gpu, "measure_shape", fails)
    names = [*errors, "SpecCache"]
    rows = {row["name"]: row for row in measured(target, monkeypatch, device, "--caches", *names)}
    assert rows[bench_gpu.DYNAMIC]["failed"] == "out of device memory: CUDA out of memory"
    assert rows[bench_gpu.STATIC]["failed"] == "out of host memory: the records need 9.0 GiB, and 8.0 are free"
    assert rows["fp8"]["failed"] == "TypeError: no such dtype" and "median_seconds" in rows["SpecCache"]
    failed = json.loads(target.read_text())["summary"]["failed"]
    assert failed["part complete, layers 3, tokens 640, batch 1, name fp8"] == "TypeError: no such dtype"
    monkeypatch.setattr(bench_gpu, "measure_shape", plain)
    assert sum("failed" in row for row in measured(target, monkeypatch, device, "--caches", *names)) == 3
    assert not [row for row in measured(target, monkeypatch, device, "--caches", *names, "--again") if "failed" in row]


def test_a_device_that_is_lost_ends_the_call(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error that CUDA does not forget; the row stays, and the next call goes on behind it."""
    target, plain = tmp_path / "gpu.json", bench_gpu.measure_shape

    def lost(*_: Any) -> dict[str, Any]:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench_gpu, "measure_shape", lost)
    with pytest.raises(RuntimeError, match="nothing runs on the device any more"):
        measured(target, monkeypatch, device, "--caches", bench_gpu.DYNAMIC, "SpecCache")
    monkeypatch.setattr(bench_gpu, "measure_shape", plain)
    rows = measured(target, monkeypatch, device, "--caches", bench_gpu.DYNAMIC, "SpecCache")
    assert ["failed" in row for row in rows] == [True, False] and "illegal memory access" in rows[0]["failed"]


def test_a_call_ends_in_time_and_the_next_goes_on(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row is in the file when it is measured. A call that is killed leaves a mark, and its row is not tried again.
    """
    target, names, seen = tmp_path / "gpu.json", (bench_gpu.DYNAMIC, bench_gpu.STATIC, "SpecCache"), list[str]()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(model: Any, name: str, *_: Any) -> dict[str, Any]:
        assert [row["name"] for row in rows_of(target)] == [*seen, name]
        seen.append(name)
        now[0] += 100
        if name == bench_gpu.STATIC:
            raise KeyboardInterrupt
        return {"seen": len(seen), "median_seconds": 1.0, "least_seconds": 1.0, "most_seconds": 1.0, "peak_bytes": 1}

    monkeypatch.setattr(bench_gpu, "measure_shape", slow)
    measured(target, monkeypatch, device, "--caches", *names, "--seconds", "50")
    assert seen == [bench_gpu.DYNAMIC] and not json.loads(target.read_text())["summary"]["complete"]
    assert "the time of this call is over: the same command goes on" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        measured(target, monkeypatch, device, "--caches", *names)
    rows = measured(target, monkeypatch, device, "--caches", *names)
    assert [row.get("failed") for row in rows] == [None, bench_gpu.ENDED, None] and seen == list(names)
    assert json.loads(target.read_text())["summary"]["complete"]


def test_rows_of_another_gpu_are_not_continued(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "gpu.json"
    (row,) = measured(target, monkeypatch, device, "--caches", "SpecCache")
    assert row["gpu"] == "a counting device"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    with pytest.raises(ValueError, match="has rows of a counting device, and this is another: give another --json"):
        measured(target, monkeypatch, device, "--caches", "SpecCache")


def test_a_cap_is_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error; a device that has no more than the cap gets none."""
    given: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", given.append)
    with contextlib.suppress(ZeroDivisionError), bench_gpu.capped(24):
        assert given == [0.3] and 1 / 0
    for none in (None, 80, 96):
        with bench_gpu.capped(none):
            assert given == [0.3, 1.0]


# --- what follows from the rows --------------------------------------------------------------------------------------


def shape_row(name: str, layers: int, median: float, **more: Any) -> dict[str, Any]:
    times = {"median_seconds": median, "least_seconds": 0.9 * median, "most_seconds": 1.2 * median, "repetitions": 9}
    return {"part": "shape", "layers": layers, "tokens": 32768, "batch": 8, "name": name, **times, **more}


def test_all_layers_follow_from_two_numbers_of_them() -> None:
    rows = [shape_row("DynamicCache", 2, 0.003, peak_bytes=5), shape_row("DynamicCache", 8, 0.006, peak_bytes=11)]
    rows += [shape_row("StaticCache", 2, 0.002, peak_bytes=5), {**shape_row("x", 8, 1), "name": "fp8", "failed": "no"}]
    (row,) = gpu_summary.scaled(rows, 32)
    assert row["name"] == "DynamicCache" and (row["layers"], row["peak_bytes"]) == (32, 35)
    assert row["median_seconds"] == pytest.approx(0.018) and row["least_seconds"] == pytest.approx(0.0162)
    assert row["tokens_per_second"] == pytest.approx(8 / 0.018) and row["said"] == "computed from 2 and 8 layers"


def test_the_largest_batch_is_found_in_few_trials() -> None:
    """Of a contender that needs 10 bytes and 7 more a row, in 100; and of one that does not fit at all."""
    for fixed, each, largest in ((10, 7, 12), (40, 40, 1), (0, 1, 100), (99, 2, 0)):
        rows: list[dict[str, Any]] = []
        while (batch := gpu_summary.next_batch(rows, 100)) is not None:
            peak = fixed + each * batch
            fits = {"median_seconds": 1.0, "peak_bytes": peak, "filled_peak_bytes": peak - 1}
            rows.append({"batch": batch, **(fits if peak <= 100 else {"failed": "out of device memory"})})
        found = max((row["batch"] for row in rows if "failed" not in row), default=0)
        assert largest - max(1, largest // 16) < found <= largest and len(rows) <= 9, (fixed, each, rows)


def test_promises_are_judged_by_the_rows() -> None:
    """Complete rows count before computed ones; the largest batch by its own row; a figure without rows is open."""
    many = {"tokens": 32768, "batch": 8}
    rows = [
        {"part": "text", "tokens": 32768, "batch": 1, "name": name, "prefill_median_seconds": seconds}
        for name, seconds in (("DynamicCache", 1.0), ("DiskSwapCache", 1.25), ("ClusterCache", 2.0))
    ]
    rows += [
        {"part": part, **many, "name": name, "median_seconds": seconds}
        for part, name, seconds in (
            ("scaled", "DynamicCache", 9.0), ("complete", "DynamicCache", 0.04), ("scaled", "DiskSwapCache", 0.02),
            ("scaled", "DynamicCache(offloading=True)", 0.1), ("scaled", bench_gpu.EXACT, 0.08),
            ("scaled", bench_gpu.GRAPHED, 0.008),
        )
    ]  # fmt: skip
    rows += [
        {"part": "capped", "gigabytes": 24, "tokens": 32768, "name": name, "batch": batch, **found}
        for name, batch, found in (
            ("DynamicCache", 1, {"median_seconds": 1, "tokens_per_second": 20.0}),
            ("DynamicCache", 2, {"failed": "out of device memory"}),
            ("DiskSwapCache", 8, {"median_seconds": 1, "tokens_per_second": 50.0}),
            ("DiskSwapCache", 4, {"median_seconds": 1, "tokens_per_second": 200.0}),
        )
    ]  # fmt: skip
    judged = {one["figure"]: (one["measured"], one["met"]) for one in gpu_summary.promises(rows, bench_gpu.OURS)}
    assert judged["prefill of 32K over DynamicCache's, DiskSwapCache"] == (1.25, True)
    assert judged["prefill of 32K over DynamicCache's, ClusterCache"] == (2.0, False)
    assert judged["a step of 8 x 32K, DynamicCache's over DiskSwapCache's"] == (2.0, True)
    assert judged["the same of offloading, DiskSwapCache"] == (5.0, False)
    assert judged["rows in 24 GiB over DynamicCache's, DiskSwapCache"] == (8.0, True)
    assert judged["their tokens/s, DiskSwapCache"] == (2.5, False)
    assert judged[f"a step of 8 x 32K, DynamicCache's over {bench_gpu.GRAPHED}'s"] == (5.0, True)
    assert judged[f"the same of offloading, {bench_gpu.GRAPHED}"] == (12.5, False)
    assert judged[f"a step of 128K, DynamicCache's over {bench_gpu.GRAPHED}'s"] == (None, None)
    assert judged[f"a step of 8 x 32K, offloading's over {bench_gpu.EXACT}'s"] == (1.25, True)
    assert judged[f"prefill of 32K over offloading's, {bench_gpu.EXACT}"] == (None, None)
    assert judged["tokens/s in 48 GiB over DynamicCache's, SpecCache, 8,192"] == (None, None)


def test_slow_steps_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, numbers = [0.0], list[int]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def step(seconds: float) -> Any:
        def taken(number: int) -> None:
            numbers.append(number)
            now[0] += seconds if number != 1 else 5 * seconds
        return taken

    fast = bench_gpu.timed_steps(step(0.25), 10)
    assert fast["repetitions"] == 10 and fast["most_seconds"] == 0.25 and numbers == list(range(34))
    slow = bench_gpu.timed_steps(step(16.0), 10)
    assert slow == {"median_seconds": 16.0, "least_seconds": 16.0, "most_seconds": 80.0, "repetitions": 3}


def test_rows_without_room_on_the_host_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 80 * GIB))
    with pytest.raises(MemoryError, match=r"need 8\.0 GiB, and 8\.0 are free"):
        bench_gpu.check_host("SpecCache", 8 * GIB)
    bench_gpu.check_host("DynamicCache", 8 * GIB)
    assert bench_gpu.fits_completely("SpecCache", 32768, 1) and not bench_gpu.fits_completely("SpecCache", 32768, 8)
    assert bench_gpu.fits_completely("DynamicCache", 32768, 8)
    assert not bench_gpu.fits_completely("DynamicCache", 131072, 8)


def test_rows_of_no_part_have_no_summary() -> None:
    found = gpu_summary.summary(Rows().rows, OURS)
    assert not found["steps"] and not found["failed"] and all(one["met"] is None for one in found["must_reach"])
