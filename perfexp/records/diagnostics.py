"""Doubts: every reason not to trust a figure blindly that the measuring code can find, with what to do about it.

What disturbs a measurement from outside is in `perfexp.records.disturbances`.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.records.record import Diagnostic
from perfexp.statistics.estimators import Interval

#: Tick and record may be this fraction of a call that is timed alone before the point says so.
_RESOLUTION_TOLERANCE = 0.01


def queue_starved(blocks: int) -> Diagnostic:
    """The host could not fill the device's queue in time.

    Args:
        blocks: in how many blocks.
    """
    return Diagnostic(
        code="queue_starved",
        detail=f"in {blocks} blocks the device ran out of work before the host had filled its queue",
        remedy="read `device` as an upper bound; fewer launches (execution=compile) are filled in faster",
    )


def above_the_ceiling(name: str, share: float) -> Diagnostic:
    """More work was done than the device can do.

    Args:
        name: of the metric.
        share: of the ceiling.
    """
    return Diagnostic(
        code="above_the_ceiling",
        detail=f"{name} is {share:.0%}: the model's work by definition is more than the device can do in that time",
        remedy="an algorithm that multiplies less (Winograd, FFT) explains it; otherwise the precision that ran is not "
        "the one that the ceiling is of, or the count is wrong: please report it",
    )


def work_uncounted(names: Sequence[str]) -> Diagnostic:
    """The work of some operators of a call is not known.

    Args:
        names: of the operators.
    """
    return Diagnostic(
        code="work_uncounted",
        detail=f"nobody has said how much {', '.join(names)} compute: MACs, FLOPs and rates are too low by that",
        remedy="read them as lower bounds",
    )


def ranks_disagree(ratio: float) -> Diagnostic:
    """Several ranks that take another time together than the calls of the first one took.

    Args:
        ratio: of the time of a call in stretches of all ranks to that of the first one's calls.
    """
    return Diagnostic(
        code="ranks_disagree",
        detail=f"a call takes {ratio:.3f} of the timed one where no rank hears of another but through the gradients",
        remedy="end other work on this machine; for calls that are short for their host, ranks/samples_per_second "
        "is the rate without perfexp's word to the other ranks",
    )


def mixed_devices(names: Sequence[str]) -> Diagnostic:
    """Ranks on different devices.

    Args:
        names: of the devices.
    """
    return Diagnostic(
        code="mixed_devices",
        detail=f"the ranks work on different devices ({', '.join(names)}), and all go at the pace of the slowest",
        remedy="choose devices that are alike by CUDA_VISIBLE_DEVICES or gpu.index",
    )


def multi_gpu_slower(ratio: float, count: int, fewer: int) -> Diagnostic:
    """Several devices together are slower than fewer of them.

    Args:
        ratio: samples per second of the slower run, over those of the other.
        count: devices of the slower run.
        fewer: devices of the run that it is compared with.
    """
    return Diagnostic(
        code="multi_gpu_slower",
        detail=f"{count} devices together reach {ratio:.2f} of the samples/s of {fewer}",
        remedy="a larger batch_size per device; profiler=nsys shows what the devices wait for",
    )


def queue_exceeded(no_graph: str) -> Diagnostic:
    """A call does not fit into the device's queue, and is no graph either.

    Args:
        no_graph: why it could not be measured as a captured graph.
    """
    return Diagnostic(
        code="queue_exceeded",
        detail=f"a call has more launches than the device's queue takes, and {no_graph}: there is no `device` time",
        remedy="read `throughput` and `latency`; for `device`, a model with fewer launches (execution=compile)",
    )


def synchronising() -> Diagnostic:
    """A call waits for the device inside, so that neither can its queue be filled nor the call be captured."""
    return Diagnostic(
        code="synchronising",
        detail="the call waits for the device inside (it reads a value back), so that neither can the device's queue "
        "be filled nor the call be captured as a graph: there is no `device` time",
        remedy="take the `.item()`, `.cpu()` or print out of the call, or read `throughput` and `latency`",
    )


def waits_left_out(how: str) -> Diagnostic:
    """The device's time is that of a call which does not wait.

    Args:
        how: it does without.
    """
    return Diagnostic(
        code="waits_left_out",
        detail=f"the call waits for the device inside; its `device` time is that of one which comes to the same: {how}",
        remedy="`throughput` and `latency` are those of the call as it is, waits included",
    )


def data_left_out() -> Diagnostic:
    """The device's time is that of calls whose batches lie on the device."""
    return Diagnostic(
        code="data_left_out",
        detail="a call that fetches its batch from the host does not fit into the device's queue; the `device` time is "
        "that of calls whose batches are on the device already",
        remedy="`throughput`, `latency` and the phase `data` have the fetching; a batch in pinned memory "
        "(data.pin_memory=true) is copied without waiting",
    )


def device_of_graph() -> Diagnostic:
    """The device's time is that of the call as one launch, which nobody asked for."""
    return Diagnostic(
        code="device_of_graph",
        detail="a call does not fit into the device's queue; the `device` time is that of the call captured as a "
        "graph, whose kernels may follow each other more closely",
        remedy="compare it with that of other graphs; execution.cuda_graph=true makes one of each call that does not "
        "wait for the device inside",
    )


def not_captured_together() -> Diagnostic:
    """A call of several ranks does not fit into the device's queue."""
    return Diagnostic(
        code="queue_exceeded",
        detail="a call does not fit into the device's queue, or waits inside (each layer of SyncBatchNorm does), and "
        "calls of several ranks are not captured: there is no `device` time",
        remedy="read `throughput` and `latency`; one card has `device` where its queue takes the call",
    )


def below_resolution(call_seconds: float, uncertain_seconds: float) -> Diagnostic | None:
    """A call is timed alone and is too short for that.

    Args:
        call_seconds: its time.
        uncertain_seconds: of the clock and of recording events.
    """
    if uncertain_seconds <= _RESOLUTION_TOLERANCE * call_seconds:
        return None
    return Diagnostic(
        code="below_resolution",
        detail=f"calls of {call_seconds * 1e6:.3g} µs are timed one by one (cache=flush), and tick and events cost "
        f"{uncertain_seconds * 1e6:.2g} µs of that",
        remedy="a larger batch, or cache=rotate, which needs no events of its own",
    )


#: A host that needs more of the loop's time than this to issue its calls was slower when that was timed by itself.
_HOST_CHANGED = 1.1


def launch_bound(host_seconds: float, wall_seconds: float, device_seconds: float) -> Diagnostic:
    """The device waits for the host.

    Args:
        host_seconds: host time of issuing a call.
        wall_seconds: wall time of a call in the pipelined loop.
        device_seconds: device time of a call.
    """
    host, device = host_seconds / wall_seconds, device_seconds / wall_seconds
    changed = " (its pace changed from one to the other)" if host > _HOST_CHANGED else ""
    return Diagnostic(
        code="launch_bound",
        detail=f"the device works {device:.0%} of the loop's time; the host needs {host:.0%} to issue the calls"
        + changed,
        remedy="a larger batch or torch.compile keeps the device busy",
    )


def phases_disagree(ratio: float) -> Diagnostic:
    """The parts of a call do not add up to the whole.

    Args:
        ratio: of the parts' sum to the undisturbed call.
    """
    return Diagnostic(
        code="phases_disagree",
        detail=f"the phases' sum is {ratio:.3f} of the whole call",
        remedy="read the phases as shares, not as times; the whole call is the undisturbed figure",
    )


def loss_not_finite(loss: float) -> Diagnostic:
    """A training that learns nothing.

    Args:
        loss: the last one.
    """
    return Diagnostic(
        code="loss_not_finite",
        detail=f"the loss ended at {loss}: the arithmetic was timed, but nothing was learnt",
        remedy="lower mode.train.optimizer.lr, or choose a precision with more range",
    )


def accuracy_of_training_data() -> Diagnostic:
    """The accuracy is that of the pictures that were trained on."""
    return Diagnostic(
        code="accuracy_of_training_data",
        detail="there are no held-out pictures: the accuracy is that of the ones that were trained on",
        remedy="put the pictures into subfolders train and val",
    )


def drift(relative: float) -> Diagnostic:
    """The samples moved.

    Args:
        relative: change of the median from the first third to the last.
    """
    return Diagnostic(
        code="drift",
        detail=f"the median moved by {relative:+.1%} from the first third of the samples to the last",
        remedy="lengthen the warm-up (stopping.warmup_seconds) or see what else changes on the machine",
    )


#: What gives more samples, by the reason for which a block ended.
_MORE_SAMPLES = {
    "fixed": "more calls (stopping.measure=N; ITERATIONS of perfexp benchmark), or until it is known: stopping=normal",
    "max_seconds": "more time (stopping.max_seconds=N)",
    "max_calls": "more calls (stopping.max_calls=N)",
    "epochs": "more epochs, or more data",
}


def too_few_samples(
    n: int, effective: float, achieved: float | None, target: float | None, reason: str | None = None
) -> Diagnostic:
    """The interval is wider than was asked for, or may well be, or there is none.

    Args:
        n: samples.
        effective: as how many independent ones they count.
        achieved: relative half-width of the median's interval, or None where there is none.
        target: the one that was asked for, if any was.
        reason: for which the block ended, if that is known.
    """
    asked = "" if target is None else f" instead of ±{target:.1%}"
    if target is not None and achieved is not None and achieved <= target:
        asked = ", which of so few may be several times too narrow"
    reached = "no interval exists" if achieved is None else f"±{achieved:.1%}{asked}"
    return Diagnostic(
        code="too_few_samples",
        detail=f"{n} samples (worth {effective:.0f} independent ones): {reached}",
        remedy=_MORE_SAMPLES.get(reason or "", "more time or calls (stopping.max_seconds, stopping.measure)"),
    )


def scaling_far(ratio: float, sizes: int, tolerance: float) -> Diagnostic:
    """A time does not lie where those of the other sizes let it be expected.

    Args:
        ratio: of the time to the fitted one.
        sizes: that were fitted.
        tolerance: how far it may be off.
    """
    return Diagnostic(
        code="scaling_unexpected",
        detail=f"the time is {ratio:.2f} of what the fit over {sizes} sizes expects (tolerated: ±{tolerance:.0%})",
        remedy="measure this size and its neighbours again; if it stays, look for another kernel or a full memory",
    )


def scaling_falls(ratio: float, smaller: str) -> Diagnostic:
    """A larger input takes less time than a smaller one.

    Args:
        ratio: of the time to that of the smaller size.
        smaller: that size.
    """
    return Diagnostic(
        code="scaling_unexpected",
        detail=f"the time is {ratio:.2f} of that of the smaller size {smaller}, beyond both intervals",
        remedy="measure both sizes again; if it stays, the smaller one runs by a slower kernel or was disturbed",
    )


def speedup_unsure(rival: str, ratio: float, across: Interval) -> Diagnostic:
    """The rounds in which two were compared do not tell which is faster.

    Args:
        rival: what the whole model was compared with.
        ratio: its time over that of the choice, the median over the rounds.
        across: the rounds' mean with its interval.
    """
    return Diagnostic(
        code="speedup_unsure",
        detail=f"{ratio:.2f} times as fast as {rival}, but the rounds differ so much that it may be anything from "
        f"{across.low:.2f} to {across.high:.2f}: which of the two is faster is not known",
        remedy="measure when nothing else runs",
    )


def rivals_by_graph() -> Diagnostic:
    """Rivals were compared as graphs, though the algorithm's own call fits into the queue."""
    return Diagnostic(
        code="rivals_by_graph",
        detail="a rival's call does not fit into the device's queue, so all were compared as captured graphs; `device` "
        "is that of calls launched one by one",
        remedy="read the speedups, and no rival's time beside `device`",
    )


def choice_slower(rival: str, ratio: float) -> Diagnostic:
    """What was chosen layer by layer is slower as a whole than a rival.

    Args:
        rival: what the whole model was compared with.
        ratio: its time over that of the choice.
    """
    return Diagnostic(
        code="choice_slower",
        detail=f"the fastest of each layer take {1 / ratio:.2f} of the time of {rival} together",
        remedy="measure when nothing else runs, with algorithm.reuse=false; or take the rival",
    )
