"""Diagnostics: the table of errors, warnings and notes that qualify a figure.

Code that notices a reason to distrust a figure calls `make(CODE, …)` and adds the result to the
point or record (`doubts`). Reports print errors and warnings as compilers do, with a help line.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

#: Smallest ratio before taking a logarithm.
_LEAST_RATIO = 1e-9


class Severity(StrEnum):
    """How much a diagnostic limits the use of a figure, most severe first."""

    ERROR = "error"  # do not use the figure
    WARNING = "warning"  # printed with the results
    NOTE = "note"  # in the record, the tables and report.md only


class Rule(NamedTuple):
    """Row of the table; message and help are templates with fields in braces.

    Attributes:
        by: field that ranks diagnostics with this code, and its format, for example `share:.0%`.
            Empty if they are not ranked.
        badness: how bad a value of the field is; by default its distance from zero.
        disturbs: whether it reports concurrent work, which says nothing about the next measurement.
        shared: whether a point's times and layers share it, so the point shows it once.
        leaves_shares: whether layer times are unreliable, so that they are only shown as shares.
    """

    severity: Severity
    message: str
    help: str
    by: str = ""
    badness: Callable[[float], float] = abs
    disturbs: bool = False
    shared: bool = False
    leaves_shares: bool = False


def _apart(ratio: float) -> float:
    """Return how far a ratio is from one, in either direction, as a logarithm."""
    return abs(math.log(max(ratio, _LEAST_RATIO)))


_error, _warning, _note = (partial(Rule, severity) for severity in Severity)

#: Diagnostics by code. Within a severity, those that invalidate more of a figure come first.
#: Records store the codes: never reuse one, and add removed codes to `MERGED`. Meanings are in
#: diagnostics.yaml.
DIAGNOSTICS: dict[str, Rule] = {
    # --- what ran is not what was asked for ---
    "simulated": _warning(
        "scripted device: every time in this record is simulated", "select a real device: gpu=auto"
    ),
    "in_process": _note(
        "measured in the caller's process: its threads, memory and settings of torch are part of "
        "the figures",
        "measure in a process of its own: perfexp.measure('module:name')",
    ),
    # The figure is named after a precision that did not run.
    "precision_unavailable": _error(
        "{precision} was requested, but fp32 was measured: {reason}",
        "use precision=fp32, or a device that supports {precision}",
    ),
    # The figure is named after an algorithm that did not run, as the kernels prove.
    "algorithm_substituted": _error(
        "cuDNN ran other kernels than {algorithm} requires: {layers}",
        "read the time as that of the kernels that ran, or set these layers by algorithm.layers",
        shared=True,
    ),
    "not_finite": _warning(
        "{what}: the arithmetic was timed, but its result is useless",
        "choose a precision with more range (precision=bf16, precision=fp32), or check weights "
        "and learning rate",
    ),
    "not_quantized": _warning(
        "{model} is prepared for quantization, but runs in floating point",
        "read it as {plain}; int8 is not measured",
    ),
    "settings_changed": _warning(
        "torch's settings are not those that were requested: {changes}",
        "set them by execution.…, so that the record has those of all calls, or measure in a "
        "separate process",
    ),
    "inputs_changed": _warning(
        "the model changes its inputs in place: each call works on a copy of them, and its time "
        "includes the copying",
        "clone the inputs in the model, or use operations that are not in place",
    ),
    "data_incomplete": _warning("{what}", "{advice}"),
    "mixed_devices": _warning(
        "the run used different {what}: {changes}",
        "select devices and nodes of one kind (CUDA_VISIBLE_DEVICES, gpu.index, cluster.options), "
        "then measure again",
    ),
    "algorithm_fallback": _warning(
        "{share:.1%} of the convolutions' FLOPs ran as requested ({algorithm}); exceptions: "
        "{layers}",
        "read the time as that of a mix, set these layers by algorithm.layers, or refuse such a "
        "model by algorithm.on_unsupported=error",
        by="share:.1%",
        badness=operator.neg,
    ),
    "algorithm_unproven": _warning(
        "no full proof that cuDNN ran {algorithm}: {why}",
        "run `perfexp calibrate kernels` on this device, then measure again; or trust cuDNN's "
        "report",
    ),
    "attention_substituted": _error(
        "torch ran another attention backend than {backend}: {shapes}",
        "read the time as that of the kernels that ran",
        shared=True,
    ),
    "attention_fallback": _warning(
        "{share:.1%} of attention's FLOPs ran as requested ({backend}); exceptions: {shapes}",
        "read the time as that of a mix, or choose execution.attention=fastest",
        by="share:.1%",
        badness=operator.neg,
    ),
    "attention_unproven": _warning(
        "no full proof that attention ran by {backend}: {shapes}",
        "read the backend as requested, not as proven",
    ),
    # --- other work, and the clock of the device ---
    "shared_device": _warning(
        "{evidence}", "measure when nobody else uses the device", disturbs=True
    ),
    "shared_host": _warning(
        "other work had a part of the host during the measurement: {others}",
        "compare `device` only, or request the whole host (hydra.launcher.exclusive=true)",
        disturbs=True,
    ),
    "busy_host": _warning(
        "other processes used {load:.1f} of {cores} CPU cores during the measurement",
        "stop other work on this machine, then measure again",
        by="load:.1f",
        disturbs=True,
        shared=True,
    ),
    "pace_changed": _warning(
        "a call takes {pipelined_ms:.3g} ms in the pipelined loop, but {waiting_ms:.3g} ms if the "
        "host waits for each: the host's pace changed in between",
        "do not compare samples/s with latency, they describe two states of the host; measure in "
        "several processes (processes=3)",
        disturbs=True,
    ),
    "throttled": _warning(
        "the driver throttled the device for {share:.0%} of the time of `{series}`: {reasons}",
        "let the device cool, or read the figure as one under this limit; perfexp changes no "
        "limits",
        by="share:.0%",
    ),
    "clock_moved": _warning(
        "the device's clock differed by {change:.1%} between the blocks of `device`: {states}",
        "use a longer warm-up (stopping.steady=thermal); compare cycles_per_call, which does not "
        "depend on the clock",
        by="change:.1%",
    ),
    # --- the samples ---
    "drift": _warning(
        "{changes}",
        "use a longer warm-up (stopping.steady=thermal, stopping=publish), and check what else "
        "changes on the machine",
        by="relative:+.1%",
    ),
    "process_apart": _warning(
        "a process took {ratio:.3g} times as long as the others: {median} per call in process "
        "{number}, {others} in the others; time and interval include it",
        "stop other work on this machine and measure again, or use more processes (processes=N), "
        "so that one outlier weighs less",
        by="ratio:.3g",
        badness=_apart,
    ),
    "processes_differ": _note(
        "the medians of {processes} processes ({medians}) differ by {spread:.1%} (standard "
        "deviation), more than the calls within a process explain; the interval includes it",
        "use more processes (processes=N) for a narrower interval",
    ),
    "too_few_samples": _note(
        "{n} samples ({effective} effective): {reached}", "{advice}", by="width:.1%"
    ),
    "below_resolution": _note(
        "calls of {call_us:.3g} µs are timed one by one (cache=flush), including "
        "{overhead_us:.2g} µs for the timer",
        "use a larger batch, or cache=rotate, which does not time calls one by one",
    ),
    "scaling_unexpected": _note(
        "the time is {ratio:.2f} times that of {reference}{evidence}",
        "measure this size again, on a GPU also with algorithm=benchmark, by which cuDNN compares "
        "its algorithms",
        by="ratio:.2f",
        badness=_apart,
    ),
    "stairs": _note(
        "{curve}: {where}, as if other kernels ran; predictions between measured points are "
        "uncertain there",
        "measure more points (sweep.measured), or look at the kernels (probes.layers=true)",
    ),
    "algorithm_without_effect": _note(
        "{algorithm} computed no convolution at {count} sizes, so no others were measured",
        "read the times as those of algorithm=default",
    ),
    "corpus_unfit": _warning(
        "the records do not fit: {why}", "measure there, at a few sizes (sweep=sparse)"
    ),
    # --- `device`, the time on the device itself ---
    "queue_starved": _warning(
        "in {blocks} blocks the device ran out of work before the host had filled the launch queue",
        "read `device` as an upper bound; execution=compile needs fewer launches",
        by="blocks",
    ),
    "device_missing": _note(
        "no `device` time: {reason}", "read `throughput` and `latency`; {advice}"
    ),
    "device_leaves_out": _note(
        "`device` is the time of an equivalent call: {how}",
        "read `throughput` and `latency` for the call itself",
        shared=True,
    ),
    "device_of_graph": _note(
        "a call does not fit the launch queue; {what} captured as a CUDA graph, whose kernels may "
        "follow each other more closely",
        "compare such times with each other; execution.cuda_graph=true captures every call that "
        "does not synchronize",
    ),
    # --- what limits the rate ---
    "rate_falls": _warning(
        "reaches {ratio:.2f} of the samples/s of batch {batch}, which is smaller",
        "use batch_size={fastest}, which has the highest rate of all",
        by="ratio:.2f",
        badness=operator.neg,
    ),
    "multi_gpu_slower": _warning(
        "{count} devices together reach {ratio:.2f} of the samples/s of {fewer}{scope}",
        "use a larger batch_size per device; probes.scaling=true shows where the time goes",
        by="ratio:.2f",
        badness=operator.neg,
    ),
    "ranks_disagree": _warning(
        "a call takes {ratio:.3f} of its timed duration in bursts without control messages "
        "between the ranks",
        "stop other work on this machine; for short calls, read ranks/samples_per_second, the "
        "rate without messages",
        by="ratio:.3f",
        badness=_apart,
    ),
    "device_idle": _warning(
        "the device idles {idle:.0%} of the loop{of_mean}; {cause}", "{advice}", by="idle:.0%"
    ),
    "loader_competes": _note(
        "{workers} and {threads} share {cores} and slow each other down",
        "lower execution.threads or data.workers (data.workers=0 loads between the calls)",
    ),
    "largest_batch_open": _note(
        "batch {batch} fits and {beyond}: {trials} trials did not find the edge",
        "measure the batch sizes between them with batch_size=[…]",
    ),
    # --- work and algorithms ---
    "not_faster": _warning(
        "{algorithm} takes {ratio:.3f} of the time of {baseline} end to end (95 % interval "
        "{low:.3f} to {high:.3f}), {how}: it is not clearly faster",
        "report no gain, or use {baseline}; for a narrower interval measure when nothing else "
        "runs, with algorithm.reuse=false",
        by="ratio:.3f",
    ),
    "work_uncounted": _warning(
        "MACs, FLOPs and rates are not those of the calls: {why}",
        "compare these figures only between runs of the same model",
    ),
    "above_the_ceiling": _warning(
        "{metric} is {share:.0%}: the model's analytic work exceeds what the device can do in "
        "that time",
        "an algorithm that multiplies less (Winograd, FFT) explains it; otherwise the ceiling is "
        "of another precision, or the count is wrong: please report it",
        by="share:.0%",
    ),
    "tf32_ceiling": _note(
        "by the device's data sheet, TF32 computes matrix products {ratio:.1f} times as fast as "
        "fp32 at most",
        "precision=tf32 uses it, with 10 bits of mantissa; probes.correctness=true shows the error",
    ),
    # --- layers, phases, energy and profiles ---
    "layers_disagree": _warning(
        "a call takes {profiled_ms:.4g} ms {how}, {clean_ms:.4g} ms without profiling "
        "({difference:+.1%}{details})",
        "{advice}",
        by="difference:+.1%",
        leaves_shares=True,
    ),
    "layers_inexact": _note("{what}", "{advice}", by="share:.1%"),
    "phases_disagree": _warning(
        "the phases of one process add up to {ratio:.3f} of its `{whole}`{why}",
        "read the phases as shares, not as times; the whole call is timed without them",
        by="ratio:.3f",
        badness=_apart,
    ),
    # Either the counter is broken or one of two readings is wrong; which of them is unknown.
    "meter_fault": _error(
        "{meter}: {fault}: no energy",
        "measure again; `perfexp doctor` shows whether the counter moves and agrees with the "
        "power, another driver may help",
    ),
    "meter_missing": _warning(
        "no energy was measured, {reason}",
        "fix what is named (perfexp doctor checks it), or set probes.energy=false",
    ),
    "meter_shared": _warning(
        "{meter} also counts the energy of {others}", "measure when nobody else uses it"
    ),
    "meter_limited": _note(
        "{meter}: {limit}",
        "the interval includes every error that is known; the meter is most accurate on an NVIDIA "
        "board since Volta, with a driver of 530 or later and a larger batch",
    ),
    "untested": _warning(
        "perfexp was not tried on {what}, and follows its documentation",
        "compare a figure with one of another tool, and report the result",
    ),
    "energy_pace": _note(
        "the energy of a call depends on its pace: {paces}",
        "compare energies at one pace; with {advice} the timed loop can keep the device busy",
    ),
    "profile_incomplete": _warning("the profile is incomplete: {reason}", "{advice}"),
}

_SEVERITIES = list(Severity)
_ORDER = {code: place for place, code in enumerate(DIAGNOSTICS)}

#: Codes from earlier versions, with their current codes.
MERGED = {
    **dict.fromkeys(("processes_drift", "not_steady"), "drift"),
    "launch_bound": "device_idle",
    **dict.fromkeys(("queue_exceeded", "synchronising"), "device_missing"),
    **dict.fromkeys(("waits_left_out", "data_left_out"), "device_leaves_out"),
    "rivals_by_graph": "device_of_graph",
    "shared_node": "shared_host",
    **dict.fromkeys(("loss_not_finite", "output_not_finite"), "not_finite"),
    "threads_unchanged": "settings_changed",
    **dict.fromkeys(("no_work", "work_random"), "work_uncounted"),
    **dict.fromkeys(("meter_stuck", "meter_wrapped", "meter_disagrees"), "meter_fault"),
    **dict.fromkeys(
        ("meter_unchecked", "meter_coarse", "meter_average", "meter_no_counter"), "meter_limited"
    ),
    **dict.fromkeys(("device_untested", "meter_untested"), "untested"),
    **dict.fromkeys(("choice_slower", "speedup_unsure"), "not_faster"),
    "families_foreign": "algorithm_unproven",
    **dict.fromkeys(("outside_corpus", "corpus_stale"), "corpus_unfit"),
    **dict.fromkeys(("layers_unattributed", "layers_unheld"), "layers_inexact"),
    **dict.fromkeys(("files_left_out", "accuracy_of_training_data"), "data_incomplete"),
    "meter_mig": "meter_missing",
    **dict.fromkeys(("mixed_hosts", "moved"), "mixed_devices"),
    **dict.fromkeys(
        ("backward_incomplete", "reports_missing", "roofline_missing"), "profile_incomplete"
    ),
}


def families() -> dict[str, dict[str, str]]:
    """Return the meaning of each code by family, a heading of the reference page."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, dict[str, str]])


def meanings() -> dict[str, str]:
    """Return the meaning of each code, one sentence, for the reference and `perfexp help CODE`."""
    return {code: meaning for codes in families().values() for code, meaning in codes.items()}


class Diagnostic(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Error, warning or note that qualifies a figure.

    Attributes:
        code: stable short name (`drift`, `too_few_samples`, …); an earlier version's code becomes
            the current code.
        severity: severity in the current table. The stored severity only matters for unknown codes.
        message: observation with its figures; `detail` in JSON.
        help: advice to the user; `remedy` in JSON.
        fields: values in message and help, by name; unset in records of earlier versions.
    """

    code: str
    severity: Severity = Severity.WARNING
    message: str = msgspec.field(name="detail")
    help: str = msgspec.field(name="remedy", default="")
    fields: dict[str, str | int | float] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        self.code = MERGED.get(self.code, self.code)
        self.severity = self.rule.severity

    def __str__(self) -> str:
        return f"{self.severity}: {self.message} ({self.code})"

    @property
    def rule(self) -> Rule:
        """Return the table row; a generic row for codes that this version does not know."""
        return DIAGNOSTICS.get(self.code) or Rule(self.severity, self.message, self.help)

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key: by severity, then in table order, with unknown codes last.

        Reports sort diagnostics by it.
        """
        rank = _ORDER.get(self.code, len(_ORDER))
        return _SEVERITIES.index(self.severity), rank

    @property
    def is_note(self) -> bool:
        """Return whether consoles leave it out.

        Notes are only in the record, in tables and in report.md.
        """
        return self.severity is Severity.NOTE

    @property
    def figure(self) -> float | None:
        """Return the value that ranks diagnostics with this code, such as a share or ratio.

        Returns:
            None if this code is not ranked, or an earlier version stored the diagnostic.
        """
        field_name = self.rule.by.partition(":")[0]
        value = self.fields.get(field_name) if self.fields else None
        if isinstance(value, int | float):
            return value
        return None


def make(code: str, /, **fields: object) -> Diagnostic:
    """Return a diagnostic from the table, with values for its templates.

    Tests check that each call passes the fields that its templates need.

    Raises:
        KeyError: the table lacks the code, or the fields lack a value.
    """
    rule = DIAGNOSTICS[code]
    message, advice = rule.message.format(**fields), rule.help.format(**fields)
    values = {name: _stored(value) for name, value in fields.items() if value is not None}
    return Diagnostic(code=code, message=message, help=advice, fields=values or msgspec.UNSET)


def has(diagnostics: Iterable[Diagnostic], code: str) -> bool:
    """Return whether any diagnostic has this code, which must be in the table."""
    assert code in DIAGNOSTICS
    return any(diagnostic.code == code for diagnostic in diagnostics)


def without(diagnostics: Iterable[Diagnostic], code: str) -> list[Diagnostic]:
    """Return all diagnostics but those with this code, which must be in the table.

    Code that judges again replaces a stored diagnostic this way.
    """
    assert code in DIAGNOSTICS
    return [diagnostic for diagnostic in diagnostics if diagnostic.code != code]


def _stored(value: object) -> str | int | float:
    """Return a finite number unchanged, so that it can rank; anything else as text."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if is_number else str(value)  # type: ignore[return-value]
