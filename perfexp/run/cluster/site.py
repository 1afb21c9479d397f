"""What a run requests from SLURM at a site, and which nodes offer it.

A `cluster` node in conf/ maps each GPU kind (`gpu=l40s`) to the site's own names.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfexp.errors import UserError, did_you_mean
from perfexp.host import foreign
from perfexp.host.installation import python_command
from perfexp.plan.schema import Cluster, ClusterGpu
from perfexp.run.cluster import slurm
from perfexp.run.cluster.slurm import Node

#: Devices that are not GPUs.
_WITHOUT_GPU = ("cpu", "fake")
#: Columns in the cluster check: all nodes, then nodes by use.
USES = ("nodes", "idle", "busy", "others")
#: Short names for states of busy nodes; in other states except `idle`, nodes run no jobs.
_BUSY = ("alloc", "mix", "comp", "plnd", "resv")
#: Program of the test job: import what a worker imports, and print host and versions.
_IMPORTS = (
    "import platform, perfexp, torch; "
    "print(platform.node(), perfexp.__version__, torch.__version__)"
)


def mapped(site: Cluster, kind: str) -> ClusterGpu:
    """Return a site's requests for a GPU kind.

    Without any mapping the kind itself is the type in the GRES (`gpu:l40s`).

    Args:
        kind: option of the group `gpu`.

    Raises:
        UserError: the cluster does not map the kind, or the kind is `auto`.
    """
    if kind == "auto":
        raise UserError(
            "gpu=auto chooses a device of this machine; name the kind that a job needs: gpu=l40s."
        )
    if kind in site.gpus:
        return site.gpus[kind]
    if kind in _WITHOUT_GPU:
        return ClusterGpu(gres="")
    if site.gpus:
        hint = did_you_mean(kind, site.gpus)
        raise UserError(
            f"gpu={kind}: cluster={site.name} has no entry gpus.{kind}. {hint}".rstrip()
        )
    return ClusterGpu(gres=f"gpu:{kind}")


def requests(site: Cluster, kind: str, *, count: int = 1, nodes: int = 1) -> list[str]:
    """Return the sbatch options for a run on `count` GPUs on each of `nodes` nodes.

    Campaigns submit runs with them; the cluster check submits its tiny job with them.

    Raises:
        UserError: the cluster does not map the kind.
    """
    gpu = mapped(site, kind)
    options = {
        name: getattr(gpu, name, None) or getattr(site, name)
        for name in ("partition", "account", "qos", "time_limit")
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
    """Yield the shell lines that a job runs before perfexp.

    Batch scripts and the tiny job of the cluster check begin with them.
    """
    for module in site.modules:
        yield f"module load {shlex.quote(module)} || exit 2"
    if site.scratch:
        folder = site.scratch
        yield f"mkdir -p {folder} && export TMPDIR={folder} || exit 2  # the node expands variables"
    yield from site.setup


def python(site: Cluster) -> list[str]:
    """Return the Python command: this process's, or the image's own with a container.

    Batch scripts and the tiny job of the cluster check run it.
    """
    if site.container:
        return ["apptainer", "exec", "--nv", site.container, "python3", "-P"]
    return python_command("perfexp")[:-2]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Nodes with a GPU kind, for `perfexp cluster check`.

    Attributes:
        kind: option of the group `gpu`.
        requests: sbatch options for one GPU.
        nodes: node counts: `nodes` in all, `idle`, `busy`, and `others` (down or drained).
    """

    kind: str
    requests: Sequence[str]
    nodes: Mapping[str, int]


def offers(cluster: Cluster, kinds: Sequence[str]) -> list[Offer]:
    """Return the nodes for each kind that the cluster maps.

    If it maps none, use the `kinds` that occur in the GRES of nodes. `perfexp cluster check` prints
    them.
    """
    nodes = slurm.nodes()
    mapped_kinds = list(cluster.gpus)
    if not mapped_kinds:
        types = gpu_types(nodes)
        mapped_kinds = [kind for kind in kinds if kind in types]
    return [_offer(cluster, kind, nodes) for kind in mapped_kinds]


def gpu_types(nodes: Sequence[Node]) -> set[str]:
    """Return the GPU types in the GRES of nodes, such as `a100` and `a100.mig-1g.5gb`.

    The cluster check names them if no GPU kind fits.
    """
    entries = [entry for node in nodes for entry in _gres(node)]
    return {
        entry[1]
        for entry in entries
        if entry[0] == "gpu" and len(entry) > 1 and not entry[1].isdigit()
    }


def _gres(node: Node) -> list[list[str]]:
    """Split a node's GRES, `gpu:a100:4(S:0,2),shard:8`, into names, types and counts."""
    return [entry.split(":") for entry in re.sub(r"\([^)]*\)", "", node.gres).split(",")]


def _offer(cluster: Cluster, kind: str, nodes: Sequence[Node]) -> Offer:
    """Return the nodes that fit the requests for a GPU kind."""
    requested = requests(cluster, kind)
    options = dict(text.lstrip("-").partition("=")[::2] for text in requested)
    states = {node.name: node.state for node in nodes if _fits(node, options)}
    uses = Counter(map(_use, states.values()))
    return Offer(
        kind=kind,
        requests=requested,
        nodes={name: uses[name] for name in USES} | {"nodes": len(states)},
    )


def _use(state: str) -> str:
    """Return the use of a node by its state: `idle`, `busy` or `others`."""
    if state == "idle":
        return state
    if state.startswith(_BUSY):
        return "busy"
    return "others"


def _fits(node: Node, options: Mapping[str, str]) -> bool:
    """Return whether a node fits sbatch options: partitions (`a,b`), features and GRES."""
    gres, constraint = options.get("gres", "").split(":")[:-1], options.get("constraint", "")
    words = re.findall(r"[\w.-]+|[&|()\[\]]", re.sub(r"\*\d+", "", constraint).replace(",", "&"))
    return (
        node.partition in options.get("partition", node.partition).split(",")
        and (not words or _has(node, words))
        and (
            not gres or any(entry[: len(gres)] == gres for entry in _gres(node))
        )  # GPU types must be equal
    )


def _has(node: Node, words: list[str]) -> bool:
    """Return whether a node has the requested features, such as `(v100|a100)&ib`.

    Operators apply from left to right, as in SLURM.

    Args:
        words: the expression; consumed up to the closing bracket.
    """
    result, operator = True, "&"
    while words and (word := words.pop(0)) not in (")", "]"):
        if word in ("&", "|"):
            operator = word
            continue
        has = _has(node, words) if word in ("(", "[") else word in node.features
        result = result and has if operator == "&" else result or has
    return result


def try_node(cluster: Cluster, kind: str, *, seconds: int) -> str:
    """Run a tiny job and return its output line: host, and versions of perfexp and torch.

    `perfexp cluster check` calls it for each GPU kind.

    Raises:
        UserError: the job does not start in time, or perfexp does not start in it.
    """
    perfexp = shlex.join([*python(cluster), "-c", _IMPORTS])
    script = "\n".join([*preparation(cluster), f"exec {perfexp}"])
    command = ["srun", "--quiet", "--ntasks=1", f"--immediate={seconds}", *requests(cluster, kind)]
    output = slurm.call(*command, "bash", "-c", script, seconds=seconds + 120)
    return foreign.printable((output.strip().splitlines() or ["no output"])[-1])
