"""How much processes differ, by class of figure: typical variance and how much that varies between models.

    python validation/process_components.py            # the fit of process_medians.json
    python validation/process_components.py --write    # writes it into the package
    python validation/process_components.py --add DIR  # adds the figures of runs of several processes
    python validation/process_components.py --plot docs/static/process_priors.svg

process_medians.json has a cell per model, phase and batch size: the medians of its processes, in seconds, and their
peaks of memory, in bytes. Each class of figure gets the scale s₀ and the degrees ν₀ of the scaled F distribution that
its cells' variances follow, by maximum likelihood: Smyth, "Linear models and empirical Bayes methods for assessing
differential expression in microarray experiments" (2004), section 6.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from scipy import optimize, stats

from perfexp.records import priors
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Record
from perfexp.records.summary import rows
from perfexp.statistics.moderated import Repeats
from perfexp.statistics.prior import LEAST_VARIANCE, Component, Prior

CELLS = Path(__file__).with_name("process_medians.json")
#: Published records, most of them of several runs.
RECORDS = Path(__file__).parents[1] / "docs" / "results" / "records"
#: Range of the degrees: variances that say nothing of each other, and equal ones.
DEGREES = 0.5, 100.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--add", type=Path, metavar="DIR")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    cells = json.loads(CELLS.read_text())
    if arguments.add:
        files = sorted(arguments.add.rglob("record.json"))
        added = [
            cell for file in files for cell in of_record(Record.load(file), arguments.add.name)
        ]
        CELLS.write_text("[\n " + ",\n ".join(map(json.dumps, cells + added)) + "\n]\n")
        print(f"{len(added)} cells added")
        return
    cells += [cell for file in sorted(RECORDS.glob("*.json.xz")) for cell in of_file(file)]
    fitted = {
        kind: fits([cell for cell in cells if cell["kind"] == kind]) for kind in ("cuda", "cpu")
    }
    if arguments.plot:
        plot(cells, fitted, arguments.plot)
    if arguments.write:
        content = {
            kind: {name: msgspec.to_builtins(one) for name, one in of_kind.items()}
            for kind, of_kind in fitted.items()
        }
        priors.TABLE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{'':18} {'cells':>5} {'sd s0':>8} {'degrees':>8} {'sd of servers':>13}")
    for kind, of_kind in fitted.items():
        for name, one in of_kind.items():
            server = f"{math.sqrt(one.server):13.2%}" if one.server else ""
            print(
                f"{kind:5}{name:13} {one.cells:5} {math.sqrt(one.variance):8.3%} {one.degrees:8.2f} {server}"
            )


def plot(cells: list[dict], fitted: dict[str, dict[str, Prior]], file: Path) -> None:
    """Draw the standard deviation of each figure, and what is typical of its class."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    names = [(kind, name) for kind, of_kind in fitted.items() for name in of_kind]
    for place, (kind, name) in enumerate(names):
        members = classes([cell for cell in cells if cell["kind"] == kind])[name]
        spreads = [
            100 * math.sqrt(max(one.variance, LEAST_VARIANCE))
            for _, _, values in members
            if (one := own(values))
        ]
        axes.plot(
            np.sort(spreads),
            place + np.linspace(-0.32, 0.32, len(spreads)),
            ".",
            color="#0072B2",
            markersize=4,
        )
        axes.plot(
            [100 * math.sqrt(fitted[kind][name].variance)] * 2,
            [place - 0.4, place + 0.4],
            color="black",
        )
    axes.set_yticks(
        range(len(names)), [f"{kind} {name} ({fitted[kind][name].cells})" for kind, name in names]
    )
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("standard deviation between processes, %; lines: typical of the class")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})


def of_file(file: Path) -> Iterator[dict]:
    """The cells of the records in a published file."""
    for name, content in _records(json.loads(lzma.decompress(file.read_bytes())), file.name[:8]):
        yield from of_record(Record.from_json(json.dumps(content).encode()), name)


def _records(content: object, name: str) -> Iterator[tuple[str, dict]]:
    if isinstance(content, dict) and {"points", "plan"} <= content.keys():
        yield name, content
    elif isinstance(content, dict | list):
        for key, part in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _records(part, f"{name}/{key}")


def of_record(record: Record, name: str) -> Iterator[dict]:
    """The cells of a record: the figures of its processes beside which nothing else ran."""
    device = record.environment.get("device", {})
    record = msgspec.structs.replace(
        record, points=[point for point in record.points if not disturbed(point.doubts)]
    )
    for row in [] if disturbed(record.doubts) else rows(record):
        figures = {of: list(one.values) for of, one in row.figures.items()}
        memory = [
            found.value
            for point in record.points
            if point.key.is_timed
            and (point.key.phase, point.key.batch_size) == (row.key.phase, row.key.batch_size)
            if point.key.input_size == row.key.input_size
            and (found := point.metric("memory/peak_bytes"))
        ]
        if figures and device.get("kind") in ("cuda", "cpu") and not disturbed(row.doubts):
            yield {
                "device": device["name"],
                "kind": device["kind"],
                "server": name,
                "start": next((point.facts.get("process_start") for point in record.points), None),
                "model": record.plan["model"]["name"],
                "phase": row.key.phase,
                "batch": row.key.batch_size,
                "size": list(row.key.input_size),
                "bound_by": row.bound_by,
                "seconds": {
                    of: values for of, values in figures.items() if of not in ("p95", "throughput")
                },
                **({"bytes": memory} if len(memory) > 1 else {}),
            }


def disturbed(doubts: list[Diagnostic] | tuple[Diagnostic, ...]) -> bool:
    """Whether other work ran beside a measurement."""
    return any(doubt.rule.disturbs for doubt in doubts)


def classes(cells: list[dict]) -> dict[str, list[tuple[dict, str, tuple[float, ...]]]]:
    """The figures of each class: cell, name and values of the processes."""
    groups: dict[str, list[tuple[dict, str, tuple[float, ...]]]] = defaultdict(list)
    for cell in cells:
        for name, values in {**cell["seconds"], "memory": cell.get("bytes", [])}.items():
            if values:
                groups[priors.class_of(name, cell["bound_by"])].append((cell, name, tuple(values)))
    return groups


def own(values: tuple[float, ...]) -> Component | None:
    """The variance between the processes of a figure."""
    return Repeats(values=values).own


def fits(cells: list[dict]) -> dict[str, Prior]:
    """The prior of each class of figure."""
    found = {}
    for name, members in sorted(classes(cells).items()):
        variance, degrees = fit(
            [(one.variance, one.degrees) for *_, values in members if (one := own(values))]
        )
        found[name] = Prior(
            variance=float(f"{variance:.3g}"),
            degrees=float(f"{degrees:.3g}"),
            server=float(f"{between_servers(members, variance):.3g}")
            if name == priors.HOST_BOUND
            else 0.0,
            cells=sum(len(values) > 1 for *_, values in members),
            origin=", ".join(sorted({cell["device"] for cell, *_ in members})),
        )
    return found


def fit(variances: list[tuple[float, float]]) -> tuple[float, float]:
    """Scale s₀² and degrees ν₀ under which the variances are most likely: s² / s₀² is F distributed with (ν, ν₀)."""
    values = np.array([variance for variance, _ in variances])
    counts = np.array([count for _, count in variances], dtype=float)

    def loss(parameters: np.ndarray) -> float:
        scale, prior = np.exp(parameters)
        ratio = np.maximum(values, LEAST_VARIANCE) / scale
        return float(-(stats.f.logpdf(ratio, counts, prior) - np.log(scale)).sum())

    start = np.log([max(float(np.median(values)), LEAST_VARIANCE), 3.0])
    bounds = [(start[0] - 6, start[0] + 6), tuple(np.log(DEGREES))]
    best = optimize.minimize(loss, start, method="L-BFGS-B", bounds=bounds)
    variance, degrees = map(float, np.exp(best.x))
    return variance, degrees


def between_servers(members: list[tuple[dict, str, tuple[float, ...]]], typical: float) -> float:
    """Variance between servers of forked processes, which run at different times, from figures that several have.

    `typical` is the variance between processes, for a server with a single one.
    """
    groups: dict[tuple, list[np.ndarray]] = defaultdict(list)
    for cell, figure, values in members:
        if cell.get("start") == "forked":
            subject = (
                cell["device"],
                cell["model"],
                cell["phase"],
                cell["batch"],
                str(cell.get("size")),
                figure,
            )
            groups[subject].append(np.log(values))
    parts = []
    for logs in groups.values():
        if len(logs) > 1:
            own = [float(one.var(ddof=1)) if one.size > 1 else typical for one in logs]
            explained = statistics.fmean(
                variance / one.size for variance, one in zip(own, logs, strict=True)
            )
            parts.append(
                (statistics.variance(float(one.mean()) for one in logs) - explained, len(logs) - 1)
            )
    degrees = sum(count for _, count in parts)
    return max(sum(part * count for part, count in parts) / degrees, 0.0) if degrees else 0.0


if __name__ == "__main__":
    main()
