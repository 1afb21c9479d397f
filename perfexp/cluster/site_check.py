"""Site check: SLURM's nodes for each kind of GPU, and whether perfexp starts on one of them."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfexp.cluster import site, slurm
from perfexp.cluster.slurm import Node
from perfexp.errors import UserError
from perfexp.host import untrusted
from perfexp.plan.schema import Cluster

#: States of nodes that run jobs, in short form; any other one but `idle` runs none.
_BUSY = ("alloc", "mix", "comp", "plnd", "resv")
#: The job that shows whether perfexp starts: it imports what a worker imports, and prints host and versions.
_IMPORTS = "import platform, perfexp, torch; print(platform.node(), perfexp.__version__, torch.__version__)"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Nodes with a kind of GPU: all, idle, partly or wholly in use, and the others, which are down or drained."""

    kind: str
    requests: Sequence[str]
    nodes: int
    idle: int
    busy: int

    @property
    def others(self) -> int:
        """Number of nodes that run nothing and start nothing."""
        return self.nodes - self.idle - self.busy


def offers(cluster: Cluster, kinds: Sequence[str]) -> list[Offer]:
    """Return the nodes for each kind that the cluster maps, or of those given if it maps none."""
    nodes = slurm.nodes()
    types = gpu_types(nodes)
    return [_offer(cluster, kind, nodes) for kind in cluster.gpus or [kind for kind in kinds if kind in types]]


def gpu_types(nodes: Sequence[Node]) -> set[str]:
    """Return the types of GPUs in the GRES of nodes, such as `a100` and `a100.mig-1g.5gb`."""
    entries = [entry for node in nodes for entry in _gres(node)]
    return {entry[1] for entry in entries if entry[0] == "gpu" and len(entry) > 1 and not entry[1].isdigit()}


def _gres(node: Node) -> list[list[str]]:
    """Split the GRES of a node, `gpu:a100:4(S:0,2),shard:8`, into names, types and counts."""
    return [entry.split(":") for entry in re.sub(r"\([^)]*\)", "", node.gres).split(",")]


def _offer(cluster: Cluster, kind: str, nodes: Sequence[Node]) -> Offer:
    requests = site.requests(cluster, kind)
    pairs = (text.partition("=") for text in requests)
    options = {name.lstrip("-"): value for name, _, value in pairs}
    states = {node.name: node.state for node in nodes if _fits(node, options)}
    return Offer(
        kind=kind,
        requests=requests,
        nodes=len(states),
        idle=sum(state == "idle" for state in states.values()),
        busy=sum(state.startswith(_BUSY) for state in states.values()),
    )


def _fits(node: Node, options: Mapping[str, str]) -> bool:
    """Whether a node fits the partition (`a,b`), the features and the GRES."""
    gres, constraint = options.get("gres", "").split(":")[:-1], options.get("constraint", "")
    words = re.findall(r"[\w.-]+|[&|()\[\]]", re.sub(r"\*\d+", "", constraint).replace(",", "&"))
    return (
        node.partition in options.get("partition", node.partition).split(",")
        and (not words or _has(node, words))
        and (not gres or any(entry[: len(gres)] == gres for entry in _gres(node)))  # types must be equal
    )


def _has(node: Node, words: list[str]) -> bool:
    """Whether a node has features such as `(v100|a100)&ib`, of which SLURM reads operators from left to right.

    Takes the words up to the closing bracket.
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
    """Run one tiny job and return its line; raises UserError if it does not start in time, or perfexp does not."""
    python = shlex.join([*site.python(cluster), "-c", _IMPORTS])
    script = "\n".join([*site.preparation(cluster), f"exec {python}"])
    command = ["srun", "--quiet", "--ntasks=1", f"--immediate={seconds}", *site.requests(cluster, kind)]
    try:
        done = subprocess.run(
            [*command, "bash", "-c", script], capture_output=True, text=True, timeout=seconds + 120, check=False
        )
    except FileNotFoundError as error:
        raise UserError("srun is not on the PATH: run this on a machine that submits to SLURM.") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the job for gpu={kind} did not end in time; see squeue") from error
    output = done.stdout if done.returncode == 0 else done.stderr or done.stdout
    last = untrusted.printable((output.strip().splitlines() or ["no output"])[-1])
    if done.returncode:
        raise UserError(f"the job for gpu={kind} failed: {last}")
    return last
