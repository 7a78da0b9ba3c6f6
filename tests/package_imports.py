"""Every import of a package, parsed from its source: relative, absolute, within functions and for types alone.

Nothing is imported to find out. A name that the package's own `__init__` offers counts as the file it comes from.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FRONT = "__init__.py"


@dataclass(frozen=True, order=True)
class Import:
    """A line of a file that imports another; files as paths below the package, "core/step.py"."""

    importer: str
    line: int
    imported: str

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


class Package:
    """The source files of a package and what they import.

    Raises ValueError on an import of a module that the package does not have.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
        self._trees = {file: ast.parse((root / file).read_text(), file) for file in self.files}
        self._modules = {self._module_of(file): file for file in self.files}
        self._public: dict[str, str] = {}
        if FRONT in self._trees:
            self._public = dict(self._public_names())
        self.imports: list[Import] = []
        """Imports of own files, but for the front's imports for types alone: those name what is public."""
        self.foreign: list[Import] = []
        """Imports of other packages; `imported` is the package's first name."""
        for file in self.files:
            for node in self._nodes_of(file):
                self._add(file, node)

    def room(self, file: str) -> str:
        """The folder right below the root, or the name of a file that lies in the root."""
        return file.split("/")[0].removesuffix(".py")

    def circles(self) -> list[list[str]]:
        """Files that import each other, directly or by way of others; one list a circle."""
        imported: dict[str, set[str]] = defaultdict(set)
        for one in self.imports:
            imported[one.importer].add(one.imported)
        reached = {file: _reach(file, imported) for file in self.files}
        circles = {
            tuple(sorted(other for other in reached[file] if file in reached[other]))
            for file in self.files
            if file in reached[file]
        }
        return [list(circle) for circle in sorted(circles)]

    def lines(self, file: str) -> int:
        """Lines of a file."""
        return len((self.root / file).read_text().splitlines())

    def file_of_class(self, name: str) -> str:
        """The one file that defines a class of that name."""
        (file,) = (
            file
            for file, tree in self._trees.items()
            if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body)
        )
        return file

    def _module_of(self, file: str) -> str:
        parts = [self.root.name, *file.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _nodes_of(self, file: str) -> Iterator[ast.Import | ast.ImportFrom]:
        tree = self._trees[file]
        public = {id(node) for node in _for_types(tree)} if file == FRONT else set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in public:
                yield node

    def _public_names(self) -> Iterator[tuple[str, str]]:
        for node in _for_types(self._trees[FRONT]):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield alias.asname or alias.name, self._file_of(self._base(FRONT, node), alias.name, FRONT, node)

    def _base(self, file: str, node: ast.ImportFrom) -> str:
        """The dotted name of what stands between `from` and `import`."""
        if not node.level:
            return node.module or ""
        package = self._module_of(file).split(".")
        if not file.endswith(FRONT):
            package.pop()
        kept = package[: len(package) - node.level + 1]
        return ".".join([*kept, *filter(None, [node.module])])

    def _file_of(self, base: str, name: str, file: str, node: ast.stmt) -> str:
        """The file that `from base import name` reads."""
        if base == self.root.name and name in self._public:
            return self._public[name]
        for module in (f"{base}.{name}", base):
            if module in self._modules:
                return self._modules[module]
        raise ValueError(f"{file}:{node.lineno} imports {base}, which the package does not have")

    def _add(self, file: str, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom):
            base = self._base(file, node)
            wanted = [(base, alias.name) for alias in node.names]
        else:
            wanted = [(alias.name, "") for alias in node.names]
        for base, name in wanted:
            top = base.split(".")[0]
            if top == self.root.name:
                found = Import(file, node.lineno, self._file_of(base, name, file, node))
                self.imports += [found] if found not in self.imports else []
            else:
                self.foreign.append(Import(file, node.lineno, top))


def _for_types(tree: ast.Module) -> Iterator[ast.AST]:
    """What stands under `if TYPE_CHECKING:` at the top of a file."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                yield from ast.walk(statement)


def _reach(start: str, imported: dict[str, set[str]]) -> set[str]:
    """Every file that `start` imports, directly or by way of others."""
    reached: set[str] = set()
    waiting = list(imported[start])
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            waiting.extend(imported[file])
    return reached
