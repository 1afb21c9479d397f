"""The scripted device behaves as the queue of a GPU does."""

from perfexp.devices.fake import FakeDevice


def test_launches_return_before_their_work_is_done():
    device = FakeDevice(enqueue_seconds=5e-6)
    device.launch(1e-3)
    assert device.now_ns() == 5_000
    device.synchronize()
    assert device.now_ns() == 1_005_000


def test_a_full_queue_makes_the_host_wait():
    device = FakeDevice(enqueue_seconds=1e-6, queue_depth=10)
    for _ in range(10):
        device.launch(1e-3)
    assert device.now_ns() == 10_000
    device.launch(1e-3)
    assert device.now_ns() == 1_001_000  # when the first launch ended


def test_event_times_are_cut_to_the_tick():
    device = FakeDevice(enqueue_seconds=0.0, tick_seconds=1e-6)
    start, end = device.new_event(), device.new_event()
    device.record(start)
    device.launch(2.7e-6)
    device.record(end)
    assert abs(device.elapsed_seconds(start, end) - 2e-6) < 1e-12


def test_an_event_is_passed_when_the_device_has_come_to_it():
    device = FakeDevice(enqueue_seconds=1e-6)
    event = device.new_event()
    device.hold(1e-3)
    device.record(event)
    assert not device.passed(event)
    device.synchronize()
    assert device.passed(event)


def test_a_call_that_waits_inside_is_found():
    device = FakeDevice()
    assert not device.waits_inside(lambda: device.launch(1e-6))
    assert device.waits_inside(lambda: (device.launch(1e-6), device.synchronize()))
