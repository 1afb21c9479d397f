"""Tab completion: candidates for the word at the cursor."""

import shutil
import subprocess

import pytest

from perfexp.__main__ import dispatch
from perfexp.cli import completion
from perfexp.errors import UserError


@pytest.mark.parametrize(
    ("words", "among", "others"),
    [
        (["sho"], ["show"], ["model="]),
        (["mod"], ["model=", "mode="], ["show"]),
        (["model=resnet1"], ["model=resnet18", "model=resnet101"], ["model=vgg16"]),
        (["-m", "model=resnet18,ale"], ["model=resnet18,alexnet"], []),
        (["precision="], ["precision=fp16"], []),
        (["batch_size=4", "inp"], ["input_size="], ["show"]),
        (["--o"], ["--overwrite"], []),
        (["list", "mod"], ["model", "mode"], []),
        (["show", "ou"], ["outputs/"], ["model="]),
        (["--config-dir", "ow"], ["own/"], []),
        (["--config-dir=own", "model=ti"], ["model=tiny"], []),
        (["output_dir=outputs/"], ["output_dir=outputs/a/"], []),
        (["xyz=1"], [], []),
    ],
)
def test_candidates_begin_with_the_word(words, among, others, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "a").mkdir(parents=True)
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "tiny.yaml").write_text("_target_: mine.Tiny\n")
    found = completion.candidates(words)
    assert set(among) <= set(found)
    assert not set(others) & set(found)
    assert all(text.startswith(words[-1]) for text in found)


@pytest.mark.parametrize("name", ["$(touch x)", "`x`", "a;x", "a\nb", "\x1b]0;x\x07", "a b", "!x"])
def test_a_folder_that_a_shell_reads_as_code_is_no_candidate(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (name, "größe-1.5_x"):
        (tmp_path / folder).mkdir()
    for words in (["show", ""], ["resume="], ["--config-dir="]):
        assert [text.rpartition("=")[2] for text in completion.candidates(words)][-1:] == [
            "größe-1.5_x/"
        ]
        assert not [text for text in completion.candidates(words) if name in text]


def test_a_shell_gets_a_line_for_each_candidate(capsys):
    assert dispatch(["--complete", "gpu=h1"]) == 0
    assert "gpu=h100\n" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_is_one_that_its_shell_reads(shell, tmp_path):
    text = completion.script(shell)
    assert completion.QUERY in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text.encode(), check=True, timeout=30)


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "reply"), [("perfexp model=swi", "swin_t"), ("perfexp sho", "show"), ("perfexp ", "x")]
)
def test_bash_replaces_what_follows_the_last_break(line, reply):
    whole = f"model={reply}" if "=" in line else reply
    query = f"perfexp() {{ echo {whole}; }}; COMP_LINE='{line}'; COMP_POINT={len(line)}; _perfexp; echo $COMPREPLY"
    code = f"{completion.script('bash')}\n{query}"
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == reply


def test_another_shell_is_a_user_error():
    with pytest.raises(UserError, match="Possible: bash, fish, zsh"):
        completion.script("tcsh")
