"""The layers of a point, after its times: what becomes of them whatever happens."""

from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

from perfexp.convolution.coverage import AlgorithmReport, LayerReport, LayerStatus, PassReport
from perfexp.convolution.coverage import Pass as ConvolutionPass
from perfexp.convolution.forced import Forced
from perfexp.cost import Geometry
from perfexp.data.synthetic import Synthetic
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.fake import FakeDevice
from perfexp.doctor import environment
from perfexp.errors import Unsupported
from perfexp.measuring import graph_fallback, layers_pass
from perfexp.measuring.layers import (
    Kernel,
    LayerTimes,
    Pass,
    RowTimes,
    TimeSource,
    profiling,
)
from perfexp.measuring.layers import Key as RowKey
from perfexp.measuring.layers.table import Line, Spread
from perfexp.measuring.layers_pass import dissect, not_tried
from perfexp.measuring.modes.inference import Inference
from perfexp.measuring.modes.train import Train
from perfexp.measuring.procedure import Procedure
from perfexp.models import Execution, Precision
from perfexp.models.fake import FakeModel
from perfexp.models.module import adapt
from perfexp.records.record import Key, Point, Series, Status, is_layers, layers_key, timed_key
from perfexp.timing.stopping import Fixed

KEY = Key(phase="inference", input_size=(8, 8), batch_size=2, precision="fp32")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 10)

    def forward(self, inputs):
        return self.fc(torch.relu(self.conv(inputs)).mean((2, 3)))


def procedure(model, device, algorithm=None):
    precision = Precision(name="fp32")
    session = model.open(
        device=device, precision=precision, execution=Execution(), num_classes=None, seed=0
    )
    modes = {"inference": Inference(), "train": Train(optimizer={"name": "sgd", "lr": 0.01})}
    settings = {"algorithm": algorithm} if algorithm else {}
    stopping = Fixed(warmup=1, measure=5)
    return Procedure(
        session=session, device=device, data=Synthetic(), modes=modes, stopping=stopping, **settings
    )


def of_torch(algorithm=None):
    return procedure(adapt(Net(), "net"), CpuDevice(), algorithm)


def rows(point):
    lines = point.facts["layers"]["lines"]
    return {(line["key"]["path"], line["kind"], line["key"]["which"]): line for line in lines}


@pytest.mark.parametrize("phase", ["inference", "train"])
def test_each_layer_has_its_time_and_its_work(phase):
    measuring = of_torch()
    key = Key(phase=phase, input_size=(8, 8), batch_size=2, precision="fp32")
    timed = measuring.measure(key)
    point = dissect(measuring, layers_key(key), timed)
    assert (point.status, point.error) == (Status.OK, None)
    conv = rows(point)["conv", "Conv2d", "forward"]
    assert conv["macs"] == 2 * 4 * 8 * 8 * 3 * 9
    assert conv["seconds"]["median"] > 0
    assert conv["convolution"]["in_channels"] == 3
    assert ("", "relu", "forward") in rows(point)
    assert (("conv", "Conv2d", "backward") in rows(point)) is (phase == "train")
    shares = sum(line["share"] for line in point.facts["layers"]["lines"])
    assert shares == pytest.approx(1)
    assert point.metric("layers/closure").value is not None


def test_the_work_of_a_layer_does_not_depend_on_what_computes_it():
    forced = Forced(name="fft", backend="torch")
    measuring = of_torch(forced)
    with forced.applied(measuring.session):
        point = dissect(measuring, layers_key(KEY), None)
    conv = rows(point)["conv", "Conv2d", "forward"]
    assert (conv["macs"], tuple(conv["convolution"]["kernel"])) == (2 * 4 * 8 * 8 * 3 * 9, (3, 3))
    assert point.metric("layers/closure").reason == "there is no time of the call to compare with"


class Handed:
    """An algorithm that says that it handed cuDNN `implicit_precomp_gemm`."""

    group, is_forced = "algorithm", True

    def begin_point(self):
        pass

    def begin_call(self):
        pass

    def run_baseline(self, baseline, work):
        return work()

    def report(self):
        handed = {"selected": "cudnn.implicit_precomp_gemm", "status": LayerStatus.requested}
        passes = tuple(PassReport(which=which, **handed) for which in ConvolutionPass)
        layer = LayerReport(name="conv", requested="implicit_precomp_gemm", passes=passes)
        return AlgorithmReport(name="implicit_precomp_gemm", layers=(layer,))


@pytest.mark.parametrize(
    ("kernel", "ran", "codes"),
    [
        (
            "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize128x64x8",
            "implicit_precomp_gemm",
            [],
        ),
        (
            "void implicit_convolve_sgemm<float, float, 1024>(int)",
            "implicit_gemm",
            ["algorithm_substituted"],
        ),
        ("a_kernel_of_tomorrow", None, []),
    ],
)
def test_the_kernels_of_a_layer_tell_which_algorithm_ran(monkeypatch, kernel, ran, codes):
    forward, loss = (
        Pass.forward,
        RowKey(path=None, call=0, operation=None, kind="loss", which=Pass.forward),
    )
    conv, relu = (
        RowKey(path=path, call=0, operation=operation, kind=kind, which=forward)
        for path, operation, kind in (("conv", None, "Conv2d"), ("", 0, "relu"))
    )
    seen = [
        RowTimes(key=key, seconds=[1e-3] * 10, gap_seconds=[0.0] * 10, kernels=[])
        for key in (conv, relu, loss)
    ]
    seen[0].kernels.append(Kernel(name=kernel, count=10, seconds=1e-3))
    times = LayerTimes(method=TimeSource.queue, rows=seen, call_seconds=[3e-3] * 10)
    monkeypatch.setattr(profiling, "stamp_layers", lambda *_, **__: times)
    point = dissect(of_torch(Handed()), layers_key(KEY), None)
    assert [line["ran"] for line in point.facts["layers"]["lines"][:3]] == [ran, None, None]
    assert [doubt.code for doubt in point.doubts if doubt.code.startswith("algorithm")] == codes
    if codes:
        assert (
            "conv: forward: cuDNN ran implicit_gemm (implicit_convolve_sgemm)"
            in point.doubts[0].message
        )


def test_algorithm_of_torchs_choice_is_read_from_its_kernels():
    def line(which, **fields):
        key = RowKey(path="conv", call=0, operation=None, kind="Conv2d", which=which)
        spread = Spread(mean=1.0, median=1.0, low=None, high=None)
        kernels = {"void implicit_convolve_sgemm<float, float, 1024>(int)": 1.0}
        return Line(
            key=key, kind="Conv2d", seconds=spread, gap_seconds=spread, kernels=kernels, **fields
        )

    geometry = Geometry(
        in_channels=3, out_channels=8, kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
    )
    lines = [
        line(Pass.forward, convolution=geometry),
        line(Pass.forward, convolution=geometry, ran="fft"),
        line(Pass.backward, convolution=geometry),
        line(Pass.forward),
    ]
    layers_pass._add_own_choice(lines)
    assert [each.ran for each in lines] == ["implicit_gemm", "fft", None, None]


def test_a_scripted_model_has_no_layers_and_says_so():
    measuring = procedure(FakeModel(base_seconds=1e-3), FakeDevice())
    point = dissect(measuring, layers_key(KEY), None)
    assert (point.status, point.metric("layers/closure").value) == (Status.OK, None)
    assert "scripted" in point.metric("layers/closure").reason


def test_a_point_that_was_not_timed_well_is_not_tried_again():
    timed = Point(key=KEY, status=Status.OOM)
    for before, why in ((timed, "oom"), (None, "no result")):
        point = not_tried(layers_key(KEY), before)
        assert (point.status, point.facts) == (Status.OK, {})
        assert why in point.metric("layers/closure").reason


def test_layers_come_from_calls_without_waits_like_device_time(monkeypatch):
    measuring, entered, seen = of_torch(), [], []

    @contextmanager
    def without_waits():
        entered.append(True)
        yield "it counts otherwise"
        entered.pop()

    def look(step, module, device, *, clean_seconds):
        seen.append(bool(entered))
        return LayerTimes(reason="looked")

    measuring.session.without_waits = without_waits
    monkeypatch.setattr(profiling, "stamp_layers", look)
    timed = Point(key=KEY, status=Status.OK, series=[Series(name="device", samples=[1e-3])])
    for waits, before in ((True, timed), (False, timed), (True, None)):
        monkeypatch.setattr(measuring.device, "waits_inside", lambda call, waits=waits: waits)
        dissect(measuring, layers_key(KEY), before)
    assert (seen, entered) == ([True, False, False], []), (
        "and of the call as it is where `device` is not known"
    )


@pytest.mark.parametrize(
    ("method", "fails", "told"),
    [
        ("queue", False, "none"),
        ("graph", False, ("graph",)),
        ("graph", True, None),
        (None, False, "none"),
    ],
)
def test_layers_are_those_of_a_graph_where_the_device_time_is(monkeypatch, method, fails, told):
    measuring, seen = of_torch(), []

    def capture(call):
        if fails:
            raise Unsupported("not this time")
        return call

    def look(step, module, device, *, clean_seconds, first, capture):
        graph = capture and capture()
        seen.append(
            tuple(name for name, _ in graph.segments) if graph else graph if capture else "none"
        )
        return LayerTimes(reason="looked")

    measuring.session.capture = capture
    monkeypatch.setattr(type(measuring.device), "asynchronous", True)
    monkeypatch.setattr(profiling, "profile_layers", look)
    timed = Point(key=KEY, status=Status.OK, facts={"device_method": method} if method else {})
    point = dissect(measuring, layers_key(KEY), timed)
    assert (point.status, seen) == (Status.OK, [told])


@pytest.mark.parametrize("doubted", [True, False])
def test_layers_come_from_calls_on_held_batches_like_device_time(monkeypatch, doubted):
    measuring, fetched = of_torch(), []
    opening, usual = measuring.data.open, profiling.stamp_layers

    @contextmanager
    def opened(**settings):
        with opening(**settings) as batches:
            yield SimpleNamespace(
                constant=False, per_epoch=None, next=lambda: fetched.append(1) or batches.next()
            )

    def look(*arguments, **named):
        before = len(fetched)
        times = usual(*arguments, **named)
        assert (len(fetched) == before) is doubted
        return times

    measuring.data.open = opened
    monkeypatch.setattr(profiling, "stamp_layers", look)
    key = msgspec.structs.replace(KEY, phase="train")
    left_out = [graph_fallback.HELD] if doubted else []
    timed = Point(
        key=key, status=Status.OK, series=[Series(name="device", samples=[1e-3])], doubts=left_out
    )
    point = dissect(measuring, layers_key(key), timed)
    assert point.status is Status.OK
    assert ("device_leaves_out" in [doubt.code for doubt in point.doubts]) is doubted
    assert point.facts["layers"]["lines"]


def test_other_work_on_the_machine_is_a_doubt_of_the_layers_too(monkeypatch):
    spent = iter([0.0, 1e6])
    monkeypatch.setattr(environment, "other_cpu_seconds", lambda of_ranks: next(spent))
    point = dissect(of_torch(), layers_key(KEY), None)
    assert point.facts["other_cpu_cores"] > 1
    assert "busy_host" in [doubt.code for doubt in point.doubts]


def test_what_goes_wrong_is_the_points_status():
    measuring = of_torch()
    measuring.session.module.forward = None
    point = dissect(measuring, layers_key(KEY), None)
    assert point.status is Status.FAILED
    assert "NoneType" in point.error


def test_keys_of_layers_belong_to_those_that_are_timed():
    key = layers_key(KEY)
    assert key.phase == "inference_layers"
    assert (is_layers(key), is_layers(KEY), key.is_timed, KEY.is_timed) == (
        True,
        False,
        False,
        True,
    )
    assert timed_key(key) == KEY


@pytest.mark.parametrize(("spread", "told"), [(0.3, True), (0.001, False)])
def test_uncertain_call_is_noted_where_layers_disagree(spread, told):
    samples = [1.0 + spread * (n % 7) for n in range(40)]
    timed = Point(key=KEY, status=Status.OK, series=[Series(name="latency", samples=samples)])
    point = dissect(of_torch(), layers_key(KEY), timed)
    [doubt] = [doubt for doubt in point.doubts if doubt.code == "layers_disagree"]
    assert ("the call without profiling is itself known to ±" in doubt.message) is told
