"""Metrics for torch.compile since the last reset: time, graphs, graph breaks, recompilations."""

from __future__ import annotations

import torch

from perfexp.records.quantities import COMPILE_SECONDS, GRAPH_BREAKS, GRAPHS, RECOMPILATIONS
from perfexp.records.record import Metric

#: Compilations that torch keeps, unless its own constant differs, and metrics summed over them.
_MOST_ENTRIES, _OF_ENTRIES = 64, (COMPILE_SECONDS, RECOMPILATIONS)


def reset() -> None:
    """Discard compiled code and its counts."""
    from torch._dynamo import utils  # takes seconds, and only a compiled model needs it

    torch.compiler.reset()
    utils.clear_compilation_metrics()
    utils.counters.clear()


def metrics() -> list[Metric]:
    """Return the metrics since `reset`; missing, with a reason, if torch does not count."""
    from torch._dynamo import utils  # deferred as in `reset`

    try:
        compiled = utils.get_compilation_metrics()
        values: dict[str, float] = {
            COMPILE_SECONDS: sum(one.duration_us or 0 for one in compiled) * 1e-6,
            GRAPHS: utils.counters["stats"]["unique_graphs"],
            GRAPH_BREAKS: sum(utils.counters["graph_break"].values()),
            # torch numbers compilations per frame from 0: `frame/number`
            RECOMPILATIONS: sum(
                bool(one.is_forward) and _number(one.compile_id) > 0 for one in compiled
            ),
        }
    except (AttributeError, TypeError, ValueError) as error:  # torch's records change
        reason = f"torch {torch.__version__} counts in another way: {error}"
        return [Metric.of(COMPILE_SECONDS, None, reason=reason)]
    is_cut = len(compiled) >= getattr(utils, "DEFAULT_COMPILATION_METRICS_LIMIT", _MOST_ENTRIES)
    reason = f"torch keeps only the last {len(compiled)} compilations"
    metrics = []
    for name, value in values.items():
        is_missing = is_cut and name in _OF_ENTRIES
        metrics.append(
            Metric.of(name, None, reason=reason) if is_missing else Metric.of(name, float(value))
        )
    return metrics


def _number(compile_id: str | None) -> int:
    return int((compile_id or "0").rpartition("/")[2].partition("_")[0])
