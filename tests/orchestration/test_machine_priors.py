"""Priors of this machine: its own figures refine the shipped ones, and nothing else does."""

import json

import pytest

from perfexp.orchestration import machine_priors


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_priors, "cache_folder", lambda name: tmp_path / name)
    return machine_priors.cache_of({}, "GPU-1", "570")


def test_a_noisy_machine_is_expected_to_stay_noisy(cache):
    for number in range(5):
        cache.add(f"sweep/{number}", [("device", 1e-4, 4.0)])
    known, shipped = machine_priors.known(cache, "cuda"), machine_priors.known(None, "cuda")
    assert shipped["device"].variance < known["device"].variance < 1e-4
    assert known["device"].cells == shipped["device"].cells + 5
    assert known["latency"].variance == shipped["latency"].variance


def test_runs_measured_together_are_no_prior_for_each_other(cache):
    cache.add("sweep/1", [("device", 1e-4, 4.0)])
    assert machine_priors.known(cache, "cuda", without="sweep") == machine_priors.known(
        None, "cuda"
    )
    assert machine_priors.known(cache, "cuda", without="other") != machine_priors.known(
        None, "cuda"
    )


@pytest.mark.parametrize(
    "entry", [1, [["device", -1.0, 4.0]], [["device", 1e-4, 0.0]], [["device"]], {"device": 1}]
)
def test_entries_that_nobody_can_have_written_are_ignored(cache, entry):
    cache.add("sweep/1", entry)
    assert machine_priors.known(cache, "cuda") == machine_priors.known(None, "cuda")


def test_run_with_several_processes_becomes_a_machine_prior(finished, cache):
    record = finished(
        "model=fake", "gpu=fake", "tracking=none", "stopping=brisk", "processes=3"
    ).record
    for point in record.points:  # other work on this machine
        point.doubts = []
    machine_priors.add(record)
    entries = machine_priors._cache(record).entries()
    assert list(entries) == [f"{record.uid}/{record.uid}"]
    assert {name for name, _, _ in entries[f"{record.uid}/{record.uid}"]} <= {
        "device",
        "latency",
        "rate",
        "host-bound",
    }
    assert json.dumps(entries)
