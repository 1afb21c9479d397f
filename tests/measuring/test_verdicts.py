"""What follows from what a point has measured."""

import pytest

from perfexp.measuring import verdicts


@pytest.mark.parametrize(
    ("host", "wall", "device", "verdict"),
    [
        (20e-6, 50e-6, 50e-6, "gpu"),
        (20e-6, 20e-6, 5e-6, "launch"),
        (19e-6, 20e-6, 18.5e-6, "mixed"),
        (10e-6, 20e-6, 10e-6, "mixed"),
    ],
)
def test_bound_by(host, wall, device, verdict):
    assert verdicts.bound_by(host, wall, device) == verdict
