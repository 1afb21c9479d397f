"""Trial: what a model makes of an input's shape, found on fake tensors, without memory and without the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

#: What a module raises at an input that it can't take (and at much else).
MODULE_ERRORS = (RuntimeError, ValueError, AssertionError, IndexError)

_INCONCLUSIVE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_BATCH_NORM_OF_ONE = "Expected more than 1 value per channel when training"


class Inconclusive(Exception):
    """The module does something that fake tensors can't follow."""


def trial_outputs(
    module: torch.nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    gradients: bool = False,
) -> Any:
    """The outputs for inputs of a shape, as fake tensors; the module's parameters and buffers stay as they are.

    Args:
        module: on `device`, in training or evaluation mode.
        shape: of the inputs, with the batch.
        dtype: of the inputs.
        device: of the inputs.
        gradients: whether autograd records, as in training.

    Raises:
        Inconclusive: fake tensors can't tell.
        RuntimeError, ValueError, AssertionError, IndexError: the module can't take the shape.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    try:
        with _quiet(), torch.inference_mode(False), torch.set_grad_enabled(gradients), mode:
            fakes = {
                name: torch.empty_like(tensor, requires_grad=gradients and tensor.requires_grad)
                for name, tensor in state.items()
            }
            inputs = torch.empty(shape, dtype=dtype, device=device)
            # tie_weights would leave a fake behind as the weight of a module that is known under two names
            return torch.func.functional_call(module, fakes, (inputs,), tie_weights=False)
    except _INCONCLUSIVE as error:
        raise Inconclusive(str(error)) from error


def why_refused(module: torch.nn.Module, inputs: torch.Tensor) -> str | None:
    """Why the module can't take inputs of this shape, in one line; None if it is not the shape that it objects to.

    Args:
        module: in the mode in which it refused.
        inputs: those that it refused.
    """
    try:
        trial_outputs(module, tuple(inputs.shape), inputs.dtype, inputs.device)
    except Inconclusive:
        return None
    except MODULE_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".!")
        return f"{reason}; use batch_size=2 or more" if _BATCH_NORM_OF_ONE in reason else reason
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs whatever fails on fake tensors as an error of its own, with the whole stack."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
