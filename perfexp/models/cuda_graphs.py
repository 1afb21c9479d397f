"""Capture calls as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from perfexp.devices import Device
from perfexp.errors import PerfexpError, Unsupported, Waits

#: Calls on the stream of a CUDA graph before it is captured. Source: torch's notes on CUDA graphs.
_CALLS_BEFORE_CAPTURE = 3


def captured(
    call: Callable[[], object],
    device: Device,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> Callable[[], object]:
    """A function that launches a call of the module on fixed tensors as one CUDA graph; see `Session.capture`."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with _explained(device):
        with torch.cuda.stream(stream):
            if device.waits_inside(
                call
            ):  # on this stream, to which autograd binds the rest of a call
                raise Waits
            if optimizer is not None:
                _make_capturable(optimizer)
            for _ in range(_CALLS_BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        module.zero_grad(set_to_none=True)
        return _launchable(call, stream=stream)


def captures(device: Device) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """A function that captures calls without a module as CUDA graphs, in a memory pool that all of them share.

    It runs a call once, and raises `Unsupported` if the call cannot be captured. The tensors that a call reads have to
    live as long as its graph. The graphs overwrite each other's results.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(call: Callable[[], object]) -> Callable[[], object]:
        with _explained(device):
            call()
            # the mode permits other threads, such as those of a data loader, to call CUDA
            return _launchable(call, pool=pool, capture_error_mode="thread_local")

    return capture


def _launchable(call: Callable[[], object], **options: Any) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    restored = torch.cuda.stream(
        torch.cuda.current_stream()
    )  # a failed capture leaves its own stream current
    with restored, torch.cuda.graph(graph, **options):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


@contextmanager
def _explained(device: Device) -> Iterator[None]:
    """Raise `Unsupported` for the errors of a capture, apart from those of memory."""
    try:
        yield
    except PerfexpError:
        raise
    except Exception as error:  # of CUDA, or of an optimizer with more host state than its steps
        _forget_capture()
        if device.is_out_of_memory(error):
            raise
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise Unsupported(f"the call can't be captured as a CUDA graph: {why}") from error


def _make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Move all state of Adam and similar optimizers to the device, since a graph replay cannot read the host.

    torch expects this setting at construction and then applies it to all steps, at the cost of some kernels.
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
    """Restore normal random numbers: a failed capture leaves its mark on their generator."""
    with suppress(RuntimeError):  # of a device that is lost
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
