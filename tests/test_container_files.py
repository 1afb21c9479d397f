"""Images: the locks fit pyproject.toml, and the files of docker/ keep their promises; no engine is needed."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
LOCKS = {path.stem: path for path in (DOCKER / "requirements").glob("*.txt")}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
CAPS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line[:1] not in ("#", "")
]


def pins(name):
    """The packages of a lock with their versions: a list for packages that depend on the version of Python."""
    found = {}
    for line in LOCKS[name].read_text().splitlines():
        if pin := re.match(r"([\w.-]+)(?:\[.*\])?==([^ ;\\]+)", line):
            found.setdefault(canonicalize_name(pin[1]), []).append(pin[2])
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_a_hash_and_no_index_is_named(name):
    text = LOCKS[name].read_text()
    blocks = re.findall(r"^\S+==.*(?:\n +--hash=sha256:[0-9a-f]{64}(?: \\)?)+$", text, re.MULTILINE)
    assert len(blocks) == sum(map(len, pins(name).values())) > 0
    assert not re.search(r"://|--(extra-)?index-url|--find-links", text)


@pytest.mark.parametrize(
    ("locks", "extras", "absent"),
    [(("base", "torch-cuda"), ("seg",), ()), (("base", "torch-cpu"), ("seg",), ()),
     (("measure", "torch-cuda"), (), ("mlflow",))],
)  # fmt: skip
def test_the_locks_of_an_image_hold_what_pyproject_needs(locks, extras, absent):
    locked = {package: versions for lock in locks for package, versions in pins(lock).items()}
    texts = [
        *PROJECT["dependencies"],
        *(text for extra in extras for text in PROJECT["optional-dependencies"][extra]),
    ]
    needed = [one for one in map(Requirement, texts) if one.name not in absent]
    assert not [one.name for one in needed if canonicalize_name(one.name) not in locked]
    for one in (*needed, *(cap for cap in CAPS if canonicalize_name(cap.name) in locked)):
        for version in locked[canonicalize_name(one.name)]:
            assert one.specifier.contains(version, prereleases=True), (
                f"{one}: {version}; run python docker/lock.py"
            )
    assert not set(absent) & locked.keys()


def test_measuring_nodes_have_the_client_of_the_same_mlflow():
    assert pins("measure")["mlflow-skinny"] == pins("base")["mlflow"] == pins("mlflow")["mlflow"]
    assert {"sqlalchemy", "alembic"} <= pins("measure").keys()


def test_the_wheel_of_an_image_is_built_from_all_packages():
    copied = re.findall(r"^COPY (\w+) /src/", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    for folder in (*SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "conf"):
        assert folder in copied
        assert f"!{folder}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_images_run_as_an_unprivileged_user_on_chosen_bases():
    text = re.sub(r"\\\n", " ", (DOCKER / "Dockerfile").read_text())
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    names = [stage.split()[2] for stage in stages]
    for stage in stages:
        base, _, name = stage.split()[:3]
        assert base in names or re.fullmatch(r"\$\{(CPU|CUDA|ROCM)_IMAGE\}", base), base
        if "ENTRYPOINT" in stage or name == "cuda-nsight":
            assert re.findall(r"^USER (.*)$", stage, re.MULTILINE)[-1] == "10001:10001", name
    assert {"cpu", "cuda", "cuda-nsight", "measure", "rocm", "mlflow", "test"} <= set(names)
    assert not re.search(r"--mount|--link|<<|ADD ", text)  # BuildKit's
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_compose_has_no_password_and_one_port_on_loopback():
    text = (DOCKER / "compose.yaml").read_text()
    compose = yaml.safe_load(text)
    assert [
        port for service in compose["services"].values() for port in service.get("ports", ())
    ] == ["127.0.0.1:5000:5000"]
    assert {Path(secret["file"]).parent.name for secret in compose["secrets"].values()} == {
        "secrets"
    }
    assert not re.search(r"PASSWORD: |://\w+:\D", text)
    assert "SYS_ADMIN" in compose["services"]["ncu"]["cap_add"]
    assert [name for name, service in compose["services"].items() if "cap_add" in service] == [
        "ncu"
    ]
    assert "docker/secrets/" in (ROOT / ".gitignore").read_text()
    assert "secrets" in (ROOT / ".dockerignore").read_text()
