"""Run a module on tensors without memory, in a forked process.

Such a tensor is called a stand-in: torch's fake tensor, which has a shape, a data type and a
device. The measured module never sees one, because `isolated` forks the process first. Counting
FLOPs, tracing memory and checking whether a model takes an input size work this way. CUDA does not
work in a forked process, so torch is changed there to get along without it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perfexp.cost import Inconclusive
from perfexp.errors import PerfexpError
from perfexp.host.forked import Ended, Forked

#: Errors that a module raises for an input that it cannot take (and for much else).
MODULE_ERRORS = (RuntimeError, ValueError, AssertionError, IndexError)
#: Fake-tensor errors for modules that fake tensors cannot follow.
FAKE_TENSOR_LIMITS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
#: torch's message for batch norm in training with a single value per channel.
_BATCH_NORM_OF_ONE = "Expected more than 1 value per channel when training"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def isolated(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that runs in a forked process and returns its result from there.

    There, stand-ins and crashes in a module's code do no harm. A module may store results anywhere,
    for example in attributes, hooks, function caches or other Python modules.

    Raises:
        Inconclusive: fake tensors cannot follow the module, or its code crashed.
        MODULE_ERRORS: the module refuses its inputs.
        PerfexpError: perfexp's own code raised it.
    """

    def answer(cuda: dict[str, Any], args: Any, kwargs: Any) -> tuple[type[Exception] | None, Any]:
        """Run in the fork: return None and the result, or the class and text of an error."""
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
        except Inconclusive as error:
            return Inconclusive, str(error)
        except Exception as error:
            return Inconclusive, f"{type(error).__name__}: {error}"

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Fork this process, call the function there, and return its result or raise its error."""
        answers = cuda_answers()
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
    """State of this process: whether it is a fork by `isolated`."""

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
    _adapt_cuda(cuda)


def trial_outputs(
    module: torch.nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    gradients: bool = False,
) -> Any:
    """Return a module's outputs for one input tensor of this shape, as stand-ins.

    The module's tensors are replaced for good, so call it only within a function that `isolated`
    runs in its own process. `convolution.layer_support` finds a model's convolutions this way.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        replace_tensors(module, mode)
        with mode:
            return module(torch.empty(shape, dtype=dtype, device=device))


def replace_tensors(module: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace a module's parameters and buffers by stand-ins, permanently.

    Counting and allocations call it before they run the module.

    Raises:
        RuntimeError: this process is not a fork by `isolated`.
    """
    if not _Process.is_isolated:
        raise RuntimeError(
            "stand-ins in this process could be timed: call this in an isolated function"
        )
    stand_ins: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in stand_ins:
                    stand_ins[id(tensor)] = stand_in(tensor, mode)
                tensors[name] = stand_ins[id(tensor)]  # type: ignore[assignment]
    for part in module.modules():
        for value in vars(part).values():
            if type(value) is list:  # e.g. a recurrent network's second references to its weights
                value[:] = [stand_ins.get(id(item), item) for item in value]


def stand_in(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a tensor's stand-in, with the same shape, strides, data type and device.

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
    """Return a one-line reason why a module rejects an input of this shape.

    The session calls it before it measures. None means that the module accepts the shape, or that
    the trial is inconclusive.
    """
    try:
        isolated(_run_once)(module, tuple(inputs.shape), inputs.dtype, inputs.device)
    except Inconclusive:
        return None
    except MODULE_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".!")
        if _BATCH_NORM_OF_ONE in reason:
            return f"{reason}; use batch_size=2 or more"
        return reason
    return None


def _run_once(
    module: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Call a module once, without its outputs, which could not be sent to the parent."""
    trial_outputs(module, shape, dtype, device)


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory, and so no values.

    Sessions do not save or restore such values while memory is traced.
    """
    return tensor.is_meta or isinstance(tensor, fake_tensor.FakeTensor)


#: Functions of torch.cuda that fail in a forked process; it gets its parent's answers.
_CUDA_QUESTIONS = (
    *("is_available", "is_initialized", "current_device", "device_count", "is_bf16_supported"),
    *("get_device_name", "get_device_capability", "get_device_properties"),
)
#: Methods that select the device in their Python binding, unlike their operator.
_SELECTING_METHODS = ("copy_", "contiguous", "__getitem__", "__setitem__", "__invert__")


def cuda_answers() -> dict[str, Any]:
    """Return the answers of `torch.cuda` functions by name, for a fork of this process.

    They are empty if CUDA is not initialized.
    """
    if not torch.cuda.is_initialized():
        return {}
    return {name: getattr(torch.cuda, name)() for name in _CUDA_QUESTIONS}


def _adapt_cuda(answers: dict[str, Any]) -> None:
    """Let torch work in a forked process as if CUDA did, permanently.

    Args:
        answers: the parent's `cuda_answers`; empty if the parent does not use CUDA.
    """
    if not answers:
        return
    for name, result in answers.items():
        setattr(torch.cuda, name, lambda *_, result=result, **__: result)
    torch.cuda._initialized = False  # otherwise checkpointing saves the device's random state
    torch.cuda._lazy_init = torch.cuda.synchronize = lambda *_: None
    fake_tensor.init_gpu_context = lambda _: None  # type: ignore[assignment]
    leave_device_unselected(answers["current_device"])


def leave_device_unselected(index: int) -> None:
    """Keep torch's bindings from querying or selecting the CUDA device.

    A forked process can do neither; all its tensors are stand-ins. Some methods ask for their
    tensor's device and then select it: for the duration of such a call the stand-in answers `meta`
    once, which needs no selection. Other functions get a numbered device, or make their tensor on
    the host first.

    Args:
        index: number of the CUDA device.
    """
    handlers, device_query = fake_tensor._DISPATCH_META_HANDLERS, torch.ops.prim.device.default
    device_of: Callable[..., Any] = handlers[device_query]
    answer_meta: list[bool] = []
    select_backend = torch._C._select_conv_backend

    def meta_once(args: Any) -> Any:
        """Return a tensor's device, but `meta` for the first query of an `unselected` method."""
        if answer_meta and answer_meta.pop():
            return torch.device("meta")
        return device_of(args)

    def unselected(method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method during which the stand-in answers `meta` once."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            answer_meta.append(True)
            try:
                return method(*args, **kwargs)
            finally:
                answer_meta.clear()

        return call

    def conv_backend(*args: Any, **kwargs: Any) -> Any:
        """Select a convolution's backend, from which fake tensors infer the output layout."""
        try:
            return select_backend(*args, **kwargs)
        except RuntimeError:
            # for depthwise convolutions torch queries the device, which fails in a forked process;
            # their output layout is the same with any backend
            return torch._C._ConvBackend.Cudnn  # type: ignore[attr-defined]

    handlers[device_query] = meta_once
    torch.nn.functional.scaled_dot_product_attention = _attention(
        torch.nn.functional.scaled_dot_product_attention
    )
    for name in _SELECTING_METHODS:
        setattr(torch.Tensor, name, unselected(getattr(torch.Tensor, name)))
    torch.Tensor.to = _with_device_number(torch.Tensor.to, index)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor.to("cuda")  # type: ignore[method-assign]
    torch.tensor = _made_on_host(torch.tensor)
    torch._C._select_conv_backend = conv_backend


def _with_device_number(method: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Wrap `torch.Tensor.to` so that the device `cuda` means `cuda:INDEX`, without asking CUDA."""

    def numbered(value: Any) -> Any:
        if value == "cuda" or value == torch.device("cuda"):
            return f"cuda:{index}"
        return value

    @wraps(method)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        named = {key: numbered(value) for key, value in kwargs.items()}
        return method(tensor, *map(numbered, args), **named)

    return call


def _made_on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `torch.tensor` so that it makes the tensor on the host, then moves it to its device."""

    @wraps(make)
    def call(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, device="cpu", **kwargs)
        if device is None:
            return tensor
        return tensor.to(device)

    return call


def _attention(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function so that it calls the operator that a GPU would use.

    A stand-in would otherwise take a CPU's operator, with other results. This concerns tensors with
    four dimensions (batch, heads, length, width); others are passed on.

    Args:
        attend: torch's `scaled_dot_product_attention`.
    """

    @wraps(attend)
    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **settings: Any
    ) -> Any:
        """Call the operator for a GPU on tensors there; otherwise call `attend`."""
        given = (query, key, value)
        if torch.overrides.has_torch_function(given):
            return torch.overrides.handle_torch_function(
                attention, given, *given, attn_mask, *rest, **settings
            )
        if not query.is_cuda or query.ndim != 4 or settings.pop("enable_gqa", False):
            return attend(*given, attn_mask, *rest, **settings)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, -torch.inf
            )
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        settings = dict(zip(("dropout_p", "is_causal"), rest, strict=False)) | settings
        # the backward pass needs the logarithms of the softmax sums
        needs_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        operator = torch.ops.aten._scaled_dot_product_efficient_attention.default
        return operator(*given, attn_mask, needs_sums, **settings)[0]

    return attention
