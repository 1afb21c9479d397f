"""Random initial weights, drawn once for all workers from one fork server.

Drawing weights takes two seconds for vgg16. The fork server passes its workers an anonymous file.
The first worker saves its weights there, after a digest of the model and seed; later workers read
them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch.overrides import TorchFunctionMode

from perfexp.host import fork_server

#: Weights are kept between workers up to this share of the free memory.
_MOST_OF_MEMORY = 0.05
#: Functions in torch.nn.init and torch.Tensor that fill a parameter with random values, and those
#: that `trunc_normal_`, timm's and torch 2.11's, applies to the values that it has drawn.
_DRAWS = {"normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_"}
_DRAWS |= {"erfinv_", "mul_", "add_", "clamp_"}
#: Functions in torch.nn.init that do not look at the values which `normal_` has drawn. Zeros would
#: take as long as reading the file.
_BLIND = {"kaiming_normal_", "_no_grad_normal_"}


class _Undrawn(TorchFunctionMode):
    """A mode that skips filling parameters with random values, for weights that a file replaces."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, except one that draws a parameter's values.

        The parameter is returned as it is, because the file's values replace it.
        """
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        if getattr(func, "__name__", "") not in _DRAWS or not isinstance(
            filled, torch.nn.Parameter
        ):
            return func(*args, **kwargs)
        caller = sys._getframe(1).f_code.co_name
        if func is torch.Tensor.normal_ and caller not in _BLIND:
            # a truncated distribution draws again until values lie inside, as zeros do
            filled.zero_()
        return filled


def initialized(
    build: Callable[[], torch.nn.Module], *identity: object, seed: int
) -> torch.nn.Module:
    """Return the module that `build` makes on the CPU with a seed.

    If an earlier worker saved the same weights, this worker reads them instead of drawing them.

    Args:
        identity: everything besides the seed that determines the module.
    """
    torch.manual_seed(seed)
    if (file := fork_server.weights_file) is None:
        return build()
    digest = hashlib.sha256(repr((identity, seed)).encode()).digest()
    with _locked(file):
        if os.pread(file, len(digest), 0) == digest:
            with _Undrawn():
                module = build()
            state = torch.get_rng_state()  # the state after drawing
            _transfer(os.preadv, file, [*_tensors(module), state], len(digest))
            torch.set_rng_state(state)
            return module
        module = build()
        os.ftruncate(file, 0)
        tensors = [*_tensors(module), torch.get_rng_state()]
        is_small = (
            sum(tensor.nbytes for tensor in tensors)
            < _MOST_OF_MEMORY * psutil.virtual_memory().available
        )
        if is_small and all(
            tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
        ):
            _transfer(os.pwritev, file, tensors, len(digest))
            # written last: a worker that is killed earlier leaves no digest
            os.pwrite(file, digest, 0)
    return module


@contextmanager
def _locked(file: int) -> Iterator[None]:
    """Lock the file against the server's other workers; ranks start together."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers that the file holds, in order."""
    return [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]


def _transfer(
    move: Callable[..., int], file: int, tensors: Sequence[torch.Tensor], offset: int
) -> None:
    """Read tensors from a file or write them to it, one after the other.

    Args:
        move: `os.preadv` or `os.pwritev`.
        file: file descriptor.
        offset: offset of the first tensor in bytes.
    """
    for tensor in tensors:
        memory, end = tensor.reshape(-1).view(torch.uint8).numpy(), offset + tensor.nbytes
        while offset < end:
            offset += move(file, [memory[memory.size - (end - offset) :]], offset)
