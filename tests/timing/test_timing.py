"""The timing blocks on a scripted device: its queue, its tick and its clocks are known, so the truth is."""

import gc
import itertools

import numpy as np
import pytest

from perfexp.devices.fake import FakeDevice
from perfexp.measuring import verdicts
from perfexp.records import point_times
from perfexp.statistics import estimators
from perfexp.timing import collecting, depth, queue
from perfexp.timing.stopping import Fixed, Precision


def repeat(device, work_seconds, launches=1):
    def call():
        for _ in range(launches):
            device.launch(work_seconds / launches)

    return call


@pytest.mark.parametrize("work_seconds", [5e-6, 50e-6])
def test_held_queue_gives_the_device_time_despite_a_slow_host(work_seconds):
    device = FakeDevice(enqueue_seconds=20e-6)
    seconds = queue.Chain(repeat(device, work_seconds), device, 400)(500)
    # the first block finds out how long the queue has to be held
    assert np.median(seconds) == pytest.approx(work_seconds, rel=1e-6)
    assert seconds[1:] == pytest.approx(np.full(499, work_seconds), rel=1e-6)


@pytest.mark.parametrize(("work_seconds", "wall_seconds"), [(5e-6, 20e-6), (50e-6, 50e-6)])
def test_an_unheld_queue_gives_the_wall_time_of_the_loop(work_seconds, wall_seconds):
    device = FakeDevice(enqueue_seconds=20e-6)
    seconds = queue.Loop(repeat(device, work_seconds), device)(500)
    assert np.median(seconds) == pytest.approx(wall_seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("work_seconds", "burst", "is_limiting"),
    [(5e-6, 1, False), (50e-6, 1, True), (50e-6, 8, False)],
)
def test_a_pass_tells_whether_the_device_limits_its_steps(work_seconds, burst, is_limiting):
    """A loader that delivers batches in bursts leaves the device behind at the end of each."""
    device = FakeDevice(enqueue_seconds=20e-6)

    def steps():
        for number in range(400):
            if number % burst == 0 and burst > 1:
                device.launch(0.0, host_seconds=1e-3)  # waits for the loader
            yield

    batches, step = steps(), repeat(device, work_seconds)

    def call():
        next(batches)
        step()

    seconds, total_seconds, limits = collecting.whole_pass(call, device)
    assert limits == is_limiting
    assert seconds.sum() == pytest.approx(total_seconds, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("launches", [20, 80, 400, 800, 1600, 3000])
@pytest.mark.parametrize(("host_seconds", "work_seconds"), [(4e-6, 5e-6), (4e-6, 3e-6)])
@pytest.mark.parametrize("samples", [1, 10, 100])
def test_the_loop_is_as_fast_as_one_without_any_measuring(
    launches, host_seconds, work_seconds, samples
):
    plain = FakeDevice(enqueue_seconds=host_seconds)
    call = repeat(plain, launches * work_seconds, launches)
    for _ in range(500):
        call()
    plain.synchronize()
    truth = plain.now_ns() * 1e-9 / 500
    device = FakeDevice(enqueue_seconds=host_seconds)
    loop = queue.Loop(repeat(device, launches * work_seconds, launches), device)
    seconds = np.concatenate([loop(samples) for _ in range(5)])
    assert seconds.mean() == pytest.approx(truth, rel=0.01)


def collected(name, block, rule, device):
    """One series by itself."""
    collector = collecting.Collector(
        name, block, lambda busy_seconds: rule.begin(busy_seconds=busy_seconds)
    )
    collecting.collect([collector], device.now_ns)
    return collector.series()


def test_latency_is_host_device_and_synchronise_together():
    device = FakeDevice(enqueue_seconds=20e-6, synchronize_seconds=3e-6)
    seconds = collecting.Latency(repeat(device, 50e-6), device)(50)
    assert seconds == pytest.approx(np.full(50, 73e-6), rel=1e-3)


@pytest.mark.parametrize(("work_seconds", "verdict"), [(5e-6, "launch"), (50e-6, "gpu")])
@pytest.mark.parametrize("calls", [100, 400, 1000, 5000])
def test_the_verdict_is_right_every_time(work_seconds, verdict, calls):
    for attempt in range(25):
        rng = np.random.default_rng([attempt, calls])
        device = FakeDevice(
            enqueue_seconds=20e-6 * (1 + 0.02 * rng.standard_normal()), record_host_seconds=1e-6
        )
        noise = iter(1 + 0.02 * rng.standard_normal(4 * calls + 10_000))

        def call(device=device, noise=noise):
            device.launch(work_seconds * next(noise))

        chunk = depth.samples_in_queue(call, device)
        held = float(np.median(queue.Chain(call, device, chunk)(calls)))
        wall = float(np.median(queue.Loop(call, device)(calls)))
        assert verdicts.bound_by(depth.issue_seconds(call, device, chunk), wall, held) == verdict


def test_the_host_time_is_that_of_a_queue_with_room():
    """Beyond its depth the queue itself slows the host down, and a device-bound call would look launch-bound."""
    device = FakeDevice(enqueue_seconds=20e-6, queue_depth=1000)
    call = repeat(device, 50e-6)
    assert depth.issue_seconds(call, device, depth.samples_in_queue(call, device)) == pytest.approx(
        20e-6, rel=0.01
    )


@pytest.mark.parametrize("launches", [600, 900])
def test_call_that_fills_the_queue_is_measured_one_by_one(launches):
    device = FakeDevice(enqueue_seconds=1e-6, record_seconds=2e-6)
    k, chunk, *_ = depth.group_calls(repeat(device, 2e-3, launches), device)
    assert (k, chunk) == (1, 1)


def test_call_that_is_slow_to_issue_still_fits_the_queue():
    device = FakeDevice(enqueue_seconds=80e-3)
    k, chunk, *_ = depth.group_calls(repeat(device, 2e-3), device)
    assert k == 1
    assert chunk > 1
    assert np.median(queue.Chain(repeat(device, 2e-3), device, chunk)(20)) == pytest.approx(
        2e-3, rel=1e-6
    )


@pytest.mark.parametrize("enqueue_seconds", [2e-6, 80e-3])
def test_a_fill_of_the_queue_times_its_calls(enqueue_seconds):
    device, held = FakeDevice(enqueue_seconds=enqueue_seconds), []
    hold, device.hold = device.hold, lambda seconds: (held.append(seconds), hold(seconds))
    assert depth.group_calls(repeat(device, 2e-3), device).call_seconds == pytest.approx(
        2e-3, rel=1e-3
    )
    assert held == pytest.approx([max(0.03, 5 * enqueue_seconds)], rel=0.01)


def test_no_hold_is_longer_than_a_second():
    device, held = FakeDevice(enqueue_seconds=0.5), []
    hold, device.hold = device.hold, lambda seconds: (held.append(seconds), hold(seconds))
    assert depth.group_calls(repeat(device, 2e-3), device).chunk == 1
    assert held == [1.0]


@pytest.mark.parametrize("wait_seconds", [0.1, 0.4])
def test_calls_of_which_every_second_waits_for_data_fit(wait_seconds):
    device, waits = FakeDevice(), itertools.cycle([0.0, wait_seconds])

    def call():
        device.launch(2e-3, host_seconds=1e-5 + next(waits))

    assert depth.group_calls(call, device).chunk >= 1


def test_a_call_of_many_launches_still_fits():
    device = FakeDevice(enqueue_seconds=2e-6, queue_depth=1000)
    call = repeat(device, 1e-3, launches=300)
    seconds = queue.Chain(call, device, depth.samples_in_queue(call, device))(20)
    assert np.median(seconds) == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.parametrize(("launches", "fits"), [(1, 400), (9, 80), (399, 1), (990, 1), (1001, 0)])
def test_the_queue_is_filled_to_find_out_how_much_it_takes(launches, fits):
    """1,000 places and an event for each sample; four fifths of what goes in."""
    device = FakeDevice(enqueue_seconds=5e-6, queue_depth=1000)
    found = depth.samples_in_queue(repeat(device, 2e-5, launches=launches), device)
    assert found == pytest.approx(fits, abs=1)
    assert (found == 0) == (fits == 0)


@pytest.mark.parametrize(("work_seconds", "most"), [(60e-3, 5), (0.5, 5), (5e-3, 10)])
def test_no_more_work_is_enqueued_than_is_worth_waiting_for(work_seconds, most):
    """A launch takes the host 50 µs whatever it launches: 600 fit into a hold, and the device would work for 36 s."""
    device = FakeDevice(enqueue_seconds=50e-6, queue_depth=1000)
    calls = []

    def call():
        calls.append(1)
        device.launch(work_seconds)

    assert depth.samples_in_queue(call, device) == int(0.8 * most)
    assert len(calls) == most + 1, "and the one that was timed"


def test_a_call_that_waits_inside_never_fits():
    device = FakeDevice()
    assert depth.samples_in_queue(lambda: (device.launch(1e-5), device.synchronize()), device) == 0


def test_a_host_too_slow_to_fill_the_queue_fills_what_it_can():
    device = FakeDevice(enqueue_seconds=1e-3, queue_depth=1000)
    assert 1 <= depth.samples_in_queue(repeat(device, 1e-6), device) <= 60


def test_a_coarse_tick_is_overcome_by_more_calls_per_sample():
    device = FakeDevice(tick_seconds=1.024e-6, enqueue_seconds=1e-6)
    k = estimators.calls_per_sample(10e-6, device.event_tick_seconds)
    seconds = queue.Chain(repeat(device, 10e-6), device, 8, k)(30)
    assert k == 103
    assert np.abs(seconds / 10e-6 - 1).max() <= 0.001


def test_without_more_calls_the_same_tick_would_be_wrong():
    device = FakeDevice(tick_seconds=1.024e-6, enqueue_seconds=1e-6)
    seconds = queue.Chain(repeat(device, 10e-6), device, 400)(300)
    assert np.abs(seconds / 10e-6 - 1).max() > 0.02


def test_a_queue_that_can_not_be_held_is_told():
    device = FakeDevice(enqueue_seconds=20e-6)
    device.hold = lambda seconds: None
    chain = queue.Chain(repeat(device, 5e-6), device, 400)
    chain(100)
    assert chain.held.starved == 1


def test_the_host_chain_on_a_synchronous_device():
    device = FakeDevice(asynchronous=False, enqueue_seconds=1e-6)
    seconds = collecting.HostChain(repeat(device, 99e-6), device)(10)
    assert seconds == pytest.approx(np.full(10, 100e-6), rel=1e-3)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_segments_split_a_call_into_its_parts(asynchronous):
    device = FakeDevice(asynchronous=asynchronous, enqueue_seconds=1e-6)
    parts = (("forward", lambda: device.launch(30e-6)), ("backward", lambda: device.launch(60e-6)))
    block = queue.Segments(parts, device)
    sums = block(10)
    found = block.parts()
    extra = 0 if asynchronous else 1e-6
    assert np.median(found["forward"]) == pytest.approx(30e-6 + extra, rel=1e-3)
    assert np.median(found["backward"]) == pytest.approx(60e-6 + extra, rel=1e-3)
    assert sums == pytest.approx(found["forward"] + found["backward"])


def test_garbage_collector_is_off_only_while_timing():
    seen = []
    device = FakeDevice(asynchronous=False)

    def call():
        seen.append(gc.isenabled())
        device.launch(1e-3)

    collected("latency", collecting.HostChain(call, device), Fixed(warmup=1, measure=3), device)
    assert seen == [False] * 4
    assert gc.isenabled()


def test_what_a_series_takes_begins_with_its_first_block(monkeypatch):
    """Collecting garbage before it takes as long as a short series."""
    device, seen = FakeDevice(asynchronous=False), []
    monkeypatch.setattr(gc, "collect", lambda: device.launch(10.0))

    class Monitor:
        def __init__(self):
            self.starts = []

        def more(self, samples, elapsed_seconds):
            seen.append(elapsed_seconds)
            self.starts.append(samples.size)
            return 5 if samples.size < 10 else 0

        def warmup(self, samples):
            return 0

        def stop(self, samples):
            return None

    collector = collecting.Collector(
        "latency", collecting.HostChain(repeat(device, 1e-3), device), lambda _: Monitor()
    )
    collecting.collect([collector], device.now_ns)
    assert seen == pytest.approx([0.0, 5e-3, 10e-3], rel=0.01)


def test_a_series_keeps_every_sample_and_says_which_are_warm_up():
    device = FakeDevice(asynchronous=False)
    series = collected(
        "latency",
        collecting.HostChain(repeat(device, 1e-3), device),
        Fixed(warmup=10, measure=20),
        device,
    )
    assert (len(series.samples), series.warmup, len(series.measured)) == (30, 10, 20)
    assert series.stop.reason == "fixed"


def test_a_data_loader_can_not_catch_up_between_blocks(monkeypatch):
    """A loader that prefetches in every gap would make each block's first calls look free."""
    device, gaps = FakeDevice(asynchronous=False), []
    monkeypatch.setattr(gc, "collect", lambda *young: None if young else gaps.append(len(taken)))
    taken = []

    def block(count):
        taken.append(count)
        return collecting.HostChain(repeat(device, 1e-3), device)(count)

    collected(
        "latency", block, Precision(target=1e-4, max_seconds=0.3, warmup_seconds=0.01), device
    )
    assert len(taken) > 3
    assert gaps == [0]  # all garbage was collected once, before the first block


def test_time_to_fill_the_queue_counts_toward_the_limit():
    device = FakeDevice(enqueue_seconds=3e-3, queue_depth=10)
    noise, begun = (
        itertools.cycle(np.random.default_rng(0).uniform(0.5e-3, 1.5e-3, 997)),
        device.now_ns(),
    )
    rule = Precision(target=1e-9, max_seconds=0.5, min_calls=10, warmup_seconds=0.0)
    chain = queue.Chain(lambda: device.launch(next(noise)), device, 5)
    series = collected("device", chain, rule, device)
    assert series.stop.reason == "max_seconds"
    assert (device.now_ns() - begun) * 1e-9 == pytest.approx(0.5, rel=0.1)
    assert sum(series.measured) < 0.2


@pytest.mark.parametrize(("enqueue_seconds", "k"), [(40e-6, 200), (1e-6, 200)])
def test_calls_per_sample_follow_the_device_time_not_the_host(enqueue_seconds, k):
    device = FakeDevice(enqueue_seconds=enqueue_seconds, record_seconds=2e-6, queue_depth=10_000)
    call = repeat(device, 5e-6)
    found, chunk, *_ = depth.group_calls(call, device)
    assert found == pytest.approx(
        k, rel=0.5
    )  # found from blocks of single calls, each with its record
    seconds = queue.Chain(call, device, chunk, found)(20)
    assert np.median(seconds) == pytest.approx(5e-6, rel=0.004)


def test_calls_that_allocate_at_first_get_another_chance():
    device, waits = FakeDevice(), iter([True, True])

    def call():
        device.launch(1e-4)
        if next(waits, False):
            device.synchronize()

    k, chunk, *_ = depth.group_calls(call, device)
    assert k == 1
    assert chunk > 1


@pytest.mark.parametrize("every", [10, 50])
def test_hold_stays_bounded_if_the_device_makes_the_host_wait(every):
    device, calls = FakeDevice(enqueue_seconds=1e-6, queue_depth=1000), iter(range(1, 10**9))

    def call():
        device.launch(1e-3)
        if next(calls) % every == 0:
            device.synchronize()

    _, chunk, _ = depth.group_calls(call, device)
    chain, start = queue.Chain(call, device, max(1, chunk)), device.now_ns()
    for _ in range(5):
        chain(40)
    assert (
        device.now_ns() - start
    ) * 1e-9 < 60  # 200 calls of 1 ms, each fill tried a few times behind waits
    assert np.median(chain(40)) == pytest.approx(1e-3, rel=0.01)


def test_a_hold_recovers_from_a_host_that_was_held_up():
    device, late = (
        FakeDevice(enqueue_seconds=100e-6, queue_depth=1000),
        iter([True, *[False] * 10_000]),
    )

    def call():
        device.launch(90e-6)
        if next(late):
            device.launch(0.0, host_seconds=0.05)

    chain = queue.Chain(call, device, 50)
    for _ in range(20):
        chain(50)
    start = device.now_ns()
    seconds = chain(50)
    assert np.median(seconds) == pytest.approx(90e-6, rel=0.01)
    assert (device.now_ns() - start) * 1e-9 < 5 * 50 * 190e-6


def test_a_slower_device_is_held_for_one_sample_only():
    device = FakeDevice(enqueue_seconds=100e-6, queue_depth=1000)
    chain = queue.Chain(repeat(device, 300e-6), device, 50)
    chain(50)
    start = device.now_ns()
    assert np.median(chain(50)) == pytest.approx(300e-6, rel=0.001)
    assert (
        device.now_ns() - start
    ) * 1e-9 < 1.2 * 50 * 300e-6  # all of them behind a wait would be 1.4 of it


def test_series_alternate_blocks_and_drift_widens_both():
    """A clock that falls by 5 % for every third block: the samples of one block do not show it."""
    device, order = FakeDevice(), []
    noise = np.random.default_rng(0)

    def call():
        slow = 1.05 if len(order) // 2 % 3 == 2 else 1.0
        device.launch(1e-3 * slow * (1 + 0.001 * noise.standard_normal()))

    def noted(name, block):
        return lambda count: order.append(name) or block(count)

    rule = Fixed(warmup=0, measure=240)
    blocks = {"latency": collecting.Latency(call, device), "device": queue.Chain(call, device, 100)}
    collectors = [
        collecting.Collector(name, noted(name, block), lambda _: rule.begin(takes_turns=True))
        for name, block in blocks.items()
    ]
    collecting.collect(collectors, device.now_ns)
    assert order == ["latency", "device"] * 8
    for collector in collectors:
        series = collector.series()
        assert series.blocks == list(range(0, 240, 30))
        time = point_times.summary_of(series).median
        assert time.high - time.low > 0.03 * time.value
        assert estimators.median_interval(series.samples[:30]).relative_half_width < 0.002


@pytest.mark.parametrize(("failing_call", "measured"), [(2, 0), (5, 0), (12, 7)])
def test_an_error_leaves_the_samples_of_complete_blocks(failing_call, measured):
    device, calls = FakeDevice(), []

    def call():
        calls.append(1)
        if len(calls) == failing_call:
            raise RuntimeError("broken")
        device.launch(1e-3)

    collector = collecting.Collector(
        "latency",
        collecting.Latency(call, device),
        lambda _: Fixed(warmup=2, measure=50).begin(takes_turns=True),
    )
    with pytest.raises(RuntimeError, match="broken"):
        collecting.collect([collector], device.now_ns)
    assert collector.is_measured == bool(measured)
    if measured:
        assert len(collector.series().measured) == measured
