"""Doubts: every reason not to trust a figure blindly that the measuring code can find, with what to do about it."""

from __future__ import annotations

from perfexp.record import Doubt

#: Other processes may use this share of the machine's cores before a point says so.
BUSY_SHARE = 0.1


def queue_starved(blocks: int) -> Doubt:
    """The host could not fill the device's queue in time.

    Args:
        blocks: in how many blocks.
    """
    return Doubt(
        code="queue_starved",
        detail=f"in {blocks} blocks the device ran out of work before the host had filled its queue",
        remedy="read `device` as an upper bound; fewer launches (execution=compile) are filled in faster",
    )


def queue_exceeded() -> Doubt:
    """A call does not fit into the device's queue."""
    return Doubt(
        code="queue_exceeded",
        detail="a call does not fit into the device's queue (too many launches, or one that makes the host wait): "
        "there is no `device` time",
        remedy="read `throughput` and `latency`; for `device`, a model with fewer launches (execution=compile)",
    )


def synchronising() -> Doubt:
    """A call waits for the device inside, so that its queue can't be filled."""
    return Doubt(
        code="synchronising",
        detail="the call waits for the device inside (it reads a value back): there is no `device` time",
        remedy="take the `.item()`, `.cpu()` or print out of the call, or read `throughput` and `latency`",
    )


def launch_bound(host_seconds: float, wall_seconds: float, device_seconds: float) -> Doubt:
    """The device waits for the host.

    Args:
        host_seconds: host time of issuing a call.
        wall_seconds: wall time of a call in the pipelined loop.
        device_seconds: device time of a call.
    """
    host, device = host_seconds / wall_seconds, device_seconds / wall_seconds
    return Doubt(
        code="launch_bound",
        detail=f"the device works {device:.0%} of the loop's time; the host needs {host:.0%} to issue the calls",
        remedy="a larger batch or torch.compile keeps the device busy",
    )


def phases_disagree(ratio: float) -> Doubt:
    """The parts of a call do not add up to the whole.

    Args:
        ratio: of the parts' sum to the undisturbed call.
    """
    return Doubt(
        code="phases_disagree",
        detail=f"the phases' sum is {ratio:.3f} of the whole call",
        remedy="read the phases as shares, not as times; the whole call is the undisturbed figure",
    )


def loss_not_finite(loss: float) -> Doubt:
    """A training that learns nothing.

    Args:
        loss: the last one.
    """
    return Doubt(
        code="loss_not_finite",
        detail=f"the loss ended at {loss}: the arithmetic was timed, but nothing was learnt",
        remedy="lower mode.train.optimizer.lr, or choose a precision with more range",
    )


def accuracy_of_training_data() -> Doubt:
    """The accuracy is that of the pictures that were trained on."""
    return Doubt(
        code="accuracy_of_training_data",
        detail="there are no held-out pictures: the accuracy is that of the ones that were trained on",
        remedy="put the pictures into subfolders train and val",
    )


def busy_host(other_cores: float, cores: int) -> Doubt:
    """Other processes worked while a point was measured.

    Args:
        other_cores: cores' worth of time that they used.
        cores: of the machine.
    """
    return Doubt(
        code="busy_host",
        detail=f"other processes used {other_cores:.1f} of {cores} cores while this was measured",
        remedy="end other work on this machine, then measure again",
    )


def drift(relative: float) -> Doubt:
    """The samples moved.

    Args:
        relative: change of the median from the first third to the last.
    """
    return Doubt(
        code="drift",
        detail=f"the median moved by {relative:+.1%} from the first third of the samples to the last",
        remedy="lengthen the warm-up (stopping.warmup_seconds) or see what else changes on the machine",
    )


def too_few_samples(n: int, effective: float, achieved: float | None, target: float | None) -> Doubt:
    """The interval is wider than was asked for, or there is none.

    Args:
        n: samples.
        effective: as how many independent ones they count.
        achieved: relative half-width of the median's interval, or None where there is none.
        target: the one that was asked for, if any was.
    """
    asked = "" if target is None else f" instead of ±{target:.1%}"
    reached = "no interval exists" if achieved is None else f"±{achieved:.1%}{asked}"
    return Doubt(
        code="too_few_samples",
        detail=f"{n} samples (worth {effective:.0f} independent ones): {reached}",
        remedy="more time or calls (stopping.max_seconds, stopping.measure), or a wider target (stopping=coarse)",
    )
