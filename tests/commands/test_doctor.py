"""`perfexp doctor`: verdicts on scripted machines, processes that die, hang or babble, and one real run."""

import copy
import fcntl
import json
import os
import re
import sys

import pytest

from perfexp import commands
from perfexp.commands import doctor
from perfexp.devices import lock
from perfexp.doctor import CheckResult, Choice, environment, whole
from perfexp.host import locks
from perfexp.run import worker_query
from perfexp.worker import answers, entry

pytestmark = pytest.mark.usefixtures("quick_commands")

H200 = "GPU-11111111-2222-3333-4444-555555555555"
BOARD = {
    "uuid": H200,
    "name": "NVIDIA H200",
    "facts": {
        "driver": "580.65.06",
        "power_limit_watts": 700.0,
        "max_sm_clock_hertz": 1.98e9,
        "max_memory_clock_hertz": 3.2e9,
        "ecc": True,
        "mig": False,
    },
    "state": {
        "sm_clock_hertz": 345e6,
        "temperature_celsius": 31,
        "power_watts": 76.0,
        "throttling": [],
        "processes": 0,
        "utilization_percent": 0,
    },
}
METER = {
    "name": "nvml GPU-1",
    "covers": "the board NVIDIA H200",
    "counter_watts": 76.0,
    "integral_watts": 76.2,
    "power_kind": "instantaneous",
    "tick_seconds": 0.1,
    "query_seconds": 4e-3,
    "no_energy": None,
    "no_power": None,
}
WITHOUT_NVML = {"error": "NVMLError_LibraryNotFound: NVML Shared Library Not Found"}
TORCH = {"version": "2.11.0+cu130", "cuda": "13.0", "rocm": None, "cudnn": 91900}
TORCH_CPU = {"version": "2.11.0+cpu", "cuda": None, "rocm": None, "cudnn": None}


@pytest.fixture
def quiet_machine():
    """Facts of a Linux machine on which nothing is wrong, except that it has no device besides its CPU."""
    fits = {
        name: {"wanted": ">=1", "version": "1.5", "fits": True}
        for name in ("torch", "torchvision", "mlflow")
    }
    fits |= {
        name: {"wanted": ">=1", "version": "1.5", "fits": True}
        for name in ("hydra-core", "omegaconf", "msgspec")
    }
    writable = {"path": "outputs", "writable": True, "free_bytes": 2**40}
    return {
        "machine": {
            "python": "3.11.9",
            "os": "Debian GNU/Linux 12",
            "system": "Linux",
            "kernel": "6.1",
            "machine": "x86_64",
            "container": None,
            "packages": {"mlflow": "3.17.2"},
            "requirements": fits,
            "cpu": {
                "name": "AMD EPYC",
                "cores": 32,
                "logical_cores": 64,
                "affinity": list(range(64)),
                "governors": ["performance"],
                "load_average_1min": 0.2,
            },
            "memory_bytes": 2**39,
            "cpu_quota_cores": None,
            "clock": {"resolution_seconds": 1e-9, "source": "tsc"},
            "amd": {"driver": False, "amdsmi": False},
            "tools": {
                "nsys": {"path": "/usr/bin/nsys", "on_path": True},
                "ncu": {"path": "/usr/bin/ncu", "on_path": True},
                "rocprofv3": None,
            },
            "folders": {
                "outputs": writable,
                "lock": writable | {"path": "/run/user/7/perfexp"},
                "store": writable,
            },
            "store": {"path": "/home/me/outputs/mlflow.db", "problem": None},
        },
        "survey": {
            "parts": {
                "boards": WITHOUT_NVML,
                "torch": TORCH_CPU,
                "torchvision": {"torchvision": "0.26.0", "torchvision_compiled_operators": True},
                "cuda": {"devices": []},
                "mps": {"available": False},
            },
            "failure": None,
        },
        "gpu_files": doctor._gpu_files(None),
        "locks": {"cpu": None},
        "processes": {
            "host-bound": {"spread": 0.051, "measurements": 12},
            "memory": {"spread": 0.1, "measurements": 0},
        },
    }


@pytest.fixture
def h200(quiet_machine):
    """Facts of a machine with an H200 on which nothing is wrong."""
    device = {
        "index": 0,
        "name": "NVIDIA H200",
        "uuid": H200.removeprefix("GPU-"),
        "memory_bytes": 150_000_000_000,
        "compute_capability": "9.0",
    }
    quiet_machine["survey"]["parts"] |= {
        "boards": {"boards": [copy.deepcopy(BOARD)]},
        "torch": dict(TORCH),
        "cuda": {"devices": [device]},
        "clocks": {
            "event_tick_seconds": 32e-9,
            "record_seconds": 2e-6,
            "canary_hertz": 1.975e9,
            "busy": BOARD["state"] | {"sm_clock_hertz": 1.98e9},
        },
        "energy": {"reason": "", "doubts": [], "meters": [dict(METER)]},
    }
    quiet_machine["locks"][device["uuid"]] = None
    return quiet_machine


def board(facts):
    return facts["survey"]["parts"]["boards"]["boards"][0]


def verdicts(facts, name="auto", index=0):
    """By what was looked at: the verdict, and what is said of it in one line."""
    findings = whole.diagnose(facts, Choice(name=name, index=index))
    assert all(
        one.remedy
        for one in findings
        if one.verdict in (CheckResult.warn, CheckResult.missing, CheckResult.fail)
    )
    assert len({one.check for one in findings}) == len(findings)
    return {one.check: (one.verdict.value, f"{one.found} → {one.remedy}") for one in findings}


def not_ok(facts, name="auto", index=0):
    return {
        check: verdict
        for check, (verdict, _) in verdicts(facts, name, index).items()
        if verdict != "ok"
    }


def test_a_machine_with_everything_is_all_right(h200):
    told = verdicts(h200, "h200")
    assert not_ok(h200, "h200") == {}
    assert "NVIDIA H200, 140 GiB, compute capability 9.0" in told["cuda:0"][1]
    assert "conf/gpu/h200.yaml" in told["cuda:0"][1]
    assert "driver 580.65.06, CUDA 13.0, cuDNN 9.19.0" in told["CUDA"][1]
    assert "tick 32 ns, a record costs 2.0 µs" in told["event clock"][1]
    assert "1975 MHz, the driver reports 1980 MHz" in told["clock canary"][1]
    assert "700 W; 76 W now" in told["power limit"][1]
    assert {
        "energy counter nvml GPU-1",
        "power nvml GPU-1",
        "NVML",
        "nsys",
        "ncu",
        "device lock",
        "ECC",
        "MIG",
    } <= set(told)


def test_cpu_only_machine_can_measure_and_lists_missing_parts(quiet_machine):
    quiet_machine["machine"]["tools"] |= {"nsys": None, "ncu": None}
    quiet_machine["survey"]["parts"]["energy"] = {
        "reason": "no meter: no RAPL",
        "doubts": [],
        "meters": [],
    }
    assert not_ok(quiet_machine) == {"nsys": "missing", "ncu": "missing", "energy": "missing"}
    assert verdicts(quiet_machine)["gpu=auto"] == ("ok", "AMD EPYC → ")


def test_a_device_that_is_not_here_fails_and_both_are_named(quiet_machine, h200):
    verdict, text = verdicts(h200, "a100")["gpu=a100"]
    assert verdict == "fail"
    assert "asks for NVIDIA A100 SXM4 80GB; here is: NVIDIA H200 (cuda:0)" in text
    h200["survey"]["parts"] |= {"cuda": {"devices": []}, "torch": TORCH_CPU}
    verdict, text = verdicts(h200, "h200")["gpu=h200"]
    assert verdict == "fail"
    assert "asks for NVIDIA H200 SXM 141GB; here is: AMD EPYC" in text


def test_another_number_of_the_device_is_another_device(h200):
    assert verdicts(h200, "h200", 1)["gpu=h200 gpu.index=1"][0] == "fail"
    assert "no cuda:1" in verdicts(h200, "auto", 1)["gpu=auto gpu.index=1"][1]


def test_a_board_that_torch_can_not_use_is_told_with_the_way_out(h200):
    h200["survey"]["parts"] |= {"cuda": {"devices": []}, "torch": TORCH_CPU}
    assert "install a CUDA build" in verdicts(h200)["CUDA devices"][1]
    h200["survey"]["parts"] |= {"cuda": {"devices": [], "reason": "driver too old"}, "torch": TORCH}
    assert "driver too old" in verdicts(h200)["CUDA devices"][1]


def test_device_without_a_file_is_a_warning_that_asks_for_one(h200):
    h200["survey"]["parts"]["cuda"]["devices"][0]["name"] = "NVIDIA X9000"
    verdict, text = verdicts(h200)["cuda:0"]
    assert verdict == "warn"
    assert "add conf/gpu/NAME.yaml" in text


def test_slices_and_missing_meters_are_told(h200):
    board(h200)["facts"]["mig"] = True
    nothing = {
        "counter_watts": None,
        "no_energy": "Not Supported",
        "integral_watts": None,
        "no_power": "Not Supported",
    }
    h200["survey"]["parts"]["energy"]["meters"][0] |= nothing
    missing = {"energy counter nvml GPU-1": "missing", "power nvml GPU-1": "missing"}
    assert not_ok(h200) == {"MIG": "warn", **missing}
    h200["survey"]["parts"]["energy"] = {"error": "NVMLError: Unknown Error"}
    assert not_ok(h200) == {"MIG": "warn", "energy": "missing"}


def test_a_slice_that_nvml_does_not_know_is_explained(h200):
    board(h200)["facts"]["mig"] = True
    h200["survey"]["parts"]["cuda"]["devices"][0]["uuid"] = "99999999-aaaa"
    verdict, text = verdicts(h200)["NVML"]
    assert verdict == "warn"
    assert "MIG is on" in text


def test_without_nvml_a_cuda_device_can_be_measured(h200):
    h200["survey"]["parts"]["boards"] = {"error": "ModuleNotFoundError: No module named 'pynvml'"}
    h200["survey"]["parts"]["clocks"]["busy"] = {}
    assert not_ok(h200) == {"NVML": "missing"}


def test_neighbours_on_the_device_are_told(h200):
    board(h200)["state"] |= {"processes": 2, "utilization_percent": 87}
    assert verdicts(h200)["neighbours"][1].startswith("2 other processes, 87 % busy")
    assert not_ok(h200) == {"neighbours": "warn"}


def test_a_throttled_device_is_told_with_its_reasons(h200):
    h200["survey"]["parts"]["clocks"]["busy"] |= {
        "throttling": ["hardware thermal"],
        "sm_clock_hertz": 1.98e9,
    }
    h200["survey"]["parts"]["clocks"]["canary_hertz"] = 1.2e9
    board(h200)["facts"]["power_limit_watts"] = 500.0
    assert not_ok(h200) == {"throttling": "warn", "clock canary": "warn", "power limit": "warn"}
    assert "hardware thermal" in verdicts(h200)["throttling"][1]
    assert "the data sheet has 700 W" in verdicts(h200)["power limit"][1]


def test_facts_that_an_old_driver_lacks_are_missing_not_guessed(h200):
    board(h200)["facts"] = dict.fromkeys(BOARD["facts"])
    board(h200)["state"] = h200["survey"]["parts"]["clocks"]["busy"] = dict.fromkeys(BOARD["state"])
    assert set(not_ok(h200)) == {"throttling", "temperature", "power limit", "neighbours"}
    assert set(not_ok(h200).values()) == {"missing"}


def test_a_device_that_runs_no_kernel_fails(h200):
    h200["survey"]["parts"]["clocks"] = {"error": "RuntimeError: no kernel image is available"}
    assert not_ok(h200) == {"kernels": "fail"}


def test_a_device_on_which_another_run_measures_is_left_alone(h200):
    h200["survey"]["parts"]["clocks"] = {
        "not_tried": "The device is in use: process 7 measures /x."
    }
    h200["locks"][H200.removeprefix("GPU-")] = "process 7 measures /x"
    assert not_ok(h200) == {"kernels": "warn", "device lock": "warn"}
    assert "process 7 measures /x" in verdicts(h200)["device lock"][1]


def test_rocm_is_untested_and_says_so(h200):
    parts = h200["survey"]["parts"]
    parts |= {
        "boards": WITHOUT_NVML,
        "torch": {"version": "2.11", "cuda": None, "rocm": "6.4", "cudnn": None},
    }
    parts["cuda"]["devices"][0]["name"] = "AMD Instinct MI300X"
    parts["clocks"]["busy"] = {}
    h200["machine"]["tools"]["rocprofv3"] = {"path": "/opt/rocm/bin/rocprofv3", "on_path": True}
    assert not_ok(h200, "mi300x") == {
        "gpu=mi300x": "untested",
        "cuda:0": "untested",
        "amdsmi": "missing",
        "rocprofv3": "untested",
    }
    assert whole.works(whole.diagnose(h200, Choice(name="mi300x")))
    assert "nsys" not in verdicts(h200)


def test_apples_gpu_is_found_and_untested(quiet_machine):
    assert verdicts(quiet_machine, "mps")["gpu=mps"][0] == "fail"
    quiet_machine["survey"]["parts"]["mps"]["available"] = True
    quiet_machine["machine"]["system"] = "Darwin"
    assert not_ok(quiet_machine) == {"system": "untested", "Apple's GPU": "untested"}
    verdict, text = verdicts(quiet_machine, "mps")["gpu=mps"]
    assert verdict == "untested"
    assert "not been tried" in text


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("3.11.1", "ok"), ("3.12.3", "untested"), ("3.13.0", "untested"), ("3.14.0", "fail")],
)
def test_a_python_that_nobody_tried_is_untested(quiet_machine, version, verdict):
    quiet_machine["machine"]["python"] = version
    assert verdicts(quiet_machine)["Python"][0] == verdict


def test_packages_outside_their_ranges_fail_by_name(quiet_machine):
    wanted = quiet_machine["machine"]["requirements"]
    wanted["omegaconf"] = {"wanted": "<2.4,>=2.3", "version": "2.4.0", "fits": False}
    wanted["msgspec"] = {"wanted": ">=0.19", "version": None, "fits": False}
    wanted["torch"] = {"wanted": ">=2.4", "version": "2.3", "fits": False}
    assert not_ok(quiet_machine) == {"omegaconf": "fail", "msgspec": "fail", "torch": "fail"}
    assert "2.4.0; perfexp needs <2.4,>=2.3" in verdicts(quiet_machine)["omegaconf"][1]


def test_mlflow_is_no_condition_of_measuring(quiet_machine):
    quiet_machine["machine"]["requirements"]["mlflow"] = {
        "wanted": ">=3.17",
        "version": None,
        "fits": False,
    }
    quiet_machine["machine"]["packages"] = {"mlflow-skinny": "3.17.2"}
    assert not_ok(quiet_machine) == {"MLflow": "warn"}
    quiet_machine["machine"]["packages"] = {}
    assert not_ok(quiet_machine) == {"MLflow": "missing"}


def test_torch_that_can_not_be_imported_is_told_once(quiet_machine):
    error = {"error": "ImportError: libcudart.so.13: cannot open shared object file"}
    quiet_machine["survey"]["parts"] |= dict.fromkeys(
        ("torch", "torchvision", "cuda", "mps"), error
    )
    assert not_ok(quiet_machine, "cpu") == {"torch": "fail"}
    assert not_ok(quiet_machine) == {"torch": "fail", "gpu=auto": "fail"}


def test_doctor_shows_process_spread_or_recommends_selfcheck(quiet_machine):
    spreads = "typical spread between processes (measurements): host-bound 5.1% (12) → "
    assert verdicts(quiet_machine)["repeatability"] == ("ok", spreads)
    quiet_machine["processes"]["host-bound"]["measurements"] = 0
    assert not_ok(quiet_machine) == {"repeatability": "missing"}
    assert "perfexp selfcheck" in verdicts(quiet_machine)["repeatability"][1]
    assert "repeatability" not in verdicts(quiet_machine, "fake")


def test_a_host_that_disturbs_or_limits_is_told(quiet_machine):
    host = quiet_machine["machine"]
    host["cpu"] |= {
        "load_average_1min": 30.0,
        "governors": ["performance", "powersave"],
        "affinity": [0, 1, 2, 3],
    }
    host["clock"]["source"] = "hpet"
    host["tools"]["nsys"] = {"path": "/opt/nvidia/nsight-systems/2025.3/bin/nsys", "on_path": False}
    host["store"]["problem"] = "it is not an SQLite database"
    told = verdicts(quiet_machine)
    warned = ("load", "governor", "processors", "clock", "nsys", "tracking store")
    assert not_ok(quiet_machine) == dict.fromkeys(warned, "warn")
    assert "performance, powersave" in told["governor"][1]
    assert "4 of 64 logical cores" in told["processors"][1]
    assert "PATH=/opt/nvidia/nsight-systems/2025.3/bin:$PATH" in told["nsys"][1]
    host["cpu_quota_cores"] = 2.5
    assert "the time of 2.5 cores" in verdicts(quiet_machine)["processors"][1]


@pytest.mark.parametrize(("folder", "check"), [("outputs", "outputs"), ("lock", "device lock")])
def test_folders_that_measuring_writes_to_have_to_be_writable(quiet_machine, folder, check):
    quiet_machine["machine"]["folders"][folder] = {"path": "/x", "writable": False, "free_bytes": 0}
    assert not_ok(quiet_machine) == {check: "fail"}


# what becomes of the process that is asked

TELL = "import os, signal, sys, time; fd = int(sys.argv[1].split('=')[1]); say = lambda text: os.write(fd, text); "
BEGUN = (
    r"""say(b'{"event": "part", "name": "torch", "answer": {"version": "2", "cuda": "13"}}\n'); """
)
UNDER_WAY = r"""say(b'{"event": "block", "text": "cuda"}\n'); """


def conduct(script, silence_seconds=60.0):
    """The survey by a process that runs a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            worker_query, "worker_command", lambda *_: [sys.executable, "-c", TELL + script]
        )
        patch.setattr(worker_query, "_SILENCE_SECONDS", silence_seconds)
        return worker_query.survey(0)


def diagnosed(facts, surveyed, name="auto"):
    facts["survey"]["failure"] = surveyed["failure"]
    for later in ("cuda", "mps"):
        del facts["survey"]["parts"][later]
    return not_ok(facts, name)


def test_crashed_survey_is_a_failure_that_keeps_partial_facts(quiet_machine):
    surveyed = conduct(BEGUN + UNDER_WAY + "os.kill(os.getpid(), signal.SIGSEGV)")
    assert surveyed["parts"]["torch"]["version"] == "2"
    assert "ended by SIGSEGV while starting CUDA" in surveyed["failure"]["text"]
    assert diagnosed(quiet_machine, surveyed) == {"devices": "fail", "gpu=auto": "fail"}


def test_doctor_measures_cpu_after_a_device_kills_its_process(quiet_machine):
    surveyed = conduct(UNDER_WAY + "os.kill(os.getpid(), signal.SIGSEGV)")
    assert diagnosed(quiet_machine, surveyed, "cpu") == {"devices": "warn"}


def test_a_process_that_hangs_is_ended_and_is_a_finding(quiet_machine):
    surveyed = conduct(UNDER_WAY + "time.sleep(600)", silence_seconds=0.5)
    assert (
        "sent no progress for 0.5 s and was terminated while starting CUDA"
        in surveyed["failure"]["text"]
    )
    assert diagnosed(quiet_machine, surveyed, "h200") == {"devices": "fail", "gpu=h200": "fail"}


@pytest.mark.parametrize(
    "rubbish", [r"b'Segmentation\n'", r"b'[1, 2]\n'", r"b'{}\n'", r"b'\xff\xfe\n'"]
)
def test_a_process_that_babbles_is_a_finding(rubbish):
    assert "cannot be read" in conduct(f"say({rubbish}); time.sleep(600)")["failure"]["text"]


def test_survey_that_ends_early_is_a_failure_with_its_message():
    failure = conduct("sys.exit('no such thing')")["failure"]
    assert failure["text"].endswith("ended with code 1 (no such thing)")
    assert conduct("pass")["failure"]["text"].endswith("ended with code 0")


def test_a_process_that_can_not_be_started_is_a_finding(monkeypatch):
    monkeypatch.setattr(worker_query, "worker_command", lambda *_: ["/nowhere/python"])
    assert "can't be started" in worker_query.survey(0)["failure"]["text"]


def test_a_part_that_raises_is_told_and_the_others_are_asked(monkeypatch):
    def refuse():
        raise RuntimeError("no driver")

    monkeypatch.setattr(
        answers,
        "_survey_parts",
        lambda index: [("boards", refuse), ("mps", lambda: {"available": False})],
    )
    told = []
    answers.survey(None, lambda event, **details: told.append((event, details)))
    assert [details["answer"] for event, details in told if event == "part"] == [
        {"error": "RuntimeError: no driver"},
        {"available": False},
    ]


def test_worker_without_a_plan_is_refused_except_for_a_survey(capsys):
    with pytest.raises(SystemExit) as end:
        entry.main([])
    assert end.value.code == 2
    assert "--what=survey" in capsys.readouterr().err


# what the machine itself is asked


def test_limits_of_control_groups_are_read_along_the_whole_path(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/user.slice/job\n")
    (tmp_path / "fs/user.slice/job").mkdir(parents=True)
    assert environment.cpu_quota_cores(tmp_path / "fs", membership) is None
    (tmp_path / "fs/user.slice/cpu.max").write_text("250000 100000\n")
    (tmp_path / "fs/user.slice/job/cpu.max").write_text("max 100000\n")
    assert environment.cpu_quota_cores(tmp_path / "fs", membership) == 2.5


def test_a_profiler_is_found_off_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    places = ("/opt/nvidia/nsight-systems/*/bin/nsys",)
    assert environment.tool("nsys", places, tmp_path) is None
    for version in ("2024.1", "2025.3"):
        program = tmp_path / "opt/nvidia/nsight-systems" / version / "bin/nsys"
        program.parent.mkdir(parents=True)
        program.write_text("")
        program.chmod(0o755)
    assert environment.tool("nsys", places, tmp_path) == {"path": str(program), "on_path": False}
    monkeypatch.setenv("PATH", str(program.parent))
    assert environment.tool("nsys", places, tmp_path)["on_path"]


def test_a_folder_is_judged_without_being_made(tmp_path):
    assert environment.folder(tmp_path / "a/b")["writable"]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert not environment.folder(tmp_path / "file/below")["writable"]


def test_what_is_needed_is_compared_with_what_is_installed():
    needed = environment.requirements()
    assert needed["omegaconf"]["fits"]
    assert needed["torch"]["version"]
    assert "pytest" not in needed
    assert environment.requirements("no-such-distribution") is None


# the command


@pytest.mark.slow
def test_doctor_reports_on_this_machine_and_writes_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = commands.run(["doctor", "--gpu", "cpu", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert code == 0
    assert answer["works"]
    assert answer["facts"]["survey"]["failure"] is None
    assert answer["facts"]["survey"]["parts"]["torch"]["version"]
    assert {"check": "clock", "verdict": "ok"}.items() <= next(
        finding for finding in answer["findings"] if finding["check"] == "clock"
    ).items()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def scripted(monkeypatch):
    """Has the command see scripted facts."""

    def see(facts):
        monkeypatch.setattr(doctor, "gather", lambda choice, files: facts)

    return see


def test_doctor_exit_code_means_can_measure_and_pipes_are_plain(h200, scripted, capsys):
    scripted(h200)
    assert commands.run(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert re.search(r"^  gpu=auto +ok +NVIDIA H200 \(cuda:0\)$", printed, re.M)
    assert re.search(r"^it can measure: \d+ ok$", printed, re.M)
    assert commands.run(["doctor", "--gpu", "t4"]) == 1
    assert "it cannot measure" in capsys.readouterr().out


def test_a_warning_does_not_change_the_exit_code(h200, scripted, capsys):
    board(h200)["state"]["processes"] = 3
    scripted(h200)
    assert commands.run(["doctor"]) == 0
    assert "1 warn" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["h200", "a100", "mps"])
def test_the_table_fits_a_terminal_of_80_columns(h200, name):
    h200["machine"]["tools"] |= {"nsys": None, "ncu": None}
    assert doctor.table(whole.diagnose(h200, Choice(name=name))).least_width <= 78


def test_a_device_of_no_file_is_an_error_with_the_nearest(capsys):
    assert commands.run(["doctor", "--gpu", "h2000"]) == 2
    assert "Did you mean h200" in capsys.readouterr().err


def test_the_names_of_checks_are_printed_as_they_are(capsys, monkeypatch, quiet_machine):
    monkeypatch.setattr(doctor, "gather", lambda choice, gpu_files: quiet_machine)
    commands.run(["doctor", "--gpu", "cpu"])
    printed = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    assert "tracking store" in printed
    assert "?" not in printed


def test_files_of_ones_own_count(tmp_path, h200):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/mine.yaml").write_text("match: X9000\nfacts: {product: My X9000}\n")
    h200["gpu_files"] = doctor._gpu_files(tmp_path)
    h200["survey"]["parts"]["cuda"]["devices"][0]["name"] = "NVIDIA X9000"
    assert not_ok(h200, "mine") == {}


def test_a_file_of_ones_own_that_is_damaged_is_an_error(tmp_path, capsys):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/mine.yaml").write_text("match: '['\n")
    assert commands.run(["doctor", "--config-dir", str(tmp_path)]) == 2
    assert "mine.yaml cannot be read" in capsys.readouterr().err


def test_who_holds_the_lock_of_a_device_is_seen(tmp_path, monkeypatch, quiet_machine):
    monkeypatch.setattr(locks, "TEMPORARY", tmp_path)
    path = lock.lock_path("cpu")
    path.parent.mkdir(mode=0o700)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({"process": os.getpid(), "purpose": "outputs/x"}).encode())
        file.flush()
        quiet_machine["locks"]["cpu"] = lock.holder("cpu")
    assert not_ok(quiet_machine, "cpu") == {"device lock": "warn"}
