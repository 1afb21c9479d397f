"""Damaged records: each command works, or refuses with one line; nothing in a record makes it crash."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from perfexp import commands
from perfexp.errors import PerfexpError
from perfexp.forecast import corpus
from perfexp.host import crash_report
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record
from perfexp.reports import run_files
from perfexp.summaries.analysis import Analysis
from tests.adversarial.damaged import damaged

GOOD = (
    Path(__file__).parent / "record.json",
    Path(__file__).parents[1] / "golden" / "record-1.json",
)
#: One in so many cases is tried, and with `--all`.
STRIDE, STRIDE_OF_ALL = 200, 10


def commands_on(bad, good, out):
    yield ["show", bad]
    yield ["show", bad, "--json"]
    yield ["show", bad, "--html", f"{out}/page.html", "--force"]
    yield ["compare", good, bad]
    yield ["compare", bad, good, "--output", f"{out}/compared", "--force"]
    yield ["check", bad, "--against", good]
    yield ["check", good, "--against", bad]
    yield ["export", bad, "--samples", "--layers", "--force", "--out", f"{out}/table"]
    yield ["status", bad]
    yield ["baseline", "add", "b", bad, "--force", "--folder", f"{out}/baselines"]
    yield ["reproduce", bad, "--dry-run"]


def problems(content, folder, monkeypatch):
    """What goes wrong with a record, a line each."""
    found, bad, good = [], folder / "bad", folder / "good"
    monkeypatch.setattr(
        crash_report,
        "failure",
        lambda error, *_: found.append(repr(error)) or PerfexpError("crash"),
    )
    (bad / "record.json").write_text(json.dumps(content))
    for command in commands_on(str(bad), str(good), folder):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = commands.run(command)
        if code not in (0, 1, 2) or "Traceback" in err.getvalue():
            found.append(f"{command[0]}: {code} {err.getvalue()}")
        if (
            command[0] == "check"
            and code == 1
            and not out.getvalue().startswith(("WORSE", "MISSING", "SLOWER", "MORE"))
        ):
            found.append(f"check: 1 {out.getvalue()} {err.getvalue()}")
    with contextlib.suppress(PerfexpError):
        paths = RunPaths(folder / "written")
        paths.create()
        run_files.write(Analysis.of(Record.load(bad)), paths)
    with contextlib.suppress(PerfexpError):
        list(corpus.find_curves([bad]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("source", GOOD, ids=lambda path: path.stem)
def test_a_damaged_record_is_used_or_refused_in_one_line(source, tmp_path, monkeypatch, request):
    content = json.loads(source.read_text())
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "good" / "record.json").write_text(json.dumps({**content, "uid": "another"}))
    monkeypatch.chdir(tmp_path)
    assert problems(content, tmp_path, monkeypatch) == []
    stride = STRIDE_OF_ALL if request.config.option.all else STRIDE
    for place, changed in list(damaged(content))[::stride]:
        assert problems(changed, tmp_path, monkeypatch) == [], place


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((("schema_version",), 0), (("points", 0, "series", 0, "samples"), [-1.0])),
        *(
            (("points", 0, "series", 0, "unit"), "ms"),
            (("points", 0, "series", 0, "samples"), [1e308] * 9),
        ),
        *(
            (("priors",), {"device": {"variance": -1.0, "degrees": 1.0}}),
            (("points", 0, "metrics", 0, "value"), 1e308),
        ),
        (("priors",), {"device": {"variance": 1e-4, "degrees": 0.0}}),
        *((("points", 0, "key", "batch_size"), -1), (("points", 0, "key", "input_size"), [0, 1])),
        (("points", 0, "facts", "layers"), {"lines": 0}),
    ],
)
def test_check_refuses_impossible_values_with_exit_code_2(place, value, tmp_path, capsys):
    content = node = json.loads(GOOD[0].read_text())
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "good" / "record.json").write_text(json.dumps(content))
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    (tmp_path / "bad" / "record.json").write_text(json.dumps({**content, "uid": "another"}))
    assert commands.run(["check", str(tmp_path / "bad"), "--against", str(tmp_path / "good")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "unexpected" not in line


def test_a_crash_of_a_command_is_not_an_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("perfexp.comparison.judging.compare", lambda *_: 1 / 0)
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "record.json").write_bytes(GOOD[0].read_bytes())
    assert commands.run(["check", str(tmp_path / "good"), "--against", str(tmp_path / "good")]) == 2
    assert "unexpected ZeroDivisionError" in capsys.readouterr().err
