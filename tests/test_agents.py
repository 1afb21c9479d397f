"""AGENTS.md: every command in it runs, and its documents have the fields that it names."""

import json
import re
import shlex
from pathlib import Path

import pytest

from perfexp import commands
from perfexp.cli.usage import COMMANDS
from perfexp.comparison.document import Verdict
from perfexp.main import main

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "AGENTS.md"
SKILL = ROOT / ".agents" / "skills" / "perfexp" / "SKILL.md"
#: Settings for a quick measurement, and what replaces words of the page on the scripted device.
QUICK = ("input_size=32", "tracking=none", "stopping=coarse")
SCRIPTED = {
    "model=resnet18": ("model=fake", "gpu=fake", "probes.work=false", *QUICK),
    "algorithm=default": ("model.base_seconds=1e-3",),
    "algorithm=gemm": ("model.base_seconds=1.1e-3",),
}
ON_CPU = {"model=resnet18": ("model=resnet18", "gpu=cpu", *QUICK)}


def written_commands():
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.DOTALL)
    return "".join(blocks).splitlines()


def results(capsys, replaced):
    """Run all commands of the page in order; return exit codes and JSON documents by command."""
    found = []
    for line in written_commands():
        words = []
        for word in shlex.split(line.removeprefix("python -m ").removeprefix("perfexp ")):
            words += replaced.get(word, (word,))
        capsys.readouterr()
        code = commands.run(words) if words[0] in COMMANDS else main(words)
        printed = capsys.readouterr().out
        found.append((words, code, json.loads(printed) if "--json" in words else None))
    return found


@pytest.mark.slow
@pytest.mark.always("AGENTS.md: commands, exit codes and documents")
def test_commands_for_agents_run_on_the_scripted_device(
    tmp_path, monkeypatch, capsys, quick_commands
):
    monkeypatch.chdir(tmp_path)
    first, second, shown, compared, ab, checked, decided = results(capsys, SCRIPTED)
    assert [one[1] for one in (first, second, shown, compared, ab, decided)] == [0] * 6
    assert checked[1] == 1
    for _, _, document in (first, second, shown):
        [run] = document["runs"]
        assert {"median_ms", "ci_low_ms", "ci_high_ms", "time_kind"} <= run["points"][0].keys()
        assert {"code", "severity", "detail", "remedy"} <= run["diagnostics"][0].keys()
    for document in (compared[2], decided[2], checked[2]["comparison"]):
        assert {"verdict", "ratio", "low", "high", "further_processes"} <= document["pairs"][
            0
        ].keys()
        assert {"pairs", "sides", "alone"} <= document.keys()
        verdicts = {one["measure"]: one["verdict"] for one in document["pairs"]}
        assert verdicts["device"] == "worse"
    assert checked[2].keys() == {"outcome", "failed", "undecided", "changes", "comparison"}
    assert checked[2]["outcome"] == "failed"


@pytest.mark.slow
def test_commands_for_agents_run_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = results(capsys, ON_CPU)
    assert {code for words, code, _ in found if words[0] != "check"} == {0}
    assert {document["pairs"][0]["model"] for *_, document in found[3::3]} == {"resnet18"}


def test_the_page_for_agents_is_short_and_names_every_verdict():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 100 and not line.startswith("|")]
    assert all(f"| `{verdict.value}`" in "\n".join(lines) for verdict in Verdict)


def test_the_skill_leads_to_the_page():
    _, header, body = SKILL.read_text(encoding="utf-8").split("---\n")
    fields = dict(line.split(": ", 1) for line in header.splitlines())
    assert fields["name"] == SKILL.parent.name
    assert len(fields["description"]) <= 1024
    [target] = re.findall(r"\]\((.*?)\)", body)
    assert (SKILL.parent / target).resolve() == PAGE
