"""Simulated calls of known truth, shared by the tests of statistics and of stopping rules."""

import math
import os

import numpy as np
from scipy.signal import lfilter

#: So many series are simulated; the figures of docs are of 1,000, for which the limits of the tests were set.
RUNS = int(os.environ.get("PERFEXP_SERIES", "300"))


def adapted(limit, nominal, runs=RUNS):
    """A limit on a share that was set for 1,000 series, for another number of them.

    Args:
        limit: on the share of 1,000 series.
        nominal: the share that is to be expected.
        runs: how many series there are.

    Returns:
        The limit that is as many binomial standard errors of `nominal` away from it.
    """
    return nominal + (limit - nominal) * math.sqrt(1000 / runs)


def iid(noise):
    return lambda rng, n: 1 + noise * rng.standard_normal(n)


def pareto_outliers(rng, n):
    return (1 + 0.01 * rng.standard_normal(n)) * np.where(
        rng.random(n) < 0.02, 1 + rng.pareto(1.5, n), 1
    )


def autoregressive(rho, noise=0.01):
    def draw(rng, n):
        shocks = rng.standard_normal(n) * np.sqrt(1 - rho**2)
        shocks[0] = rng.standard_normal()
        return 1 + noise * lfilter([1.0], [1.0, -rho], shocks)  # x[i] = ρ·x[i - 1] + shocks[i]

    return draw


SERIES = {
    "iid 1 %": iid(0.01),
    "iid 5 %": iid(0.05),
    "2 % Pareto outliers": pareto_outliers,
    "AR(1) 0.5": autoregressive(0.5),
    "AR(1) 0.9": autoregressive(0.9),
}


def true_median(name):
    """1 by symmetry; with outliers to one side, the median of a very long series."""
    if "Pareto" not in name:
        return 1.0
    return float(np.median(pareto_outliers(np.random.default_rng(99), 4_000_000)))


def take(rule, source, *, percentiles=(), k=1):
    """Let a rule take samples from the source until it has enough; returns them and the rule's monitor."""
    monitor, got = rule.begin(percentiles=percentiles, calls_per_sample=k), 0
    while more := monitor.more(source[:got]):
        got += more
        assert got <= source.size, "the simulated series is too short for this rule"
    return source[:got], monitor


def nvbench_stdrel_calls(source, max_noise=0.005):
    """Calls that nvbench's `stdrel` rule takes, without its minimum of 0.5 s.

    It ends when the relative standard deviation is below max_noise or, looked at every 16 calls after 64, has itself
    settled to 5 % over the last 512. Source: nvbench, nvbench/detail/stdrel_criterion.cxx.
    """
    noise = []
    for n in range(1, source.size + 1):
        so_far = source[:n]
        if n > 4:
            noise.append(so_far.std(ddof=1) / so_far.mean())
            if noise[-1] < max_noise:
                return n
        if len(noise) > 64 and n % 16 == 0:
            window = np.array(noise[-512:])
            if np.sqrt(np.mean((window - noise[-1]) ** 2)) / noise[-1] < 0.05:
                return n
    return source.size
