"""The SLURM job around this process, and how other jobs use its node.

The facts go into a run's environment; other jobs on the node may disturb its measurements.
"""

from __future__ import annotations

import re
import socket
import subprocess
from os import environ
from typing import Any

from perfexp.errors import UserError

#: Time limit for a query to SLURM's controller, since the measurement waits for it.
_TIMEOUT_SECONDS = 10.0
#: Job facts, with the variable that SLURM sets.
_VARIABLES = {
    "cluster": "SLURM_CLUSTER_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "qos": "SLURM_JOB_QOS",
    "nodes": "SLURM_JOB_NODELIST",
    "node": "SLURMD_NODENAME",
    "gpus": "SLURM_JOB_GPUS",
}


def job_id() -> str | None:
    """Return the id of the job or array element of this process; None outside SLURM."""
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return environ.get("SLURM_JOB_ID")


def node() -> str:
    """Return the name of this machine; inside a job, its SLURM name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def require_nodes(count: int) -> None:
    """Raise `UserError` unless this process is in a SLURM job with `count` nodes (`gpu.nodes`).

    `main` and `measuring.ranks.start` call it.
    """
    job, nodes = job_id(), environ.get("SLURM_JOB_NUM_NODES", "1")
    if job is None or nodes != str(count) or not environ.get("SLURMD_NODENAME"):
        situation = "this is not in a job" if job is None else f"job {job} has {nodes}"
        raise UserError(
            f"gpu.nodes={count} needs a job of SLURM with {count} nodes; {situation}. Add -m and "
            "hydra/launcher=slurm (docs/how-to/several-gpus.md), or leave gpu.nodes out."
        )


def job_facts() -> dict[str, Any] | None:
    """Return the job's identity, its requests, and how other jobs use its node.

    None outside of a job. `others` counts the CPUs and GPUs that other jobs have at this moment;
    see `_others`.
    """
    identifier = job_id()
    if identifier is None:
        return None
    facts: dict[str, Any] = {
        name: environ[key] for name, key in _VARIABLES.items() if environ.get(key)
    }
    facts = {
        "scheduler": "slurm",
        "id": identifier,
        **facts,
        "restarts": int(environ.get("SLURM_RESTART_COUNT", 0)),
    }
    job = _shown("job", environ["SLURM_JOB_ID"])
    facts |= {
        name: value
        for name, key in (
            ("constraint", "Features"),
            ("gres", "TresPerNode"),
            ("time_limit", "TimeLimit"),
        )
        if (value := job.get(key)) not in (None, "", "(null)")
    }
    return {**facts, "others": _others()}


def _others() -> dict[str, int] | None:
    """Return how many CPUs and GPUs of this node other jobs have; None if SLURM lists none."""
    node = _shown("node", environ.get("SLURMD_NODENAME", ""))
    cpus, own_cpus = node.get("CPUAlloc", ""), environ.get("SLURM_CPUS_ON_NODE", "")
    if not cpus.isdigit() or not own_cpus.isdigit():
        return None
    own_gpus = len(list(filter(None, environ.get("SLURM_JOB_GPUS", "").split(","))))
    # for example gpu:l40s:2(IDX:0-1)
    used = re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", node.get("GresUsed", ""))
    return {
        "cpus": max(0, int(cpus) - int(own_cpus)),
        "gpus": max(0, sum(map(int, used)) - own_gpus),
    }


def _shown(kind: str, name: str) -> dict[str, str]:
    """Return the fields that `scontrol show` prints for a job or node.

    They are empty if scontrol fails.
    """
    try:
        command = ["scontrol", "--oneliner", "--details", "show", kind, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = (word.partition("=") for word in done.stdout.split())
    return {key: value for key, _, value in pairs}
