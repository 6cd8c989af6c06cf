"""Which call of which module an SDPA call is, by following which modules are entered and left."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn


class _ModuleStack(threading.local):
    """The modules whose forward is running in this thread.

    Module hooks run in every thread, and a backward may run in a thread of its own.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # outermost first
        # How many calls each module has made since the outermost was entered.
        self.calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class Locator:
    """Finds the index and name of each call; see `sagesim.models.sdpa_mode.SdpaCall`.

    It keeps no module alive. Its memory grows with the calls of one forward, not with forwards.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._stack = _ModuleStack()
        self._model = model
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        if model is not None:
            self._name_modules(model)
        self._indices: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
        self._new_index = itertools.count()
        self._outside: deque[int] = deque(maxlen=2)  # the last indices outside of modules

    def _name_modules(self, model: nn.Module) -> None:
        self._names.update({inner: name for name, inner in model.named_modules()})

    def enter(self, module: nn.Module, _args: Any) -> None:
        stack = self._stack
        if not stack.modules:
            stack.calls.clear()
            # Activation checkpointing may call a submodule on its own, after its whole model has
            # run. The submodule then keeps the name that it has in the model.
            if self._model is None and module not in self._names:
                self._name_modules(module)
        stack.modules.append(module)

    def leave(self, module: nn.Module, _args: Any, _result: Any) -> None:
        modules = self._stack.modules
        # If the context was entered inside a module's forward, the module is not on the stack.
        if module in modules:
            while modules.pop() is not module:
                pass

    def locate(self) -> tuple[int | None, str, bool] | None:
        """Index, name and `recomputed` of the current call; None if it is not in the model."""
        stack = self._stack
        module = stack.modules[-1] if stack.modules else None
        name = next((self._names[m] for m in reversed(stack.modules) if m in self._names), None)
        if name is None:
            if self._model is not None:
                return None
            name = ""
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
            return self._recomputed(module, name), name, True
        if module is None:
            self._outside.append(next(self._new_index))
            return self._outside[-1], name, False
        number = stack.calls.get(module, 0)
        stack.calls[module] = number + 1
        indices = self._indices.setdefault(module, [])
        if number == len(indices):
            indices.append(next(self._new_index))
        return indices[number], name, False

    def _recomputed(self, module: nn.Module | None, name: str) -> int | None:
        known = self._outside if module is None else self._indices.get(module)
        if not known:
            raise RuntimeError(
                f"a backward recomputes an SDPA call of {name or 'no module'} whose forward ran "
                "outside this context; run both inside"
            )
        return known[0] if len(known) == 1 else None
