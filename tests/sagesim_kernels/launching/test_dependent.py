"""Dependent launches: every kernel waits for earlier ones before it accesses memory.

A kernel without the wait would read what another one has not written yet, on some runs.
"""

import ast
from pathlib import Path

import sagesim_kernels
from tests.support.compiler import LATE_WAITS

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


def waits_at(function: ast.FunctionDef) -> list[int]:
    """Which statements behind the docstring are the wait. It is not part of another statement."""
    assert ast.get_docstring(function) is not None
    found = [
        i
        for i, statement in enumerate(function.body[1:])
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Name)
        and statement.value.func.id == WAIT
    ]
    assert len(found) == sum(isinstance(x, ast.Name) and x.id == WAIT for x in ast.walk(function))
    return found


def may_end_before(function: ast.FunctionDef, statement: int) -> bool:
    """Whether there is a return before a statement behind the docstring."""
    before = function.body[1 : statement + 1]
    return any(isinstance(node, ast.Return) for each in before for node in ast.walk(each))


def test_every_kernel_waits_first() -> None:
    """Those of `LATE_WAITS` wait later. A test of their code says what they access before."""
    every = functions()
    names = launched(every)
    assert LATE_WAITS.keys() | {"prepare_forward_kernel", "ampere_forward"} <= names
    kernels = [function for function in every if function.name in names]
    assert len(kernels) == len(names) > 30
    waits = {kernel.name: waits_at(kernel) for kernel in kernels}
    assert [name for name, found in waits.items() if len(found) != 1] == []
    assert {name for name, found in waits.items() if found != [0]} == LATE_WAITS.keys()
    assert [kernel.name for kernel in kernels if may_end_before(kernel, *waits[kernel.name])] == []


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

def may_end(x):
    """Says what it does."""
    if x:
        return
    {WAIT}()

def forgets(x):
    """Says what it does."""
    load(x)
'''
    kernels = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    first, second, third, fourth = kernels
    assert [waits_at(kernel) for kernel in kernels] == [[0], [1], [1], []]
    assert not may_end_before(first, 0) and not may_end_before(second, 1)
    assert may_end_before(third, 1)
    assert not may_end_before(fourth, 1)
