"""Configuration: composed Hydra configuration to typed Plan, and its nodes to objects."""

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
from perfexp.measuring.profilers import Profiler
from perfexp.plan import largest_batch, model_settings, process_count, schema, sources
from perfexp.plan.hydra_errors import why_not_imported
from perfexp.plan.override_keys import key_of
from perfexp.plan.plan_fields import FORMAT, ConfigSchema, PlanSchema, ProcessStart
from perfexp.plan.sparse import Sparse
from perfexp.plan.speed_folder import default_folder
from perfexp.plan.sweep import ANCHORS, Oom, Sweep, shrunk, spread, timed_keys
from perfexp.records import old_names
from perfexp.records.record import LARGEST, Key, Point, Status, layers_key, without_replicate
from perfexp.records.sizes import Size, parse_batch_sizes, parse_sizes
from perfexp.timing.stopping import StoppingRule

#: Seconds before an energy window starts.
_PLATEAU_SECONDS = 1.5
#: Seconds of collective work besides timing, with several ranks.
_COLLECTIVE_SECONDS = 4.0
#: Modules that a worker with a torch model imports when it needs them.
_OF_TORCH = ("torch", "perfexp.models.module", "perfexp.devices.cuda")
#: Seconds per series with its share of the probes before it, if many points leave it ten samples:
#: measured on an H200, at calls of 2.3 to 3.3 ms.
_LEAST_SERIES_SECONDS = 0.25
#: Series per undisturbed call, with one clock or three.
_SYNCHRONOUS_SERIES, _ASYNCHRONOUS_SERIES = 1, 3


@dataclass(kw_only=True)
class Plan(PlanSchema):
    """The fully resolved configuration of one run.

    Attributes:
        input_size: (height, width) of each input size, in pixels; empty if the sweep chooses them.
        batch_size: batch sizes, in samples per call, `LARGEST` for max; empty if the sweep chooses
            them.
    """

    input_size: list[Size]
    batch_size: list[int]

    @property
    def model_name(self) -> str:
        """Return the model name in files and runs."""
        return self._name("model")

    @property
    def algorithm_name(self) -> str:
        """Return the algorithm name in files and runs."""
        return self._name("algorithm") + ("+layers" if self.algorithm.get("layers") else "")

    @property
    def gpu_name(self) -> str:
        """Return the device name in the configuration."""
        return self._name("gpu")

    @property
    def profiler_name(self) -> str:
        """Return the profiler name in the configuration."""
        return self._name("profiler")

    def _name(self, group: str) -> str:
        node = getattr(self, group)
        name = node.get("name") if isinstance(node, Mapping) else None
        return str(name or self.choices.get(group, group))

    @property
    def nodes(self) -> int:
        """Return the number of hosts that measure together."""
        nodes = self.gpu.get("nodes")
        if nodes is None:
            return 1
        return int(nodes)

    @property
    def devices(self) -> int:
        """Return the number of devices per host."""
        return int(self.gpu.get("count", 1))

    @property
    def ranks(self) -> int:
        """Return the number of processes, one per device, that measure together on all hosts."""
        return self.nodes * self.devices

    @property
    def least_processes(self) -> int:
        """Return the least number of timing processes: `processes`, or the stopping rule's number.

        Whole epochs, several ranks and profiled runs use one process by default.
        """
        if self.processes is not None:
            return self.processes
        if not self._repeats:
            return 1
        # as data: status counts the points of plans that are not trusted
        return int(self.stopping.get("processes", 1))

    @property
    def _repeats(self) -> bool:
        """Return whether several processes measure by default."""
        is_profiled = not self.profiler["_target_"].endswith(".NoProfiler")
        return not self.epochs and self.ranks == 1 and not is_profiled

    @property
    def is_adaptive(self) -> bool:
        """Return whether further processes are added until the times are precise enough."""
        if self.processes is not None or not self._repeats or self.seeks_batch:
            return False
        return 1 <= self.least_processes < int(self.stopping.get("most_processes") or 0)

    def processes_by(self, results: Collection[Point]) -> int:
        """Return the number of processes that measure the times, based on the results so far."""
        if not (self.is_adaptive and results):
            return self.least_processes

        state = frozenset((point.key, point.status) for point in results if point.key.is_timed)
        if state not in self._counts:
            pairs = {}
            for phase in self.phases:
                pairs[phase] = self._repeated(phase)
            keys = timed_keys(pairs, precision=self.precision.name, replicate=1)
            planned = set(map(without_replicate, keys))
            self._counts[state] = process_count.wanted(results, build(self.stopping), planned)
        return self._counts[state]

    @cached_property
    def _counts(self) -> dict[frozenset[tuple[Key, Status]], int]:
        """Return a cache: process counts by results, which take long to find."""
        return {}

    @property
    def phases(self) -> list[str]:
        """Return the phases to measure, training first."""
        return [phase for phase in ("train", "inference") if getattr(self.mode, phase) is not None]

    @cached_property
    def point_seconds(self) -> float | None:
        """Return the estimated mean time per timed point, over all processes.

        None if the settings do not limit it.
        """
        rule = self.stopping_rule
        longest = rule.longest_seconds()
        if longest is None or self.epochs:
            return None
        series_seconds = max(longest, _LEAST_SERIES_SECONDS)
        name = self.gpu.get("name")
        if name == "auto":
            name = auto.predicted_name(self.gpu.get("index") or 0)
        is_cpu = name == "cpu"
        takes_all = self.probes.call_times
        series = _ASYNCHRONOUS_SERIES if takes_all and not is_cpu else _SYNCHRONOUS_SERIES
        # processes after the first repeat the times only
        further = 0.0
        if self.probes.energy:
            further += (self.probes.energy_seconds or 1.0) + _PLATEAU_SECONDS
        if takes_all and (not is_cpu or "train" in self.phases):  # or the times as a graph
            further += series_seconds
        further = further * len(self.first_keys()) / len(self.timed_keys())
        ranks = _COLLECTIVE_SECONDS if self.ranks > 1 else 0.0
        return float(rule.settling_seconds + series * series_seconds + further + ranks)

    @cached_property
    def stopping_rule(self) -> StoppingRule:
        """Return the stopping rule for each point in a process."""
        rule: StoppingRule = build(self.stopping)
        return rule.shared_by(len(self.first_keys()))

    def config_dirs(self) -> list[Path]:
        """Return the folders that offer options to the plan: conf/, then any `--config-dir`."""
        folders = [conf_dir()]
        for text in self.command:
            if text.startswith("--config-dir="):
                folders.append(Path(text.removeprefix("--config-dir=")))
        return folders

    def sheet(self, product: str | None) -> tuple[str, gpu_sheets.GpuFacts]:
        """Return the GPU's name and facts.

        Without facts (gpu=auto), the file for this product supplies them, if there is one.
        """
        facts = gpu_sheets.GpuFacts.of_node(self.gpu.get("facts"))
        if facts == gpu_sheets.GpuFacts() and product is not None:
            files = gpu_sheets.read(self.config_dirs())
            if name := gpu_sheets.matching(files, product):
                return name, files[name].facts
        return self.gpu_name, facts

    @property
    def infers_trained(self) -> bool:
        """Return whether inference is measured with the weights from the run's training."""
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
        """Return whether points are chosen while others are measured."""
        return isinstance(self._sweep, Sparse)

    @property
    def shrinks(self) -> bool:
        """Return whether a smaller batch is measured if a batch did not fit."""
        return getattr(self._sweep, "oom", None) is Oom.shrink

    @property
    def scope(self) -> str:
        """Return the points that a sparse sweep covers, in words; empty for other sweeps."""
        sweep = self._sweep
        if not isinstance(sweep, Sparse):
            return ""
        most = total = 0
        for phase in self.phases:
            number = len(sweep.candidates(self.input_size, self._batch_sizes(phase)))
            total += number
            most += min(sweep.measured, number)
        return f"; then up to {most} of {total} points by their results, the others predicted"

    @property
    def traces_memory(self) -> bool:
        """Return whether points need their traced peak memory while they are measured."""
        return self.seeks_batch or getattr(self._sweep, "skip_oom", False)

    @property
    def seeks_batch(self) -> bool:
        """Return whether trials must find the largest batch that fits."""
        return any(LARGEST in self._batch_sizes(phase) for phase in self.phases)

    def timed_keys(self, results: Iterable[Point] = ()) -> list[Key]:
        """Return the timed points in measuring order, replicate by replicate.

        If inference uses the trained weights, only one process trains.

        Args:
            results: results so far. A sparse sweep, `oom=shrink` and the search for the largest
                batch choose further points from them.

        Raises:
            UserError: the settings clash.
        """
        results = list(results)
        keys = largest_batch.resolved(self._keys_of_sweep(results), results)
        if self.shrinks:
            keys = [*keys, *shrunk(results)]
        return list(dict.fromkeys(keys))

    def trial_keys(self, results: Collection[Point]) -> list[Key]:
        """Return the due trials of whether a batch fits; see `largest_batch.trial_keys`."""
        keys = self._keys_of_sweep(results) if self.seeks_batch else ()
        return largest_batch.trial_keys(keys, results)

    def _keys_of_sweep(self, results: Collection[Point]) -> list[Key]:
        """Return the sweep's timed points; the largest batch appears as `LARGEST`."""
        sweep = self._sweep
        sizes = {phase: (self.input_size, self._batch_sizes(phase)) for phase in self.phases}
        pairs = {}
        chosen = {}
        for phase, of in sizes.items():
            pairs[phase] = self._repeated(phase)
            if isinstance(sweep, Sparse):  # phases with the same sizes and batches choose together
                same = [one for one in results if sizes.get(one.key.phase) == of]
                chosen[phase] = sweep.chosen(*of, same)
                pairs[phase] = [pair for pair in pairs[phase] if pair in chosen[phase]]
        keys = timed_keys(
            pairs,
            chosen=chosen,
            precision=self.precision.name,
            replicate=self.processes_by(results),
        )
        if not self.infers_trained:
            return list(keys)
        return [key for key in keys if not (key.replicate and key.phase == "train")]

    def _repeated(self, phase: str) -> list[tuple[Size, int]]:
        """Return the points that every process measures."""
        of = self.input_size, self._batch_sizes(phase)
        if isinstance(self._sweep, Sparse):
            return self._sweep.anchors(*of)
        return self._sweep.points(*of)

    def anchors(self, results: Collection[Point]) -> list[tuple[Size, int]]:
        """Return the points with the extra passes; for `results` see `fixed_keys`."""
        if self.is_sparse:
            return [pair for phase in self.phases for pair in self._repeated(phase)]
        keys = self.fixed_keys(results)
        return spread({(key.input_size, key.batch_size) for key in keys}, ANCHORS)

    def _batch_sizes(self, phase: str) -> list[int]:
        """Return a phase's batch sizes: its own, or the plan's."""
        own = getattr(self.mode, phase).get("batch_size")
        if own is None:
            return self.batch_size
        return parse_batch_sizes(own)

    def fixed_keys(self, results: Collection[Point]) -> list[Key]:
        """Return the timed points that no other results change, except for the largest batch."""
        return self.timed_keys(results if self.seeks_batch else ())

    def first_prediction_keys(self, results: Collection[Point] = ()) -> list[Key]:
        """Return the cold starts: the first inference in each replicate that the plan names."""
        first: dict[int, Key] = {}
        if not self.cold_start:
            return []
        for key in self.fixed_keys(results):
            if key.phase == "inference" and not (self.processes is None and key.replicate):
                first.setdefault(
                    key.replicate,
                    Key(
                        phase="ttfp",
                        input_size=key.input_size,
                        batch_size=key.batch_size,
                        precision=key.precision,
                        replicate=key.replicate,
                    ),
                )
        return list(first.values())

    def first_keys(self, results: Iterable[Point] = ()) -> list[Key]:
        """Return the timed points of the first replicate; for `results` see `timed_keys`."""
        return [key for key in self.timed_keys(results) if not key.replicate]

    def layer_keys(self, results: Iterable[Point] = ()) -> list[Key]:
        """Return the points with timed layers, in the first replicate.

        For `results` see `timed_keys`.
        """
        if not self.probes.layers:
            return []
        keys = self.first_keys(results)
        if isinstance(self._sweep, Sparse):
            chosen = self._sweep.with_layers({(key.input_size, key.batch_size) for key in keys})
            keys = [key for key in keys if (key.input_size, key.batch_size) in chosen]
        return list(map(layers_key, keys))

    def profile_keys(self, results: Collection[Point] = ()) -> list[Key]:
        """Return the profiles to make after timing."""
        return self._profiler.chosen(self.fixed_keys(results))

    def keys(self, results: Collection[Point] = ()) -> list[Key]:
        """Return all points; only profiles if the profiler just marks calls.

        For `results` see `timed_keys`.
        """
        if not self._profiler.times:
            return self.profile_keys(results)
        return [
            *self.timed_keys(results),
            *self.first_prediction_keys(results),
            *self.layer_keys(results),
            *self.profile_keys(results),
        ]


def register(scratch: Path | None = None, models: Mapping[str, Any] | None = None) -> None:
    """Register with Hydra the schemas, models without a file, and the resolvers."""
    store = ConfigStore.instance()
    store.store(group="schema", name="plan", node=ConfigSchema)
    for name, node in schema.settings().items():
        group, _, option = f"schema/{name}".rpartition("/")
        store.store(group=group, name=option, node=schema.with_earlier_names(name, node))
    for model, node in (models or {}).items():
        store.store(group="model", name=model, node=node)
    OmegaConf.register_new_resolver("perfexp_scratch", lambda: str(scratch), replace=True)
    OmegaConf.register_new_resolver("perfexp_speed_dir", default_folder, replace=True)
    OmegaConf.register_new_resolver(
        "perfexp_training_batch", model_settings.training_batch, replace=True
    )


def plan_of(
    composed: DictConfig, choices: Mapping[str, Any], command: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the plan in a composed configuration as plain data.

    Args:
        choices: option chosen in each group, from Hydra's runtime.

    Raises:
        UserError: a required value is missing.
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
            "_target_ is honored only if a file spells it out, not by interpolation: "
            f"{sorted(made)}."
        )
    plain = credentials.hide(old_names.plan_of_today(plain, set(map(key_of, command))))
    plain.pop("cluster", None)
    groups = [field.name for field in fields(PlanSchema)]
    if plain["timeout_seconds"] == math.inf:
        plain["timeout_seconds"] = None
    model_settings.settle(plain)
    plain["choices"] = {group: str(choices[group]) for group in groups if choices.get(group)}
    plain["command"] = list(command)
    model = plain["model"]
    own = []
    if isinstance(model, dict) and isinstance(model.get("config"), str):
        own.append(Path(model["config"]))
    plain["sources"] = sources.hashes({target for _, target in targets(plain)}, own)
    plain["format"] = FORMAT
    return plain


def typed(plain: Mapping[str, Any]) -> Plan:
    """Turn plain data into a Plan.

    Raises:
        UserError: a key is unknown, or a value has the wrong type.
    """
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
    """Return the cluster in a composed configuration.

    Raises:
        UserError: there is none.
    """
    cluster = OmegaConf.to_object(composed.cluster) if composed.get("cluster") else None
    if not isinstance(cluster, schema.Cluster):
        raise UserError("hydra/launcher=slurm needs a site: set cluster=NAME.")
    return cluster


def build(node: Any, **extra: Any) -> Any:
    """Make the object that a node's `_target_` names; only here configuration becomes code.

    Raises:
        UserError: the target cannot be imported, or refuses these arguments.
        MemoryError: the host has too little memory to load it.
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
    """Import a node's `_target_` without calling it.

    Raises:
        UserError: the target cannot be imported.
    """
    try:
        return get_object(node["_target_"])
    except Exception as error:
        raise UserError(
            f"{node['_target_']} can't be imported: {why_not_imported(error)}"
        ) from error


def imports(plain: Mapping[str, Any]) -> list[str] | None:
    """Return the perfexp and framework modules that a plan's worker needs; None without a fork.

    The user's own modules are left out: importing them may do anything, and they may have changed
    since.
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
    """Yield the dotted path and value for each `_target_` in plain data."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, str(node["_target_"])
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from targets(value, f"{path}.{index}")
