"""Kernel families: attribute cuDNN's kernels to algorithms, learned from known calls.

A table counts how often each bare kernel name appeared in each algorithm's calls. It covers layers,
data types and memory formats for one GPU architecture and cuDNN version. `families.json` is the
shipped table; `perfexp calibrate kernels` learns a table on the current device.

A call is attributed to the algorithm with the highest likelihood for its kernels, taking names as
independent. This is naive Bayes with Bernoulli features (Manning, Raghavan and Schütze,
Introduction to Information Retrieval, 13.3). A name with an algorithm's own word in it counts for
that algorithm alone. This detects direct convolutions that cuDNN runs instead of another algorithm.

A call is proven only if every kernel is known and at least one computes a convolution. Kernels that
change the memory format, clear memory or add partial sums can belong to any algorithm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec
import torch

from perfexp.convolution.coverage import AlgorithmReport, LayerStatus, Pass, PassReport
from perfexp.host.cache import cache_folder

#: Words in kernel names that identify an algorithm.
_WORDS = {"direct": "direct", "alg0": "algo_0", "alg1": "algo_1"}
#: Name parts of PyTorch's own kernels, copies and fills.
_NOT_CUDNN = ("at::native", "Memcpy", "Memset")
#: Bare names of kernels that any algorithm may run: memory formats, padding, types, factors,
#: workspaces, sums.
_AUXILIARY = re.compile(
    r"(?i:transpose|transform|padding|slice|convertTensor|scale\w*Tensor|workspace|reduc)"
    r"|^(nchw|nhwc|folded|kernel)"
)
#: An algorithm that is less likely than the best by this factor is ruled out.
_RULED_OUT = 20.0
#: Pseudo-count of a name that was never seen with an algorithm, in calls.
_SMOOTHING = 0.5

_XMMA = re.compile(r"sm\d+_xmma_(?:(fprop|dgrad|wgrad|depthwise_convolution|gemm)_?(\w*))")
_CUTLASS = re.compile(
    r"cutlass_(?:\d+_)?(?:wmma_)?[a-z]+op_\w*?(fprop|dgrad|wgrad|gemm)"
    r"|cutlass_\d+_simt_\w*?(gemm)|Conv2d(Fprop|Dgrad|Wgrad)"
)
_SIZES = re.compile(r"_?\d+x\d+\w*")


def bare(kernel: str) -> str:
    """Return a kernel's name without types, tile sizes and architecture.

    For example `xmma_fprop` for `sm80_xmma_fprop_implicit_gemm_…`. Tables count bare names, because
    full names differ between shapes and GPUs.
    """
    if match := _XMMA.search(kernel):
        kind, suffix = match.groups()
        if kind == "gemm":
            return "xmma_gemm_complex" if suffix.startswith("cf32") else "xmma_gemm"
        return f"xmma_{kind}"
    if match := _CUTLASS.search(kernel):
        return f"cutlass_{(match[1] or match[2] or match[3]).lower()}"
    if "ReduceSplitK" in kernel:
        return "cutlass_reduction"
    if kernel.startswith("nvjet"):
        return "nvjet"
    name = _without_brackets(kernel).split("::")[-1].removeprefix("void ").strip()
    if name.startswith("fft"):  # its tile size tells the FFT algorithms apart
        return name
    return _SIZES.sub("", name)


def _without_brackets(text: str) -> str:
    """Return a C++ kernel name without template arguments and parameter types."""
    depth, outside = 0, []
    for character in text:
        if character in "<(":
            depth += 1
        elif character in ">)":
            depth -= 1
        elif depth == 0:
            outside.append(character)
    return "".join(outside)


class Counts(msgspec.Struct, frozen=True):
    """Number of an algorithm's calls, in total and with each bare name."""

    calls: int
    kernels: dict[str, int]


class Families(msgspec.Struct, frozen=True):
    """Kernel counts for one architecture and cuDNN version.

    Attributes:
        seen: device and number of convolutions behind the table.
        architecture: for example `sm_90`.
        cudnn: version as a number, for example 91900 for 9.19.0.
        counts: number of `calls`, in total and with each bare name (`kernels`), by pass and
            algorithm.
    """

    seen: str
    architecture: str
    cudnn: int
    counts: dict[str, dict[str, Counts]]

    def likely(self, pass_type: Pass, kernels: Iterable[str]) -> list[str]:
        """Return algorithms that a call's kernels can belong to, the likeliest first.

        The list is empty if no kernel computes a convolution.
        """
        seen = {name for name in map(bare, kernels) if not _AUXILIARY.search(name)}
        named = {algorithm for word, algorithm in _WORDS.items() for name in seen if word in name}
        if named:  # a kernel that names its algorithm decides alone
            return sorted(named)
        algorithms = self.counts.get(pass_type.value, {})
        names = {
            name
            for name in self._counted(pass_type)
            if not _names_algorithm(name) and not _AUXILIARY.search(name)
        }
        if not seen & names:
            return []
        scores = {
            algorithm: _score(counts, seen, names) for algorithm, counts in algorithms.items()
        }
        best = max(scores.values())
        least = best - math.log(_RULED_OUT)
        likely = [algorithm for algorithm, score in scores.items() if score > least]
        return sorted(likely, key=lambda algorithm: -scores[algorithm])

    def unknown(self, pass_type: Pass, kernels: Iterable[str]) -> list[str]:
        """Return bare names that no algorithm's calls had and that name no algorithm.

        PyTorch's own kernels are left out.
        """
        counted = self._counted(pass_type)
        names = dict.fromkeys(bare(kernel) for kernel in of_cudnn(kernels))
        return [name for name in names if name not in counted and not _names_algorithm(name)]

    def _counted(self, pass_type: Pass) -> set[str]:
        """Return all bare names that any algorithm's calls had in this pass."""
        counts = self.counts.get(pass_type.value, {}).values()
        return {name for of_algorithm in counts for name in of_algorithm.kernels}


def _names_algorithm(name: str) -> bool:
    """Return whether a bare name contains an algorithm's own word."""
    return any(word in name for word in _WORDS)


def _score(counts: Counts, seen: set[str], names: set[str]) -> float:
    """Return the log-likelihood that an algorithm's call has just the seen names.

    Args:
        seen: bare names in the observed call.
        names: all bare names that count in this pass.
    """
    score = 0.0
    for name in names:
        share = (counts.kernels.get(name, 0) + _SMOOTHING) / (counts.calls + 2 * _SMOOTHING)
        score += math.log(share if name in seen else 1 - share)
    return score


def judge(report: PassReport, kernels: Collection[str]) -> PassReport:
    """Return a pass report with observed kernels and a verdict on them.

    The verdict says whether the kernels belong to the requested algorithm: `ok`, `substituted`, or
    `unproven` if a kernel is unknown or none computes a convolution.
    """
    table, observed = current(), of_cudnn(kernels)
    likely = table.likely(report.which, observed)
    status, reason = LayerStatus.ok, None
    if unknown := table.unknown(report.which, observed):
        status, likely = LayerStatus.unproven, []
        reason = f"not known what {', '.join(unknown)} computes"
    elif not likely:
        status = LayerStatus.unproven
        reason = f"no kernel computes a convolution: {_short(kernels) or 'none'}"
    elif report.selected.rpartition(".")[2] not in likely:
        status, reason = LayerStatus.substituted, f"cuDNN ran {likely[0]} ({_short(kernels)})"
    return replace(
        report,
        status=status,
        reason=reason,
        ran=" or ".join(likely) or None,
        kernels=tuple(kernels),
    )


def forward_algorithm(kernels: Iterable[str]) -> str | None:
    """Return the algorithms that a forward pass's kernels can belong to; None if unknown.

    Several are joined, for example `fft or fft_tiling`. The per-layer pass records with it what
    torch chose itself.
    """
    table, observed = current(), of_cudnn(kernels)
    if table.unknown(Pass.forward, observed):
        return None
    return " or ".join(table.likely(Pass.forward, observed)) or None


def of_cudnn(kernels: Iterable[str]) -> list[str]:
    """Return a call's kernels that may be cuDNN's: not PyTorch's own, copies or fills."""
    return [name for name in kernels if not any(word in name for word in _NOT_CUDNN)]


def judge_forward(
    report: AlgorithmReport, kernels: Mapping[str, Collection[str]]
) -> AlgorithmReport:
    """Return a report with the observed forward kernels of layers that request a cuDNN algorithm.

    Layers stay unchanged if they have several kinds of inputs or kernels that prove nothing.

    Args:
        kernels: kernel names by layer, from a profile of single layers.
    """
    names = [layer.name for layer in report.layers]
    layers = []
    for layer in report.layers:
        if names.count(layer.name) == 1:
            observed = kernels.get(layer.name, ())
            passes = tuple(
                _judge_forward_pass(pass_report, observed) for pass_report in layer.passes
            )
            layer = replace(layer, passes=passes)
        layers.append(layer)
    return replace(report, layers=tuple(layers))


def _judge_forward_pass(report: PassReport, kernels: Collection[str]) -> PassReport:
    """Return the verdict on a forward pass that requested cuDNN, other reports unchanged."""
    if report.which is not Pass.forward or report.status is not LayerStatus.requested:
        return report
    judged = judge(report, kernels)
    return report if judged.status is LayerStatus.unproven else judged


def _short(kernels: Iterable[str]) -> str:
    """Return distinct bare names for a message."""
    return ", ".join(dict.fromkeys(bare(kernel) for kernel in kernels))


@cache
def shipped() -> Families:
    """Return the table shipped with perfexp."""
    content = files("perfexp.convolution").joinpath("families.json").read_bytes()
    return msgspec.json.decode(content, type=Families)


def current() -> Families:
    """Return the current device's table if it was calibrated, otherwise the shipped table."""
    if (device_and_library := identity()) is None:
        return shipped()
    with suppress(OSError, msgspec.DecodeError):  # not calibrated, or by another version
        return msgspec.json.decode(calibrated(*device_and_library).read_bytes(), type=Families)
    return shipped()


def calibrated(architecture: str, cudnn: int) -> Path:
    """Return the path of a table made by `perfexp calibrate kernels`."""
    return cache_folder("families") / f"{architecture}-cudnn{cudnn}.json"


def identity() -> tuple[str, int] | None:
    """Return the current device's architecture and the cuDNN version; None without both.

    For example `("sm_90", 91900)`. A kernel table is for one such pair.
    """
    version = torch.backends.cudnn.version()
    if not torch.cuda.is_available() or version is None:
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}", int(version)


def foreign() -> str | None:
    """Return where the current table was learned and what runs here; None if these are equal.

    The text is for the diagnostic that a proof may not hold.
    """
    device_and_library, table = identity(), current()
    if device_and_library is None or device_and_library == (table.architecture, table.cudnn):
        return None
    return (
        f"learned on {table.architecture} with cuDNN {table.cudnn}, and this is "
        f"{device_and_library[0]} with cuDNN {device_and_library[1]}"
    )
