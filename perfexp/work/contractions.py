"""MACs of the operators that multiply and accumulate.

The counts follow from shapes by the operators' definitions. The forward formulas agree with those of
`torch.utils.flop_counter`. Its backward formula of a convolution multiplies the gradient of the weights by the groups
once too often, its fused attention counts recomputed scores, and none separates the gradients. Its registry is only
used for operators without a formula here (see `kernel_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from perfexp.work import Geometry, Shape
from perfexp.work.tensors import tensors_in

Arguments = Mapping[str, Any]
Tensors = tuple[torch.Tensor, ...]

#: FLOPs of a softmax per element: largest, difference, exponential, sum, quotient.
SOFTMAX_FLOPS = 5
#: Real MACs of a complex one.
COMPLEX_MACS = 4


@dataclass(frozen=True, kw_only=True)
class Product:
    """A sum of products, linear in each operand, so that each operand's gradient takes as many MACs as the sum.

    `operands` has the tensors that each operand is computed from: mostly itself.
    """

    macs: int
    operands: tuple[Tensors, ...]


@dataclass(frozen=True, kw_only=True)
class Contraction:
    """The products of an operator, and the FLOPs between them (the softmax of an attention)."""

    products: tuple[Product, ...]
    other_flops: int = 0
    other_operands: Tensors = ()


Formula = Callable[[Arguments, Any], Contraction]


def contraction_of(operator: str, arguments: Arguments, outputs: Any) -> Contraction | None:
    """The products of an operator (`aten::mm`) with arguments by name; None for other, or unknown, operators."""
    formula = _FORMULAS.get(operator)
    if formula is None:
        return None
    contraction = formula(arguments, outputs)
    if not any(tensor.is_complex() for tensor in tensors_in(outputs)):
        return contraction
    products = (replace(product, macs=COMPLEX_MACS * product.macs) for product in contraction.products)
    return replace(contraction, products=tuple(products))


def geometry_of(operator: str, arguments: Arguments) -> Geometry | None:
    """The convolution that an operator computes in a forward pass, or None."""
    if operator not in _CONVOLUTIONS:
        return None
    weight, groups = arguments["weight"], int(arguments["groups"])
    first, second, *kernel = weight.shape
    transposed = bool(arguments.get("transposed", False))
    return Geometry(
        in_channels=first if transposed else second * groups,
        out_channels=second * groups if transposed else first,
        kernel=tuple(kernel),
        stride=_directions(arguments["stride"], len(kernel)),
        padding=_directions(arguments["padding"], len(kernel)),
        dilation=_directions(arguments["dilation"], len(kernel)),
        groups=groups,
        transposed=transposed,
    )


def _directions(values: int | Sequence[int], count: int) -> Shape:
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * count if len(values) == 1 else values


def _single(macs: int, *operands: torch.Tensor) -> Contraction:
    return Contraction(products=(Product(macs=macs, operands=tuple((operand,) for operand in operands)),))


def _matrices(left: str, right: str) -> Formula:
    """(…, m, k) × (…, k, n): each element on the left meets n on the right; for vectors n is 1."""

    def formula(arguments: Arguments, _: Any) -> Contraction:
        first, second = arguments[left], arguments[right]
        return _single(first.numel() * (second.shape[-1] if second.dim() > 1 else 1), first, second)

    return formula


def _linear(arguments: Arguments, _: Any) -> Contraction:
    inputs, weight = arguments["input"], arguments["weight"]
    return _single(inputs.numel() * (weight.shape[0] if weight.dim() > 1 else 1), inputs, weight)


def _trilinear(arguments: Arguments, _: Any) -> Contraction:
    """Σ a·b·c over the broadcast shape of the three; the second multiplication is not counted separately."""
    operands = [arguments[name] for name in ("i1", "i2", "i3")]
    for position, operand in enumerate(operands):
        for dimension in arguments[f"expand{position + 1}"]:
            operand = operand.unsqueeze(dimension)
        operands[position] = operand
    shape: Shape = torch.broadcast_shapes(*(operand.shape for operand in operands))  # type: ignore[no-untyped-call]
    return _single(prod(shape), *operands)


def _convolution_macs(arguments: Arguments, inputs: torch.Tensor, outputs: torch.Tensor) -> int:
    """Each output meets one filter (O, C / G, …) of its group; transposed, each input one of (C, O / G, …)."""
    met = inputs if arguments.get("transposed", False) else outputs
    return int(met.numel() * prod(arguments["weight"].shape[1:]))


def _convolution(arguments: Arguments, outputs: Any) -> Contraction:
    inputs = arguments["input" if "input" in arguments else "self"]
    outputs = next(iter(outputs)) if isinstance(outputs, (tuple, list)) else outputs
    return _single(_convolution_macs(arguments, inputs, outputs), inputs, arguments["weight"])


def _gradients_of_convolution(arguments: Arguments, _: Any) -> Contraction:
    """One gradient, or those that the mask selects; each takes the MACs of the convolution."""
    grad, inputs = arguments["grad" if "grad" in arguments else "grad_output"], arguments["input"]
    macs = _convolution_macs(arguments, inputs, grad)
    wanted = arguments.get("output_mask", (True, False))[:2]
    others = [other for other, asked in zip((arguments["weight"], inputs), wanted, strict=True) if asked]
    return Contraction(products=tuple(Product(macs=macs, operands=((grad,), (other,))) for other in others))


def _attention(arguments: Arguments, _: Any) -> Contraction:
    """Softmax(q kᵀ) v without regard to masks; q is (N, heads, L, E), k (…, S, E), v (…, S, Ev)."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    scores = query.numel() // query.shape[-1] * key.shape[-2]
    return Contraction(
        products=(
            Product(macs=scores * query.shape[-1], operands=((query,), (key,))),
            Product(macs=scores * value.shape[-1], operands=((query, key), (value,))),
        ),
        other_flops=SOFTMAX_FLOPS * scores,
        other_operands=(query, key),
    )


def _recurrence(inputs: torch.Tensor, weights: Sequence[torch.Tensor], stride: int, directions: int) -> Contraction:
    """Each matrix of a recurrent network meets each step of each sequence; elementwise work is not counted.

    Inputs are (steps, N, features), or (steps of all sequences, features) if packed. A layer has `stride` weights per
    direction: input matrix, hidden matrix, biases, projection.
    """
    steps = inputs.numel() // inputs.shape[-1]
    everything = (inputs, *weights)
    products = []
    for position, weight in enumerate(weights):
        if weight.dim() != 2:
            continue
        first = position % stride == 0 and position < stride * directions
        products.append(Product(macs=steps * weight.numel(), operands=((inputs,) if first else everything, (weight,))))
    return Contraction(products=tuple(products))


def _cudnn_rnn(arguments: Arguments, _: Any) -> Contraction:
    directions = 2 if arguments["bidirectional"] else 1
    return _recurrence(arguments["input"], arguments["weight"], int(arguments["weight_stride0"]), directions)


def _mkldnn_rnn(arguments: Arguments, _: Any) -> Contraction:
    return _recurrence(arguments["input"], [arguments["weight0"], arguments["weight1"]], 2, 1)


#: Convolution operators of forward passes; perfexp's own computes forced algorithms.
_CONVOLUTIONS = (
    *("aten::convolution", "aten::_convolution", "aten::convolution_overrideable", "aten::cudnn_convolution"),
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
    **dict.fromkeys(("aten::mm", "aten::_int_mm", "aten::_scaled_mm", "aten::bmm"), _matrices("self", "mat2")),
    **dict.fromkeys(("aten::addmm", "aten::_addmm_activation"), _matrices("mat1", "mat2")),
    **dict.fromkeys(("aten::baddbmm", "aten::addbmm"), _matrices("batch1", "batch2")),
    "aten::mv": _matrices("self", "vec"),
    "aten::addmv": _matrices("mat", "vec"),
    "aten::dot": _matrices("self", "tensor"),
    "aten::vdot": _matrices("self", "other"),
    "aten::linear": _linear,
    "aten::_trilinear": _trilinear,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_GRADIENTS, _gradients_of_convolution),
    **{f"aten::_scaled_dot_product_{variant}": _attention for variant in _ATTENTIONS},
    "aten::_cudnn_rnn": _cudnn_rnn,
    "aten::mkldnn_rnn_layer": _mkldnn_rnn,
}
