"""Configuration: turn a composed Hydra configuration into a typed Plan, and its nodes into objects."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from perfexp.devices import auto
from perfexp.errors import PerfexpError, UserError, is_out_of_host_memory
from perfexp.host import credentials, gpu_sheets
from perfexp.host.installation import conf_dir
from perfexp.plan import model_settings, process_count, schema, sources
from perfexp.plan.hydra_errors import why_not_imported
from perfexp.plan.plan_fields import FORMAT, ConfigSchema, PlanSchema, ProcessStart
from perfexp.prediction import largest_batch
from perfexp.prediction.sparse import Sparse
from perfexp.profilers import Profiler
from perfexp.records import old_names
from perfexp.records.record import LARGEST, Key, Point, Status, layers_key, without_replicate
from perfexp.speed import placing
from perfexp.stopping import StoppingRule
from perfexp.sweep import Oom, Size, Sweep, parse_batch_sizes, parse_sizes, shrunk, timed_keys

#: Seconds of an energy window before it starts, and of the work that ranks do together besides timing.
_PLATEAU_SECONDS, _COLLECTIVE_SECONDS = 1.5, 4.0
#: Modules that a worker with a torch model imports when it needs them.
_OF_TORCH = ("torch", "perfexp.models.module", "perfexp.devices.cuda")
#: Seconds of a series with its share of the probes before it, where many points leave it ten samples: on an H200, at
#: calls of 2.3 to 3.3 ms.
_LEAST_SERIES_SECONDS = 0.25
#: Series of the undisturbed call, by one clock or by three.
_SYNCHRONOUS_SERIES, _ASYNCHRONOUS_SERIES = 1, 3


@dataclass(kw_only=True)
class Plan(PlanSchema):
    """The fully resolved configuration of one run.

    Attributes:
        input_size: (height, width) of each input size, in pixels; empty if the sweep chooses them.
        batch_size: batch sizes, in samples per call, `LARGEST` for max; empty if the sweep chooses them.
    """

    input_size: list[Size]
    batch_size: list[int]

    @property
    def model_name(self) -> str:
        """Name of the model in files and runs."""
        return self._name("model")

    @property
    def algorithm_name(self) -> str:
        """Name of the algorithm in files and runs."""
        return self._name("algorithm") + ("+layers" if self.algorithm.get("layers") else "")

    @property
    def gpu_name(self) -> str:
        """Name of the device in the configuration."""
        return self._name("gpu")

    @property
    def profiler_name(self) -> str:
        """Name of the profiler in the configuration."""
        return self._name("profiler")

    def _name(self, group: str) -> str:
        node = getattr(self, group)
        return str(
            (node.get("name") if isinstance(node, Mapping) else None)
            or self.choices.get(group, group)
        )

    @property
    def nodes(self) -> int:
        """Number of hosts that measure together."""
        nodes = self.gpu.get("nodes")
        return 1 if nodes is None else int(nodes)

    @property
    def devices(self) -> int:
        """Number of devices of each host."""
        return int(self.gpu.get("count", 1))

    @property
    def ranks(self) -> int:
        """Number of processes, each with a device, that measure together on all hosts."""
        return self.nodes * self.devices

    @property
    def least_processes(self) -> int:
        """Least number of processes that measure the times: `processes`, or by default that of the stopping rule.

        Whole epochs, several ranks and profiled runs have one by default.
        """
        if self.processes is not None:
            return self.processes
        # as data: status counts the points of plans that are not trusted
        return int(self.stopping.get("processes", 1)) if self._repeats else 1

    @property
    def _repeats(self) -> bool:
        """Whether several processes measure by default."""
        return (
            not self.epochs
            and self.ranks == 1
            and self.profiler["_target_"].endswith(".NoProfiler")
        )

    @property
    def is_adaptive(self) -> bool:
        """Whether further processes are added until the times are precise enough."""
        least, most = self.least_processes, int(self.stopping.get("most_processes") or 0)
        return (
            self.processes is None and 1 <= least < most and self._repeats and not self.seeks_batch
        )

    def processes_by(self, results: Collection[Point]) -> int:
        """Number of processes that measure the times, by the results so far."""
        if not (self.is_adaptive and results):
            return self.least_processes

        state = frozenset((point.key, point.status) for point in results if point.key.is_timed)
        if state not in self._counts:
            pairs = {
                phase: self._sweep.points(self.input_size, self._batch_sizes(phase))
                for phase in self.phases
            }
            planned = {
                without_replicate(key)
                for key in timed_keys(pairs, precision=self.precision.name, replicate=1)
            }
            self._counts[state] = process_count.wanted(results, build(self.stopping), planned)
        return self._counts[state]

    @cached_property
    def _counts(self) -> dict[frozenset[tuple[Key, Status]], int]:
        """Number of processes by the results so far, which takes long to find."""
        return {}

    @property
    def phases(self) -> list[str]:
        """Phases of each point, training first."""
        return [phase for phase in ("train", "inference") if getattr(self.mode, phase) is not None]

    @cached_property
    def point_seconds(self) -> float | None:
        """Estimated mean time of the timed points of all processes; None if the settings do not limit it."""
        rule = self.stopping_rule
        longest = rule.longest_seconds()
        if longest is None or self.epochs:
            return None
        series_seconds = max(longest, _LEAST_SERIES_SECONDS)
        is_cpu = "cpu" in (
            name := self.gpu.get("name"),
            auto.predicted_name(self.gpu.get("index") or 0) if name == "auto" else None,
        )
        takes_all = self.probes.call_times
        series = _ASYNCHRONOUS_SERIES if takes_all and not is_cpu else _SYNCHRONOUS_SERIES
        # processes after the first repeat the times only
        energy = (
            (self.probes.energy_seconds or 1.0) + _PLATEAU_SECONDS if self.probes.energy else 0.0
        )
        has_phases = takes_all and (not is_cpu or "train" in self.phases)  # or the times as a graph
        phases = series_seconds if has_phases else 0.0
        keys = self.timed_keys()
        further = (energy + phases) * sum(key.replicate == 0 for key in keys) / len(keys)
        ranks = _COLLECTIVE_SECONDS if self.ranks > 1 else 0.0
        return float(rule.settling_seconds + series * series_seconds + further + ranks)

    @cached_property
    def stopping_rule(self) -> StoppingRule:
        """The stopping rule of each point of a process."""
        rule: StoppingRule = build(self.stopping)
        return rule.shared_by(sum(key.replicate == 0 for key in self.timed_keys()))

    def config_dirs(self) -> list[Path]:
        """Folders that offer options to the plan: conf/, and those of `--config-dir`."""
        named = [
            text.partition("=")[2] for text in self.command if text.startswith("--config-dir=")
        ]
        return [conf_dir(), *map(Path, named)]

    def sheet(self, product: str | None) -> tuple[str, gpu_sheets.GpuFacts]:
        """Return name and facts of the GPU; without facts (gpu=auto) those of the file for this product, if any."""
        facts = gpu_sheets.GpuFacts.of_node(self.gpu.get("facts"))
        if facts == gpu_sheets.GpuFacts() and product is not None:
            files = gpu_sheets.read(self.config_dirs())
            if name := gpu_sheets.matching(files, product):
                return name, files[name].facts
        return self.gpu_name, facts

    @property
    def infers_trained(self) -> bool:
        """Whether inference is measured with the weights that the run's training ends with."""
        return bool(self.mode.inference and self.mode.inference.get("trained"))

    @cached_property
    def _sweep(self) -> Sweep:
        made: Sweep = build(self.sweep)
        return made

    @cached_property
    def _profiler(self) -> Profiler:
        made: Profiler = build(self.profiler)
        return made

    @property
    def is_sparse(self) -> bool:
        """Whether points are chosen while others are measured."""
        return isinstance(self._sweep, Sparse)

    @property
    def shrinks(self) -> bool:
        """Whether the batch that fits is measured where another one did not."""
        return getattr(self._sweep, "oom", None) is Oom.shrink

    @property
    def scope(self) -> str:
        """Points that a sparse sweep covers in all phases, in words; empty for other sweeps."""
        sweep = self._sweep
        if not isinstance(sweep, Sparse):
            return ""
        numbers = [
            len(sweep.candidates(self.input_size, self._batch_sizes(phase)))
            for phase in self.phases
        ]
        most = sum(min(sweep.measured, number) for number in numbers)
        return (
            f"; then up to {most} of {sum(numbers)} points by their results, the others predicted"
        )

    @property
    def traces_memory(self) -> bool:
        """Whether the traced peak of points is needed while they are measured."""
        return self.seeks_batch or getattr(self._sweep, "skip_oom", False)

    @property
    def seeks_batch(self) -> bool:
        """Whether a batch size is the largest that fits, which trials find."""
        return any(LARGEST in self._batch_sizes(phase) for phase in self.phases)

    def timed_keys(self, results: Iterable[Point] = ()) -> list[Key]:
        """Timed points in measuring order, replicate by replicate; raises UserError if the settings clash.

        One process trains where inference takes the trained weights.

        Args:
            results: results so far, by which a sparse sweep, or one with `oom=shrink`, chooses further points, and by
                which the largest batch is found.
        """
        results = list(results)
        keys = largest_batch.resolved(self._keys_of_sweep(results), results)
        return list(dict.fromkeys([*keys, *(shrunk(results) if self.shrinks else ())]))

    def trial_keys(self, results: Collection[Point]) -> list[Key]:
        """Trials whether a batch fits that are due; see `largest_batch.trial_keys`."""
        return largest_batch.trial_keys(
            self._keys_of_sweep(results) if self.seeks_batch else (), results
        )

    def _keys_of_sweep(self, results: Collection[Point]) -> list[Key]:
        """The timed points of the sweep; those of the largest batch have `LARGEST`."""
        sweep = self._sweep
        sizes = {phase: (self.input_size, self._batch_sizes(phase)) for phase in self.phases}
        chosen = {}
        if isinstance(sweep, Sparse):  # phases of the same sizes and batch sizes choose together
            for phase, of in sizes.items():
                chosen[phase] = sweep.chosen(
                    *of, [one for one in results if sizes.get(one.key.phase) == of]
                )
        keys = timed_keys(
            {phase: sweep.points(*of) for phase, of in sizes.items()},
            chosen=chosen,
            precision=self.precision.name,
            replicate=self.processes_by(results),
        )
        return [
            key
            for key in keys
            if not (self.infers_trained and key.replicate and key.phase == "train")
        ]

    def _batch_sizes(self, phase: str) -> list[int]:
        """Batch sizes of a phase: its own, or those of all phases."""
        own = getattr(self.mode, phase).get("batch_size")
        return self.batch_size if own is None else parse_batch_sizes(own)

    def fixed_keys(self, results: Collection[Point]) -> list[Key]:
        """The timed points that do not depend on the results of others but for the largest batch."""
        return self.timed_keys(results if self.seeks_batch else ())

    def first_prediction_keys(self, results: Collection[Point] = ()) -> list[Key]:
        """Cold starts: the first inference, of each replicate that the plan names."""
        first: dict[int, Key] = {}
        for key in self.fixed_keys(results) if self.cold_start else ():
            if key.phase == "inference" and not (self.processes is None and key.replicate):
                first.setdefault(key.replicate, key)
        return [
            Key(
                phase="ttfp",
                input_size=k.input_size,
                batch_size=k.batch_size,
                precision=k.precision,
                replicate=r,
            )
            for r, k in first.items()
        ]

    def layer_keys(self, results: Iterable[Point] = ()) -> list[Key]:
        """Points whose layers are timed: those of the first replicate; see `timed_keys` for the results."""
        if not self.probes.layers:
            return []
        return [layers_key(key) for key in self.timed_keys(results) if key.replicate == 0]

    def profile_keys(self, results: Collection[Point] = ()) -> list[Key]:
        """Profiles that are made after timing."""
        return self._profiler.chosen(self.fixed_keys(results))

    def keys(self, results: Collection[Point] = ()) -> list[Key]:
        """All points; profiles alone if the profiler only marks calls. See `timed_keys` for the results."""
        timed = [
            *self.timed_keys(results),
            *self.first_prediction_keys(results),
            *self.layer_keys(results),
        ]
        return [*(timed if self._profiler.times else ()), *self.profile_keys(results)]


def register(scratch: Path | None = None, models: Mapping[str, Any] | None = None) -> None:
    """Register with Hydra the schemas, models without a file, and the resolvers of folders."""
    store = ConfigStore.instance()
    store.store(group="schema", name="plan", node=ConfigSchema)
    for name, node in schema.settings().items():
        group, _, option = f"schema/{name}".rpartition("/")
        store.store(group=group, name=option, node=schema.with_earlier_names(name, node))
    for model, node in (models or {}).items():
        store.store(group="model", name=model, node=node)
    OmegaConf.register_new_resolver("perfexp_scratch", lambda: str(scratch), replace=True)
    OmegaConf.register_new_resolver("perfexp_speed_dir", placing.default_folder, replace=True)
    OmegaConf.register_new_resolver(
        "perfexp_training_batch", model_settings.training_batch, replace=True
    )


def plan_of(
    composed: DictConfig, choices: Mapping[str, Any], command: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the plan of a composed configuration as plain data; raises UserError if a required value is missing.

    Args:
        choices: option chosen in each group, from Hydra's runtime.
    """
    try:
        plain: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]
            composed, resolve=True, throw_on_missing=True, enum_to_str=True
        )
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        raise UserError(f"{key} is required; set {key}=VALUE.") from error
    written = set(targets(OmegaConf.to_container(composed, resolve=False)))
    if (made := set(targets(plain)) - written) or any("${" in target for _, target in written):
        raise UserError(
            f"_target_ is honored only if a file spells it out, not by interpolation: {sorted(made)}."
        )
    plain = credentials.hide(
        old_names.plan_of_today(plain, {text.lstrip("+~").partition("=")[0] for text in command})
    )
    plain.pop("cluster", None)
    groups = [field.name for field in fields(PlanSchema)]
    if plain["timeout_seconds"] == math.inf:
        plain["timeout_seconds"] = None
    model_settings.settle(plain)
    plain["choices"] = {group: str(choices[group]) for group in groups if choices.get(group)}
    plain["command"] = list(command)
    own = (
        [plain["model"]["config"]]
        if isinstance(plain["model"], dict) and isinstance(plain["model"].get("config"), str)
        else []
    )
    plain["sources"] = sources.hashes({target for _, target in targets(plain)}, map(Path, own))
    plain["format"] = FORMAT
    return plain


def typed(plain: Mapping[str, Any]) -> Plan:
    """Turn plain data into a Plan; raises UserError for an unknown key, or a value of the wrong type."""
    try:
        plan = OmegaConf.to_object(
            OmegaConf.unsafe_merge(OmegaConf.structured(PlanSchema), dict(plain))
        )
    except OmegaConfBaseException as error:
        raise UserError(f"The plan is not valid: {str(error).splitlines()[0]}.") from error
    assert isinstance(plan, PlanSchema)
    sizes, batch_sizes = parse_sizes(plan.input_size), parse_batch_sizes(plan.batch_size)
    return Plan(**vars(plan) | {"input_size": sizes, "batch_size": batch_sizes})


def cluster_of(composed: DictConfig) -> schema.Cluster:
    """Return the cluster of a composed configuration; raises UserError if it has none."""
    cluster = OmegaConf.to_object(composed.cluster) if composed.get("cluster") else None
    if not isinstance(cluster, schema.Cluster):
        raise UserError("hydra/launcher=slurm needs a site: set cluster=NAME.")
    return cluster


def build(node: Any, **extra: Any) -> Any:
    """Make the object of a node's `_target_`: the one place where configuration turns into code.

    Raises:
        UserError: the target cannot be imported, or refuses these arguments.
        MemoryError: the host's memory is not enough to load it.
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    if not target:
        raise UserError(
            f"A node of the configuration needs a _target_ that names its class; given: {node!r}."
        )
    try:
        return instantiate(dict(node), _convert_="all", **extra)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, PerfexpError):
            raise cause from error
        if is_out_of_host_memory(error):
            raise MemoryError(f"{target} can't be loaded: {cause}") from error
        raise UserError(f"{target} can't be built: {why_not_imported(error)}") from error


def locate(node: Mapping[str, Any]) -> Any:
    """Import the `_target_` of a node without calling it; raises UserError if that is impossible."""
    try:
        return get_object(node["_target_"])
    except Exception as error:
        raise UserError(
            f"{node['_target_']} can't be imported: {why_not_imported(error)}"
        ) from error


def imports(plain: Mapping[str, Any]) -> list[str] | None:
    """Return the modules of perfexp and of frameworks that a worker of a plan needs; None if it is not to be forked.

    The user's own are not among them: they may do anything when they are imported, and may have changed since then.
    """
    if plain["process_start"] != ProcessStart.forked:
        return None
    modules = ["perfexp.worker.entry", "perfexp.measuring.procedure"]
    if not str(plain["model"]["_target_"]).startswith("perfexp.models.fake."):
        modules += _OF_TORCH
    if ".timm_models." in str(plain["model"]["_target_"]):
        modules.append("timm")
    named = (
        target.rpartition(".")[0] for _, target in targets(plain) if target.startswith("perfexp.")
    )
    return list(dict.fromkeys([*modules, *named]))


def targets(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the value of each `_target_` in plain data."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, str(node["_target_"])
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from targets(value, f"{path}.{index}")
