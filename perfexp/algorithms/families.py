"""Kernel families: attribute cuDNN's kernels to algorithms, learned from calls of known algorithms.

A table holds how often each kernel's bare name was seen among the calls of each algorithm, over layers, data types and
memory formats, on one GPU architecture with one version of cuDNN. `families.json` is the table that is shipped;
`perfexp calibrate kernels` learns that of the device at hand. A call is attributed to the algorithm under which its
kernels are most likely, with independent presence of names (naive Bayes with Bernoulli features; Manning, Raghavan and
Schütze, Introduction to Information Retrieval, 13.3). A name that contains an algorithm's own word counts for that
algorithm alone. This detects the direct convolutions that cuDNN runs in place of another algorithm.

A call is proven only if every kernel is known, and if at least one of them computes a convolution: kernels that change
the memory format, clear memory or add up partial sums run beside any algorithm.
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

from perfexp.algorithms.coverage import AlgorithmReport, LayerReport, LayerStatus, Pass, PassReport
from perfexp.host.cache import cache_folder

#: Words in kernel names that identify an algorithm.
_WORDS = {"direct": "direct", "alg0": "algo_0", "alg1": "algo_1"}
#: Parts of the names of PyTorch's own kernels, copies and fills.
_NOT_CUDNN = ("at::native", "Memcpy", "Memset")
#: Bare names of kernels that run beside any algorithm: memory formats, padding, types, factors, workspaces, sums.
_AUXILIARY = re.compile(
    r"(?i:transpose|transform|padding|slice|convertTensor|scale\w*Tensor|workspace|reduc)|^(nchw|nhwc|folded|kernel)"
)
#: An algorithm that is less likely than the best by this factor is ruled out.
_RULED_OUT = 20.0
#: Pseudo-count of a name that was never seen with an algorithm, in calls.
_SMOOTHING = 0.5

_XMMA = re.compile(r"sm\d+_xmma_(?:(fprop|dgrad|wgrad|depthwise_convolution|gemm)_?(\w*))")
_CUTLASS = re.compile(
    r"cutlass_(?:\d+_)?(?:wmma_)?[a-z]+op_\w*?(fprop|dgrad|wgrad|gemm)|cutlass_\d+_simt_\w*?(gemm)|Conv2d(Fprop|Dgrad|Wgrad)"
)
_SIZES = re.compile(r"_?\d+x\d+\w*")


def bare(kernel: str) -> str:
    """A kernel's name without types, tile sizes and architecture."""
    if found := _XMMA.search(kernel):
        kind, rest = found.groups()
        if kind == "gemm":
            return "xmma_gemm_complex" if rest.startswith("cf32") else "xmma_gemm"
        return f"xmma_{kind}"
    if found := _CUTLASS.search(kernel):
        return f"cutlass_{(found[1] or found[2] or found[3]).lower()}"
    if "ReduceSplitK" in kernel:
        return "cutlass_reduction"
    if kernel.startswith("nvjet"):
        return "nvjet"
    name = _without_brackets(kernel).split("::")[-1].removeprefix("void ").strip()
    return (
        name if name.startswith("fft") else _SIZES.sub("", name)
    )  # the size of its tiles is what an FFT is


def _without_brackets(text: str) -> str:
    depth, kept = 0, []
    for character in text:
        if character in "<(":
            depth += 1
        elif character in ">)":
            depth -= 1
        elif depth == 0:
            kept.append(character)
    return "".join(kept)


class Counts(msgspec.Struct, frozen=True):
    """Number of calls of an algorithm, and of those with each bare name."""

    calls: int
    kernels: dict[str, int]


class Families(msgspec.Struct, frozen=True):
    """What was seen on one architecture with one version of cuDNN.

    Attributes:
        seen: device and number of convolutions from which the table was learned.
        architecture: `sm_90`.
        cudnn: version as a number, 91900 for 9.19.0.
        counts: number of `calls`, and of those with each bare name (`kernels`), by pass and algorithm.
    """

    seen: str
    architecture: str
    cudnn: int
    counts: dict[str, dict[str, Counts]]

    def likely(self, which: Pass, kernels: Iterable[str]) -> list[str]:
        """Algorithms to which the kernels of a call can belong, the likeliest first; empty if none computes."""
        seen = {name for name in map(bare, kernels) if not _AUXILIARY.search(name)}
        named = {algorithm for word, algorithm in _WORDS.items() for name in seen if word in name}
        if named:
            return sorted(named)
        algorithms = self.counts.get(which.value, {})
        names = self._names(which)
        if not seen & names:
            return []
        scores = {
            algorithm: _score(counts, seen, names) for algorithm, counts in algorithms.items()
        }
        best = max(scores.values())
        likely = [
            algorithm for algorithm, score in scores.items() if score > best - math.log(_RULED_OUT)
        ]
        return sorted(likely, key=lambda algorithm: -scores[algorithm])

    def unknown(self, which: Pass, kernels: Iterable[str]) -> list[str]:
        """Bare names that no algorithm's calls had and that name no algorithm, PyTorch's own kernels left out."""
        known = {
            name for counts in self.counts.get(which.value, {}).values() for name in counts.kernels
        }
        names = dict.fromkeys(bare(kernel) for kernel in of_cudnn(kernels))
        return [name for name in names if name not in known and not _says(name)]

    def _names(self, which: Pass) -> set[str]:
        """Bare names of the kernels that compute and do not name their algorithm."""
        counts = self.counts.get(which.value, {}).values()
        names = {name for of_algorithm in counts for name in of_algorithm.kernels}
        return {name for name in names if not _says(name) and not _AUXILIARY.search(name)}


def _says(name: str) -> bool:
    return any(word in name for word in _WORDS)


def _score(counts: Counts, seen: set[str], names: set[str]) -> float:
    """Log-likelihood of the names that were and were not seen, for one algorithm's calls."""
    score = 0.0
    for name in names:
        share = (counts.kernels.get(name, 0) + _SMOOTHING) / (counts.calls + 2 * _SMOOTHING)
        score += math.log(share if name in seen else 1 - share)
    return score


def judge(report: PassReport, kernels: Collection[str]) -> PassReport:
    """The report of a pass as requested, with its observed kernels, and whether they belong to the algorithm."""
    table, observed = current(), of_cudnn(kernels)
    likely = table.likely(report.which, observed)
    status, reason = LayerStatus.ok, None
    if unknown := table.unknown(report.which, observed):
        status, reason, likely = (
            LayerStatus.unproven,
            f"not known what {', '.join(unknown)} computes",
            [],
        )
    elif not likely:
        status, reason = (
            LayerStatus.unproven,
            f"no kernel computes a convolution: {_short(kernels) or 'none'}",
        )
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
    """The algorithms to which a forward pass's kernels can belong (`fft or fft_tiling`); None where unknown."""
    table, observed = current(), of_cudnn(kernels)
    is_known = not table.unknown(Pass.forward, observed)
    return " or ".join(table.likely(Pass.forward, observed)) or None if is_known else None


def of_cudnn(kernels: Iterable[str]) -> list[str]:
    """The kernels of a call that may be cuDNN's: not PyTorch's own, copies or fills."""
    return [name for name in kernels if not any(word in name for word in _NOT_CUDNN)]


def judge_forward(
    report: AlgorithmReport, kernels: Mapping[str, Collection[str]]
) -> AlgorithmReport:
    """A report with the observed kernels of layers' forward passes, where cuDNN was handed an algorithm.

    Layers with several kinds of inputs, or with kernels that prove nothing, stay unchanged.
    """
    names = [layer.name for layer in report.layers]

    def of_pass(name: str, each: PassReport) -> PassReport:
        if (
            each.which is not Pass.forward
            or each.status is not LayerStatus.requested
            or names.count(name) > 1
        ):
            return each
        judged = judge(each, kernels.get(name, ()))
        return each if judged.status is LayerStatus.unproven else judged

    def of_layer(layer: LayerReport) -> LayerReport:
        return replace(layer, passes=tuple(of_pass(layer.name, each) for each in layer.passes))

    return replace(report, layers=tuple(of_layer(layer) for layer in report.layers))


def _short(kernels: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(bare(kernel) for kernel in kernels))


@cache
def shipped() -> Families:
    """The table that is shipped with perfexp."""
    return msgspec.json.decode(
        files("perfexp.algorithms").joinpath("families.json").read_bytes(), type=Families
    )


def current() -> Families:
    """The table of the device at hand if it was calibrated, otherwise the one that is shipped."""
    if (place := identity()) is None:
        return shipped()
    with suppress(OSError, msgspec.DecodeError):  # not calibrated, or by another version of perfexp
        return msgspec.json.decode(calibrated(*place).read_bytes(), type=Families)
    return shipped()


def calibrated(architecture: str, cudnn: int) -> Path:
    """The file of the table that `perfexp calibrate kernels` makes."""
    return cache_folder("families") / f"{architecture}-cudnn{cudnn}.json"


def identity() -> tuple[str, int] | None:
    """Architecture of the current device and version of cuDNN; None without both."""
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if not torch.cuda.is_available() or version is None:
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}", int(version)


def foreign() -> str | None:
    """Where the current table was learned and what runs here, if these differ."""
    place, table = identity(), current()
    if place is None or place == (table.architecture, table.cudnn):
        return None
    return f"learned on {table.architecture} with cuDNN {table.cudnn}, and this is {place[0]} with cuDNN {place[1]}"
