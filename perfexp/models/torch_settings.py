"""Apply and read back torch's process-wide settings."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from perfexp.models import Execution
from perfexp.models.torchvision_import import torchvision_facts
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic


def apply_settings(execution: Execution, *, tf32: bool) -> list[Diagnostic]:
    """Apply the settings (torch's default permits TF32 for convolutions); returns diagnostics of failures."""
    with warnings.catch_warnings():
        # Torch 2.9 calls these flags deprecated. Its newer `fp32_precision` is no replacement yet: with it alone,
        # whatever still reads the flags raises an error, torch.compile included (pytorch/pytorch issue 166387).
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = execution.cudnn_benchmark
    torch.backends.cudnn.deterministic = execution.deterministic
    if execution.deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size; torch refuses to run without.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(execution.deterministic)
    if execution.threads is not None:
        torch.set_num_threads(execution.threads)
    return _set_interop_threads(execution.interop_threads)


def _set_interop_threads(threads: int | None) -> list[Diagnostic]:
    """Set the number once; torch accepts it only before its first parallel work."""
    if threads is None or threads == torch.get_num_interop_threads():
        return []
    try:
        torch.set_num_interop_threads(threads)
    except RuntimeError:
        actual = torch.get_num_interop_threads()
        return [diagnostics.make("threads_unchanged", requested=threads, actual=actual)]
    return []


def torch_facts() -> dict[str, Any]:
    """Current versions, flags and threads, as JSON values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        matmul_tf32, cudnn_tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "parallel_backend": _parallel_backend(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "matmul_allow_tf32": matmul_tf32,
        "cudnn_allow_tf32": cudnn_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **torchvision_facts(),
    }


def _parallel_backend() -> str:
    """The thread pool within an operation (`OpenMP`, `native thread pool`)."""
    line = next((line for line in torch.__config__.parallel_info().splitlines() if "parallel backend" in line), "")
    return line.partition(":")[2].strip()
