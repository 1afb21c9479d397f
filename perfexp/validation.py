"""Validation: what can be seen to be impossible before anything starts."""

from __future__ import annotations

from pathlib import Path

from perfexp import config
from perfexp.devices import Cache
from perfexp.errors import UserError, did_you_mean
from perfexp.models import mmseg_names

#: What torch.compile calls its modes.
_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check(plan: config.Plan) -> None:
    """Combinations that can be seen to be impossible before anything starts.

    Args:
        plan: to be measured.

    Raises:
        UserError: it can't be.
    """
    if not plan.phases:
        raise UserError("mode measures nothing: choose mode=train, inference or train_inference.")
    if plan.replicate < 1:
        raise UserError(f"replicate={plan.replicate}: at least one process has to measure.")
    for percentile in plan.percentiles:
        if not 0 < percentile < 100:
            raise UserError(f"percentiles={plan.percentiles}: each lies between 0 and 100, both excluded.")
    if plan.probes.energy_seconds is not None and not plan.probes.energy_seconds > 0:
        raise UserError(f"probes.energy_seconds={plan.probes.energy_seconds:g}: a positive time, or null.")
    if plan.epochs is not None:
        if plan.epochs < 1:
            raise UserError(f"epochs={plan.epochs}: at least one pass, or leave it out.")
        if "train" not in plan.phases:
            raise UserError("epochs=N is for training: add mode=train.")
    if plan.timeout_seconds is not None and plan.timeout_seconds <= 0:
        raise UserError(f"timeout_seconds={plan.timeout_seconds:g}: a positive time, or null for none.")
    if plan.execution.cuda_graph and plan.cache is not Cache.warm:
        raise UserError(f"cache={plan.cache} needs calls of their own, which execution.cuda_graph=true fuses.")
    if plan.execution.cuda_graph and plan.gpu_name in ("cpu", "mps"):
        raise UserError(f"execution.cuda_graph=true needs a CUDA device; gpu={plan.gpu_name} is none.")
    if plan.execution.compile not in (None, *_COMPILE_MODES):
        hint = did_you_mean(plan.execution.compile, _COMPILE_MODES)
        raise UserError(f"execution.compile={plan.execution.compile}: torch.compile has no such mode. {hint}")
    for key in ("threads", "interop_threads"):
        if (threads := getattr(plan.execution, key)) is not None and threads < 1:
            raise UserError(f"execution.{key}={threads}: at least one, or leave it out.")
    if plan.speed_dir:
        from perfexp.speed import placing  # late: the help of the commands needs no numpy

        placing.refuse_no_folder(Path(plan.speed_dir).expanduser(), "choose another speed_dir=DIR.")
    mmseg_names.check(plan.model)
    _check_ranks(plan)
    plan.profile_keys()
    config.build(plan.stopping)


def _check_ranks(plan: config.Plan) -> None:
    """What can't be done with several ranks, or with one.

    Raises:
        UserError: the plan asks for it.
    """
    count = plan.ranks
    if count < 1:
        raise UserError(f"gpu.count={count}: at least one device has to work.")
    if count == 1:
        if plan.gpu.get("port") is not None:
            raise UserError(f"gpu.port={plan.gpu['port']} is for several devices: say gpu.count=N, or leave it out.")
        if plan.probes.scaling:
            raise UserError("probes.scaling=true compares several devices with one: say gpu.count=N.")
        return
    port = plan.gpu.get("port")
    if port is not None and not 0 < port < 65536:
        raise UserError(f"gpu.port={port}: a port is a number from 1 to 65535. Leave it out for one that is free.")
    for asked, setting, remedy in (
        (plan.execution.cuda_graph, "execution.cuda_graph=true", "leave it out"),
        (plan.epochs is not None, f"epochs={plan.epochs}", "leave it out: an epoch is extrapolated from the step"),
        (plan.probes.layers, "probes.layers=true", "say probes.layers=false"),
        (bool(plan.probe), "a probe of your own", "leave it out"),
        (plan.profile_keys(), f"profiler={plan.profiler_name}", "say profiler=none"),
    ):
        if asked:
            raise UserError(f"{setting} is for one device, and gpu.count={count}: {remedy}.")
