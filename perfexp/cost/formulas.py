"""Count the FLOPs of all operators other than contractions, by rule.

There is no agreed convention; these rules follow the definitions. A function from the math library
(e.g. exp, tanh, erf), or an activation with its own operator, counts as 1 operation:

| operator | FLOPs |
|---|---|
| elementwise (arithmetic, activations; torch's tag `pointwise`) | 1 per floating-point output |
| sum, mean, extremes, products, cumulative forms, folding | 1 per input |
| adding at places (index_add, scatter_add) | 1 per added element |
| Euclidean norm | 2 per input |
| variance, standard deviation | 4 per input: mean; difference, square, sum |
| logarithm of a sum of exponentials | 4 per input |
| softmax, log-softmax | 5 per element |
| batch norm, with running statistics | 2 per element, and 2 more with weight and bias |
| batch, group, layer norm, with input statistics | 4 more per element |
| pooling | 1 per kernel element and output; adaptive: 1 per input |
| interpolation | nearest 0; linear 2·2ᵈ − 1, cubic 2·4ᵈ − 1 per output, in d dimensions |
| dropout in training | 2 per element |
| gated linear unit | 2 per output |
| fused LSTM cell, GRU cell | 13, 10 per hidden element |
| complex numbers: product, quotient, absolute value | 6, 11, 4; with a single complex factor 2 |
| other operators on complex numbers | twice as many as on real numbers |
| copies, casts, padding, lookups, sorting, random numbers, new tensors, views | 0 |

Operators without a line are not free but unknown, and are reported as uncounted.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from perfexp.cost.contractions import SOFTMAX_FLOPS, Arguments
from perfexp.cost.tensors import is_number, tensors_in


def _names(words: str) -> frozenset[str]:
    """Return operator names as a set, from a text with spaces between them."""
    return frozenset(words.split())


#: Elementwise operators that torch does not tag in some version.
_ELEMENTWISE = _names(
    "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward mish prelu "
    "_prelu_kernel relu6 rrelu rrelu_with_noise selu silu softplus softshrink threshold addcdiv "
    "addcmul lerp"
)
#: FLOPs per input.
_REDUCTIONS = {
    **dict.fromkeys(
        _names(
            "sum nansum mean amax amin aminmax max min prod cumsum cumprod cummax cummin col2im"
        ),
        1,
    ),
    **dict.fromkeys(_names("linalg_vector_norm norm"), 2),
    **dict.fromkeys(_names("var std var_mean std_mean"), 4),
    "logsumexp": 4,
}
#: FLOPs of elementwise operators per complex number: with two complex factors, and in any case.
_COMPLEX_FACTORS = {"mul": 6, "div": 11, "addcmul": 8, "addcdiv": 13}
_COMPLEX = {"abs": 4, "prod": 6, "cumprod": 6, "reciprocal": 5}
#: Argument that sets the number of additions.
_ADDED = {"index_add": "source", "scatter_add": "src"}
#: FLOPs per element of the first output.
_PER_OUTPUT: dict[str, int] = {
    "_softmax": SOFTMAX_FLOPS,
    "_safe_softmax": SOFTMAX_FLOPS,
    "_log_softmax": SOFTMAX_FLOPS,
    "native_dropout": 2,
    "glu": 2,
    "upsample_linear1d": 2 * 2 - 1,
    "upsample_bilinear2d": 2 * 2**2 - 1,
    "upsample_trilinear3d": 2 * 2**3 - 1,
    "upsample_bicubic2d": 2 * 4**2 - 1,
    "_thnn_fused_lstm_cell": 13,
    "_thnn_fused_gru_cell": 10,
}
_ADAPTIVE_POOLING = _names(
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d "
    "mkldnn_adaptive_avg_pool2d"
)
_POOLING = _names(
    "avg_pool2d avg_pool3d max_pool2d max_pool2d_with_indices max_pool3d_with_indices "
    "mkldnn_max_pool2d mkldnn_max_pool3d"
)
#: Batch norms, and whether they use input statistics (None: an argument decides).
_BATCH_NORMS: dict[str, bool | None] = {
    "native_batch_norm": None,
    "cudnn_batch_norm": None,
    "miopen_batch_norm": None,
    "_native_batch_norm_legit": None,
    "_native_batch_norm_legit_no_training": False,
    "_batch_norm_with_update": True,
    "batch_norm_with_update": True,
    "_batch_norm_no_update": False,
}
_OTHER_NORMS = _names("native_layer_norm native_group_norm")
#: Operators that move, compare, look up or make numbers. Views are recognized by their storage.
_FREE = _names(
    "_assert_async _assert_tensor_metadata _copy_from _index_put_impl _linalg_check_errors "
    "_reshape_alias _reshape_copy _to_copy _unsafe_index _unsafe_index_put _unsafe_view "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d all any arange "
    "argmax argmin argsort as_strided bernoulli block_diag bucketize cat channel_shuffle clone "
    "complex constant_pad_nd contiguous copy count_nonzero detach diag_embed diagonal_copy "
    "embedding empty_like expand_copy exponential eye fill flip full_like gather im2col index "
    "index_copy index_fill index_put index_select is_same_size isin kthvalue lift_fresh "
    "lift_fresh_copy masked_fill masked_scatter masked_select median mode native_channel_shuffle "
    "new_empty new_empty_strided new_full new_ones new_zeros nonzero nonzero_static normal "
    "one_hot ones_like pixel_shuffle pixel_unshuffle rand_like randint_like randn_like random "
    "reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave "
    "replication_pad1d replication_pad2d replication_pad3d resize roll rot90 scatter searchsorted "
    "select_scatter set_ slice_scatter sort split_copy split_with_sizes_copy stack t_copy topk "
    "transpose_copy tril triu unfold_copy uniform unique_consecutive unsafe_split "
    "unsafe_split_with_sizes unsqueeze_copy upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d view_copy where zero zeros_like"
)


def cost_of(operator: torch._ops.OpOverload, arguments: Arguments, outputs: Any) -> int | None:
    """Return the FLOPs of an operator other than a contraction; None if unknown.

    `kernel_calls` asks for every operator that `contraction_of` does not know.
    """
    namespace, _, name = operator._schema.name.partition("::")
    if name not in _FREE:  # some free operators end in an underscore, such as `set_`
        name = name.removesuffix("_")
    tensors, results = list(tensors_in(list(arguments.values()))), list(tensors_in(outputs))
    if name in _FREE or not tensors:
        return 0
    if name in _ELEMENTWISE or torch.Tag.pointwise in operator.tags:
        flops: int | None = sum(tensor.numel() for tensor in results if is_number(tensor))
    elif namespace != "aten":
        return None
    else:
        flops = _by_table(name, arguments, tensors[0].numel(), results)
    return flops and flops * _complex_factor(name, arguments)


def _complex_factor(name: str, arguments: Arguments) -> int:
    """Return the factor for complex numbers: 1 without them, otherwise see the table above."""
    values = [value for value in arguments.values() if isinstance(value, torch.Tensor | complex)]
    are_complex = [isinstance(value, complex) or value.is_complex() for value in values]
    if sum(are_complex) > 1 and name in _COMPLEX_FACTORS:
        return _COMPLEX_FACTORS[name]
    if any(are_complex):
        return _COMPLEX.get(name, 2)
    return 1


def _by_table(
    name: str, arguments: Arguments, inputs: int, results: list[torch.Tensor]
) -> int | None:
    """Return the FLOPs of a reduction, an addition at places, a pooling, a norm and the like.

    None means that the operator is in no table. Complex numbers count once.

    Args:
        name: operator name without its namespace.
        inputs: number of elements in the first tensor argument.
        results: output tensors.
    """
    if name in _REDUCTIONS:
        if any(map(is_number, results)):
            return inputs * _REDUCTIONS[name]
        return 0
    if name in _ADDED:
        return int(arguments[_ADDED[name]].numel())
    if name in _PER_OUTPUT:
        return results[0].numel() * _PER_OUTPUT[name]
    if name in _ADAPTIVE_POOLING:
        return inputs
    if name in _POOLING:
        kernel = arguments["kernel_size"]
        dimensions = 3 if "3d" in name else 2
        elements = int(prod(kernel) if len(kernel) > 1 else kernel[0] ** dimensions)
        return results[0].numel() * elements
    return _norm(name, arguments, inputs)


def _norm(name: str, arguments: Mapping[str, Any], inputs: int) -> int | None:
    """Return the FLOPs of a normalization of `inputs` elements; None for other operators."""
    affine = 2 if isinstance(arguments.get("weight"), torch.Tensor) else 0
    if name in _BATCH_NORMS:
        has_input_statistics = _BATCH_NORMS[name]
        if has_input_statistics is None:
            has_input_statistics = bool(arguments.get("training", arguments.get("train")))
        return inputs * ((6 if has_input_statistics else 2) + affine)
    if name in _OTHER_NORMS:
        return inputs * (6 + affine)
    if name == "_fused_rms_norm":
        # square, sum; product with the reciprocal root, and with the weight
        return inputs * (3 + affine // 2)
    return None
