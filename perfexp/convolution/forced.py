"""algorithm=NAME: compute a model's 2-D convolutions by one algorithm, or by one per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from perfexp.convolution import Backend, Objective, OnUnsupported, T, replays
from perfexp.convolution.backends import GUESS, SWITCHED, Support, Switches, supports_of
from perfexp.convolution.coverage import AlgorithmReport, LayerStatus, Pass
from perfexp.convolution.cudnn import CODES, why_no_cudnn
from perfexp.convolution.difference import relative_error, with_statistics
from perfexp.convolution.families import foreign
from perfexp.convolution.fastest import Fastest, Threads, context_of
from perfexp.convolution.layer import Layer
from perfexp.convolution.operators import DEFAULT
from perfexp.convolution.portable.algorithms import ALGORITHMS, canonical
from perfexp.convolution.portable.geometry import clear_constants
from perfexp.convolution.problem import Problem
from perfexp.convolution.proof import watch
from perfexp.errors import Unsupported, UserError, did_you_mean
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.models import Session
from perfexp.records.quantities import ALGORITHM_ERROR, LAUNCHED
from perfexp.records.record import Metric

#: Number of layers that an error names before it counts the rest.
_NAMED = 5
#: Name that stands for the fastest algorithm of each layer.
FASTEST = "fastest"
_OTHERWISE = "Or set algorithm.on_unsupported to fallback or skip."


class Forced:
    """Computes convolutions by a named algorithm.

    Raises:
        UserError: there is no such algorithm, or a setting is invalid.
    """

    group, is_forced = "algorithm", True

    def __init__(
        self,
        *,
        name: str,
        backend: Backend = Backend.auto,
        on_unsupported: OnUnsupported = OnUnsupported.fallback,
        workspace_bytes: int | None = None,
        backward_data: str | None = None,
        backward_filter: str | None = None,
        max_error: float | None = None,
        objective: Objective = Objective.time,
        reuse: bool = True,
        cache_dir: str | None = None,
        verify: bool = False,
        layers: Mapping[str, str] | None = None,
    ) -> None:
        valid = [*ALGORITHMS, GUESS, FASTEST, DEFAULT]
        self.name = canonical(name, [*valid, *SWITCHED])
        self.backend = Backend(backend)
        self._on_unsupported = OnUnsupported(on_unsupported)
        if not isinstance(layers, Mapping | None):
            raise UserError(
                f"algorithm.layers={layers}: give layers and algorithms, "
                f"{{conv1:gemm,layer1.*:winograd}}."
            )
        self._patterns = {
            str(pattern): _of_layer(str(pattern), algorithm, valid)
            for pattern, algorithm in (layers or {}).items()
        }
        if self.name in (FASTEST, *SWITCHED) and self.backend is not Backend.auto:
            raise UserError(
                f"algorithm.backend={self.backend} has no meaning for algorithm={self.name}; "
                "leave it out."
            )
        if workspace_bytes is not None and workspace_bytes < 0:
            raise UserError(
                f"algorithm.workspace_bytes={workspace_bytes}: give 0 or more, or null for no "
                "limit."
            )
        if max_error is not None and not max_error > 0:
            remedy = "give a positive number, or null for the data type's usual error."
            raise UserError(f"algorithm.max_error={max_error}: {remedy}")
        named = {Pass.backward_data: backward_data, Pass.backward_filter: backward_filter}
        self._backward = {
            which: canonical(algorithm, list(CODES[which]), f"{which} algorithm of cuDNN's")
            for which, algorithm in named.items()
            if algorithm is not None
        }
        self._workspace_bytes, self._max_error = workspace_bytes, max_error
        self._objective, self._reuse, self._verify = Objective(objective), reuse, verify
        self._cache_folder = (
            Path(cache_dir).expanduser() if cache_dir else cache_folder("algorithms")
        )
        self._session: Any = None
        self._usual = Switches.now()
        self._threads = Threads()
        self._layers: list[Layer] = []
        self._refused: list[Problem] = []
        self._device = torch.device("cpu")

    @contextmanager
    def applied(self, session: Session) -> Iterator[Forced]:
        """Apply the algorithm to the session's model while entered; see `Algorithm`.

        Raises:
            UserError: the model has no 2-D convolution, or none that the algorithm can compute.
                With `on_unsupported=error`, a single layer that it cannot compute is enough. The
                message names the layers.
        """
        with ExitStack() as stack:
            self._usual = Switches.now()
            stack.enter_context(self._usual.of(self.name).set())
            self._layers = self._layers_of(session)
            self._check()
            if self._verify and (reason := why_no_cudnn(self._device)):
                raise UserError(
                    f"algorithm.verify=true profiles cuDNN's kernels: {reason}. Leave it out."
                )
            stack.callback(self._threads.end)
            stack.callback(replays.forget)
            stack.callback(session.discard_compiled)
            stack.callback(self._remove)
            self._install()
            yield self

    def check(self, open_model: Callable[[], Session], device: str) -> None:
        """Check before the run that the algorithm can compute all layers.

        Without `on_unsupported=error` there is nothing to check.

        Args:
            open_model: opens the model on the host, because the device is not reserved yet.

        Raises:
            UserError: the algorithm cannot compute some layers on the device.
        """
        if self._on_unsupported is OnUnsupported.error:
            self._layers = self._layers_of(open_model(), torch.device(device))
            self._check()

    def begin_point(self) -> None:
        self._refused.clear()
        clear_constants()
        replays.forget()
        for layer in self._layers:
            layer.forget()

    def begin_call(self) -> None:
        for layer in self._layers:
            layer.recount()

    def report(self) -> AlgorithmReport:
        layers = tuple(report for layer in self._layers for report in layer.reports())
        report = AlgorithmReport(name=self.name, layers=layers, foreign=foreign())
        if self._refused and all(
            report.status is LayerStatus.fallback for layer in layers for report in layer.passes
        ):
            reasons = {
                report.name: f"{report.requested}: {report.reason}"
                for report in layers
                if report.reason
            }
            raise Unsupported(
                f"{_refusal(reasons, len(self._layers))} {self._remedy(self._refused)}"
            )
        return report

    def _layers_of(self, session: Session, device: torch.device | None = None) -> list[Layer]:
        self._session = session
        module = getattr(session, "module", None)
        if not isinstance(module, torch.nn.Module):
            raise UserError(
                f"algorithm={self.name} is for torch models; choose algorithm=default for this one."
            )
        names: dict[torch.nn.Conv2d, list[str]] = {}
        for name, child in module.named_modules(remove_duplicate=False):
            if isinstance(child, torch.nn.Conv2d):
                names.setdefault(child, []).append(name)
        if not names:
            raise UserError(
                f"algorithm={self.name}: the model has no 2-D convolution; choose "
                "algorithm=default."
            )
        self._device = device or next(iter(names)).weight.device
        chosen = choose(list(names.values()), self.name, self._patterns)
        supports = {algorithm: self._supports(algorithm) for algorithm in dict.fromkeys(chosen)}
        return [
            Layer(aliases[0], child, algorithm, supports[algorithm], self._refuse)
            for (child, aliases), algorithm in zip(names.items(), chosen, strict=True)
        ]

    def baselines(self) -> tuple[str, ...]:
        if all(layer.requested != FASTEST for layer in self._layers):
            return ()
        return ("default", "benchmark") if why_no_cudnn(self._device) is None else ("default",)

    def run_baseline(self, baseline: str, work: Callable[[], T]) -> T:
        self._remove()
        try:
            with self._usual.of(baseline).set():
                return self._threads.run(baseline, work)
        finally:
            self._install()

    def run_eager(self, work: Callable[[], T]) -> T:
        with replays.eager():
            return self._threads.run(self.name, work)

    def discard_choices(self) -> None:
        for races in {
            support
            for layer in self._layers
            for support in layer.supports
            if isinstance(support, Fastest)
        }:
            races.discard_choices()

    def launched_share(self) -> Metric | None:
        share = replays.launched_share()
        return None if share is None else Metric.of(LAUNCHED, share)

    def output_error(self, inputs: Any) -> Metric:
        """Return the relative L2 error over all outputs; see `AppliedAlgorithm`.

        Both outputs are computed in evaluation mode and without a compiler.
        """
        session = self._session

        def by_default() -> Any:
            return self.run_baseline(DEFAULT, lambda: session.eager(inputs))

        with session.inferring(), with_statistics(session.module, by_default):
            error = relative_error(session.eager(inputs), by_default())
        reason = None if error is not None else "the outputs are not finite, or all zero"
        return Metric.of(ALGORITHM_ERROR, error, reason=reason)

    def prove(self, call: Callable[[], Any]) -> bool:
        if not self._verify:
            return False
        seen = watch(call)
        for layer in self._layers:
            layer.prove(seen)
        return True

    def _install(self) -> None:
        for layer in self._layers:
            layer.install()

    def _remove(self) -> None:
        for layer in reversed(self._layers):
            layer.remove()

    def _supports(self, algorithm: str) -> list[Support]:
        if algorithm == FASTEST:
            return [self._fastest()]
        return supports_of(
            algorithm, self.backend, self._device, self._workspace_bytes, self._backward
        )

    def _fastest(self) -> Fastest:
        context = {
            **context_of(self._session.device),
            # earlier races compared captured cuDNN passes with torch's kernels
            "race": "of equal launches",
            "triton": metadata.version("triton") if util.find_spec("triton") else None,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "workspace_bytes": self._workspace_bytes,
            "max_error": self._max_error,
            "objective": self._objective.value,
        }
        return Fastest(
            device=self._session.device,
            threads=self._threads,
            workspace_bytes=self._workspace_bytes,
            max_error=self._max_error,
            choices=JsonCache(self._cache_folder, context),
            reuse=self._reuse,
        )

    def _check(self) -> None:
        """Raise errors that are known without inputs.

        With `on_unsupported=skip`, each point reports its errors itself.
        """
        if self._on_unsupported is OnUnsupported.skip:
            return
        forced = [layer for layer in self._layers if layer.requested != DEFAULT]
        reasons = {layer: reason for layer in forced if (reason := layer.why_not())}
        descriptions = {
            layer.name: f"{layer.requested}: {reason}" for layer, reason in reasons.items()
        }
        is_strict = self._on_unsupported is OnUnsupported.error
        if reasons and (is_strict or len(reasons) == len(forced)):
            refused = f"{_refusal(descriptions, len(forced))} {self._remedy(layers=reasons)}"
            raise UserError(f"{refused} {_OTHERWISE}" if is_strict else refused)

    def _refuse(self, layer: Layer, problem: Problem, reason: str) -> None:
        self._refused.append(problem)
        refused = (
            f"{_refusal({layer.name: f'{layer.requested}: {reason}'}, 0)} {self._remedy([problem])}"
        )
        if self._on_unsupported is OnUnsupported.skip:
            raise Unsupported(refused)
        if self._on_unsupported is OnUnsupported.error:
            raise UserError(f"{refused} {_OTHERWISE}")

    def _remedy(self, problems: Iterable[Problem] = (), layers: Iterable[Layer] = ()) -> str:
        """Return a sentence with the algorithms that can compute all these problems and layers."""
        able = [name for name in ALGORITHMS if self._can(name, problems, layers)]
        return f"What can: {', '.join([*able, DEFAULT])}."

    def _can(self, name: str, problems: Iterable[Problem], layers: Iterable[Layer]) -> bool:
        try:
            supports = self._supports(name)
        except UserError:
            return False
        return not any(layer.why_not(supports) for layer in layers) and all(
            any(
                not any(choice.reason for choice in support.choose(problem).values())
                for support in supports
            )
            for problem in dict.fromkeys(problems)
        )


def choose(layers: Sequence[Sequence[str]], name: str, patterns: Mapping[str, str]) -> list[str]:
    """Return each layer's algorithm: an exact name beats a pattern, then the last match wins.

    Args:
        layers: names of each layer; a shared module has several.
        name: algorithm for layers without a match.
        patterns: algorithms by layer name or shell pattern, for example `features.*`.

    Raises:
        UserError: a pattern matches no layer.
    """
    for pattern in patterns:
        if not any(_fits(pattern, names) for names in layers):
            hint = did_you_mean(pattern, [names[0] for names in layers])
            raise UserError(
                f"algorithm.layers: no 2-D convolution of the model matches {pattern!r}. {hint}"
            )
    chosen = []
    for names in layers:
        exact = [algorithm for pattern, algorithm in patterns.items() if pattern in names]
        fitting = [algorithm for pattern, algorithm in patterns.items() if _fits(pattern, names)]
        chosen.append([name, *fitting, *exact][-1])
    return chosen


def _fits(pattern: str, names: Sequence[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def _of_layer(pattern: str, name: Any, valid: Sequence[str]) -> str:
    if name is None:
        raise UserError(
            f"algorithm.layers: {pattern} has no algorithm; `default` leaves it to torch."
        )
    if str(name) in SWITCHED:
        raise UserError(f"algorithm.layers: {name} is for a whole model: algorithm={name}.")
    return canonical(str(name), valid)


def _refusal(reasons: Mapping[str, str], asked: int) -> str:
    named = [f"{name} ({reason})" for name, reason in list(reasons.items())[:_NAMED]]
    rest = [f"{len(reasons) - _NAMED} more"] if len(reasons) > _NAMED else []
    count = f"{len(reasons)} of {asked} convolutions" if asked else "A convolution"
    return f"{count} can't be computed by the requested algorithm: {', '.join(named + rest)}."
