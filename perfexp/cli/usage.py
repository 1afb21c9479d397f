"""Usage: the text of `perfexp --help`, read from the files of conf/ because composing them takes Hydra a second."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

#: Width of a terminal, in characters.
_WIDTH = 80
_HEADER = "perfexp measures how fast a deep-learning model trains and infers."
_MEASUREMENTS = {
    "model=resnet50 mode=inference": "",
    "model=resnet18 mode=train batch_size=[8,32]": "two points of one run",
    "-m model=resnet18,alexnet batch_size=1,8": "a run for each combination",
    "experiment=quick model=vgg16": "10 sizes",
}
_COMMANDS = {
    "list models": "options of a group",
    "list algorithms model=vgg16": "algorithms for the layers of a model",
    "doctor": "whether this machine can measure",
    "selfcheck": "how much processes differ here",
    "calibrate kernels": "learn the kernels that prove algorithms",
    "show DIR": "report of a run",
    "compare A B": "which run is faster, and by how much",
    "ab A B": "measure A and B in turn until a verdict",
    "reproduce DIR": "measure a record again: same figures?",
    "check NEW --against BASELINE": "exit code 1 if a run is slower, for CI",
    "predict model=vgg16 gpu=h200": "memory, time and energy without a run",
    "predict check DIR": "how good predictions are on your records",
    "baseline add NAME DIR": "named baselines for check",
    "status": "done, failed, missing and running points",
    "cancel DIR": "cancel the jobs of a sweep",
    "job-output RUN": "output of the job of a run",
    "cluster check": "nodes of SLURM for each gpu=",
    "export DIR": "one table of many runs, CSV and Parquet",
    "roofline DIR": "which ceiling limits kernels or layers",
    "stats DIR": "tables of an nsys profile",
    "speed DIR": "speed file of a training, or of a log",
    "benchmark MODEL MODE …": "train a model, write its speed file here",
    "make-data DIR": "small segmentation data set to try out",
    "make-data cifar10 DIR": "small stand-in for CIFAR-10",
    "clean": "delete tables and profiles",
    "completion bash": "tab completion for bash, zsh or fish",
    "log DIR": "send records to MLflow again",
    "ui": "open MLflow",
}
#: Keys of groups and sections that many runs need.
_SETTINGS = {
    "probes.layers=true": "time of each layer (perfexp list probes)",
    "probes.energy=true": "energy of a call",
    "gpu.count=2": "devices, each with a batch of its own",
    "algorithm=gemm algorithm.verify=true": "prove the algorithm by its kernels",
    "data=images data.root=DIR": "images from a folder",
    "profiler=nsys profiler.steps=3": "calls to profile",
    "resume=DIR": "measure what a run or sweep lacks",
}
#: Commands of `perfexp COMMAND`; any other first argument belongs to a measurement.
COMMANDS = (*dict.fromkeys(example.split()[0] for example in _COMMANDS), "env")

_FOOTER = """
A group's own keys are set as group.key=value (stopping.max_seconds=10). Flags:
-m sweeps, --cfg job prints the composed configuration, --dry-run prints points
and estimated time without measuring, --config-dir DIR adds your own options,
--json prints results as JSON, --overwrite replaces the results of a folder,
--max-jobs N allows a sweep of more than 1,000 runs, --hydra-help explains
Hydra's other flags.
`perfexp COMMAND --help` explains a command (those above, and env); README.md
has the rest."""


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Whether a command line requests help; an empty one does."""
    return not arguments or arguments[0] == "help" or any(argument in ("--help", "-h") for argument in arguments)


def text(folders: Sequence[Path]) -> str:
    """Return the help."""
    options: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            options.setdefault(file.parent.name, set()).add(file.stem)
    examples = [f"  perfexp {words:<44}{about}".rstrip() for words, about in _MEASUREMENTS.items()]
    examples += [f"  perfexp {words:<30}{about}".rstrip() for words, about in _COMMANDS.items()]
    settings = [f"  {words:<38}{about}" for words, about in _SETTINGS.items()]
    width = max(map(len, options), default=0) + 4
    shorten = partial(textwrap.shorten, width=_WIDTH - width, placeholder=" …")
    groups = [f"  {name}".ljust(width) + shorten(", ".join(sorted(options[name]))) for name in sorted(options)]
    keys = _keys(folders[0] / "config.yaml")
    title = "Groups (group=option; perfexp list GROUP has all options):"
    return "\n".join([_HEADER, "", *examples, "", title, *groups, "", "Keys:", *keys, *settings, _FOOTER])


def keys_of(file: Path) -> set[str]:
    """Return the keys at the top level of config.yaml, without groups."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {line.partition(":")[0] for line in lines if line[:1].isalpha()} - {"defaults", "hydra"}


def keys_below(file: Path, section: str) -> dict[str, str]:
    """Return the keys of a section of config.yaml (`probes.layers`), each with its default and its comment."""
    _, _, rest = f"\n{file.read_text(encoding='utf-8')}".partition(f"\n{section}:")
    lines = takewhile(lambda line: line.startswith("  "), rest.splitlines()[1:])
    pairs = (line.strip().partition(":") for line in lines if not line.lstrip().startswith("- "))
    return {f"{section}.{key}": value.strip() for key, _, value in pairs}


def _keys(file: Path) -> list[str]:
    """Return the lines of config.yaml that set a value at the top level, with their comments, which are wrapped."""
    lines = file.read_text(encoding="utf-8").splitlines()
    fill = partial(textwrap.fill, width=_WIDTH, subsequent_indent=" " * len("  percentiles: [50, 95, 99] ") + "# ")
    keys = (line for line in lines if line[:1].isalpha() and line.partition("#")[0].rstrip()[-1] != ":")
    return [fill(f"  {key}") for key in keys]
