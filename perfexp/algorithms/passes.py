"""Pass: the three convolutions of one layer."""

from __future__ import annotations

from enum import StrEnum


class Pass(StrEnum):
    """The outputs, the gradient of the inputs, the gradient of the weights."""

    forward = "forward"
    backward_data = "backward_data"
    backward_filter = "backward_filter"
