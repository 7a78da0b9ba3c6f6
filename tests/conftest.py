"""What holds for every test: one torch thread, a cache folder of the run, torch as it was before it, the same examples
of hypothesis in each run, and tests marked `alone` beside no other.

With workers (`-n`) the tests marked `alone` are left out; `--alone` runs them and no others. Without either, all run,
one after the other. `make test` makes both calls.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from checked_cache import Gathers

KEPT_DAYS = 14
"""The unpacked model of other code is removed after as many days without a run."""

# Transformers looks for a package of this name, and would take `tests/kernels` for one: it would then read the lists of
# files of all installed packages, for a second of each process.
sys.modules["kernels"] = None  # type: ignore[assignment]

# Before torch is imported, and for the processes that tests start: tiny operations only wait for each other's threads,
# and how many there are decides the last bits of a sum.
os.environ["OMP_NUM_THREADS"] = "1"

# A change fails in the run in which it is made, not in somebody's later one. `--hypothesis-profile=default` searches
# among other examples each time.
settings.register_profile("same examples", derandomize=True, database=None)
settings.load_profile("same examples")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="only the tests that run beside no other")


def has_workers(config: pytest.Config) -> bool:
    """Tests run in several processes at once; this is one of them, or the one that started them."""
    return hasattr(config, "workerinput") or bool(getattr(config.option, "numprocesses", None))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--alone") and has_workers(config):
        raise pytest.UsageError("--alone runs tests one after the other: it cannot be combined with -n")
    if not hasattr(config, "workerinput"):
        keep_within_the_run(config)
    if hasattr(config, "workerinput") or not has_workers(config):
        gc.disable()  # while it imports all modules, which leaves nothing to collect


def keep_within_the_run(config: pytest.Config) -> None:
    """Nothing goes into the real home: what is kept in `$XDG_CACHE_HOME` lies in a folder that is removed at the end.
    It is that of all workers, and of the processes that tests start. Only the unpacked models in it outlive the run.
    Nor does anything go to a proxy."""
    folder, patch = tempfile.mkdtemp(prefix="cache-of-tests-"), pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", folder)
    keep_the_default_model(Path(folder) / "hf_offload_cache" / "models")
    for name in ("NO_PROXY", "no_proxy"):  # servers of tests are on loopback, whatever the proxies here
        patch.setenv(name, "127.0.0.1,localhost")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.add_cleanup(patch.undo)


def keep_the_default_model(models: Path) -> None:
    """`models` becomes a link to a folder in the virtual environment, so that later runs find the model unpacked.

    Models of other versions have other names there, and each file of a model is checked when it is read. The folder's
    name depends on the code that unpacks: other code unpacks anew. Two runs or two workers may use it at once, as two
    processes of a user may. Without a virtual environment nothing is kept.
    """
    if sys.prefix == sys.base_prefix:
        return
    code = Path(__file__).parents[1] / "hf_offload_cache" / "console" / "default_model.py"
    kept = Path(sys.prefix) / "models-of-tests" / hashlib.sha256(code.read_bytes()).hexdigest()[:16]
    with contextlib.suppress(OSError):  # an environment that cannot be written: the model is unpacked in this run
        kept.mkdir(parents=True, exist_ok=True)
        os.utime(kept)
        for other in kept.parent.iterdir():
            if time.time() - other.stat().st_mtime > KEPT_DAYS * 86400:
                shutil.rmtree(other, ignore_errors=True)
        models.parent.mkdir(parents=True)
        models.symlink_to(kept, target_is_directory=True)


SLOW_MODULE = re.compile(r"^pytestmark = .*\bmark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules of which no test would run are not imported: that takes longer than many tests. These are modules without
    an `alone` test under `--alone`, and modules that are slow as a whole when slow tests are left out."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if config.getoption("--alone") and "mark.alone" not in text:
        return True
    if "not slow" in config.option.markexpr and SLOW_MODULE.search(text):
        return True
    return None


def pytest_collection_finish() -> None:
    gc.freeze()  # a collection now would walk all imports, and so would each plugin's after this
    gc.enable()
    AT_FIRST.update(of_torch())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only_alone = config.getoption("--alone")
    if not only_alone and not has_workers(config):
        return
    left_out = [item for item in items if bool(item.get_closest_marker("alone")) != only_alone]
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def of_torch() -> dict[str, object]:
    """Torch's state in this process that a test must leave as it was."""
    torch, streams = sys.modules.get("torch"), sys.modules.get("fake_streams")
    if torch is None:
        return {}
    queues = [] if streams is None else [one.queue for one in streams.QUEUES.streams]
    return {
        "dispatch modes": torch._C._len_torch_dispatch_stack(), "function modes": torch._C._len_torch_function_stack(),
        "gradients": torch.is_grad_enabled(), "inference mode": torch.is_inference_mode_enabled(),
        "the default type": torch.get_default_dtype(), "torch.tensor": torch.tensor,
        "torch.cuda": (torch.cuda.Stream, torch.cuda.Event, torch.cuda.is_available, torch.cuda.current_stream),
        "attention": torch.nn.functional.scaled_dot_product_attention,
        "streams of the counting device": any(queues),
    }  # fmt: skip


AT_FIRST: dict[str, object] = {}
"""`of_torch` before the first test, or after the first one that imported torch."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Raise in the test that leaves torch in another state, since it would be another one that fails."""
    yield
    now = of_torch()
    left = [what for what, before in AT_FIRST.items() if now[what] != before]
    AT_FIRST.update(now)
    assert not left, f"{item.nodeid} leaves these changed in this process: {', '.join(left)}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if has_workers(config):
        terminalreporter.write_line("The tests marked `alone` are not among these: --alone runs them.")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """What was there before a module is not walked by the collections of its tests: half a second each, of imports."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def checked_gathers() -> Iterator[Gathers]:
    """`checking` for a whole test."""
    from checked_cache import checking  # not above: the process that starts the workers needs no torch

    with checking() as seen:
        yield seen
