"""What MLflow costs a run of 60 s: measuring without it, then sending the record to an existing store.

    python benchmarks/mlflow_share.py

The claim: at most 5 % of the whole, the import of mlflow included. Sending is `perfexp log` in a fresh process, which
also pays for starting Python: an upper bound.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = ("model=resnet18", "input_size=96", "stopping.epsilon=0.000001", "stopping.max_seconds=52", "output_dir=run")


def perfexp(folder: Path, *arguments: str) -> float:
    """Seconds of one command."""
    start = time.perf_counter_ns()
    subprocess.run([sys.executable, "-m", "perfexp", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter_ns() - start) * 1e-9


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        perfexp(folder, "model=fake", "gpu=fake", "stopping=fixed", "output_dir=first")  # makes the store
        measured = perfexp(folder, *RUN, "tracking=none")
        sent = perfexp(folder, "log", "run")
    print(f"measuring        {measured:.1f} s")
    print(f"sending          {sent:.2f} s")
    print(f"share            {sent / (measured + sent):.2%}")


if __name__ == "__main__":
    main()
