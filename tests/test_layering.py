"""Imports go downward only; third-party fences hold; files and functions stay small."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "qerl"
FILES = sorted(ROOT.rglob("*.py"))

# Each layer may import the layers named here (and itself).
ALLOWED = {
    "formats": set(),
    "kernels": {"formats"},
    "nn": {"kernels", "formats"},
    "rl": set(),
    "sandbox": set(),
    "tasks": {"sandbox"},
    "rollout": {"nn", "kernels", "formats"},
    "evaluation": {"rollout", "tasks", "nn", "formats"},
    "benchmarking": {"trainer", "evaluation", "rollout", "nn", "kernels", "formats"},
    "serving": {"evaluation", "rollout", "nn"},
    "trainer": {"evaluation", "rollout", "rl", "tasks", "nn", "kernels", "formats"},
    "cli": {
        "benchmarking",
        "serving",
        "evaluation",
        "trainer",
        "rollout",
        "tasks",
        "sandbox",
        "nn",
        "kernels",
        "formats",
    },
}
# Third-party packages and the only layers that may import them.
FENCES = {
    "trl": {"trainer"},
    "triton": {"kernels"},
    "peft": {"nn", "trainer", "rollout"},
    "typer": {"cli"},
    "rich": {"cli"},
}
TORCH_FREE = {"tasks", "sandbox"}
LIGHT_AT_IMPORT = {"cli"}


def imports(tree: ast.AST, top_level_only: bool = False) -> list[str]:
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def runtime_tree(path: Path) -> ast.Module:
    """The module without its TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text())

    class Strip(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            is_guard = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return None if is_guard else self.generic_visit(node)

    return Strip().visit(tree)


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    layer = layer_of(path)
    if not layer:
        return
    assert layer in ALLOWED, f"unknown layer {layer}"
    for name in imports(runtime_tree(path)):
        top, _, rest = name.partition(".")
        if top == "qerl":
            target = rest.partition(".")[0]
            assert target in ALLOWED[layer] | {layer, ""} or target == "__version__", f"{layer} imports {name}"
        if top in FENCES:
            assert layer in FENCES[top], f"{layer} imports {top}"
        assert not (layer in TORCH_FREE and top == "torch"), f"{layer} imports torch"
    if layer in LIGHT_AT_IMPORT:
        heavy = {"torch", "transformers", "trl", "datasets", "numpy", "matplotlib"}
        assert not heavy & {n.partition(".")[0] for n in imports(runtime_tree(path), top_level_only=True)}


def test_triton_is_imported_only_in_triton_files() -> None:
    users = {p for p in FILES if "triton" in {n.partition(".")[0] for n in imports(ast.parse(p.read_text()))}}
    assert all(p.name == "triton.py" for p in users), users


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.cu*")), ids=lambda path: path.name)
def test_cuda_sources_stay_readable(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 450, "split the file by concept"
    assert path.name == "wgmma.cuh" or all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 450, "split the file by concept"
    limit = 120 if layer_of(path) == "kernels" else 90
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < limit, f"{node.name} is too long"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_things_have_docstrings_and_nothing_is_swallowed(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type is not None else ""
            cleans_up = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            at_boundary = "a process boundary" in text.splitlines()[node.lineno - 1]
            is_broad = caught in ("", "Exception", "BaseException")
            assert not is_broad or cleans_up or at_boundary, f"line {node.lineno}: broad except"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"
