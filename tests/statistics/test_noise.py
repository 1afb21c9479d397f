"""The ± of whole runs on a scripted device: what it holds, and in what order points have to be measured."""

import numpy as np
import pytest

from perfexp.plan.sweep import order
from perfexp.records.record import Key
from perfexp.statistics import scaling
from tests.support import noisy_device
from tests.support.selection import first_always

#: Simulated runs, of which docs have 300.
RUNS = 30
NAMES = ["AR(1) 0.5", "processes 0.3 %", "processes 1 %"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    first_always("README: the ± over processes", NAMES),
)
def test_the_interval_of_five_processes_holds_the_truth(name):
    source, median, *_ = noisy_device.NOISES[name]
    found = [noisy_device.run(source, seed).times["device"].median for seed in range(RUNS)]
    held = sum(one.low <= median * noisy_device.CALL_SECONDS <= one.high for one in found)
    assert held / RUNS >= 0.8  # 300 runs: at least 93 % (docs/results/noise.json)


def test_processes_that_differ_more_than_their_calls_are_noted():
    codes = {doubt.code for doubt in noisy_device.run(noisy_device.clock_states(1e9), 0).doubts}
    assert "processes_differ" not in codes
    effects = [1.0, 1.05, 1.0, 1.0, 1.0]

    def source(rng):
        return lambda t, process: effects[process] * (1 + 0.001 * rng.standard_normal())

    result = noisy_device.run(source, 0)
    assert "processes_differ" in {doubt.code for doubt in result.doubts}
    assert result.processes == 5
    assert result.spread == pytest.approx(np.expm1(np.std(np.log(effects), ddof=1)), rel=0.05)


@pytest.mark.parametrize(("shuffled", "least", "most"), [(True, 0.9, 1.0), (False, 0.0, 0.1)])
def test_random_order_keeps_slowdown_out_of_the_size_growth(shuffled, least, most):
    sizes, held = np.linspace(224, 512, 100).round().astype(int), 0
    keys = [
        Key(phase="inference", input_size=(int(s), int(s)), batch_size=1, precision="fp32")
        for s in sizes
    ]
    rng = np.random.default_rng(1)
    for seed in range(40):
        measured = order(keys, 0, seed) if shuffled else keys
        slow = {key: 1 + 0.05 * place / len(keys) for place, key in enumerate(measured)}
        times = [
            slow[key] * 1e-2 * key.pixels / 1e6 * (1 + 0.003 * rng.standard_normal())
            for key in keys
        ]
        fit = scaling.fit_scaling([key.pixels / 1e6 for key in keys], times, [0.003] * len(keys))
        held += fit.exponent is not None and fit.exponent.low <= 1 <= fit.exponent.high
    assert least <= held / 40 <= most
