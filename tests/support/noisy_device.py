"""Whole runs on a scripted device whose noise and truth are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from scipy.signal import lfilter

from perfexp.devices import Cache
from perfexp.devices.fake import FakeDevice
from perfexp.measuring.times import Times
from perfexp.records import point_diagnostics
from perfexp.records.record import Key, Point, Status
from perfexp.records.rows import Row
from perfexp.records.summary import row
from perfexp.timing.stopping import Precision

CALL_SECONDS, GAP_SECONDS, PROCESSES, LONGEST_SECONDS = 5e-3, 1.5, 5, 150.0
#: Frequency of the simulated clock, and the relative standard deviation of a reading.
CLOCK_HERTZ, CLOCK_NOISE = 1.98e9, 0.002
#: Factor on a call's time, by the simulated time in seconds and the number of the process.
Noise = Callable[[float, int], float]
Source = Callable[[np.random.Generator], Noise]


def iid(rng: np.random.Generator) -> Noise:
    return lambda t, process: 1 + 0.01 * rng.standard_normal()


def autoregressive(rho: float) -> Source:
    def begin(rng: np.random.Generator) -> Noise:
        values = iter(
            1 + 0.01 * lfilter([np.sqrt(1 - rho**2)], [1, -rho], rng.standard_normal(60_000))[1000:]
        )
        return lambda t, process: next(values)

    return begin


def clock_states(dwell_seconds: float) -> Source:
    """Two clocks 3 % apart, each of which stays for an exponential time."""

    def begin(rng: np.random.Generator) -> Noise:
        changes = np.cumsum(
            rng.exponential(dwell_seconds, int(20 + 3 * LONGEST_SECONDS / dwell_seconds))
        )
        first = rng.integers(2)
        return _Clocks(lambda t: 1.0 if (np.searchsorted(changes, t) + first) % 2 else 1.03, rng)

    return begin


class _Clocks:
    """Noise of a clock whose state the device reports."""

    def __init__(self, slowness: Callable[[float], float], rng: np.random.Generator) -> None:
        self.slowness, self._rng = slowness, rng

    def __call__(self, t: float, process: int) -> float:
        return self.slowness(t) * (1 + 0.002 * self._rng.standard_normal())


class _Device(FakeDevice):
    """A scripted device whose clock is that of the noise, from a moment on."""

    def __init__(self, noise: Noise, begun_seconds: float) -> None:
        super().__init__(enqueue_seconds=1e-5)
        self._noise, self._begun_seconds, self._readings = (
            noise,
            begun_seconds,
            np.random.default_rng(0),
        )

    def clock_readings(self) -> tuple[float, ...]:
        if not isinstance(self._noise, _Clocks):
            return ()
        clock = CLOCK_HERTZ / self._noise.slowness(self._begun_seconds + self.now_ns() * 1e-9)
        return tuple(clock * (1 + CLOCK_NOISE * self._readings.standard_normal(2)))


def pink(rng: np.random.Generator) -> Noise:
    """1/f noise of 1 % over the time of the run, in steps of a call."""
    n = int(LONGEST_SECONDS / CALL_SECONDS)
    frequencies = np.fft.rfftfreq(n)
    frequencies[0] = np.inf
    spectrum = rng.standard_normal(frequencies.size) + 1j * rng.standard_normal(frequencies.size)
    values = np.fft.irfft(spectrum / np.sqrt(frequencies), n)
    values = 1 + 0.01 * values / values.std()
    return lambda t, process: float(values[int(t / CALL_SECONDS) % n])


def outliers(rng: np.random.Generator) -> Noise:
    """2 % of the calls take three times as long."""
    return lambda t, process: (
        (3.0 if rng.random() < 0.02 else 1.0) * (1 + 0.005 * rng.standard_normal())
    )


def bursts(rng: np.random.Generator) -> Noise:
    """Calls are 30 % slower in bursts of 10 calls on average, every 100 calls on average."""
    state = {"left": 0}

    def factor(t: float, process: int) -> float:
        if state["left"] == 0 and rng.random() < 1 / 100:
            state["left"] = int(rng.geometric(1 / 10))
        slow = state["left"] > 0
        state["left"] -= slow
        return (1.3 if slow else 1.0) * (1 + 0.005 * rng.standard_normal())

    return factor


def arrivals(rng: np.random.Generator) -> Noise:
    """Data arrives for eight calls at once: every eighth call waits for 2.4 of their times, 0.3 per call."""
    calls = itertools.count(int(rng.integers(8)))
    return lambda t, process: (
        (3.4 if next(calls) % 8 == 0 else 1.0) * (1 + 0.005 * rng.standard_normal())
    )


def thermal(rng: np.random.Generator) -> Noise:
    """The clock falls by 3 % with a time constant of 20 s under load, and recovers while there is none."""
    state = {"time": 0.0, "warm": 0.0}

    def factor(t: float, process: int) -> float:
        idle = t - state["time"] > 1
        state["warm"] += ((0.0 if idle else 1.0) - state["warm"]) * (
            1 - np.exp(-(t - state["time"]) / 20)
        )
        state["time"] = t
        return float(1 + 0.03 * state["warm"]) * (1 + 0.001 * rng.standard_normal())

    return factor


def processes(deviation: float, tails: float = np.inf) -> Source:
    """Processes that differ by this, with tails of Student's t of so many degrees."""

    def begin(rng: np.random.Generator) -> Noise:
        effects = 1 + deviation * (
            rng.standard_t(tails, PROCESSES) if tails < np.inf else rng.standard_normal(PROCESSES)
        )
        return lambda t, process: float(effects[process]) * (1 + 0.002 * rng.standard_normal())

    return begin


#: Noise, true median of `device` and true mean of the loop in units of the call, and warnings that name the cause.
NOISES: dict[str, tuple[Source, float, float, tuple[str, ...]]] = {
    "iid 1 %": (iid, 1.0, 1.0, ()),
    "AR(1) 0.5": (autoregressive(0.5), 1.0, 1.0, ()),
    "AR(1) 0.9": (autoregressive(0.9), 1.0, 1.0, ()),
    "2 % of calls × 3": (outliers, 1.0, 1.04, ()),
    "bursts": (bursts, 1.0, 1 + 0.3 * 10 / 110, ("drift",)),
    "batched arrivals": (arrivals, 1.0009, 1.3, ()),
    "two clocks, 0.5 s": (clock_states(0.5), 1.015, 1.015, ("drift", "clock_moved")),
    "two clocks, 5 s": (
        clock_states(5.0),
        1.015,
        1.015,
        ("drift", "clock_moved", "processes_differ"),
    ),
    "1/f 1 %": (pink, 1.0, 1.0, ("drift",)),
    "thermal, 20 s": (thermal, 1.03, 1.03, ("drift",)),
    "processes 0.3 %": (processes(0.003), 1.0, 1.0, ("processes_differ",)),
    "processes 1 %": (processes(0.01), 1.0, 1.0, ("processes_differ",)),
    "processes 1 %, heavy-tailed": (processes(0.01, tails=3.0), 1.0, 1.0, ("processes_differ",)),
}


def run(source: Source, seed: int) -> Row:
    """The result of one run of five processes."""
    noise, begun_seconds, points = source(np.random.default_rng(seed)), 0.0, []
    for number in range(PROCESSES):
        device = _Device(noise, begun_seconds)

        def call(
            number: int = number, device: FakeDevice = device, begun_seconds: float = begun_seconds
        ) -> None:
            device.launch(CALL_SECONDS * noise(begun_seconds + device.now_ns() * 1e-9, number))

        key = Key(
            phase="inference",
            input_size=(224, 224),
            batch_size=1,
            precision="fp32",
            replicate=number,
        )
        point = Point(key=key, status=Status.OK)
        rule = Precision(
            target=0.01,
            min_seconds=0.2,
            max_seconds=0.5,
            warmup_seconds=0.2,
            min_calls=10,
            processes=PROCESSES,
            tail_percentile=95.0,
        )
        Times(
            device=device,
            stopping=rule,
            percentiles=(50.0,),
            cache=Cache.warm,
            progress=lambda _: None,
        ).whole(point, call, on_device=True)
        point.doubts += point_diagnostics.judge({}, {}, point.facts)
        points.append(point)
        begun_seconds += device.now_ns() * 1e-9 + GAP_SECONDS
    return row(points, (50.0,))
