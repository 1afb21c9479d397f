"""What the whole model gains by the fastest algorithms of its layers, all contestants launched the same way."""

import numpy as np
import pytest

from perfexp.devices.fake import FakeDevice
from perfexp.errors import Unsupported
from perfexp.measuring import baselines
from perfexp.records.record import Key, Metric, Point, Status

KEY = Key(phase="inference", input_size=(8, 8), batch_size=2, precision="fp32")


class Rivalling:
    """An algorithm whose calls take another time while a rival computes."""

    name, group, is_forced = "fastest", "algorithm", True

    def __init__(self):
        self.now, self.order, self.is_eager, self.discarded = self.name, [], False, False

    def run_eager(self, work):
        self.order.append(self.name)
        self.is_eager = True
        try:
            return work()
        finally:
            self.is_eager = False

    def discard_choices(self):
        self.discarded = True

    def baselines(self):
        return ("default", "benchmark")

    def run_baseline(self, baseline, work):
        self.now = baseline
        self.order.append(baseline)
        try:
            return work()
        finally:
            self.now = self.name

    @property
    def seconds(self):
        return {"fastest": 1e-3, "default": 3e-3, "benchmark": 2e-3}[self.now]


def judged(rivals, call, device, capture=None, **facts):
    """A point after the comparison, and its speedups by name."""
    point = Point(key=KEY, status=Status.OK, facts=facts)
    baselines.judge(point, rivals, call, device, capture)
    return point, {metric.name.removeprefix("algorithm/"): metric for metric in point.metrics}


def capturing(algorithm, device):
    def capture():
        seconds = algorithm.seconds
        return lambda: device.launch(seconds)

    return capture


def codes(point):
    return [doubt.code for doubt in point.doubts]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_whole_model_is_compared_with_its_rivals_in_turns(asynchronous):
    device, algorithm = FakeDevice(asynchronous=asynchronous, enqueue_seconds=1e-6), Rivalling()
    call = lambda: device.launch(algorithm.seconds)  # noqa: E731
    point, speedups = judged(algorithm, call, device, capturing(algorithm, device))
    assert point.facts == {"rivals_method": "queue" if asynchronous else "clock"}
    names = ["speedup_over_default", "speedup_over_benchmark"]
    assert list(speedups) == [*names, *(f"captured_{name}" for name in names if asynchronous)]
    for name, metric in speedups.items():
        assert metric.value == pytest.approx(3 if "default" in name else 2, rel=1e-3)
        assert metric.low <= metric.value <= metric.high
    plain = ["rival/fastest", "rival/default", "rival/benchmark"]
    captured = [f"{name}/captured" for name in plain if asynchronous]
    assert [each.name for each in point.series] == [*plain, *captured]
    assert np.median(point.series[1].measured) == pytest.approx(3e-3, rel=1e-2)
    assert codes(point) == []


def test_rivals_take_turns_in_changing_orders():
    device, algorithm = FakeDevice(asynchronous=False), Rivalling()
    judged(algorithm, lambda: device.launch(algorithm.seconds), device)
    rounds = [
        algorithm.order[place : place + 3] for place in range(3, 21, 3)
    ]  # the first calls come before
    assert len(algorithm.order) == 21
    assert all(sorted(one) == ["benchmark", "default", "fastest"] for one in rounds)
    assert len({tuple(one) for one in rounds}) == 6
    assert rounds[1] == rounds[0][::-1]
    assert {one[0] for one in rounds} != {"default"}


def test_captured_passes_compete_only_with_captured_ones():
    """The algorithm's one graph saves 3 gaps; launched alike, the algorithm is as fast as torch."""
    device, algorithm = FakeDevice(enqueue_seconds=1e-6, graph_gap_seconds=20e-6), Rivalling()

    def call():
        whole = algorithm.now == "fastest" and not algorithm.is_eager
        for _ in range(1 if whole else 4):
            device.launch(400e-6 if whole else 100e-6)

    point, speedups = judged(algorithm, call, device, lambda: device.capture(call))
    assert speedups["speedup_over_default"].value == pytest.approx(1, abs=1e-3)
    assert speedups["captured_speedup_over_default"].value == pytest.approx(1, abs=1e-3)
    assert set(codes(point)) <= {"not_faster"}


@pytest.mark.parametrize(
    ("gain", "spread", "verdict"),
    [(1.1, 0.01, "faster"), (1.1, 0.9, "unsure"), (1.0, 0.015, "unsure"), (0.9, 0.01, "slower")],
)
def test_only_an_interval_without_1_is_a_gain_or_a_loss(gain, spread, verdict):
    """The rival takes longer by a factor, give or take what changes from turn to turn; 2 % are no exception."""
    device, algorithm, noise = FakeDevice(asynchronous=False), Rivalling(), np.random.default_rng(1)
    turns: dict[int, float] = {}

    def call():
        own = 1.0 if algorithm.now == "fastest" else gain
        return device.launch(
            1e-3 * own * turns.setdefault(len(algorithm.order), 1 + spread * noise.uniform(-1, 1))
        )

    point, speedups = judged(algorithm, call, device)
    assert set(codes(point)) == ({"not_faster"} if verdict != "faster" else set())
    assert algorithm.discarded == (verdict == "slower")
    if verdict == "unsure":
        metric, doubt = speedups["speedup_over_default"], point.doubts[0]
        assert metric.low <= 1 <= metric.high
        ends = f"(95 % interval {1 / metric.high:.3f} to {1 / metric.low:.3f}), by the host's clock"
        assert doubt.message.startswith(
            f"fastest takes {1 / metric.value:.3f} of the time of default end to end {ends}"
        )


def test_algorithm_called_like_a_baseline_is_compared_with_it():
    class Mixed(Rivalling):
        name = "default"
        mixed = True

        def run_baseline(self, baseline, work):
            self.mixed = False
            try:
                return super().run_baseline(baseline, work)
            finally:
                self.mixed = True

    device, algorithm = FakeDevice(asynchronous=False, enqueue_seconds=0.0), Mixed()

    def call():
        device.launch(
            1e-3 if algorithm.mixed else {"default": 3e-3, "benchmark": 2e-3}[algorithm.now]
        )

    point, speedups = judged(algorithm, call, device)
    assert [metric.value for metric in speedups.values()] == pytest.approx([3, 2], rel=1e-3)
    assert [each.name for each in point.series] == [
        "rival/default+layers",
        "rival/default",
        "rival/benchmark",
    ]


def test_choice_slower_than_a_baseline_end_to_end_is_discarded():
    class Slower(Rivalling):
        seconds = property(
            lambda self: {"fastest": 3e-3, "default": 2e-3, "benchmark": 4e-3}[self.now]
        )

    device, algorithm = FakeDevice(enqueue_seconds=1e-6), Slower()
    point, _ = judged(
        algorithm, lambda: device.launch(algorithm.seconds), device, capturing(algorithm, device)
    )
    assert codes(point) == ["not_faster"] * 2
    assert all(
        "takes 1.500 of the time of default end to end" in doubt.message for doubt in point.doubts
    )
    hows = [doubt.message.partition("), ")[2].partition(":")[0] for doubt in point.doubts]
    assert hows == ["launched kernel by kernel", "captured as CUDA graphs"]
    assert algorithm.discarded
    assert algorithm.discarded


def many_launches(device, algorithm):
    for _ in range(200):
        device.launch(algorithm.seconds / 200)


def test_rivals_whose_call_the_queue_does_not_take_are_captured():
    device, algorithm = FakeDevice(enqueue_seconds=1e-6, queue_depth=100), Rivalling()
    call = lambda: many_launches(device, algorithm)  # noqa: E731
    point, speedups = judged(algorithm, call, device, capturing(algorithm, device))
    assert [metric.value for metric in speedups.values()] == pytest.approx([3, 2, 3, 2], rel=1e-3)
    assert point.facts == {"rivals_method": "graph"}
    assert len(point.series) == 3
    with pytest.raises(Unsupported, match="does not fit the launch queue even as a CUDA graph"):
        judged(algorithm, call, device, lambda: call)


@pytest.mark.parametrize(
    ("error", "kept"),
    [(Unsupported("it waits"), True), (MemoryError("full"), True), (OSError(), 0)],
)
def test_a_call_that_can_not_be_captured_is_compared_as_it_is(error, kept):
    device, algorithm = FakeDevice(enqueue_seconds=1e-6), Rivalling()

    def capture():
        raise error

    call = lambda: device.launch(algorithm.seconds)  # noqa: E731
    if not kept:
        with pytest.raises(OSError):
            judged(algorithm, call, device, capture)
        return
    _, speedups = judged(algorithm, call, device, capture)
    assert speedups["speedup_over_default"].value == pytest.approx(3, rel=1e-3)
    missing = speedups["captured_speedup_over_default"]
    assert (missing.value, missing.reason) == (None, str(error))


@pytest.mark.parametrize(("own", "doubts"), [("queue", ["device_of_graph"]), ("graph", [])])
def test_different_timing_of_baselines_and_call_is_reported(own, doubts):
    """The algorithm's call is one launch, which the queue takes; each rival's is too many."""
    device, algorithm = FakeDevice(enqueue_seconds=1e-6, queue_depth=100), Rivalling()

    def call():
        device.launch(algorithm.seconds) if algorithm.now == "fastest" else many_launches(
            device, algorithm
        )

    point, _ = judged(algorithm, call, device, capturing(algorithm, device), device_method=own)
    assert point.facts["rivals_method"] == "graph"
    assert codes(point) == doubts


def raced(selected, calls=1, **seconds):
    """A layer whose engines took these seconds, each with an interval of 1 % to either side."""
    race = {
        name: {"seconds": s, "seconds_low": 0.99 * s, "seconds_high": 1.01 * s}
        for name, s in seconds.items()
    }
    one_pass = {
        "which": "forward",
        "selected": selected,
        "seconds": seconds,
        "launching": "captured",
    }
    return {"calls": calls, "passes": [{**one_pass, "races": {"captured": race}}]}


def test_layer_races_give_a_promised_speedup_with_its_interval():
    device, algorithm = FakeDevice(asynchronous=False), Rivalling()
    layers = [
        raced("cudnn.fft", 2, **{"cudnn.fft": 1.0, "default": 3.0}),
        raced("default", default=2.0, benchmark=5.0),
    ]
    _, speedups = judged(
        algorithm,
        lambda: device.launch(algorithm.seconds),
        device,
        algorithm={"layers": [*layers, layers[0]]},
    )
    promised = speedups["promised_speedup_over_default"]
    assert promised.value == (4 * 3 + 2) / (4 * 1 + 2)
    assert "promised_speedup_over_benchmark" not in speedups
    first, second = 4 / 6 * np.hypot(0.03, promised.value * 0.01), (promised.value - 1) / 6 * 0.02
    assert promised.high - promised.value == pytest.approx(np.hypot(first, second))
    assert isinstance(promised, Metric)
