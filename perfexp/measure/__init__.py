"""The measuring procedure of one point; called, `perfexp.measure(…)`, this package is the function of perfexp.api."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that shares its name with a function of the interface: importing either must not hide the other."""

    def __call__(self, *arguments: Any, **overrides: Any) -> Any:
        return import_module("perfexp.api").measure(*arguments, **overrides)


sys.modules[__name__].__class__ = _Callable
