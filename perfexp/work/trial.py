"""Trial: run a module on tensors without memory, in a forked process.

The measured module never sees a stand-in.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perfexp.errors import PerfexpError
from perfexp.host.forked import Ended, Forked
from perfexp.work import Inconclusive, forked_cuda

#: Errors that a module raises for an input that it cannot take (and for much else).
MODULE_ERRORS = (RuntimeError, ValueError, AssertionError, IndexError)
#: Fake-tensor errors for modules that fake tensors cannot follow.
FAKE_TENSOR_LIMITS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
_BATCH_NORM_OF_ONE = "Expected more than 1 value per channel when training"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def isolated(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that runs in a forked process.

    There, stand-ins and crashes in a module's code do no harm. A module may store results anywhere,
    for example in attributes, hooks, function caches or other Python modules.

    Raises:
        Inconclusive: fake tensors cannot follow the module, or its code crashed.
        MODULE_ERRORS: the module refuses its inputs.
        PerfexpError: perfexp's own code raised it.
    """

    def answer(cuda: dict[str, Any], args: Any, kwargs: Any) -> tuple[type[Exception] | None, Any]:
        _prepare(cuda)
        try:
            return None, function(*args, **kwargs)
        except PerfexpError as error:
            return type(error), str(error)
        except FAKE_TENSOR_LIMITS as error:
            return Inconclusive, str(error)
        except MODULE_ERRORS as error:
            if cuda and "CUDA" in str(error):  # an error of this process, not of the module
                return Inconclusive, str(error).splitlines()[0]
            return next(kind for kind in MODULE_ERRORS if isinstance(error, kind)), str(error)
        except Exception as error:
            return Inconclusive, str(error) if isinstance(
                error, Inconclusive
            ) else f"{type(error).__name__}: {error}"

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        answers = forked_cuda.answers()
        # the copy has the arguments already: modules need not be pickled
        try:
            with Forked(lambda: answer(answers, args, kwargs)) as forked:
                kind, result = forked()
        except Ended as error:
            raise Inconclusive(str(error)) from error
        if kind is not None:
            raise kind(result)
        returned: _R = result
        return returned

    return call


class _Process:
    is_isolated = False


def _prepare(cuda: dict[str, Any]) -> None:
    """Adapt torch to a forked process, where threads, CUDA and compiled code do not work.

    Args:
        cuda: answers of CUDA functions by name; empty if CUDA has not been initialized.
    """
    _Process.is_isolated = True
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        torch.compiler.set_stance("force_eager")
    torch.clear_autocast_cache()  # casts of real weights
    forked_cuda.prepare(cuda)


def trial_outputs(
    module: torch.nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    gradients: bool = False,
) -> Any:
    """Return a module's outputs for an input shape, as fake tensors.

    Use it only in an isolated function.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        replace_tensors(module, mode)
        with mode:
            return module(torch.empty(shape, dtype=dtype, device=device))


def replace_tensors(module: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers by stand-ins, permanently.

    Raises:
        RuntimeError: this is not an isolated function.
    """
    if not _Process.is_isolated:
        raise RuntimeError(
            "stand-ins in this process could be timed: call this in an isolated function"
        )
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = stand_in(tensor, mode)
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]
    for part in module.modules():
        for value in vars(part).values():
            if type(value) is list:  # e.g. a recurrent network's second references to its weights
                value[:] = [made.get(id(one), one) for one in value]


def stand_in(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a tensor like another tensor, without memory.

    The same tensor gets the same stand-in, and a parameter gets a parameter.
    """
    if not tensor.is_inference():
        return mode.from_tensor(tensor, static_shapes=True)
    # autograd refuses inference-mode tensors, and so their stand-ins
    with mode:
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def why_refused(module: torch.nn.Module, inputs: torch.Tensor) -> str | None:
    """Return a one-line reason why the module rejects this input shape.

    The result is None if it accepts the shape, or if a trial is inconclusive.
    """
    try:
        isolated(_refuses)(module, tuple(inputs.shape), inputs.dtype, inputs.device)
    except Inconclusive:
        return None
    except MODULE_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".!")
        if _BATCH_NORM_OF_ONE in reason:
            return f"{reason}; use batch_size=2 or more"
        return reason
    return None


def _refuses(
    module: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    trial_outputs(module, shape, dtype, device)


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory."""
    return tensor.is_meta or isinstance(tensor, fake_tensor.FakeTensor)
