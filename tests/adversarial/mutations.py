"""Random changes of a run's and a sweep's folder, by a seed: what a damaged disk or a person could make of them."""

import json
import os
import random
import shutil

import yaml

from tests.adversarial.cases import plant_option
from tests.adversarial.place import commands

#: Values that fit nowhere, or where they should not.
_VALUES = (
    *(
        None,
        True,
        0,
        -1,
        10**30,
        1.5,
        1e308,
        "",
        "x",
        "\x1b[2J",
        "../../outside/bashrc",
        "=1+1",
        "a" * 5000,
    ),
    *(
        [],
        {},
        [[]],
        {"a": {"b": []}},
        [1, "2", None],
        "\ud800",
        "\u202e",
        "${oc.env:HOSTILE_SECRET}",
    ),
)
_NAMES = (
    *("details/plan.yaml", "details/expected.json", "record.json", "details/points.jsonl"),
    *("details/manifest.json", "details/environment.json", "details/run.log", "report.md"),
)
_SWEEP_NAMES = (
    *("sweep.json", "details/manifest.json", "details/sweep.lock"),
    *("sweep.csv", "0-b1/details/plan.yaml", "1-b2/record.json"),
)


def mutate(place, seed):
    """Change both folders, and return the commands to run, one folder's."""
    random_ = random.Random(seed)
    folder = random_.choice((place.run, place.run, place.sweep))
    names = _SWEEP_NAMES if folder == place.sweep else _NAMES
    for _ in range(random_.randint(1, 3)):
        change = random_.choice(
            (_overrides, _overrides, _value, _value, _value, _bytes, _bytes, _replaced, _key)
        )
        change(place, folder / random_.choice(names), random_)
    return commands(folder, place.out)


def _overrides(place, path, random_):
    """An override more in the stored command."""
    folder = path.parent.parent if path.parent.name == "details" else path.parent
    is_sweep = (folder / "sweep.json").exists()
    path = folder / ("sweep.json" if is_sweep else "details/plan.yaml")
    option = plant_option(
        place, f"_target_: shutil.copy\nsrc: {place.outside}/bashrc\ndst: {place.canary}\n"
    )
    (place.outside / "evil" / "cfg.py").write_text(place.planted)
    values = (
        *(
            option,
            f"'{option}'",
            f"{place.outside}/evil/option",
            f"{place.outside}/evil/cfg.py",
            "../../x",
            "$HOME",
        ),
        *(
            "1",
            "-1",
            "1e400",
            "null",
            "[1,2]",
            "{a:1}",
            "range(1,9999999999)",
            "glob(*)",
            "choice(a,b)",
            "\x1b[2J",
        ),
        *(
            "fixed",
            "nsys",
            "torch",
            "str(1)",
            "extend_list(1)",
            "sort(3,1)",
            "${seed}",
            "x" * 200_000,
            "[" * 1000,
        ),
    )
    keys = (
        *(
            "stopping",
            "model",
            "algorithm",
            "probe",
            "profiler",
            "experiment",
            "hydra/launcher",
            "hydra.searchpath",
        ),
        *(
            "model.config",
            "model.options",
            "model.kwargs",
            "algorithm.cache_dir",
            "profiler.tool",
            "batch_size",
        ),
        *(
            "input_size",
            "seed",
            "processes",
            "output_dir",
            "speed_dir",
            "stage",
            "tracking.uri",
            "+x",
            "~model",
        ),
        *(
            "stopping.measure",
            "data.root",
            "model.weights",
            "timeout_seconds",
            "execution.threads",
            "model._target_",
        ),
    )
    _rewrite(
        path,
        lambda content: content["command"].append(
            f"{random_.choice(keys)}={random_.choice(values)}"
        ),
    )


def _value(place, path, random_):
    """Another value somewhere in a file of JSON or YAML."""

    def change(content):
        node = content
        for _ in range(random_.randint(0, 5)):
            inner = [part for part in _parts(node) if isinstance(part, (dict, list)) and part]
            if not inner:
                break
            node = random_.choice(inner)
        key = random_.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node[key] = random_.choice(_VALUES)

    _rewrite(path, change)


def _key(place, path, random_):
    """A key less or more."""

    def change(content):
        if random_.random() < 0.5:
            content.pop(random_.choice(list(content)))
        else:
            content[random_.choice(("_target_", "x", "uid", "perfexp", "command", "children"))] = (
                random_.choice(_VALUES)
            )

    _rewrite(path, change)


def _bytes(place, path, random_):
    """Bytes that are cut off, doubled, or others."""
    if not path.is_file() or path.is_symlink():
        return
    content = bytearray(path.read_bytes())
    where = random_.randrange(len(content) + 1)
    kind = random_.randrange(4)
    if kind == 0:
        content = content[:where]
    elif kind == 1:
        content += content[where:]
    else:
        content[where : where + kind] = random_.randbytes(kind)
    path.unlink()
    path.write_bytes(content)


def _replaced(place, path, random_):
    """Something else in place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    outside = place.outside / random_.choice(("bashrc", "made", "precious.csv", "."))
    make = random_.choice(("link", "link", "name", "pipe", "folder", "device", "gone"))
    if make == "link":
        path.symlink_to(outside)
    elif make == "name":
        os.link(place.outside / "bashrc", path)
    elif make == "pipe":
        os.mkfifo(path)
    elif make == "folder":
        path.mkdir()
    elif make == "device":
        path.symlink_to(random_.choice(("/dev/zero", "/dev/full", "/dev/stdin", "/proc/self/mem")))


def _rewrite(path, change):
    """Change the content of a file of JSON, lines of JSON, or YAML, as far as it still is one."""
    if not path.is_file():  # a pipe by now, which would keep the test waiting
        return
    try:
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        contents = [
            yaml.safe_load(line) if path.suffix == ".yaml" else json.loads(line) for line in lines
        ]
        change(contents[0])
        written = [
            yaml.dump(each) if path.suffix == ".yaml" else json.dumps(each) for each in contents
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, yaml.YAMLError):
        return
    if path.is_symlink():
        return
    path.unlink()
    path.write_text("\n".join(written) + "\n" * (path.suffix == ".jsonl"))


def _parts(node):
    return node.values() if isinstance(node, dict) else node
