"""Markdown tables of what the algorithms cost, from the records of `-m model=… algorithm=…` runs.

    python benchmarks/algorithm_tables.py FOLDER… [--layers]

* For each phase and precision: the device's time of a call by model and algorithm, ms with the half-width of its 95 %
  interval, and the share of the convolutions' FLOPs that ran as asked (with `algorithm.verify=true` what cuDNN put in
  place of it is not in there). `benchmark` and `default` also come from the rivals of `algorithm=fastest`; how these
  were timed stands beside them where `device` was timed otherwise.
* From `algorithm=fastest`: over all convolutions of the model the sum of the times of torch's own choice, of its search
  and of what was chosen, each timed alone, µs; how many times faster the whole model was than by default and by search;
  which engines won how often.
* `--layers`, instead: from `algorithm=fastest`, the same for each distinct convolution and pass of each point, the one
  of which most is gained first.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perfexp.records.record import Point, Record, Status
from perfexp.statistics import estimators

#: Columns in this order, and then what else there is.
ORDER = (
    *("default", "benchmark", "fastest", "implicit_precomp_gemm", "implicit_gemm", "gemm", "winograd_nonfused"),
    *("winograd", "fft_tiling", "fft", "direct"),
)


def points(folders: list[Path]) -> Iterator[tuple[str, str, Point]]:
    """Model, algorithm, and each timed point of all records below the folders."""
    for folder in folders:
        for path in sorted(folder.rglob("record.json")):
            record = Record.load(path)
            plan = record.plan
            for point in record.points:
                if point.key.phase in ("inference", "train"):
                    yield plan["model"]["name"], plan["choices"]["algorithm"], point


def cell(point: Point) -> str:
    """The device's time of a call, and the share that ran as asked."""
    series = point.find_series("device")
    if point.status is not Status.OK or series is None or not series.measured:
        return point.status.value
    share = point.metric("algorithm/flops_share")
    asked = "" if share is None or share.value in (None, 1.0) else f" ({share.value:.0%})"
    return _time(series.measured) + asked


def _time(samples: list[float]) -> str:
    interval = estimators.median_interval(samples)
    width = interval.relative_half_width
    return f"{interval.value * 1e3:.4g}" + ("" if width is None else f" ± {width:.2%}".replace("%", " %"))


def times(found: list[tuple[str, str, Point]]) -> None:
    """A table for each phase and precision."""
    tables: dict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for model, algorithm, point in found:
        table = tables[point.key.phase, point.key.precision][model]
        table[algorithm] = cell(point)
        for rival in ("default", "benchmark"):
            series = point.find_series(f"rival/{rival}") or point.find_series(f"rival/{rival}/captured")
            if series is not None:
                methods = [point.facts.get(name) for name in ("rivals_method", "device_method")]
                other = f" ({methods[0]})" if methods[0] and methods[0] != methods[1] else ""
                table.setdefault(rival, _time(series.measured) + other)
    for (phase, precision), table in sorted(tables.items()):
        names = {name for row in table.values() for name in row}
        columns = [name for name in ORDER if name in names] + sorted(names - set(ORDER))
        print(f"\n{phase}, {precision}\n\n| model | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        for model, row in table.items():
            print(f"| {model} | {' | '.join(row.get(name, '') for name in columns)} |")


def choices(found: list[tuple[str, str, Point]]) -> None:
    """What the choice for each layer is worth."""
    print("\n| model | phase | precision | convolutions | default | benchmark | chosen | whole model | winners |")
    print(f"|{'---|' * 9}")
    for model, algorithm, point in found:
        if algorithm != "fastest" or point.status is not Status.OK:
            continue
        winners: Counter[str] = Counter()
        sums: Counter[str] = Counter()
        for layer in point.facts["algorithm"]["layers"]:
            for each in layer["passes"]:
                seconds, calls = each["seconds"], layer["calls"]
                if not seconds:
                    continue
                winners[each["selected"]] += calls
                sums["default"] += calls * seconds["default"]
                sums["benchmark"] += calls * seconds.get("benchmark", seconds["default"])
                sums["chosen"] += calls * seconds[each["selected"]]
        whole = [point.metric(f"algorithm/speedup_over_{rival}") for rival in ("default", "benchmark")]
        ratios = " / ".join("–" if each is None or each.value is None else f"{each.value:.3f}" for each in whole)
        cells = [f"{sums[name] * 1e6:.0f}" for name in ("default", "benchmark", "chosen")]
        names = ", ".join(f"{count} {name}" for name, count in winners.most_common())
        where = f"{model} | {point.key.phase} | {point.key.precision} | {winners.total()}"
        print(f"| {where} | {' | '.join(cells)} | {ratios} | {names} |")


class Race(NamedTuple):
    """Of one pass; convolutions of a shape share it."""

    which: str
    shape: tuple[int, ...]
    seconds: tuple[tuple[str, float], ...]
    selected: str


def layers(found: list[tuple[str, str, Point]]) -> None:
    """What was chosen for each distinct convolution."""
    for model, algorithm, point in found:
        if algorithm != "fastest" or point.status is not Status.OK:
            continue
        names: dict[Race, list[str]] = defaultdict(list)
        for layer in point.facts["algorithm"]["layers"]:
            for each in layer["passes"]:
                if each["seconds"]:
                    taken = tuple(each["seconds"].items())
                    race = Race(each["which"], tuple(layer["input_shape"]), taken, each["selected"])
                    names[race] += [layer["name"]] * layer["calls"]
        told = []
        for race, alike in names.items():
            seconds = dict(race.seconds)
            search, chosen = seconds.get("benchmark", seconds["default"]), seconds[race.selected]
            gained = len(alike) * (search - chosen)
            cells = [f"{value * 1e6:z.1f}" for value in (seconds["default"], search, chosen, gained)]
            where = f"{alike[0]} | {race.which} | {' × '.join(map(str, race.shape))} | {len(alike)}"
            told.append((gained, f"| {where} | {' | '.join(cells)} | {race.selected} |"))
        print(f"\n## {model}, {point.key.phase}, {point.key.precision}, batch {point.key.batch_size}\n")
        print("| convolution | pass | input | how many | default | benchmark | chosen | gained | by |")
        print(f"|---|---|---|{'---:|' * 5}---|")
        for _, line in sorted(told, reverse=True):
            print(line)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="with records below them")
    parser.add_argument("--layers", action="store_true", help="what was chosen for each convolution, instead")
    arguments = parser.parse_args()
    found = list(points(arguments.folders))
    if arguments.layers:
        layers(found)
        return
    times(found)
    choices(found)


if __name__ == "__main__":
    main()
