"""Gain of a plan in a user's script, for `perfexp apply PLAN --check FILE.py:NAME`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from perfexp.convolution.applying import apply
from perfexp.errors import UserError
from perfexp.measuring.baselines import gain
from perfexp.measuring.user_functions import load
from perfexp.models import modules
from perfexp.records.algorithm_plan import read
from perfexp.records.subject import one_line
from perfexp.statistics.estimators import Interval


def gain_in_script(plan: Path, place: str, *, remeasure: bool = False) -> tuple[str, Interval]:
    """Return the device's name, and how much faster a plan makes a script's call.

    Args:
        plan: file made by `perfexp export RUN --plan FILE`, or the folder of a run.
        place: function as `FILE.py:NAME` or `MODULE:NAME`. It returns a module with its inputs, for
            forward passes without gradients, or with a function to time, such as a training step.
        remeasure: see `perfexp.apply`.

    Raises:
        UserError: there is no such function, it fails, or the plan does not fit.
        Unsupported: the host keeps the device waiting.
    """
    make, _ = load(place)
    try:
        made = make()
        match made:
            case (torch.nn.Module() as module, work):
                call = work
            case _:
                raise TypeError("it does not return (module, inputs) or (module, function)")
        if not callable(work):
            call = torch.no_grad()(partial(modules.called, module, work))
        call()
    except Exception as error:  # of the user's code
        raise UserError(f"{place} fails: {type(error).__name__}: {one_line(str(error))}") from error
    with apply(module, plan, remeasure=remeasure) as applied:
        found = gain(applied, call)
    if applied.used == set():
        layer = read(plan).layers[0]
        shape = "×".join(map(str, layer.input_shape))
        raise UserError(
            f"{place} computes no layer by the plan: no input has a shape and type of the plan "
            f"(such as {layer.name} with {shape} {layer.dtype}), or its engines can't compute it "
            "here. Measure a run with this input_size, batch_size and precision."
        )
    return applied.device.name, found
