"""Convolution tables: the algorithm of each convolution in a model, as lines and sentences.

An engine is one way to compute a convolution pass, such as a cuDNN algorithm. With
`algorithm=fastest`, engines race for each layer and pass (`records.races`). `lines` become a CSV
file, and the other functions give sentences for the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from perfexp.records.analysis import Analysis
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
from perfexp.records.subject import label, varying
from perfexp.records.units import format_seconds
from perfexp.records.wording import interval_text, percent_range
from perfexp.report.tables.flat import Cell, Line, columns_of, with_ends
from perfexp.statistics.estimators import Interval

#: What the status of a correctly run pass says about its kernels.
_STATUSES = {"ok": "proven", "requested": "not verified; algorithm.verify=true"}
#: Text for convolutions that `fastest` leaves to torch.
_OWN_CHOICE = "torch's own choice, of an algorithm that was not observed"


def lines(analysis: Analysis, group: str = "algorithm") -> list[Line]:
    """Return a line for each point, process, layer, shape and pass; empty without algorithms.

    Times are in ms, with intervals, for the chosen engine and each engine in its race.

    Args:
        group: `algorithm`, or `attention` with a shape in the place of a layer.
    """
    table: list[Line] = []
    for point in analysis.record.points:
        for layer, one_pass in passes(point, group):
            line = columns_of(analysis.about, point.key)
            line["replicate"] = point.key.replicate
            line["layer"] = layer["name"]
            line["input_shape"] = "×".join(map(str, layer["input_shape"]))
            line["dtype"] = layer["dtype"]
            line["pass"] = one_pass["which"]
            line["requested"] = layer["requested"]
            for name in ("selected", "ran", "status", "reason"):
                line[name] = one_pass[name]
            line["math"] = layer["math"]
            for name in ("flops", "workspace_bytes"):
                line[name] = one_pass[name]
            line |= _tried(one_pass)
            line["kernels"] = "; ".join(one_pass["kernels"]) or None
            table.append(line)
    return table


def sentences(record: Record) -> list[str]:
    """Return sentences about races: engines chosen, and summed times for choice and baselines.

    For example: `forward: 12 winograd, 8 implicit_gemm; sum of the layers alone: …`. Empty without
    races.
    """
    has_no_tf32 = tf32_flags(record.environment) == (False, False)
    raced = [(point.key, timed) for point in record.points if (timed := timed_passes(point))]
    fields = varying(key for key, _ in raced)
    texts = []
    for key, timed in raced:
        prefix = f"{label(key, fields)}: " if fields else ""
        for text in _sentences_of_point(timed, has_no_tf32=has_no_tf32):
            texts.append(prefix + text)
    return texts


def attention(record: Record) -> list[str]:
    """Return a text for each backend of a record's attention, with the shape of most FLOPs.

    For example: `flash (proven): 12 of 64×12×197×64 float32 and 1 more shapes`. Reports show them
    in the section `attention`.
    """
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
    point's convolution FLOPs, from the lowest to the highest over points and processes. They stand
    below the table of metrics.
    """
    shares = list(filter(None, map(_shares, record.points)))
    values: dict[str, list[float]] = {}
    for name in dict.fromkeys(chain.from_iterable(shares)):
        values[name] = [point_shares.get(name, 0.0) for point_shares in shares]
    if not values:
        return []
    names = sorted(values, key=lambda name: -max(values[name]))
    texts = (f"{percent_range(values[name])} by {name}" for name in names)
    return [f"coverage of the FLOPs: {', '.join(texts)}"]


def _shares(point: Point) -> dict[str, float]:
    """Return each engine's share of a point's convolution FLOPs, torch's own choices combined.

    Empty unless `fastest` was requested for every layer.
    """
    flops = Counter[str]()
    for layer, one_pass in passes(point):
        if layer["requested"] != "fastest":
            return {}
        name, status = str(one_pass["selected"]), one_pass["status"]
        text = f"{name} ({_STATUSES.get(status, status)})"
        if is_own_choice(name, status):
            text = _OWN_CHOICE
        flops[text] += one_pass["flops"]
    total = flops.total()
    return {name: count / total for name, count in flops.items() if count}


def saved_multiplications(record: Record) -> list[str]:
    """Return why MFU may exceed 100 %, if algorithms ran that multiply less than counted.

    They stand below a table with MFU.
    """
    names = list(dict.fromkeys(chain.from_iterable(map(saving_engines, record.points))))
    if not names:
        return []
    verb = "need" if names[1:] else "needs"
    return [
        f"MFU counts the multiplications of direct convolution; {', '.join(names)} {verb} fewer, "
        "so that MFU may exceed 100 %"
    ]


def _sentences_of_point(timed: list[LayerPass], *, has_no_tf32: bool) -> Iterator[str]:
    """Yield a sentence for each pass (forward, …): chosen engines, summed times and remarks.

    Args:
        timed: raced layers with their passes.
    """
    by_pass: dict[str, list[LayerPass]] = {}
    for layer_pass in timed:
        by_pass.setdefault(layer_pass[1]["which"], []).append(layer_pass)
    for pass_name, raced in by_pass.items():
        chosen = Counter(one_pass["selected"] for _, one_pass in raced)
        times = ", ".join(f"{name} {_text(interval)}" for name, interval in sums(raced).items())
        engines = ", ".join(f"{count} {engine}" for engine, count in chosen.most_common())
        text = f"{pass_name.replace('_', ' ')}: {engines}; sum of the layers alone: {times}"
        yield text + _remarks(raced, has_no_tf32)


def _text(interval: Interval) -> str:
    """Return a time as text, with its interval unless the record has none."""
    if interval.low is None:
        return format_seconds(interval.value)
    return interval_text(interval)


def _remarks(raced: list[LayerPass], has_no_tf32: bool) -> str:
    """Return remarks on how the engines were launched, cached choices, and TF32.

    They end a sentence about one pass, so each begins with a semicolon.
    """
    text = ""
    launchings = _values(raced, "launching").keys() - {"clock"}
    if launchings:
        text += f"; all {' or '.join(sorted(launchings))}"
    if since := _values(raced, "kept_since"):
        text += f"; cached on {min(since)} (algorithm.reuse=false measures again)"
    if unsteady := _values(raced, "not_cached"):
        text += f"; not cached: {next(iter(unsteady))}"
    if has_no_tf32 and any(layer["dtype"] == "float32" for layer, _ in raced):
        text += (
            "; all without TF32, which PyTorch allows for convolutions by default (precision=torch)"
        )
    return text


def _values(raced: list[LayerPass], name: str) -> dict[str, None]:
    """Return the values of an entry in facts about passes, each once."""
    return dict.fromkeys(value for _, one_pass in raced if (value := one_pass.get(name)))


def _tried(one_pass: Mapping[str, Any]) -> dict[str, Cell]:
    """Return the cells of a raced pass: times in ms, speedup and errors of the engines.

    Races launch calls kernel by kernel (eager) or as CUDA graphs (captured). If captured calls
    decided, the eager times follow. Empty without a race.
    """
    if not one_pass["seconds"]:
        return {}
    errors, selected = one_pass["errors"], one_pass["selected"]
    launching = one_pass.get("launching")
    line: Line = {"launching": launching}
    line |= with_ends("selected", seconds_of(one_pass, selected), 1e3, "_ms")
    speedup = one_pass.get("races", {}).get(launching, {}).get(selected, {})
    for name in ("speedup", "speedup_low", "speedup_high"):
        line[f"selected_{name}"] = speedup.get(name)
    line["selected_error"] = errors.get(selected)
    names = sorted(errors, key=lambda name: (name not in BASELINES, name))
    for name in names:
        line |= with_ends(name, seconds_of(one_pass, name), 1e3, "_ms")
    if launching == "captured":
        for name in names:
            line |= with_ends(f"{name}_eager", seconds_of(one_pass, name, "eager"), 1e3, "_ms")
    return line
