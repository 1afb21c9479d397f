"""perfexp cluster use: the words that come before those of each sweep."""

import pytest

from perfexp.__main__ import dispatch as main
from perfexp.cluster import default_site

pytestmark = pytest.mark.usefixtures("quick_commands")

STORED = [
    "--config-dir=/sites",
    "cluster=dsai",
    "hydra/launcher=slurm",
    "hydra.launcher.wait=false",
]


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "perfexp" / "site.txt"


@pytest.mark.parametrize(
    ("typed", "added"),
    [
        ("-m experiment=sanity", STORED),
        ("--multirun model=a,b", STORED),
        ("model=a", []),  # no sweep
        ("-m cluster=other", [STORED[0], *STORED[2:]]),
        ("-m --config-dir=mine", STORED[1:]),
        ("-m hydra/launcher=basic", STORED[:2]),
        ("-m ++hydra.launcher.wait=true", STORED[:3]),
    ],
)
def test_what_is_typed_replaces_what_is_stored(typed, added):
    default_site.use(STORED)
    assert default_site.with_site(typed.split()) == [*added, *typed.split()]


@pytest.mark.slow
def test_a_site_is_used_by_each_sweep_until_it_is_forgotten(tmp_path, monkeypatch, capsys, config):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # without SLURM
    sites = tmp_path / "mysite" / "cluster"
    sites.mkdir(parents=True)
    (sites / "dsai.yaml").write_text(
        "defaults: [/schema/cluster@_here_, _self_]\nname: dsai\ngpus: {cpu: {gres: ''}}\n"
    )
    sweep = ("-m", "model=fake", "gpu=fake", "batch_size=1,2", "tracking=none")
    assert (
        main(["cluster", "use", "dsai", "hydra.launcher.wait=false", "--config-dir", "mysite"]) == 0
    )
    assert config.read_text().splitlines()[:2] == [
        f"--config-dir={tmp_path}/mysite",
        "cluster=dsai",
    ]
    assert main(sweep) == 2  # as for a typed cluster=dsai
    assert "scontrol is not on the PATH" in "".join(capsys.readouterr())
    assert main([*sweep, "hydra/launcher=basic", "--dry-run"]) == 0
    assert main(["cluster", "use", "--forget"]) == 0
    assert main([*sweep, "--dry-run"]) == 0
    assert not config.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "nope"),
        (["default", "wait"], "wait is not KEY=VALUE"),
        (["default", "--job"], "No such option"),
    ],
)
def test_invalid_site_or_setting_is_refused_and_not_stored(words, message, capsys, config):
    assert main(["cluster", "use", *words]) == 2
    assert message in "".join(capsys.readouterr())
    assert not config.exists()


def test_a_file_that_is_no_text_is_named(capsys, config):
    config.parent.mkdir(parents=True)
    config.write_bytes(b"\xff\xfe")
    assert main(["-m", "model=fake", "gpu=fake", "batch_size=1,2", "--dry-run"]) == 2
    assert f"{config} can't be read" in "".join(capsys.readouterr())
