"""Terms: meanings of the words and marks of the tables, in a line each, for `perfexp help TERM`."""

from __future__ import annotations

import re

#: Meanings by term; `docs/explanation/timing.md` and `statistics.md` have the rest.
TERMS = {
    "latency": "time that one caller waits, from a call until its result is there",
    "throughput": "wall time per call of a pipelined loop, in which no call is waited for; a CPU has none",
    "device": "time that the device works on a call, behind a pre-filled queue; a CPU has none",
    "device/graph": "time that the device works on a call that is launched as one CUDA graph",
    "samples/s": "samples per call over the mean time of a pipelined call",
    "p50": "median: half of the calls take at most this long",
    "±": "half-width of the 95 % interval; the line below the table names whom the interval holds for",
    "≈": "estimate: no interval, one that may be too narrow, or computed, not measured; before a ratio: undecided",
    "cold start": "wall time of a fresh process until its first result",
    "algorithm coverage": "share of the convolutions' FLOPs that ran the requested algorithm, and whether it is proven",
    "memory": "peak of the timed calls, not of the first ones: tensors on a GPU, resident memory on a CPU",
    "cycles": "clock cycles of the device per call, which do not change with its clock",
    "MFU": "FLOP/s of the pipelined loop, by the model's definition, over the device's peak in that precision",
    "energy": "of a call in the loop: mean power of the meter times the time of a call",
    "FASTER": "the ratio's interval lies wholly beyond the margin, as for SLOWER, LESS and MORE",
    "SAME": "the ratio's interval lies wholly within the margin",
    "UNDECIDED": "the ratio's interval lies neither wholly beyond the margin nor wholly within it",
    "NOT COMPARABLE": "something else differs that may explain the ratio",
}
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


def meaning(term: str) -> str:
    """Return the meaning of a term or a percentile (`p95`); empty for anything else."""
    known = {name.lower(): text for name, text in TERMS.items()}
    if text := known.get(term.lower()):
        return text
    if percentile := _PERCENTILE.fullmatch(term.lower()):
        return f"percentile: {percentile[1]} % of the calls take at most this long; of latency, if that was measured"
    return ""
