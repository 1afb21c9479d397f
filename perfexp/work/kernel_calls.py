"""Kernel calls: an operator as torch's dispatcher sees it, with its work, reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from perfexp.work import Geometry
from perfexp.work.contractions import Arguments, Term, contraction_of, geometry_of
from perfexp.work.costs import cost_of
from perfexp.work.tensors import Region, is_number, region_of, storage_of, tensors_in

#: Operator that is differentiable below torch's autograd, by perfexp's autograd function.
_OF_PERFEXP = "perfexp::convolution"
#: Operators that write without reading the previous value.
_OVERWRITING = (
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "exponential_",
)
#: Operators that change running statistics in training without declaring it in their schema.
_UNDECLARED = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
#: Operators that allocate memory without writing to it.
_RESERVING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
#: Operators that read only the shape of their tensor.
_SHAPED_LIKE = ("_like", "new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")
_WORK = ("macs", "flops", "input_gradient_flops", "weight_gradient_flops")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Work and memory traffic of an operator.

    Gradient FLOPs count only if the backward pass reaches the node.
    """

    operator: str
    macs: int
    flops: int
    input_gradient_flops: int
    weight_gradient_flops: int
    node: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    fresh: frozenset[int]
    convolution: Geometry | None
    known: bool = True
    backward_known: bool = True


def kernel_of(
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    outputs: Any,
    weights: Collection[int],
    node: int,
) -> Kernel | None:
    """Return the work of an operator call; None if it only made views.

    Args:
        weights: storages of parameters, buffers and values computed from them alone.
    """
    arguments = _by_name(operator, args, keywords)
    inputs, made = list(tensors_in(list(arguments.values()))), list(tensors_in(outputs))
    name = operator._schema.name.partition("::")[2]
    changed, overwrites = list[torch.Tensor](), name in _OVERWRITING
    for argument in operator._schema.arguments:
        overwrites |= argument.is_out
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += tensors_in(arguments.get(argument.name))
    if name in _UNDECLARED and arguments["training"]:
        changed += tensors_in([arguments["running_mean"], arguments["running_var"]])
    input_storages = set(map(storage_of, inputs))
    new = [tensor for tensor in made if storage_of(tensor) not in input_storages]
    if made and not new and (not changed or torch.Tag.inplace_view in operator.tags):
        return None
    if name in _RESERVING:
        inputs, written = [], []
    else:
        written = [*new, *changed]
    if name.endswith(_SHAPED_LIKE):
        inputs = []
    elif overwrites:
        unread = set(map(id, changed))
        inputs = [tensor for tensor in inputs if id(tensor) not in unread]
    formula = flop_registry.get(operator.overloadpacket)
    registered = formula and partial(formula, *args, **keywords, out_val=outputs)
    return Kernel(
        operator=operator._schema.name,
        node=node,
        reads=tuple(map(region_of, inputs)),
        writes=tuple(map(region_of, written)),
        fresh=frozenset(map(storage_of, new)),
        convolution=geometry_of(operator._schema.name, arguments),
        **_work(operator, arguments, outputs, weights, registered),
    )


def of_complex_convolution(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return a complex convolution's kernels with the work of four real convolutions.

    That is its definition. Torch computes three, and adds their operands and outputs.
    """
    counted, factors = [], iter((2, 1, 1))
    for kernel in kernels:
        factor = next(factors, 1) if kernel.convolution else 0
        work = {name: factor * getattr(kernel, name) for name in _WORK}
        counted.append(replace(kernel, **work))
    return counted


def _by_name(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    declared = operator._schema.arguments
    passed = {argument.name: value for argument, value in zip(declared, args, strict=False)}
    passed |= keywords
    for argument in declared:
        if argument.name not in passed:
            passed[argument.name] = argument.default_value
    return passed


def _work(
    operator: torch._ops.OpOverload,
    arguments: Arguments,
    outputs: Any,
    weights: Collection[int],
    registered: Callable[[], int] | None,
) -> dict[str, Any]:
    """Return the work fields of a kernel; gradients count if autograd records.

    Args:
        registered: returns FLOPs from torch's registry, which may have a formula for a custom
            operator.
    """
    terms, known = contraction_of(operator._schema.name, arguments, outputs), {}
    tensors = tensors_in(list(arguments.values()))
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    is_recorded = torch.is_grad_enabled() or operator._schema.name == _OF_PERFEXP
    if terms is None:
        flops = cost_of(operator, arguments, outputs)
        if flops is None:
            known = {
                "known": registered is not None,
                "backward_known": not (is_recorded and differentiable),
            }
            macs, rest = divmod(registered() if registered else 0, 2)
            terms = [Term(macs=macs, other_flops=rest)]
        else:
            own, others = list[torch.Tensor](), list[torch.Tensor]()
            if any(map(is_number, tensors_in(outputs))):
                for tensor in differentiable:
                    side = own if storage_of(tensor) in weights else others
                    side.append(tensor)
            terms = [Term(other_flops=flops, operands=(tuple(own), tuple(others)))]
    macs = sum_flops = of_inputs = of_weights = 0
    for term in terms:
        macs += term.macs
        sum_flops += term.flops
        for sources in term.operands:
            if not is_recorded or not any(source.requires_grad for source in sources):
                continue
            if all(storage_of(source) in weights for source in sources):
                of_weights += term.flops
            else:
                of_inputs += term.flops
    return {
        "macs": macs,
        "flops": sum_flops,
        "input_gradient_flops": of_inputs,
        "weight_gradient_flops": of_weights,
        **known,
    }
