"""What a kernel and the simulator note of every task: the layout of stamps.

    stamps ::= int32 or int64 [SMs, longest queue, len(STAMPS)]

stamps[sm, i, what] is when the role that STAMPS names had done that for the task at
position i of the queue of an SM, in ns; int32 are the low 32 bits of the clock (the
device's %globaltimer). 0: not noted, because the queue is shorter, the task has none
of it, or whoever wrote the stamps does not note it. An array whose last dimension is
smaller lacks the later kinds of stamps.

    role               stamps in order
    weight loader      issued_first_page        all stream waits are over
    activation loader  waited, fetched          resident waits over; last copy issued
    consumer           operands_landed, began_pages, ended_pages, computed
    storer             store_began, stored, signalled

Between began_pages and ended_pages a consumer is paced by its pages; before it is the
prologue (a norm, say), after it the rest of the body.
"""

STAMPS = (
    "issued_first_page",
    "waited",
    "fetched",
    "operands_landed",
    "computed",
    "store_began",
    "stored",
    "signalled",
    "began_pages",
    "ended_pages",
)
FIRST_PAGE, WAITED, FETCHED, LANDED, COMPUTED, BEGAN, STORED, SIGNALLED = range(8)
BEGAN_PAGES, ENDED_PAGES = 8, 9
