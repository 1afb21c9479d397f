"""Goes through every builder of torchvision up to 100 M parameters, in both modes, and prints a Markdown table.

Each is tried at growing sizes until one inference (batch 1) and one training step (batch 2) both run. All of them take
a quarter of an hour on two cores; names on the command line run only those, of whatever size.
"""

from __future__ import annotations

import argparse
import gc
import math
from typing import Any

from perfexp.data.synthetic import Synthetic
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import PerfexpError, Unsupported
from perfexp.measuring.modes import Mode
from perfexp.measuring.modes.inference import Inference
from perfexp.measuring.modes.train import Train
from perfexp.models import Execution, Precision
from perfexp.models.session import TorchSession
from perfexp.models.torchvision import Torchvision
from perfexp.models.torchvision_import import import_torchvision

SIZES = (32, 64, 96, 128, 160, 192, 224, 256, 299)
MOST = 100e6


def main() -> None:
    """Print the table, a line as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="builders (default: all)")
    models = import_torchvision().models
    names = parser.parse_args().names or [
        name for name in models.list_models() if parameters(models, name) <= MOST
    ]
    print(
        "| builder | kind | parameters | size | inference | training |\n|---|---|---:|---:|---|---|"
    )
    for name in names:
        print("| " + " | ".join(row(name)) + " |", flush=True)
        gc.collect()  # a model's modules refer to one another


def parameters(models: Any, name: str) -> int:
    """How many parameters a builder's model has, without building it."""
    return int(models.get_model_weights(name).DEFAULT.meta["num_params"])


def row(name: str) -> tuple[str, ...]:
    """Builder, kind, parameters, size, and how inference and training went."""
    try:
        session = Torchvision(name=name).open(
            device=CpuDevice(),
            precision=Precision(name="fp32"),
            execution=Execution(),
            num_classes=None,
            seed=0,
        )
    except PerfexpError as error:
        return name, "–", "–", "–", str(error), "–"
    for size in SIZES:
        inference = attempt(session, Inference(), size, batch_size=1)
        training = attempt(
            session, Train(optimizer={"name": "sgd", "lr": 1e-3}), size, batch_size=2
        )
        if inference == training == "ok":
            break
    facts = session.facts()
    return name, facts["kind"], f"{facts['parameters'] / 1e6:.1f} M", str(size), inference, training


def attempt(session: TorchSession, mode: Mode, size: int, batch_size: int) -> str:
    """`ok`, or why one call of the mode did not run."""
    data = Synthetic()
    opened = data.open(
        session=session,
        input_size=(size, size),
        batch_size=batch_size,
        training=isinstance(mode, Train),
        seed=0,
    )
    try:
        with opened as batches:
            step = mode.prepare(session=session, batches=batches, batch_size=batch_size)
            with step.active():
                session.first_forward(batches.next())
                step.call()
    except Unsupported as error:
        return str(error)
    if step.trains and not math.isfinite(session.number(step.state.loss)):
        return f"loss {step.state.loss}"
    return "ok"


if __name__ == "__main__":
    main()
