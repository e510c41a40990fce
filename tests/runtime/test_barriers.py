"""Slots of the simulator: what is used too early or too late is seen."""

import numpy as np
import pytest

from mkdsl.errors import VerifyError
from mkdsl.runtime.barriers import Slot


def test_a_slot_that_is_in_use_is_not_filled():
    slot = Slot("page slot 3 of SM 1")
    slot.fill(0, np.ones(4))
    with pytest.raises(VerifyError, match="page slot 3 of SM 1 is filled again before"):
        slot.fill(0, np.ones(4))
    slot.release()
    slot.fill(0, np.ones(4))


def test_a_value_of_a_freed_slot_is_poison():
    slot, page = Slot("page slot 3 of SM 1"), np.ones(4)
    slot.fill(0, page)
    slot.release()
    assert np.isnan(page).all()
