"""Find out by trial whether a device computes in the requested precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.functional import conv2d, linear

from perfexp.devices import Device
from perfexp.models import Precision
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic

#: First compute capability with TF32 in its tensor cores (NVIDIA Ampere).
_TF32_CAPABILITY = (8, 0)


def effective_precision(wanted: Precision, device: Device) -> tuple[Precision, list[Diagnostic]]:
    """The requested precision if the device has it, otherwise fp32 and a diagnostic."""
    missing = _why_no_tf32(device) if wanted.tf32 else _why_no_data_type(wanted, device)
    if missing is None:
        return wanted, []
    return Precision(name="fp32"), [diagnostics.make("precision_unavailable", precision=wanted.name, reason=missing)]


def _why_no_tf32(device: Device) -> str | None:
    """Why the device has no TF32, or None; torch accepts the flag everywhere, so that a trial proves nothing."""
    if device.kind != "cuda" or torch.version.hip is not None:
        return f"{device.name} has no TF32 that torch could use"
    capability = torch.cuda.get_device_capability(device.identifier)
    if capability < _TF32_CAPABILITY:
        return f"{device.name} has compute capability {capability[0]}.{capability[1]}, TF32 begins with 8.0"
    return None


def _why_no_data_type(wanted: Precision, device: Device) -> str | None:
    """Why a small convolution and product, forward and backward, fail in the data type, or None."""
    name = wanted.autocast or wanted.storage
    if name == "float32":
        return None
    assert device.identifier is not None
    storage = getattr(torch, wanted.storage)
    kernel = torch.ones(4, 3, 3, 3, device=device.identifier, dtype=storage, requires_grad=True)
    weight = torch.ones(2, 4 * 36, device=device.identifier, dtype=storage, requires_grad=True)
    inputs = torch.ones(2, 3, 8, 8, device=device.identifier, dtype=storage)
    try:
        with autocast(wanted, device):
            outputs = linear(conv2d(inputs, kernel).flatten(1), weight)
        torch.autograd.backward(outputs.float().sum())
        device.synchronize()
    except (RuntimeError, TypeError) as error:
        message = str(error).splitlines()[0]
        how = "autocast to" if wanted.autocast else "parameters of"
        return f"a convolution and a matrix product with {how} {name} fail on {device.name}: {message}"
    return None


def autocast(precision: Precision, device: Device) -> AbstractContextManager[object]:
    """A new autocast context of the precision; a null context without autocast."""
    if precision.autocast is None:
        return nullcontext()
    assert device.identifier is not None
    return torch.autocast(torch.device(device.identifier).type, dtype=getattr(torch, precision.autocast))
