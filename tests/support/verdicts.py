"""Synthetic records with known truth, and what the verdicts of a comparison are worth on them."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from perfexp.commands import sides
from perfexp.comparison import judging
from perfexp.comparison.document import Compared, Verdict
from perfexp.comparison.judging import Settings, compare
from perfexp.comparison.pairing import Side
from perfexp.records import point_times, priors, summary
from perfexp.records.analysis import Analysis
from perfexp.records.record import Key, Point, Record, Series, Status, SweepMembership
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.statistics import ratios, sequential
from perfexp.statistics.blockwise import Summary
from perfexp.statistics.moderated import Repeats

CALL_SECONDS, CALL_NOISE, CALLS, PROCESSES, MARGIN = 5e-3, 0.002, 30, 8, 0.01
#: Points of a sweep, those of them that truly differ, and by what factor.
POINTS, CHANGED, CHANGE = 100, 10, 0.97
#: Input size of a record's first point.
_SMALLEST = 32


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How two commands differ, and how much their processes and runs do.

    Attributes:
        ratio: true ratio of the other side to the baseline.
        processes: standard deviation between processes, of log seconds.
        clock: slowness of a second clock state, in which half of the processes stay.
        runs: standard deviation between runs.
        count: processes of a run.
        level: level of each look of `perfexp ab`; None for its own.
    """

    ratio: float = 1.0
    processes: float = 0.005
    clock: float = 0.0
    runs: float = 0.0
    count: int = PROCESSES
    margin: float = MARGIN
    level: float | None = None

    def factors(self, rng: np.random.Generator) -> list[float]:
        """The factors of one run's processes on the time of a call."""
        clocks = np.log1p(self.clock) * rng.integers(0, 2, self.count)
        run = self.runs * rng.standard_normal()
        return np.exp(run + clocks + self.processes * rng.standard_normal(self.count)).tolist()


SCENARIOS = {
    "identical, 0.5 %": Scenario(),
    "identical, 1 %": Scenario(processes=0.01),
    "identical, sticky clocks 2 %": Scenario(clock=0.02),
    "0.2 % faster, 0.5 %": Scenario(ratio=1 / 1.002),
    "3 % faster, 0.5 %": Scenario(ratio=0.97),
    "3 % faster, 1 %": Scenario(ratio=0.97, processes=0.01),
    "identical, runs 2 %": Scenario(runs=0.02),
    "identical, 1 %, three processes": Scenario(processes=0.01, count=3),
    "identical, 0.5 %, one process": Scenario(count=1),
    "3 % faster, 0.5 %, five processes": Scenario(ratio=0.97, count=5),
    "10 % faster, 1 %, three processes": Scenario(ratio=0.9, processes=0.01, count=3),
    "twice as fast, 1 %, one process": Scenario(ratio=0.5, processes=0.01, count=1),
}


#: Pairs that `perfexp ab` measures. Without a margin every verdict on a difference is false; the last one has each look
#: at 5 %, as if nobody had looked before.
TOGETHER = {
    "identical, 0.5 %": Scenario(),
    "identical, 1 %": Scenario(processes=0.01),
    "identical, sticky clocks 2 %": Scenario(clock=0.02),
    "0.2 % faster, 0.5 %": Scenario(ratio=1 / 1.002),
    "3 % faster, 0.5 %": Scenario(ratio=0.97),
    "3 % faster, 1 %": Scenario(ratio=0.97, processes=0.01),
    "slower by the margin, 0.5 %": Scenario(ratio=1 + MARGIN),
    "identical, runs 2 %": Scenario(runs=0.02),
    "identical, 0.5 %, margin 0.001 %": Scenario(margin=1e-5),
    "the same, without alpha spending": Scenario(margin=1e-5, level=0.05),
}


@dataclass(frozen=True, kw_only=True)
class Together:
    """Points that `perfexp ab` measures in the same processes until all of them are decided.

    Attributes:
        changed: points that are 3 % faster.
        ratio: true ratio of the others.
        shared: standard deviation of a process that all its points have in common, of log seconds.
        sd: standard deviation between processes of each point by itself.
        level: level of each look; None for that of `perfexp ab`.
    """

    points: int = 20
    changed: int = 0
    ratio: float = 1.0
    shared: float = 0.0
    sd: float = 0.005
    margin: float = MARGIN
    level: float | None = None

    def ratios(self) -> list[float]:
        """The true ratio of each point."""
        return [CHANGE] * self.changed + [self.ratio] * (self.points - self.changed)


#: Without a margin, or with a true ratio at the margin, false verdicts are the most probable.
SWEEPS = {
    "10 points, identical": Together(points=10),
    "20 points, identical": Together(),
    "20 points, identical, sd shared by all": Together(shared=0.005, sd=0.002),
    "20 points, 5 faster": Together(changed=5),
    "20 points, 5 faster, 15 slower by the margin": Together(changed=5, ratio=1 + MARGIN),
    "10 points, identical, margin 0.001 %": Together(points=10, margin=1e-5),
    "20 points, identical, margin 0.001 %": Together(margin=1e-5),
    "20 points, 5 faster, margin 0.001 %": Together(changed=5, margin=1e-5),
    "20 points, 15 faster, margin 0.001 %": Together(changed=15, margin=1e-5),
    "20 points, 5 faster, margin 0.001 %, sd shared by all": Together(
        changed=5, margin=1e-5, shared=0.005, sd=0.002
    ),
    "20 points, identical, margin 0.001 %, each look at 5 %": Together(margin=1e-5, level=0.05),
}


def record(name: str, points: Sequence[Sequence[float]], rng: np.random.Generator) -> Record:
    """A record of `device` times.

    Args:
        points: for each point, the factor of each process on the time of a call.
    """
    found = []
    for number, factors in enumerate(points):
        for replicate, factor in enumerate(factors):
            key = Key(
                phase="inference",
                input_size=(_SMALLEST + number, _SMALLEST + number),
                batch_size=1,
                precision="fp32",
                replicate=replicate,
            )
            samples = (
                CALL_SECONDS * factor * np.exp(CALL_NOISE * rng.standard_normal(CALLS))
            ).tolist()
            found.append(
                Point(key=key, status=Status.OK, series=[Series(name="device", samples=samples)])
            )
    return Record(
        uid=f"{name} {rng.integers(1 << 62)}",
        name=name,
        perfexp_version="0",
        status=Status.OK,
        started="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:01:00+00:00",
        plan={"model": {"name": "resnet18"}, "algorithm": {"name": name}},
        plan_hash="",
        environment={"device": {"name": "NVIDIA H200", "kind": "cuda"}},
        points=found,
    )


def judged(baseline: Record, other: Record, margin: float = MARGIN) -> list[Compared]:
    """The pairs of two records."""
    both = [
        Side.of(name, name, [Analysis.of(one)]) for name, one in (("A", baseline), ("B", other))
    ]
    return list(compare(both, Settings(margin=margin)).pairs)


def pair(scenario: Scenario, seed: int) -> Compared:
    """One run of each of two commands, compared."""
    rng, records = np.random.default_rng(seed), []
    for name, ratio in (("one", 1.0), ("two", scenario.ratio)):
        records.append(record(name, [[ratio * factor for factor in scenario.factors(rng)]], rng))
    return judged(*records)[0]


@contextmanager
def remembered_medians() -> Iterator[None]:
    """While entered, the median of a process is computed once, not at each look."""
    known: dict[int, Summary] = {}

    def summary_of(series: Series, percentiles: Sequence[float]) -> Summary:
        if id(series) not in known:
            known[id(series)] = point_times.summary_of(series, percentiles)
        return known[id(series)]

    with patch.object(summary, "summary_of", summary_of):
        yield


def in_turn(scenario: Scenario, seed: int) -> Compared:
    """Processes of two commands in turn until they are decided; both have the state of one time in common."""
    rng = np.random.default_rng(seed)
    shared = math.exp(scenario.runs * rng.standard_normal())
    drawn = replace(scenario, runs=0.0, count=sequential.MOST)
    sides = []
    for name, ratio in (("one", shared), ("two", shared * scenario.ratio)):
        made = record(name, [[ratio * factor for factor in drawn.factors(rng)]], rng)
        sides.append((made, made.points))
    with remembered_medians():
        for processes in range(sequential.LEAST, sequential.MOST + 1):
            for number, (made, points) in enumerate(sides):
                level = scenario.level or sequential.level(processes)
                made.points, made.sweep = (
                    points[:processes],
                    SweepMembership(uid="ab", job=number, level=level),
                )
            [found] = judged(sides[0][0], sides[1][0], scenario.margin)
            if found.verdict is not Verdict.UNDECIDED:
                break
    return found


def sweep_in_turn(of: Together, seed: int) -> tuple[float, float, float, float, int]:
    """Processes of two sweeps in turn until all points are decided, by the verdicts' own function.

    Returns:
        The false share of the FASTER and SLOWER verdicts at the end and at the worst look, that of the SAME ones, the
        share of the points that differ by more than the margin which are named, and the number of processes.
    """
    rng, truth = np.random.default_rng([seed, of.points]), np.array(of.ratios())
    common = of.shared * rng.standard_normal((2, 1, sequential.MOST))
    values = np.exp(common + of.sd * rng.standard_normal((2, of.points, sequential.MOST)))
    values[1] *= truth[:, None]
    settings, false = Settings(margin=of.margin), [0.0]
    beyond, at_least = (
        np.abs(np.log(truth)) > math.log1p(of.margin) + shift for shift in (1e-12, -1e-12)
    )
    for processes in range(sequential.LEAST, sequential.MOST + 1):
        level = of.level or sequential.level(processes)
        known = priors.of_any("cuda")["device"]
        both = [
            [Repeats(values=tuple(row), prior=known) for row in side[:, :processes].tolist()]
            for side in values
        ]
        drafts = [draft(one, other, level) for one, other in zip(*both, strict=True)]
        judging.judge(drafts, settings)
        words = np.array([one.verdict for one in drafts])
        differs, same = np.isin(words, (Verdict.BETTER, Verdict.WORSE)), words == Verdict.SAME
        false.append(float((differs & ~beyond).sum() / max(differs.sum(), 1)))
        if Verdict.UNDECIDED not in words:
            break
    return (
        false[-1],
        max(false),
        float((same & at_least).sum() / max(same.sum(), 1)),
        float((differs & beyond).sum() / max(beyond.sum(), 1)),
        processes,
    )


def draft(baseline: Repeats, other: Repeats, level: float) -> judging._Draft:
    """A figure of `device` before its verdict."""
    ratio = ratios.log_ratio(other, baseline)
    return judging._Draft(
        measure="device", figures=(baseline, other), ratio=ratio, confounders=(), level=level
    )


def sweep(seed: int) -> tuple[float, float]:
    """False share of the FASTER and SLOWER verdicts of a sweep, and the share of its true differences that they name.

    All other points are slower by exactly the margin, where a false verdict is most probable.
    """
    rng, scenario = np.random.default_rng(seed), Scenario()
    before = [scenario.factors(rng) for _ in range(POINTS)]
    ratios = [CHANGE if number < CHANGED else 1 + MARGIN for number in range(POINTS)]
    after = [[ratio * factor for factor in scenario.factors(rng)] for ratio in ratios]
    differing = [
        one.key.input_size[0] - _SMALLEST
        for one in judged(record("one", before, rng), record("two", after, rng))
        if one.verdict in (Verdict.BETTER, Verdict.WORSE)
    ]
    true = sum(number < CHANGED for number in differing)
    return 1 - true / max(len(differing), 1) if differing else 0.0, true / CHANGED


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the pairs of a scenario by verdict, and of intervals that hold the truth.

    Attributes:
        processes: median and greatest number of processes of each side.
    """

    verdicts: dict[Verdict, float]
    covered: float
    half_width: float
    processes: tuple[float, int]

    @classmethod
    def of(
        cls, scenario: Scenario, pairs: int, made: Callable[[Scenario, int], Compared] = pair
    ) -> Shares:
        """Simulate so many pairs, by default of ordinary runs."""
        found = [made(scenario, seed) for seed in range(pairs)]
        counts = Counter(one.verdict for one in found)
        held = sum((one.low or 0.0) <= scenario.ratio <= (one.high or np.inf) for one in found)
        widths = [((one.high or np.inf) - (one.low or 0.0)) / 2 / one.ratio for one in found]
        shares = {verdict: counts[verdict] / pairs for verdict in Verdict}
        processes = [one.processes[0] for one in found]
        return cls(
            verdicts=shares,
            covered=held / pairs,
            half_width=float(np.median(widths)),
            processes=(float(np.median(processes)), max(processes)),
        )

    @property
    def line(self) -> str:
        """The shares as cells of a table."""
        words = (Verdict.BETTER, Verdict.WORSE, Verdict.SAME, Verdict.UNDECIDED)
        return " | ".join(
            [*(f"{self.verdicts[word]:.1%}" for word in words), f"{self.covered:.1%}"]
        )


def seconds(records: int) -> float:
    """The time to read and compare two sweeps with so many records together."""
    with tempfile.TemporaryDirectory() as folder:
        for side in ("one", "two"):
            children = []
            for number in range(records // 2):
                made = record(side, [[1.0] * 3] * 10, np.random.default_rng([number, ord(side[0])]))
                made.plan["model"] = {"name": f"model{number}"}
                (place := Path(folder, side, str(number))).mkdir(parents=True)
                (place / "record.json").write_bytes(made.to_json())
                children.append(
                    SweepChild(job=number, name=side, directory=str(number), status=Status.OK)
                )
            sweep = Sweep(
                uid=side, name=side, started="2026-01-01T00:00:00+00:00", children=children
            )
            Path(folder, side, "sweep.json").write_bytes(sweep.to_json())
        begin = time.perf_counter()
        compare(sides.load([f"{folder}/one", f"{folder}/two"], None), Settings(margin=MARGIN))
        return time.perf_counter() - begin
