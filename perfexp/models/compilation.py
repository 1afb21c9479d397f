"""Counts of torch.compile since the last reset: its time, graphs, graph breaks and recompilations."""

from __future__ import annotations

import torch

from perfexp.records.record import Metric

#: Compilations that torch keeps, unless its own constant differs; and the metrics that are sums over them.
_MOST_ENTRIES, _OF_ENTRIES = 64, ("seconds", "recompilations")


def reset() -> None:
    """Forget compiled code and its counts."""
    from torch._dynamo import utils  # takes seconds, and only a compiled model needs it

    torch.compiler.reset()
    utils.clear_compilation_metrics()
    utils.counters.clear()


def metrics() -> list[Metric]:
    """Metrics since `reset`; missing, with the reason, where torch does not count."""
    from torch._dynamo import utils  # as above

    try:
        compiled = utils.get_compilation_metrics()
        values: dict[str, float] = {
            "seconds": sum(one.duration_us or 0 for one in compiled) * 1e-6,
            "graphs": utils.counters["stats"]["unique_graphs"],
            "graph_breaks": sum(utils.counters["graph_break"].values()),
            # a frame's compilations are numbered from 0: `frame/number`
            "recompilations": sum(bool(one.is_forward) and _number(one.compile_id) > 0 for one in compiled),
        }
    except (AttributeError, TypeError, ValueError) as error:  # torch's own records, which change
        reason = f"torch {torch.__version__} counts in another way: {error}"
        return [Metric(name="compile/seconds", value=None, unit="seconds", reason=reason)]
    is_cut = len(compiled) >= getattr(utils, "DEFAULT_COMPILATION_METRICS_LIMIT", _MOST_ENTRIES)
    reason = f"torch keeps only the last {len(compiled)} compilations"
    metrics = []
    for name, value in values.items():
        unit, is_missing = "seconds" if name == "seconds" else "1", is_cut and name in _OF_ENTRIES
        metrics.append(
            Metric(name=f"compile/{name}", value=None, unit=unit, reason=reason)
            if is_missing
            else Metric(name=f"compile/{name}", value=float(value), unit=unit)
        )
    return metrics


def _number(compile_id: str | None) -> int:
    return int((compile_id or "0").rpartition("/")[2].partition("_")[0])
