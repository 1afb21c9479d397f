"""Capture the calls of a module as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from perfexp.devices import Device
from perfexp.errors import PerfexpError, Unsupported, Waits

#: Calls on the stream of a CUDA graph before it is captured. Source: torch's notes on CUDA graphs.
_CALLS_BEFORE_CAPTURE = 3


def captured(
    call: Callable[[], object], device: Device, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Callable[[], object]:
    """A function that launches a call of the module on fixed tensors as one CUDA graph; see `Session.capture`."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            if device.waits_inside(call):  # on this stream, to which autograd binds the rest of a call
                raise Waits
            if optimizer is not None:
                _make_capturable(optimizer)
            for _ in range(_CALLS_BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        module.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=stream):
            call()
        graph.replay()
        torch.cuda.synchronize()
    except PerfexpError:
        raise
    except Exception as error:  # of CUDA, or of an optimizer with more host state than its steps
        _forget_capture()
        if device.is_out_of_memory(error):
            raise
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise Unsupported(f"the call can't be captured as a CUDA graph: {why}") from error
    return graph.replay


def _make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Move all state of Adam and similar optimizers to the device, since a graph replay cannot read the host.

    torch expects this setting at construction and then applies it to all steps, at the cost of some kernels.
    """
    for group in optimizer.param_groups:
        if group.get("capturable") is False:
            group["capturable"] = True
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                state |= {key: value.to(parameter.device) for key, value in state.items() if torch.is_tensor(value)}


def _forget_capture() -> None:
    """Restore normal random numbers: a failed capture leaves its mark on their generator."""
    with suppress(RuntimeError):  # of a device that is lost
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
