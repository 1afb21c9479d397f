"""The three passes of a convolution layer."""

from __future__ import annotations

from enum import StrEnum


class Pass(StrEnum):
    """One convolution of a layer: the outputs, the gradient of the inputs, or the gradient of the weights."""

    forward = "forward"
    backward_data = "backward_data"
    backward_filter = "backward_filter"
