"""algorithm=NAME: every 2-D convolution of a model by one algorithm, or by one for each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from perfexp.algorithms import Backend, OnUnsupported
from perfexp.algorithms.choice import choose
from perfexp.algorithms.layer import DEFAULT, Layer
from perfexp.algorithms.portable import ALGORITHMS, canonical
from perfexp.algorithms.report import AlgorithmReport
from perfexp.errors import Unsupported, UserError
from perfexp.models import Session

#: Layers that an error names before it counts the rest.
_NAMED = 5


class Forced:
    """Computes convolutions by the algorithm that is named.

    Args:
        name: of the algorithm.
        backend: whose code computes.
        on_unsupported: what becomes of layers that it can't compute.
        layers: another algorithm, or `default`, by a layer's name or a pattern; an exact name beats a pattern, then the
            last wins.

    Raises:
        UserError: there is no such algorithm.
    """

    def __init__(
        self,
        *,
        name: str,
        backend: Backend = Backend.auto,
        on_unsupported: OnUnsupported = OnUnsupported.fallback,
        layers: Mapping[str, str] | None = None,
    ) -> None:
        valid = [*ALGORITHMS, DEFAULT]
        self.name = canonical(name, valid)
        self.backend = Backend(backend)
        self._on_unsupported = OnUnsupported(on_unsupported)
        if not isinstance(layers, Mapping | None):
            raise UserError(f"algorithm.layers={layers}: give layers and algorithms, {{conv1:gemm,layer1.*:winograd}}.")
        self._patterns = {pattern: canonical(str(each), valid) for pattern, each in (layers or {}).items()}
        self._layers: list[Layer] = []

    @contextmanager
    def applied(self, session: Session) -> Iterator[None]:
        """See `Algorithm`.

        Raises:
            UserError: the model has no such layers, none that the algorithm can compute, or, where that is an error,
                one that it can't.
        """
        self._layers = self._layers_of(session)
        self._check()
        try:
            for layer in self._layers:
                layer.install()
            yield
        finally:
            for layer in reversed(self._layers):
                layer.remove()

    def forget(self) -> None:
        """What ran before is no longer in the report: to be called before a point is measured."""
        for layer in self._layers:
            layer.forget()

    def report(self) -> AlgorithmReport:
        """What ran since the last `forget`."""
        layers = tuple(report for layer in self._layers for report in layer.reports())
        return AlgorithmReport(name=self.name, backend=Backend.torch.value, layers=layers)

    def _layers_of(self, session: Session) -> list[Layer]:
        module = getattr(session, "module", None)
        if not isinstance(module, torch.nn.Module):
            raise UserError(f"algorithm={self.name} is for torch models; for this one choose algorithm=default.")
        names: dict[torch.nn.Conv2d, list[str]] = {}
        for name, child in module.named_modules(remove_duplicate=False):
            if isinstance(child, torch.nn.Conv2d):
                names.setdefault(child, []).append(name)
        if not names:
            raise UserError(f"algorithm={self.name}: the model has no 2-D convolution; choose algorithm=default.")
        chosen = choose(list(names.values()), self.name, self._patterns)
        return [
            Layer(aliases[0], child, algorithm, self._refuse)
            for (child, aliases), algorithm in zip(names.items(), chosen, strict=True)
        ]

    def _check(self) -> None:
        """What can be said before there are inputs; a point that is to be skipped says it itself."""
        if self._on_unsupported is OnUnsupported.skip:
            return
        forced = [layer for layer in self._layers if layer.requested != DEFAULT]
        reasons = {layer: reason for layer in forced if (reason := layer.why_not(ALGORITHMS[layer.requested]))}
        if reasons and self._on_unsupported is OnUnsupported.error:
            raise UserError(f"{_told(reasons, len(forced))} {self._remedy(reasons)}")
        if forced and len(reasons) == len(forced):
            raise UserError(f"{_told(reasons, len(forced))} {_alternatives(reasons)}")

    def _refuse(self, layer: Layer, reason: str) -> None:
        """A layer can't compute its inputs by its algorithm."""
        if self._on_unsupported is OnUnsupported.skip:
            raise Unsupported(_told({layer: reason}, 0))
        if self._on_unsupported is OnUnsupported.error:
            raise UserError(f"{_told({layer: reason}, 0)} {self._remedy({layer: reason})}")

    @staticmethod
    def _remedy(reasons: Mapping[Layer, str]) -> str:
        return f"{_alternatives(reasons)} Or set algorithm.on_unsupported to fallback or skip."


def _told(reasons: Mapping[Layer, str], asked: int) -> str:
    """Which layers can't be computed, and why."""
    named = [f"{layer.name} ({layer.requested}: {reason})" for layer, reason in list(reasons.items())[:_NAMED]]
    rest = [f"{len(reasons) - _NAMED} more"] if len(reasons) > _NAMED else []
    count = f"{len(reasons)} of {asked} convolutions" if asked else "A convolution"
    return f"{count} can't be computed by the algorithm that is asked for: {', '.join(named + rest)}."


def _alternatives(reasons: Mapping[Layer, str]) -> str:
    layers: Sequence[Layer] = list(reasons)
    able = [name for name, each in ALGORITHMS.items() if not any(layer.why_not(each) for layer in layers)]
    return f"What can: {', '.join([*able, DEFAULT])}."
