"""Attention kernels: which backend's kernels ran, and the report on a model's attention.

With `execution.attention_verify=true`, one call runs under torch's profiler, with markers before
and after each attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from perfexp.convolution import proof
from perfexp.convolution.coverage import AlgorithmReport, LayerStatus, Pass, PassReport
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import ATTENTION_COVERAGE, ATTENTION_PROVEN
from perfexp.records.record import Metric

#: Kernel names of each fused backend on a GPU, and operator names on a CPU; the first match counts,
#: because cuDNN's names contain `flash`, too.
_FUSED = {
    "cudnn": re.compile(r"cudnn\w*sdpa|_cudnn_attention", re.IGNORECASE),
    "efficient": re.compile(r"fmha_cutlass|efficient_attention", re.IGNORECASE),
    "flash": re.compile(r"flash(_fwd|_bwd|::|_attention)|FlashAttn", re.IGNORECASE),
}
#: Kernels of products and of softmax, by which `math` is composed.
_PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|bmm|xmma|matmul|splitK|mm$", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
#: Steps from an output to the backward node of a fused backend, which may lie behind a slice.
_MOST_STEPS = 4


def family(kernel: str) -> str | None:
    """Return the fused backend that a kernel belongs to; None for other kernels."""
    return next((name for name, pattern in _FUSED.items() if pattern.search(kernel)), None)


def ran(kernels: Collection[str]) -> str | None:
    """Return the backend that a call's kernels belong to; None if it is not known.

    Without a fused kernel, a product and a softmax together are `math`.
    """
    fused = {name for name in map(family, kernels) if name is not None}
    if fused:
        return fused.pop() if len(fused) == 1 else None
    is_composed = any(map(_PRODUCT.search, kernels)) and any(map(_SOFTMAX.search, kernels))
    return "math" if is_composed else None


@dataclass
class Seen:
    """Kernels of a shape's passes in an observed call, and all kernels of that call.

    Attributes:
        everything: names of all kernels; None if nothing was observed.
    """

    kernels: dict[Pass, list[str]] = field(default_factory=dict)
    everything: Sequence[str] | None = None

    def add(self, pass_type: Pass, kernels: Sequence[str]) -> None:
        """Add the kernels of one attention call."""
        self.kernels.setdefault(pass_type, []).extend(kernels)

    def proven(self, report: PassReport) -> PassReport:
        """Return a pass report with the observed kernels and a verdict on them.

        Only the status `requested` changes: to `ok`, `substituted` or `unproven`.
        """
        if self.everything is None or report.status is not LayerStatus.requested:
            return report
        kernels = self.kernels.get(report.which, [])
        if not kernels:
            return self._of_call(report)
        backend = ran(kernels)
        status, reason = LayerStatus.ok, None
        if backend is None:
            unknown = ", ".join(dict.fromkeys(kernels))
            status, reason = LayerStatus.unproven, f"not known what {unknown[:200]} computes"
        elif backend != report.selected:
            status, reason = LayerStatus.substituted, f"torch ran {backend}"
        names = tuple(dict.fromkeys(kernels))
        return replace(report, status=status, reason=reason, ran=backend, kernels=names)

    def _of_call(self, report: PassReport) -> PassReport:
        """Judge a pass without kernels of its own by the whole call.

        That is a pass of a compiled call, or the backward pass of `math`, whose products are not
        marked.
        """
        everything = self.everything or ()
        fused = {name for name in map(family, everything) if name is not None}
        marked_names = {name for names in self.kernels.values() for name in names}
        if report.selected == "math":
            unmarked = [name for name in everything if name not in marked_names]
            is_ran = not any(map(family, unmarked)) and any(map(_PRODUCT.search, everything))
        else:
            is_ran = fused == {report.selected}
        if is_ran:
            return replace(report, status=LayerStatus.ok, ran=report.selected)
        reason = "its kernels were not seen"
        return replace(report, status=LayerStatus.unproven, reason=reason)


def mark(device: torch.device) -> None:
    """Mark a place among the observed kernels, or operators on a CPU."""
    if device.type == "cuda":
        proof.mark()
    else:
        with torch.profiler.record_function(proof.MARKER):
            pass


def watch(call: Callable[[], Any], device: str) -> tuple[list[tuple[str, ...]], list[str]]:
    """Run a call under the profiler; return its kernels between markers, and all of them."""
    names = proof.kernel_names(call, is_cuda=torch.device(device).type == "cuda")
    return proof.between_markers(names), [name for name in names if proof.MARKER not in name]


def marked(outputs: torch.Tensor, begin: Callable[[], None]) -> None:
    """Mark the backward pass of a fused backend; `math` has none of its own.

    Args:
        outputs: outputs of attention, whose backward node is searched for.
        begin: called when the backward pass begins.
    """
    node: Any = outputs.grad_fn
    for _ in range(_MOST_STEPS):
        if node is None:
            return
        if "ScaledDotProduct" in node.name() or "Attention" in node.name():
            break
        node = node.next_functions[0][0] if node.next_functions else None
    else:
        return
    device = outputs.device

    def before(*_: Any) -> None:
        begin()
        mark(device)

    node.register_prehook(before)
    node.register_hook(lambda *_: mark(device))


class AttentionReport(AlgorithmReport):
    """Report on a model's attention, with an entry for each kind of inputs."""

    def metrics(self) -> list[Metric]:
        """Return FLOPs shares as metrics of a point; none for torch's own choice."""
        if self.name == "auto":
            return []
        proven = [
            attention_pass
            for attention_pass in self._passes
            if attention_pass.status is LayerStatus.ok
        ]
        return [
            Metric.of(ATTENTION_COVERAGE, self.share),
            Metric.of(ATTENTION_PROVEN, self._share_of(proven)),
        ]

    def doubts(self) -> list[Diagnostic]:
        """Return diagnostics about attention that another backend computed."""
        share, name, doubts = self.share or 0.0, self.name, []
        if shapes := self._named(LayerStatus.fallback):
            doubts.append(
                diagnostics.make("attention_fallback", share=share, backend=name, shapes=shapes)
            )
        if shapes := self._named(LayerStatus.substituted):
            doubts.append(diagnostics.make("attention_substituted", backend=name, shapes=shapes))
        if shapes := self._named(LayerStatus.unproven):
            doubts.append(diagnostics.make("attention_unproven", backend=name, shapes=shapes))
        return doubts
