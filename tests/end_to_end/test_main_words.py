"""The command line from end to end: words, settings and places that cannot be, and commands that measure nothing."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from perfexp.__main__ import dispatch
from perfexp.cli import usage
from perfexp.cli.usage import COMMANDS
from perfexp.devices import auto
from perfexp.devices.meters import none_because
from perfexp.host.installation import conf_dir
from perfexp.plan import naming
from perfexp.plan.plan_fields import FORMAT
from perfexp.records import diagnostics
from perfexp.records.record import Status
from tests.support import processes, typed

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (
            "profiler.trace",
            "  profiler.trace: [cuda,cudnn,nvtx,osrt]  # APIs to trace (nsys profile",
        ),
        ("mode.train.schedule", "  mode.train.schedule: constant  # how the learning rate changes"),
        ("stopping.measure", "  stopping.measure: 20  # measured calls (fixed)"),
        ("label_smoothing", "  mode.train.label_smoothing: 0  # share of each target"),
        ("execution.compile", "  execution.compile: null  # mode of torch.compile"),
        ("optimizer", "  mode.train.optimizer: required  # name of an optimizer"),
        ("gpu.count", "  gpu.count: 1  # number of devices; each has its own process (a rank)"),
        ("gpu.count=4", "  gpu.count: 1  # number of devices"),
    ],
)
def test_help_explains_the_keys_of_groups(capsys, key, told):
    assert dispatch(["help", key]) == 0
    assert told in capsys.readouterr().out
    assert dispatch(["help", "keys"]) == 0
    assert f"{key.partition('=')[0]}: " in capsys.readouterr().out


def test_help_suggests_the_key_of_a_group(capsys):
    assert dispatch(["help", "profiler.trce"]) == 2
    assert "Did you mean profiler.trace" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"], ["model=fake", "-h"]])
def test_help_is_printed_and_nothing_is_measured(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert dispatch(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("perfexp measures how fast")
    assert not [line for line in text.splitlines() if len(line) > 80]
    keys = (
        "probes.energy probes.layers resume=DIR gpu.count algorithm.verify data.root profiler.steps"
    )
    assert [key for key in keys.split() if key not in text] == []
    assert len(text.splitlines()) <= 60
    assert not list(tmp_path.iterdir())


def test_key_help_lists_every_default_meaning_and_option(capsys):
    assert dispatch(["help", "keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "  probes.energy_seconds: null  # least total length of the energy windows in" in lines
    assert [line for line in lines if line.startswith("  device_lock: wait")]
    assert any("wide" not in line and "ocrnet_hrnetw48" in line for line in lines)


@pytest.mark.parametrize(
    ("topic", "words"),
    [
        ("busy_host", "busy_host (warning): other processes used the CPU during the measurement"),
        ("tf32", "tf32: TensorFloat-32"),
        ("layers", "layers: times of a model's layers"),
        ("remarks", "remarks: codes of the errors"),
        ("coverage", "coverage: share of the convolutions' FLOPs"),
        ("compare", "Usage: perfexp compare"),
        ("last", "last: perfexp show without a folder shows"),
        ("?", "?: the ratio's interval lies neither"),
        ("p95", "p95: percentile: 95 % of the calls take at most this long"),
        ("p50", "p50: median"),
        ("latency", "latency: time that one caller waits"),
        ("≈", "≈: estimate: no interval"),
        ("cold start", "cold start: wall time of a fresh process"),
        ("undecided", "undecided: the ratio's interval lies neither"),
        (
            "batch_size=max",
            "  batch_size: 1  # samples per call and device, max for the largest that fits,",
        ),
        ("resume", "  resume: null  # folder of a run or sweep to continue; what it lacks"),
        ("probes.layers", "  probes.layers: false  # time of each layer"),
        ("stopping.max_seconds=3", "  stopping.max_seconds: "),
    ],
)
def test_help_explains_a_command_a_key_a_code_or_a_term(topic, words, capsys):
    assert dispatch(["help", *topic.split()]) == 0
    assert capsys.readouterr().out.startswith(words)


@pytest.mark.parametrize(
    "command", ["check x", "show --nope", "compare", "ui --port x", "calibrate nothing here"]
)
def test_a_wrong_command_line_is_one_line_as_everywhere(command, capsys):
    assert dispatch(command.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "Usage" not in line


@pytest.mark.parametrize("code", [*diagnostics.DIAGNOSTICS, *diagnostics.MERGED])
def test_help_on_a_code_is_a_sentence_without_placeholders(code, capsys):
    assert dispatch(["help", code]) == 0
    printed = capsys.readouterr().out
    assert not set("{}") & set(printed)
    assert "…" not in printed.partition("\nhelp: ")[0]
    assert len(printed.partition("): ")[2].splitlines()[0].split()) > 3


@pytest.mark.parametrize("group", ["precision", "execution", "stopping"])
def test_help_on_a_group_has_the_comment_of_each_options_file(group, capsys):
    assert dispatch(["help", group]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for file in (conf_dir() / group).glob("*.yaml"):
        comment = file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        assert f"{file.stem} {comment}" in printed


@pytest.mark.parametrize("group", ["stopping", "mode", "execution", "sweep", "precision", "probe"])
def test_each_option_of_a_group_is_explained(group, capsys):
    assert dispatch(["list", group]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line.split()) < 3] == []


@pytest.mark.parametrize("option", ["sweep=sparse", "experiment=time_to_accuracy", "algorithm=fft"])
def test_help_explains_the_name_of_an_option(option, capsys):
    group, _, name = option.partition("=")
    assert dispatch(["help", name]) == 0
    comment = (conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    text = " ".join(capsys.readouterr().out.split())
    assert f"{option}: {next(line for line in comment if 'package' not in line)[2:]}" in text


def test_help_on_an_unknown_word_suggests_the_nearest_name(capsys):
    assert dispatch(["help", "busyhost"]) == 2
    assert (
        "'busyhost' is not a command, a key, an option, a code or a term. Did you mean busy_host?"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("model=resnet51", "resnet50"),
        ("modle=resnet50", "model"),
        ("energy=true", "Did you mean probes.energy?"),
        ("layer=true", "Did you mean algorithm.layers or probes.layers?"),
        ("batchsize=4", "batch_size"),
        ("stopping.targetn=1", "target"),
        ("precision=fp8", "fp32"),
        ("precision=float16", "precision=float16: set precision=fp16;"),
        ("precision=half", "set precision=fp16;"),
        ("precision=bfloat16", "set precision=bf16;"),
        ("precision=float32", "precision=fp32; perfexp help precision"),
        ("precision=amp", "set precision=amp_fp16 or precision=amp_bf16;"),
        ("device=cuda", "Did you mean: perfexp gpu=fake model=fake tracking=none gpu=auto"),
        ("experiment=ful", "full"),
        ("stopping.target=abc", "stopping.target"),
        ("seed=x", "seed"),
        ("input_size=0", "input_size=0"),
        ("batch_size=[1,0]", "batch_size=0"),
        ("batch_size=[1", "batch_size=[1"),
        ("percentiles=[50,100]", "percentiles"),
        ("epochs=1", "mode=train"),
        ("processes=0", "processes=0"),
        ("model._target_=os.system", "_target_"),
        ("+model.kwargs={_target_:os.system}", "_target_"),
        ("+novelty=1", "novelty"),
        ("execution.cuda_graph=maybe", "execution.cuda_graph"),
        ("execution.threads=0", "execution.threads=0"),
        ("stopping.target=0", "target=0"),
        ("+probe.x=${oc.decode:'{_target_: os.system}'}", "_target_"),
        ("--experimental-rerun=x.pickle", "pickle"),
    ],
)
def test_invalid_argument_is_one_message_with_suggestions(run, argument, told, tmp_path):
    code, printed, records = run("gpu=fake", "model=fake", "tracking=none", argument)
    assert code == 2
    assert told in printed
    assert "Traceback" not in printed
    assert len(printed.strip().splitlines()) <= 3
    assert records == []
    assert not list(tmp_path.rglob("plan.yaml"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *((f"hydra.{setting}", f"hydra.{setting.partition('=')[0]} is not accepted") for setting in (
            "run.dir=h", "run.dir=/proc/x", "sweep.dir=h", "sweep.subdir=h", "output_subdir=h", "job.chdir=true",
            "verbose=true", "job_logging={version:7}", "sweeper=x",
        )),
        ("hydra=null", "hydra is not accepted"),
        ("~hydra.sweep.dir", "hydra.sweep.dir is not accepted"),
        ("-m hydra.sweeper.params={seed:'1,2'}", "-m KEY=A,B"),
        ("-m seed=1,2 hydra.sweeper.max_batch_size=0", "hydra.sweeper.max_batch_size=0"),
        ("-m batch_size=glob(*)", "'batch_size=glob(*)' matches no value"),
        ("-m model=glob(zz*)", "'model=glob(zz*)' matches no value"),
        ("-m seed=range(3,1)", "'seed=range(3,1)' matches no value"),
        ("batch_size=glob(*)", "batch_size=glob(*)"),
        ("-m --cfg job", "-m and --cfg exclude one another"),
        ("--cfg job -p nope", "'nope' not found"),
        ("--package mode", "--package is for --cfg"),
        ("--resolve", "--resolve is for --cfg"),
        ("--cfg nope", "invalid choice: 'nope'"),
        ("--nope", "--nope"),
        ("--shell-completion", "--shell-completion"),
    ],
)  # fmt: skip
def test_ignored_overrides_are_refused_in_one_line(run, arguments, told, tmp_path):
    code, printed, _ = run(*FAKE, *arguments.split())
    assert code == 2
    [line] = printed.splitlines()
    assert line.startswith("error: ")
    assert "unexpected" not in line
    assert told in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--cfg hydra", "sweeper:"),
        ("--cfg job -p mode", "name: inference"),
        ("--shell-completion install=bash", "hydra_bash_completion perfexp"),
    ],
)
def test_flags_that_print_measure_nothing(run, arguments, told, tmp_path):
    code, printed, _ = run(*FAKE, *arguments.split())
    assert code == 0
    assert told in printed
    assert not list(tmp_path.iterdir())


def test_a_model_that_needs_a_name_says_so(run):
    code, printed, _ = run("model=torchvision", "gpu=fake", "tracking=none")
    assert code == 2
    assert "model.name" in printed


def test_unavailable_device_is_refused_with_the_available_one(run):
    code, printed, _ = run("model=fake", "gpu=cpu", "tracking=none")
    assert code == 2
    assert "gpu=fake" in printed


@pytest.mark.parametrize("arguments", [FAKE, ("status",), ("ui",)])
def test_deleted_current_folder_is_reported_in_one_line(arguments, tmp_path):
    code = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); "
        "from perfexp.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout + done.stderr == (
        "error: The current folder has been deleted: change to one that exists (cd DIR).\n"
    )


def test_a_folder_that_can_not_be_written_is_told(run, tmp_path):
    (tmp_path / "file").write_text("")
    code, printed, _ = run(*FAKE, "output_dir=file/below")
    assert code == 2
    assert "output_dir" in printed
    assert "Traceback" not in printed


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told(run, tmp_path):
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro").chmod(stat.S_IRUSR | stat.S_IXUSR)
    code, printed, _ = run(*FAKE, "output_dir=ro/x")
    assert code == 2
    assert "can't be written" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["statuss"], "'statuss' is neither a command nor KEY=VALUE. Did you mean status"),
        (
            [*FAKE, "resnet18"],
            "settings are KEY=VALUE, with the names of perfexp. Did you mean: perfexp model=fake gpu=fake",
        ),
        (["-m", "modle"], "'modle' is neither a command nor KEY=VALUE"),
        (
            ["--config-dir", "mine", "list", "models"],
            "'list' is a command, and comes first: perfexp list …",
        ),
        (["--config-dir=mine", "status"], "'status' is a command, and comes first"),
        ([*FAKE, "batch_size=1,2"], "Several values are a sweep: add -m; or one list: KEY=[A,B]"),
        ([*FAKE, "percentiles=50"], "percentiles is a list, also of one value: percentiles=[…]."),
        (["model=squeezenet1_7"], "Did you mean squeezenet1_"),
        ([*FAKE, "stopping.measure=99999999999"], "more than 100,000,000: every time is stored"),
    ],
)
def test_invalid_words_and_values_get_a_suggestion(run, tmp_path, arguments, said):
    (tmp_path / "mine").mkdir()
    code, printed, records = run(*arguments)
    assert (code, records) == (2, [])
    assert said in printed


def test_a_disk_that_can_not_be_written_is_told_in_one_line(run, monkeypatch):
    from perfexp.run import driver

    def refuse(assignment, console):
        raise OSError(errno.EROFS, "Read-only file system", "x/run.log")

    monkeypatch.setattr(driver, "run", refuse)
    code, printed, _ = run(*FAKE, "output_dir=x")
    assert code == 1
    assert printed.startswith("error: Read-only file system: x/run.log. ")
    assert len(printed.splitlines()) == 1


def test_a_file_of_configuration_in_another_encoding_is_told(run, tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "tiny.yaml").write_text("name: tiny\n", encoding="utf-16")
    code, printed, _ = run("--config-dir", str(tmp_path / "mine"), "model=tiny", "gpu=fake")
    assert (code, printed) == (
        2,
        "error: A configuration file in --config-dir is not UTF-8 text: save it as UTF-8.\n",
    )


def test_invalid_yaml_in_a_config_file_is_named_with_its_line(run, tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "tiny.yaml").write_text("name: tiny\nbad: [1, 2\nworse: 3\n")
    code, printed, _ = run("--config-dir", str(tmp_path / "mine"), "model=tiny", "gpu=fake")
    assert code == 2
    assert "A configuration file is not YAML: " in printed
    assert "tiny.yaml, line 3: " in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "setting", ["stopping.measure=0", "stopping.measure=-3", "stopping.warmup=-1"]
)
def test_a_measurement_of_nothing_is_refused(run, setting):
    code, printed, records = run(*FAKE, setting)
    assert code == 2
    assert "at least" in printed
    assert records == []


def test_a_password_is_not_written_anywhere(run, tmp_path):
    secret = "tracking.uri='http://somebody:s3cr3t:p@ss@127.0.0.1:9'"
    settings = ("model=fake", "gpu=fake", "stopping=fixed", "output_dir=x")
    code, printed, records = run(
        *settings, secret.replace("t:p", "t/p")
    )  # no URL: a slash ends the name of a server
    assert (code, records) == (2, [])
    assert "s3cr3t" not in printed
    code, printed, [record] = run(*settings, "tracking.request_timeout_seconds=1", secret)
    assert code == 3
    assert "perfexp sync" in printed  # the server does not answer; how to send it later
    assert "s3cr3t" not in printed
    for file in filter(Path.is_file, (tmp_path / "x").rglob("*")):
        assert b"s3cr3t" not in file.read_bytes(), file.name
    assert record.status is Status.OK


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["model=fake", "--config-dir=/somewhere"], "--config-dir=/somewhere"),
        (["model=fake", "hydra.searchpath=[/somewhere]"], "hydra.searchpath"),
        (["model=fake", "profiler=nsys", "profiler.tool=sh"], "profiler.tool"),
        (["model=fake", "profiler=nsys", "profiler.options=[-x]"], "profiler.options"),
        (["model=fake", "model._target_=os.system"], "_target_"),
        (["model=fake", "seed=${oc.env:HOME}"], "oc.env"),
        (None, "its plan.yaml has no command"),
    ],
)
def test_a_folder_from_elsewhere_chooses_no_code(run, tmp_path, command, told):
    (tmp_path / "x" / "details").mkdir(parents=True)
    (tmp_path / "x" / "details" / "plan.yaml").write_text(
        yaml.safe_dump({"format": FORMAT} | ({"command": command} if command else {}))
    )
    code, printed, _ = run("resume=x")
    assert code == 2
    assert told in printed


def test_nothing_to_resume_is_told(run):
    code, printed, _ = run("resume=nowhere")
    assert code == 2
    assert "no run (plan.yaml) and no sweep" in printed


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        ("model=fake", "gpu=h100"),
        ("-m", "model=fake", "gpu=h100", "batch_size=1,2"),
        ("-m", "model=fake", "gpu=h100", "batch_size=1,2", "processes=2"),
        ("-m", "model=fake", "gpu=fake", "batch_size=0,-1"),
        ("model=resnet18", "gpu=cpu", "model.weights=nope.pth"),
        (*FAKE, "input_size=0"),
    ],
)
def test_user_error_leaves_no_folder_and_no_time_estimate(run, tmp_path, arguments, is_there):
    if is_there:
        (tmp_path / "x").mkdir()
    code, printed, _ = run(*arguments, "tracking=none", *(["output_dir=x"] if is_there else []))
    assert code == 2
    assert "measuring takes" not in printed
    assert list(tmp_path.rglob("*")) == ([tmp_path / "x"] if is_there else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (
            "",
            0,
            [
                "fake · inference · 224 · batch 1 · float32 · gpu=fake",
                "  1 point in 5 processes, about 20 s, more if calls are slow",
                "  into outputs/",
            ],
        ),
        ("quiet=true input_size=[64,96] gpu=cpu", 0, ["  2 points in 5 processes, about 18 s"]),
        (
            "-m batch_size=1,2",
            0,
            [
                "sweep over batch_size",
                "  2 runs, 2 points in 5 processes, about 41 s",
                "  batch_size=2-fake-",
            ],
        ),
        (
            "-m batch_size=1,2 processes=2 output_dir=s",
            0,
            ["  2 runs, 2 points in 2 processes, about 23 s", "/s/"],
        ),
        ("gpu=auto", 0, ["  1 point in 5 processes, about 15 s"]),
        ("gpu=auto mode=train probes.energy=true", 0, ["  1 point in 5 processes, about 18 s"]),
        ("-m batch_size=range(1,22)", 0, ["  21 runs, 21 points in 5 processes, about 7 min 10 s"]),
        (
            "-m experiment=quick model.name=a,b",
            0,
            ["  2 runs, 20 points in 5 processes, about 4 min 43 s", "outputs/2_quick/"],
        ),
        ("stopping=fixed", 0, ["  1 point, time unknown"]),
        ("batch_size=0", 2, ["batch_size=0 is not a batch size"]),
        ("epochs=1", 2, ["epochs=1 is for training: add mode=train"]),
        ("mode=train epochs=2", 2, ["epochs=2 needs data with an end", "data.num_samples=10000"]),
        (
            "-m batch_size=1,0",
            2,
            ["batch_size=0 is not a batch size", "  1 run, 1 point in 5 processes"],
        ),
        ("-m model=nope,fake", 2, ["model=nope"]),
    ],
)
def test_a_dry_run_says_what_would_be_measured_and_makes_nothing(
    run, tmp_path, monkeypatch, arguments, code, told
):
    monkeypatch.setattr(auto, "predicted_name", lambda index: "cpu")
    ended, printed, _ = run(
        "model=fake", "gpu=fake", "tracking=none", "--dry-run", *arguments.split()
    )
    assert ended == code
    assert all(text in printed for text in told), printed
    assert ("Nothing has been measured." in printed) == any("point" in text for text in told)
    assert len(printed.splitlines()) < 7
    assert not list(tmp_path.iterdir())


def test_a_dry_run_warns_of_a_missing_meter_as_the_run_would(run, monkeypatch):
    monkeypatch.setattr(
        auto, "predicted_meters", lambda name, indices: none_because(f"{name} has none")
    )
    settings = ("model=fake", "gpu=cpu", "--dry-run")
    told = "warning: no energy would be measured, no meter: cpu has none (meter_missing)"
    code, printed, _ = run(*settings, "probes.energy=true")
    assert code == 0
    assert told in printed
    assert run("-m", *settings, "probes.energy=true", "batch_size=1,2")[1].count(told) == 1
    assert "meter" not in run(*settings)[1]
    monkeypatch.setattr(auto, "predicted_meters", lambda name, indices: None)
    assert "meter" not in run(*settings, "probes.energy=true")[1]


@pytest.mark.parametrize(
    ("product", "folder"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A10G", "NVIDIA-A10G"),
        ("cpu", "cpu"),
        (None, "auto"),
    ],
)
def test_the_folder_of_a_stage_names_the_device_that_auto_finds(run, monkeypatch, product, folder):
    monkeypatch.setattr(auto, "predicted_name", lambda index: product)
    assert (
        f"outputs/1_sanity/vgg16_default_{folder}/"
        in run("model=vgg16", "experiment=sanity", "--dry-run")[1]
    )
    assert naming.child_folder(None, Path("s"), 3, {"gpu": "auto"}) == Path(f"s/3-{folder}")


def test_a_refused_run_leaves_what_was_there_before(run, tmp_path):
    (tmp_path / "x" / "details").mkdir(parents=True)
    (tmp_path / "x" / "details" / "points.jsonl").write_text("")
    assert run("model=fake", "gpu=h100", "tracking=none", "output_dir=x")[0] == 2
    assert (tmp_path / "x" / "details" / "points.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tracking.uri=bogus://x", "sqlite:///FILE"),
        ("tracking.uri=''", "sqlite:///FILE"),
        ("tracking.deadline_seconds=nan", "positive"),
        ("tracking.request_timeout_seconds=-1", "positive"),
    ],
)
def test_impossible_tracking_store_is_refused_before_measuring(setting, message, tmp_path):
    done = processes.run("model=fake", "gpu=fake", setting, "output_dir=x", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_folder_from_elsewhere_does_not_say_where_results_go(run, tmp_path):
    run(*FAKE, "output_dir=x")
    plan = yaml.safe_load((tmp_path / "x" / "details" / "plan.yaml").read_bytes())
    plan["command"] += [
        "tracking=mlflow",
        "tracking.uri=http://127.0.0.1:9/",
        "timeout_seconds=1e-9",
        "tracking=none",
    ]
    (tmp_path / "x" / "details" / "plan.yaml").write_text(yaml.safe_dump(plan))
    code, printed, _ = run("resume=x")
    assert code == 2
    assert "127.0.0.1:9" not in printed
    assert run(*typed.shown(printed), "timeout_seconds=60")[0] == 0


def test_energy_seconds_are_looked_at_before_anything_starts(run, tmp_path):
    code, printed, records = run(*FAKE, "probes.energy_seconds=-1")
    assert (code, records) == (2, [])
    assert "probes.energy_seconds=-1: set a positive time" in printed


@pytest.mark.slow
@pytest.mark.parametrize("flag", [None, "-v", "--verbose"])
def test_all_metrics_are_printed_on_request(run, flag):
    arguments = [*FAKE, "processes=1", "output_dir=o", *([flag] if flag else [])]
    code, printed, _ = run(*arguments)
    assert code == 0
    assert ("other metrics\n  loop/host: " in printed) is (flag is not None)


def test_a_term_hides_neither_a_code_nor_a_command():
    names = {name.lower() for name in usage.TERMS}
    assert not names & {*diagnostics.DIAGNOSTICS, *COMMANDS}


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("stopping.max_seconds=abc", "stopping.max_seconds=abc: set a number."),
        ("seed=1.5", "seed=1.5: set an integer."),
        ("probes.energy=maybe", "probes.energy=maybe: set true or false."),
        ("cache=wram", "cache=wram: Did you mean warm?"),
        ("seed=null", "seed=null: set a value."),
        ("probes=1", "probes: set probes.KEY=VALUE; perfexp help probes lists its keys."),
        ("output_dir={a:1}", "output_dir: set a text, not a dict."),
        ("cache=hot", "cache=hot: Possible: flush, rotate, warm."),
        (
            "--config-dir=nope",
            "--config-dir nope: there is no such folder; name one that holds GROUP/NAME.yaml.",
        ),
        (
            "precision=float16",
            "precision=float16: set precision=fp16; perfexp help precision explains them.",
        ),
    ],
)
def test_a_wrong_value_is_answered_with_a_right_one(run, setting, told):
    code, printed, _ = run("model=fake", "gpu=fake", setting)
    assert (code, printed) == (2, f"error: {told}\n")
