"""`perfexp train-speed`: the six words, what they come to, what is refused, and the file that is left."""

import json

import pytest

from perfexp import commands
from perfexp.commands import train_speed
from perfexp.orchestration import worker_query
from perfexp.records.record import Record
from perfexp.speed import Mode, Speed

pytestmark = pytest.mark.usefixtures("quick_commands")

SIX = ("fake", "sp", "fp32", "2", "30", "5")
FAKE = ("gpu=fake", "tracking=none", "probes.work=false", "input_size=64")
NAME = "fake_sp_bs2_fp32_1_speed.json"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory of its own: that is where the files go."""
    monkeypatch.chdir(tmp_path)
    worker_query.visible_gpus.cache_clear()
    yield tmp_path
    worker_query.visible_gpus.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """A function that says how many cards are visible."""

    def have(number):
        cuda = {"devices": [{"index": index} for index in range(number)]}
        monkeypatch.setattr(
            worker_query, "survey", lambda index: {"parts": {"cuda": cuda}, "failure": None}
        )

    return have


def settled(*words, overrides=(), **changes):
    six = dict(
        zip(
            ("model", "run_mode", "precision", "batch_size", "iterations", "workers"),
            words,
            strict=False,
        )
    )
    defaults = {
        "model": "fastscnn",
        "run_mode": "sp",
        "precision": "fp32",
        "batch_size": 2,
        "iterations": 500,
    }
    settings = {**defaults, "workers": 5, **six, **changes}
    return train_speed.settle(
        overrides, None, **{**settings, "run_mode": Mode(settings["run_mode"])}
    )


def test_a_dry_run_names_the_points_and_makes_nothing(here, capsys):
    assert commands.run(["train-speed", *SIX, *FAKE, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "1 point, time unknown" in printed
    assert "Nothing has been measured." in printed
    assert not list(here.iterdir())


def test_training_writes_its_speed_file_to_the_current_folder(here, capsys):
    earlier = Speed(
        log_file="x",
        model="fake",
        mode="sp",
        num_gpus=1,
        batch_size=2,
        precision="fp32",
        images_per_second=1.0,
    )
    (here / NAME).write_bytes(earlier.to_json())
    assert commands.run(["train-speed", *SIX, *FAKE, "quiet=true"]) == 0
    document = json.loads((here / NAME).read_bytes())
    [record] = [Record.load(file) for file in here.rglob("record.json")]
    assert document["log_file"] == str(next(here.rglob("run.log")))
    assert (document["run_mode"], document["gpu_num"], document["JOB_FAIL_FLAG"]) == ("sp", 1, 0)
    [series] = [series for series in record.points[0].series if series.name == "throughput"]
    assert len(series.measured) == 30
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("synthetic has no workers: 5 is not used")
    assert lines[-2].startswith(f"{NAME}: {document['FINAL_RESULT']:g} images/s (mean ")
    assert lines[-1] == f"FINAL_RESULT: {document['FINAL_RESULT']:g} images/s"


def test_a_training_that_fails_ends_with_1_and_is_written_down(here, capsys):
    failing = "model.faults.oom=1000"
    assert (
        commands.run(["train-speed", *SIX, *FAKE, failing, "output_dir=x", "speed_dir=null"]) == 1
    )
    document = json.loads((here / "x" / NAME).read_bytes())
    assert (document["FINAL_RESULT"], document["JOB_FAIL_FLAG"]) == (0.0, 1)
    assert capsys.readouterr().out.splitlines()[-1] == "FINAL_RESULT: 0 images/s"
    assert not (here / NAME).exists()


def test_the_six_words_are_a_run_of_exactly_so_many_steps():
    arguments, plan = settled()
    assert (plan.model_name, plan.phases, plan.precision.name) == ("fastscnn", ["train"], "fp32")
    assert (plan.stopping["measure"], plan.stopping["warmup"]) == (500, 10)
    [key] = plan.timed_keys()
    assert (key.batch_size, key.size_label) == (2, "512x1024")
    assert (plan.gpu["count"], plan.speed_dir) == (1, ".")
    assert "hydra.mode=RUN" in arguments


def test_trailing_overrides_win_over_train_speed_defaults():
    more = (
        "data=cityscapes",
        "data.root=/data",
        "input_size=64x96",
        "speed_dir=/tmp",
        "stopping.warmup=50",
    )
    _, plan = settled("segformer_b0", overrides=more, workers=3)
    assert (plan.data["workers"], plan.data["root"], plan.speed_dir) == (3, "/data", "/tmp")
    assert plan.timed_keys()[0].size_label == "64x96"
    assert (plan.stopping["measure"], plan.stopping["warmup"]) == (500, 50)


def changed(position, word):
    return [*SIX[:position], word, *SIX[position + 1 :]]


@pytest.mark.parametrize(
    ("word", "name"), [("fp16", "amp_fp16"), ("amp", "amp_fp16"), ("tf32", "tf32")]
)
def test_fp16_is_mixed_precision_as_in_training_frameworks(word, name, here):
    assert commands.run(["train-speed", *changed(2, word), *FAKE, "quiet=true"]) == 0
    assert Record.load(next(here.rglob("record.json"))).points[0].key.precision == name


def test_train_speed_fp16_is_explained_and_half_stays_available():
    def notes(*overrides):
        words = {
            "model": "fake",
            "run_mode": Mode.sp,
            "precision": "amp_fp16",
            "batch_size": 2,
            "iterations": 5,
        }
        plan = train_speed.settle(overrides, None, **words, workers=0)[1]
        return plan.precision.name, list(train_speed._notes(overrides, "fp16", 0, plan))

    name, (told, _) = notes()
    assert (name, told.partition(".")[0]) == (
        "amp_fp16",
        "fp16 is mixed precision here: precision=amp_fp16",
    )
    name, (told,) = notes("precision=fp16")
    assert (name, "mixed" in told) == ("fp16", False)


@pytest.mark.parametrize(
    ("visible", "overrides", "count"), [(2, (), 2), (8, (), 8), (8, ("gpu.index=2",), 6)]
)
def test_mp_takes_all_cards_that_are_visible(visible, overrides, count, machine):
    machine(visible)
    arguments, plan = settled("fastscnn", "mp", overrides=overrides)
    assert plan.gpu["count"] == count
    assert f"gpu.count={count}" in arguments


def test_mp_takes_as_many_as_the_user_says_and_then_asks_nobody():
    _, plan = settled("fastscnn", "mp", overrides=("gpu.count=4",))
    assert plan.gpu["count"] == 4
    _, plan = settled("fastscnn", "mp", overrides=("gpu=cpu", "gpu.count=2"))
    assert plan.gpu["count"] == 2


@pytest.mark.parametrize(
    ("run_mode", "visible", "overrides", "message"),
    [
        ("mp", 1, (), "one GPU is visible"),
        ("mp", 0, (), "no GPU is visible"),
        ("mp", 2, ("gpu.index=1",), "one GPU is visible"),
        ("mp", 8, ("gpu.count=1",), "gpu.count=1; use sp"),
        ("mp", 8, ("gpu=cpu",), "gpu=cpu is not a GPU; use sp, or gpu.count=N"),
        ("mp", 8, ("gpu=fake",), "gpu=fake has no gpu.count"),
        ("sp", 8, ("gpu.count=2",), "sp is one GPU, but gpu.count=2"),
    ],
)
def test_a_run_mode_without_the_cards_for_it_is_refused(
    run_mode, visible, overrides, message, machine, here, capsys
):
    machine(visible)
    assert commands.run(["train-speed", "fastscnn", run_mode, *SIX[2:], *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(here.iterdir()) == []


def test_a_machine_that_can_not_be_asked_is_an_error(monkeypatch, capsys):
    failure = {
        "text": "the process that queries torch and the driver was ended by SIGSEGV",
        "during": "cuda",
    }
    monkeypatch.setattr(worker_query, "survey", lambda index: {"parts": {}, "failure": failure})
    assert commands.run(["train-speed", "fastscnn", "mp", *SIX[2:]]) == 1
    assert "SIGSEGV" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (changed(0, "fastscn"), "model=fastscn: option not found. Did you mean fastscnn?"),
        (changed(0, "fake,fastscnn"), "Ambiguous value for argument 'model=fake,fastscnn'"),
        (changed(1, "dp"), "'dp' is not one of 'sp', 'mp'"),
        (changed(2, "fp23"), "precision=fp23: option not found. Did you mean"),
        (changed(3, "0"), "'BATCH_SIZE': Input should be greater than or equal to 1"),
        (changed(3, "-1"), "'BATCH_SIZE': Input should be greater than or equal to 1"),
        (changed(3, "2.5"), "'BATCH_SIZE': Input should be a valid integer"),
        (changed(3, "9" * 30), "'BATCH_SIZE': Input should be less than or equal to 1000000"),
        (changed(4, "0"), "'ITERATIONS': Input should be greater than or equal to 1"),
        (changed(4, "many"), "'ITERATIONS': Input should be a valid integer"),
        (changed(5, "-2"), "'WORKERS': Input should be greater than or equal to 0"),
        ([*SIX, "--typo"], "'--typo' is not an override"),
        ([*SIX, "batch_size=4"], "'batch_size' is set by BATCH_SIZE; leave it out."),
        ([*SIX, "++stopping.measure=4"], "'stopping.measure' is set by ITERATIONS"),
        ([*SIX, "mode=inference"], "'mode' is set by the command: it trains"),
        ([*SIX, "gpu=fake", "seed=1,2"], "seed=1,2"),
        ([*SIX, "gpu=fake", "inputsize=64"], "Did you mean input_size?"),
        ([*SIX, "gpu=fake", "data=cityscapes"], "data.root"),
        ([*SIX, "gpu=fake", "speed_dir=missing"], "There is no folder missing"),
        ([*SIX, "gpu=fake", "speed_dir=file"], "file is not a folder"),
        ([*SIX, "gpu=fake", "speed_dir=/proc"], "The folder /proc can't be written"),
        ([*SIX, "gpu=fake", "speed_dir=taken"], "not a speed file"),
        ([*SIX, "--config-dir", "missing", "gpu=fake"], "missing"),
    ],
)
def test_invalid_arguments_are_refused_before_training(words, message, here, capsys):
    (here / "file").write_text("")
    (here / "taken").mkdir()
    (here / "taken" / NAME).write_text("mine")
    assert commands.run(["train-speed", *words]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert message in line
    assert printed.out == ""
    assert not (here / "outputs").exists()
    assert (here / "taken" / NAME).read_text() == "mine"


def test_several_replicates_have_a_file_each(here, capsys):
    assert commands.run(["train-speed", *SIX, *FAKE, "processes=2", "quiet=true"]) == 0
    names = [f"fake_replicate{number}_sp_bs2_fp32_1_speed.json" for number in range(2)]
    assert sorted(path.name for path in here.glob("*_speed.json")) == names
    assert capsys.readouterr().out.count("FINAL_RESULT: ") == 2


@pytest.mark.slow
def test_a_models_group_of_the_users_own_is_known(here):
    folder = here / "own" / "model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# Mine.\ndefaults:\n  - fake\n  - _self_\n\nname: mine\n")
    own = ["--config-dir", str(here / "own")]
    assert commands.run(["train-speed", "mine", *SIX[1:], *FAKE, "quiet=true", *own]) == 0
    assert (here / "mine_sp_bs2_fp32_1_speed.json").is_file()
