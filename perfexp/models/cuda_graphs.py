"""Functions that capture calls as CUDA graphs.

A graph is a recorded sequence of kernels on fixed tensors that one launch repeats, without the
host's work for each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from perfexp.devices import Device
from perfexp.errors import PerfexpError, Unsupported, Waits

#: Warm-up calls on the capture stream. Source: torch's notes on CUDA graphs.
_CALLS_BEFORE_CAPTURE = 3


def captured(
    call: Callable[[], object],
    device: Device,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> Callable[[], object]:
    """Return a function that launches a module call on fixed tensors as one CUDA graph.

    The call first runs three times on the capture stream. Raises `Waits` if it synchronizes,
    `Unsupported` if it cannot be captured for another reason.

    Args:
        optimizer: optimizer that the call steps, if any; its state moves to the device.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with _explained(device):
        with torch.cuda.stream(stream):
            # on this stream, because autograd runs the backward pass on the forward stream
            if device.waits_inside(call):
                raise Waits
            if optimizer is not None:
                _make_capturable(optimizer)
            for _ in range(_CALLS_BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        module.zero_grad(set_to_none=True)
        return _launchable(call, stream=stream)


def captures(device: Device) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Return a function that captures calls without a module as CUDA graphs.

    Races between convolution algorithms use it for single layers. The graphs share a memory pool
    and overwrite each other's results. Each call runs once before its capture. Tensors that a call
    reads must live as long as its graph. Raises `Unsupported` if a call cannot be captured.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(call: Callable[[], object]) -> Callable[[], object]:
        with _explained(device):
            call()
            # other threads, for example in a data loader, may call CUDA
            return _launchable(call, pool=pool, capture_error_mode="thread_local")

    return capture


def _launchable(call: Callable[[], object], **options: Any) -> Callable[[], object]:
    """Capture a call, launch it once, and return the function that launches it.

    Args:
        options: further arguments of `torch.cuda.graph`.
    """
    graph = torch.cuda.CUDAGraph()
    # a failed capture leaves its own stream current
    restored = torch.cuda.stream(torch.cuda.current_stream())
    with restored, torch.cuda.graph(graph, **options):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


@contextmanager
def _explained(device: Device) -> Iterator[None]:
    """Raise `Unsupported` for capture errors in the context.

    Errors of perfexp and out-of-memory errors pass unchanged.
    """
    try:
        yield
    except PerfexpError:
        raise
    except Exception as error:
        # from CUDA, or from an optimizer with host state beyond its step count
        _forget_capture()
        if device.is_out_of_memory(error):
            raise
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise Unsupported(f"the call can't be captured as a CUDA graph: {why}") from error


def _make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Move optimizer state to the device, for example for Adam.

    A graph replay cannot read host memory. torch expects the setting `capturable` at construction
    and then applies it to every step, which costs some kernels. `captured` calls it before the
    first warm-up call.
    """
    for group in optimizer.param_groups:
        if group.get("capturable") is False:
            group["capturable"] = True
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                state |= {
                    key: value.to(parameter.device)
                    for key, value in state.items()
                    if torch.is_tensor(value)
                }


def _forget_capture() -> None:
    """Restore the random number generator after a failed capture.

    torch leaves it in capture mode, where later draws fail.
    """
    # the device may be lost
    with suppress(RuntimeError):
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
