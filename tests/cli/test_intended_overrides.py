"""Words and flags as other tools take them are errors that name the overrides."""

import pytest

from perfexp.cli import composition


@pytest.mark.parametrize(
    ("typed", "overrides"),
    [
        ("resnet50", "model=resnet50"),
        ("swin_t", "model=swin_t"),
        ("resnet51", "model=resnet50"),
        ("--batch-size 8", "batch_size=8"),
        ("--batchsize=8", "batch_size=8"),
        ("-b 8 resnet50 train", "batch_size=8 model=resnet50 mode=train"),
        ("-m resnet18,alexnet --device cpu", "-m model=resnet18,alexnet gpu=cpu"),
        (
            "--config-dir own model=resnet18 amp_fp16",
            "--config-dir own model=resnet18 precision=amp_fp16",
        ),
        ("device=cuda model=resnet18", "gpu=auto model=resnet18"),
        ("device=cpu", "gpu=cpu"),
        ("--device cuda", "gpu=auto"),
        ("dtype=float16 arch=resnet18", "precision=fp16 model=resnet18"),
        ("--dtype half resnet18", "precision=fp16 model=resnet18"),
        ("--stopping.max-seconds 3", "stopping.max_seconds=3"),
    ],
)
def test_words_and_flags_have_overrides(typed, overrides):
    assert composition.intended_overrides(typed.split()) == overrides.split()


@pytest.mark.parametrize(
    "typed", ["model=resnet50 -m", "stauts", "xyzzy", "none", "--xyzzy 3", "--dry-run"]
)
def test_without_a_clear_meaning_there_is_no_suggestion(typed):
    assert composition.intended_overrides(typed.split()) is None


def test_the_error_has_the_whole_command(run, tmp_path):
    code, printed, _ = run("resnet50", "--batch-size", "8")
    assert (code, "Did you mean: perfexp model=resnet50 batch_size=8" in printed) == (2, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "typed", ["model = resnet18 -m", "model =resnet18 -m", "model= resnet18 -m"]
)
def test_spaces_around_the_sign_are_named(run, typed):
    code, printed, _ = run(*typed.split())
    assert code == 2
    assert printed == "error: '=' has spaces around it; leave them out: perfexp model=resnet18 -m\n"
