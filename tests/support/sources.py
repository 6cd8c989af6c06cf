"""What a source file imports, and that imports form no cycle."""

import ast
from pathlib import Path


def imports_of(path: Path, *, deferred: bool) -> set[str]:
    """Absolute names of what a module imports, at its top level or inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if (id(node) in inside) != deferred:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.stem} has a relative import"
            assert node.module is not None
            if node.module in ("sagesim", "sagesim_kernels"):
                # A submodule, or a name that the package re-exports from all its rooms.
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def assert_no_cycle(arrows: dict[str, set[str]]) -> None:
    """Every module of module -> what it imports can be loaded after those that it imports."""
    done: set[str] = set()
    while len(done) < len(arrows):
        ready = {m for m, needs in arrows.items() if m not in done and needs <= done}
        assert ready, f"a cycle among {sorted(set(arrows) - done)}"
        done |= ready
