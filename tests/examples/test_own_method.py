"""`examples/own_method.py` as its readers take it: short, without a private name, and usable by name in the console."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from harness import generate, prompt
from long_llama import long_model

from examples.own_method import PageCache, PagePredictor
from hf_offload_cache import DiskSwapCache
from hf_offload_cache.config import SelectiveConfig
from hf_offload_cache.console import main as console
from hf_offload_cache.errors import ConfigError, ContextMismatchError
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.model import Geometry
from hf_offload_cache.predictors import Query

SOURCE = Path(__file__).parents[2] / "examples" / "own_method.py"
TREE = ast.parse(SOURCE.read_text())


def test_under_80_lines_of_code() -> None:
    """Blank lines, comments and docstrings not counted."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    words: set[int] = set()
    for node in ast.walk(TREE):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            words.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(SOURCE.read_text().splitlines(), 1)
    code = [line for number, line in lines if number not in words and line.strip() and line.strip()[0] != "#"]
    assert 20 < len(code) < 80


def test_no_private_name() -> None:
    names = [node.attr for node in ast.walk(TREE) if isinstance(node, ast.Attribute)]
    for node in ast.walk(TREE):
        if isinstance(node, ast.ImportFrom):
            names += [*str(node.module).split("."), *(alias.name for alias in node.names)]
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
    assert len(names) > 30 and [name for name in names if name.startswith("_") and name != "__future__"] == []


def test_pages_are_of_sixteen_tokens(tmp_path: Path) -> None:
    with PageCache(long_model(), num_selected=64, engine="memory") as cache:
        generate(long_model(), cache, prompt(long_model(), 1, 300), max_new_tokens=3)
        assert cache.offloaded[0].history.form.group_size == 16
        assert cache.offloaded[0].history.units == (302 - 32) // 16
        cache.save(tmp_path / "context")
    with pytest.raises(ConfigError, match="PageConfig has no field 'rank'"):
        PageCache(long_model(), rank=3)
    with pytest.raises(ContextMismatchError, match="cache is PageCache, not DiskSwapCache"):
        DiskSwapCache.open(tmp_path / "context", long_model())


def test_the_bound_is_no_less_than_any_score() -> None:
    """And the page with the key that a query points at is first."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 6, 16, 8, generator=generator)  # rows, Hk, pages, tokens, D
    keys[0, 1, 4, 7] = 30.0
    keys[1, 0, 2, 3] = 30.0
    form = RecordFormat(2, 8, 2, 8, torch.float32, 16)
    predictor = PagePredictor(form, 2, SelectiveConfig(), MemoryAccount())
    summaries = predictor.summarise(keys)
    assert summaries.shape == (2, 6, 2, 2, 8)
    least, most = summaries.unbind(2)
    query = torch.randn(2, 4, 8, generator=generator).abs()
    states = query.unflatten(1, (2, 2))
    bound = torch.einsum("rkgd,rpkd->rkgp", states.clamp(min=0), most)
    assert (torch.einsum("rkgd,rkptd->rkgpt", states, keys).amax(-1) <= bound + 1e-4).all()
    importance = predictor.importance(Query(query, 1.0, None, lambda: keys), summaries)
    assert importance.shape == (2, 6)
    assert importance.argmax(1).tolist() == [4, 2] and torch.allclose(importance.sum(1), torch.tensor(4.0))


def test_planned_in_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--cache examples.own_method:PageCache`, where the repository is importable."""
    long_model().config.save_pretrained(tmp_path / "model")
    fixed = ["plan", "--model", str(tmp_path / "model"), "--context", "4096", "--memory", "1/4"]
    code = console.main([*fixed, "--cache", "examples.own_method:PageCache", "--json", str(tmp_path / "plan.json")])
    assert code == 0, capsys.readouterr().err
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["config"]["group_size"] == 16
    plan = written["plan"]
    assert plan["decode"]["summaries"] == 3 * ((4096 - written["config"]["num_recent"]) // 16) * 2 * 2 * 16 * 4
    assert plan["peak_bytes"] <= plan["full_kv_bytes"] // 4


def test_a_budget_is_searched_with_the_methods_own_group_size() -> None:
    """Blocks and the write queue hold the records that there will be, not those of the family's default."""
    geometry = Geometry.uniform(32, 32, 8, 128)
    config = PageCache.fit(geometry, geometry.full_kv_bytes(32768, 1) // 15, 32768, 1, {})
    record = 16 * 2 * 8 * 128 * 2
    assert config.group_size == 16 and (config.num_selected, config.reuse_capacity) == (400, 0)
    assert config.block_tokens == 32 + 2 * 16 and int(config.write_queue) == 2 * record
