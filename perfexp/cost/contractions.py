"""Count the MACs of contractions: operators that multiply and accumulate.

These are matrix products, convolutions, attention and recurrent networks. Counts follow from shapes
and the operators' definitions. The forward formulas agree with `torch.utils.flop_counter`. Torch's
backward formulas do not separate the gradients. Its convolution multiplies weight gradients by the
group count once too often, and its fused attention counts recomputed scores. Its registry is only
used for operators without a formula here (see `kernel_calls`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from perfexp.cost import Geometry, Shape
from perfexp.cost.tensors import tensors_in

Arguments = Mapping[str, Any]
Tensors = tuple[torch.Tensor, ...]

#: Softmax FLOPs per element: largest, difference, exponential, sum, quotient.
SOFTMAX_FLOPS = 5
#: Real MACs per complex MAC.
COMPLEX_MACS = 4


@dataclass(frozen=True, kw_only=True)
class Term:
    """Part of an operator's work, with its operands.

    The gradient of each operand takes as many FLOPs as the term itself. This holds for a sum of
    products, because it is linear in each operand.

    Attributes:
        other_flops: FLOPs that are not multiply-accumulates.
        operands: for each operand, the tensors that it is computed from: mostly itself.
    """

    macs: int = 0
    other_flops: int = 0
    operands: tuple[Tensors, ...] = ()

    @property
    def flops(self) -> int:
        """Return the FLOPs of the term."""
        return 2 * self.macs + self.other_flops


#: Returns an operator's terms from its arguments by name and its output.
Formula = Callable[[Arguments, Any], list[Term]]


def contraction_of(operator: str, arguments: Arguments, outputs: Any) -> list[Term] | None:
    """Return the terms of a contraction, given its arguments by name; None for other operators.

    `kernel_calls` asks it for each operator that runs.

    Args:
        operator: operator name, for example `aten::mm`.
    """
    formula = _FORMULAS.get(operator)
    if formula is None:
        return None
    parts = COMPLEX_MACS if any(tensor.is_complex() for tensor in tensors_in(outputs)) else 1
    return [replace(term, macs=parts * term.macs) for term in formula(arguments, outputs)]


def geometry_of(operator: str, arguments: Arguments) -> Geometry | None:
    """Return the geometry of a forward convolution; None for other operators.

    The layer table shows it.

    Args:
        operator: operator name, for example `aten::convolution`.
    """
    if operator not in _CONVOLUTIONS:
        return None
    groups = int(arguments["groups"])
    # weights are (out, in / groups, …), or (in, out / groups, …) if transposed
    out_channels, group_channels, *kernel = arguments["weight"].shape
    in_channels = group_channels * groups
    transposed = bool(arguments.get("transposed", False))
    if transposed:
        in_channels, out_channels = out_channels, in_channels
    return Geometry(
        in_channels=in_channels,
        out_channels=out_channels,
        kernel=tuple(kernel),
        stride=_by_dimension(arguments["stride"], len(kernel)),
        padding=_by_dimension(arguments["padding"], len(kernel)),
        dilation=_by_dimension(arguments["dilation"], len(kernel)),
        groups=groups,
        transposed=transposed,
    )


def _by_dimension(values: int | Sequence[int], count: int) -> Shape:
    """Return `count` values; a single value holds for all dimensions."""
    values = (values,) if isinstance(values, int) else tuple(values)
    if len(values) == 1:
        return values * count
    return values


def _single(macs: int, *operands: torch.Tensor) -> list[Term]:
    """Return a contraction as a single term with these operands."""
    return [Term(macs=macs, operands=tuple((operand,) for operand in operands))]


def _matrices(left: str, right: str, dimension: int = -1) -> Formula:
    """Return a formula for a matrix product (…, m, k) × (…, k, n).

    Each element on the left meets n elements on the right. For vectors n is 1.

    Args:
        left: name of the left argument.
        right: name of the right argument.
        dimension: dimension of the right argument with size n.
    """

    def formula(arguments: Arguments, _: Any) -> list[Term]:
        first, second = arguments[left], arguments[right]
        macs = first.numel()
        if second.dim() > 1:
            macs *= second.shape[dimension]
        return _single(macs, first, second)

    return formula


def _trilinear(arguments: Arguments, _: Any) -> list[Term]:
    """Count `aten::_trilinear`: the sum of a·b·c over the broadcast shape.

    The second product of each element is free.
    """
    operands = [arguments[name] for name in ("i1", "i2", "i3")]
    for position, operand in enumerate(operands):
        for dimension in arguments[f"expand{position + 1}"]:
            operand = operand.unsqueeze(dimension)
        operands[position] = operand
    shapes = [operand.shape for operand in operands]
    shape: Shape = torch.broadcast_shapes(*shapes)
    return _single(prod(shape), *operands)


def _convolution_macs(arguments: Arguments, inputs: torch.Tensor, outputs: torch.Tensor) -> int:
    """Return a convolution's MACs.

    Each output meets a filter (O, C / G, …) in its group. If transposed, each input meets a filter
    (C, O / G, …).
    """
    side = inputs if arguments.get("transposed", False) else outputs
    return int(side.numel() * prod(arguments["weight"].shape[1:]))


def _convolution(arguments: Arguments, outputs: Any) -> list[Term]:
    """Count a forward convolution; some operators return further tensors after the output."""
    inputs = arguments["input" if "input" in arguments else "self"]
    outputs = next(iter(outputs)) if isinstance(outputs, (tuple, list)) else outputs
    return _single(_convolution_macs(arguments, inputs, outputs), inputs, arguments["weight"])


def _gradients_of_convolution(arguments: Arguments, _: Any) -> list[Term]:
    """Count a convolution's gradients, each with the forward MACs.

    `convolution_backward` computes those in its mask (input, weight); perfexp's own operators
    compute a single gradient.
    """
    grad, inputs = arguments["grad" if "grad" in arguments else "grad_output"], arguments["input"]
    macs = _convolution_macs(arguments, inputs, grad)
    output_mask = arguments.get("output_mask", (True, False))[:2]
    others = itertools.compress((arguments["weight"], inputs), output_mask)
    return [Term(macs=macs, operands=((grad,), (other,))) for other in others]


def _attention(arguments: Arguments, _: Any) -> list[Term]:
    """Count softmax(q kᵀ) v without regard to masks.

    Shapes are q (N, heads, L, E), k (…, S, E) and v (…, S, Ev).
    """
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    scores = query.numel() // query.shape[-1] * key.shape[-2]
    return [
        Term(macs=scores * query.shape[-1], operands=((query,), (key,))),
        Term(other_flops=SOFTMAX_FLOPS * scores, operands=((query, key),)),
        Term(macs=scores * value.shape[-1], operands=((query, key), (value,))),
    ]


def _recurrence(
    inputs: torch.Tensor, weights: Sequence[torch.Tensor], stride: int, directions: int
) -> list[Term]:
    """Count a recurrent network: each weight matrix multiplies each step of each sequence.

    Elementwise work is not counted.

    Args:
        inputs: (steps, N, features), or (steps of all sequences, features) if packed.
        weights: matrices (2-D) and biases, which are free, by layer and direction.
        stride: weights per layer and direction: input matrix, hidden matrix, biases, projection.
        directions: 2 for a bidirectional network.
    """
    steps = inputs.numel() // inputs.shape[-1]
    terms = []
    for position, weight in enumerate(weights):
        if weight.dim() == 2:
            is_first = position % stride == 0 and position < stride * directions
            sources = (inputs,) if is_first else (inputs, *weights)
            terms.append(Term(macs=steps * weight.numel(), operands=(sources, (weight,))))
    return terms


def _cudnn_rnn(arguments: Arguments, _: Any) -> list[Term]:
    """Count `aten::_cudnn_rnn`, a recurrent network on CUDA."""
    directions = 2 if arguments["bidirectional"] else 1
    return _recurrence(
        arguments["input"], arguments["weight"], int(arguments["weight_stride0"]), directions
    )


def _mkldnn_rnn(arguments: Arguments, _: Any) -> list[Term]:
    """Count `aten::mkldnn_rnn_layer`, one direction of one recurrent layer on a CPU."""
    return _recurrence(arguments["input"], [arguments["weight0"], arguments["weight1"]], 2, 1)


#: Forward convolution operators; perfexp's own operator computes forced algorithms.
_CONVOLUTIONS = (
    *(
        "aten::convolution",
        "aten::_convolution",
        "aten::convolution_overrideable",
        "aten::cudnn_convolution",
    ),
    *("aten::miopen_convolution", "aten::mkldnn_convolution", "perfexp::convolution"),
)
_GRADIENTS = (
    "aten::convolution_backward",
    "perfexp::convolution_backward_data",
    "perfexp::convolution_backward_filter",
)
#: Variants of aten::_scaled_dot_product_….
_ATTENTIONS = (
    *("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"),
    *("fused_attention_overrideable", "attention_math_for_mps"),
)
_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(
        ("aten::mm", "aten::_int_mm", "aten::_scaled_mm", "aten::bmm"), _matrices("self", "mat2")
    ),
    **dict.fromkeys(("aten::addmm", "aten::_addmm_activation"), _matrices("mat1", "mat2")),
    **dict.fromkeys(("aten::baddbmm", "aten::addbmm"), _matrices("batch1", "batch2")),
    "aten::mv": _matrices("self", "vec"),
    "aten::addmv": _matrices("mat", "vec"),
    "aten::dot": _matrices("self", "tensor"),
    "aten::vdot": _matrices("self", "other"),
    "aten::linear": _matrices("input", "weight", 0),
    "aten::_trilinear": _trilinear,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_GRADIENTS, _gradients_of_convolution),
    **{f"aten::_scaled_dot_product_{variant}": _attention for variant in _ATTENTIONS},
    "aten::_cudnn_rnn": _cudnn_rnn,
    "aten::mkldnn_rnn_layer": _mkldnn_rnn,
}
