"""Words and flags as other tools take them are errors that name the overrides."""

import pytest

from perfexp.cli import meant


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
        ("--config-dir own model=resnet18 amp_fp16", "--config-dir own model=resnet18 precision=amp_fp16"),
        ("--stopping.max-seconds 3", "stopping.max_seconds=3"),
    ],
)
def test_words_and_flags_have_overrides(typed, overrides):
    assert meant.command(typed.split()) == overrides.split()


@pytest.mark.parametrize("typed", ["model=resnet50 -m", "stauts", "xyzzy", "none", "--xyzzy 3", "--dry-run"])
def test_without_a_clear_meaning_there_is_no_suggestion(typed):
    assert meant.command(typed.split()) is None


def test_the_error_has_the_whole_command(run, tmp_path):
    code, printed, _ = run("resnet50", "--batch-size", "8")
    assert (code, "Did you mean: perfexp model=resnet50 batch_size=8" in printed) == (2, True)
    assert not list(tmp_path.iterdir())
