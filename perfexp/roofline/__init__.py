"""Roofline: how near kernels and layers come to what the device can do at most, by counters or by definition.

What others call: `of_csv` after a run of ncu, `of_text` for what it exports of a report, `of_record` for a run's
layers; `perfexp.plots.roofline_files` draws and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host.gpu_sheets import GpuFile
from perfexp.records.record import Point, Record, is_layers
from perfexp.roofline import listing
from perfexp.roofline.assemble import of_listing, of_point, recorded
from perfexp.roofline.below import Roofline
from perfexp.roofline.counters import COLLECT, wanted
from perfexp.roofline.listing import Listing, is_listing
from perfexp.roofline.peaks import Peaks, by_ceilings, matching, of_record_point, of_sheet

#: So many points that are not drawn are named.
_TOLD = 3

__all__ = ["COLLECT", "Peaks", "Roofline", "is_listing", "of_csv", "of_record", "of_sheet", "of_text"]


def of_csv(
    path: Path, peaks: Peaks | None = None, *, sheets: Mapping[str, GpuFile] | None = None, title: str | None = None
) -> Roofline:
    """The roofline of a CSV of ncu.

    Args:
        path: of the CSV.
        peaks: that count more than those that the file says; None for none.
        sheets: data sheets in which the GPU that the file names is looked up.
        title: what was measured; by default the file's name.

    Raises:
        UserError: the file can't be read, or metrics or peaks are missing.
    """
    return _of(listing.read(path, wanted), peaks, sheets, title or path.stem)


def of_text(
    text: str,
    path: Path,
    peaks: Peaks | None = None,
    *,
    sheets: Mapping[str, GpuFile] | None = None,
    title: str | None = None,
) -> Roofline:
    """The roofline of what ncu exports of a report.

    Args:
        text: CSV.
        path: of the report.
        peaks: that count more than those that the text says; None for none.
        sheets: data sheets in which the GPU that the text names is looked up.
        title: what was measured; by default the report's name.

    Raises:
        UserError: metrics or peaks are missing.
    """
    return _of(listing.parse(text, str(path), wanted), peaks, sheets, title or path.stem)


def _of(found: Listing, peaks: Peaks | None, sheets: Mapping[str, GpuFile] | None, title: str) -> Roofline:
    own, product = recorded(found)
    known = (peaks or Peaks()).or_else(matching(product, sheets or {})).or_else(own)
    return of_listing(found, known.held_against(product), title)


def of_record(
    record: Record, peaks: Peaks | None = None, *, sheets: Mapping[str, GpuFile] | None = None, title: str | None = None
) -> dict[str, Roofline]:
    """The rooflines of a record's layers, by phase (`inference`, `train`): of the largest point of each.

    Args:
        record: of a run with probes.layers=true.
        peaks: that count more than those that the record says; None for none.
        sheets: data sheets in which the device's name is looked up.
        title: what was measured; by default what the plan says.

    Raises:
        UserError: it has no layers, or peaks are missing.
    """
    points = [
        point for point in record.points if is_layers(point.key) and (point.facts.get("layers") or {}).get("lines")
    ]
    if not points:
        raise UserError(
            f"The run {record.name} has no layers: measure it with probes.layers=true, or name a CSV of:\n  {COLLECT}"
        )
    found: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.key.pixels, point.key.batch_size)):
        found.setdefault(point.key.phase.removesuffix("_layers"), []).append(point)
    device = record.environment.get("device")
    product = str(device.get("name") or "") if isinstance(device, Mapping) else ""
    rooflines = {}
    for phase, alike in found.items():
        point = alike[-1]
        own = of_record_point(record, point)
        known = (peaks or Peaks()).or_else(own).or_else(matching(product, sheets or {})).or_else(by_ceilings(own))
        what = title or f"{record.name} · {phase} {point.key.size_label}, batch {point.key.batch_size}"
        drawn = of_point(record, point, known.held_against(product), what)
        rooflines[phase] = replace(drawn, notes=(*drawn.notes, *_others(alike)))
    return rooflines


def _others(alike: Sequence[Point]) -> Iterator[str]:
    """What is not drawn of a phase, of which the last point is."""
    if len(alike) > 1:
        key = alike[-1].key
        others = ", ".join(f"{point.key.size_label} batch {point.key.batch_size}" for point in alike[:-1][-_TOLD:])
        more = f" and {len(alike) - 1 - _TOLD} smaller ones" if len(alike) - 1 > _TOLD else ""
        yield (
            f"Only the largest of {len(alike)} points with layers is drawn, {key.size_label} batch {key.batch_size}: "
            f"for {others}{more} measure a run of their own."
        )
