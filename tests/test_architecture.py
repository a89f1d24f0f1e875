"""The layers, the sizes and the public names of the package, read from its syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "src" / "slipstream"
LAYERS = [
    {"core"},
    {"kernels"},
    {"models"},
    {"sampling"},
    {"verify"},
    {"targets"},
    {"control", "drafters"},
    {"engine"},
    {"server", "bench", "train"},
    {"build"},
    {"llm"},
    {"cli", "__init__"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 8


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(("slipstream", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imported_modules(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] == "slipstream"]


def layer_faults(layer: str, tree: ast.AST) -> list[str]:
    """Imports of `tree` that reach a layer which `layer` may not use."""
    faults = []
    for name in imported_modules(tree):
        other = [*name.split("."), "__init__"][1]
        other = other if other in RANK else "__init__"
        if other != layer and RANK[other] >= RANK[layer]:
            faults.append(name)
    return faults


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_layers_below(path):
    assert layer_faults(layer_of(path), ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name
            if node.name == "__init__" or any(isinstance(d, ast.Call) for d in node.decorator_list):
                continue  # constructors of public settings and command line declarations list their options
            names = [a.arg for a in node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
            assert len(names) <= MAX_PARAMETERS, node.name


def test_no_import_cycles():
    modules = {module_of(path): path for path in FILES}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for target in imported_modules(ast.parse(path.read_text())):
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != name:
                found.add(target)
        edges[name] = found
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in modules:
        visit(name, ())


def test_planted_layer_fault_is_seen():
    assert layer_faults("core", ast.parse("from slipstream.engine.step import Step"))
    assert layer_faults("drafters", ast.parse("from slipstream.control.base import Controller"))
    assert not layer_faults("engine", ast.parse("from slipstream.control.base import Controller"))
