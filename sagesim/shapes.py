"""Shapes in signatures. They are checked under pytest, where jaxtyping is installed, and are
inert names elsewhere: the package itself needs only torch and numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int8
else:
    try:
        from jaxtyping import Bool, Float, Int8
    except ModuleNotFoundError:

        class _Shaped:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int8 = _Shaped

__all__ = ["Bool", "Float", "Int8"]
