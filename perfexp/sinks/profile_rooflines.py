"""Profile rooflines: the picture and the table of what ncu counted in a run, or of its layers where ncu could not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from perfexp.errors import UserError
from perfexp.paths import RunPaths
from perfexp.profilers import profiled_key
from perfexp.record import Doubt, Point, Record, Status
from perfexp.sinks import profiles

if TYPE_CHECKING:
    from perfexp.roofline import Roofline
    from perfexp.roofline.peaks import Sheet

_COUNTED = "_ncu.csv"


def write(record: Record, paths: RunPaths, sheets: Mapping[str, Sheet]) -> None:
    """Write the rooflines of a run under ncu; their names join those of the profile's files.

    Args:
        record: of any run; where there is no roofline, its profile says why.
        paths: of the run's folder.
        sheets: data sheets, by name.

    Raises:
        OSError: the folder can't be written.
    """
    for point in profiles.points(record):
        facts = point.facts["profile"]
        if facts.get("profiler") != "ncu":
            continue
        from perfexp.sinks import roofline as sink  # late: other runs do without

        try:
            for stem, roofline in _rooflines(record, point, paths, sheets):
                targets = sink.files(paths.root / stem)
                paths.claim(*targets.values())
                facts["files"] = [*facts.get("files", ()), *(path.name for path in sink.write(roofline, targets))]
        except UserError as error:
            remedy = "perfexp roofline DIR --gpu NAME, or --peak-compute and --peak-bw, draws it later"
            doubt = Doubt(code="roofline_missing", detail=str(error), remedy=remedy)
            for each in record.points:
                if each.key in (point.key, profiled_key(point.key)):
                    each.doubts.append(doubt)


def _rooflines(
    record: Record, point: Point, paths: RunPaths, sheets: Mapping[str, Sheet]
) -> Iterator[tuple[str, Roofline]]:
    """Of the counters; where there are none, of what the layers compute by definition, which says so itself."""
    from perfexp.roofline import of_csv, of_record
    from perfexp.roofline.peaks import matching, of_plan

    device = record.environment.get("device")
    product = str(device.get("name") or "") if isinstance(device, Mapping) else ""
    peaks = of_plan(record.plan).or_else(matching(product, sheets))
    tables = [Path(str(name)) for name in point.facts["profile"].get("files") or () if str(name).endswith(_COUNTED)]
    if point.status is Status.OK:
        for table in tables:
            title = f"{record.name} · {table.stem}"
            yield f"{table.stem}_roofline", of_csv(paths.root / table.name, peaks, sheets=sheets, title=title)
        return
    layers = of_record(record, sheets=sheets)
    for phase, roofline in layers.items():
        yield f"roofline_{phase}" if len(layers) > 1 else "roofline", roofline
