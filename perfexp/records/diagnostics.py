"""Diagnostics: the one table of errors, warnings and notes that qualify a figure."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml


class Severity(StrEnum):
    """How much a diagnostic limits the use of a figure; the most severe comes first."""

    ERROR = "error"  # the figure must not be used
    WARNING = "warning"  # printed with the results
    NOTE = "note"  # in the record, the tables and report.md only


class Rule(NamedTuple):
    """One row of the table; message and help are templates with their fields in braces."""

    severity: Severity
    message: str
    help: str


_error, _warning, _note = (partial(Rule, severity) for severity in Severity)

#: Each diagnostic by its code. Records keep the codes: never rename one, never reuse one. Their meanings are in
#: diagnostics.yaml.
#: `perfexp.summaries.remarks` compares diagnostics of one code by a figure of the message, usually the first.
DIAGNOSTICS: dict[str, Rule] = {
    # --- times ---
    "simulated": _warning("scripted device: every time in this record is simulated", "select a real device: gpu=auto"),
    "in_process": _note(
        "measured in the caller's process: its threads, memory and settings of torch are part of the figures",
        "measure in a process of its own: perfexp.measure('module:name')",
    ),
    "too_few_samples": _note("{n} samples ({effective} effective): {reached}", "{advice}"),
    "drift": _warning(
        "the median moved by {relative:+.1%} from the first third of the samples to the last",
        "use a longer warm-up (stopping.steady=thermal), and check what else changes on the machine",
    ),
    "not_steady": _warning(
        "after {seconds:.0f} s of calls the device was not steady; from one third of that time to the next changed "
        "{changes}",
        "raise stopping.steady_seconds, and check what else changes on the machine",
    ),
    "processes_drift": _warning(
        "from each of {processes} processes to the next the median moved in one direction, by {relative:+.1%} in all",
        "use stopping=publish, which waits for a steady device, and check what else changes on the machine",
    ),
    "processes_differ": _note(
        "the medians of {processes} processes ({medians}) differ by {spread:.1%} (standard deviation), which their "
        "calls do not show; the interval includes it",
        "use more processes (processes=N) for a narrower interval",
    ),
    "process_apart": _warning(
        "a process took {ratio:.3g} times as long as the others: {median} per call in replicate {number}, {others} in "
        "the others; time and interval include it",
        "stop other work on this machine, then measure again; of more processes (processes=N) each weighs less",
    ),
    "scaling_unexpected": _note(
        "the time is {ratio:.2f} times that of {reference}{evidence}",
        "measure this size again, on a GPU also with algorithm=benchmark, by which cuDNN compares its algorithms",
    ),
    "rate_falls": _warning(
        "reaches {ratio:.2f} of the samples/s of batch {batch}, which is smaller",
        "use batch_size={fastest}, which has the highest rate of all",
    ),
    "outside_corpus": _warning(
        "{point} is outside the {count} measured points, {range}: no time and no energy",
        "measure it, or one beyond it (sweep=sparse)",
    ),
    "corpus_stale": _warning(
        "the records in {folder} are of another state: {changes}",
        "measure again, at a few sizes (sweep=sparse)",
    ),
    "stairs": _note(
        "{curve}: {where}, as if other kernels ran; predictions between measured points are uncertain there",
        "measure more points (sweep.measured), or look at the kernels (probes.layers=true)",
    ),
    "below_resolution": _note(
        "calls of {call_us:.3g} µs are timed one by one (cache=flush), including {overhead_us:.2g} µs for the timer",
        "use a larger batch, or cache=rotate, which does not time calls one by one",
    ),
    "phases_disagree": _warning(
        "the phases of one process add up to {ratio:.3f} of its `{whole}`{why}",
        "read the phases as shares, not as times; the whole call is timed without them",
    ),
    "launch_bound": _warning(
        "the device is busy {busy}; {issuing}",
        "use a larger batch or execution=compile to keep the device busy",
    ),
    "device_idle": _warning("the device is busy {busy}; {cause}", "{advice}"),
    # --- `device`, the time on the device itself ---
    "queue_starved": _warning(
        "in {blocks} blocks the device ran out of work before the host had filled the launch queue",
        "read `device` as an upper bound; execution=compile needs fewer launches",
    ),
    "queue_exceeded": _note(
        "no `device` time: a call does not fit the launch queue, and {reason}",
        "read `throughput` and `latency`; for `device`, use a model with fewer launches (execution=compile)",
    ),
    "synchronising": _note(
        "no `device` time: the call synchronizes (it reads a value back), so it can be neither queued nor captured",
        "remove `.item()`, `.cpu()` or print from the call, or read `throughput` and `latency`",
    ),
    "waits_left_out": _note(
        "the call synchronizes; `device` is the time of an equivalent call that does not: {how}",
        "`throughput` and `latency` include the synchronization",
    ),
    "files_left_out": _warning(
        "{files} of the data can't be used, and training and evaluation do without; the first: {first}",
        "repair or remove what run.log has a line for",
    ),
    "data_left_out": _note(
        "a call that loads its batch from the host does not fit the launch queue; `device` is the time of calls whose "
        "batches are on the device already",
        "`throughput`, `latency` and the phase `data` include loading; data.pin_memory=true copies without waiting",
    ),
    "device_of_graph": _note(
        "the call does not fit the launch queue; `device` is the time of the call captured as a CUDA graph, whose "
        "kernels may follow each other more closely",
        "compare it with that of other graphs; execution.cuda_graph=true captures every call that does not synchronize",
    ),
    # --- the machine during the measurement ---
    "busy_host": _warning(
        "other processes used {load:.1f} of {cores} CPU cores during the measurement",
        "stop other work on this machine, then measure again",
    ),
    "pace_changed": _warning(
        "a call takes {pipelined_ms:.3g} ms in the pipelined loop, but {waiting_ms:.3g} ms if the host waits for each: "
        "the host's pace changed in between",
        "read samples/s and latency as those of two states of the host, and measure in several processes (processes=3)",
    ),
    "shared_node": _warning(
        "other jobs had {gpus} GPUs and {cpus} CPUs of node {node} when the measurement started",
        "read `latency` and `throughput` as upper and lower bounds; hydra.launcher.exclusive=true requests whole nodes",
    ),
    "shared_host": _warning(
        "other runs were measured on the other devices of this host at the same time",
        "compare `device` only; hydra.launcher.exclusive=true measures latency and throughput one run at a time",
    ),
    "moved": _warning(
        "after a restart of its job, the run went on with another device of the same kind: {changes}",
        "measure again for points of one device (another output_dir)",
    ),
    "shared_device": _warning("{evidence}", "measure when nobody else uses the device"),
    "clock_moved": _warning(
        "the device's clock differed by {change:.1%} between the blocks of `device`: {states}",
        "use a longer warm-up (stopping.steady=thermal); compare cycles_per_call, which does not depend on the clock",
    ),
    "throttled": _warning(
        "the driver throttled the device for {share:.0%} of the time of `{series}`: {reasons}",
        "let the device cool, or read the figure as one under this limit; perfexp changes no limits",
    ),
    "loader_competes": _note(
        "{workers} and {threads} share {cores} and slow each other down",
        "lower execution.threads or data.workers (data.workers=0 loads between the calls)",
    ),
    "threads_unchanged": _warning(
        "{requested} inter-op threads were requested, but torch had already started with {actual}",
        "measure in a separate process",
    ),
    # --- the model ---
    # The figure carries the name of a precision that did not run.
    "precision_unavailable": _error(
        "{precision} was requested, but fp32 was measured: {reason}",
        "use precision=fp32, or a device that supports {precision}",
    ),
    "not_quantized": _warning(
        "{model} is prepared for quantization, but runs in floating point", "read it as {plain}; int8 is not measured"
    ),
    "loss_not_finite": _warning(
        "the {which} loss is {loss}: the arithmetic was timed, but the model did not learn",
        "lower mode.train.optimizer.lr, or choose a precision with more range",
    ),
    "output_not_finite": _warning(
        "the outputs of the last call contain infinities or NaN: the arithmetic was timed, but its result is useless",
        "choose a precision with more range (precision=bf16, precision=fp32), or check the weights",
    ),
    "inputs_changed": _warning(
        "the model changes its inputs in place: each call works on a copy of them, and its time includes the copying",
        "clone the inputs in the model, or use operations that are not in place",
    ),
    "settings_changed": _warning(
        "the model changed torch's settings while it was measured: {changes}",
        "set them before the model is called, or by execution.…, so that the record has those of all calls",
    ),
    "no_work": _warning(
        "by the count, a call of this model computes nothing with its parameters",
        "if it returns a result of an earlier call, or leaves the work to another thread, time what it leaves out",
    ),
    "accuracy_of_training_data": _note(
        "there are no held-out images: the accuracy is that of the training images",
        "put the images into subfolders train and val",
    ),
    "work_uncounted": _warning(
        "no FLOP formula for {ops}: MACs, FLOPs and rates are lower bounds",
        "compare these figures only between runs of the same model",
    ),
    "work_random": _warning(
        "the model skips layers at random: MACs, FLOPs and bytes are those of one draw, rates are of many",
        "measure with mode=inference, or set the probability of skipping a layer to 0",
    ),
    "above_the_ceiling": _warning(
        "{metric} is {share:.0%}: the model's analytic work exceeds what the device can do in that time",
        "an algorithm that multiplies less (Winograd, FFT) explains it; otherwise the ceiling is of another precision, "
        "or the count is wrong: please report it",
    ),
    "tf32_ceiling": _note(
        "by the device's data sheet, TF32 computes matrix products {ratio:.1f} times as fast as fp32 at most",
        "precision=tf32 uses it, with 10 bits of mantissa; probes.correctness=true shows the error",
    ),
    # --- convolution algorithms ---
    "algorithm_fallback": _warning(
        "{share} of the convolutions' FLOPs ran as requested ({algorithm}); exceptions: {layers}",
        "read the time as that of a mix, set these layers by algorithm.layers, or refuse such a model by "
        "algorithm.on_unsupported=error",
    ),
    # The figure carries the name of an algorithm that did not run, as the kernels prove.
    "algorithm_substituted": _error(
        "cuDNN ran other kernels than {algorithm} requires: {layers}",
        "read the time as that of the kernels that ran, or set these layers by algorithm.layers",
    ),
    "algorithm_unproven": _note(
        "no proof that cuDNN ran {algorithm}: {layers}",
        "run `perfexp calibrate kernels`, or trust cuDNN's report",
    ),
    "families_foreign": _warning(
        "the table of kernels was {where}: a proof holds as far as names mean the same on both",
        "run `perfexp calibrate kernels` on this device, then measure again",
    ),
    "choice_slower": _warning(
        "the fastest algorithms of all layers take {ratio:.3f} of the time of {baseline} end to end, {how}",
        "measure when nothing else runs, with algorithm.reuse=false; or use {baseline}",
    ),
    "speedup_unsure": _warning(
        "{baseline} and {algorithm} are equally fast within {within:.1%}, {how}: {algorithm} is {ratio:.3f} times as "
        "fast (95 % interval {low:.3f} to {high:.3f})",
        "report no gain; for a narrower interval measure when nothing else runs",
    ),
    "rivals_by_graph": _note(
        "a baseline does not fit the launch queue, so all were compared as CUDA graphs; `device` is the time of calls "
        "launched one by one",
        "read the speedups; do not compare a baseline's time with `device`",
    ),
    # --- layers ---
    "layers_disagree": _warning(
        "a call takes {profiled_ms:.4g} ms {how}, {clean_ms:.4g} ms without profiling{difference}", "{advice}"
    ),
    "layers_unattributed": _note(
        "{share:.1%} of the time could not be assigned to a layer: {kernels}",
        "the sum includes it; the rows are too small by it",
    ),
    "layers_unheld": _note(
        "the device started a call before it was queued: gaps between its kernels are the host's, which is slower "
        "under a profiler{details}",
        "read the kernels' times, not the gaps; a smaller batch or execution=compile needs fewer launches",
    ),
    # --- energy ---
    "meter_missing": _warning(
        "no energy was measured, {reason}",
        "fix what is named (perfexp doctor checks it), or leave out probes.energy=true",
    ),
    # The counter is broken: whatever it shows is not the energy of the calls.
    "meter_stuck": _error(
        "the energy counter of {meter} did not change in {seconds:.1f} s: no energy",
        "reload the driver or restart the machine; `perfexp doctor` shows whether the counter moves again",
    ),
    # The difference of two readings is off by an unknown number of ranges.
    "meter_wrapped": _error(
        "the energy counter of {meter} went from {before:.6g} back to {after:.6g} J, its range is unknown: no energy",
        "measure again; a counter that wraps within minutes must report its range (max_energy_range_uj)",
    ),
    # One of two independent readings of the same energy is wrong, and nothing shows which.
    "meter_disagrees": _error(
        "{meter}: {counter:.4g} W by the energy counter, {integral:.4g} W by integrated power ({difference:+.1%}, "
        "tolerated ±{tolerance:.0%}) after {seconds:.1f} s: no energy",
        "compare them at rest (perfexp doctor), and try another driver",
    ),
    "meter_unchecked": _note(
        "{meter}: the power varies so much that its integral cannot check the counter to better than ±{tolerance:.0%} "
        "in {seconds:.1f} s (they differ by {difference:+.1%})",
        "the energy is the counter's, with its interval; a larger batch draws a steadier power",
    ),
    "meter_coarse": _warning(
        "updates of {meter} were seen so late between the calls that the window of {window:.2f} s is uncertain by "
        "{uncertainty:.1%}",
        "use a smaller batch, so that the meter is read more often; the interval includes it",
    ),
    "meter_shared": _warning("{meter} also counts the energy of {others}", "measure when nobody else uses it"),
    "meter_mig": _note(
        "{meter}: MIG is on, and the board's meter counts all of its slices together: no energy",
        "measure on a whole board (nvidia-smi -i N -mig 0, as its administrator)",
    ),
    "meter_average": _note(
        "the power of {meter} is an average over about a second: its integral follows changes late",
        "use an NVIDIA driver of 530 or later for the instantaneous power; trust the counter",
    ),
    "meter_no_counter": _note(
        "{meter} has no energy counter: the energy is the integral of its power, without a check",
        "read it as an estimate; NVIDIA boards since Volta have a counter",
    ),
    "device_untested": _warning(
        "perfexp was not tried on this kind of device ({device}): each call waits for it, and has no device time",
        "compare a figure with one of another tool",
    ),
    "meter_untested": _note(
        "{meter}: this kind of meter follows its documentation and has not been tried on hardware",
        "compare it with another meter, and report the result",
    ),
    "energy_pace": _note(
        "the energy of a call depends on its pace: {paces}",
        "compare energies at one pace; {advice} brings loop and device together",
    ),
    # --- batch sizes ---
    "largest_batch_open": _note(
        "batch {batch} fits and {beyond}: {trials} trials did not find the edge",
        "measure the batch sizes between them with batch_size=[…]",
    ),
    # --- several devices ---
    "mixed_devices": _warning(
        "the ranks use different devices ({devices}), and all run at the pace of the slowest",
        "select devices of one kind with CUDA_VISIBLE_DEVICES or gpu.index",
    ),
    "mixed_hosts": _warning(
        "the nodes differ, and all run at the pace of the slowest ({changes})",
        "select nodes of one kind with cluster.options or the site's constraint",
    ),
    "ranks_disagree": _warning(
        "a call takes {ratio:.3f} of its timed duration in bursts without control messages between the ranks",
        "stop other work on this machine; for short calls, read ranks/samples_per_second, the rate without messages",
    ),
    "multi_gpu_slower": _warning(
        "{count} devices together reach {ratio:.2f} of the samples/s of {fewer}{scope}",
        "use a larger batch_size per device; probes.scaling=true shows what the difference is lost to",
    ),
    # --- profiles ---
    "profile_incomplete": _warning("the profile is incomplete: {reason}", "see run.log"),
    "backward_incomplete": _warning(
        "{profiler} saw {forward:g} kernels of the forward pass, but only {backward:g} of the backward pass",
        "check the timeline for another stream or process, and profile again; if it persists, please report it",
    ),
    "reports_missing": _warning(
        "nsys created no {reports}",
        "choose others with profiler.reports, or create them later with perfexp stats DIR -r REPORT",
    ),
    "roofline_missing": _warning("no roofline: {reason}", "{advice}"),
}


def families() -> dict[str, dict[str, str]]:
    """Return the meaning of each code, by family."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, dict[str, str]])


def meanings() -> dict[str, str]:
    """Return the meaning of each code."""
    return {code: meaning for codes in families().values() for code, meaning in codes.items()}


class Diagnostic(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An error, warning or note that qualifies a figure.

    Attributes:
        code: stable short name (`drift`, `too_few_samples`, …).
        severity: severity by the table of this version; the stored one counts for codes without a row only.
        message: observation with its figures; `detail` in JSON.
        help: advice to the user; `remedy` in JSON.
    """

    code: str
    severity: Severity = Severity.WARNING
    message: str = msgspec.field(name="detail")
    help: str = msgspec.field(name="remedy", default="")

    def __post_init__(self) -> None:
        if self.code in DIAGNOSTICS:
            self.severity = DIAGNOSTICS[self.code].severity

    def __str__(self) -> str:
        return f"{self.severity}: {self.message} ({self.code})"

    @property
    def is_note(self) -> bool:
        """Whether consoles leave it out."""
        return self.severity is Severity.NOTE


def make(code: str, /, **fields: object) -> Diagnostic:
    """A diagnostic of the table, with values for its templates; tests check the fields of each call against them."""
    rule = DIAGNOSTICS[code]
    return Diagnostic(code=code, message=rule.message.format(**fields), help=rule.help.format(**fields))
