r"""Forked processes against new interpreters: how long until the first call, and whether they measure the same.

    python validation/process_starts.py first-call model=resnet50 --rounds=5
    python validation/process_starts.py nested --servers=5 --forks=5 --out=results \
        "model=resnet50 batch_size=[1,16]" "model=vgg16 batch_size=8"

`first-call` starts workers in turns, forked from one server and as new interpreters, and takes the time until each has
made the first call of its model.

`nested` runs each command `--servers` times with `--forks` forked processes of one server, and once as many new
interpreters, in turns. For each time: the standard deviation between forks of a server, the component between servers
(that of the servers' means beyond what the forks explain) with its share of the forks' sd/√n, the standard deviation
between new interpreters, and the ratio of all forked to all fresh medians with its 95 % interval.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.cli import composition
from perfexp.host import fork_server
from perfexp.host.process import WorkerProcess, worker_command
from perfexp.plan import config, plan_file
from perfexp.records.record import Record

Groups = dict[tuple[str, str], list[list[float]]]
KINDS = ("device", "latency", "throughput")


def first_call(overrides: list[str], rounds: int) -> None:
    """Print seconds from the start of a worker to the end of its first calls, and the laps of the last round."""
    plain = composition.compose([*overrides, "cold_start=true", "tracking=none"])
    imports = config.imports(plain)
    fork_server.prepare(imports)
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, modules in (("forked", imports), ("fresh", None)):
            with tempfile.TemporaryDirectory() as folder:
                content = plan_file.to_yaml(plain)
                (Path(folder) / "plan.yaml").write_bytes(content)
                sha256 = hashlib.sha256(content).hexdigest()
                command = worker_command(folder, "--what=ttfp", f"--plan-sha256={sha256}")
                begun = time.perf_counter_ns()
                process = WorkerProcess(command, Path(folder) / "log", imports=modules)
                seconds = [
                    (time.perf_counter_ns() - begun) * 1e-9
                    for event in process.events(600)
                    if "status" in event
                ]
                process.end()
                if (
                    number and seconds
                ):  # the first round waits for the imports of the server, and fills the page cache
                    taken[name].append(seconds[0])
                elif not seconds:
                    print((Path(folder) / "log").read_text(), file=sys.stderr)
    for name, values in taken.items():
        print(
            f"{name:<7} {statistics.median(values):6.2f} s  ({min(values):.2f} … {max(values):.2f})"
        )


def medians(record: Record) -> dict[tuple[str, str], list[float]]:
    """Logarithms of the processes' medians, by point and kind of time."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    model = record.plan["choices"]["model"]
    for point in record.points:
        if not point.key.is_timed or point.status != "ok":
            continue
        for series in point.series:
            if series.name in KINDS:
                place = f"{model} {point.key.phase} b{point.key.batch_size}"
                found[place, series.name].append(
                    math.log(statistics.median(series.samples[series.warmup :]))
                )
    return found


def nested(commands: list[str], servers: int, forks: int, out: Path) -> None:
    """Measure in turns, and print the components."""
    sides: dict[str, dict[tuple[str, str], list[list[float]]]] = {
        name: defaultdict(list) for name in ("forked", "fresh")
    }
    for number in range(servers):
        for index, command in enumerate(commands):
            for name in sides:
                if name == "fresh" and number >= max(1, servers // 2):
                    continue
                folder = out / f"{index}-{number}-{name}"
                own = [f"process_start={name}", f"processes={forks}", "tracking=none"]
                arguments = [*shlex.split(command), *own, f"output_dir={folder}"]
                subprocess.run(
                    [sys.executable, "-m", "perfexp", *arguments],
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                for place, values in medians(Record.load(folder)).items():
                    sides[name][place].append(values)
    print(f"{'':34} {'forks':>7} {'servers':>8} {'share':>6} {'fresh':>7}  forked/fresh")
    for place, groups in sides["forked"].items():
        within = math.sqrt(statistics.fmean(statistics.variance(group) for group in groups))
        means = [statistics.fmean(group) for group in groups]
        between = statistics.variance(means) if len(means) > 1 else math.nan
        component = math.sqrt(max(0.0, between - within**2 / forks))
        fresh = [value for group in sides["fresh"][place] for value in group]
        everything = [value for group in groups for value in group]
        difference = statistics.fmean(everything) - statistics.fmean(fresh)
        error = math.sqrt(between / len(means) + statistics.variance(fresh) / len(fresh))
        half = error * stats.t.ppf(0.975, len(means) + len(fresh) - 2)
        share = component / (within / math.sqrt(forks)) if within else math.nan
        cells = f"{within:7.2%} {component:8.2%} {share:6.2f} {statistics.stdev(fresh):7.2%}"
        ratio = f"{np.exp(difference):.4f} ± {half:.2%}"
        print(f"{' '.join(place):<34} {cells}  {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("first-call", "nested"))
    parser.add_argument(
        "commands", nargs="+", help="overrides of perfexp, for `nested` a quoted command each"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", type=int, default=5)
    parser.add_argument("--forks", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "first-call":
        first_call(arguments.commands, arguments.rounds)
        return
    out = arguments.out or Path(tempfile.mkdtemp(prefix="perfexp-nested-"))
    nested(arguments.commands, arguments.servers, arguments.forks, out)


if __name__ == "__main__":
    main()
