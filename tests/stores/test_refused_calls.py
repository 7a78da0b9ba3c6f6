"""System calls that a sandbox refuses: a cache works without them, and says what that costs.

One process imports torch; a child of it forbids itself a system call, and has a cache generate, saved and opened.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import seccomp

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent.parent

PROGRAM = """
    import errno, json, os, sys, tempfile, warnings
    import seccomp, torch
    from harness import COMMON, build
    from transformers import LlamaConfig, LlamaForCausalLM
    from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache

    torch.set_num_threads(1)
    CACHES = dict(zip(json.loads(sys.argv[3]), (DiskSwapCache, ClusterCache, SpecCache, AbstractTreeCache)))
    folder, cases = sys.argv[1], json.loads(sys.argv[2])
    model = build(LlamaForCausalLM, LlamaConfig(**COMMON))
    ids = torch.arange(5, 125)[None]
    # what torch and transformers load when they are first used is not what is tested
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with DiskSwapCache(model, path=folder) as cache:
        model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)

    def run(name, engine, calls, number, late):
        warnings.simplefilter("ignore")
        if not late:
            seccomp.forbid(calls, number)
        place = tempfile.mkdtemp(dir=folder)
        fields = {"engine": engine, "exact": True, "block_tokens": 64, "path": place}
        with warnings.catch_warnings(record=True) as caught, CACHES[name](model, **fields) as cache:
            warnings.simplefilter("always")
            if late:
                model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
                cache.reset()
                seccomp.forbid(calls, number)
            found = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
            store = cache.report().store
            cache.save(place + "/saved")
        with CACHES[name].open(place + "/saved", model, path=place) as cache:
            rest = torch.cat([expected[:, : cache.tokens], torch.tensor([[7]])], 1)
            opened = cache.tokens
            model.generate(rest, past_key_values=cache, max_new_tokens=2, do_sample=False)
        said = [str(one.message) for one in caught]
        return {"right": torch.equal(found, expected), "store": store, "opened": opened, "warnings": said}

    for case in cases:
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                told = run(*case)
            except BaseException as error:
                told = {"error": f"{type(error).__name__}: {error}"}
            os.write(into, json.dumps(told).encode())
            os._exit(0)
        os.close(into)
        print(os.read(out, 2**16).decode() or json.dumps({"error": "it died"}), flush=True)
        os.close(out)
        os.waitpid(child, 0)
"""

RING = ("io_uring_setup", "io_uring_enter")
CALLS = [
    *RING, "fadvise64", "madvise", "fallocate", "linkat", "flock", "renameat2", "statfs fstatfs", "O_TMPFILE",
    "O_DIRECT", "preadv", "pwritev", "mincore", "statx", "copy_file_range", "memfd_create", "sched_getaffinity",
    "clone clone3",
]  # fmt: skip
NAMES = ("disk-swap", "cluster", "spec", "abstract-tree")
CASES = [
    (NAMES[(index + turn) % 4], engine, calls, number, False)
    for index, calls in enumerate(CALLS)
    for turn, (engine, number) in enumerate((("auto", errno.EPERM), ("mapped", errno.ENOSYS)))
]
CASES += [("disk-swap", "auto", calls, number, False) for calls in RING for number in (errno.EACCES, errno.EINVAL)]
LATE = [("disk-swap", "uring", "io_uring_enter", number, True) for number in (errno.EPERM, errno.ENOSYS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What each case came to; those that need io_uring are asked where it works."""
    if reason := seccomp.unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("refused")
    cases = [*CASES, *LATE]
    asked = json.dumps([(name, engine, calls.split(), number, late) for name, engine, calls, number, late in cases])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), asked, json.dumps(NAMES)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if any("prctl" in one.get("error", "") for one in found):
        pytest.skip("this process may not forbid itself anything")
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}-{errno.errorcode[case[3]]}-{case[1]}-{case[0]}")
def test_a_cache_works_without(case: tuple[Any, ...], results: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    _, engine, calls, _, _ = case
    found = results[case]
    assert "error" not in found, found
    assert found["right"] and found["opened"] == 123 and found["warnings"] == []
    if engine == "auto" and calls in RING:
        assert not found["store"].startswith("uring") and f"{calls.removesuffix('_setup')} refused: " in found["store"]
    if engine == "mapped" and calls in ("fadvise64", "madvise"):
        call = {"fadvise64": "posix_fadvise"}.get(calls, calls)
        assert f"reads stay in the page cache ({call} refused: Function not implemented)" in found["store"]


@pytest.mark.parametrize("case", LATE, ids=lambda case: errno.errorcode[case[3]])
def test_a_process_that_forbids_itself_io_uring_goes_on(
    case: tuple[Any, ...], results: dict[tuple[Any, ...], dict[str, Any]]
) -> None:
    found = results[case]
    if "io_uring" in found.get("error", ""):
        pytest.skip(found["error"])
    assert "error" not in found, found
    assert found["right"] and found["store"].startswith("uring")
    (said,) = [one for one in found["warnings"] if "io_uring" in one]
    assert said.startswith(f"io_uring_enter is refused from now on ({os.strerror(case[3])}): ")
