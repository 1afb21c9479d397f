"""The corpus: folders that somebody made to run code, to write, delete or read elsewhere, or to keep perfexp busy.

Each function changes a `Place` step by step and yields after each step: a folder, on which all commands are to be run,
or a list of commands.
"""

import json
import os
import re
import shutil
import sqlite3
import struct
import subprocess
from contextlib import closing

import yaml

from perfexp.host.installation import conf_dir
from tests.adversarial.place import commands

CASES = {}


def case(function):
    """Enter a case under its function's name."""
    CASES[function.__name__] = function
    return function


def _dumped(content):
    """YAML, by the C library where it is there: some of it is long."""
    return yaml.dump(content, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))


def _loaded(text):
    """The same of what was written."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def set_command(place, *overrides, drop):
    """Put overrides into the stored commands of the run and of the sweep."""
    for folder, name, read, write in (
        (place.run, "details/plan.yaml", _loaded, _dumped),
        (place.run, "record.json", json.loads, json.dumps),
        (place.sweep, "sweep.json", json.loads, json.dumps),
    ):
        content = read((folder / name).read_bytes())
        original = place.originals.setdefault(name, content["command"])
        content["command"] = [text for text in original if not text.startswith(drop)] + list(
            overrides
        )
        (folder / name).write_text(write(content))


def plant_option(place, text):
    """A configuration file outside, and the name that leads there from the group `stopping`."""
    (place.outside / "evil" / "option.yaml").write_text(text)
    return os.path.relpath(place.outside / "evil" / "option", conf_dir() / "stopping")


def of(place, *overrides, drop=("no such key",), is_signed=False):
    """Both folders are resumed with further stored overrides, and the run is reproduced."""
    set_command(place, *overrides, drop=drop)
    if is_signed:
        place.sign()
    again = ["reproduce", str(place.run), "--dry-run"]
    yield [[f"resume={place.run}"], [f"resume={place.sweep}"], ["status", str(place.sweep)], again]


# What chooses code ---------------------------------------------------------------------------------------------------


@case
def option_by_a_path_that_unpickles(place):
    (place.outside / "evil" / "x.pkl").write_bytes(
        b"cos\nsystem\n(S'touch " + os.fsencode(place.canary) + b"'\ntR."  # what pickle.loads runs
    )
    target = f"_target_: pandas.read_pickle\nfilepath_or_buffer: {place.outside}/evil/x.pkl\n"
    yield from of(place, f"stopping={plant_option(place, target)}", drop=("stopping",))


@case
def option_by_a_path_that_reads_an_mmengine_configuration(place):
    (place.outside / "evil" / "cfg.py").write_text(place.planted)
    target = f"_target_: mmengine.config.Config.fromfile\nfilename: {place.outside}/evil/cfg.py\n"
    yield from of(place, f"stopping={plant_option(place, target)}", drop=("stopping",))


@case
def option_by_a_path_that_loads_a_hub_folder(place):
    (place.outside / "evil" / "hubconf.py").write_text(place.planted + "def x(): pass\n")
    target = (
        f"_target_: torch.hub.load\nrepo_or_dir: {place.outside}/evil\nmodel: x\nsource: local\n"
    )
    yield from of(place, f"stopping={plant_option(place, target)}", drop=("stopping",))


@case
def option_by_an_absolute_path(place):
    plant_option(place, "_target_: perfexp.stopping.Fixed\n")
    yield from of(place, f"stopping={place.outside}/evil/option", drop=("stopping",))


@case
def option_by_a_path_in_a_summary_alone(place):
    name = plant_option(
        place, "_target_: perfexp.models.mmseg_config.read_config\nname: x\noptions: {}\n"
    )
    shutil.rmtree(place.sweep)
    place.sweep.mkdir()
    summary = {
        "schema_version": 1,
        "uid": "1",
        "name": "x",
        "started": "2026-01-01T00:00:00Z",
        "children": [],
    }
    summary["command"] = ["-m", "model=fake", "gpu=fake", f"stopping={name}", "batch_size=1,2"]
    (place.sweep / "sweep.json").write_text(json.dumps(summary))
    yield [[f"resume={place.sweep}"], ["show", str(place.sweep)], ["sync", str(place.sweep)]]


@case
def option_by_a_path_in_quotes_and_in_a_list(place):
    name = plant_option(place, "_target_: perfexp.stopping.Fixed\n")
    yield from of(place, f"stopping='{name}'", drop=("stopping",))
    yield from of(place, f"stopping=fixed,'{name}'", drop=("stopping",))


@case
def option_of_a_group_that_is_relocated(place):
    yield from of(
        place, f"+stopping@probe.x={plant_option(place, '_target_: perfexp.stopping.Fixed')}"
    )


@case
def configuration_of_mmengine_by_a_path(place):
    (place.cwd / "cfg.py").write_text(place.planted)
    (place.run / "cfg.py").write_text(place.planted)
    given = ("model=", "gpu=")
    yield from of(place, "model=mmseg", "model.config=cfg.py", "gpu=cpu", drop=given)
    yield from of(place, "model=mmseg", f"model.config={place.run}/cfg.py", "gpu=cpu", drop=given)


@case
def configuration_of_mmengine_that_is_named_like_one_of_its_own(place):
    name = "fast_scnn_8xb4-160k_cityscapes-512x1024"
    (place.cwd / name).write_text(place.planted)
    (place.cwd / f"{name}.py").write_text(place.planted)
    yield from of(
        place, "model=mmseg", f"model.config={name}.py", "gpu=cpu", drop=("model=", "gpu=")
    )


@case
def settings_of_hydra(place):
    for text in (
        f"hydra.searchpath=[file://{place.outside}/evil]",
        f"hydra.run.dir={place.outside}/made",
        "hydra/launcher=joblib",
        "+hydra.callbacks.x._target_=os.system",
        "~hydra.sweep.dir",
    ):
        yield from of(place, text, drop=("hydra", "+hydra", "~hydra"))


@case
def programs_and_nested_settings(place):
    for text in (
        *(
            "profiler=nsys",
            "profiler.tool=/bin/sh",
            "profiler.options=[-x]",
            "profiler.reports=[evil]",
        ),
        *(
            "model.options={custom_imports:{imports:[evil]}}",
            "model.kwargs.weights=DEFAULT",
            "++model.x=1",
        ),
        *(
            f"algorithm.cache_dir={place.outside}",
            "model._target_=os.system",
            "seed=${oc.env:HOSTILE_SECRET}",
        ),
        *(
            "+resume=x",
            "--config-dir=evil",
            "--config-name=evil",
            "--config-path=evil",
            "-cd=evil",
            "--info",
        ),
    ):
        yield from of(
            place,
            text,
            drop=("profiler", "model.", "++", "algorithm", "seed", "+resume", "--", "-cd"),
        )


@case
def code_in_the_current_folder(place):
    for name in (
        "torch",
        "yaml",
        "perfexp",
        "numpy",
        "mlflow",
        "psutil",
        "sitecustomize",
        "hydra_plugins",
    ):
        (place.cwd / f"{name}.py").write_text(place.planted)
    (place.cwd / "matplotlibrc").write_text("text.usetex: True\nbackend: module://evil\n")
    (place.cwd / "evil.py").write_text(place.planted)
    (place.run / "details" / "points.jsonl").unlink()
    yield place.run


@case
def a_repository_that_runs_programs(place):
    (place.cwd / ".git" / "hooks").mkdir(parents=True)
    program = place.cwd / "program"
    program.write_text(f"#!/bin/sh\ntouch {place.canary}\n")
    program.chmod(0o755)
    config = f'[core]\n\tfsmonitor = {program}\n\thooksPath = {place.cwd}\n[filter "x"]\n\tclean = {program}\n'
    (place.cwd / ".git" / "config").write_text(f"{config}\trequired = true\n")
    (place.cwd / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    for folder in ("objects", "refs/heads"):
        (place.cwd / ".git" / folder).mkdir(parents=True)
    (place.cwd / ".gitattributes").write_text("* filter=x\n")
    (place.run / "details" / "points.jsonl").unlink()
    yield place.run


# What leads elsewhere ------------------------------------------------------------------------------------------------

#: Files of a run and of a sweep, with the commands that read them beside `resume`.
_OF_RUN = {
    "details/run.log": ("status", "clean"),
    "details/points.jsonl": ("status",),
    "record.json": ("show", "list", "status", "export", "compare", "sync", "clean", "reproduce"),
    "details/plan.yaml": ("show", "list", "status", "clean", "reproduce"),
    "details/expected.json": ("status",),
    "details/environment.json": (),
    "details/manifest.json": ("clean",),
    "report.md": ("sync",),
    "details": ("show", "status", "clean", "reproduce"),
}
_OF_SWEEP = {
    "sweep.json": ("show", "list", "status", "export", "compare", "sync", "clean"),
    "sweep.csv": ("sync",),
    "details/sweep.lock": ("clean",),
    "details/manifest.json": ("clean",),
    "0-b1": ("show", "list", "status", "export", "compare", "sync"),
}


def _readers(place, path):
    """The commands that read a file of a run or of a sweep, `resume` last."""
    files, folder = (
        (_OF_SWEEP, place.sweep) if path.is_relative_to(place.sweep) else (_OF_RUN, place.run)
    )
    wanted = (*files[path.relative_to(folder).as_posix()], f"resume={folder}")
    return [command for command in commands(folder, place.out) if command[0] in wanted]


def _in_place_of(place, make):
    """Something in place of files of a run and of a sweep, one after the other; which of them, see `Place.some`."""
    files = [*(place.run / name for name in _OF_RUN), *(place.sweep / name for name in _OF_SWEEP)]
    for path in place.some(files):
        kept = place.root / "kept"
        if path.exists():
            path.rename(kept)
        make(path)
        yield _readers(place, path)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
            missing_ok=True
        )
        if kept.exists():
            kept.rename(path)


@case
def links_to_a_file_outside(place):
    yield from _in_place_of(place, lambda path: path.symlink_to(place.outside / "bashrc"))


@case
def links_to_a_folder_outside(place):
    yield from _in_place_of(place, lambda path: path.symlink_to(place.outside))


@case
def links_to_nothing_outside(place):
    yield from _in_place_of(place, lambda path: path.symlink_to(place.outside / "made"))


@case
def other_names_of_a_file_outside(place):
    yield from _in_place_of(place, lambda path: os.link(place.outside / "bashrc", path))


@case
def pipes_in_place_of_files(place):
    yield from _in_place_of(place, os.mkfifo)


@case
def folders_in_place_of_files(place):
    yield from _in_place_of(place, lambda path: path.mkdir())


@case
def endless_devices_in_place_of_files(place):
    yield from _in_place_of(place, lambda path: path.symlink_to("/dev/zero"))


@case
def files_without_an_end(place):
    def make(path):
        with path.open("wb") as file:
            file.truncate(1 << 40)

    yield from _in_place_of(place, make)


@case
def a_folder_whose_name_is_a_command(place):
    place.run = place.run.rename(place.run.with_name("x;touch canary;'$(touch canary)"))
    (place.run / "details" / "points.jsonl").unlink()
    yield place.run


@case
def a_name_that_moves_the_cursor(place):
    place.run = place.run.rename(place.run.with_name("x\x1b[2J\x1b]0;title\x07\x9b1m\u202ey"))
    yield place.run


@case
def a_manifest_that_names_other_files(place):
    manifest = json.loads((place.run / "details" / "manifest.json").read_bytes())
    away = [f"../../outside/{name}" for name in ("precious.csv", "train_gemm_overall.csv")]
    manifest["files"] += [
        *away,
        str(place.outside / "precious.csv"),
        "link_gemm_overall.csv",
        "to/precious.csv",
    ]
    (place.run / "details" / "manifest.json").write_text(json.dumps(manifest))
    (place.run / "link_gemm_overall.csv").symlink_to(place.outside / "precious.csv")
    (place.run / "to").symlink_to(place.outside)
    yield place.run


@case
def replacements_that_lead_elsewhere(place):
    """Folders of replacements and of checkpoints, in which links lead outside, for commands that put them in place."""
    fake = ["model=fake", "gpu=fake", "stopping=fixed", "tracking=none", "seed=3"]
    given, kept = [[f"resume={place.run}"], [*fake, f"output_dir={place.run}"]], place.root / "kept"
    place.run.rename(kept)
    inside = ("checkpoints", "details")
    for linked in ("h", *inside, ".replacement", *(f".replacement/{name}" for name in inside)):
        shutil.copytree(kept, place.run)
        inner = place.run / ".replacement"
        if linked != inner.name:
            shutil.copytree(kept, inner)
            (inner / "h").mkdir()
            (inner / "h" / "bashrc").write_text("evil")
            for name in () if linked.endswith("/checkpoints") else ("net_images_best.pt", "bashrc"):
                (inner / "checkpoints").mkdir(exist_ok=True)
                (inner / "checkpoints" / name).write_text("evil")
            manifest = json.loads((inner / "details" / "manifest.json").read_bytes())
            manifest["files"] += [
                "checkpoints/train_gemm_overall.csv",
                "checkpoints/net_images_best.pt",
                "h/bashrc",
            ]
            (inner / "details" / "manifest.json").write_text(json.dumps(manifest))
        if linked.endswith("details"):
            shutil.rmtree(place.run / linked)
        (place.run / linked).symlink_to(place.outside)
        yield [*given, ["--overwrite", *given[1]], ["clean", str(place.run), "--yes"]]
        shutil.rmtree(place.run)
    kept.rename(place.run)


@case
def runs_of_a_sweep_that_lie_elsewhere(place):
    private = place.outside / "private"
    shutil.copytree(place.run, private)
    sweep = json.loads((place.sweep / "sweep.json").read_bytes())
    sweep["children"][0]["directory"] = "../../outside/private"
    sweep["children"][1]["directory"] = str(private)
    (place.sweep / "sweep.json").write_text(json.dumps(sweep))
    yield place.sweep


@case
def artifacts_that_lie_elsewhere(place):
    record = json.loads((place.run / "record.json").read_bytes())
    record["artifacts"] = [
        {"path": path, "kind": "data"} for path in ("../../outside/bashrc", "/etc/passwd", "l")
    ]
    (place.run / "l").symlink_to(place.outside / "bashrc")
    record["plan"]["speed_dir"] = str(place.outside)
    (place.run / "record.json").write_text(json.dumps(record))
    yield place.run


@case
def other_places_to_write_to(place):
    yield from of(
        place,
        *(f"output_dir={place.outside}", f"speed_dir={place.outside}", "tracking=mlflow"),
        f"tracking.uri=sqlite:///{place.outside}/x.db",
        drop=("tracking",),
    )


# What never ends -----------------------------------------------------------------------------------------------------


@case
def ranges_of_billions(place):
    yield from of(
        place, "batch_size=range(1,2000000000)", "seed=range(1,2000000000)", drop=("batch_size",)
    )


@case
def brackets_by_the_hundred_thousand(place):
    deep = "[" * 200_000
    yield from of(place, f"batch_size={deep}", drop=("batch_size",))
    sweep = json.loads((place.sweep / "sweep.json").read_bytes()) | {"planned": 0}
    (place.sweep / "sweep.json").write_text(
        json.dumps(sweep).replace('"planned": 0', f'"planned": {deep}')
    )
    for name in ("environment.json", "manifest.json", "expected.json"):
        (place.run / "details" / name).write_text('{"schema_version":1,"plan":{"a":' + deep)
    (place.run / "record.json").write_text('{"schema_version":1,"plan":{"a":' + deep)
    (place.run / "details" / "points.jsonl").write_text(deep + "\n")
    yield [[f"resume={place.run}"], [f"resume={place.sweep}"], ["status", str(place.sweep)]]
    (place.run / "details" / "plan.yaml").write_text(f"command: {deep}")
    yield place.run


@case
def aliases_of_aliases(place):
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    text = "\n".join([*lines, "command: *a39"])
    (place.run / "details" / "plan.yaml").write_text(text)
    (place.sweep / "0-b1" / "details" / "plan.yaml").write_text(text)
    yield place.run
    yield place.sweep


@case
def counts_beyond_all_measure(place):
    plan = yaml.safe_load((place.run / "details" / "plan.yaml").read_bytes())
    for changed in (
        {"processes": 10**30},
        {"percentiles": [-50, 95]},
        {"input_size": list(range(1, 10**5)), "batch_size": list(range(1, 10**5))},
        {
            "sweep": {
                "_target_": "perfexp.sweep.Sizes",
                "num_sizes": 10**12,
                "min_size": 1,
                "max_size": 10**13,
            }
        },
        {"timeout_seconds": 1e300},
    ):
        (place.run / "details" / "plan.yaml").write_text(_dumped({**plan, **changed}))
        yield _readers(place, place.run / "details" / "plan.yaml")


# What a red team found -----------------------------------------------------------------------------------------------


@case
def names_and_values_that_are_interpolated(place):
    """OmegaConf reads `${…}` in a folder's name, and Hydra makes it of `$\\{…\\}`."""
    for name in ("${now:.}.", "${oc.env:HOSTILE_SECRET}"):
        folder = place.root / "given" / name
        shutil.copytree(place.run, folder)
        (folder / "details" / "points.jsonl").unlink()
        yield [[f"resume={folder}"]]
    yield from of(place, "data=images", r"data.root=$\{oc.env:HOSTILE_SECRET\}", drop=("data",))
    yield from of(place, r"model.weights=$\{oc.env:HOSTILE_SECRET\}.pth", drop=("data",))


@case
def weights_that_are_downloaded(place):
    yield from of(
        place, "model=resnet18", "model.weights=DEFAULT", "gpu=cpu", drop=("model=", "gpu=")
    )


@case
def data_sets_that_are_downloaded(place):
    for root in (place.outside / "made", place.run / "made", "made"):
        yield from of(
            place,
            "data=cifar10",
            f"data.root={root}",
            "data.download=true",
            "input_size=32",
            drop=("input",),
        )
    assert not (place.run / "made").exists()
    assert not (place.cwd / "made").exists()


@case
def commands_of_hundreds_of_thousands_of_characters(place):
    yield from of(place, *["seed=1"] * 300_000)
    yield from of(
        place, *["batch_size=[" + ",".join(["1"] * 40_000) + "]"] * 3, drop=("batch_size",)
    )


@case
def a_manifest_of_a_million_names(place):
    names = [f"{number}_gemm_overall.csv" for number in range(200_000)]
    manifest = json.loads((place.run / "details" / "manifest.json").read_bytes())
    (place.run / "details" / "manifest.json").write_text(json.dumps(manifest | {"files": names}))
    yield [[f"resume={place.run}"], ["clean", str(place.run), "--yes"]]
    (place.run / "details" / "manifest.json").write_text(
        json.dumps(manifest | {"files": names * 10})
    )
    yield [[f"resume={place.run}"], ["clean", str(place.run), "--yes"]]


@case
def folders_a_thousand_deep(place):
    here = os.getcwd()  # noqa: PTH109 - paths are too long to be named from the root
    os.chdir(place.run)
    try:
        for _ in range(1200):
            os.mkdir("a")  # noqa: PTH102
            os.chdir("a")
    finally:
        os.chdir(here)
    try:
        yield place.run.parent
    finally:  # pytest's own cleaning would recurse too deeply for Python
        subprocess.run(["rm", "-rf", str(place.run)], check=True)


@case
def a_store_in_the_current_folder_that_leads_outside(place):
    """MLflow puts artifacts where the experiment and the run in the database say."""
    store = place.cwd / "outputs" / "mlflow.db"
    store.parent.mkdir()
    place.make_store(store, artifact_location=(place.outside / "made").as_uri())
    yield [["sync", str(place.run)]]
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute(f"update runs set artifact_uri = '{place.outside.as_uri()}'")
    yield [["sync", str(place.run)]]
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute(
            "create trigger t after insert on tags begin "
            "with recursive n(x) as (select 1 union all select x + 1 from n) select count(*) from n; end"
        )
    yield [["sync", str(place.sweep)], ["model=fake", "gpu=fake", "stopping=fixed"]]


@case
def a_store_in_the_current_folder_that_is_something_else(place):
    store = place.cwd / "outputs" / "mlflow.db"
    store.parent.mkdir()
    os.mkfifo(store)
    yield [["sync", str(place.run)]]
    store.unlink()
    place.make_store(place.root / "other.db")
    shutil.copyfile(place.root / "other.db", place.outside / "other.db")
    yield []
    store.symlink_to(place.outside / "other.db")
    yield [["sync", str(place.run)]]
    store.unlink()
    (store.parent / "mlartifacts").symlink_to(place.outside)
    yield [["sync", str(place.run)]]


@case
def outputs_that_are_a_link(place):
    shutil.copytree(place.run, place.outside / "mine")
    (place.cwd / "outputs").symlink_to(place.outside)
    yield [["clean", "--yes"]]


@case
def a_stage_that_holds_runs_of_others(place):
    stage = place.cwd / "outputs" / "2_quick" / "fake_default_fake"
    shutil.copytree(place.run, stage)
    (stage / "details" / "points.jsonl").write_text("")
    content = (stage / "record.json").read_bytes()
    (stage / "record.json").unlink()
    for is_signed in (False, True):
        yield from of(place, "stage=2_quick", is_signed=is_signed)
        yield from of(place, "experiment=quick", is_signed=is_signed)
    assert (stage / "details" / "points.jsonl").read_text() == ""
    assert not (stage / "record.json").exists(), content


@case
def pipes_where_people_look(place):
    os.mkfifo(place.cwd / "matplotlibrc")
    (place.run / "details" / "points.jsonl").unlink()
    yield [[f"resume={place.run}"]]
    logs = place.run / "vis_data"
    logs.mkdir()
    (logs / "scalars.json").write_text(
        '{"iter":1,"time":0.1,"loss":1.0}\n{"iter":2,"time":0.1,"loss":1.0}\n'
    )
    os.mkfifo(logs / "config.py")
    known = [
        "--model",
        "m",
        "--batch-size",
        "1",
        "--gpus",
        "1",
        "--precision",
        "fp32",
        "--out",
        str(place.out),
    ]
    yield [["speed", str(logs / "scalars.json"), *known]]


@case
def an_index_of_git_without_an_end(place):
    subprocess.run(["git", "init", "-q", str(place.cwd)], check=True)
    git = ["git", "-C", str(place.cwd), "-c", "user.email=a@b", "-c", "user.name=a"]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    with (place.cwd / ".git" / "index").open("wb") as file:
        file.truncate(1 << 40)
    (place.run / "details" / "points.jsonl").unlink()
    yield [[f"resume={place.run}"]]


@case
def names_of_artifacts_that_move_the_cursor(place):
    record = json.loads((place.run / "record.json").read_bytes())
    record["artifacts"] = [{"path": "x\x1b]0;title\x07\x1b[31m", "kind": "data"}]
    record["plan"]["percentiles"] = [50, "x", {}, -3]
    (place.run / "record.json").write_text(json.dumps(record))
    yield place.run


@case
def facts_of_profiles_that_are_something_else(place):
    lines = (place.run / "details" / "points.jsonl").read_bytes().splitlines()
    point = json.loads(lines[0])
    point["key"]["phase"] = "inference_profile"
    for facts in (
        {"files": 5},
        {"profiler": "torch", "settings": {}, "kernels": 5},
        {"profiler": "torch", "ranges": [5]},
        {"profiler": "torch", "operators": [{}]},
        {"profiler": "torch", "commands": 5, "steps": "x"},
        {"profiler": "torch", "files": ["/etc/passwd", "../../outside/bashrc"]},
    ):
        point["facts"] = {"profile": facts}
        (place.run / "details" / "points.jsonl").write_bytes(
            b"\n".join([*lines, json.dumps(point).encode()]) + b"\n"
        )
        (place.run / "record.json").unlink(missing_ok=True)
        yield [[f"resume={place.run}"], ["show", str(place.run)], ["sync", str(place.run)]]


@case
def a_log_that_begins_again_at_every_line(place):
    log = place.run / "scalars.json"
    with log.open("w") as file:
        for _ in range(200_000):
            file.write('{"iter":2,"time":0.1,"loss":1.0}\n{"iter":1,"time":0.1,"loss":1.0}\n')
    known = [
        "--model",
        "m",
        "--batch-size",
        "1",
        "--gpus",
        "1",
        "--precision",
        "fp32",
        "--out",
        str(place.out),
    ]
    yield [["speed", str(log), *known]]


@case
def halves_of_surrogate_pairs(place):
    """What JSON and YAML may escape, and no file can be written with."""
    for path, key in (
        (place.run / "details" / "environment.json", "host"),
        (place.run / "record.json", "name"),
        (place.run / "details" / "plan.yaml", "uid"),
        (place.run / "details" / "manifest.json", "perfexp"),
        (place.sweep / "sweep.json", "name"),
    ):
        before = path.read_text()
        changed = re.sub(rf'("?{key}"?: ?)[^\n,}}]+', r'\1"\\ud800"', before)
        assert "ud800" in changed, path
        path.write_text(changed)
        yield _readers(place, path)
        path.write_text(before)


@case
def a_journal_beside_a_store(place):
    """SQLite deletes the file that a journal ends in the name of, and writes back the pages that are in it."""
    store = place.cwd / "outputs" / "mlflow.db"
    store.parent.mkdir()
    place.make_store(store)
    clean = store.read_bytes()
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("create trigger t after insert on tags begin delete from tags; end")
    size = struct.unpack(">H", clean[16:18])[0]
    pages = [
        store.read_bytes()[number * size :][:size] for number in range(store.stat().st_size // size)
    ]
    store.write_bytes(clean)
    magic, nonce = bytes.fromhex("d9d505f920a163d7"), 7

    def journal(records, tail=b""):
        head = magic + struct.pack(">5I", len(records), nonce, len(clean) // size, 512, size)
        sums = [
            (nonce + sum(page[-200 - 200 * k] for k in range((size - 1) // 200))) & 0xFFFFFFFF
            for _, page in records
        ]
        body = b"".join(
            struct.pack(">I", number) + page + struct.pack(">I", total)
            for (number, page), total in zip(records, sums, strict=True)
        )
        return head.ljust(512, b"\0") + body + tail

    name = str(place.outside / "precious.csv").encode()
    named = (
        struct.pack(">I", 0x40000000 // size + 1)
        + name
        + struct.pack(">II", len(name), sum(name))
        + magic
    )
    for log in (
        journal([], named),
        journal([(number + 1, page) for number, page in enumerate(pages)][: len(clean) // size]),
    ):
        store.write_bytes(clean)
        store.with_name("mlflow.db-journal").write_bytes(log)
        yield [["sync", str(place.run)]]
        store.with_name("mlflow.db-journal").unlink(missing_ok=True)
    store.write_bytes(clean)
    store.with_name("mlflow.db-journal").symlink_to(place.outside / "precious.csv")
    yield [["sync", str(place.run)]]


@case
def links_in_the_folder_of_a_stage(place):
    shutil.copytree(place.run, place.outside / "mine")
    stage = place.cwd / "outputs" / "1"
    stage.mkdir(parents=True)
    (stage / "fake_default_fake").symlink_to(place.outside / "mine")
    command = ["model=fake", "gpu=fake", "stopping=fixed", "tracking=none", "stage=1", "seed=3"]
    yield [command, ["--overwrite", *command]]
    shutil.rmtree(stage)
    stage.symlink_to(place.outside)
    yield [command, ["--overwrite", *command]]


@case
def files_of_somebody_else_in_a_folder_to_overwrite(place):
    """A manifest that is none of perfexp's, and one whose identity nothing repeats."""
    command = ["model=fake", "gpu=fake", "stopping=fixed", "tracking=none"]
    for identity in ("", '"perfexp": "x", '):
        folder = place.root / "given" / f"data{len(identity)}"
        folder.mkdir()
        for name in ("train_data.csv", "environment.json", "plan.yaml"):
            (folder / name).write_text("{}")
        names = '["train_data.csv", "environment.json", "plan.yaml"]'
        (folder / "manifest.json").write_text(f'{{{identity}"files": {names}}}')
        yield [["--overwrite", *command, f"output_dir={folder}"], ["clean", str(folder), "--yes"]]
        assert {
            (folder / name).read_text()
            for name in ("train_data.csv", "environment.json", "plan.yaml")
        } == {"{}"}
