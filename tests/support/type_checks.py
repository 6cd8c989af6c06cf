"""Check the types in signatures of the package, and the shapes of tensors, at every call."""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import _decorator


def install(package: str) -> None:
    """Check the calls of a package that is imported later.

    Jaxtyping binds the arguments of every call to compare their shapes, which takes longer than
    most functions. Where a signature has no shapes, beartype alone checks the same.
    """
    with_shapes = _decorator.jaxtyped
    types_alone = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))

    def checked(fn: Any = None, *, typechecker: Any) -> Any:
        if fn is None:
            return functools.partial(checked, typechecker=typechecker)
        if not isinstance(fn, FunctionType) or hasattr(fn, "__wrapped__"):
            return with_shapes(fn, typechecker=typechecker)
        hints = _hints(fn)
        if any(map(_has_shape, hints.values())):
            return with_shapes(fn, typechecker=typechecker)
        return _unless_disabled(fn, types_alone(_annotated(fn, hints))) if hints else fn

    jaxtyping.jaxtyped = _decorator.jaxtyped = checked
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _hints(fn: FunctionType) -> dict[str, Any]:
    """The types in a signature; Any for those that are not defined yet."""
    signature = inspect.signature(fn)
    hints = {name: x.annotation for name, x in signature.parameters.items()}
    hints["return"] = signature.return_annotation
    return {
        name: _decorator._destring_annotation(hint, fn.__globals__)
        for name, hint in hints.items()
        if hint is not inspect.Signature.empty
    }


def _has_shape(hint: Any) -> bool:
    is_array = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return is_array or any(map(_has_shape, get_args(hint)))


def _annotated(fn: FunctionType, hints: dict[str, Any]) -> FunctionType:
    """A copy of the function with these types."""
    code = (fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy = functools.update_wrapper(FunctionType(*code), fn)
    del copy.__wrapped__
    copy.__kwdefaults__, copy.__annotations__ = fn.__kwdefaults__, hints
    return copy


def _unless_disabled(fn: FunctionType, strict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = fn if jaxtyping.config.jaxtyping_disable else strict
        return call(*args, **kwargs)

    return wrapper
