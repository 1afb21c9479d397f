"""Configuration: where conf/ is, and the plan that becomes of a composition."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from perfexp.devices import Cache
from perfexp.errors import PerfexpError, UserError, is_out_of_host_memory
from perfexp.host import credentials, untrusted
from perfexp.host.installation import conf_dir
from perfexp.models import Execution, Precision
from perfexp.plan.schema import SETTINGS, ModeSettings
from perfexp.profilers import Profiler
from perfexp.records.record import Key, layers_key
from perfexp.sweep import timed_keys

#: Keys of a plan that say where output goes, how it looks and who looks on afterwards, not what is measured.
NOT_MEASURED = (
    "profiler",
    "output_dir",
    "speed_dir",
    "stage",
    "tracking",
    "quiet",
    "choices",
    "command",
    "uid",
    "timeout_seconds",
    "device_lock",
)


#: Characters of a value that are shown where two plans differ.
_LONGEST = 200


class _Dumper(yaml.SafeDumper):
    """Writes equal lists out each time: aliases are refused where a plan is read."""

    def ignore_aliases(self, data: Any) -> bool:
        """See `yaml.SafeDumper`."""
        return True


class DeviceLock(StrEnum):
    """What happens where another process measures on the device: this one waits for it, or is refused."""

    wait = "wait"
    fail = "fail"


@dataclass(kw_only=True)
class Probes:
    """What is found out beside the times.

    `work` are MACs, FLOPs and bytes of a call, counted without the device. `energy` is measured in a window of its own,
    of at least `energy_seconds` (by default 1 s, or 5 s where the times are to be good to 0.5 %). `ceilings` are the
    rates that the device itself reaches by matrix products and copies, measured once and kept in the user's cache.
    `layers` are where the time of a call goes, from a process of its own. `scaling` compares several ranks with one.
    """

    work: bool = True
    energy: bool = False
    energy_seconds: float | None = None
    ceilings: bool = False
    layers: bool = False
    scaling: bool = False


@dataclass(kw_only=True)
class Plan:
    """The fully resolved configuration of one run. Nodes that select code are mappings with a `_target_`.

    `choices` are the names of the options that were taken from the groups, `command` the overrides that were typed,
    `uid` the identity of the run, which the manifest of its folder repeats.
    """

    model: Any = MISSING
    algorithm: Any = MISSING
    gpu: Any = MISSING
    mode: ModeSettings = field(default_factory=ModeSettings)
    profiler: Any = field(default_factory=lambda: {"_target_": "perfexp.profilers.NoProfiler", "name": "none"})
    precision: Precision = MISSING
    execution: Execution = field(default_factory=Execution)
    data: Any = MISSING
    stopping: Any = MISSING
    sweep: Any = MISSING
    tracking: Any = MISSING
    probe: dict[str, Any] = field(default_factory=dict)
    probes: Probes = field(default_factory=Probes)
    input_size: Any = 224
    batch_size: Any = 1
    percentiles: list[float] = field(default_factory=lambda: [50.0, 95.0, 99.0])
    replicate: int = 1
    ttfp: bool = True
    epochs: int | None = None
    cache: Cache = Cache.warm
    seed: int = 0
    timeout_seconds: float | None = 3600.0
    device_lock: DeviceLock = DeviceLock.wait
    output_dir: str | None = None
    speed_dir: str | None = None
    stage: str | None = None
    quiet: bool = False
    choices: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    uid: str | None = None

    @property
    def model_name(self) -> str:
        """What the model is called in names of files and runs."""
        return _name(self.model, self.choices.get("model", "model"))

    @property
    def algorithm_name(self) -> str:
        """What the algorithm is called in names of files and runs."""
        name = _name(self.algorithm, self.choices.get("algorithm", "algorithm"))
        return f"{name}+layers" if self.algorithm.get("layers") else name

    @property
    def gpu_name(self) -> str:
        """What the device is called in the configuration."""
        return _name(self.gpu, self.choices.get("gpu", "gpu"))

    @property
    def profiler_name(self) -> str:
        """What the profiler is called in the configuration."""
        return _name(self.profiler, self.choices.get("profiler", "profiler"))

    @property
    def ranks(self) -> int:
        """Processes with a device each that measure together."""
        return int(self.gpu.get("count", 1))

    @property
    def phases(self) -> list[str]:
        """The phases of each point, training first."""
        return [phase for phase in ("train", "inference") if getattr(self.mode, phase) is not None]

    def timed_keys(self) -> list[Key]:
        """The points that are timed, in order: replicate by replicate.

        Raises:
            UserError: the settings contradict one another.
        """
        return timed_keys(
            build(self.sweep),
            self.input_size,
            self.batch_size,
            phases=self.phases,
            precision=self.precision.name,
            replicate=self.replicate,
        )

    def config_dirs(self) -> list[Path]:
        """The folders whose options a plan may have: conf/, and those that the command names."""
        named = [text.partition("=")[2] for text in self.command if text.startswith("--config-dir=")]
        return [conf_dir(), *map(Path, named)]

    def first_prediction_keys(self) -> list[Key]:
        """The points whose time to first prediction is taken: the first inference of each replicate."""
        if not self.ttfp or "inference" not in self.phases:
            return []
        first: dict[int, Key] = {}
        for key in self.timed_keys():
            if key.phase == "inference":
                first.setdefault(key.replicate, key)
        return [
            Key(phase="ttfp", input_size=k.input_size, batch_size=k.batch_size, precision=k.precision, replicate=r)
            for r, k in first.items()
        ]

    def layer_keys(self) -> list[Key]:
        """The points whose layers are looked into: each timed one of the first replicate."""
        return [layers_key(key) for key in self.timed_keys() if self.probes.layers and key.replicate == 0]

    def keys(self) -> list[Key]:
        """Everything that is measured: all of the above, and the profiles; these alone where a call is only marked."""
        profiler: Profiler = build(self.profiler)
        timed = [*self.timed_keys(), *self.first_prediction_keys(), *self.layer_keys()] if profiler.times else []
        return [*timed, *self.profile_keys()]

    def profile_keys(self) -> list[Key]:
        """The profiles that are made once everything has been timed."""
        profiler: Profiler = build(self.profiler)
        return profiler.chosen(self.timed_keys())


def register(scratch: Path | None = None) -> None:
    """Make the schemas known to Hydra, and the one resolver that config.yaml uses.

    Args:
        scratch: an empty folder for what Hydra writes by itself; none is needed for composing.
    """
    store = ConfigStore.instance()
    store.store(group="schema", name="plan", node=Plan)
    for group, name, node in SETTINGS:
        store.store(group=group, name=name, node=node)
    OmegaConf.register_new_resolver("perfexp_scratch", lambda: str(scratch), replace=True)


def plan_of(composed: DictConfig, choices: Mapping[str, Any], command: Sequence[str] = ()) -> dict[str, Any]:
    """The plan as plain data.

    Args:
        composed: what Hydra composed.
        choices: option taken from each group, as Hydra's runtime tells.
        command: the overrides that were typed.

    Raises:
        UserError: a value that has no default is missing.
    """
    try:
        plain: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]
            composed, resolve=True, throw_on_missing=True, enum_to_str=True
        )
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        raise UserError(f"{key} has no default: say {key}=VALUE.") from error
    written = set(targets(OmegaConf.to_container(composed, resolve=False)))
    if (made := set(targets(plain)) - written) or any("${" in target for _, target in written):
        raise UserError(
            f"A _target_ is honoured only where a file writes it out, not by interpolation: {sorted(made)}."
        )
    plain = credentials.hide(plain)
    groups = [field.name for field in fields(Plan)]
    if plain["timeout_seconds"] == math.inf:
        plain["timeout_seconds"] = None
    plain["choices"] = {group: str(choices[group]) for group in groups if choices.get(group)}
    plain["command"] = list(command)
    return plain


def typed(plain: Mapping[str, Any]) -> Plan:
    """Plain data as a Plan.

    Args:
        plain: what `plan_of` or a plan.yaml gives.

    Raises:
        UserError: a key is unknown, or a value has the wrong type.
    """
    try:
        plan = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Plan), dict(plain)))
    except OmegaConfBaseException as error:
        raise UserError(f"The plan is not valid: {str(error).splitlines()[0]}.") from error
    assert isinstance(plan, Plan)
    return plan


def to_yaml(plain: Mapping[str, Any]) -> bytes:
    """A plan as YAML, in the order of the schema.

    Args:
        plain: what `plan_of` gives.
    """
    return yaml.dump(dict(plain), Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode()


def without_credentials(content: bytes) -> bytes:
    """YAML that Hydra wrote, with its credentials taken out; empty where it cannot be read.

    Args:
        content: the content of a multirun.yaml.
    """
    try:
        return to_yaml(credentials.hide(untrusted.yaml_data(content)))
    except (ValueError, TypeError):
        return b""


def load(path: Path, sha256: str) -> Plan:
    """Read a plan.yaml for running it.

    Args:
        path: the file.
        sha256: of its bytes, as the parent process handed it over: code is run only as the parent composed it.

    Raises:
        UserError: the file is another one.
    """
    content = untrusted.read_bytes(path)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} is not the plan that was composed; start the run again.")
    return typed(yaml.safe_load(content))


def read(path: Path) -> dict[str, Any]:
    """A plan.yaml as plain data, for comparing; nothing in it is run.

    Args:
        path: the file.

    Raises:
        UserError: it can't be read.
    """
    try:
        plain = untrusted.yaml_data(untrusted.read_bytes(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read as a plan: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be read as a plan: {error}.") from error
    if not isinstance(plain, dict):
        raise UserError(f"{path} is not a plan.")
    return plain


def plan_hash(plain: Mapping[str, Any]) -> str:
    """SHA-256 of what a plan measures; where output, tracking and console go is left out.

    Args:
        plain: what `plan_of` gives.
    """
    measured = {key: value for key, value in plain.items() if key not in NOT_MEASURED}
    return hashlib.sha256(json.dumps(measured, sort_keys=True, default=str).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Dotted keys in which two plans measure different things, with both values.

    Args:
        old: a plan as plain data.
        new: another one.
    """
    before, after = _flat(old), _flat(new)
    return [
        f"{key}: {str(before.get(key, '–'))[:_LONGEST]} → {str(after.get(key, '–'))[:_LONGEST]}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key.split(".")[0] not in NOT_MEASURED
    ]


def build(node: Any, **extra: Any) -> Any:
    """Make the object that a node's `_target_` names: the one place where configuration turns into code.

    Args:
        node: a mapping with a `_target_` and its keyword arguments.
        extra: further keyword arguments.

    Raises:
        UserError: the target can't be found, or does not take these arguments.
        MemoryError: the host's memory is not enough to load it.
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    if not target:
        raise UserError(f"A node of the configuration needs a _target_ that names its class; given: {node!r}.")
    try:
        return instantiate(dict(node), _convert_="all", **extra)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, PerfexpError):
            raise cause from error
        if is_out_of_host_memory(error):
            raise MemoryError(f"{target} can't be loaded: {cause}") from error
        raise UserError(f"{target} can't be built: {cause}") from error


def locate(node: Mapping[str, Any]) -> Any:
    """Import what a node's `_target_` names without making it.

    Args:
        node: a mapping with a `_target_`.

    Raises:
        UserError: there is no such thing.
    """
    try:
        return get_object(node["_target_"])
    except Exception as error:
        raise UserError(f"{node['_target_']} can't be imported: {error}") from error


def _name(node: Any, choice: str) -> str:
    name = node.get("name") if isinstance(node, Mapping) else None
    return str(name or choice)


def targets(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Where plain data chooses code, and which.

    Args:
        node: a part of a plan or of a configuration file.
        path: dotted path of the node.
    """
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, str(node["_target_"])
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from targets(value, f"{path}.{index}")


def _flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
