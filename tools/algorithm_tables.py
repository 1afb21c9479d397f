"""What the algorithms cost, from the records of runs of one model by one algorithm each.

    python tools/algorithm_tables.py FOLDER… --commit COMMIT   # fill docs/results/algorithms-PHASE-PRECISION
    python tools/algorithm_tables.py FOLDER… --layers          # from algorithm=fastest: the choice for each layer

* A row is a model by an algorithm: the device's time of a call with its 95 % interval, how it was timed, and the share
  of the convolutions' FLOPs that ran as requested. The rows of a phase and precision replace those of the data file,
  whose title, claim and notes stay. The records of a precision become one file in docs/results/records. The pages are
  written by `python tools/results.py`.
* `--layers` prints Markdown tables: for each distinct convolution and pass the times of torch's own choice, of its
  search and of what was chosen, µs, the one of which most is gained first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import results

from perfexp.records.record import Point, Record, Status
from perfexp.statistics import estimators

#: Rows in this order.
MODELS = ("vgg16", "alexnet", "googlenet", "resnet50", "resnet152", "densenet121")
ALGORITHMS = (
    *(
        "default",
        "benchmark",
        "implicit_precomp_gemm",
        "implicit_gemm",
        "gemm",
        "winograd_nonfused",
    ),
    *("winograd", "fft_tiling", "fft", "direct"),
)
PHASES = {"inference": "inference", "train": "training"}
#: Options that say nothing about what was measured.
UNTOLD = ("output_dir=", "quiet=", "tracking=", "cold_start=", "gpu=")


class Cell(NamedTuple):
    """A timed point, with its record and the record's file."""

    path: Path
    record: Record
    point: Point

    @property
    def names(self) -> tuple[str, str]:
        """Model and algorithm."""
        return self.record.plan["model"]["name"], self.record.plan["choices"]["algorithm"]

    @property
    def order(self) -> tuple[int, int]:
        """Of the rows of a page."""
        model, algorithm = self.names
        return MODELS.index(model), ALGORITHMS.index(algorithm)


def cells(folders: list[Path]) -> Iterator[Cell]:
    """Each timed point of all records below the folders."""
    for folder in folders:
        for path in sorted(folder.rglob("record.json")):
            record = Record.load(path)
            for point in record.points:
                if (
                    point.key.phase in PHASES
                    and not point.key.replicate
                    and point.status is Status.OK
                ):
                    yield Cell(path, record, point)


def row(cell: Cell, commit: str, records: str) -> dict[str, Any]:
    """A row of a page of docs/results, from a point that was timed."""
    _, record, point = cell
    model, algorithm = cell.names
    method = point.facts["device_method"]
    interval = estimators.median_interval(
        point.find_series("device" if method == "queue" else f"device/{method}").measured
    )
    share, width = point.metric("algorithm/flops_share"), interval.relative_half_width
    environment = record.environment
    device, packages = environment["device"], environment["packages"]
    versions = {
        "Python": environment["python"].rpartition(".")[0],
        "torch": f"{packages['torch']}+cu{device['cuda'].replace('.', '')}",
        "cuDNN": f"{device['cudnn'] // 10000}.{device['cudnn'] // 100 % 100}",
        "driver": device["driver"],
    }
    return {
        "case": {"model": model, "algorithm": f"`{algorithm}`"},
        "figures": {
            "device_ms": float(f"{interval.value * 1e3:.4g}"),
            "coverage_percent": None
            if algorithm in ("default", "benchmark")
            else round(share.value * 100),
        },
        "intervals": {}
        if width is None
        else {"device_ms": {"half_width_percent": float(f"{width * 100:.2g}")}},
        "outcome": {"timed": {"queue": "queued calls", "graph": "CUDA graph"}[method]},
        "command": f"python -m perfexp {' '.join(word for word in record.command if not word.startswith(UNTOLD))}",
        "version": record.perfexp_version,
        "commit": commit,
        "date": record.started[:10],
        "host": f"{environment['cpu']['cores']} CPU cores, Linux",
        "device": device["name"],
        "software": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "records": records,
    }


def fill(found: list[Cell], commit: str) -> None:
    """Replace the rows of the data files, and store the records."""
    written: dict[Path, bytes] = {}
    for precision in sorted({cell.point.key.precision for cell in found}):
        known = [
            cell
            for cell in found
            if cell.point.key.precision == precision and cell.names[1] in ALGORITHMS
        ]
        measured = sorted(known, key=lambda cell: cell.order)
        together = {
            "-".join((*cell.names, cell.record.uid)): json.loads(cell.path.read_text("utf-8"))
            for cell in measured
        }
        content = json.dumps(together, sort_keys=True).encode()
        sha256 = hashlib.sha256(content).hexdigest()
        written[results.FOLDER / "records" / f"{sha256}.json.xz"] = lzma.compress(content, preset=9)
        for phase, word in PHASES.items():
            if rows := [
                row(cell, commit, sha256) for cell in measured if cell.point.key.phase == phase
            ]:
                file = results.FOLDER / f"algorithms-{word}-{precision}.json"
                claim = {**results.parse(file.read_text("utf-8")), "rows": rows}
                written[file] = results.dump(claim).encode()
    for file, content in written.items():
        file.write_bytes(content)


class Race(NamedTuple):
    """Of one pass; convolutions of a shape share it."""

    which: str
    shape: tuple[int, ...]
    seconds: tuple[tuple[str, float], ...]
    selected: str


def layers(found: list[Cell]) -> None:
    """What was chosen for each distinct convolution."""
    for _, record, point in found:
        model = record.plan["model"]["name"]
        if record.plan["choices"]["algorithm"] != "fastest" or point.status is not Status.OK:
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
            cells = [
                f"{value * 1e6:z.1f}" for value in (seconds["default"], search, chosen, gained)
            ]
            where = f"{alike[0]} | {race.which} | {' × '.join(map(str, race.shape))} | {len(alike)}"
            told.append((gained, f"| {where} | {' | '.join(cells)} | {race.selected} |"))
        print(
            f"\n## {model}, {point.key.phase}, {point.key.precision}, batch {point.key.batch_size}\n"
        )
        print(
            "| convolution | pass | input | how many | default | benchmark | chosen | gained | by |"
        )
        print(f"|---|---|---|{'---:|' * 5}---|")
        for _, line in sorted(told, reverse=True):
            print(line)


def main() -> None:
    """Fill the tables, or print the layers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="with records below them")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--commit", help="of the perfexp that measured, 7 digits; replaces the rows of docs/results"
    )
    what.add_argument("--layers", action="store_true", help="what was chosen for each convolution")
    arguments = parser.parse_args()
    found = list(cells(arguments.folders))
    if arguments.layers:
        layers(found)
    else:
        fill(found, arguments.commit)


if __name__ == "__main__":
    main()
