"""What the tree looks like from outside, as numbers: how long functions, files and classes are, how
names and documents read, and where imports point. Prints a table in Markdown.

    python scripts/house.py                  # of this repository
    python scripts/house.py --root PATH --package NAME

`tests/test_tree.py` holds the tree to the rules among them.
"""

import argparse
import ast
import dataclasses
import functools
import io
import re
import statistics
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).parents[1]
Graph = Mapping[str, set[str]]  # module -> the modules that it imports
Function = ast.FunctionDef | ast.AsyncFunctionDef

_COLLECTIVES = {
    *("psum", "pmax", "pmin", "pmean", "psum_scatter", "ppermute", "pshuffle", "axis_index"),
    *("all_gather", "all_to_all", "ragged_all_to_all", "axis_size"),
}
_AXES = re.compile(r"\b(DATA|MODEL)\b")
_ARRAYS = re.compile(r"\b(Array|ndarray|Float|Int|Bool|UInt|Shaped)\b")
_SHAPES = re.compile(r"(Float|Int|Bool|UInt|Shaped|Num)\[[^]]*\"|\[[A-Za-z*.][^]]*\]")


@dataclasses.dataclass(frozen=True)
class Import:
    """One import of a module of the package: where it stands, and whether it runs when the module
    is loaded ("top"), only for type checkers ("types") or in a function ("function").
    """

    target: str
    line: int
    place: str


@dataclasses.dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str  # with dots
    path: Path
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """What the file says, parsed."""
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        """Lines of the file."""
        return self.text.count("\n")

    @property
    def room(self) -> str:
        """The folder or file of the package's top level that the module is, or stands in."""
        return self.name.split(".")[1] if "." in self.name else ""


def read_package(root: Path, package: str) -> dict[str, Module]:
    """Every module of a package by name."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        modules[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return modules


# Imports.


def imports(module: Module, modules: Mapping[str, Module]) -> list[Import]:
    """The modules of the package that a module imports, wherever in it."""
    found = []
    for node, place in _import_nodes(module.tree, "top"):
        for target in _targets(node, module):
            resolved = _resolve(target, modules)
            if resolved and resolved != module.name:
                found.append(Import(resolved, node.lineno, place))
    return found


def _import_nodes(node: ast.AST, place: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, place
        elif isinstance(child, Function | ast.Lambda):
            yield from _import_nodes(child, "function")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _import_nodes(child, "types")
        else:
            yield from _import_nodes(child, place)


def _targets(node: ast.Import | ast.ImportFrom, module: Module) -> Iterator[str]:
    """What an import names, with dots: a module, or a name in one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        is_package = module.path.name == "__init__.py"
        parts = module.name.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        base = ".".join([*kept, *([node.module] if node.module else [])])
    yield from (f"{base}.{alias.name}" for alias in node.names)


def _resolve(target: str, modules: Mapping[str, Module]) -> str | None:
    """The module that is loaded for a name: itself, or the one that holds it."""
    if target in modules:
        return target
    holder = target.rpartition(".")[0]
    return holder if holder in modules else None


def import_graph(
    modules: Mapping[str, Module], places: Iterable[str] = ("top", "types", "function")
) -> dict[str, set[str]]:
    """Who imports whom. The package itself and the command line, which may import everything where
    it needs it, are left out.
    """
    allowed = set(places)
    inner = {n: m for n, m in modules.items() if m.room not in ("", "cli", "__main__")}
    return {
        name: {i.target for i in imports(m, modules) if i.place in allowed and i.target in inner}
        for name, m in inner.items()
    }


def largest_circle(graph: Graph) -> list[str]:
    """The modules of the largest import circle, sorted; none where there is no circle."""
    groups = [group for group in _strong_groups(graph) if len(group) > 1]
    return sorted(max(groups, key=len, default=set()))


def floors(graph: Graph) -> int:
    """How many modules the longest chain of imports has; a circle counts as one."""
    group_of = {name: at for at, group in enumerate(_strong_groups(graph)) for name in group}
    below: dict[int, set[int]] = {at: set() for at in group_of.values()}
    for name, targets in graph.items():
        below[group_of[name]] |= {group_of[t] for t in targets} - {group_of[name]}

    @functools.cache
    def height(group: int) -> int:
        return 1 + max(map(height, below[group]), default=0)

    return max(map(height, below), default=0)


def _strong_groups(graph: Graph) -> list[set[str]]:
    """Modules that all reach each other, group by group."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups: list[set[str]] = []
    for name in graph:
        if not any(name in group for group in groups):
            groups.append({name} | {other for other in reached[name] if name in reached[other]})
    return groups


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    pending = list(graph[start])
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += graph[name]
    return found


def axis_lines(modules: Mapping[str, Module]) -> dict[str, int]:
    """The lines that name a mesh axis, imports and comments left out, in each module outside the
    folders `parallel` and `runtime`.
    """
    counts = {
        name: sum(
            bool(_AXES.search(line)) and not line.strip().startswith(("#", "from", "import"))
            for line in module.text.splitlines()
        )
        for name, module in modules.items()
        if module.path.parent.name not in ("parallel", "runtime")
    }
    return {name: count for name, count in counts.items() if count}


def folder_sizes(modules: Mapping[str, Module]) -> dict[str, int]:
    """Files of each folder, `__init__` left out."""
    counts: dict[str, int] = {}
    for module in modules.values():
        folder = module.path.parent.name
        counts[folder] = counts.get(folder, 0) + (module.path.name != "__init__.py")
    return counts


# Functions, classes, names.


def class_lengths(modules: Mapping[str, Module]) -> dict[str, int]:
    """Lines of each class, by module and name."""
    return {
        f"{name}.{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, module in modules.items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }


def _functions(modules: Mapping[str, Module]) -> list[Function]:
    return [n for m in modules.values() for n in ast.walk(m.tree) if isinstance(n, Function)]


def _body_lines(function: Function) -> int:
    """Lines of a function without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def _documented(modules: Mapping[str, Module]) -> list[bool]:
    """Of each public function, class and method, whether it has a docstring."""
    found = []
    for module in modules.values():
        pending: list[ast.AST] = [module.tree]
        while pending:
            for node in ast.iter_child_nodes(pending.pop()):
                if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                    found.append(ast.get_docstring(node) is not None)
                    pending += [node] if isinstance(node, ast.ClassDef) else []
    return found


def _shape_statements(modules: Mapping[str, Module]) -> list[bool]:
    """Of each function with an array in its signature, whether a shape is stated there or in its
    docstring.
    """
    found = []
    for function in _functions(modules):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        annotations = [a.annotation for a in arguments if a.annotation]
        annotations += [function.returns] if function.returns else []
        text = " ".join(map(ast.unparse, annotations))
        if _ARRAYS.search(text):
            stated = text.replace("'", '"') + (ast.get_docstring(function) or "")
            found.append(bool(_SHAPES.search(stated)))
    return found


def _local_names(modules: Mapping[str, Module]) -> list[str]:
    """The names that functions assign, once for each function."""
    found = []
    for function in _functions(modules):
        stored = (n for n in ast.walk(function) if isinstance(n, ast.Name))
        found += sorted({n.id for n in stored if isinstance(n.ctx, ast.Store) and n.id != "_"})
    return found


def _tuple_assignments(modules: Mapping[str, Module]) -> list[bool]:
    """Of each assignment, whether it gives several values to several names."""
    nodes = (n for m in modules.values() for n in ast.walk(m.tree) if isinstance(n, ast.Assign))
    return [isinstance(n.value, ast.Tuple) and isinstance(n.targets[0], ast.Tuple) for n in nodes]


def _comments(module: Module) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def _collectives_outside(modules: Mapping[str, Module]) -> int:
    """Calls of a device collective of JAX outside the file that is for them."""
    calls = (
        node
        for module in modules.values()
        if module.path.name != "collectives.py"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in _COLLECTIVES
    )
    return sum(ast.unparse(node.value) in ("jax.lax", "lax") for node in calls)


# The table.


def measures(root: Path, package: str) -> Iterator[tuple[str, str]]:
    """Each measure and its value as text."""
    modules = read_package(root, package)
    code_lines = sum(module.lines for module in modules.values())
    test_lines = sum(
        p.read_text(encoding="utf-8").count("\n") for p in (root / "tests").rglob("*.py")
    )
    bodies = sorted(map(_body_lines, _functions(modules)))
    yield "lines of code, files", f"{code_lines:,}, {len(modules)}"
    yield "body p50 / p90 / max", f"{_at(bodies, 0.5)} / {_at(bodies, 0.9)} / {bodies[-1]}"
    documented = _share(_documented(modules))
    yield (
        "public names documented / array functions that state shapes",
        f"{documented:.0f} % / {_share(_shape_statements(modules)):.0f} %",
    )
    yield "device collectives outside their file", f"{_collectives_outside(modules)}"
    yield "test lines per code line", f"{test_lines / code_lines:.2f}"
    graphs = [import_graph(modules, ("top", "types", "function")[:n]) for n in (1, 2, 3)]
    circles = " / ".join(str(len(largest_circle(graph))) for graph in graphs)
    yield (
        "import circle: run time / with TYPE_CHECKING / with imports inside functions (files)",
        circles,
    )
    yield "floors of imports", f"{floors(graphs[-1])}"
    yield "largest folder (files)", _largest(folder_sizes(modules))
    yield "longest file (lines)", _largest({m.path.name: m.lines for m in modules.values()})
    yield "longest class (lines)", _largest(class_lengths(modules), lambda n: n.split(".")[-1])
    yield "lines that name mesh axes outside their folders", f"{sum(axis_lines(modules).values())}"
    functions = [function.name.strip("_") for function in _functions(modules)]
    yield (
        "mean letters of a function's / local's name",
        f"{_mean(functions):.1f} / {_mean(_local_names(modules)):.1f}",
    )
    comments = sum(map(_comments, modules.values()))
    yield "comments per 100 lines", f"{100 * comments / code_lines:.1f}"
    yield "assignments `a, b = x, y`", f"{_share(_tuple_assignments(modules)):.1f} %"


def _at(values: list[int], share: float) -> int:
    return values[int(share * (len(values) - 1))]


def _share(flags: list[bool]) -> float:
    return 100 * sum(flags) / max(1, len(flags))


def _mean(names: list[str]) -> float:
    return statistics.fmean(map(len, names))


def _largest(sizes: Mapping[str, int], shown: Callable[[str], str] = str) -> str:
    name = max(sizes, key=lambda name: sizes[name])
    return f"{sizes[name]} ({shown(name)})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measures a package and prints a table.")
    parser.add_argument("--root", type=Path, default=HERE, help="the repository (this one)")
    parser.add_argument("--package", default="kimi_jax", help="the folder of the package in it")
    options = parser.parse_args()
    print(f"| | {options.package} |\n|---|---|")
    for name, value in measures(options.root, options.package):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
