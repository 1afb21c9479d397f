"""Convert a recorded call to rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any

from perfexp.work import Row, Shape
from perfexp.work.kernel_calls import Kernel
from perfexp.work.tape import Call, Operation
from perfexp.work.tensors import Region, distinct_bytes, storage_of, tensors_in


class RowMaker:
    """Makes rows of a recorded call.

    Args:
        reached: sequence numbers of the autograd nodes that a backward pass reaches; None without a backward pass.
    """

    def __init__(self, parameters: Mapping[int, int], own: Collection[int], reached: Collection[int] | None) -> None:
        self._unread: MutableMapping[int, int] = dict(parameters)
        self._own = own
        self._reached = reached

    def rows(self, call: Call) -> Iterator[Row]:
        """Rows of a call, in order of execution."""
        if call.whole and not any(isinstance(step, Call) for step in call.steps):
            kernels = [kernel for step in call.steps if isinstance(step, Operation) for kernel in step.kernels]
            yield self._row(call, None, call.kind, call, kernels)
            return
        number = 0
        for step in call.steps:
            if isinstance(step, Call):
                yield from self.rows(step)
            elif step.dispatched:
                yield self._row(call, number, step.name, step, step.kernels)
                number += 1

    def _row(self, call: Call, operation: int | None, kind: str, step: Call | Operation, kernels: list[Kernel]) -> Row:
        made = {storage_of(tensor) for tensor in tensors_in(step.returned)}
        reads, written = _external_traffic(kernels, made)
        fresh = set().union(*(kernel.fresh for kernel in kernels))
        convolutions = [kernel.convolution for kernel in kernels if kernel.convolution is not None]
        return Row(
            path=call.path,
            call=call.number,
            operation=operation,
            kind=kind,
            macs=sum(kernel.macs for kernel in kernels),
            flops=sum(kernel.flops for kernel in kernels),
            input_gradient_flops=self._gradient(kernels, lambda kernel: kernel.input_gradient_flops),
            weight_gradient_flops=self._gradient(kernels, lambda kernel: kernel.weight_gradient_flops),
            bytes_min=distinct_bytes(reads) + distinct_bytes(written),
            activation_bytes=distinct_bytes(region for region in written if region.storage in fresh),
            parameters=sum(self._unread.pop(storage, 0) for storage in {region.storage for region in reads}),
            inputs=self._shapes(step.given),
            outputs=tuple(tuple(tensor.shape) for tensor in tensors_in(step.returned)),
            convolution=convolutions[0] if len(convolutions) == 1 else None,
        )

    def _gradient(self, kernels: list[Kernel], of: Callable[[Kernel], int]) -> int | None:
        if self._reached is None:
            return None
        return sum(of(kernel) for kernel in kernels if kernel.node in self._reached)

    def _shapes(self, given: Any) -> tuple[Shape, ...]:
        return tuple(tuple(tensor.shape) for tensor in tensors_in(given) if storage_of(tensor) not in self._own)


def _external_traffic(kernels: list[Kernel], returned: Collection[int]) -> tuple[list[Region], list[Region]]:
    """Reads of memory that the row did not create, and writes to such memory or to what it returns."""
    created: set[int] = set()
    reads: list[Region] = []
    written: list[Region] = []
    for kernel in kernels:
        reads += [region for region in kernel.reads if region.storage not in created]
        created |= kernel.fresh
        written += [region for region in kernel.writes if region.storage not in created or region.storage in returned]
    return reads, written
