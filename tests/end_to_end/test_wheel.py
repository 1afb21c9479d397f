"""Wherever perfexp is installed, and however it is started, it finds its configuration."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "-w",
            str(folder),
            str(ROOT),
        ],
        check=True,
        capture_output=True,
    )
    [built] = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_carries_configuration_schema_and_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "perfexp/conf/config.yaml" in names
    assert "perfexp/records/record-1.json" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "conf/", "outputs/")) for name in names)


@pytest.mark.slow
@pytest.mark.always("README: install")
def test_an_unpacked_wheel_runs_anywhere(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import perfexp, perfexp.plan.config as c; "
        "assert 'site' in perfexp.__file__, perfexp.__file__; print(c.conf_dir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tmp_path / "site" / "perfexp" / "conf"), done.stderr


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "perfexp"], [str(Path(sys.executable).parent / "perfexp")]]
)
def test_module_and_script_start_from_any_folder(command, tmp_path):
    done = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resnet50" in done.stdout
    assert list(tmp_path.iterdir()) == []
