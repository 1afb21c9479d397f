"""Refuse plans that this machine cannot measure, before the run waits for the device.

The parent process checks what it can without torch: kind of device, data folder, weights.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

from perfexp.devices import auto
from perfexp.errors import DeviceMismatch, UserError
from perfexp.measuring.profilers import why_not_cuda
from perfexp.models.weight_files import SUFFIXES, find_weights
from perfexp.plan import config

#: Operating system of this machine.
SYSTEM = platform.system()
#: Algorithms and backends that only NVIDIA GPUs have.
_OF_CUDNN = ("guess", "benchmark")
_OF_NVIDIA = ("cudnn", "triton")
#: Data sets that `perfexp make-data` makes.
_MADE = ("images", "cifar10", "cityscapes", "skeletons")


def check_here(plan: config.Plan) -> None:
    """Raise `UserError` if this machine cannot measure a plan, without reading the device.

    `main` and the Python interface call it before a run.

    Raises:
        DeviceMismatch: the plan asks for another device.
        UserError: a setting does not fit the device, or a file is missing.
    """
    check_kind(plan, plan.gpu_name)
    if plan.gpu_name == "mps" and SYSTEM != "Darwin":
        raise DeviceMismatch(
            "gpu=mps asks for Apple's GPU, which this machine does not have. Choose gpu=auto."
        )
    if plan.gpu_name == "auto" and auto.predicted_name(plan.gpu.get("index") or 0) == "cpu":
        check_kind(plan, "cpu")
        if plan.ranks > 1:
            raise DeviceMismatch(
                f"{plan.ranks} ranks need GPUs, and torch finds none: add gpu=cpu to share a CPU."
            )
    _check_data(plan)
    node = plan.mode.train
    file = node.get("resume_from") if isinstance(node, Mapping) else None
    if file and not Path(file).expanduser().is_file():
        raise UserError(f"mode.train.resume_from={file} is missing. Name a checkpoint of perfexp.")
    _check_weights(plan)


def check_kind(plan: config.Plan, kind: str) -> None:
    """Raise `UserError` for settings that a kind of device does not support.

    The worker repeats the check with the kind that it has opened.

    Args:
        kind: device kind, for example `cpu`, `mps` or `cuda`.
    """
    name = {"cpu": "a CPU", "mps": "Apple's GPU"}.get(kind)
    if name is None:
        return
    if plan.execution.cuda_graph:
        raise UserError(
            f"execution.cuda_graph=true needs a CUDA device, and this is {name}: set "
            "execution.cuda_graph=false."
        )
    if plan.seeks_batch and kind == "cpu":
        raise UserError(
            "batch_size=max needs a device with a memory of its own, and a CPU has none: "
            "set batch_size=N."
        )
    if config.build(plan.profiler).needs_nvidia:
        raise UserError(f"profiler={plan.profiler_name}: {why_not_cuda(kind, name, rocm=False)}.")
    for setting in _settings_of_nvidia(plan):
        raise UserError(
            f"{setting} needs an NVIDIA GPU, and this is {name}: choose algorithm=default."
        )


def _settings_of_nvidia(plan: config.Plan) -> Iterator[str]:
    """Yield the convolution settings that only an NVIDIA GPU can follow, as `key=value`."""
    node = plan.algorithm
    if not str(node.get("_target_")).startswith("perfexp.convolution."):
        return
    layers = node.get("layers") if isinstance(node.get("layers"), Mapping) else {}
    if node.get("name") == "default" and not layers:
        return  # it ignores the settings of the other algorithms
    if node.get("name") in _OF_CUDNN:
        yield f"algorithm={node['name']}"
    for layer, name in layers.items():
        if name in _OF_CUDNN:
            yield f"algorithm.layers: {name} for {layer}"
    if node.get("backend") in _OF_NVIDIA:
        yield f"algorithm.backend={node['backend']}"
    if node.get("verify"):
        yield "algorithm.verify=true"


def _check_data(plan: config.Plan) -> None:
    """Raise `UserError` if the folder of a data set is missing and nothing will create it."""
    node, option = plan.data, plan.choices.get("data", "")
    root = node.get("root")
    is_own = str(node.get("_target_")).startswith("perfexp.data.")
    if not (is_own and root) or node.get("download") or Path(root).expanduser().is_dir():
        return
    remedy = "Set it to the folder of the data set"
    if "download" in node:
        remedy += ", or add data.download=true"
    if option in _MADE:
        remedy += f", or try a small one out: perfexp make-data {option} DIR"
    folder = Path(root).expanduser().absolute()
    raise UserError(f"data.root is not a folder: {folder}. {remedy}.")


def _check_weights(plan: config.Plan) -> None:
    """Raise `UserError` if a file with weights is missing."""
    node = plan.model
    weights, folder = node.get("weights"), node.get("weights_dir")
    # torchvision's own weights have names without an ending
    is_file = isinstance(weights, str) and weights.endswith(SUFFIXES)
    if str(node.get("_target_")).startswith("perfexp.models.") and (
        is_file or (folder and weights is None)
    ):
        find_weights(plan.model_name, weights, folder)
