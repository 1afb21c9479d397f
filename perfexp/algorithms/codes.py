"""cuDNN's codes for algorithms, math types and data types (cudnn_ops.h and cudnn_graph.h, version 9.19)."""

from __future__ import annotations

from enum import IntEnum

import torch

from perfexp.algorithms.coverage import Pass


class Math(IntEnum):
    """Precision of products (cudnnMathType_t). For float32, all but `fma` permit TF32."""

    default = 0
    tensor_op = 1
    fma = 3


#: cudnnConvolutionFwdAlgo_t, cudnnConvolutionBwdDataAlgo_t, cudnnConvolutionBwdFilterAlgo_t, in order of their codes.
_NAMES = {
    Pass.forward: "implicit_gemm implicit_precomp_gemm gemm direct fft fft_tiling winograd winograd_nonfused",
    Pass.backward_data: "algo_0 algo_1 fft fft_tiling winograd winograd_nonfused",
    Pass.backward_filter: "algo_0 algo_1 fft algo_3 winograd winograd_nonfused fft_tiling",
}
CODES = {which: {name: code for code, name in enumerate(names.split())} for which, names in _NAMES.items()}

#: Algorithms of the backward passes (data, filter) by forward name: the closest match. All GEMMs map to the one with a
#: fixed summation order and tensor-core support.
BACKWARD = {
    **dict.fromkeys(("implicit_gemm", "implicit_precomp_gemm", "gemm", "direct"), ("algo_1", "algo_1")),
    "fft": ("fft", "fft"),
    "fft_tiling": ("fft_tiling", "fft_tiling"),
    "winograd": ("winograd", "winograd_nonfused"),
    "winograd_nonfused": ("winograd_nonfused", "winograd_nonfused"),
}

#: Algorithms whose summation order differs from call to call (NVIDIA's documentation of the enumerations).
UNREPEATABLE = {(Pass.backward_data, "algo_0"), (Pass.backward_filter, "algo_0"), (Pass.backward_filter, "algo_3")}

#: cudnnDataType_t.
DATA_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}


def math_of(dtype: torch.dtype) -> Math:
    """The math type that torch permits: TF32 by `torch.backends.cudnn.allow_tf32`, tensor cores for half precisions."""
    if dtype in (torch.float16, torch.bfloat16):
        return Math.tensor_op
    return Math.fma if dtype is torch.float32 and not torch.backends.cudnn.allow_tf32 else Math.default
