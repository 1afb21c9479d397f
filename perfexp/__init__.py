"""perfexp: how fast a deep-learning model trains and infers, at what cost, and how sure that is."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "metric"]

if TYPE_CHECKING:
    from perfexp.records.metrics import metric


def __getattr__(name: str) -> Any:
    """`perfexp.metric`, imported when it is asked for: the command line starts without it."""
    if name == "metric":
        from perfexp.records.metrics import metric

        return metric
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
