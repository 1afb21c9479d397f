"""Find a model's outputs or errors for an input shape on fake tensors, without memory or the device."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

#: Errors of a module for an input that it cannot take (and for much else).
MODULE_ERRORS = (RuntimeError, ValueError, AssertionError, IndexError)
#: Errors of fake tensors that they cannot follow a module.
FAKE_TENSOR_LIMITS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_BATCH_NORM_OF_ONE = "Expected more than 1 value per channel when training"


class Inconclusive(Exception):
    """Raised where fake tensors cannot follow a module."""


def trial_outputs(
    module: torch.nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    gradients: bool = False,
) -> Any:
    """The outputs for inputs of a shape, as fake tensors; the module's parameters and buffers are unchanged.

    It raises `Inconclusive` if fake tensors cannot follow the module, and `MODULE_ERRORS` if it refuses the shape.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    try:
        with quiet(), torch.inference_mode(False), torch.set_grad_enabled(gradients), mode:
            fakes = {
                name: torch.empty_like(tensor, requires_grad=gradients and tensor.requires_grad)
                for name, tensor in state.items()
            }
            inputs = torch.empty(shape, dtype=dtype, device=device)
            # tie_weights would leave a fake tensor as the weight of a module with two names
            return torch.func.functional_call(module, fakes, (inputs,), tie_weights=False)
    except FAKE_TENSOR_LIMITS as error:
        raise Inconclusive(str(error)) from error


def why_refused(module: torch.nn.Module, inputs: torch.Tensor) -> str | None:
    """Why the module cannot take inputs of this shape, in one line; None if the shape is not the reason."""
    try:
        trial_outputs(module, tuple(inputs.shape), inputs.dtype, inputs.device)
    except Inconclusive:
        return None
    except MODULE_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".!")
        return f"{reason}; use batch_size=2 or more" if _BATCH_NORM_OF_ONE in reason else reason
    return None


def quiet() -> AbstractContextManager[object]:
    """Silence torch's log, which reports each failure on fake tensors as an error with its stack."""
    return patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
