"""What the fields of a JSON object may hold, as a table of small checks.

For objects that another process wrote: whoever reads them must be able to use each value as what it
should be. A check is given a value and raises `Wrong`, which says where inside the value it is
wrong; none is slowed by where that is, and none recurses deeper than the table.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], None]

INT64 = 2**63 - 1
_DEEPEST = 16  # levels of what no table knows
_LONGEST = 60  # characters of a name in a message


class Wrong(ValueError):
    """path: keys from the outermost to the value `found`, where `expected` should be."""

    def __init__(self, found: Any, expected: str) -> None:
        super().__init__()
        self.path: list[str] = []
        self.found, self.expected = found, expected

    def __str__(self) -> str:
        where = ".".join(key[:_LONGEST] for key in reversed(self.path)) or "it"
        return f"{where} is {brief(self.found)}, expected {self.expected}"


def brief(value: Any) -> str:
    """`value` in a few words, for a message, whatever its size and depth."""
    try:
        return reprlib.repr(value)
    except ValueError:  # of more digits than Python writes
        return "an integer of thousands of digits"


def leaf(good: Callable[[Any], bool], expected: str) -> Check:
    """A check of the value itself."""

    def check(value: Any) -> None:
        if not good(value):
            raise Wrong(value, expected)

    return check


def integer(low: int, high: int, expected: str) -> Check:
    """An integer of low to high; `expected` is what a message calls it."""
    return leaf(lambda x: type(x) is int and low <= x <= high, expected)


def _is_number(x: Any) -> bool:
    # integers of any size compare with floats; NaN is below nothing
    return type(x) in (int, float) and abs(x) <= sys.float_info.max


def _is_text(x: Any) -> bool:
    return type(x) is str


number = leaf(_is_number, "a number")
number_or_null = leaf(lambda x: x is None or _is_number(x), "a number or null")
text = leaf(_is_text, "text")
text_or_null = leaf(lambda x: x is None or _is_text(x), "text or null")
flag = leaf(lambda x: type(x) is bool, "true or false")
scalar = leaf(
    lambda x: x is None or type(x) is bool or _is_text(x) or _is_number(x),
    "text, a number, true, false or null",
)
count = integer(0, INT64, "an integer of 0 to 2**63 - 1")
int64 = integer(-INT64 - 1, INT64, "an integer of 64 bits")
layer = integer(0, 2**31, "a layer, an integer of 0 to 2**31")


def _inside(check: Check, key: object, value: Any) -> None:
    try:
        check(value)
    except Wrong as e:
        e.path.append(str(key))
        raise


def listed(check: Check) -> Check:
    """A list of what `check` lets pass."""

    def check_all(value: Any) -> None:
        if type(value) is not list:
            raise Wrong(value, "a list")
        for i, x in enumerate(value):
            _inside(check, i, x)

    return check_all


def pair(*checks: Check) -> Check:
    """A list of as many values as `checks`, each let pass by its own."""

    def check_each(value: Any) -> None:
        if type(value) is not list or len(value) != len(checks):
            raise Wrong(value, f"a list of {len(checks)}")
        for i, check in enumerate(checks):
            _inside(check, i, value[i])

    return check_each


def mapped(check: Check) -> Check:
    """An object of any names, each value let pass by `check`."""
    return fields({}, rest=check)


def fields(required: Mapping[str, Check], rest: Check, **optional: Check) -> Check:
    """An object with the names `required`, and perhaps those of `optional` and others, for which
    `rest` is the check."""
    known = {**optional, **required}

    def check_fields(value: Any) -> None:
        if type(value) is not dict:
            raise Wrong(value, "an object")
        for name in required:
            if name not in value:
                raise Wrong(value, f'an object with "{name}"')
        for name, x in value.items():
            _inside(known.get(name, rest), name, x)

    return check_fields


def shallow(value: Any) -> None:
    """A check: anything that can be walked without running out of stack."""
    level = [value]
    for _ in range(_DEEPEST):
        lists = [x.values() if type(x) is dict else x for x in level if type(x) in (dict, list)]
        level = [x for found in lists for x in found]
        if not level:
            return
    raise Wrong(value, f"at most {_DEEPEST - 1} levels of lists and objects")


def anything(value: Any) -> None:
    """A check that lets all pass: for what is checked elsewhere."""


def nothing(value: Any) -> None:
    """A check that lets nothing pass: for `rest`, where there must be no other names."""
    raise Wrong(value, "no such field")
