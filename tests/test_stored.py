"""What a stored command may choose without being typed again."""

import pytest

from perfexp.cli import stored_command
from perfexp.cli.stored_command import Offer
from perfexp.errors import UserError
from perfexp.host import installation

WORDS = ["resume=given"]


@pytest.fixture(scope="module")
def offer():
    return Offer((installation.conf_dir(),))


@pytest.mark.parametrize(
    "text",
    [
        *("model=resnet18", "model=glob(resnet*)", "model=resnet18,vgg16", "experiment=quick", "experiment=null"),
        *("seed=3", "seed=range(1,2000000000)", "input_size=[224,512x1024]", "percentiles=[50]", "ttfp=false"),
        *("stopping.measure=6", "execution.threads=4", "execution.ddp.bucket_cap_mb=3", "probes.layers=true"),
        *("mode.train.optimizer.lr=0.1", "model.faults.oom=1", "gpu.match='H100 PCIe'", "profiler.trace=[cuda,nvtx]"),
        *("data.root='/data/a b'", "model.weights=folder/a.pth", "model.weights_dir=../weights"),
        *("algorithm.layers={conv1:fft,layer1.0.conv1:gemm}", "algorithm.layers.conv1=fft"),
        *("model.config=fast_scnn_8xb4-160k_cityscapes-512x1024", "+gpu.count=2", "precision=fp32,bf16"),
    ],
)
def test_options_plain_values_and_places_of_data_are_repeated(offer, text):
    stored_command.check([text], offer, WORDS)


@pytest.mark.parametrize(
    "text",
    [
        *("stopping=../../evil", "stopping=/evil", "stopping='../evil'", "stopping=fixed,'../x'", "model=[resnet18]"),
        *("stopping=Fixed", "model=fixed", "+stopping@probe.x=fixed", "model@x=resnet18", "schema/plan=plan"),
        *("model.config=evil/cfg.py", "model.config=cfg.py", "model.config=unknown", "model.config=~/x"),
        *("model.options={a:b}", "model.options.x=1", "model.kwargs.weights=DEFAULT", "+model.new=1", "+new=1"),
        *("profiler.tool=nsys", "profiler.options=[-x]", "profiler.reports=[mine]", "algorithm.cache_dir=x"),
        *("model._target_=os.system", "mode.train._target_=x", "seed=${oc.env:HOME}", "model.name=${seed}"),
        *("model.name=../x", "model.name=/x", "model.name=-x", "model.name=a/b", "model.name=a..b", "seed={a:b/c}"),
        *("algorithm.layers={conv1:../x}", "algorithm.layers={../x:fft}", "data.root=[a,b]", "resume=x", "hydra.x=1"),
        *("~model", "~model.name", "a=b=c", "[[[", "", "model", "'model'=resnet18", "model=resnet18\nseed=1"),
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
    stored_command.check(["model=tiny", "model.width=32", "model.nested.deep=[3]", "model.file=word"], offer, WORDS)
    stored_command.check_targets({"model": {"_target_": "mine.Tiny"}}, offer)
    for text in ("model.file=x/z", "model.depth=1", "model.nested.other=1"):
        with pytest.raises(UserError):
            stored_command.check([text], offer, WORDS)


def test_code_that_no_file_names_is_refused(offer):
    stored_command.check_targets({"stopping": {"_target_": "perfexp.stopping.Fixed"}}, offer)
    with pytest.raises(UserError, match="shutil"):
        stored_command.check_targets({"probe": {"x": [{"_target_": "shutil.rmtree"}]}}, offer)
