"""What the arguments of public calls have in common; checked before anything else happens."""

from operator import index
from typing import Any

from elasticep.errors import UsageError


def whole(name: str, value: Any) -> int:
    """`value`, if it can count something: int, NumPy's integers, a tensor of one integer.

    Raises:
        UsageError: it cannot.
    """
    try:
        return index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}; it must be a whole number") from None
