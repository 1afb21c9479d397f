"""TF32: read, set and restore torch's flags for float32 matrix products and convolutions.

TF32 is NVIDIA's format with 10 bits of mantissa. Tensor cores compute float32 products in it faster
and less precisely.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch


def allowed() -> tuple[bool, bool]:
    """Return whether float32 matrix products and cuDNN convolutions may use TF32."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    # the older flags raise an error once a program has set the newer ones
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"
    return matmul.allow_tf32, cudnn.allow_tf32


def allow(value: bool) -> None:
    """Set both flags, for matrix products and for cuDNN.

    torch 2.9 calls them deprecated. Its newer `fp32_precision` cannot replace them yet: with it
    alone, code that still reads the flags raises an error, torch.compile included (pytorch/pytorch
    issue 166387).
    """
    with _without_warnings():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = value


@contextmanager
def unchanged() -> Iterator[None]:
    """Restore the flags afterwards.

    If a program has set the newer flags, these are restored, since reading the older flags then
    fails.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    saved: list[tuple[Any, str, Any]] = []
    with _without_warnings():
        for older, newer in ((matmul, "cuda.matmul"), (cudnn, "cudnn.conv"), (cudnn, "cudnn.rnn")):
            try:
                saved.append((older, "allow_tf32", older.allow_tf32))
            except RuntimeError:
                flag = attrgetter(newer)(torch.backends)
                saved.append((flag, "fp32_precision", flag.fp32_precision))
    try:
        yield
    finally:
        with _without_warnings():
            for flag, name, value in saved:
                setattr(flag, name, value)


@contextmanager
def off() -> Iterator[None]:
    """Compute float32 convolutions and matrix products in float32 inside the context."""
    with unchanged():
        allow(False)
        yield


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress torch's deprecation warnings for the older flags inside the context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
