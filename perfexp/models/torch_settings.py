"""Torch's process-wide state: settings, number formats, and what torch.compile did.

A session applies the `execution` and `precision` settings when it opens, tries what cannot be
queried, and reads the settings back as facts for the record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.functional import conv2d, linear

from perfexp.cost.trial import isolated
from perfexp.devices import Device
from perfexp.models import Execution, Precision, tf32
from perfexp.models.torchvision_import import torchvision_facts
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.number_formats import Formats
from perfexp.records.quantities import COMPILE_SECONDS, GRAPH_BREAKS, GRAPHS, RECOMPILATIONS
from perfexp.records.record import Metric

#: First compute capability with TF32 tensor cores (NVIDIA Ampere).
_TF32_CAPABILITY = (8, 0)
#: Compilations that torch keeps metrics for, unless its own constant differs.
_MOST_COMPILATIONS = 64
#: Metrics that are sums over these compilations, so they are too low once torch has dropped some.
_SUMMED = (COMPILE_SECONDS, RECOMPILATIONS)


def apply_settings(execution: Execution, precision: Precision) -> list[Diagnostic]:
    """Apply the settings that are on, and return diagnostics for failures.

    A session calls this once when it opens. Settings that are off stay as they are in the process.
    """
    if precision.tf32 is not None:
        tf32.allow(precision.tf32)
    if execution.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if execution.deterministic:
        # cuBLAS is deterministic only with a fixed workspace size; torch requires one.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
    if execution.threads is not None:
        torch.set_num_threads(execution.threads)
    if execution.interop_threads not in (None, torch.get_num_interop_threads()):
        try:
            torch.set_num_interop_threads(execution.interop_threads)
        except RuntimeError:  # torch accepts it only before its first parallel work
            actual = torch.get_num_interop_threads()
            changes = (
                f"torch had started with {actual} inter-op threads, not {execution.interop_threads}"
            )
            return [diagnostics.make("settings_changed", changes=changes)]
    return []


@contextmanager
def unchanged_settings() -> Iterator[None]:
    """Restore the process-wide flags that `apply_settings` changes, at the end of the context."""
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    with tf32.unchanged():
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
            torch.use_deterministic_algorithms(is_deterministic)
            torch.set_num_threads(threads)


@contextmanager
def unchanged(model: object) -> Iterator[None]:
    """Restore torch's settings and random state, and a module's modes and gradients.

    The Python API wraps a measurement in it, because the user's process goes on afterwards. A
    `model` that is not a module has only settings to restore.
    """
    parts = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    modes = [(part, part.training) for part in parts]
    gradients = [
        (tensor, tensor.grad)
        for part in parts
        for tensor in torch.nn.Module.parameters(part, recurse=False)
    ]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with unchanged_settings(), torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for part, is_training in modes:
                part.training = is_training
            for parameter, gradient in gradients:
                parameter.grad = gradient


def torch_facts() -> dict[str, Any]:
    """Return current versions, flags and thread counts as JSON values for the record."""
    matmul_tf32, cudnn_tf32 = tf32.allowed()
    # OpenMP or the native thread pool
    backend = re.search(r"parallel backend:(.*)", torch.__config__.parallel_info())
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "parallel_backend": backend[1].strip() if backend else "",
        "mkldnn": torch.backends.mkldnn.is_available(),
        "matmul_allow_tf32": matmul_tf32,
        "cudnn_allow_tf32": cudnn_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **torchvision_facts(),
    }


def effective_precision(requested: Precision, device: Device) -> tuple[Precision, list[Diagnostic]]:
    """Return the requested precision if the device has it, otherwise fp32 and a diagnostic.

    A session checks it when it opens, by trying small computations.
    """
    if (requested.autocast or requested.storage) == "float32" and not requested.tf32:
        return requested, []
    if requested.autocast and device.kind == "mps":
        reason = f"autocast is not used on {device.name}"
        return Precision(name="fp32"), [
            diagnostics.make("precision_unavailable", precision=requested.name, reason=reason)
        ]
    # gradients on the host would start autograd threads for all devices; after that,
    # forked processes cannot compute gradients
    why_no_data_type = isolated(_why_no_data_type) if device.kind == "cpu" else _why_no_data_type
    missing = _why_no_tf32(device) if requested.tf32 else why_no_data_type(requested, device)
    if missing is None:
        return requested, []
    return Precision(name="fp32"), [
        diagnostics.make("precision_unavailable", precision=requested.name, reason=missing)
    ]


def formats(precision: Precision, device: Device) -> Formats:
    """Return the number formats for contractions on the device.

    Peaks and rooflines depend on them.
    """
    flags = None if _why_no_tf32(device) else tf32.allowed()
    return Formats.of(precision.autocast or precision.storage, precision.tf32, flags)


def _why_no_tf32(device: Device) -> str | None:
    """Return why the device has no TF32, or None.

    A trial proves nothing, because torch accepts the flag everywhere.
    """
    if device.kind != "cuda" or torch.version.hip is not None:
        return f"{device.name} has no TF32 that torch could use"
    capability = torch.cuda.get_device_capability(device.identifier)
    if capability < _TF32_CAPABILITY:
        return (
            f"{device.name} has compute capability {capability[0]}.{capability[1]}, TF32 "
            "begins with 8.0"
        )
    return None


def _why_no_data_type(requested: Precision, device: Device) -> str | None:
    """Return why a small convolution and product fail in the data type, or None if they work.

    They are tried forward and backward on the device, because torch has no query for it.
    """
    name = requested.autocast or requested.storage
    assert device.identifier is not None
    if device.kind == "cpu" and name == "float16" and not _has_fast_float16():
        return f"torch has no fast float16 on {device.name}"
    storage = getattr(torch, requested.storage)
    try:
        # callers of the Python interface may have set other modes
        with torch.inference_mode(False), torch.enable_grad():
            ones = partial(torch.ones, device=device.identifier, dtype=storage)
            kernel = ones(4, 3, 3, 3, requires_grad=True)
            weight = ones(2, 4 * 36, requires_grad=True)
            inputs = ones(2, 3, 8, 8)
            with autocast(requested, device):
                outputs = linear(conv2d(inputs, kernel).flatten(1), weight)
            torch.autograd.backward(outputs.float().sum())
        device.synchronize()
    except (RuntimeError, TypeError) as error:
        message = str(error).splitlines()[0]
        how = "autocast to" if requested.autocast else "parameters of"
        return (
            f"a convolution and a matrix product with {how} {name} fail on {device.name}: {message}"
        )
    return None


def _has_fast_float16() -> bool:
    """Return whether torch computes float16 on this CPU at a usable speed.

    If oneDNN lacks float16 there, torch's convolution takes about a hundred times as long. Without
    oneDNN nothing is known, and float16 is tried.
    """
    has_onednn = torch.backends.mkldnn.is_available()
    return not has_onednn or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def autocast(precision: Precision, device: Device) -> AbstractContextManager[object]:
    """Return a new autocast context for the precision; a null context without autocast.

    Sessions enter it for each forward pass and loss.
    """
    if precision.autocast is None:
        return nullcontext()
    assert device.identifier is not None
    return torch.autocast(
        torch.device(device.identifier).type, dtype=getattr(torch, precision.autocast)
    )


def make_channels_last(module: torch.nn.Module) -> None:
    """Convert the kernels of 2-D and 3-D convolutions; `Module.to` converts only one kind."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(memory_format=channels_last_format(parameter))


def channels_last_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the channels-last layout for a tensor with channels, otherwise its own layout."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats.get(tensor.ndim, torch.preserve_format)


def reset_compiler() -> None:
    """Discard compiled code and its counts; a session calls it before each point."""
    from torch._dynamo import utils  # takes seconds, and only a compiled model needs it

    torch.compiler.reset()
    utils.clear_compilation_metrics()
    utils.counters.clear()


def compilation_metrics() -> list[Metric]:
    """Return compile time in seconds and counts since `reset_compiler`.

    The counts are graphs, graph breaks and recompilations. A metric is missing, with a reason, if
    this torch version counts differently or has dropped old entries.
    """
    from torch._dynamo import utils  # deferred as in `reset_compiler`

    try:
        compiled = utils.get_compilation_metrics()
        values: dict[str, float] = {
            COMPILE_SECONDS: sum(compilation.duration_us or 0 for compilation in compiled) * 1e-6,
            GRAPHS: utils.counters["stats"]["unique_graphs"],
            GRAPH_BREAKS: sum(utils.counters["graph_break"].values()),
            # torch numbers compilations per frame from 0: `frame/number`
            RECOMPILATIONS: sum(
                bool(compilation.is_forward) and _recompilation(compilation.compile_id) > 0
                for compilation in compiled
            ),
        }
    except (AttributeError, TypeError, ValueError) as error:  # torch's records change
        reason = f"torch {torch.__version__} counts in another way: {error}"
        return [Metric.of(COMPILE_SECONDS, None, reason=reason)]
    limit = getattr(utils, "DEFAULT_COMPILATION_METRICS_LIMIT", _MOST_COMPILATIONS)
    is_cut = len(compiled) >= limit
    reason = f"torch keeps only the last {len(compiled)} compilations"
    metrics = []
    for name, value in values.items():
        if is_cut and name in _SUMMED:
            metrics.append(Metric.of(name, None, reason=reason))
        else:
            metrics.append(Metric.of(name, float(value)))
    return metrics


def _recompilation(compile_id: str | None) -> int:
    """Return a compilation's number within its frame, 0 for the first, from an id such as `3/1`."""
    return int((compile_id or "0").rpartition("/")[2].partition("_")[0])
