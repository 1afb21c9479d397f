"""Convolution tables: the algorithm of each convolution in a model, as lines and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from perfexp.records.number_formats import tf32_flags
from perfexp.records.races import (
    BASELINES,
    LayerPass,
    is_own_choice,
    passes,
    saving_engines,
    seconds_of,
    sums,
    timed_passes,
)
from perfexp.records.record import Point, Record
from perfexp.records.units import format_seconds
from perfexp.statistics.estimators import Interval
from perfexp.summaries.analysis import Analysis
from perfexp.summaries.subject import label, varying
from perfexp.summaries.wording import interval_text, percent_range
from perfexp.tables.flat import Cell, Line, columns_of, with_ends

#: What the status of a correctly run pass says about its kernels.
_STATUSES = {"ok": "proven", "requested": "not verified; algorithm.verify=true"}
#: Text for convolutions that `fastest` leaves to torch.
_OWN_CHOICE = "torch's own choice, of an algorithm that was not observed"


def lines(analysis: Analysis, group: str = "algorithm") -> list[Line]:
    """Return a line for each point, process, layer, shape and pass; empty without algorithms.

    Args:
        group: `algorithm`, or `attention` with a shape in the place of a layer.
    """
    return [
        {
            **columns_of(analysis.about, point.key),
            "replicate": point.key.replicate,
            "layer": layer["name"],
            "input_shape": "×".join(map(str, layer["input_shape"])),
            "dtype": layer["dtype"],
            "pass": one_pass["which"],
            "requested": layer["requested"],
            **{name: one_pass[name] for name in ("selected", "ran", "status", "reason")},
            "math": layer["math"],
            "flops": one_pass["flops"],
            "workspace_bytes": one_pass["workspace_bytes"],
            **_tried(one_pass),
            "kernels": "; ".join(one_pass["kernels"]) or None,
        }
        for point in analysis.record.points
        for layer, one_pass in passes(point, group)
    ]


def sentences(record: Record) -> list[str]:
    """Return the algorithms chosen layer by layer, with times for choice and baselines."""
    timed = [(point, own) for point in record.points if (own := timed_passes(point))]
    fields = varying(point.key for point, _ in timed)
    texts = [
        (point, text)
        for point, own in timed
        for text in _of(own, has_no_tf32=tf32_flags(record.environment) == (False, False))
    ]
    return [f"{label(point.key, fields)}: {text}" if fields else text for point, text in texts]


def attention(record: Record) -> list[str]:
    """Return the backends of a record's attention: `flash (proven): 12 of 64×12×197×64 float32`."""
    shapes = dict[str, Counter[str]]()
    for point in record.points:
        for layer, one_pass in passes(point, "attention"):
            how = {"ok": " (proven)", "requested": ""}.get(
                one_pass["status"], f" ({one_pass['status']})"
            )
            shape = f"{layer['calls']} of {layer['name']} {layer['dtype']}"
            name = f"{one_pass['selected']}{how}"
            shapes.setdefault(name, Counter())[shape] += one_pass["flops"]
    texts = []
    for name, flops in shapes.items():
        more = f" and {len(flops) - 1} more shapes" if len(flops) > 1 else ""
        texts.append(f"{name}: {flops.most_common(1)[0][0]}{more}")
    return texts


def coverage(record: Record) -> list[str]:
    """Return which engines make up the coverage of `algorithm=fastest`.

    It includes torch's own choice, for example `default` for a layer. Shares are relative to a
    point's convolution FLOPs, from the lowest to the highest over points and processes.
    """
    shares = [found for point in record.points if (found := _shares(point))]
    lines = {name: [found.get(name, 0.0) for found in shares] for found in shares for name in found}
    texts = [
        f"{percent_range(values)} by {name}"
        for name, values in sorted(lines.items(), key=lambda item: -max(item[1]))
    ]
    return [f"coverage of the FLOPs: {', '.join(texts)}"] if texts else []


def _shares(point: Point) -> dict[str, float]:
    """Return each engine's share of a point's FLOPs, with torch's own engines combined.

    Empty unless `fastest` was requested for every layer.
    """
    flops = Counter[str]()
    for layer, one_pass in passes(point):
        if layer["requested"] != "fastest":
            return {}
        name, status = str(one_pass["selected"]), one_pass["status"]
        known = _STATUSES.get(status, status)
        flops[_OWN_CHOICE if is_own_choice(name, status) else f"{name} ({known})"] += one_pass[
            "flops"
        ]
    total = flops.total()
    return {name: count / total for name, count in flops.items() if count} if total else {}


def saved_multiplications(record: Record) -> list[str]:
    """Return why MFU may exceed 100 %, if algorithms ran that multiply less than counted."""
    names = list(dict.fromkeys(name for point in record.points for name in saving_engines(point)))
    if not names:
        return []
    verb = "need" if names[1:] else "needs"
    return [
        f"MFU counts the multiplications of direct convolution; {', '.join(names)} {verb} fewer, so that MFU may "
        "exceed 100 %"
    ]


def _of(timed: list[LayerPass], *, has_no_tf32: bool) -> Iterator[str]:
    for which in dict.fromkeys(one_pass["which"] for _, one_pass in timed):
        own = [each for each in timed if each[1]["which"] == which]
        chosen = Counter(one_pass["selected"] for _, one_pass in own)
        times = ", ".join(f"{name} {_text(interval)}" for name, interval in sums(own).items())
        engines = ", ".join(f"{count} {engine}" for engine, count in chosen.most_common())
        yield f"{which.replace('_', ' ')}: {engines}; sum of the layers alone: {times}{_remarks(own, has_no_tf32)}"


def _text(interval: Interval) -> str:
    return format_seconds(interval.value) if interval.low is None else interval_text(interval)


def _remarks(own: list[LayerPass], has_no_tf32: bool) -> str:
    """Return remarks on how the engines were launched and how to read their times."""
    launchings = sorted(
        {one_pass["launching"] for _, one_pass in own if one_pass.get("launching")} - {"clock"}
    )
    remarks = [f"all {' or '.join(launchings)}"] if launchings else []
    since = sorted({one_pass["kept_since"] for _, one_pass in own if one_pass.get("kept_since")})
    remarks += [f"cached on {since[0]} (algorithm.reuse=false measures again)"] if since else []
    unsteady = list(
        dict.fromkeys(one_pass["not_cached"] for _, one_pass in own if one_pass.get("not_cached"))
    )
    remarks += [f"not cached: {unsteady[0]}"] if unsteady else []
    if has_no_tf32 and any(layer["dtype"] == "float32" for layer, _ in own):
        remarks.append(
            "all without TF32, which PyTorch allows for convolutions by default (precision=torch)"
        )
    return "".join(f"; {remark}" for remark in remarks)


def _tried(one_pass: Mapping[str, Any]) -> dict[str, Cell]:
    """Return times and speedup in the deciding race, and times with the other launching."""
    if not one_pass["seconds"]:
        return {}
    errors, selected, launching = (
        one_pass["errors"],
        one_pass["selected"],
        one_pass.get("launching"),
    )
    speedup = one_pass.get("races", {}).get(launching, {}).get(selected, {})
    names = sorted(errors, key=lambda name: (name not in BASELINES, name))
    times: Line = {}
    for ending, other in (
        (("", None), ("_eager", "eager")) if launching == "captured" else (("", None),)
    ):
        for name in names:
            times |= with_ends(f"{name}{ending}", seconds_of(one_pass, name, other), 1e3, "_ms")
    return {
        "launching": launching,
        **with_ends("selected", seconds_of(one_pass, selected), 1e3, "_ms"),
        **{
            f"selected_{name}": speedup.get(name)
            for name in ("speedup", "speedup_low", "speedup_high")
        },
        "selected_error": errors.get(selected),
        **times,
    }
