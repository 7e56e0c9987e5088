"""Values of settings: each function takes what TOML gives, or a string from the environment or a
flag, and raises `ValueError` with what it wants.
"""

import operator
import re
from collections.abc import Callable
from typing import Any

MAX_DEVICE = 1023


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def whole(low: int, high: int) -> Callable[[Any], int]:
    """A whole number between two others, both included."""

    def parse(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value.strip()):
            value = int(value)
        elif hasattr(value, "__index__") and not isinstance(value, bool):
            value = operator.index(value)  # NumPy has whole numbers of its own
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    return parse


def yes_no(value: Any) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if not isinstance(value, str) or value.strip().lower() not in known:
        raise ValueError("true or false")
    return known[value.strip().lower()]


def texts(value: Any) -> tuple[str, ...]:
    """A list of strings, or one string with commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of strings, or one string with commas")
    return tuple(value)


def devices(value: Any) -> tuple[int, ...]:
    """A list of device numbers, or one string with commas."""
    if isinstance(value, int):
        value = [value]
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("a list of device numbers, or one string with commas")
    return tuple(whole(0, MAX_DEVICE)(item) for item in value)
