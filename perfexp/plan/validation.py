"""Refuse plans that are visibly impossible, before anything starts.

`check` runs in the parent process on every composed plan, on any machine. `prerequisites` checks
this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfexp.devices import Cache
from perfexp.errors import UserError, did_you_mean
from perfexp.models import mmseg_names
from perfexp.plan import config
from perfexp.plan.speed_folder import refuse_no_folder

#: Modes of torch.compile.
_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: Limits beyond any real measurement.
_MOST_SECONDS = 1_000_000_000
_MOST_EPOCHS = 1_000_000
_MOST_THREADS = 4096
_MOST_DEVICES = 1024
#: Limit for torch's generators; batches add to the seed.
_MOST_SEED = 2**63 - 1
#: A percentile closer to 0 or 100 needs more samples than a point can have.
_LEAST_PERCENTILE = 0.001


def check(plan: config.Plan) -> None:
    """Raise `UserError` for a plan with impossible settings, alone or combined.

    `main` calls it for each composed run.
    """
    if not plan.phases:
        raise UserError("mode measures nothing: choose mode=train, inference or train_inference.")
    for phase in plan.phases:
        if not isinstance(getattr(plan.mode, phase), Mapping):
            raise UserError(
                f"mode.{phase}: set mode.{phase}.KEY=VALUE; perfexp help mode lists its keys."
            )
    _check_numbers(plan)
    if plan.epochs is not None and "train" not in plan.phases:
        raise UserError(f"epochs={plan.epochs} is for training: add mode=train.")
    if plan.epochs is not None and _is_endless(plan.data):
        raise UserError(
            f"epochs={plan.epochs} needs data with an end, and data=synthetic has none: "
            "set the samples of an epoch (data.num_samples=10000), "
            "or a data set (data=images, data=cifar10)."
        )
    nodes = [getattr(plan.mode, phase) for phase in plan.phases]
    phases_set_batch = all(node.get("batch_size") is not None for node in nodes)
    if phases_set_batch and plan.batch_size not in ([], [1]):  # [1] is the default
        sizes = ",".join(str(size or "max") for size in plan.batch_size)
        raise UserError(
            f"batch_size=[{sizes}] would be used by no phase: set mode.train.batch_size and "
            "mode.inference.batch_size, or leave one of them null."
        )
    if plan.execution.cuda_graph and plan.cache is not Cache.warm:
        raise UserError(
            f"cache={plan.cache} needs separate calls, which execution.cuda_graph=true fuses."
        )
    if plan.execution.compile not in (None, *_COMPILE_MODES):
        hint = did_you_mean(plan.execution.compile, _COMPILE_MODES)
        raise UserError(
            f"execution.compile={plan.execution.compile}: torch.compile has no such mode. {hint}"
        )
    if plan.gpu_name in ("cpu", "mps") and plan.gpu.get("index"):
        raise UserError(
            f"gpu.index={plan.gpu['index']} chooses among GPUs, and gpu={plan.gpu_name} is one: "
            "leave it out."
        )
    if plan.speed_dir:
        refuse_no_folder(Path(plan.speed_dir).expanduser(), "choose another speed_dir=DIR.")
    mmseg_names.check(plan.model)
    _check_training(plan)
    _check_ranks(plan)
    _check_largest_batch(plan)
    # these raise for settings that contradict each other
    plan.profile_keys()
    config.build(plan.stopping)
    config.build(plan.tracking)


def _check_numbers(plan: config.Plan) -> None:
    """Raise `UserError` for numbers that cannot be measured, computed or written, such as nan."""
    if plan.processes is not None and plan.processes < 1:
        raise UserError(
            f"processes={plan.processes}: set at least 1 process, "
            "or null for the stopping rule's number."
        )
    for percentile in plan.percentiles:
        if not _LEAST_PERCENTILE <= percentile <= 100 - _LEAST_PERCENTILE:
            raise UserError(
                f"percentiles={plan.percentiles}: set numbers between 0 and 100, "
                f"at least {_LEAST_PERCENTILE:g} away from both."
            )
    timeout = plan.tracking.get("request_timeout_seconds")
    for key, seconds, otherwise in (
        ("timeout_seconds", plan.timeout_seconds, "or null for none"),
        ("probes.energy_seconds", plan.probes.energy_seconds, "or null"),
        ("tracking.request_timeout_seconds", timeout, "or leave it out"),
    ):
        if seconds is not None and not (
            isinstance(seconds, int | float) and 0 < seconds <= _MOST_SECONDS
        ):
            number_text = f"{seconds:g}" if isinstance(seconds, float) else seconds
            raise UserError(
                f"{key}={number_text}: set a positive time of at most {_MOST_SECONDS:,} s, "
                f"{otherwise}."
            )
    for key, value, least, most in (
        ("seed", plan.seed, 0, _MOST_SEED),
        ("epochs", plan.epochs, 1, _MOST_EPOCHS),
        ("execution.threads", plan.execution.threads, 1, _MOST_THREADS),
        ("execution.interop_threads", plan.execution.interop_threads, 1, _MOST_THREADS),
        ("gpu.index", plan.gpu.get("index"), 0, _MOST_DEVICES),
    ):
        if value is not None and not (isinstance(value, int) and least <= value <= most):
            raise UserError(f"{key}={value}: set an integer from {least} to {most:,}.")


def _is_endless(data: Mapping[str, Any]) -> bool:
    """Return whether data has no end, so that it has no epochs."""
    return (
        data.get("_target_") == "perfexp.data.synthetic.Synthetic"
        and data.get("num_samples") is None
    )


def _check_training(plan: config.Plan) -> None:
    """Raise `UserError` for epoch settings without epochs, and checkpoints of several trainings."""
    node = plan.mode.train
    saved = isinstance(node, Mapping) and node.get("checkpoints")
    if plan.infers_trained and not (saved and plan.epochs):
        raise UserError(
            "mode.inference.trained=true needs the weights of a training: "
            "add mode=train_inference epochs=N mode.train.checkpoints=true, "
            "or set mode.inference.trained=false and name a file with model.weights."
        )
    if (
        not isinstance(node, Mapping)
        or node.get("_target_") != "perfexp.measuring.modes.train.Train"
    ):
        return  # the user's own mode: its code runs only in the worker
    mode = config.build(node)
    if plan.model.get("optimizer") == "own" and mode.of_trainer:
        raise UserError(
            f"{mode.of_trainer[0]}: model.optimizer=own trains by the model's own schedule; "
            "leave one of the two out."
        )
    if mode.of_epochs and plan.epochs is None:
        raise UserError(f"{mode.of_epochs[0]} is for whole epochs: set epochs=N, or leave it out.")
    for text in mode.of_epochs:
        if text.startswith(("mode.train.checkpoints", "mode.train.resume")):
            trainings = sum(key.phase == "train" for key in plan.timed_keys())
            if trainings > 1:
                key = text.partition("=")[0]
                off = "false" if key.endswith("checkpoints") else "null"
                raise UserError(
                    f"{text} is for one training, and this plan has {trainings}: set {key}={off}, "
                    "or one size, batch and process."
                )


def _check_largest_batch(plan: config.Plan) -> None:
    """Raise `UserError` if a search for the largest batch cannot work with another setting."""
    if not plan.seeks_batch:
        return
    node = plan.mode.train
    for is_set, setting in (
        (plan.is_sparse, "sweep=sparse"),
        (plan.ranks > 1, f"gpu.count={plan.ranks}"),
        (isinstance(node, Mapping) and node.get("resume_from"), "mode.train.resume_from"),
        (not config.build(plan.profiler).times, f"profiler={plan.profiler_name}"),
    ):
        if is_set:
            raise UserError(
                f"batch_size=max and {setting} are not possible together: set batch_size=N."
            )


def _check_ranks(plan: config.Plan) -> None:
    """Raise `UserError` for single-device settings with several devices, or the reverse."""
    for name, number in (("count", plan.devices), ("nodes", plan.nodes)):
        if not 1 <= number <= _MOST_DEVICES:
            noun = "devices" if name == "count" else "nodes"
            raise UserError(
                f"gpu.{name}={number}: set a number of {noun} from 1 to {_MOST_DEVICES:,}."
            )
    if plan.ranks == 1:
        if plan.gpu.get("port") is not None:
            raise UserError(
                f"gpu.port={plan.gpu['port']} is for several devices: "
                "set gpu.count=N, or leave it out."
            )
        return
    port = plan.gpu.get("port")
    most = 65535 if plan.nodes == 1 else 65534  # several nodes use the next one, too
    if port is not None and not 0 < port <= most:
        raise UserError(
            f"gpu.port={port}: set a port from 1 to {most}, or leave it out for a free one."
        )
    for is_set, setting, remedy in (
        (plan.execution.cuda_graph, "execution.cuda_graph=true", "leave it out"),
        (
            plan.epochs is not None,
            f"epochs={plan.epochs}",
            "leave it out: an epoch is extrapolated from the step",
        ),
        (plan.probes.layers, "probes.layers=true", "set probes.layers=false"),
        (bool(plan.probe), "a probe of your own", "leave it out"),
        (plan.profile_keys(), f"profiler={plan.profiler_name}", "set profiler=none"),
    ):
        if is_set:
            several = f"gpu.count={plan.devices}"
            if plan.nodes > 1:
                several += f" gpu.nodes={plan.nodes}"
            raise UserError(f"{setting} is for one device, and {several}: {remedy}.")
    if plan.nodes > 1 and plan.probes.energy:
        raise UserError(
            f"probes.energy=true is for one node, and gpu.nodes={plan.nodes}: "
            "set probes.energy=false."
        )
