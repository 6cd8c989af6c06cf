"""Changes of what the emulator computes, to emulate the mistakes that a kernel may contain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sagesim.emulator import FlatProblem, Hooks, Operand, Place
from sagesim.fuzzing.calls import Outputs
from sagesim.problem import AttentionProblem


def _same_problem(problem: AttentionProblem) -> AttentionProblem:
    return problem


def _same_layout(x: FlatProblem, problem: AttentionProblem) -> FlatProblem:
    return x


def _no_hooks(x: FlatProblem, problem: AttentionProblem) -> Hooks:
    return Hooks()


def _same_outputs(outputs: Outputs, problem: AttentionProblem) -> Outputs:
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Functions that change a run of the emulator at four places; by default at none.

    `layout` and `hooks` get the changed problem, `outputs` the original one.
    """

    problem: Callable[[AttentionProblem], AttentionProblem] = _same_problem
    layout: Callable[[FlatProblem, AttentionProblem], FlatProblem] = _same_layout
    hooks: Callable[[FlatProblem, AttentionProblem], Hooks] = _no_hooks
    outputs: Callable[[Outputs, AttentionProblem], Outputs] = _same_outputs
    """Also applied to the allowed differences, which have the shapes of the outputs."""


NO_CHANGE = Change()


class Both(Hooks):
    """The hooks `first`, and then the hooks `second` on what they return."""

    def __init__(self, first: Hooks, second: Hooks) -> None:
        self._first, self._second = first, second

    def map(self, name: str, place: Place, tiles: Tensor) -> Tensor:
        return self._second.map(name, place, self._first.map(name, place, tiles))

    def ds(self, place: Place, ds: Tensor, p: Tensor) -> Tensor:
        return self._second.ds(place, self._first.ds(place, ds, p), p)

    def delta(self, heads: slice, delta: Tensor) -> None:
        self._first.delta(heads, delta)
        self._second.delta(heads, delta)

    def operand(self, site: str, tensor: str, place: Place, operand: Operand) -> Operand:
        operand = self._first.operand(site, tensor, place, operand)
        return self._second.operand(site, tensor, place, operand)

    def output(self, o: Tensor) -> Tensor:
        return self._second.output(self._first.output(o))
