"""What programs give to this package, looked at before it is used."""

import operator
from typing import Any


def number_of_bytes(name: str, value: Any, kinds: str = "a number of bytes, as an int") -> int:
    """The value as an int, which may be any kind of integer, like NumPy's.

    Args:
        name: what the value is of.
        value: what was given.
        kinds: what may be given, in words.

    Raises:
        TypeError: if it is no integer; True and False count as none.
        ValueError: if it is negative, or 2**63 or more.
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None:
        raise TypeError(f"offload: {name} is {value!r}; give {kinds}.")
    if count < 0:
        raise ValueError(f"offload: {name} is {count}; give bytes, 0 or more.")
    if count >= 1 << 63:
        raise ValueError(f"offload: {name} is {count}; give bytes, fewer than 2**63.")
    return count


def true_or_false(name: str, value: Any) -> bool:
    """The value.

    Raises:
        TypeError: if it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"offload: {name} is {value!r}; give True or False.")
    return value
