"""Switches: what torch is told for a whole model, where an algorithm is one of torch's own ways of computing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from perfexp.errors import UserError

#: Algorithms that are switched on for the whole model, and so not for a layer.
SWITCHED = ("benchmark", "onednn", "native")


@dataclass(frozen=True)
class Switches:
    """How torch is set.

    Attributes:
        benchmark: whether cuDNN searches for the fastest of its algorithms.
        onednn: whether oneDNN computes on a CPU.
    """

    benchmark: bool
    onednn: bool

    @classmethod
    def now(cls) -> Switches:
        """As they are."""
        return cls(torch._C._get_cudnn_benchmark(), torch._C._get_mkldnn_enabled())

    def of(self, algorithm: str) -> Switches:
        """As an algorithm wants them; these where it wants nothing.

        Args:
            algorithm: its name.

        Raises:
            UserError: this torch lacks what it needs.
        """
        if algorithm == "benchmark":
            return replace(self, benchmark=True)
        if algorithm in ("onednn", "native"):
            if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
                raise UserError("this torch has no oneDNN; choose algorithm=default.")
            return replace(self, onednn=algorithm == "onednn")
        return self

    @contextmanager
    def set(self) -> Iterator[None]:
        """While entered, torch is set so."""
        before = Switches.now()
        self._put()
        try:
            yield
        finally:
            before._put()

    def _put(self) -> None:
        torch._C._set_cudnn_benchmark(self.benchmark)
        torch._C._set_mkldnn_enabled(self.onednn)
