"""Every file of conf/ composes, says what its code takes, and finds its code."""

import copy
import importlib
import inspect
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from perfexp.cli import keys
from perfexp.errors import UserError
from perfexp.host import installation
from perfexp.host.gpu_sheets import GpuFacts
from perfexp.plan import config, plan_fields, plan_file, schema, validation
from perfexp.plan.overrides import parsed
from perfexp.records import old_names

pytestmark = pytest.mark.usefixtures("quick_commands")

CONF = installation.conf_dir()
OPTIONS = [
    (path.parent.name, path.stem)
    for path in sorted(CONF.glob("*/*.yaml"))
    if path.parent.name not in ("schema",)
]
#: Options that need a value of the user's.
GIVEN = {
    ("model", "torchvision"): ["model.name=resnet18"],
    ("model", "timm"): ["model.name=resnet18"],
    ("model", "mmseg"): ["model.config=somewhere.py"],
    ("model", "hf"): ["model.name=bert"],
    ("mode", "decode"): ["model=hf", "model.name=llama"],
    ("experiment", "time_to_accuracy"): ["data.root=somewhere"],
    ("data", "images"): ["data.root=somewhere"],
    ("data", "cityscapes"): ["data.root=somewhere"],
    ("data", "clips"): ["data.root=somewhere"],
    ("data", "skeletons"): ["data.root=somewhere"],
    ("data", "cifar10"): ["data.root=somewhere"],
    ("data", "cifar100"): ["data.root=somewhere"],
    ("experiment", "cifar10"): ["data.root=somewhere"],
}
GPUS = [path.stem for path in sorted((CONF / "gpu").glob("*.yaml"))]
SHEETS = [name for name in GPUS if name not in ("auto", "cpu", "mps", "fake")]


@pytest.fixture(scope="module", autouse=True)
def composing():
    config.register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        yield


@cache
def composed_plan(*overrides):
    composed = compose(config_name="config", overrides=list(overrides))
    return config.plan_of(composed, {})


def plan(*overrides):
    return copy.deepcopy(composed_plan(*overrides))


@cache
def sheet(name):
    return yaml.safe_load((CONF / "gpu" / f"{name}.yaml").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_into_a_plan_whose_targets_exist(group, option):
    plain = plan(f"{group}={option}", *GIVEN.get((group, option), ()))
    assert config.typed(plain).timed_keys()
    for target in targets(plain):
        module, _, name = target.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), target


def targets(node):
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from targets(value)


@pytest.mark.parametrize("name", schema.TARGETS)
def test_schema_matches_the_arguments_and_defaults_of_its_code(name):
    node = ConfigStore.instance().load(f"schema/{name}.yaml").node
    module, _, attribute = schema.TARGETS[name].rpartition(".")
    taken = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters
    earlier = {key.rpartition(".")[2] for key in old_names.NAMES}
    assert set(taken) == set(node) - {"_target_"} - earlier
    for key, parameter in taken.items():
        if parameter.default is inspect.Parameter.empty:
            assert OmegaConf.is_missing(node, key), key
        else:
            unset = isinstance(node[key], DictConfig) and all(
                value is None for value in node[key].values()
            )
            default = (
                list(parameter.default)
                if isinstance(parameter.default, tuple)
                else parameter.default
            )
            assert node[key] == default or (unset and default is None), key


def test_each_key_has_exactly_one_description():
    known = {key.name for of_schema in keys.keys(CONF).values() for key in of_schema}
    assert set(keys.descriptions()) == known
    lines = Path(config.__file__).with_name("key_descriptions.yaml").read_text().splitlines()
    assert len([line for line in lines if line[0] != "#"]) == len(known)


def test_a_description_is_one_short_text():
    texts = keys.descriptions().values()
    assert [text for text in texts if len(text.split()) > 26] == []
    assert [text for text in texts if text.endswith(".") or ". " in text] == []


def test_a_file_of_conf_does_not_describe_its_keys():
    """Comments beside values explain choices of experiments and data sheets; launchers have no schema."""
    explained = ("experiment", "gpu")
    files = [path for path in CONF.rglob("*.yaml") if path.parent.name not in explained]
    commented = [
        f"{path.name}: {line}"
        for path in files
        if "hydra" not in path.relative_to(CONF).parts
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"[^#]*:.*\s#\s", line)
    ]
    assert len(files) > 50
    assert commented == []


def test_no_docstring_describes_a_key():
    """Docstrings of the schemas, and of the code that their values go to, leave keys to their description."""
    classes = {plan_fields.PlanSchema, schema.Gpu, schema.Cluster}
    for target in schema.TARGETS.values():
        module, _, name = target.rpartition(".")
        classes.add(getattr(importlib.import_module(module), name))
    for owner in set(classes):
        hints = get_type_hints(owner) if is_dataclass(owner) else {}
        classes |= {kind for kind in hints.values() if is_dataclass(kind)}
        classes |= {base for base in owner.__mro__ if base.__module__.startswith("perfexp.")}
    described = {key.rpartition(".")[2] for key in keys.descriptions()}
    listed = [
        f"{owner.__name__}.{key}"
        for owner in classes
        for text in (owner.__doc__, owner.__init__.__doc__)
        for key in re.findall(r"^ +(\w+): ", text or "", re.MULTILINE)
        if key in described
    ]
    assert len(classes) > 35
    assert listed == []


def test_the_schemas_are_made_without_torch():
    code = "import sys; from perfexp.plan import config; config.register(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sizes_are_typed_and_parsed_once():
    typed = config.typed(plan("model=alexnet", "input_size=[64,32x48]", "batch_size=8"))
    assert (typed.input_size, typed.batch_size) == ([(64, 64), (32, 48)], [8])
    assert config.typed(plan("sweep=sizes")).input_size == []


def test_shipped_files_are_no_diary():
    texts = [file.read_text(encoding="utf-8") for file in installation.conf_dir().rglob("*.yaml")]
    assert [text for text in texts if re.search(r"this work|not opened", text)] == []


@pytest.mark.parametrize("name", SHEETS)
def test_a_data_sheet_is_complete_and_has_sources(name):
    facts = sheet(name)["facts"]
    assert set(facts) <= {field.name for field in fields(GpuFacts)}
    assert facts["sources"]
    names = {"fp64", "fp64_vector", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"}
    assert facts["peak_flops_per_second"].keys() == names
    assert (facts["peak_flops_per_second"]["fp64_vector"] or 0) <= (
        facts["peak_flops_per_second"]["fp64"] or 0
    )
    assert 1e9 <= facts["memory_bytes"] <= 1e12
    assert 1e11 <= facts["memory_bytes_per_second"] <= 1e13
    for rate in facts["peak_flops_per_second"].values():
        assert rate is None or 1e12 <= rate <= 1e16


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("h200", "NVIDIA H200"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("l40s", "NVIDIA L40S"),
        ("v100", "Tesla V100-SXM2-16GB"),
        ("t4", "Tesla T4"),
        ("a6000", "NVIDIA RTX A6000"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("mi250x", "AMD Instinct MI250X"),
        ("mi300x", "AMD Instinct MI300X"),
        ("v100_32gb", "Tesla V100-SXM2-32GB"),
        ("v100_pcie", "Tesla V100-PCIE-16GB"),
        ("v100_pcie_32gb", "Tesla V100-PCIE-32GB"),
        ("a100_40gb", "NVIDIA A100-SXM4-40GB"),
        ("a100_40gb", "A100-SXM4-40GB"),  # an older driver
        ("a100_pcie", "NVIDIA A100 80GB PCIe"),
        ("a100_pcie", "NVIDIA A100-PCIE-80GB"),
        ("a100_pcie_40gb", "NVIDIA A100-PCIE-40GB"),
        ("h100_pcie", "NVIDIA H100 PCIe"),
        ("h100_nvl", "NVIDIA H100 NVL"),
        ("gh200", "NVIDIA GH200 480GB"),
        ("gh200", "NVIDIA GH200 120GB"),
        ("gh200_144gb", "NVIDIA GH200 144G HBM3e"),
        ("h20", "NVIDIA H20"),
        ("b200", "NVIDIA B200"),
        ("l4", "NVIDIA L4"),
        ("a10", "NVIDIA A10"),
        ("rtx3090", "NVIDIA GeForce RTX 3090"),
        ("rtx3090", "GeForce RTX 3090"),
    ],
)
def test_a_reported_name_fits_its_data_sheet_and_no_other(name, reported):
    assert fitting(reported, re.IGNORECASE) == fitting(reported, 0) == [name]


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-PCIE-40GB MIG 1g.5gb",
        "NVIDIA A100 80GB PCIe MIG 2g.20gb",
        "NVIDIA H100 PCIe MIG 1g.10gb",
        "NVIDIA H100 NVL MIG 1g.12gb",
        "NVIDIA GH200 480GB MIG 1g.12gb",
        "NVIDIA H20 MIG 1g.12gb",
        "NVIDIA B200 MIG 1g.23gb",
        "Tesla V100-SXM2-32GB-LS",
        "Tesla V100S-PCIE-32GB",
        "Tesla V100-SXM3-32GB",
        "Tesla V100-FHHL-16GB",
        "GRID A100-40C",
        "NVIDIA A10-24Q",
        "NVIDIA A10G",
        "NVIDIA A100X",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA H100-80C",
        "NVIDIA H200 NVL",
        "NVIDIA H20-3e",
        "NVIDIA H800",
        "NVIDIA GB200",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA L40",
        "NVIDIA L4-24Q",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
    ],
)
def test_a_variant_with_other_figures_fits_no_data_sheet(reported):
    assert fitting(reported, re.IGNORECASE) == []


def fitting(reported, flags):
    matches = {name: sheet(name)["match"] for name in SHEETS}
    return [name for name, match in matches.items() if re.search(match, reported, flags)]


def test_an_experiment_sets_its_sizes_and_the_user_still_wins():
    quick = config.typed(plan("experiment=quick"))
    keys = quick.timed_keys()
    assert [sum(key.replicate == number for key in keys) for number in range(4)] == [10, 10, 10, 10]
    assert quick.percentiles == [50.0]
    mine = config.typed(
        plan("experiment=quick", "sweep.num_sizes=4", "sweep.max_size=230", "percentiles=[50,95]")
    )
    assert [key.input_size[0] for key in mine.timed_keys() if not key.replicate] == [
        224,
        226,
        228,
        230,
    ]
    assert mine.percentiles == [50.0, 95.0]


def test_layers_are_given_algorithms_on_the_command_line():
    given = plan("algorithm=winograd", "algorithm.layers={features.0:implicit gemm,layer1.*:fft}")[
        "algorithm"
    ]
    assert given["layers"] == {"features.0": "implicit gemm", "layer1.*": "fft"}
    assert config.build(given).name == "winograd"


def test_the_batch_sweep_goes_from_1_to_128():
    keys = config.typed(plan("sweep=batch")).timed_keys()
    assert [key.batch_size for key in keys if not key.replicate] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_a_sweep_of_sizes_and_a_size_contradict_each_other():
    with pytest.raises(UserError, match="leave out input_size"):
        validation.check(config.typed(plan("sweep=sizes", "input_size=300")))


def test_train_inference_has_both_phases_of_each_point():
    assert config.typed(plan("mode=train_inference")).phases == ["train", "inference"]


def test_a_plan_is_the_same_after_writing_and_reading(tmp_path):
    plain = plan("model=alexnet", "batch_size=[1,2]", "input_size=512x1024")
    (tmp_path / "plan.yaml").write_bytes(plan_file.to_yaml(plain))
    assert plan_file.read(tmp_path / "plan.yaml") == plain


def test_the_hash_of_a_plan_changes_with_what_is_measured_only():
    one = plan_file.plan_hash(plan("model=alexnet"))
    assert one == plan_file.plan_hash(
        plan("model=alexnet", "output_dir=x", "quiet=true", "tracking=none", "stage=s")
    )
    assert one != plan_file.plan_hash(plan("model=alexnet", "seed=1"))


def test_differences_name_the_keys():
    assert plan_file.differences(plan("model=alexnet"), plan("model=vgg16", "seed=3")) == [
        "model.name: alexnet → vgg16",
        "seed: 0 → 3",
    ]


def test_another_wording_of_a_data_sheets_notes_is_the_same_plan():
    """A folder measured with an older wording can be continued, one with other figures can't."""
    old = plan("model=alexnet", "gpu=h100")
    old["gpu"]["facts"] |= {"notes": ["an older wording"], "sources": []}
    assert plan_file.differences(old, plan("model=alexnet", "gpu=h100")) == []
    old["gpu"]["facts"]["power_watts"] = 350
    assert plan_file.differences(old, plan("model=alexnet", "gpu=h100")) == [
        "gpu.facts.power_watts: 350 → 700.0"
    ]


@pytest.mark.parametrize(
    "raised",
    [
        "OSError(12, 'Cannot allocate memory')",
        "ImportError('libtorch_python.so: failed to map segment from shared object')",
        "MemoryError()",
    ],
)
def test_import_that_runs_out_of_memory_is_not_a_user_error(tmp_path, monkeypatch, raised):
    (tmp_path / "hungry.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MemoryError, match=r"hungry\.Model can't be loaded: "):
        config.build({"_target_": "hungry.Model"})


def test_the_experiment_with_every_model_has_every_model():
    """Those of conf/, but for the script, an alias, and the three that take a name or a file."""
    text = (installation.conf_dir() / "experiment" / "all.yaml").read_text()
    params = yaml.safe_load(text)["hydra"]["sweeper"]["params"]
    [override] = parsed([f"model={params['model']}"])
    known = {file.stem for file in (installation.conf_dir() / "model").glob("*.yaml")}
    chosen = set(override.sweep_string_iterator()) & known  # other tests add models of their own
    assert known - chosen == {"fake", "mmseg", "ocrnet_hrnetw48", "timm", "torchvision", "hf"}
    assert {"ocrnet", "fastscnn", "segformer_b0", "vgg16"} <= chosen
    nodes = [{**config.typed(plan(f"model={name}")).model, "name": None} for name in sorted(chosen)]
    own = [node for node in nodes if node["_target_"] != "perfexp.models.torchvision.Torchvision"]
    aliases = [node for number, node in enumerate(own) if node in own[:number]]
    assert aliases == []


def test_input_size_counts_frames_of_skeletons_and_else_pixels():
    def sizes(*overrides):
        return config.typed(plan("model=clip_gesture", *overrides)).input_size

    assert sizes() == [(20, 75)]
    assert sizes("input_size=64") == [(64, 75)]
    assert sizes("input_size=[10,'20x75']", "model.joints=20") == [(10, 60), (20, 75)]
    assert sizes("model.backbone=image", "input_size=224") == [(224, 224)]
    assert config.typed(plan("model=resnet18", "input_size=64")).input_size == [(64, 64)]


@pytest.mark.parametrize(
    ("overrides", "optimizer"),
    [
        (["mode=train"], "own"),
        (["mode=inference"], "own"),
        (["mode=train", "mode.train.optimizer.lr=0.1"], "own"),
        (["mode=train", "epochs=2", "data=synthetic_epoch", "mode.train.patience=3"], "own"),
        (["mode=train", "epochs=2", "data=synthetic_epoch", "mode.train.checkpoints=true"], "mode"),
        (["mode=train", "mode.train.clip_grad_norm=1"], "mode"),
        (["experiment=full_benchmark"], "mode"),
        (["experiment=full_benchmark", "model.optimizer=own"], "own"),
    ],
)
def test_segmentation_training_falls_back_to_mode_settings(overrides, optimizer):
    assert plan("model=fastscnn", *overrides)["model"]["optimizer"] == optimizer


def test_the_recipe_for_cifar_10_takes_another_model():
    recipe = config.typed(plan("experiment=cifar10", "model=resnet34", "data.root=somewhere"))
    optimizer = recipe.mode.train["optimizer"]
    assert optimizer == {
        "name": "sgd",
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.0005,
    }
    assert recipe.model["name"] == "resnet34"
    keys = {(key.phase, key.input_size, key.batch_size) for key in recipe.timed_keys()}
    assert keys == {("train", (32, 32), 256)}
