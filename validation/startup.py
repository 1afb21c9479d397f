"""How long `perfexp --help` takes against `python -c "import torch"`, alternating within one run.

    python validation/startup.py

The claim: at most half, because the process that composes and reports never imports torch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 9
COMMANDS = {"perfexp --help": ["-m", "perfexp", "--help"], "import torch": ["-c", "import torch"]}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter_ns()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter_ns() - start) * 1e-9


def main() -> None:
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for arguments in COMMANDS.values():
        seconds(arguments)  # both find their files in the page cache
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            taken[name].append(seconds(arguments))
    for name, values in taken.items():
        print(
            f"{name:<16} {statistics.median(values):.3f} s  (min {min(values):.3f}, max {max(values):.3f})"
        )
    help_seconds, torch_seconds = (statistics.median(values) for values in taken.values())
    print(f"ratio            {help_seconds / torch_seconds:.3f}")


if __name__ == "__main__":
    main()
