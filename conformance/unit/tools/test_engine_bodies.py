"""Wrong bodies of every dialect, in the small: a real server answers each by name, and nothing grows or hangs."""

import pytest

from conformance.tools.campaign.bodies import BODIES, STATES, bodies
from conformance.tools.campaign.observe import HealthLooks


@pytest.mark.engine
@pytest.mark.wide
def test_wrong_bodies_of_every_dialect_are_answered_by_name():
    shown = []
    num, wrong = bodies(20261128, num=50, minutes=4, looks=HealthLooks(), show=shown.append)
    assert wrong == [], "\n".join(shown)
    assert num >= 75 * len(BODIES), "25 of each in the midst of an update"
    assert all(f"{state} " in "".join(shown) for state in STATES)
