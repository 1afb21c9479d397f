"""Triton: convolution kernels of ours for NVIDIA GPUs."""

from __future__ import annotations

import torch

from perfexp.algorithms.convolution import Convolution


def available() -> str | None:
    return "triton is not installed"


def why_not_direct(convolution: Convolution, dtype: torch.dtype) -> str | None:
    return None


def why_not_winograd(convolution: Convolution, dtype: torch.dtype) -> str | None:
    return None


def direct(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    raise NotImplementedError


winograd = direct
