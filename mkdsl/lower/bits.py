"""Sets of task or event ids as Python integers: bit i says that i is a member."""

from collections.abc import Iterable


def bitset(members: Iterable[int]) -> int:
    """The set of these ids.

    >>> bin(bitset([0, 3]))
    '0b1001'
    """
    ids = tuple(members)
    data = bytearray(max(ids, default=-1) // 8 + 1)
    for i in ids:
        data[i >> 3] |= 1 << (i & 7)
    return int.from_bytes(data, "little")


def union(sets: Iterable[int], start: int = 0) -> int:
    """The union of the sets and of `start`."""
    for bits in sets:
        start |= bits
    return start
