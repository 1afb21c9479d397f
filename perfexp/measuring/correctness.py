"""Correctness: how much a model's outputs deviate from plain fp32.

Plain means without compiler, CUDA graph, changed memory layout or forced algorithm. It is the pass
for probes.correctness=true.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from perfexp.convolution.difference import relative_error, with_statistics
from perfexp.data import Batches
from perfexp.errors import Unsupported, UserError
from perfexp.measuring.context import Context
from perfexp.models import modules, tf32
from perfexp.models.kinds import main_output
from perfexp.records.quantities import AGREEMENT, OUTPUT_ERROR
from perfexp.records.record import Metric, Point


def add(context: Context, point: Point, batches: Batches) -> None:
    """Add the relative L2 error and the share of equal predictions, for a batch in evaluation mode.

    A metric that cannot be computed is added with the reason.

    Raises:
        Unsupported: there is nothing to compare with.
    """
    session: Any = context.session
    if not hasattr(session, "module") or context.group.size > 1:
        raise Unsupported("probes.correctness=true compares a torch model on one device")
    inputs = batches.next().inputs
    reference = partial(outputs_in_fp32, session.module, inputs)
    with session.inferring(), with_statistics(session.module, partial(session.eager, inputs)):
        outputs = _replayed(session, inputs) if context.graph else session.forward(inputs)
        compute: Callable[[], Any] = reference
        if context.algorithm is not None:
            compute = partial(context.algorithm.run_baseline, "default", reference)
        plain = compute()
        error, agreement = relative_error(outputs, plain), _agreement(outputs, plain)
    for name, value, reason in (
        (OUTPUT_ERROR, error, "the outputs are not finite, or all zero"),
        (AGREEMENT, agreement, "the outputs have no scores of classes"),
    ):
        missing = reason if value is None else None
        point.metrics.append(Metric.of(name, value, reason=missing))


def _replayed(session: Any, inputs: Any) -> Any:
    """Capture the forward pass as a CUDA graph, replay it once, and return its outputs."""
    held: list[Any] = []

    def call() -> None:
        held[:] = [session.forward(inputs)]

    call()  # compilation must finish before the capture
    session.capture(call)()
    return held[0]


def _agreement(outputs: Any, plain: Any) -> float | None:
    """Return the share of samples (or pixels) with the same class; None without class scores."""
    try:
        scores = [main_output(output) for output in (outputs, plain)]
    except UserError:
        return None
    # tokens have their scores last, (batch, tokens, vocabulary)
    predicted, expected = (score.argmax(-1 if score.ndim == 3 else 1) for score in scores)
    return float((predicted == expected).double().mean())


def outputs_in_fp32(module: torch.nn.Module, inputs: Any) -> Any:
    """Return the outputs of an fp32 copy in the default layout, without TF32 or compiler.

    The copy needs memory for a second set of weights.
    """
    copy = deepcopy(module).float()
    for parameter in copy.parameters():
        parameter.data = parameter.data.contiguous()

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().contiguous() if tensor.is_floating_point() else tensor

    with tf32.off():
        return modules.called(copy, tree_map_only(torch.Tensor, plain, inputs))
