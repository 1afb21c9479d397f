"""algorithm=NAME: compute a model's 2-D convolutions by one algorithm, or by one per layer.

`Forced` is built from the configuration. While applied, it has a `Layer` for each convolution,
which intercepts the module's calls.
"""

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
from perfexp.convolution.fastest import Fastest
from perfexp.convolution.layer import Layer
from perfexp.convolution.operators import DEFAULT
from perfexp.convolution.portable.algorithms import ALGORITHMS, canonical
from perfexp.convolution.portable.geometry import clear_constants
from perfexp.convolution.problem import Problem
from perfexp.convolution.proof import watch
from perfexp.convolution.race import Threads, context_of
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
    """Computes convolutions by a named algorithm, and reports how; see `AppliedAlgorithm`.

    The arguments are the keys of the `algorithm` node; `plan/key_descriptions.yaml` describes them.

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
            str(pattern): _layer_algorithm(str(pattern), algorithm, valid)
            for pattern, algorithm in (layers or {}).items()
        }
        _check_settings(self.name, self.backend, workspace_bytes, max_error)
        named = {Pass.backward_data: backward_data, Pass.backward_filter: backward_filter}
        self._backward = {
            pass_type: canonical(
                algorithm, list(CODES[pass_type]), f"{pass_type} algorithm of cuDNN's"
            )
            for pass_type, algorithm in named.items()
            if algorithm is not None
        }
        self._workspace_bytes, self._max_error = workspace_bytes, max_error
        self._objective, self._reuse, self._verify = Objective(objective), reuse, verify
        self._cache_folder = cache_folder("algorithms")
        if cache_dir:
            self._cache_folder = Path(cache_dir).expanduser()
        self._session: Any = None
        self._torch_switches = Switches.now()
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
            self._torch_switches = Switches.now()
            stack.enter_context(self._torch_switches.of(self.name).set())
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
        """Discard decisions, counts and cached memory of earlier points."""
        self._refused.clear()
        clear_constants()
        replays.forget()
        for layer in self._layers:
            layer.forget()

    def begin_call(self) -> None:
        """Reset all layers' counts."""
        for layer in self._layers:
            layer.recount()

    def report(self) -> AlgorithmReport:
        """Return the report on the point's layers.

        Raises `Unsupported` if the algorithm computed none of them.
        """
        layers = tuple(report for layer in self._layers for report in layer.reports())
        report = AlgorithmReport(name=self.name, layers=layers, foreign=foreign())
        statuses = {pass_report.status for layer in layers for pass_report in layer.passes}
        if self._refused and statuses <= {LayerStatus.fallback}:
            reasons = {
                layer.name: f"{layer.requested}: {layer.reason}" for layer in layers if layer.reason
            }
            refusal = _refusal(reasons, len(self._layers))
            raise Unsupported(f"{refusal} {self._remedy(self._refused)}")
        return report

    def _layers_of(self, session: Session, device: torch.device | None = None) -> list[Layer]:
        """Return a `Layer` for each 2-D convolution of the session's model.

        Args:
            device: device to check support for; None for the weights' own.

        Raises:
            UserError: the model is not a torch model, has no 2-D convolution, or a pattern matches
                none.
        """
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
        """Return torch's own choice and, with cuDNN, its search; empty if no layer is raced."""
        if all(layer.requested != FASTEST for layer in self._layers):
            return ()
        return ("default", "benchmark") if why_no_cudnn(self._device) is None else ("default",)

    def run_baseline(self, baseline: str, work: Callable[[], T]) -> T:
        """Run work while torch computes the convolutions, in the baseline's own thread."""
        self._remove()
        try:
            with self._torch_switches.of(baseline).set():
                return self._threads.run(baseline, work)
        finally:
            self._install()

    def run_eager(self, work: Callable[[], T]) -> T:
        """Run work kernel by kernel, in the algorithm's own thread, as baselines run."""
        with replays.eager():
            return self._threads.run(self.name, work)

    def discard_choices(self) -> None:
        """Forget the winners of all races in the cache for other processes."""
        supports = [support for layer in self._layers for support in layer.supports]
        # layers share their races
        for races in {support for support in supports if isinstance(support, Fastest)}:
            races.discard_choices()

    def launched_share(self) -> Metric | None:
        """Return the share of cuDNN passes launched as captured; None without cuDNN passes."""
        share = replays.launched_share()
        return None if share is None else Metric.of(LAUNCHED, share)

    def output_error(self, inputs: Any) -> Metric:
        """Return the relative L2 error over all outputs against torch's own choice.

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
        """Profile one call and add its kernels to the layers' reports.

        Return whether a proof was requested (`algorithm.verify=true`).
        """
        if not self._verify:
            return False
        seen = watch(call)
        for layer in self._layers:
            layer.prove(seen)
        return True

    def _install(self) -> None:
        """Let the layers' algorithms compute from now on."""
        for layer in self._layers:
            layer.install()

    def _remove(self) -> None:
        """Restore the modules' own computation, in the reverse order."""
        for layer in reversed(self._layers):
            layer.remove()

    def _supports(self, algorithm: str) -> list[Support]:
        """Return an algorithm's backends on the model's device, as this run is configured.

        Raises `UserError` if there is none.
        """
        if algorithm == FASTEST:
            return [self._fastest()]
        return supports_of(
            algorithm, self.backend, self._device, self._workspace_bytes, self._backward
        )

    def _fastest(self) -> Fastest:
        """Return the races for `algorithm=fastest`, with a cache for this configuration."""
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
        refused: list[Layer] = []
        reasons: dict[str, str] = {}
        for layer in forced:
            if reason := layer.why_not():
                refused.append(layer)
                reasons[layer.name] = f"{layer.requested}: {reason}"
        is_strict = self._on_unsupported is OnUnsupported.error
        if refused and (is_strict or len(refused) == len(forced)):
            message = f"{_refusal(reasons, len(forced))} {self._remedy(layers=refused)}"
            raise UserError(f"{message} {_OTHERWISE}" if is_strict else message)

    def _refuse(self, layer: Layer, problem: Problem, reason: str) -> None:
        """Remember a problem that the algorithm cannot compute, and raise if that is an error.

        A layer calls it before torch computes instead.

        Raises:
            Unsupported: with `on_unsupported=skip`.
            UserError: with `on_unsupported=error`.
        """
        self._refused.append(problem)
        if self._on_unsupported is OnUnsupported.fallback:
            return
        refusal = _refusal({layer.name: f"{layer.requested}: {reason}"}, 0)
        message = f"{refusal} {self._remedy([problem])}"  # this tries all algorithms
        if self._on_unsupported is OnUnsupported.skip:
            raise Unsupported(message)
        raise UserError(f"{message} {_OTHERWISE}")

    def _remedy(self, problems: Iterable[Problem] = (), layers: Iterable[Layer] = ()) -> str:
        """Return a sentence with the algorithms that can compute all these problems and layers."""
        able = [name for name in ALGORITHMS if self._can(name, problems, layers)]
        return f"What can: {', '.join([*able, DEFAULT])}."

    def _can(self, name: str, problems: Iterable[Problem], layers: Iterable[Layer]) -> bool:
        """Return whether an algorithm can compute all these problems and layers, for `_remedy`."""
        try:
            supports = self._supports(name)
        except UserError:
            return False
        if any(layer.why_not(supports) for layer in layers):
            return False
        return all(_is_computable(problem, supports) for problem in dict.fromkeys(problems))


def _is_computable(problem: Problem, supports: Sequence[Support]) -> bool:
    """Return whether any backend can compute all passes of a problem."""
    for support in supports:
        choices = support.choose(problem).values()
        if all(choice.reason is None for choice in choices):
            return True
    return False


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
        by_precedence = [name, *fitting, *exact]
        chosen.append(by_precedence[-1])
    return chosen


def _fits(pattern: str, names: Sequence[str]) -> bool:
    """Return whether a layer has a name that equals or matches a shell pattern."""
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def _check_settings(
    name: str, backend: Backend, workspace_bytes: int | None, max_error: float | None
) -> None:
    """Raise `UserError` for a setting of `Forced` that is impossible, or useless here."""
    if name in (FASTEST, *SWITCHED) and backend is not Backend.auto:
        raise UserError(
            f"algorithm.backend={backend} has no meaning for algorithm={name}; leave it out."
        )
    if workspace_bytes is not None and workspace_bytes < 0:
        raise UserError(
            f"algorithm.workspace_bytes={workspace_bytes}: give 0 or more, or null for no limit."
        )
    if max_error is not None and not max_error > 0:
        remedy = "give a positive number, or null for the data type's usual error."
        raise UserError(f"algorithm.max_error={max_error}: {remedy}")


def _layer_algorithm(pattern: str, name: Any, valid: Sequence[str]) -> str:
    """Return the canonical name of the algorithm for a pattern in `algorithm.layers`.

    Raises `UserError` if it is missing, unknown or only for whole models.
    """
    if name is None:
        raise UserError(
            f"algorithm.layers: {pattern} has no algorithm; `default` leaves it to torch."
        )
    if str(name) in SWITCHED:
        raise UserError(f"algorithm.layers: {name} is for a whole model: algorithm={name}.")
    return canonical(str(name), valid)


def _refusal(reasons: Mapping[str, str], num_layers: int) -> str:
    """Return a sentence that names the layers that an algorithm cannot compute.

    Args:
        reasons: reasons by layer name.
        num_layers: number of layers that should use the algorithm; 0 for a single layer alone.
    """
    named = [f"{name} ({reason})" for name, reason in reasons.items()]
    if len(named) > _NAMED:
        named[_NAMED:] = [f"{len(named) - _NAMED} more"]
    count = f"{len(reasons)} of {num_layers} convolutions" if num_layers else "A convolution"
    return f"{count} can't be computed by the requested algorithm: {', '.join(named)}."
