"""Help texts: the overview, and the meaning of each key, code and table term.

They are read from the files in conf/, because Hydra would take a second to compose them. `COMMANDS`
has the commands, as the overview lists them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from perfexp.cli.conf_files import comment_of, config_values, options_below
from perfexp.errors import UserError, did_you_mean
from perfexp.records.quantities import COVERAGE, named

#: Width of a terminal, in characters.
_WIDTH = 80
#: Models without a file in conf/.
_OTHER_MODELS = (
    "Others: each name of torchvision; timm:NAME; hf:NAME for an architecture of Hugging Face, "
    "such as hf:bert; mine:TinyNet for your class or function in "
    "mine.py, in the current folder or on the module path, with its arguments as model.KEY=VALUE. "
    "Its method example_inputs(batch_size) makes inputs other than images; a tuple or a "
    "dictionary holds several inputs of forward."
)
#: The overview, in which `text` inserts the groups and the keys.
_OVERVIEW = """\
perfexp measures how fast a deep-learning model trains and infers.

  perfexp model=resnet50 mode=inference
  perfexp model=vgg16 mode=train batch_size=[8,32]    two points of one run
  perfexp -m model=resnet18,hf:bert batch_size=1,8    a run for each combination
  perfexp experiment=quick model=vgg16                10 sizes
  perfexp model=mine:TinyNet model.width=32           mine.py; see help model

look     perfexp list runs               runs and sweeps below outputs
         perfexp show                    the last run; DIR another one, -v all
         perfexp status                  done, failed, missing, running points
         perfexp roofline DIR            which ceiling limits kernels or layers
         perfexp nsys-stats DIR          tables of an nsys profile
         perfexp ui                      open MLflow
compare  perfexp compare A B             which run is faster, and by how much
         perfexp ab A B                  measure A and B in turn until a verdict
         perfexp reproduce DIR           measure a record again: same figures?
         perfexp check A --against B     exit code 1 if a run is slower, for CI
         perfexp baseline add NAME DIR   named baselines for check
         perfexp predict model=vgg16     memory, time and energy without a run
         perfexp predict check DIR       how predictions agree with your records
set up   perfexp doctor                  whether this machine can measure
         perfexp selfcheck               how much processes differ here
         perfexp calibrate kernels       learn the kernels that prove algorithms
         perfexp list models             options of a group, or of all groups
         perfexp completion bash         tab completion for bash, zsh or fish
         perfexp make-data DIR           small data sets to try out
         perfexp env                     facts of this machine, as JSON
files    perfexp export DIR              one table of many runs, CSV and Parquet
         perfexp apply PLAN --check …    gain of a run's algorithms in your code
         perfexp speed DIR               speed file of a training, or of a log
         perfexp train-speed MODEL …     train a model, write its speed file
         perfexp sync DIR                send records to MLflow again
         perfexp clean                   delete tables and profiles
cluster  perfexp cluster check           nodes of SLURM for each gpu=
         perfexp cluster use SITE        submit each sweep to a site from now on
         perfexp cluster logs RUN        output of the job of a run
         perfexp cluster cancel DIR      cancel the jobs of a sweep

{groups}
{keys}
  probes.layers=true                    time of each layer (perfexp list probes)
  probes.energy=true                    energy of a call
  gpu.count=2                           devices, each with a batch of its own
  algorithm=gemm algorithm.verify=true  prove the algorithm by its kernels
  data=images data.root=DIR             images from a folder
  profiler=nsys profiler.steps=3        calls to profile
  resume=DIR                            measure what a run or sweep lacks

A group's own keys are set as group.key=value (stopping.max_seconds=10). Flags:
-m sweeps, --cfg job prints the composed configuration, --dry-run prints points
and estimated time, --config-dir DIR adds your own options, -v prints all
metrics and the notes, --json prints JSON, --overwrite replaces a folder's
results, --max-jobs N allows sweeps of over 1,000 runs, --hydra-help explains
Hydra's other flags. `perfexp COMMAND --help` explains a command, `perfexp help
keys` all options and keys, `perfexp help profiler.steps` one of them, `perfexp
help busy_host` the code of a warning, and `perfexp help p95` a table's term."""
#: Commands of `perfexp COMMAND`; any other first argument belongs to a measurement.
COMMANDS = tuple(dict.fromkeys(re.findall(r"^.{9}perfexp ([\w-]+)", _OVERVIEW, re.MULTILINE)))
#: Earlier names of commands, which go on working.
OLD_COMMANDS = {
    "benchmark": ("train-speed",),
    "stats": ("nsys-stats",),
    "log": ("sync",),
    "job-output": ("cluster", "logs"),
    "cancel": ("cluster", "cancel"),
}
#: Topic of `perfexp help` for all options and keys.
_KEYS = "keys"
#: Start of the further lines of a key, below its meaning.
_INDENT = " " * 6 + "# "


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for help, as an empty command line does."""
    return not arguments or arguments[0] == "help" or not {"--help", "-h"}.isdisjoint(arguments)


def text(folders: Sequence[Path], arguments: Sequence[str] = ()) -> str:
    """Return the requested help: the overview, all options and keys (`help keys`), or a topic.

    `__main__` prints it.

    Args:
        folders: conf/, and folders with the user's own options.
        arguments: the command line.

    Raises:
        UserError: the topic is unknown.
    """
    options = options_below(folders)
    topic = " ".join(arguments[1:]) if [*arguments[:1]] == ["help"] else ""
    if topic == _KEYS:
        return "\n".join(_details(options, folders[0]))
    if topic and not topic.startswith("-"):
        return _topic(topic, options, folders[0])
    names = [key for key in config_values(folders[0]) if "." not in key]
    return _OVERVIEW.format(
        groups=_filled("Groups: ", sorted(options)), keys=_filled("Keys: ", names)
    )


def _topic(topic: str, options: Mapping[str, Mapping[str, Path]], conf: Path) -> str:
    """Return the meaning of a key, an option, a diagnostic's code, or a table term.

    Raises:
        UserError: the topic is something else.
    """
    from perfexp.cli import keys  # the overview does without
    from perfexp.records.diagnostics import DIAGNOSTICS, MERGED, meanings

    topic = MERGED.get(topic, topic)
    key_lines = list(_on_key(topic.partition("=")[0], options, conf))
    if text := meaning_of(topic):
        return "\n".join(
            [textwrap.fill(f"{topic}: {text}", _WIDTH, subsequent_indent="  "), *key_lines]
        )
    if rule := DIAGNOSTICS.get(topic):
        remedies = [f"help: {rule.help}"] if "{" not in rule.help else []
        meaning = f"{topic} ({rule.severity}): {meanings()[topic]}"
        lines = (meaning, *remedies, "All codes: docs/reference/diagnostics.md")
        return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent="  ") for line in lines)
    for group, files in sorted(options.items()):
        if topic in files:
            line = f"{group}={topic}: {comment_of(files[topic])}"
            key_lines.append(textwrap.fill(line, _WIDTH, subsequent_indent="  "))
    if key_lines:
        return "\n".join(key_lines)
    suggestion = did_you_mean(topic, (*COMMANDS, *DIAGNOSTICS, *TERMS, *keys.lines(conf)))
    parts = (
        f"'{topic}' is not a command, a key, an option, a code or a term.",
        suggestion,
        "perfexp help lists commands, perfexp help keys all keys, "
        "docs/reference/metrics.md the metrics.",
    )
    raise UserError(" ".join(filter(None, parts)))


def _on_key(key: str, options: Mapping[str, Mapping[str, Path]], conf: Path) -> Iterator[str]:
    """Yield a group's options, or the keys with a name or in a section, with their meanings.

    Nothing is yielded for any other word.
    """
    from perfexp.cli import keys  # the overview does without

    if key in options:
        width = max(map(len, options[key])) + 4
        yield (
            f"Options of the group {key} "
            f"({key}=NAME --cfg job prints the keys of one, help keys all):"
        )
        for name, option_file in sorted(options[key].items()):
            yield _filled(f"  {name}".ljust(width), [comment_of(option_file)])
        if key == "model":
            yield _filled("  ", [_OTHER_MODELS])
        return
    for name, lines in keys.lines(conf).items():
        if f".{name}".endswith(f".{key}") or name.startswith(f"{key}."):
            yield from map(_wrapped, lines)


def _details(options: Mapping[str, Mapping[str, Path]], conf: Path) -> Iterator[str]:
    """Yield all groups with their options, and all keys with defaults and meanings."""
    from perfexp.cli import keys  # the overview does without

    yield "Groups (group=option; perfexp list GROUP explains the options):"
    width = max(map(len, options)) + 4
    for name in sorted(options):
        yield _filled(f"  {name}".ljust(width), sorted(options[name]))
    yield "\nKeys with their defaults (key=value), and the options that have them:"
    yield from map(_wrapped, chain.from_iterable(keys.lines(conf).values()))


def _filled(title: str, names: Sequence[str]) -> str:
    """Return a title and names with commas between them, as lines of the terminal's width."""
    indent = " " * len(title) if title[0] == " " else "  "
    return textwrap.fill(
        title + ", ".join(names), _WIDTH, subsequent_indent=indent, break_on_hyphens=False
    )


def _wrapped(line: str) -> str:
    """Return a key's line as several lines of the terminal's width."""
    return textwrap.fill(line, _WIDTH, subsequent_indent=_INDENT)


_COVERAGE = named(COVERAGE).title
#: Meanings by term; `docs/explanation/timing.md` and `statistics.md` have the rest.
TERMS = {
    "latency": "time that one caller waits, from a call until its result is there",
    "throughput": "time or samples/s of a pipelined loop, in which no call is waited for; a CPU "
    "has its latency only",
    "device": "time that the device works on a call, behind a pre-filled queue; a CPU has none",
    "device/graph": "time that the device works on a call that is launched as one CUDA graph",
    "samples/s": "samples per call over the mean time of a pipelined call",
    "p50": "median: half of the calls take at most this long",
    "±": "half-width of the 95 % interval: of the calls' median in one process, or of the mean "
    "over what the line "
    "below the table names; of such a mean another run lies within 1.4 times ±, in 95 of 100 "
    "cases; `and "
    "runs`: most of it is how much runs of such a model differ, which one run does not show",
    "CI95": "95 % interval, printed as its half-width (±) in percent of the figure, or by both "
    "ends where these differ "
    "much in distance",
    "effective samples": "as many independent samples would be as certain as this series, whose "
    "neighbours are alike",
    "standard deviation": "relative standard deviation of the medians of a point's processes; "
    "of several points, the largest",
    "scatter": "standard deviation of the times around the fit over sizes, without outliers",
    "interval score": "mean width of intervals, plus a penalty for each value outside of its own",
    "processes": "repetition in another process: with processes=3 intervals are of the mean over "
    "processes",
    "≈": "estimate: no interval, one whose ends differ by more than a factor of 100, or "
    "computed, not measured",
    "cold start": "wall time of a fresh process until its first result",
    _COVERAGE: "share of the convolutions' FLOPs that ran the requested algorithm, and whether "
    "it is proven",
    "tf32": "TensorFloat-32, in which NVIDIA's tensor cores multiply float32 numbers: 10 bits of "
    "mantissa, not 23; "
    "perfexp help precision has the options that allow it",
    "layers": "times of a model's layers (probes.layers=true), measured after the whole call's; "
    "layers.png shows them",
    "remarks": "codes of the errors, warnings and notes that qualify a figure; perfexp help CODE "
    "explains one",
    "last": "perfexp show without a folder shows the run or sweep below outputs that ended last; "
    "perfexp list runs "
    "lists all of them, the last one at the end",
    "proven": "by kernels that were observed: those of the requested algorithm, or code of "
    "perfexp or torch",
    "not verified": "cuDNN was handed the algorithm, its kernels were not observed; "
    "algorithm.verify=true does",
    "not observed": "torch chose the algorithm of these convolutions, and nothing observed which "
    "one",
    "fastest": "algorithm=fastest: for each convolution the fastest of all algorithms and "
    "torch's own, as measured",
    "memory": "peak of the timed calls, not of the first ones: tensors on a GPU, resident memory "
    "on a CPU",
    "cycles": "device time of a call × clock of the device, computed: another clock changes the "
    "time only",
    "loop/host": "time that the host takes to launch a call; longer than device time, and the "
    "device waits for it",
    "peak": "highest FLOP/s of the device in this precision by its data sheet; a ceiling is what "
    "a probe measured",
    "MFU": "FLOP/s of the pipelined loop, by the model's definition, over the device's peak in "
    "that precision",
    "energy": "of a call in the loop: mean power of the meter times the time of a call",
    "FASTER": "the ratio's interval lies wholly beyond the margin, as for SLOWER, LESS and MORE",
    "SAME": "the ratio's interval lies wholly within the margin",
    "UNDECIDED": "the ratio's interval lies neither wholly beyond the margin nor wholly within it",
    "NOT COMPARABLE": "something else differs that may explain the ratio",
    "oom": "the memory was not enough; oom_predicted: not tried, by a trace or a smaller point",
    "unsupported": "model, device or algorithm cannot do this; resume= does not try it again",
    "killed": "a signal ended the measuring process: memory was full, or native code crashed",
}
TERMS["coverage"] = TERMS[_COVERAGE]
TERMS["?"] = TERMS["UNDECIDED"]
TERMS["pipelined"] = TERMS["throughput"]
TERMS["spread"] = TERMS["standard deviation"]
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


def meaning_of(term: str) -> str:
    """Return the meaning of a term or percentile, such as `p95`; empty for anything else.

    `perfexp help TERM` prints it.
    """
    meanings = {name.lower(): text for name, text in TERMS.items()}
    if text := meanings.get(term.lower()):
        return text
    if percentile := _PERCENTILE.fullmatch(term.lower()):
        return (
            f"percentile: {percentile[1]} % of the calls take at most this long; "
            "of latency, if that was measured"
        )
    return ""
