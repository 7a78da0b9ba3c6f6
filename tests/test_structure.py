"""The rooms of the package: imports run downwards without a circle, files are short, and tests do not lean on tests."""

from __future__ import annotations

import ast
import functools
import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from package_imports import Package
from transformers.cache_utils import Cache, CacheLayerMixin

import hf_offload_cache
from hf_offload_cache.core import OffloadCache, OffloadLayer, SelectiveCache, SelectiveLayer
from hf_offload_cache.registry import CACHES, cache_class

TESTS = Path(__file__).parent

ROOMS = (
    "testing",
    "batch",
    "console",
    "interop",
    "streaming",
    "methods",
    "tuning",
    "core",
    "contexts",
    "predictors",
    "model",
    "history",
    "fetch",
    "stores",
    "memory",
    "report",
    "kernels",
)
"""Folders of the package, from high to low."""

ROOT = ("registry", "config", "errors")
"""Files that lie in the package's root beside `__init__`, from high to low: below all rooms."""

ORDER = ("__init__", *ROOMS, *ROOT)

KNOW_TRANSFORMERS = ("model", "core", "console")

MADE_OF_NUMBERS = ("zeros", "ones", "empty", "eye", "rand", "randn", "linspace", "logspace")
"""What torch makes in its default type, which a user may set, if it is not told one."""
MADE = (*MADE_OF_NUMBERS, "full", "arange", "tensor", "as_tensor", "asarray", "randint", "randperm")
"""What it makes on its default device, which a user may set, too."""

MOST_LINES = 600
MOST_LINES_OF_THE_CACHE = 600


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(Path(hf_offload_cache.__file__).parent)


def assert_none(found: list[str]) -> None:
    """Raises AssertionError with the offenders, one a line."""
    if found:
        raise AssertionError(f"{len(found)} found:\n" + "\n".join(f"  {line}" for line in found))


class Read(NamedTuple):
    """What a file says of names."""

    imports: list[ast.Import | ast.ImportFrom]
    attributes: list[tuple[int, str, str]]
    """Line, name and attribute, of each attribute of a name."""
    given: set[tuple[str, object]]
    """A name and a constant that a call begins with, as one that replaces an attribute does."""


@functools.cache
def read_from(path: Path) -> Read:
    found = Read([], [], set())
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.attributes.append((node.lineno, node.value.id, node.attr))
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            first, second = node.args[:2]
            if isinstance(first, ast.Name) and isinstance(second, ast.Constant):
                found.given.add((first.id, second.value))
    return found


def imported_by(node: ast.AST) -> list[str]:
    """Names of the modules that an absolute import reads; none of another statement."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def upwards(package: Package) -> list[str]:
    """Imports from a lower room to a higher one."""
    rank = {room: place for place, room in enumerate(ORDER)}
    return [
        str(one) for one in package.imports if rank[package.room(one.imported)] < rank[package.room(one.importer)]
    ]


# ---------------------------------------------------------------------------------------------- the package


def test_no_circle(package: Package) -> None:
    """Imports for types alone and within functions count too."""
    circles = [
        f"circle of {len(circle)} files:\n"
        + "\n".join(f"    {one}" for one in package.imports if one.importer in circle and one.imported in circle)
        for circle in package.circles()
    ]
    assert_none(circles)


def test_imports_run_downwards(package: Package) -> None:
    assert_none(upwards(package))


def test_no_method_imports_another(package: Package) -> None:
    def method(file: str) -> str | None:
        parts = file.split("/")
        return parts[1] if parts[0] == "methods" and len(parts) > 2 else None

    pairs = [(one, method(one.importer), method(one.imported)) for one in package.imports]
    assert_none([str(one) for one, importer, imported in pairs if importer and imported and importer != imported])
    assert {method(file) for file in package.files} >= {"disk_swap", "cluster", "spec", "abstract_tree"}


def test_tests_take_from_a_room_what_its_face_offers() -> None:
    """So that the file of such a name can move without an edit here.

    A module itself is imported to replace a name in it, or for a name that no face offers: such a test follows it."""
    found = []
    for path in sorted([*TESTS.rglob("*.py"), *(TESTS.parent / "eval").rglob("*.py")]):
        read = read_from(path)
        modules = dict[str, ModuleType]()  # alias -> face
        for node in read.imports:
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("hf_offload_cache."):
                continue
            parts = str(node.module).split(".")[1:]
            if parts[0] not in ROOMS or parts[0] in ("kernels", "testing"):
                continue
            room = parts[: 2 if parts[0] == "methods" else 1]
            room_face = importlib.import_module(".".join(["hf_offload_cache", *room]))
            modules |= {one.asname or one.name: room_face for one in node.names if not offers(room_face, one.name)}
            names = [one.name for one in node.names if parts != room and not one.name.startswith("_")]
            names = [name for name in names if offers(room_face, name)]
            found += [f"{path.name}:{node.lineno} imports {node.module}.{name}" for name in names]
        found += [
            f"{path.name}:{line} uses {name}.{attribute}" for line, name, attribute in read.attributes
            if name in modules and (name, attribute) not in read.given and offers(modules[name], attribute)
        ]  # fmt: skip
    assert_none(found)


def offers(face: object, name: str) -> bool:
    """Whether a room's face has this name, and it is no file of the room."""
    return not isinstance(getattr(face, name, None), ModuleType | None)


def test_the_root_holds_what_a_user_touches(package: Package) -> None:
    held = {path.name for path in package.root.iterdir() if path.name != "__pycache__"}
    folders = {path.name for path in package.root.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert held - folders == {"__init__.py", "py.typed", *(f"{name}.py" for name in ROOT)}
    assert folders <= set(ROOMS)


def test_who_knows_transformers(package: Package) -> None:
    found = [
        str(one)
        for one in package.foreign
        if one.imported == "transformers" and package.room(one.importer) not in KNOW_TRANSFORMERS
    ]
    assert_none(found)


def test_one_idea_a_file(package: Package) -> None:
    lengths = {file: package.lines(file) for file in package.files}
    found = [f"{file} has {count} lines" for file, count in lengths.items() if count > MOST_LINES]
    assert_none(found)
    cache = package.file_of_class("OffloadCache")
    assert package.room(cache) == "core"
    assert lengths[cache] < MOST_LINES_OF_THE_CACHE


@pytest.mark.parametrize("name", CACHES)
def test_three_classes_of_ours(name: str) -> None:
    """So that one finds in three files at most where an attribute comes from."""
    cache = cache_class(name)
    layer = cache.layer_class
    own = [[one for one in kind.__mro__ if one.__module__.startswith("hf_offload_cache")] for kind in (cache, layer)]
    assert own == [[cache, SelectiveCache, OffloadCache], [layer, SelectiveLayer, OffloadLayer]]
    assert OffloadCache.__bases__ == (Cache,) and OffloadLayer.__bases__ == (CacheLayerMixin,)


# ---------------------------------------------------------------------------------------------- the tests


def test_no_import_makes_a_tensor(package: Package) -> None:
    """Whoever imports under `torch.device("meta")`, or in inference mode, would have one of that kind for good."""
    names = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in package.files]
    names = [name for name in names if name[:2] != "__" and not name.endswith("_triton")]  # which is an extra
    modules = [importlib.import_module(f"hf_offload_cache.{name}") for name in names]
    found = [
        f"{module.__name__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    assert len(modules) > 150
    assert_none(found)


def test_tests_lie_where_the_package_has_what_they_test() -> None:
    folders = {path.name for path in TESTS.iterdir() if any(path.glob("*.py"))}
    assert folders <= {*ROOMS, "docs", "eval", "examples", "packaging", "cases", "fake_cuda"}


def test_no_test_module_imports_another() -> None:
    modules = sorted(TESTS.rglob("*.py"))
    refused = {"tests", *(path.stem for path in modules if path.stem.startswith("test_"))}
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno} imports {name}"
        for path in modules
        for node in read_from(path).imports
        for name in imported_by(node)
        if name.split(".")[0] in refused
    ]
    assert_none(found)


def test_one_thread() -> None:
    """Here and, by the environment, in the processes that tests start."""
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"


# ---------------------------------------------------------------------------------------------- the parser itself


def made_up(folder: Path, files: dict[str, str]) -> Package:
    """A package `house` of these files, path -> source."""
    for name, source in {"__init__.py": "", **files}.items():
        path = folder / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        if path.parent != folder / "house":
            (path.parent / "__init__.py").touch()
    return Package(folder / "house")


@pytest.mark.parametrize(
    ("line", "imported"),
    [
        ("from .step import Step", "core/step.py"),
        ("from . import step", "core/step.py"),
        ("from . import step as s", "core/step.py"),
        ("from .. import errors", "errors.py"),
        ("from ..errors import Wrong", "errors.py"),
        ("from ..stores.uring.ring import Ring", "stores/uring/ring.py"),
        ("from ..stores import uring", "stores/uring/__init__.py"),
        ("import house.errors", "errors.py"),
        ("import house.core.step as step", "core/step.py"),
        ("from house.core import step", "core/step.py"),
        ("from house import Cache", "core/step.py"),
        ("from .. import Cache", "core/step.py"),
        ("from house import something", "__init__.py"),
        ("import house", "__init__.py"),
        ("def f():\n    from .step import Step", "core/step.py"),
        ("class C:\n    def f(self):\n        import house.errors", "errors.py"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .step import Step", "core/step.py"),
        ("try:\n    pass\nexcept ImportError:\n    from .step import Step", "core/step.py"),
    ],
)
def test_an_import_is_found(line: str, imported: str, tmp_path: Path) -> None:
    public = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .core.step import Step as Cache"
    files = {"__init__.py": public, "core/step.py": "", "errors.py": "", "stores/uring/ring.py": "", "stores/a.py": ""}
    package = made_up(tmp_path, {**files, "core/layer.py": line})
    assert [(one.importer, one.imported) for one in package.imports] == [("core/layer.py", imported)]
    assert package.imports[0].line == line.count("\n") + 1


def test_an_import_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"core/layer\.py:2 imports house\.core\.stop"):
        made_up(tmp_path, {"core/layer.py": "\nfrom .stop import Stop"})


def test_circles_are_found(tmp_path: Path) -> None:
    package = made_up(
        tmp_path,
        {
            "core/a.py": "from .b import B",
            "core/b.py": "from .c import C",
            "core/c.py": "def f():\n    from . import a",
            "core/d.py": "from .a import A\nfrom .e import E",
            "core/e.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .d import D",
            "core/f.py": "import house.core.f\nfrom .d import D",
            "core/g.py": "from .f import F\nfrom .a import A",
        },
    )
    assert package.circles() == [
        ["core/a.py", "core/b.py", "core/c.py"],
        ["core/d.py", "core/e.py"],
        ["core/f.py"],
    ]


def test_what_runs_upwards_is_found(tmp_path: Path) -> None:
    """The front is above all rooms, but its imports for types alone only name what is public."""
    package = made_up(
        tmp_path,
        {
            "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .methods.one import One",
            "methods/one.py": "from ..core.layer import Layer",
            "core/layer.py": "def f():\n    from house import One\nfrom ..errors import Wrong\nimport house",
            "stores/base.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..core import layer",
            "errors.py": "",
        },
    )
    assert upwards(package) == [
        "core/layer.py:4 imports __init__.py",
        "core/layer.py:2 imports methods/one.py",
        "stores/base.py:3 imports core/layer.py",
    ]


def test_other_packages_are_told_apart(tmp_path: Path) -> None:
    source = "def f():\n    from transformers.cache_utils import Cache\nimport os.path"
    package = made_up(tmp_path, {"methods/a.py": source})
    assert sorted((one.line, one.imported) for one in package.foreign) == [(2, "transformers"), (3, "os")]


# ----------------------------------------------------------------------------------------------- defaults of torch


def left_to_defaults(source: str) -> list[str]:
    """Calls by which torch makes something whose type or device nobody says: line and name of each."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        name, said = node.func.attr, {one.arg for one in node.keywords}
        if None in said:  # a dictionary says it
            continue
        if (name in MADE and "device" not in said) or (name in MADE_OF_NUMBERS and "dtype" not in said):
            found.append(f"{node.lineno}: {name}")
    return found


def test_nothing_is_left_to_defaults_of_torch() -> None:
    root = Path(hf_offload_cache.__file__).parent
    files = [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] != "testing"]
    assert_none([f"{path.relative_to(root)}:{line}" for path in files for line in left_to_defaults(path.read_text())])


def test_what_is_left_to_defaults_is_found() -> None:
    source = "torch.zeros(3)\ntorch.zeros(3, dtype=d, device='cpu')\ntorch.arange(3)\ntorch.empty(2, device='cpu')"
    assert left_to_defaults(source + "\ntorch.rand(2, **of)") == ["1: zeros", "3: arange", "4: empty"]
