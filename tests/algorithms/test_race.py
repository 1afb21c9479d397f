"""Who wins a race whose truth is known, by how much, and whether the result may be used by other processes."""

import gc
import math
import random
from functools import partial

import pytest

from perfexp.algorithms.race import _CHECKED_ROUNDS, Launching, Race
from perfexp.devices.fake import FakeDevice
from perfexp.errors import Unsupported
from perfexp.probes import turns
from tests.support.simulation import adapted

RACES = 300


@pytest.fixture(autouse=True, scope="module")
def few_objects():
    """Every race collects garbage first: of thousands of modules, if they are not set aside."""
    gc.freeze()
    yield
    gc.unfreeze()


def device(**script):
    return FakeDevice(**{"enqueue_seconds": 1e-6, "queue_depth": 1000, **script})


def held(device, calls, default="default", captures=None):
    """The result of both races between the calls."""
    race = Race(device=device, default=default, captures=captures)
    nominees = race.nominate(calls)
    return race.decide(
        {name: calls[name] for name in dict.fromkeys([*nominees, default])}, nominees[0]
    )


def works(device, **seconds):
    return {name: partial(device.launch, value) for name, value in seconds.items()}


def noisy(device, seed, noise, **seconds):
    """Calls whose every launch varies by itself."""
    rng = random.Random(seed)
    return {
        name: lambda s=s: device.launch(s * math.exp(noise * rng.gauss(0, 1)))
        for name, s in seconds.items()
    }


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_race_is_won_by_the_fastest(asynchronous):
    fake = device(asynchronous=asynchronous, enqueue_seconds=1e-6 if asynchronous else 0)
    outcome = held(fake, works(fake, default=30e-6, b=20e-6, c=90e-6))
    assert (outcome.chosen, outcome.unsteady) == ("b", None)
    assert outcome.launching is (Launching.eager if asynchronous else Launching.clock)
    facts = outcome.facts()
    assert facts["seconds"] == {
        "b": pytest.approx(20e-6, rel=0.05),
        "default": pytest.approx(30e-6, rel=0.05),
    }
    assert facts["races"][outcome.launching.value]["b"]["speedup"] == pytest.approx(1.5, rel=0.05)
    assert facts["races"][outcome.launching.value]["default"]["speedup_low"] == 1


@pytest.mark.slow
def test_equal_engines_replace_default_in_at_most_1_race_of_20():
    """Eight equal entrants; the nominee is the best of the first race, its gain there is not believed."""
    switched, contained = 0, 0
    for seed in range(RACES):
        fake = device()
        names = ("default", "benchmark", "a", "b", "c", "d", "e", "f")
        outcome = held(fake, noisy(fake, seed, 0.02, **dict.fromkeys(names, 40e-6)))
        switched += outcome.chosen != "default"
        others = [
            interval
            for name, interval in outcome.speedups[Launching.eager].items()
            if name != "default"
        ]
        contained += all(interval.low <= 1 <= interval.high for interval in others[:1])
    assert switched / RACES <= 0.05
    assert contained / RACES >= adapted(0.93, 0.95, RACES) - 0.01


@pytest.mark.slow
@pytest.mark.always("README: algorithm=fastest")
def test_engine_five_percent_faster_is_chosen():
    won = 0
    for seed in range(RACES):
        fake = device()
        times = dict.fromkeys(("default", "benchmark", "a", "b", "c", "d", "e"), 40e-6)
        won += held(fake, noisy(fake, seed, 0.02, **times, faster=38e-6)).chosen == "faster"
    assert won / RACES >= 0.95


@pytest.mark.slow
def test_what_is_reported_is_not_the_luck_of_the_first_race():
    """The gain of the best of seven equal engines over the default, as printed, is 0 on average."""
    gains = []
    for seed in range(RACES):
        fake = device()
        outcome = held(
            fake, noisy(fake, seed, 0.05, **dict.fromkeys(("default", *"abcdefg"), 200e-6))
        )
        nominee = next(iter(outcome.speedups[Launching.eager]))
        gains.append(math.log(outcome.speedups[Launching.eager][nominee].value))
    spread = math.sqrt(sum(gain**2 for gain in gains) / RACES)
    assert abs(sum(gains) / RACES) < 3 * spread / math.sqrt(RACES)


def test_all_are_captured_or_none_is():
    """Four kernels that follow each other closely in a graph beat one kernel, and lose when launched one by one."""
    fake = device(graph_gap_seconds=2e-6)

    def four():
        for _ in range(4):
            fake.launch(9e-6)

    calls = {"default": partial(fake.launch, 40e-6), "four": four}
    captured = held(fake, calls, captures=lambda: fake.capture)
    assert (captured.chosen, captured.launching, captured.not_captured) == (
        "four",
        Launching.captured,
        None,
    )
    assert captured.speedups[Launching.captured]["four"].value == pytest.approx(42 / 38, rel=0.02)
    assert captured.speedups[Launching.eager]["four"].high < 1

    def refuses(call):
        if call is four:
            raise Unsupported("it waits")
        return fake.capture(call)

    eager = held(fake, calls, captures=lambda: refuses)
    assert (eager.chosen, eager.launching, eager.not_captured) == (
        "default",
        Launching.eager,
        "it waits",
    )
    assert list(eager.seconds) == [Launching.eager]


def test_capture_out_of_memory_is_a_reason_other_errors_raise():
    fake = device()

    def lacks(error, call):
        raise error

    calls = works(fake, default=40e-6, a=30e-6)
    outcome = held(fake, calls, captures=lambda: partial(lacks, MemoryError("no room\nfor it")))
    assert (outcome.chosen, outcome.not_captured) == ("a", "no room")
    with pytest.raises(ZeroDivisionError):
        held(fake, calls, captures=lambda: partial(lacks, ZeroDivisionError()))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({}, None),
        ({"clock_hertz": (1.98e9,), "throttled_share": 0.0}, None),
        ({"clock_hertz": (1.98e9, 1.7e9), "clock_seconds": 0.02}, "MHz"),
        ({"throttled_share": 0.3}, "power cap"),
    ],
)
def test_a_result_of_an_unsteady_device_is_marked(script, reason):
    fake = device(**script)
    unsteady = held(fake, works(fake, default=30e-6, b=20e-6)).unsteady
    assert unsteady is None if reason is None else reason in unsteady


def test_a_result_of_a_device_that_waits_for_its_host_is_marked():
    fake = device(queue_depth=4)

    def many():
        for _ in range(8):
            fake.launch(1e-6)

    outcome = held(fake, {"default": many, "b": partial(fake.launch, 50e-6)})
    assert (outcome.chosen, outcome.unsteady) == ("default", "the host kept the device waiting")


def test_race_ends_early_only_if_its_result_is_clear():
    rounds = []

    class Counting(Race):
        def _round(self, contestants, taken):
            super()._round(contestants, taken)
            rounds.append(len(contestants))

    for seconds in (30e-6, 39.99e-6):
        fake = device()
        calls = noisy(fake, 0, 0.02, default=40e-6, b=seconds)
        rounds.clear()
        Counting(device=fake, default="default").decide(calls, "b")
        assert len(rounds) == _CHECKED_ROUNDS[0 if seconds < 35e-6 else -1]


def test_no_place_in_the_order_is_better_than_another():
    orders = turns.balanced(list("abcde"))
    taken = [next(orders) for _ in range(40)]
    for name in "abcde":
        assert sum(order.index(name) for order in taken) == 40 * 2
    assert len({tuple(order) for order in taken}) > 20
    assert any(order[0] != "a" for order in taken)
    assert taken == [order for order, _ in zip(turns.balanced(list("abcde")), taken, strict=False)]
