"""How good sparse sweeps are: predictions for sizes that were not measured, against measured or simulated truth.

    python validation/prediction.py simulated                # 500 curves of each kind, with known truth
    python validation/prediction.py curves FILE.csv.gz       # curves of a file: model, algorithm, device, input_size, …
    python validation/prediction.py records DIR…             # dense runs of perfexp, sampled
    python validation/prediction.py against DIR… --truth DIR…  # sparse runs against dense ones of other processes
    python validation/prediction.py memory DIR…              # traced against measured peaks of memory
    python validation/prediction.py layers FILE.csv.gz       # layers of a file, three of its sizes given

Each curve is sampled by the procedure of `sweep=sparse`: six sizes, then the least certain ones, up to `--measured`.
All other sizes are the test. Intervals are calibrated by the measured points of curves of other models alone. The
bootstrap of the coverage draws whole curves; its seed is the hash of the truth. `--no-leak` repeats everything with
the values of each curve shuffled: no method may then be better than the curve's median.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfexp.errors import Unsupported
from perfexp.host import gpu_sheets, installation
from perfexp.prediction.corpus import Corpus, MeasuredCurve, find_curves
from perfexp.prediction.lookup import rows_between
from perfexp.prediction.predictions import INTERPOLATED, forecast
from perfexp.prediction.skill import GAUSSIAN_PROCESS, Score, Truth, pooled, score
from perfexp.records.record import Record
from perfexp.statistics import selection
from perfexp.statistics.conformal import NORMAL_FACTOR, Calibration, calibrate
from perfexp.statistics.gaussian_process import Prediction, predict

#: Keys of a command that decide on its memory.
_TRACED_KEYS = ("model", "mode", "precision", "execution", "algorithm", "input_size", "batch_size")
Array = NDArray[np.float64]
#: Calls per size in the files of curves, for the standard error of a mean.
CALLS = 20
CAMPAIGNS, BOOTSTRAPS = 500, 2000
#: Curves that calibrate a simulated one.
SIMULATED_OTHERS = 40
#: Fewest points of a record's curve that counts as known truth.
DENSE = 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", choices=("simulated", "curves", "records", "against", "memory", "layers")
    )
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--measured", type=int, default=12)
    parser.add_argument(
        "--target",
        type=float,
        default=0.0,
        help="half-width at which a campaign stops; 0 for never",
    )
    parser.add_argument(
        "--campaigns", type=int, default=CAMPAIGNS, help="simulated curves of each kind"
    )
    parser.add_argument("--no-leak", action="store_true", help="shuffle the values of each curve")
    parser.add_argument(
        "--truth", nargs="+", type=Path, default=[], metavar="DIR", help="against: dense runs"
    )
    options = parser.parse_args(arguments)
    if options.what == "against":
        return against(options.paths, options.truth)
    if options.what == "memory":
        return memory(options.paths)
    if options.what == "layers":
        return layers(options.paths)
    campaign = partial(evaluate, measured=options.measured, target=options.target)
    if options.what == "simulated":
        truths = list(simulated(options.campaigns))
        report("simulated", truths, campaign(truths, others=SIMULATED_OTHERS))
        return 0
    if options.what == "curves":
        quantities = {
            column: list(read_curves(options.paths, column))
            for column in ("median", "mean", "energy_per_inference_j")
        }
        if not options.no_leak:
            borrowed(quantities["median"], quantities["energy_per_inference_j"])
    else:
        quantities = read_records(options.paths)
    for quantity, truths in quantities.items():
        truths = shuffled(truths) if options.no_leak else truths
        scores = campaign(truths)
        report(quantity, truths, scores)
        if options.no_leak:
            print(
                f"Skill against the median of each curve: {skill(truths, scores):+.3f} (above 0 would be a leak)."
            )
    return 0


def evaluate(
    truths: Sequence[Truth], *, measured: int, target: float, others: int | None = None
) -> list[dict[str, Score]]:
    """Sample each curve, calibrate it by the others, and score all methods.

    Args:
        others: number of other curves, drawn at random, that calibrate one; None for all.
    """
    chosen = [truth.campaign(measured, target) for truth in truths]
    sampled = [truth.curve(points) for truth, points in zip(truths, chosen, strict=True)]
    random = np.random.default_rng(seed(truths))
    calibrations: dict[str, Calibration] = {}
    scores = []
    for truth, points in zip(truths, chosen, strict=True):
        if truth.group not in calibrations or others:
            foreign = [
                curve
                for other, curve in zip(truths, sampled, strict=True)
                if other.group != truth.group
            ]
            if others and len(calibrations) < 20:  # twenty corpora of simulated curves are enough
                foreign = [
                    foreign[place] for place in random.choice(len(foreign), others, replace=False)
                ]
                calibrations[truth.group] = calibrate(foreign)
            elif others:
                calibrations[truth.group] = calibrations[
                    str(random.choice(sorted(calibrations)[:20]))
                ]
            else:
                calibrations[truth.group] = calibrate(foreign)
        scores.append(score(truth, points, calibrations[truth.group]))
    return scores


def borrowed(times: Sequence[Truth], energies: Sequence[Truth]) -> None:
    """Report energies from three sizes and the times of a campaign, without calibration."""
    scores = []
    for time, energy in zip(times, energies, strict=True):
        chosen = time.campaign(12, 0.0)
        first = selection.initial(selection.scaled(time.x, time.x))
        three = [first[0], first[2], first[-1]]
        curve = replace(energy.curve(three), related=time.curve(chosen))
        unseen = np.setdiff1d(np.arange(len(energy.values)), [*three, *chosen])
        predicted = predict(curve, selection.scaled(energy.x, energy.x)[unseen])
        scores.append(scored(np.log(energy.values[unseen]), predicted))
    report("energy from three sizes and the times", energies, scores)


def scored(actual: Array, predicted: Prediction) -> dict[str, Score]:
    """Return the score of a prediction whose intervals are not calibrated."""
    half, off = NORMAL_FACTOR * predicted.deviation, predicted.mean - actual
    misses = 2 * half + 20 * np.maximum(np.abs(off) - half, 0)
    return {
        GAUSSIAN_PROCESS: Score(
            errors=np.abs(np.expm1(off)),
            is_covered=np.abs(off) <= half,
            half_widths=np.expm1(half),
            interval_scores=misses,
        )
    }


def report(quantity: str, truths: Sequence[Truth], scores: Sequence[dict[str, Score]]) -> None:
    """Print a table of the methods, the interval of the coverage, and the worst curves."""
    unmeasured = sum(len(one[GAUSSIAN_PROCESS].errors) for one in scores)
    print(f"\n## {quantity}: {len(truths)} curves, {unmeasured} unmeasured points\n")
    header = "method | median error | mean | p90 | coverage | curves ≥ 75 % | worst curve | half-width | interval score"
    print(f"| {header} |")
    print("| --- " * 9 + "|")
    for method in scores[0]:
        figures = pooled([one[method] for one in scores])
        columns = (
            "median_error",
            "mean_error",
            "p90_error",
            "coverage",
            "curves_above_75",
            "worst_coverage",
            "half_width",
        )
        cells = " | ".join(f"{100 * figures[name]:.2f} %" for name in columns)
        print(f"| {method} | {cells} | {figures['interval_score']:.4f} |", flush=True)
    own = [one[GAUSSIAN_PROCESS] for one in scores]
    low, high = bootstrap([float(one.is_covered.mean()) for one in own], seed(truths))
    print(f"\nCoverage over curves: 95 % interval {100 * low:.1f} % to {100 * high:.1f} %.")
    kinds = defaultdict(list)
    for truth, one in zip(truths, own, strict=True):
        kinds[truth.name.partition("#")[0]].append(one)
    ranked = sorted(kinds.items(), key=lambda item: pooled(item[1])["coverage"])
    for name, of_kind in ranked[:8]:
        figures = pooled(of_kind)
        print(
            f"  {name}: coverage {100 * figures['coverage']:.1f} %, median error {100 * figures['median_error']:.2f} %"
        )


def skill(truths: Sequence[Truth], scores: Sequence[dict[str, Score]]) -> float:
    """Return 1 minus the mean error over that of a constant, the median of the curve."""
    constant = [np.abs(np.median(truth.values) / truth.values - 1).mean() for truth in truths]
    return float(
        1 - np.mean([one[GAUSSIAN_PROCESS].errors.mean() for one in scores]) / np.mean(constant)
    )


def bootstrap(coverages: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean coverage; whole curves are drawn."""
    values, random = np.array(coverages), np.random.default_rng(seed)
    means = values[random.integers(values.size, size=(BOOTSTRAPS, values.size))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def seed(truths: Iterable[Truth]) -> int:
    digest = hashlib.sha256(b"".join(truth.values.tobytes() for truth in truths))
    return int.from_bytes(digest.digest()[:8])


def shuffled(truths: Sequence[Truth]) -> list[Truth]:
    random = np.random.default_rng(seed(truths))
    return [replace(truth, values=random.permutation(truth.values)) for truth in truths]


def read_curves(paths: Sequence[Path], column: str) -> Iterable[Truth]:
    """Read curves over the input size from CSV files with the columns of a campaign."""
    found: dict[tuple[str, str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for row in csv.DictReader(file):
                error = float(row["std"]) / float(row["mean"]) / np.sqrt(CALLS)
                key = row["model"], row["algorithm"], row["device"]
                found[key].append((float(row["input_size"]), float(row[column]), error))
    for (model, algorithm, device), points in found.items():
        side, value, error = np.array(sorted(points)).T
        yield truth_of(
            f"{model} {algorithm} {device}", model, side, value, np.clip(error, 0.001, 0.05)
        )


def truth_of(name: str, group: str, side: Array, values: Array, errors: Array) -> Truth:
    x = np.column_stack([2 * np.log(side), np.zeros_like(side)])
    return Truth(name=name, group=group, x=x, values=values, errors=errors)


def against(sparse: Sequence[Path], dense: Sequence[Path]) -> int:
    """Print errors and coverage of the predictions of sparse runs for the points that dense runs measured."""
    runs, truths = find_curves(sparse), find_curves(dense)
    corpus = Corpus(runs)
    found = [
        _of_quantity(quantity, runs, truths, corpus)
        for quantity in dict.fromkeys(run.quantity for run in runs)
    ]
    if not any(found):
        print(
            "no curve of a sparse run has a dense one of the same plan and device", file=sys.stderr
        )
        return 1
    return 0


def _of_quantity(
    quantity: str, runs: Sequence[MeasuredCurve], truths: Sequence[MeasuredCurve], corpus: Corpus
) -> bool:
    """Print the curves of one quantity and all of their points together; returns whether there are any."""
    errors, coverages, halves = [], [], []
    for curve in (run for run in runs if run.quantity == quantity):
        others = [
            other for other in truths if (other.name, other.about) == (curve.name, curve.about)
        ]
        for truth in (other for other in others if other.kind == curve.kind):
            made = forecast(curve, list(truth.values), corpus.calibration(curve)).points
            rows = [
                (point.value, truth.values[point.pair].value)
                for point in made
                if point.source == INTERPOLATED and point.value
            ]
            if not rows:
                continue
            off = np.array([abs(predicted.value / actual - 1) for predicted, actual in rows])
            held = np.mean(
                [predicted.low <= actual <= predicted.high for predicted, actual in rows]
            )
            half = np.median(
                [(predicted.high - predicted.low) / 2 / predicted.value for predicted, _ in rows]
            )
            if not errors:
                print(
                    f"\n## {quantity}\n\n| curve | points | median error | p90 | coverage | half-width |"
                )
                print("| --- " * 6 + "|")
            errors.append(off)
            coverages.append(float(held))
            halves += [
                (predicted.high - predicted.low) / 2 / predicted.value for predicted, _ in rows
            ]
            figures = (np.median(off), np.quantile(off, 0.9), held, half)
            print(
                f"| {curve.name} | {off.size} | "
                + " | ".join(f"{100 * one:.2f} %" for one in figures)
                + " |"
            )
    if not errors:
        return False
    pooled_errors = np.concatenate(errors)
    low, high = bootstrap(
        coverages, int.from_bytes(hashlib.sha256(pooled_errors.tobytes()).digest()[:8])
    )
    print(
        f"\nmedian error {100 * np.median(pooled_errors):.2f} %, p90 {100 * np.quantile(pooled_errors, 0.9):.2f} %, "
        f"half-width {100 * np.median(halves):.2f} %, coverage {100 * np.mean(coverages):.1f} % "
        f"({100 * low:.1f} to {100 * high:.1f} over {len(coverages)} curves)"
    )
    return True


def layers(paths: Sequence[Path]) -> int:
    """Predict layers at inner sizes from the first, the middle and the last size, run by run."""
    runs: dict[tuple[str, ...], dict[str, dict[float, float]]] = {}
    for path in paths:
        with gzip.open(path, "rt") as file:
            for row in csv.DictReader(file):
                run = runs.setdefault((row["model"], row["algorithm"], row["device"]), {})
                run.setdefault(row["layer"], {})[float(row["input_size"])] = float(row["mean_ms"])
    errors, coverages = [], []
    for run in runs.values():
        sizes = sorted(next(iter(run.values())))
        given = [0, len(sizes) // 2, len(sizes) - 1]
        x, y = (
            2 * np.log(sizes),
            np.log([[times[size] for size in sizes] for times in run.values()]),
        )
        inside = []
        for index in sorted(set(range(len(sizes))) - set(given)):
            means, half_width = rows_between(x[given], y[:, given], x[index])
            errors += np.abs(np.expm1(means - y[:, index])).tolist()
            inside.append(np.abs(means - y[:, index]) <= half_width)
        coverages.append(float(np.mean(inside)))
    few = sum(coverage < 0.75 for coverage in coverages)
    print(f"{len(runs)} runs, {len(errors)} values: median error {np.median(errors):.1%}, ", end="")
    print(f"90 % below {np.quantile(errors, 0.9):.1%}; coverage {np.mean(coverages):.1%}, ", end="")
    print(f"{min(coverages):.0%} at least, {few} runs below 75 %")
    return 0


def memory(folders: Sequence[Path]) -> int:
    """Print the traced peak of each point of CUDA devices, with cuBLAS's workspaces, beside the measured one.

    Workspaces of cuDNN's convolutions are measured if the device is present, which is not reserved, or cached.
    """
    from perfexp.cli.composition import compose
    from perfexp.plan import config
    from perfexp.worker.answers import workspaces
    from perfexp.worker.peak_memory import MemoryTrace

    header = "model | phase | size | batch | measured MiB | traced MiB | difference | with cuDNN's workspaces MiB"
    print(f"| {header} | difference | known convolutions |\n" + "| --- " * 10 + "|")
    without, within, stack = [], [], ExitStack()
    for file in sorted(file for folder in folders for file in folder.rglob("record.json")):
        record = Record.load(file)
        if record.environment.get("device", {}).get("kind") != "cuda":
            print(f"{file}: not measured on a CUDA device", file=sys.stderr)
            continue
        words = [
            word for word in record.command if word.split("=")[0].split(".")[0] in _TRACED_KEYS
        ]
        plan = config.typed(compose([*words, f"gpu={sheet_of(record)}"]))
        silent = SimpleNamespace(block=lambda text: None)
        bench: Any = SimpleNamespace(plan=plan, reserved=lambda _: nullcontext(), emit=silent)
        trace = MemoryTrace(plan, workspaces(bench, stack))
        for point in record.points:
            measured = point.metric("memory/peak_bytes")
            if (
                not point.key.is_timed
                or point.key.replicate
                or measured is None
                or not measured.value
            ):
                continue
            try:
                traced = trace.peak(point.key)
                whole, found = trace.with_workspaces(point.key, traced)
            except Unsupported as error:
                print(f"| {record.name} | {point.key.phase} | {error} |")
                without.append(False)
                within.append(False)
                continue
            cells = [record.name, point.key.phase, point.key.size_label, point.key.batch_size]
            cells.append(f"{measured.value / 2**20:.1f}")
            for peak, near in ((traced, without), (whole, within)):
                size = peak.total_bytes + trace.workspace_bytes(peak)
                difference = size / measured.value - 1
                near.append(abs(difference) <= 0.02)
                cells += [f"{size / 2**20:.1f}", f"{100 * difference:+.2f} %"]
            cells.append(f"{len(found.sizes)} of {found.convolutions}" if found else "none")
            if found and found.reason:
                print(f"{file}: {point.key}: {found.reason}", file=sys.stderr)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print(f"\nwithin 2 %: {sum(without)} of {len(without)}, with cuDNN's workspaces {sum(within)}")
    return 0


def sheet_of(record: Record) -> str:
    """Return the name of the data sheet of a record's GPU."""
    name = str(record.environment.get("device", {}).get("name", ""))
    return gpu_sheets.matching(gpu_sheets.read([installation.conf_dir()]), name) or "h100"


def read_records(paths: Sequence[Path]) -> dict[str, list[Truth]]:
    found: dict[str, list[Truth]] = {}
    for curve in find_curves(paths):
        if len(curve.values) >= DENSE:
            found.setdefault(curve.quantity, []).append(Truth.of(curve))
    return found


Kind = Callable[[np.random.Generator, Array], Array]


def law(random: np.random.Generator, x: Array) -> Array:
    share = random.uniform(0.05, 0.7)
    growing: Array = share + (1 - share) * (x / x.max()) ** random.uniform(0.8, 1.2)
    return growing


def stairs(amplitude: float, lasting: int) -> Kind:
    """A factor within ± the amplitude that holds for about this many sizes."""

    def made(random: np.random.Generator, x: Array) -> Array:
        changes = np.cumsum(random.random(x.size) < 1 / lasting)
        factors: Array = 1 + random.uniform(-amplitude, amplitude, x.size + 1)[changes]
        return law(random, x) * factors

    return made


def kernel_change(factor: float) -> Kind:
    def made(random: np.random.Generator, x: Array) -> Array:
        place = random.integers(5, x.size - 5)
        changed: Array = law(random, x) * np.where(np.arange(x.size) >= place, factor, 1.0)
        return changed

    return made


def autocorrelated(share: float, correlation: float) -> Kind:
    def made(random: np.random.Generator, x: Array) -> Array:
        noise = np.empty(x.size)
        noise[0] = random.standard_normal()
        for place in range(1, x.size):
            fresh = np.sqrt(1 - correlation**2) * random.standard_normal()
            noise[place] = correlation * noise[place - 1] + fresh
        disturbed: Array = law(random, x) * np.exp(share * noise)
        return disturbed

    return made


KINDS: dict[str, Kind] = {
    "stairs of ±5 % at each size": stairs(0.05, 1),
    "stairs of ±8 % for 5 sizes": stairs(0.08, 5),
    "stairs of ±8 % for 20 sizes": stairs(0.08, 20),
    "kernel change of 1.2": kernel_change(1.2),
    "kernel change of 1.5": kernel_change(1.5),
    "AR noise of 2 %, 0.5": autocorrelated(0.02, 0.5),
    "AR noise of 2 %, 0.9": autocorrelated(0.02, 0.9),
}


def simulated(campaigns: int) -> Iterable[Truth]:
    """Yield curves of each kind with 0.5 % noise, in groups of one kind and one draw."""
    side = np.round(np.linspace(224, 512, 100))
    for kind, made in KINDS.items():
        random = np.random.default_rng(1)
        for number in range(campaigns):
            values = made(random, side**2) * np.exp(0.005 * random.standard_normal(side.size))
            yield truth_of(
                f"{kind}#{number}", f"{kind}#{number}", side, values, np.full(side.size, 0.005)
            )


if __name__ == "__main__":
    sys.exit(main())
