"""What a worker does before it measures: in which order the device is locked, waited for and made ready."""

import gc
import hashlib
import itertools
import re
import sys
import threading
import time
import traceback
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from perfexp.devices import lock
from perfexp.devices.fake import FakeDevice
from perfexp.doctor import environment
from perfexp.errors import UserError
from perfexp.host import installation, locks
from perfexp.main import main
from perfexp.models.fake import FakeSession
from perfexp.plan import config, plan_fields
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key, read_points
from perfexp.timing import collecting
from perfexp.worker import entry, workbench
from perfexp.worker.workbench import Workbench
from tests.test_architecture import imported_with


class Noting(FakeDevice):
    """A device that needs a lock, and notes what is asked of it while somebody has that.

    Waiting for it takes a hundred seconds of the scripted clock, making it ready one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock_name = "noting"
        self.noted: list[str] = []
        self.seconds = 0.0

    def settle(self) -> None:
        self._note("settle", 100.0)

    def start(self) -> None:
        self._note("start", 1.0)

    def _note(self, what: str, seconds: float) -> None:
        assert lock.holder("noting") is not None
        self.noted.append(what)
        self.seconds += seconds


#: The device that the plan's `_target_` opens.
OPENED = None


def open_noting():
    return OPENED


@pytest.fixture
def device(monkeypatch, tmp_path):
    monkeypatch.setattr(locks, "TEMPORARY", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "OPENED", Noting())
    return OPENED


@pytest.fixture
def plan():
    key = Key(phase="ttfp", input_size=(8, 8), batch_size=1, precision="fp32", replicate=0)
    return SimpleNamespace(
        gpu={"_target_": f"{__name__}.open_noting"},
        data={"_target_": "perfexp.data.synthetic.Synthetic"},
        model={"_target_": "perfexp.models.fake.FakeModel"},
        device_lock=plan_fields.DeviceLock.fail,
        host_sharing=plan_fields.HostSharing.none,
        traces_memory=False,
        algorithm={"_target_": "perfexp.convolution.default.open_default"},
        phases=[],
        mode=SimpleNamespace(train=None),
        probe={},
        first_prediction_keys=lambda _: [key],
    )


@pytest.fixture
def paths(tmp_path):
    return SimpleNamespace(
        root=tmp_path,
        points=tmp_path / "points.jsonl",
        environment=tmp_path / "environment.json",
    )


def test_nobody_waits_for_a_device_that_is_refused(device, plan, paths):
    bench = Workbench(plan, paths, Events(None))
    with bench.reserved(device):
        with pytest.raises(UserError, match="in use"), bench.reserved(device):
            pass
        assert device.noted == ["settle"]


def test_a_device_is_locked_then_waited_for_then_made_ready(monkeypatch, device, plan, paths):
    def opened(*_):
        raise UserError("the model is next")

    monkeypatch.setattr(Workbench, "load_model", opened)
    with (
        pytest.raises(UserError, match="the model is next"),
        Workbench(plan, paths, Events(None)).opened(),
    ):
        pass
    assert device.noted == ["settle", "start"]


def test_an_error_of_the_model_says_that_it_was_being_built(monkeypatch, device, plan, paths):
    def refuses(*_):
        raise ValueError("width -3")

    monkeypatch.setattr(Workbench, "_open_model", refuses)
    told = []
    with (
        pytest.raises(ValueError, match="width") as raised,
        Workbench(plan, paths, Events(None)).opened(),
    ):
        pass
    assert workbench.report_failure(raised.value, lambda *event, **facts: told.append(facts)) == 1
    assert re.fullmatch(
        r"ValueError: width -3 \(test_workbench.py:\d+\) \(while the model was built\)",
        told[0]["message"],
    )


def test_who_waits_for_a_device_is_reminded_of_it(monkeypatch, device, plan, paths):
    told = []
    monkeypatch.setattr(workbench, "_REPORT_SECONDS", 0.05)
    plan.device_lock = plan_fields.DeviceLock.wait
    with ExitStack() as other:
        other.enter_context(
            lock.held("noting", wait=False, purpose="something else", waiting=print)
        )

        class Telling(Events):
            def __call__(self, event, **details):
                told.append(details["text"])
                if len(told) == 3:
                    threading.Thread(target=other.close).start()

        with Workbench(plan, paths, Telling(None)).reserved(device):
            pass
    assert told[0].startswith("waiting for the device: process")
    assert told[2].startswith("waiting for the device (for 2 min; Ctrl-C stops): process")
    assert told[-1] == "loading"


def test_waiting_for_a_device_is_no_part_of_a_first_prediction(monkeypatch, device, plan, paths):
    clock = SimpleNamespace(
        perf_counter_ns=lambda: time.perf_counter_ns() + int(device.seconds * 1e9)
    )
    monkeypatch.setattr(entry, "time", clock)
    monkeypatch.setattr(entry, "_time_first_calls", lambda *_: None)
    entry.measure_cold_start(plan, paths, 0, Events(None), None)
    [point] = read_points(paths.points)
    [context] = [series.samples[0] for series in point.series if series.name == "ttfp/context"]
    assert device.noted == ["settle", "start"]
    assert 1 <= context < 100


@pytest.mark.parametrize(
    ("before", "waiting", "within", "told"),
    [(0, 99, 0, False), (99, 0, 0, True), (0, 0, 99, True), (0, 0, 0, False)],
)
def test_work_of_others_is_told_of_a_first_prediction(
    monkeypatch, device, plan, paths, before, waiting, within, told
):
    readings = itertools.accumulate([0, before, waiting, within])
    monkeypatch.setattr(
        environment, "other_cpu_seconds", lambda *, of_ranks: next(readings) * environment.cores()
    )
    monkeypatch.setattr(entry, "_time_first_calls", lambda *_: None)
    entry.measure_cold_start(plan, paths, 0, Events(None), None)
    [point] = read_points(paths.points)
    assert [doubt.code for doubt in point.doubts] == ["busy_host"] * told
    assert (point.facts["other_cpu_cores"] > 0) is told


@pytest.mark.parametrize(
    ("gpu", "kind", "name", "fp16"),
    [
        ({"name": "auto", "facts": {}}, "cuda", "NVIDIA H100 80GB HBM3", 9.895e14),
        ({"name": "auto"}, "cuda", "NVIDIA H200", 9.895e14),
        (
            {"name": "mine", "facts": {"peak_flops_per_second": {"fp16": 1e12}}},
            "cuda",
            "NVIDIA H200",
            1e12,
        ),
        ({"name": "auto", "facts": {}}, "cuda", "NVIDIA X9000", None),
    ],
)
def test_the_peaks_are_those_of_the_device_that_auto_found(gpu, kind, name, fp16):
    plan = SimpleNamespace(
        gpu=gpu, gpu_name=gpu["name"], config_dirs=lambda: [installation.conf_dir()]
    )
    plan.sheet = partial(config.Plan.sheet, plan)
    assert workbench.sheet_peaks(plan, SimpleNamespace(kind=kind, name=name)).get("fp16") == fp16


def test_a_cpu_has_no_data_sheet():
    plan = SimpleNamespace(gpu={"facts": {}}, gpu_name="auto")
    plan.sheet = partial(config.Plan.sheet, plan)
    assert workbench.sheet_peaks(plan, SimpleNamespace(kind="cpu", name="Intel(R) Xeon(R)")) is None


def test_call_stack_to_the_first_timed_call_has_at_most_12_hops(monkeypatch, tmp_path):
    """Everything is built in one place, so that the way from the command to the clock can be read."""
    folder = tmp_path / "x"
    assert (
        main(["model=fake", "gpu=fake", "tracking=none", "stopping=fixed", f"output_dir={folder}"])
        == 0
    )
    (folder / "details" / "points.jsonl").unlink()
    digest = hashlib.sha256((folder / "details" / "plan.yaml").read_bytes()).hexdigest()
    forward, stacks = FakeSession.forward, []

    def traced(session, inputs):
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
        if any(frame.f_code is collecting.collect.__code__ for frame in frames):
            names = [
                f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
                for frame in reversed(frames)
            ]
            stacks.append(names[names.index("perfexp.worker.entry.main") :])
        return forward(session, inputs)

    monkeypatch.setattr(FakeSession, "forward", traced)
    assert entry.main([str(folder), "--plan-sha256", digest]) == 0
    gc.unfreeze()
    hops = [name for name in stacks[0] if name.startswith("perfexp.")]
    assert hops[-1] == "perfexp.measuring.modes.inference.Inference.prepare.<locals>.constant"
    print("\n".join(hops))
    assert len(hops) <= 12, hops


def test_a_worker_starts_without_what_a_cold_start_does_not_need():
    """A cold start is timed from the start of the process: whatever only measuring needs is imported later."""
    modules = imported_with("perfexp.worker.entry")
    rooms = {module.split(".")[1] for module in modules if "." in module}
    assert not rooms & {"data", "layers", "modes", "orchestration", "probes", "ranks"}
    assert "perfexp.measuring.procedure" not in modules


@pytest.mark.parametrize("profiled", [False, True])
def test_worker_joins_the_host_turns_before_opening_anything(profiled, tmp_path):
    noted = []

    class Bench(Workbench):
        @contextmanager
        def sharing_host(self):
            noted.append("shared")
            yield

        def find_device(self):
            noted.append("device")
            raise UserError("the device is next")

    bench = Bench(SimpleNamespace(), RunPaths(tmp_path), Events(None))
    with pytest.raises(UserError, match="the device is next"), bench.opened(profiled=profiled):
        pass
    assert noted == ["shared", "device"]
