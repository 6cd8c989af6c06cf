"""Dependent launches: every kernel waits for earlier ones before it accesses memory.

A kernel without the wait would read what another one has not written yet, on some runs.
"""

import ast
from pathlib import Path

import sagesim_kernels

PACKAGE = Path(sagesim_kernels.__file__).parent
WAIT = "wait_for_earlier_kernels"


def functions() -> list[ast.FunctionDef]:
    """The functions of the package."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    return [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]


def launched(of: list[ast.FunctionDef]) -> set[str]:
    """The kernels that these functions pass to `launch`, by name."""
    calls = [node for each in of for node in ast.walk(each) if isinstance(node, ast.Call)]
    return {
        call.args[0].id
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "launch"
        and isinstance(call.args[0], ast.Name)
    }


def waits_first(function: ast.FunctionDef) -> bool:
    """Whether the first statement behind the docstring is the wait."""
    first = function.body[1]
    return (
        ast.get_docstring(function) is not None
        and isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Call)
        and isinstance(first.value.func, ast.Name)
        and first.value.func.id == WAIT
    )


def test_every_kernel_waits_first() -> None:
    every = functions()
    names = launched(every)
    assert {"prepare_forward_kernel", "hopper_backward", "ampere_forward"} <= names
    kernels = [function for function in every if function.name in names]
    assert len(kernels) == len(names) > 30
    assert [kernel.name for kernel in kernels if not waits_first(kernel)] == []


def test_a_kernel_without_the_wait_is_found() -> None:
    source = f'''
def waits(x):
    """Says what it does."""
    {WAIT}()
    load(x)

def loads_first(x):
    """Says what it does."""
    load(x)
    {WAIT}()
'''
    first, second = ast.parse(source).body
    assert isinstance(first, ast.FunctionDef) and isinstance(second, ast.FunctionDef)
    assert waits_first(first) and not waits_first(second)
