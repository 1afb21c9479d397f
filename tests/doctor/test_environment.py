"""Facts of the machine, and who else works on it."""

import json
import multiprocessing
import time
from types import SimpleNamespace

import pytest

from perfexp.doctor import environment
from perfexp.errors import UserError
from perfexp.worker import workbench
from perfexp.worker.workbench import Workbench


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_facts_are_json_and_say_what_matters():
    facts = json.loads(json.dumps(environment.collect()))
    assert facts["packages"]["torch"]
    assert facts["cpu"]["name"]
    assert facts["python"]


@pytest.mark.slow
def test_own_ended_children_do_not_count_as_other_processes(monkeypatch):
    """The machine's total is held still, so that what a child used can only be taken off."""
    total = environment.psutil.cpu_times()
    monkeypatch.setattr(environment.psutil, "cpu_times", lambda: total)
    before = environment.other_cpu_seconds()
    child = multiprocessing.get_context("spawn").Process(target=spin, args=(0.5,))
    child.start()
    child.join()
    assert environment.other_cpu_seconds() - before <= -0.5


def test_differences_name_what_makes_times_incomparable():
    old = {
        "perfexp": "1",
        "packages": {"torch": "2.11", "rich": "1"},
        "device": {"name": "A"},
        "host": "x",
    }
    new = {
        "perfexp": "1",
        "packages": {"torch": "2.12", "rich": "2"},
        "device": {"name": "A"},
        "host": "y",
    }
    assert environment.differences(old, new) == [("packages.torch", "2.11", "2.12")]
    assert environment.differences(old, old) == []


@pytest.mark.parametrize("limit", ["power_limit_watts", "application_clock_hertz", "auto_boost"])
def test_another_clock_limit_is_a_difference_unknown_is_not(limit):
    old, new = ({"device": {"name": "A", limit: value}} for value in (700.0, 500.0))
    assert environment.differences(old, new) == [(f"device.{limit}", 700.0, 500.0)]
    for unknown in ({"device": {"name": "A"}}, {"device": {"name": "A", limit: None}}):
        assert environment.differences(unknown, new) == environment.differences(new, unknown) == []


def test_governors_are_those_of_all_cores(tmp_path):
    for core, governor in enumerate(("powersave", "performance", "powersave")):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{governor}\n")
    assert environment.governors(tmp_path) == ["performance", "powersave"]
    assert environment.governors(tmp_path / "none") == []


def test_a_folder_of_another_power_limit_is_refused(tmp_path, monkeypatch):
    bench = object.__new__(Workbench)
    bench.paths = SimpleNamespace(
        environment=tmp_path / "environment.json", points=None, root=tmp_path
    )
    monkeypatch.setattr(workbench, "read_points", lambda path: ["a point"])
    stored = {"environment": {"device": {"power_limit_watts": 700.0}}, "doubts": []}
    bench.paths.environment.write_text(json.dumps(stored))
    assert bench._earlier_diagnostics({"device": {"power_limit_watts": 700.0}}) == []
    with pytest.raises(UserError, match=r"device\.power_limit_watts: 700\.0 → 500\.0"):
        bench._earlier_diagnostics({"device": {"power_limit_watts": 500.0}})


def test_the_image_is_known_by_its_build_and_its_engine(tmp_path, monkeypatch):
    monkeypatch.delenv(environment.IMAGE_VARIABLE, raising=False)
    assert environment._image(tmp_path) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "etc" / "perfexp-image").write_text(
        "commit=0123abcd\nbase=debian:bookworm-slim\nempty=\n"
    )
    built = {"commit": "0123abcd", "base": "debian:bookworm-slim"}
    assert environment._image(tmp_path) == built
    podman = 'engine="podman-4.3.1"\nimage="localhost/perfexp:cpu"\nimageid="ab12"\nrootless=1\n'
    (tmp_path / "run" / ".containerenv").write_text(podman)
    assert environment._image(tmp_path) == built | {
        "reference": "localhost/perfexp:cpu@sha256:ab12"
    }
    monkeypatch.setenv(environment.IMAGE_VARIABLE, "perfexp:cpu@sha256:cd34")
    assert environment._image(tmp_path) == built | {"reference": "perfexp:cpu@sha256:cd34"}
