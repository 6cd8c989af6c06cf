"""Tensor types with shapes, for signatures, such as `Float[Tensor, "*heads n d"]`.

They are jaxtyping's if it is installed, and the tests check them. Without jaxtyping they mean a
plain Tensor, so that the package itself needs only torch and numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int8
else:
    try:
        from jaxtyping import Bool, Float, Int8
    except ModuleNotFoundError:

        class _Unchecked:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int8 = _Unchecked

__all__ = ["Bool", "Float", "Int8"]
