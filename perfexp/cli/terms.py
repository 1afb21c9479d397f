"""Terms: meanings of words and marks in the tables, for `perfexp help TERM`."""

from __future__ import annotations

import re

from perfexp.records.quantities import COVERAGE, named

_COVERAGE = named(COVERAGE).title
#: Meanings by term; `docs/explanation/timing.md` and `statistics.md` have the rest.
TERMS = {
    "latency": "time that one caller waits, from a call until its result is there",
    "throughput": "time or samples/s of a pipelined loop, in which no call is waited for; a CPU "
    "has its latency only",
    "device": "time that the device works on a call, behind a pre-filled queue; a CPU has none",
    "device/graph": "time that the device works on a call that is launched as one CUDA graph",
    "samples/s": "samples per call over the mean time of a pipelined call",
    "p50": "median: half of the calls take at most this long",
    "±": "half-width of the 95 % interval: of the calls' median in one process, or of the mean "
    "over what the line "
    "below the table names; of such a mean another run lies within 1.4 times ±, in 95 of 100 "
    "cases; `and "
    "runs`: most of it is how much runs of such a model differ, which one run does not show",
    "CI95": "95 % interval, printed as its half-width (±) in percent of the figure, or by both "
    "ends where these differ "
    "much in distance",
    "effective samples": "as many independent samples would be as certain as this series, whose "
    "neighbours are alike",
    "standard deviation": "of the processes' medians, in percent of their mean; the largest of "
    "several points",
    "processes": "repetition in another process: with processes=3 intervals are of the mean over "
    "processes",
    "≈": "estimate: no interval, one whose ends differ by more than a factor of 100, or "
    "computed, not measured",
    "cold start": "wall time of a fresh process until its first result",
    _COVERAGE: "share of the convolutions' FLOPs that ran the requested algorithm, and whether "
    "it is proven",
    "tf32": "TensorFloat-32, in which NVIDIA's tensor cores multiply float32 numbers: 10 bits of "
    "mantissa, not 23; "
    "perfexp help precision has the options that allow it",
    "layers": "times of a model's layers (probes.layers=true), measured in a separate process; "
    "layers.png shows them",
    "remarks": "codes of the errors, warnings and notes that qualify a figure; perfexp help CODE "
    "explains one",
    "last": "perfexp show without a folder shows the run or sweep below outputs that ended last; "
    "perfexp list runs "
    "lists all of them, the last one at the end",
    "proven": "by kernels that were observed: those of the requested algorithm, or code of "
    "perfexp or torch",
    "not verified": "cuDNN was handed the algorithm, its kernels were not observed; "
    "algorithm.verify=true does",
    "not observed": "torch chose the algorithm of these convolutions, and nothing observed which "
    "one",
    "fastest": "algorithm=fastest: for each convolution the fastest of all algorithms and "
    "torch's own, as measured",
    "memory": "peak of the timed calls, not of the first ones: tensors on a GPU, resident memory "
    "on a CPU",
    "cycles": "device time of a call × clock of the device, computed: another clock changes the "
    "time only",
    "loop/host": "time that the host takes to launch a call; longer than device time, and the "
    "device waits for it",
    "peak": "highest FLOP/s of the device in this precision by its data sheet; a ceiling is what "
    "a probe measured",
    "MFU": "FLOP/s of the pipelined loop, by the model's definition, over the device's peak in "
    "that precision",
    "energy": "of a call in the loop: mean power of the meter times the time of a call",
    "FASTER": "the ratio's interval lies wholly beyond the margin, as for SLOWER, LESS and MORE",
    "SAME": "the ratio's interval lies wholly within the margin",
    "UNDECIDED": "the ratio's interval lies neither wholly beyond the margin nor wholly within it",
    "NOT COMPARABLE": "something else differs that may explain the ratio",
}
TERMS["coverage"] = TERMS[_COVERAGE]
TERMS["?"] = TERMS["UNDECIDED"]
TERMS["pipelined"] = TERMS["throughput"]
TERMS["spread"] = TERMS["standard deviation"]
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


def meaning(term: str) -> str:
    """Return the meaning of a term or percentile, such as `p95`; empty for anything else."""
    known = {name.lower(): text for name, text in TERMS.items()}
    if text := known.get(term.lower()):
        return text
    if percentile := _PERCENTILE.fullmatch(term.lower()):
        return (
            f"percentile: {percentile[1]} % of the calls take at most this long; "
            "of latency, if that was measured"
        )
    return ""
