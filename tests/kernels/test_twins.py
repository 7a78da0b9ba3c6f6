"""Each function that is marked with `with_kernel` has its kernel, without importing Triton."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import CUDA, fake_cuda

from eval import gpu_kernels
from hf_offload_cache import kernels
from hf_offload_cache.kernels import on_a_device

PACKAGE = Path(kernels.__file__).parent


def unpaired(twins: dict[str, tuple[Callable[..., Any], int]]) -> list[str]:
    """The functions of `kernels` without a function of the same name and arguments in "<module>_triton.py"."""
    found = []
    for name, (twin, _) in sorted(twins.items()):
        package, _, module = twin.__module__.rpartition(".")
        if package != kernels.__name__:
            continue
        path = PACKAGE / f"{module}_triton.py"
        nodes = ast.parse(path.read_text()).body if path.exists() else []
        arguments = {node.name: list(map(str, names(node.args))) for node in nodes if isinstance(node, ast.FunctionDef)}
        asked = [str(one) for one in inspect.signature(twin).parameters]
        if arguments.get(twin.__name__) != asked:
            found.append(f"{name}({', '.join(asked)}): {path.name} has {arguments.get(twin.__name__)}")
    return found


def names(arguments: ast.arguments) -> list[str]:
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def test_each_marked_function_has_its_kernel() -> None:
    modules = [one.name for one in pkgutil.iter_modules(kernels.__path__) if not one.name.endswith("_triton")]
    for name in modules:
        importlib.import_module(f"{kernels.__name__}.{name}")
    assert {"ranking.pick", "slots.attend", "low_bit.pack", "low_bit.unpack_replicas"} <= on_a_device.TWINS.keys()
    assert unpaired(on_a_device.TWINS) == []


def test_each_marked_function_is_compared_in_the_interpreter() -> None:
    """A test of kernels calls it."""
    gpu_kernels.every_name()  # adds all twins
    tests = [path.read_text() for path in Path(__file__).parent.glob("test_*_triton.py")]
    for twin, _ in on_a_device.TWINS.values():
        name, module = twin.__name__, twin.__module__.rpartition(".")[2]
        assert any(f'"{module}_triton"' in text and re.search(rf"\b{name}\b", text) for text in tests), (module, name)


def test_a_function_without_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_a_device, "TWINS", {})

    def pick(importance: torch.Tensor, among: int, wanted: int) -> None: ...
    def picked(importance: torch.Tensor) -> None: ...
    def elsewhere(keys: torch.Tensor) -> None: ...
    def attend(query: torch.Tensor) -> None: ...

    pick.__module__ = picked.__module__ = f"{kernels.__name__}.ranking"
    attend.__module__ = f"{kernels.__name__}.nothing"
    for twin in (pick, picked, elsewhere, attend):
        on_a_device.with_kernel()(twin)
    assert len(on_a_device.TWINS) == 4
    assert unpaired(on_a_device.TWINS) == [
        "nothing.attend(query): nothing_triton.py has None",
        "ranking.pick(importance, among, wanted): ranking_triton.py has ['importance', 'wanted', 'among']",
        "ranking.picked(importance): ranking_triton.py has None",
    ]


IN_PARTS = {"low_bit.unpack_replicas"}
"""On a processor, which it is for as well, it works in parts that stay in the processor's cache."""


def lines_of(run: Callable[[], object]) -> int:
    """Lines of twins that a call runs, also those of what they call in their modules."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if Path(frame.f_code.co_filename).parent != PACKAGE or frame.f_code.co_filename == on_a_device.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def lines_by_size(name: str) -> list[int]:
    """`lines_of` a marked function for few rows and tokens, and for more."""
    found = []
    for rows, tokens in ((1, 256), (3, 1024)):
        sizes = gpu_kernels.Sizes(rows, tokens, heads=4, kv_heads=2, dim=64, attended=tokens // 4, copied=1)
        with fake_cuda():
            run = gpu_kernels.CASES[name](sizes, CUDA).run
            found.append(lines_of(run))
    return found


def test_no_twin_loops_over_rows_units_or_tables() -> None:
    """It takes as many steps for more of them: on the counting device it counts as one launch."""
    gpu_kernels.every_name()  # adds all twins
    marked = [name for name, (twin, _) in on_a_device.TWINS.items() if twin.__module__.startswith(kernels.__name__)]
    lines = {name: lines_by_size(name) for name in marked}
    assert "slots.bring" in lines and min(map(min, lines.values())) > 1
    assert {name for name, (few, many) in lines.items() if few != many} <= IN_PARTS


def test_a_twin_that_loops_is_found() -> None:
    code = compile("def run(rows):\n    for row in rows:\n        row + 1\n", str(PACKAGE / "ranking.py"), "exec")
    exec(code, made := {})
    assert lines_of(lambda: made["run"](range(5))) > lines_of(lambda: made["run"](range(2))) > 2
