"""What a stored command may choose without being typed again."""

from dataclasses import fields

import pytest

from perfexp.cli import stored_command
from perfexp.cli.composition import compose
from perfexp.cli.stored_command import Offer
from perfexp.errors import UserError
from perfexp.host import installation
from perfexp.plan import schema

pytestmark = pytest.mark.usefixtures("quick_commands")

WORDS = ["resume=given"]


@pytest.fixture(scope="module")
def offer():
    return Offer((installation.conf_dir(),))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "model=resnet18",
            "model=glob(resnet*)",
            "model=resnet18,vgg16",
            "experiment=quick",
            "experiment=null",
        ),
        *("seed=3", "seed=range(1,2000000000)", "input_size=[224,512x1024]", "percentiles=[50]"),
        *(
            "stopping.measure=6",
            "execution.threads=4",
            "execution.ddp.bucket_cap_mb=3",
            "probes.layers=true",
        ),
        *(
            "mode.train.optimizer.lr=0.1",
            "model.faults.oom=1",
            "gpu.match='H100 PCIe'",
            "profiler.trace=[cuda,nvtx]",
        ),
        *(
            "data.download=false",
            "data.download=null",
            "model.weights=null",
            "mode.train.resume_from=null",
        ),
        *(
            "mode.train.save_every=1",
            "mode.train.ema=0.99",
            "mode.train.log_every=5",
            "+mode.train.decay_factor=0.1",
        ),
        *("algorithm.layers={conv1:fft,layer1.0.conv1:gemm}", "algorithm.layers.conv1=fft"),
        *(
            "model.config=fast_scnn_8xb4-160k_cityscapes-512x1024",
            "+gpu.count=2",
            "precision=fp32,bf16",
        ),
    ],
)
def test_options_and_plain_values_are_repeated(offer, text):
    stored_command.check([text], offer, WORDS)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "stopping=../../evil",
            "stopping=/evil",
            "stopping='../evil'",
            "stopping=fixed,'../x'",
            "model=[resnet18]",
        ),
        *(
            "stopping=Fixed",
            "model=fixed",
            "+stopping@probe.x=fixed",
            "model@x=resnet18",
            "schema/plan=plan",
        ),
        *(
            "model.config=evil/cfg.py",
            "model.config=cfg.py",
            "model.config=unknown",
            "model.config=~/x",
        ),
        *(
            "model.options={a:b}",
            "model.options.x=1",
            "model.kwargs.weights=DEFAULT",
            "+model.new=1",
            "+new=1",
        ),
        *(
            "profiler.tool=nsys",
            "profiler.options=[-x]",
            "profiler.reports=[mine]",
            "algorithm.cache_dir=x",
        ),
        *(
            "model._target_=os.system",
            "mode.train._target_=x",
            "seed=${oc.env:HOME}",
            "model.name=${seed}",
        ),
        *(
            "model.name=../x",
            "model.name=/x",
            "model.name=-x",
            "model.name=a/b",
            "model.name=a..b",
            "seed={a:b/c}",
        ),
        *(
            "algorithm.layers={conv1:../x}",
            "algorithm.layers={../x:fft}",
            "data.root=[a,b]",
            "resume=x",
            "hydra.x=1",
        ),
        *(
            "data.root='/data/a b'",
            "data.root=folder",
            "data.download=true",
            "data.download=false,true",
        ),
        *(
            "model.weights=folder/a.pth",
            "model.weights=DEFAULT",
            "model.weights_dir=../weights",
            "mode.ema=0.99",
        ),
        *("mode.train.resume_from=a.pt", "mode.train.resume_from='/a b.pt'"),
        *(
            "~model",
            "~model.name",
            "a=b=c",
            "[[[",
            "",
            "model",
            "'model'=resnet18",
            "model=resnet18\nseed=1",
        ),
    ],
)
def test_everything_else_is_typed_again(offer, text):
    with pytest.raises(UserError, match="type it again: perfexp"):
        stored_command.check([text], offer, WORDS)


def test_a_typed_folder_offers_its_options_and_their_keys(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.yaml").write_text(
        "_target_: mine.Tiny\nwidth: 16\nfile: x/y\nnested:\n  deep: [1, 2]\n"
    )
    offer = Offer((installation.conf_dir(), tmp_path))
    stored_command.check(
        ["model=tiny", "model.width=32", "model.nested.deep=[3]", "model.file=word"], offer, WORDS
    )
    stored_command.check_targets({"model": {"_target_": "mine.Tiny"}}, offer, {})
    for text in ("model.file=x/z", "model.depth=1", "model.nested.other=1"):
        with pytest.raises(UserError):
            stored_command.check([text], offer, WORDS)


def test_code_that_no_file_names_is_refused(offer):
    stored_command.check_targets({"stopping": {"_target_": "perfexp.stopping.Fixed"}}, offer, {})
    with pytest.raises(UserError, match="shutil"):
        stored_command.check_targets({"probe": {"x": [{"_target_": "shutil.rmtree"}]}}, offer, {})


def test_all_that_must_be_typed_is_named_at_once(offer):
    with pytest.raises(UserError) as error:
        stored_command.check(["data.root=/any", "seed=1", "data.download=true"], offer, WORDS)
    assert str(error.value).endswith(
        "type it again: perfexp resume=given data.root=/any data.download=true"
    )


def leaves(node, prefix):
    """Keys and values of a composed plan, as on a command line."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        elif key != "_target_" and isinstance(value, (bool, int, float, str)):
            yield f"{prefix}{key}", value


@pytest.mark.parametrize(
    "options",
    [
        *(
            ["mode=train_inference"],
            ["mode=train", "data=synthetic_epoch", "epochs=2", "sweep=sizes"],
        ),
        *(["stopping=publish", "sweep=batch"], ["stopping=normal", "execution.threads=1"]),
    ],
)
def test_every_setting_of_ones_own_run_is_repeated(offer, options):
    sections = (
        "mode",
        "stopping",
        "sweep",
        "algorithm",
        "execution",
        "probes",
        "precision",
        "data",
    )
    plain = compose(["model=fake", "gpu=fake", "tracking=none", *options])
    found = [text for section in sections for text in leaves(plain[section], f"{section}.")]
    of_train = {key.name for key in fields(schema.settings()["mode/train"])}
    found += [
        (f"mode.train.{key}", 1) for key in of_train - {"_target_", "resume_from", "optimizer"}
    ]
    assert len(found) > 20
    stored_command.check([f"{key}={value}".lower() for key, value in found], offer, WORDS)
