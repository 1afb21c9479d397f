"""Runs whose replicates are interleaved, with scripted runs: what is saved, sent and reported when something fails."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfexp.errors import PerfexpError, UserError
from perfexp.orchestration import driver
from perfexp.reports.console import Console

pytestmark = pytest.mark.usefixtures("quick_commands")


class ScriptedRun:
    """Stands for a run; one of its steps raises what the test asks for."""

    def __init__(self, assignment, console):
        self.assignment, self.name = assignment, assignment.name

    def __enter__(self):
        return self._step("enter", self)

    def __exit__(self, *failure):
        return None

    @property
    def has_results(self):
        return self._step("has_results", True)

    def measure(self, numbers):
        return self._step("measure", None)

    def further(self):
        return None

    def ended_by(self, error):
        self.assignment.steps.append(type(error).__name__)

    def save(self):
        return self._step("save", f"record of {self.name}")

    def publish(self, record, console=None):
        self.assignment.is_sent = False
        return self._step("publish", record)

    def _step(self, step, result):
        self.assignment.steps.append(step)
        if step in self.assignment.failures:
            raise self.assignment.failures[step]
        return result


def assignment(name, **failures):
    plan = SimpleNamespace(least_processes=1, seed=0)
    return SimpleNamespace(
        name=name, plan=plan, folder=Path(name), failures=failures, steps=[], is_sent=True
    )


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Measures scripted runs: the outcome of each in the order in which they ended, and whether it was sent by then."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "Run", ScriptedRun)

    def measure(*assignments, interrupted=False):
        outcomes = []
        try:
            driver.measure(
                assignments,
                Console(quiet=True),
                lambda one, outcome: outcomes.append((one.name, outcome, one.is_sent)),
            )
        except KeyboardInterrupt:
            assert interrupted
        else:
            assert not interrupted
        return outcomes

    return measure


def test_a_run_has_ended_when_its_record_was_sent(measured):
    runs = [assignment("a"), assignment("b")]
    assert measured(*runs) == [("a", "record of a", False), ("b", "record of b", False)]
    assert runs[0].steps == ["enter", "measure", "has_results", "save", "publish"]


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("enter", UserError("no room")),
        *product(
            ("has_results", "save", "publish"),
            (UserError("no room"), ValueError("a"), OSError(28, "disk full")),
        ),
    ],
)
def test_a_failure_is_reported_once_and_the_other_runs_go_on(measured, step, error):
    first, second = assignment("a", **{step: error}), assignment("b")
    outcomes = {name: outcome for name, outcome, _ in measured(first, second)}
    assert isinstance(outcomes.pop("a"), PerfexpError)
    assert outcomes == {"b": "record of b"}
    assert second.steps[-1] == "publish"


def test_interrupt_while_sending_leaves_an_outcome_per_record(measured):
    runs = [assignment("a"), assignment("b", publish=KeyboardInterrupt()), assignment("c")]
    outcomes = [(name, outcome) for name, outcome, _ in measured(*runs, interrupted=True)]
    assert outcomes == [(name, f"record of {name}") for name in "abc"]
    assert "publish" not in runs[2].steps


@pytest.mark.parametrize("later", [None, "save", "publish"])
def test_end_of_a_run_is_reported_even_if_its_record_fails(measured, later):
    failures = {"measure": PerfexpError("the worker died")} | (
        {later: ValueError()} if later else {}
    )
    outcomes = [
        (name, str(outcome))
        for name, outcome, _ in measured(assignment("a", **failures), assignment("b"))
    ]
    assert sorted(outcomes) == [("a", "the worker died"), ("b", "record of b")]
