"""Where a speed file may be written, and what is taken for one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perfexp.errors import UserError
from perfexp.speed import Mode, Speed, placing
from tests.speed import writing

ROOT = Path(__file__).parent.parent.parent


def speed(log_file="/runs/a/run.log", rate=8.0):
    return Speed(
        log_file=log_file,
        model="fastscnn",
        mode=Mode.sp,
        num_gpus=1,
        batch_size=2,
        precision="fp32",
        images_per_second=rate,
    )


NAME = "fastscnn_sp_bs2_fp32_1_speed.json"


def test_a_file_is_written_and_an_earlier_one_replaced(tmp_path):
    assert placing.put(speed(), tmp_path, remedy="") == tmp_path / NAME
    placing.put(speed("/runs/b/run.log", 4.0), tmp_path, remedy="")
    assert json.loads((tmp_path / NAME).read_bytes())["FINAL_RESULT"] == 4.0
    assert placing.whose(tmp_path / NAME) == "/runs/b/run.log"


def test_default_folder_is_the_current_one_or_a_container_mount(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert placing.default_folder() == "."
    with monkeypatch.context() as mounted:
        mounted.setattr(Path, "is_mount", lambda path: path == Path("outputs"))
        assert placing.default_folder() == "outputs"  # the user of the image may write beside it
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert placing.default_folder() == "outputs"


#: What docker/README.md runs, in a folder like that of the image: read-only, with a folder for results.
IN_IMAGE = """
mount --bind "$PWD" "$PWD" && mount --bind "$1" outputs && mount -o remount,bind,ro "$PWD" || exit 77
cd "$PWD" && shift && "$@"
"""
SMALL = ("tracking=none", "probes.work=false", "input_size=64", "quiet=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [("benchmark", "fake", "sp", "fp32", "2", "20", "0", "gpu=fake"),
     ("experiment=segmentation_table", "--config-dir=../own", "gpu=card", "model=fake", "stopping.measure=20"),
     ("speed", "log")],
)  # fmt: skip
def test_commands_of_the_image_leave_their_files_in_outputs(command, tmp_path):
    here, results = tmp_path / "here", tmp_path / "results"
    (here / "outputs").mkdir(parents=True)
    results.mkdir()
    gpus = tmp_path / "own" / "gpu"
    gpus.mkdir(parents=True)
    (gpus / "card.yaml").write_text("defaults:\n  - fake\n  - _self_\n\nname: fake\ncount: 1\n")
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    if command[0] == "speed":
        log = tmp_path / "20240501_100000.log"
        log.write_text(writing.mmengine_head(cards=1) + writing.mmengine_iter([0.25] * 20))
        command = ("speed", str(log), "--model", "fake", "--precision", "fp32")
    else:
        command = (*command, *SMALL)
    perfexp = [sys.executable, "-m", "perfexp", *command]
    isolated = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    ran = subprocess.run(
        [*isolated, "sh", "-c", IN_IMAGE, "sh", str(results), *perfexp],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if ran.returncode == 77 or "unshare:" in ran.stderr:
        pytest.skip("no mounts without rights")
    assert ran.returncode == 0, ran.stderr
    assert (results / "fake_sp_bs2_fp32_1_speed.json").is_file()
    assert list(here.iterdir()) == [here / "outputs"]


@pytest.mark.parametrize(
    "content",
    ["", "mine", "{}", "[1]", '{"log_file": "x"}', "7", "[" * 50_000, "\x00", " " * 200_000 + "{}"],
)
def test_what_is_no_speed_file_stays(content, tmp_path):
    (tmp_path / NAME).write_text(content)
    with pytest.raises(UserError, match=r"not a speed file\. Look elsewhere\."):
        placing.put(speed(), tmp_path, remedy="Look elsewhere.")
    assert (tmp_path / NAME).read_text() == content


def test_so_do_folders_pipes_and_links_to_nothing(tmp_path):
    makers = (lambda path: path.mkdir(), os.mkfifo, lambda path: path.symlink_to("nowhere"))
    for make in makers:
        make(tmp_path / NAME)
        with pytest.raises(UserError, match="not a speed file"):
            placing.put(speed(), tmp_path, remedy="")
        (tmp_path / NAME).rename(tmp_path / f"old {make}")


def test_linked_speed_file_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "other").mkdir()
    placing.put(speed("there"), tmp_path / "other", remedy="")
    (tmp_path / NAME).symlink_to(tmp_path / "other" / NAME)
    placing.put(speed("here"), tmp_path, remedy="")
    assert [placing.whose(folder / NAME) for folder in (tmp_path, tmp_path / "other")] == [
        "here",
        "there",
    ]


def test_a_file_of_the_seed_with_its_keys_in_any_order_is_known(tmp_path):
    document = dict(reversed(speed().document().items()))
    (tmp_path / NAME).write_text(json.dumps(document))
    assert placing.whose(tmp_path / NAME) == "/runs/a/run.log"


def test_a_manifest_that_is_there_gets_the_name(tmp_path):
    (tmp_path / "details").mkdir()
    (tmp_path / "details" / "manifest.json").write_text('{"files": ["record.json"]}')
    placing.put(speed(), tmp_path, remedy="")
    assert json.loads((tmp_path / "details" / "manifest.json").read_text())["files"] == [
        "record.json",
        NAME,
    ]


def test_a_folder_that_is_missing_or_none_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    for name, message in (("missing", "There is no folder"), ("file", "is not a folder")):
        with pytest.raises(UserError, match=message):
            placing.refuse_no_folder(tmp_path / name, "")
    placing.refuse_no_folder(tmp_path, "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(
        UserError, match=r"The folder /proc can't be written: .+\. Make it writable, or look away\."
    ):
        placing.refuse_no_folder(Path("/proc"), "look away.")  # not even by root
    with pytest.raises(UserError, match="can't be written: No such file"):
        placing.put(speed(), tmp_path / "missing", remedy="")
