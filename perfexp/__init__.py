"""perfexp: how fast a deep-learning model trains and infers, at what cost, and how sure that is.

The names in `__all__` are the Python interface. They are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perfexp.version import __version__

__all__ = [
    "__version__",
    "apply",
    "compare_callables",
    "compose",
    "gain",
    "load",
    "measure",
    "metric",
]

if TYPE_CHECKING:
    from perfexp.api import compose, load, measure
    from perfexp.convolution.applying import apply
    from perfexp.measuring.baselines import gain
    from perfexp.records.metrics import metric
    from perfexp.run.callable_judge import compare_callables

#: Modules of the interface.
_MODULES = {
    "apply": "perfexp.convolution.applying",
    "compare_callables": "perfexp.run.callable_judge",
    "gain": "perfexp.measuring.baselines",
    "compose": "perfexp.api",
    "load": "perfexp.api",
    "measure": "perfexp.api",
    "metric": "perfexp.records.metrics",
}


def __dir__() -> list[str]:
    """Return the names of the interface, for completion, and those that are imported already."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a name on first use: the command line starts without Hydra, pandas and torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
