"""Doubts of meters: every reason not to trust an energy blindly, with what to do about it."""

from __future__ import annotations

from perfexp.records.record import Diagnostic


def stuck(name: str, seconds: float) -> Diagnostic:
    """A counter stands still.

    Args:
        name: of the meter.
        seconds: for how long it was watched in vain.
    """
    return Diagnostic(
        code="meter_stuck",
        detail=f"the energy counter of {name} did not change in {seconds:.1f} s: there is no energy",
        remedy="reload the driver or restart the machine; `perfexp doctor` shows whether the counter moves again",
    )


def wrapped(name: str, before_joules: float, after_joules: float) -> Diagnostic:
    """A counter went back, and nobody knows by how much.

    Args:
        name: of the meter.
        before_joules: what it said.
        after_joules: what it said then.
    """
    return Diagnostic(
        code="meter_wrapped",
        detail=f"the energy counter of {name} went from {before_joules:.6g} back to {after_joules:.6g} J, and its "
        "range is not told: there is no energy",
        remedy="measure again; a counter that begins anew within minutes has to tell its range (max_energy_range_uj)",
    )


def disagrees(
    name: str, difference: float, tolerance: float, counter_watts: float, integral_watts: float
) -> Diagnostic:
    """Counter and integral of the power tell two stories.

    Args:
        name: of the meter.
        difference: of the integral from the counter, relative.
        tolerance: that was exceeded.
        counter_watts: mean power by the counter.
        integral_watts: mean power by the integral.
    """
    return Diagnostic(
        code="meter_disagrees",
        detail=f"{name}: {counter_watts:.4g} W by the energy counter, {integral_watts:.4g} W by the integral of its "
        f"power ({difference:+.1%}, tolerated ±{tolerance:.0%}): the energy is not known",
        remedy="a longer window evens out a power that changes slower than it is read; else ask for another driver",
    )


def unchecked(name: str, difference: float, tolerance: float) -> Diagnostic:
    """The power jumps so much from one reading to the next that its integral can't check the counter.

    Args:
        name: of the meter.
        difference: of the integral from the counter, relative.
        tolerance: up to which it says nothing.
    """
    return Diagnostic(
        code="meter_unchecked",
        detail=f"{name}: its power jumps so much that the integral of a window's few readings says nothing against the "
        f"counter up to ±{tolerance:.0%} (they differ by {difference:+.1%})",
        remedy="a longer window (probes.energy_seconds=5) has more readings; a larger batch a steadier power",
    )


def average(name: str) -> Diagnostic:
    """The power is no instantaneous one.

    Args:
        name: of the meter.
    """
    return Diagnostic(
        code="meter_average",
        detail=f"the power of {name} is an average over about a second: its integral follows changes late",
        remedy="on NVIDIA a driver of 530 or later tells the instantaneous power; trust the counter",
    )


def shared(name: str, what: str) -> Diagnostic:
    """Others use what is metered.

    Args:
        name: of the meter.
        what: uses it besides what is measured.
    """
    return Diagnostic(
        code="meter_shared",
        detail=f"{name} counts the energy of {what} too",
        remedy="measure when nobody else uses it",
    )


def slice_of_board(name: str) -> Diagnostic:
    """A MIG slice.

    Args:
        name: of the slice or its board.
    """
    return Diagnostic(
        code="meter_mig",
        detail=f"{name}: MIG is on, and the board's meter counts all of its slices together: there is no energy",
        remedy="measure on a whole board (nvidia-smi -i N -mig 0, as its administrator)",
    )


def untested(name: str) -> Diagnostic:
    """Nobody has tried this kind of meter.

    Args:
        name: of the meter.
    """
    return Diagnostic(
        code="meter_untested",
        detail=f"{name}: this kind of meter is written from its documentation and has not been tried on hardware",
        remedy="compare with another meter, and tell what you saw",
    )


def no_counter(name: str) -> Diagnostic:
    """The energy is the integral of the power alone.

    Args:
        name: of the meter.
    """
    return Diagnostic(
        code="meter_no_counter",
        detail=f"{name} has no energy counter: the energy is the integral of its power, and nothing to compare it with",
        remedy="read it as an estimate; boards since Volta have a counter",
    )


def coarse(name: str, uncertainty: float, window_seconds: float) -> Diagnostic:
    """The window's ends are not known well enough.

    Args:
        name: of the meter.
        uncertainty: standard uncertainty of the window's length, relative.
        window_seconds: length of the window.
    """
    return Diagnostic(
        code="meter_coarse",
        detail=f"the ticks of {name} were seen so late between the calls that the window of {window_seconds:.2f} s is "
        f"uncertain by {uncertainty:.1%}",
        remedy="a longer window, or a smaller batch, so that the meter can be asked more often",
    )


def another_pace(call_seconds: float, clean_seconds: float) -> Diagnostic:
    """Calls took another time while the meters were asked than before.

    Args:
        call_seconds: of a call in the window.
        clean_seconds: of a call while no meter was asked.
    """
    metered, timed = call_seconds * 1e3, clean_seconds * 1e3
    return Diagnostic(
        code="energy_pace",
        detail=f"a call took {metered:.4g} ms while its energy was measured, {timed:.4g} ms when it was timed "
        f"({metered / timed - 1:+.1%})",
        remedy="the energy is that of calls at this pace: a long run's, if heat or the power limit slowed them; "
        "if it was the host, a larger batch or execution.cuda_graph depends less on it",
    )
