"""Random configurations, and files with random damage: a plan, an answer, or one line that says what is wrong.

Hypothesis draws a few here; `PERFEXP_EXAMPLES=500` in the environment draws as many as that.
"""

import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from perfexp import commands
from perfexp.cli.composition import compose
from perfexp.errors import PerfexpError
from perfexp.host.installation import conf_dir
from perfexp.plan.config import typed
from tests.roofline.listings import long_form, many, wide_form

pytestmark = pytest.mark.usefixtures("quick_commands")

EXAMPLES = int(os.environ.get("PERFEXP_EXAMPLES", "40"))
DRAWN = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # to shrink a failure composes for minutes
)
#: What a person types, and what nobody should.
VALUES = st.sampled_from(
    (
        *(
            "0",
            "1",
            "2",
            "7",
            "-1",
            "1.5",
            "1e-9",
            "1e9",
            "1e400",
            "nan",
            "inf",
            "true",
            "false",
            "null",
            "''",
            "x",
            "é",
        ),
        *(
            "[]",
            "[1]",
            "[1,2]",
            "[x]",
            "[[1]]",
            "[null]",
            "{}",
            "{a:1}",
            "224x224",
            "512x1024",
            "224x",
            "x224",
            "1_000",
        ),
        *(
            "auto",
            "fp32",
            "train",
            "fake",
            "none",
            "../x",
            "/nowhere",
            "a b",
            "'a,b'",
            "a,b",
            "1,2",
            "range(1,4)",
        ),
        *(
            "glob(*)",
            "choice(1,2)",
            "interval(0,1)",
            "sort(2,1)",
            "${seed}",
            "${nowhere}",
            "???",
            "'[bold]'",
            "9" * 30,
        ),
    )
)
GROUPS = {
    folder.name: [file.stem for file in sorted(folder.glob("*.yaml"))]
    for folder in conf_dir().iterdir()
    if folder.is_dir() and list(folder.glob("*.yaml"))
}


def leaves(node, prefix=""):
    """Every key of a plan that has a value, and the nodes above them."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        yield key
        if isinstance(value, dict):
            yield from leaves(value, f"{key}.")


@pytest.fixture(scope="module")
def keys():
    """Of plans of several kinds; none that chooses code, which is refused by a test of its own."""
    plans = (
        ("model=fake", "gpu=fake"),
        ("model=ocrnet", "data=cityscapes", "data.root=x", "profiler=nsys", "sweep=sizes"),
        (
            "mode=train_inference",
            "algorithm=fastest",
            "sweep=batch",
            "stopping=fixed",
            "gpu=h200",
            "model=resnet18",
        ),
    )
    found = {key for plan in plans for key in leaves(compose(plan))}
    return sorted(
        key for key in found if "_target_" not in key and not key.startswith(("choices", "command"))
    )


@DRAWN
@given(data=st.data())
@pytest.mark.slow
@pytest.mark.always("hostile: random configurations")
def test_a_random_configuration_is_a_plan_or_one_line(data, keys):
    groups = data.draw(st.lists(st.sampled_from(sorted(GROUPS)), max_size=3, unique=True))
    chosen = [f"{name}={data.draw(st.sampled_from(GROUPS[name]))}" for name in groups]
    prefixes = st.sampled_from(("", "", "", "+", "++", "~"))
    several = st.lists(st.tuples(prefixes, st.sampled_from(keys), VALUES), min_size=1, max_size=4)
    given_ = [f"{prefix}{key}={value}" for prefix, key, value in data.draw(several)]
    try:
        plan = compose(["gpu=fake", "tracking=none", *chosen, *given_])
    except PerfexpError as error:
        assert error.exit_code == 2
        assert str(error).strip()
        assert not str(error).startswith("unexpected")
        return
    assert typed(plan).timed_keys()


def damaged(text, seed):
    """A text with one to four changes of its lines or characters."""
    source = random.Random(seed)
    lines = text.splitlines(keepends=True)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(lines)) if lines else 0
        change = source.randrange(8)
        if change == 0:
            del lines[place : place + source.randint(1, 20)]
        elif change == 1:
            lines[place:place] = source.sample(lines, min(len(lines), 5))
        elif change == 2:
            lines = lines[: place + 1]
        elif change == 3 and lines:
            cut = source.randrange(len(lines[place]) + 1)
            lines[place] = lines[place][:cut]
        elif change == 4 and lines:
            lines[place] = lines[place].translate(
                str.maketrans(
                    "0123456789", source.choice(("9876543210", "..........", "nan-+e1234"))
                )
            )
        elif change == 5 and lines:
            lines[place] = source.choice(
                (
                    "\0",
                    "\x1b[2J\n",
                    "Traceback (most recent call last):\n",
                    "[]\n",
                    "{",
                    '"\n',
                    "1e999,\n",
                )
            )
        elif change == 6:
            source.shuffle(lines)
        elif lines:
            lines[place] = lines[place].replace(
                source.choice(':,[]{}" ='), source.choice(("", ":", ",", "\t", "é"))
            )
    return "".join(lines)


def answer(capsys, *arguments):
    """The exit code of a command that says in one line what is wrong, if something is."""
    code = commands.run(list(arguments))
    printed = capsys.readouterr()
    assert code in (0, 1, 2)
    assert "error: unexpected" not in printed.err
    assert "\nTraceback" not in f"\n{printed.err}"
    said = [
        line for line in printed.err.splitlines() if not line.startswith("  ")
    ]  # a command to copy is indented
    assert len(said) <= 1, printed.err
    assert printed.out or printed.err
    return code


LOGS = sorted(
    path
    for path in (Path(__file__).parents[1] / "report" / "speed" / "data").rglob("*")
    if path.is_file()
)


@DRAWN
@given(seed=st.integers(0, 10**9))
@pytest.mark.slow
def test_a_damaged_log_is_an_answer_or_one_line(seed, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("log")
    source = LOGS[seed % len(LOGS)]
    log = folder / source.name
    log.write_text(damaged(source.read_text(errors="replace"), seed), errors="replace")
    given_ = (
        "--model",
        "m",
        "--batch-size",
        "2",
        "--gpus",
        "1",
        "--precision",
        "fp32",
        "--out",
        str(folder),
    )
    answer(capsys, "speed", str(log), *given_)


@settings(DRAWN, max_examples=EXAMPLES // 4)  # each draws a picture
@given(seed=st.integers(0, 10**9))
@example(seed=32845628)  # no launch has all that it takes
@pytest.mark.slow
def test_a_damaged_file_of_ncu_is_an_answer_or_one_line(seed, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("ncu")
    made = (wide_form if seed % 2 else long_form)(many(6, seed % 7 + 1))
    (folder / "ncu.csv").write_text(damaged(made, seed), errors="replace")
    answer(
        capsys,
        "roofline",
        str(folder / "ncu.csv"),
        "--gpu",
        "h100",
        "--summary",
        str(folder / "s.csv"),
    )


@DRAWN
@given(seed=st.integers(0, 10**9))
@pytest.mark.slow
def test_a_damaged_record_is_an_answer_or_one_line(
    seed, tmp_path_factory, make_record, leave_run, capsys
):
    folder = leave_run(make_record(), tmp_path_factory.mktemp("run") / "x")
    record = folder / "record.json"
    record.write_text(
        damaged(json.dumps(json.loads(record.read_text()), indent=1), seed), errors="replace"
    )
    answer(capsys, "show", str(folder))
    answer(capsys, "export", str(folder), "--out", str(folder / "table"))
