"""The imports of a source file."""

import ast
from pathlib import Path


def imports_of(path: Path, *, deferred: bool) -> set[str]:
    """The names that a module imports: "module", or "module.name" of a `from` import.

    deferred: the imports inside functions if True, the others if False.
    """
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
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found
