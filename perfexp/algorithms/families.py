"""Kernel families: attribute cuDNN's kernels to algorithms, learned from calls of known algorithms.

`families.json` holds how often each kernel's bare name was seen among the calls of each algorithm, over layers, data
types and memory formats (made by `benchmarks/kernel_families.py`). A call is then attributed to the algorithm under
which its kernels are most likely, with independent presence of names (naive Bayes with Bernoulli features; Manning,
Raghavan and Schütze, Introduction to Information Retrieval, 13.3). A name that contains an algorithm's own word counts
for that algorithm alone. This detects the direct convolutions that cuDNN runs in place of another algorithm.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from perfexp.algorithms.coverage import AlgorithmReport, LayerReport, LayerStatus, Pass, PassReport

#: Words in kernel names that identify an algorithm.
_WORDS = {"direct": "direct", "alg0": "algo_0", "alg1": "algo_1"}
#: Parts of the names of PyTorch's own kernels, copies and fills.
_NOT_CUDNN = ("at::native", "Memcpy", "Memset")
#: An algorithm that is less likely than the best by this factor is ruled out.
_RULED_OUT = 20.0
#: Pseudo-count of a name that was never seen with an algorithm, in calls.
_SMOOTHING = 0.5

_XMMA = re.compile(r"sm\d+_xmma_(?:(fprop|dgrad|wgrad|depthwise_convolution|gemm)_?(\w*))")
_CUTLASS = re.compile(
    r"cutlass_(?:\d+_)?[a-z]+op_\w*?(fprop|dgrad|wgrad|gemm)|cutlass_\d+_simt_\w*?(gemm)|Conv2d(Fprop|Dgrad|Wgrad)"
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
    return name if name.startswith("fft") else _SIZES.sub("", name)  # the size of its tiles is what an FFT is


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


class Families:
    """Kernel counts by pass and algorithm: the number of `calls`, and the count of each bare name (`kernels`)."""

    def __init__(self, counts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        self._counts = counts

    def likely(self, which: Pass, kernels: Iterable[str]) -> list[str]:
        """Algorithms to which the kernels of a call can belong, the likeliest first; empty for unknown kernels."""
        seen = {bare(kernel) for kernel in kernels}
        named = {algorithm for word, algorithm in _WORDS.items() for name in seen if word in name}
        if named:
            return sorted(named)
        algorithms = self._counts.get(which.value, {})
        names = {name for each in algorithms.values() for name in each["kernels"] if not _says(name)}
        if not seen & names:
            return []
        scores = {algorithm: _score(each, seen, names) for algorithm, each in algorithms.items()}
        best = max(scores.values())
        likely = [algorithm for algorithm, score in scores.items() if score > best - math.log(_RULED_OUT)]
        return sorted(likely, key=lambda algorithm: -scores[algorithm])

    def has_seen(self, which: Pass, kernels: Iterable[str]) -> bool:
        """Whether each kernel is known from some algorithm or names its algorithm."""
        names = {name for each in self._counts.get(which.value, {}).values() for name in each["kernels"]}
        return all(name in names or _says(name) for name in map(bare, kernels))


def _says(name: str) -> bool:
    return any(word in name for word in _WORDS)


def _score(counts: Mapping[str, Any], seen: set[str], names: set[str]) -> float:
    """Log-likelihood of the names that were and were not seen, for one algorithm's calls."""
    total, score = counts["calls"], 0.0
    for name in names:
        share = (counts["kernels"].get(name, 0) + _SMOOTHING) / (total + 2 * _SMOOTHING)
        score += math.log(share if name in seen else 1 - share)
    return score


def judge(report: PassReport, kernels: Collection[str]) -> PassReport:
    """The report of a pass as requested, with its observed kernels, and whether they belong to the algorithm."""
    likely = learnt().likely(report.which, kernels)
    status, reason = LayerStatus.ok, None
    if not likely:
        status, reason = LayerStatus.unproven, f"not known what these kernels are: {_short(kernels)}"
    elif report.selected.rpartition(".")[2] not in likely:
        status, reason = LayerStatus.substituted, f"cuDNN ran {likely[0]} ({_short(kernels)})"
    return replace(report, status=status, reason=reason, ran=" or ".join(likely) or None, kernels=tuple(kernels))


def known(which: Pass, kernels: Iterable[str]) -> bool:
    """Whether all kernels of a call that may be cuDNN's (not PyTorch's own, copies or fills) are in the families."""
    others = [name for name in kernels if not any(word in name for word in _NOT_CUDNN)]
    return bool(others) and learnt().has_seen(which, others)


def judge_forward(report: AlgorithmReport, kernels: Mapping[str, Collection[str]]) -> AlgorithmReport:
    """A report with the observed kernels of layers' forward passes, where cuDNN was handed an algorithm.

    Layers with several kinds of inputs, or with an unknown kernel (another chip, another cuDNN), stay unchanged.
    """
    names = [layer.name for layer in report.layers]

    def of_pass(name: str, each: PassReport) -> PassReport:
        handed = each.which is Pass.forward and each.status is LayerStatus.ok and each.selected.startswith("cudnn.")
        seen = kernels.get(name, ())
        return judge(each, seen) if handed and names.count(name) == 1 and known(each.which, seen) else each

    def of_layer(layer: LayerReport) -> LayerReport:
        return replace(layer, passes=tuple(of_pass(layer.name, each) for each in layer.passes))

    return replace(report, layers=tuple(of_layer(layer) for layer in report.layers))


def _short(kernels: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(bare(kernel) for kernel in kernels))


@cache
def learnt() -> Families:
    """The families that are shipped with perfexp."""
    return Families(json.loads(files("perfexp.algorithms").joinpath("families.json").read_text())["counts"])
