"""Site: the requests of a run to SLURM, by the mapping of its cluster."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from perfexp.errors import UserError, did_you_mean
from perfexp.host.installation import python_command
from perfexp.plan.schema import Cluster, ClusterGpu

#: Kinds of devices that are not GPUs.
_WITHOUT_GPU = ("cpu", "fake")


def mapped(site: Cluster, kind: str) -> ClusterGpu:
    """Return the requests for a kind of GPU; raises UserError for a kind that the cluster does not map."""
    if kind == "auto":
        raise UserError("gpu=auto chooses a device of this machine; name the kind that a job needs: gpu=l40s.")
    if kind in site.gpus:
        return site.gpus[kind]
    if kind in _WITHOUT_GPU:
        return ClusterGpu(gres="")
    if site.gpus:
        hint = did_you_mean(kind, site.gpus)
        raise UserError(f"gpu={kind}: cluster={site.name} has no entry gpus.{kind}. {hint}".rstrip())
    return ClusterGpu(gres=f"gpu:{kind}")


def requests(site: Cluster, kind: str, *, count: int = 1, nodes: int = 1) -> list[str]:
    """Return the options of sbatch for a run on `count` GPUs of a kind, on each of some nodes."""
    gpu = mapped(site, kind)
    options = {
        name: getattr(gpu, name, None) or getattr(site, name) for name in ("partition", "account", "qos", "time_limit")
    }
    options["time"] = options.pop("time_limit")
    options |= {"constraint": gpu.constraint, "mem": site.memory}
    gres = "gpu" if gpu.gres is None else gpu.gres
    options["gres"] = f"{gres}:{count}" if gres else None
    options["cpus-per-task"] = site.cpus_per_gpu and str(site.cpus_per_gpu * count)
    if nodes > 1:
        options |= {"nodes": str(nodes), "ntasks-per-node": "1"}
    return [*(f"--{name}={value}" for name, value in options.items() if value), *site.options]


def preparation(site: Cluster) -> Iterator[str]:
    """Yield the shell lines that a job runs before perfexp."""
    for module in site.modules:
        yield f"module load {shlex.quote(module)} || exit 2"
    if site.scratch:
        yield f"mkdir -p {site.scratch} && export TMPDIR={site.scratch} || exit 2  # the node expands variables"
    yield from site.setup


def python(site: Cluster) -> list[str]:
    """Return the command of Python: this process's, or with a container that of the image, which has its own."""
    if site.container:
        return ["apptainer", "exec", "--nv", site.container, "python3", "-P"]
    return python_command("perfexp")[:-2]
