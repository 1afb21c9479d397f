"""Turn a composed Hydra configuration into a typed Plan, and its nodes into objects.

A *node* is a mapping whose `_target_` names a class; `build` makes the object. A *key* is the
identity of one point to measure: phase, input size, batch size, precision and replicate. The driver
and the worker ask a plan for its keys, given the results so far.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from perfexp.devices import auto
from perfexp.errors import PerfexpError, UserError, is_out_of_host_memory, line_of
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

#: Seconds under load before an energy window starts.
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
    def device_kind(self) -> str:
        """Return the kind of the device, such as `cpu`, or `auto`."""
        kind: str = self.gpu["_target_"].split(".")[-2]  # of perfexp.devices.KIND.open_device
        return kind

    @property
    def profiler_name(self) -> str:
        """Return the profiler name in the configuration."""
        return self._name("profiler")

    def _name(self, group: str) -> str:
        """Return a node's name, or else the option that was chosen for its group."""
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

    def for_process(self, replicate: int) -> Plan:
        """Return the plan for one process; its seed is different for training to a target accuracy.

        The time to an accuracy depends on the seed, so processes show how it varies. Other
        measurements repeat the same work.
        """
        train = self.mode.train
        if isinstance(train, Mapping) and train.get("target_accuracy"):
            return replace(self, seed=self.seed + replicate)
        return self

    @property
    def _repeats(self) -> bool:
        """Return whether several processes measure by default."""
        is_profiled = not self.profiler["_target_"].endswith(".NoProfiler")
        return not self.epochs and self.ranks == 1 and not is_profiled

    @property
    def is_adaptive(self) -> bool:
        """Return whether further processes are added until the times are precise enough.

        The stopping rule allows it with `most_processes`.
        """
        if self.processes is not None or not self._repeats or self.seeks_batch:
            return False
        return 1 <= self.least_processes < int(self.stopping.get("most_processes") or 0)

    def processes_by(self, results: Collection[Point]) -> int:
        """Return the number of processes that measure the times, based on the results so far.

        The driver asks again after each process; see `process_count.wanted`.
        """
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
        """Return a cache of process counts by results, since they take long to compute."""
        return {}

    @property
    def phases(self) -> list[str]:
        """Return the phases to measure, training first."""
        return [phase for phase in ("train", "inference") if getattr(self.mode, phase) is not None]

    @cached_property
    def point_seconds(self) -> float | None:
        """Return the estimated mean time per timed point, over all processes, in seconds.

        Status and progress use it. None if the settings do not limit the time.
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
        num_series = _ASYNCHRONOUS_SERIES if takes_all and not is_cpu else _SYNCHRONOUS_SERIES
        # processes after the first leave out these passes
        first_only, first_keys = 0.0, self.first_keys()
        # a further series for the phases of a training step, or for a graph on a GPU
        if takes_all and (not is_cpu or "train" in self.phases):
            first_only += series_seconds * len(first_keys)
        if self.probes.energy:
            energy_seconds = (self.probes.energy_seconds or 1.0) + _PLATEAU_SECONDS
            pairs = [(key.input_size, key.batch_size) for key in first_keys]
            if self.is_sparse:  # energies at a few points predict the others
                anchors = self.anchors(())
                pairs = [pair for pair in pairs if pair in anchors]
            first_only += energy_seconds * len(pairs)
        first_only /= len(self.timed_keys())
        ranks = _COLLECTIVE_SECONDS if self.ranks > 1 else 0.0
        return float(rule.settling_seconds + num_series * series_seconds + first_only + ranks)

    @cached_property
    def stopping_rule(self) -> StoppingRule:
        """Return the stopping rule for each point in a process, with its share of the budget."""
        rule: StoppingRule = build(self.stopping)
        return rule.shared_by(len(self.first_keys()))

    def config_dirs(self) -> list[Path]:
        """Return the folders that offer options to the plan: conf/, then any `--config-dir`.

        Data sheets of GPUs are searched there.
        """
        folders = [conf_dir()]
        for text in self.command:
            if text.startswith("--config-dir="):
                folders.append(Path(text.removeprefix("--config-dir=")))
        return folders

    def sheet(self, product: str | None) -> tuple[str, gpu_sheets.GpuFacts]:
        """Return the GPU's name in conf/gpu and its facts.

        Without facts in the plan (gpu=auto), the file that matches this product supplies them.

        Args:
            product: device name as the driver has it; None if unknown.
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
        sweep: Sweep = build(self.sweep)
        return sweep

    @cached_property
    def _profiler(self) -> Profiler:
        profiler: Profiler = build(self.profiler)
        return profiler

    @property
    def is_sparse(self) -> bool:
        """Return whether the sweep measures some points and predicts others (`sweep=sparse`)."""
        return isinstance(self._sweep, Sparse)

    @property
    def shrinks(self) -> bool:
        """Return whether a smaller batch is measured where one did not fit (`sweep.oom=shrink`)."""
        return getattr(self._sweep, "oom", None) is Oom.shrink

    @property
    def scope(self) -> str:
        """Return the points that a sparse sweep covers, as words for the progress line.

        Empty for other sweeps.
        """
        sweep = self._sweep
        if not isinstance(sweep, Sparse):
            return ""
        most_measured = total = 0
        for phase in self.phases:
            number = len(sweep.candidates(self.input_size, self._batch_sizes(phase)))
            total += number
            most_measured += min(sweep.measured, number)
        return (
            f"; then up to {most_measured} of {total} points by their results, the others predicted"
        )

    @property
    def traces_memory(self) -> bool:
        """Return whether points need their traced peak memory while they are measured."""
        return self.seeks_batch or getattr(self._sweep, "skip_oom", False)

    @property
    def seeks_batch(self) -> bool:
        """Return whether trials must find the largest batch that fits (`batch_size=max`)."""
        return any(LARGEST in self._batch_sizes(phase) for phase in self.phases)

    def timed_keys(self, results: Iterable[Point] = ()) -> list[Key]:
        """Return the timed points in measuring order, replicate by replicate.

        If inference uses the trained weights, only one process trains. The driver and the worker
        ask for them before each further process.

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
        """Return the trials that are due to find the largest batch.

        See `largest_batch.trial_keys`.
        """
        keys = self._keys_of_sweep(results) if self.seeks_batch else ()
        return largest_batch.trial_keys(keys, results)

    def _keys_of_sweep(self, results: Collection[Point]) -> list[Key]:
        """Return the sweep's timed points; the largest batch appears as `LARGEST`.

        Args:
            results: results so far, for the number of processes and the points of a sparse sweep.
        """
        sweep = self._sweep
        sizes = {phase: (self.input_size, self._batch_sizes(phase)) for phase in self.phases}
        pairs = {}
        chosen = {}
        for phase, own_sizes in sizes.items():
            pairs[phase] = self._repeated(phase)
            if isinstance(sweep, Sparse):  # phases with the same sizes and batches choose together
                same = [point for point in results if sizes.get(point.key.phase) == own_sizes]
                chosen[phase] = sweep.chosen(*own_sizes, same)
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
        sizes = self.input_size, self._batch_sizes(phase)
        if isinstance(self._sweep, Sparse):
            return self._sweep.anchors(*sizes)
        return self._sweep.points(*sizes)

    def anchors(self, results: Collection[Point]) -> list[tuple[Size, int]]:
        """Return the points with the extra passes; for `results` see `fixed_keys`."""
        if self.is_sparse:
            return [pair for phase in self.phases for pair in self._repeated(phase)]
        keys = self.fixed_keys(results)
        return spread({(key.input_size, key.batch_size) for key in keys}, ANCHORS)

    def _batch_sizes(self, phase: str) -> list[int]:
        """Return a phase's batch sizes: its own, or the plan's."""
        batch_text = getattr(self.mode, phase).get("batch_size")
        if batch_text is None:
            return self.batch_size
        return parse_batch_sizes(batch_text)

    def fixed_keys(self, results: Collection[Point]) -> list[Key]:
        """Return the timed points that do not depend on results, except for the largest batch."""
        return self.timed_keys(results if self.seeks_batch else ())

    def first_prediction_keys(self, results: Collection[Point] = ()) -> list[Key]:
        """Return the cold starts to measure: the first inference of a fresh process.

        There is one per replicate that the plan itself sets, none without `cold_start`.
        """
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

        For `results` see `timed_keys`. They are measured after the times.
        """
        if not self.probes.layers:
            return []
        keys = self.first_keys(results)
        if isinstance(self._sweep, Sparse):
            chosen = self._sweep.with_layers({(key.input_size, key.batch_size) for key in keys})
            keys = [key for key in keys if (key.input_size, key.batch_size) in chosen]
        return list(map(layers_key, keys))

    def profile_keys(self, results: Collection[Point] = ()) -> list[Key]:
        """Return the points to profile after timing, as the profiler chooses them.

        Each is measured in its own process, under the profiler.
        """
        return self._profiler.chosen(self.fixed_keys(results))

    def keys(self, results: Collection[Point] = ()) -> list[Key]:
        """Return all points; only those to profile if the profiler just marks calls (`nvtx`).

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
    """Register with Hydra the schemas, models without a file, and the resolvers.

    `cli.composition` calls it before Hydra starts.

    Args:
        scratch: folder for Hydra's own output, `${perfexp_scratch:}` in conf/.
        models: nodes of the user's or a library's models, by option name.
    """
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

    Interpolations are resolved, old key names replaced, credentials masked, and hashes of the
    user's code added.

    Args:
        choices: option chosen in each group, from Hydra's runtime.
        command: overrides as typed.

    Raises:
        UserError: a required value is missing, or a `_target_` comes from an interpolation.
    """
    try:
        plain: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]
            composed, resolve=True, throw_on_missing=True, enum_to_str=True
        )
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        raise UserError(f"{key} is required; set {key}=VALUE.") from error
    written = set(targets(OmegaConf.to_container(composed, resolve=False)))
    # otherwise an override could choose code through a key that looks harmless
    computed = set(targets(plain)) - written
    if computed or any("${" in target for _, target in written):
        raise UserError(
            "_target_ is honored only if a file spells it out, not by interpolation: "
            f"{sorted(computed)}."
        )
    plain = credentials.hide(old_names.plan_of_today(plain, set(map(key_of, command))))
    plain.pop("cluster", None)
    groups = [field.name for field in fields(PlanSchema)]
    if plain["timeout_seconds"] == math.inf:  # which JSON does not have
        plain["timeout_seconds"] = None
    model_settings.settle(plain)
    plain["choices"] = {group: str(choices[group]) for group in groups if choices.get(group)}
    plain["command"] = list(command)
    is_sparse = plain["sweep"]["_target_"] == schema.TARGETS["sweep/sparse"]
    if is_sparse and choices.get("algorithm") != "default":  # one per model is enough, unless typed
        plain["cold_start"] &= "cold_start" in map(key_of, command)
    model = plain["model"]
    config_files = []
    if isinstance(model, dict) and isinstance(model.get("config"), str):
        config_files.append(Path(model["config"]))
    plain["sources"] = sources.hashes({target for _, target in targets(plain)}, config_files)
    plain["format"] = FORMAT
    return plain


def typed(plain: Mapping[str, Any]) -> Plan:
    """Turn a plan as plain data into a Plan; sizes and batch sizes are parsed.

    Each command that needs a plan's properties calls it after composing.

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

    `hydra/launcher=slurm` submits its jobs by it.

    Raises:
        UserError: there is none.
    """
    cluster = OmegaConf.to_object(composed.cluster) if composed.get("cluster") else None
    if not isinstance(cluster, schema.Cluster):
        raise UserError("hydra/launcher=slurm needs a site: set cluster=NAME.")
    return cluster


def build(node: Any, **extra: Any) -> Any:
    """Make the object that a node's `_target_` names. Only here does configuration become code.

    Most callers are in the worker.

    Args:
        extra: further keyword arguments.

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
        why = f"{why_not_imported(error)}{line_of(cause)}"
        raise UserError(f"{target} can't be built: {why}") from error


def locate(node: Mapping[str, Any]) -> Any:
    """Import the class that a node's `_target_` names, without calling it.

    Only its class is compared, for example to recognize the scripted model.

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
    """Return the modules that the fork server imports for a plan's worker; None to fork none.

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
    """Yield the dotted path and value for each `_target_` in plain data.

    Code that a plan selects is hashed, imported or refused by them.
    """
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, str(node["_target_"])
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from targets(value, f"{path}.{index}")
