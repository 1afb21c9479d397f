"""Joint: figures of scripted bursts whose truth is known."""

import dataclasses
import random

import pytest

from perfexp.errors import Unsupported
from perfexp.models import Sharing
from perfexp.modes import State, Step
from perfexp.ranks import Burst, joint
from perfexp.records.record import Key, Point, Series, Status

MILLISECOND = 1_000_000


@dataclasses.dataclass
class Scripted:
    """Two ranks: together a call takes the first so long, the second a little longer; alone, and without gradients."""

    size: int = 2
    begin_ns: int = 0
    asked: list = dataclasses.field(default_factory=list)
    skew_ns: int = 0
    call_ns: dict = dataclasses.field(
        default_factory=lambda: {
            Sharing.all: (10 * MILLISECOND, 10 * MILLISECOND),
            Sharing.no_gradients: (8 * MILLISECOND, 8 * MILLISECOND),
            Sharing.nothing: (int(7.4 * MILLISECOND),) * 2,
            Sharing.alone: (7 * MILLISECOND, 0),
        }
    )

    def burst(self, step, calls, sharing):
        self.asked.append((sharing, calls))
        self.begin_ns += 10**9
        starts = (self.begin_ns, self.begin_ns + self.skew_ns)
        found = zip(starts, self.call_ns[sharing], strict=True)
        return [Burst(start_ns=start, end_ns=start + calls * each) for start, each in found]


def point(phase="train", seconds=0.01):
    key = Key(phase=phase, input_size=(8, 8), batch_size=16, precision="fp32")
    return Point(
        key=key, status=Status.OK, series=[Series(name="throughput", samples=[seconds] * 12)]
    )


def step(*, trains=True):
    return Step(
        call=None,
        segments=(),
        active=None,
        batch_size=16,
        state=State(source=lambda: None),
        trains=trains,
    )


def values(measured):
    return {metric.name: metric.value for metric in measured.metrics}


def test_rates_shares_and_efficiency_of_known_bursts():
    measured = point()
    joint.measure(measured, step(), Scripted(), compares_alone=True)
    assert values(measured) == pytest.approx(
        {
            "ranks/samples_per_second": 2 * 16 / 0.010,
            "ranks/0/samples_per_second": 1600.0,
            "ranks/1/samples_per_second": 1600.0,
            "ranks/communication_share": 0.2,
            "ranks/statistics_share": 0.06,
            "ranks/contention_share": 0.04,
            "ranks/scaling_efficiency": 0.7,
        }
    )
    assert measured.doubts == [], "two devices do 1.4 times as much as one"
    assert measured.facts["ranks"]["communication_share"] == pytest.approx(
        {"low": 0.2, "high": 0.2}
    )
    series = {each.name: each for each in measured.series}
    assert series["ranks/all"].measured == pytest.approx([0.010] * 20)
    assert series["ranks/alone"].measured == pytest.approx([0.007] * 20)
    assert series["ranks/all"].calls_per_sample == 5, "a burst of 50 ms"


def test_a_burst_lasts_from_the_first_start_to_the_last_end():
    """A rank that begins half a call late makes five calls last half a call longer, whatever each says of itself."""
    measured = point()
    joint.measure(measured, step(), Scripted(skew_ns=5 * MILLISECOND), compares_alone=False)
    found = values(measured)
    assert found["ranks/samples_per_second"] == pytest.approx(2 * 16 * 5 / 0.055)
    assert found["ranks/1/samples_per_second"] == pytest.approx(1600.0)
    assert "ranks/scaling_efficiency" not in found


def test_kinds_of_bursts_take_turns_there_and_back():
    group = Scripted()
    joint.measure(point(), step(), group, compares_alone=True)
    kinds = [kind for kind, _ in group.asked]
    there = [Sharing.all, Sharing.no_gradients, Sharing.nothing, Sharing.alone]
    assert kinds == [*there[::-1], *there] * 11


def test_devices_that_are_slower_together_than_one_are_doubted():
    group = Scripted()
    group.call_ns |= {Sharing.alone: (4 * MILLISECOND, 0)}
    measured = point()
    joint.measure(measured, step(), group, compares_alone=True)
    [doubt] = measured.doubts
    assert (doubt.code, doubt.message) == (
        "multi_gpu_slower",
        "2 devices together reach 0.80 of the samples/s of 1",
    )


def test_an_inference_shares_no_gradients():
    group, measured = Scripted(), point(phase="inference", seconds=1.0)
    joint.measure(measured, step(trains=False), group, compares_alone=False)
    assert {kind for kind, _ in group.asked} == {Sharing.all}
    assert {calls for _, calls in group.asked} == {1}
    assert "ranks/communication_share" not in values(measured)


class Slowed(Scripted):
    """Each burst takes longer by a factor."""

    def burst(self, step, calls, sharing):
        factor = self.factor(len(self.asked))
        return [
            Burst(
                start_ns=each.start_ns,
                end_ns=each.start_ns + round((each.end_ns - each.start_ns) * factor),
            )
            for each in super().burst(step, calls, sharing)
        ]


def shares_by(factor):
    group, measured = Slowed(), point()
    group.factor = factor
    joint.measure(measured, step(), group, compares_alone=True)
    return values(measured)["ranks/communication_share"], measured.facts["ranks"][
        "communication_share"
    ]


def test_noise_widens_the_interval_of_a_share():
    noise = random.Random(0)
    share, bounds = shares_by(lambda _: 1 + 0.02 * noise.random())
    assert bounds["low"] < share < bounds["high"]
    assert bounds["low"] < 0.2 < bounds["high"]


def test_what_slows_all_bursts_of_a_round_is_in_no_share():
    share, bounds = shares_by(lambda number: 1 + 0.1 * (number // 4 // 5))
    assert {"share": share, **bounds} == pytest.approx({"share": 0.2, "low": 0.2, "high": 0.2})


@pytest.mark.parametrize(("seconds", "doubted"), [(0.0101, False), (0.0120, True), (0.0085, True)])
def test_a_time_that_all_ranks_together_do_not_have_is_doubted(seconds, doubted):
    measured = point(seconds=seconds)
    joint.measure(measured, step(), Scripted(), compares_alone=False)
    assert [doubt.code for doubt in measured.doubts] == ["ranks_disagree"] * doubted


def test_a_call_that_was_not_timed_has_no_bursts():
    group = Scripted()
    untimed = point()
    untimed.series.clear()
    with pytest.raises(Unsupported, match="not timed"):
        joint.measure(untimed, step(), group, compares_alone=True)
    assert group.asked == []


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [(0.001, 50), (0.010, 5), (0.025, 4), (0.070, 3), (0.100, 2), (0.300, 1)],
)
def test_a_burst_is_of_several_calls_unless_they_are_very_long(seconds, calls):
    group = Scripted(call_ns={Sharing.all: (round(seconds * 1e9),) * 2})
    joint.measure(
        point(phase="inference", seconds=seconds), step(trains=False), group, compares_alone=False
    )
    assert {asked for _, asked in group.asked} == {calls}


def test_call_impossible_on_one_rank_costs_only_the_efficiency():
    """A batch norm over one value for each channel, which several ranks have two of."""

    class Refusing(Scripted):
        def burst(self, step, calls, sharing):
            found = super().burst(step, calls, sharing)
            error = (
                "ValueError: more than 1 value"
                if sharing in (Sharing.nothing, Sharing.alone)
                else None
            )
            return [found[0], dataclasses.replace(found[1], error=error)]

    measured, group = point(), Refusing()
    joint.measure(measured, step(), group, compares_alone=True)
    for kind in (Sharing.nothing, Sharing.alone):
        assert [sharing for sharing, _ in group.asked].count(kind) == 1, "it is not tried again"
    assert measured.metric("ranks/statistics_share").value is None
    assert measured.metric("ranks/contention_share") is None
    assert values(measured)["ranks/communication_share"] == pytest.approx(0.2)
    efficiency = measured.metric("ranks/scaling_efficiency")
    assert efficiency.value is None
    assert "ValueError: more than 1 value" in efficiency.reason
    assert measured.find_series("ranks/alone") is None
