"""A page reused early: the ring of an SM by hand, in thirty lines of Python.

    python examples/exercises/ring_by_hand.py            the loader with the mistake
    python examples/exercises/ring_by_hand.py --answer   the loader that waits

A loader fills the slots of a ring in turn, a consumer reads a page and frees its slot.
Page p goes into slot p % RING, and may do so when that slot has been freed p // RING
times. The broken loader trusts that the consumer is fast, and waits for one page fewer.
"""

import random
import sys
from collections.abc import Generator, Sequence

import numpy as np

import mkdsl as mk
from mkdsl.runtime.barriers import Slot

RING, PAGES = 3, 12


def run(early: int, seed: int) -> list[float]:
    """What the consumer computes of each page, in one order of the two roles.

    Args:
        early: how many frees of a slot the loader does not wait for.

    Raises:
        VerifyError: a slot was filled before it was freed.
    """
    slots = [Slot(f"page slot {i}") for i in range(RING)]
    full, freed, found = [0] * RING, [0] * RING, list[float]()

    def loader() -> Generator[None]:
        for page in range(PAGES):
            slot, turn = page % RING, page // RING
            while freed[slot] < turn - early:  # the wait for a free slot
                yield
            slots[slot].fill(0, np.full(4, page, np.float32))
            full[slot] += 1
            yield

    def consumer() -> Generator[None]:
        for page in range(PAGES):
            slot, turn = page % RING, page // RING
            while full[slot] <= turn:
                yield
            found.append(float(slots[slot].values[0].sum()))
            yield
            slots[slot].release()
            freed[slot] += 1
            yield

    order, roles = random.Random(seed), [loader(), consumer()]
    while roles:
        role = order.choice(roles)
        if next(role, "done") == "done":
            roles.remove(role)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    answer = "--answer" in (sys.argv[1:] if argv is None else argv)
    for seed in range(6):
        try:
            found = run(early=0 if answer else 1, seed=seed)
        except mk.VerifyError as error:
            print(f"order {seed}: {error}")
        else:
            right = found == [4.0 * page for page in range(PAGES)]
            print(f"order {seed}: {'right' if right else f'wrong: {found}'}")


if __name__ == "__main__":
    main()
