"""Job report: the states of a campaign's runs as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from perfexp.cluster.job_states import RunState, State
from perfexp.records import units

#: Runs of one state that are listed.
_MOST_LINES = 20


def counted(states: Sequence[RunState]) -> str:
    """Return the number of runs in each state: `3 done, 1 running, 2 pending`."""
    numbers = Counter(state.state for state in states)
    return ", ".join(f"{numbers[state]} {state}" for state in State if numbers[state])


def lines(states: Sequence[RunState]) -> Iterator[str]:
    """Yield a line for each run that runs or failed, and for each reason of waiting or being lost."""
    for kind in (State.running, State.failed, State.cancelled):
        runs = [state for state in states if state.state is kind]
        yield from map(_line, runs[:_MOST_LINES])
        if len(runs) > _MOST_LINES:
            yield f"and {len(runs) - _MOST_LINES} more {kind}"
    grouped = Counter(
        (state.job.partition("_")[0], state.state, state.why)
        for state in states
        if state.state in (State.pending, State.lost, State.unknown)
    )
    for (job, kind, why), number in grouped.items():
        yield f"{units.counted(number, 'run')} of job {job} {kind}{f': {why}' if why else ''}"
    if unsubmitted := sum(state.state is State.unsubmitted for state in states):
        yield f"{units.counted(unsubmitted, 'run')} not submitted: repeat the command of the sweep"


def _line(state: RunState) -> str:
    job = f" as job {state.job}" if state.job else ""
    node = f" on {state.node}" if state.node else ""
    left = f", {state.left} left" if state.left else ""
    why = f": {state.why}" if state.why else ""
    return f"run {state.run} {state.name}: {state.state}{job}{node}{left}{why}"
