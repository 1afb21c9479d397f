"""What is read off a training log, family by family: the figure, the facts, and what a failure looks like."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfexp.errors import UserError
from perfexp.report.speed import Facts, Mode, of_log, steady
from perfexp.report.speed.training_log import LoggedStep
from tests.report.speed import writing

DATA = Path(__file__).parent / "data"
KNOWN = Facts(model="fastscnn", batch_size=2, num_gpus=1, precision="fp32")
#: A warm-up that decays, then 20 steady lines around 0.25 s.
WARMING = [2.0, 0.9, 0.4, *[0.249, 0.251] * 10]
FAMILIES = {
    "mmengine text, by iteration": writing.mmengine_iter,
    "mmengine text, by epoch": writing.mmengine_epoch,
    "mmengine JSON": writing.mmengine_json,
    "mmcv text, by iteration": writing.mmcv_iter,
    "mmcv text, by epoch": writing.mmcv_epoch,
    "mmcv text, by epoch, around 1.0": lambda times: writing.mmcv_epoch(times, mode="(train)"),
    "mmcv JSON": writing.mmcv_json,
}
any_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.fixture
def log(tmp_path):
    """A function that leaves a log and says where."""

    def leave(content, name="train.log"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return leave


@any_family
def test_warm_up_is_skipped_and_speed_is_images_over_mean_time(family, log):
    speed = of_log(log(family(WARMING)), KNOWN)
    assert speed.images_per_second == pytest.approx(2 / 0.25)
    assert not speed.failed
    assert "mean of 20 lines" in speed.remark
    assert "the first 3 skipped" in speed.remark


@pytest.mark.parametrize("first", [[], [2.0], [1.6, 1.3, 1.15]])
def test_log_warm_up_is_cut_but_rare_slow_steps_stay(first):
    """Of 50 steady lines a tenth takes half as long again; MSER on its own reports 1 % too short a time."""
    biases, skipped = [], []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        times = (1 + 0.02 * rng.standard_normal(50)) * np.where(rng.random(50) < 0.1, 1.5, 1.0)
        steps = [
            LoggedStep(None, number, float(time), True)
            for number, time in enumerate([*first, *times])
        ]
        left = steady(steps)
        biases.append(left.seconds / times.mean() - 1)
        skipped.append(left.skipped)
    assert abs(np.mean(biases)) < 0.004
    assert len(first) <= np.mean(skipped) < len(first) + 2


@any_family
def test_skip_counts_step_lines_and_replaces_the_warm_up_rule(family, log):
    times = [0.8, 0.4, 0.2, 0.2, 0.4]
    speed = of_log(log(family(times)), KNOWN, skip=1)
    assert speed.images_per_second == pytest.approx(2 / 0.3)
    assert of_log(log(family(times)), KNOWN, skip=0).images_per_second == pytest.approx(2 / 0.4)


@any_family
def test_skipping_all_lines_is_refused_unless_training_failed(family, log):
    path = log(family([0.2, 0.2]))
    with pytest.raises(UserError, match=r"train\.log: --skip 2 leaves no usable line of 2\."):
        of_log(path, KNOWN, skip=2)
    assert of_log(log(family([0.2, 0.2]) + "Killed\n"), KNOWN, skip=2).remark == "killed: Killed"


@any_family
def test_the_last_line_may_be_cut_off_anywhere(family, log):
    whole = family([0.25] * 6)
    last = whole.rstrip("\n").rfind("\n") + 1
    for end in range(last, len(whole)):
        assert of_log(log(whole[:end]), KNOWN).images_per_second == pytest.approx(8.0)


@any_family
def test_line_ends_colors_and_invalid_bytes_do_no_harm(family, log):
    text = "\ufeff" + family(WARMING).replace("\n", "\r\n").replace(
        "INFO", "\x1b[4m\x1b[37mINFO\x1b[0m"
    )
    assert of_log(log(text), KNOWN).images_per_second == pytest.approx(8.0)
    broken = b"\x80\x81\n" + family(WARMING).encode().replace(b"\n", b" \xc3\x28\xff\n\x00\xf0\n")
    if broken[3:4] == b"{":
        with pytest.raises(UserError, match="is not a training log"):
            of_log(log(broken), KNOWN)
    else:
        assert of_log(log(broken), KNOWN).images_per_second == pytest.approx(8.0)
    wide = family(WARMING).encode("utf-16")  # as PowerShell redirects
    assert of_log(log(wide), KNOWN).images_per_second == pytest.approx(8.0)


def test_a_decimal_comma_is_read(log):
    text = writing.mmengine_iter(WARMING).replace(".", ",")
    assert of_log(log(text), KNOWN).images_per_second == pytest.approx(8.0)
    text = writing.mmcv_iter(WARMING).replace(".", ",")
    assert of_log(log(text), KNOWN).images_per_second == pytest.approx(8.0)


def test_a_line_that_came_twice_counts_once(log):
    text = "".join(
        line * 2 for line in writing.mmcv_iter([1.0, 0.5, 0.5]).splitlines(keepends=True)
    )
    assert of_log(log(text), KNOWN, skip=1).images_per_second == pytest.approx(4.0)


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.floats(0.001, 100),
    batch=st.integers(1, 64),
    cards=st.integers(1, 512),
    lines=st.integers(1, 30),
    family=st.sampled_from([writing.mmengine_json, writing.mmcv_json]),
)
def test_images_per_second_are_batch_size_times_cards_over_time(
    tmp_path_factory, seconds, batch, cards, lines, family
):
    path = tmp_path_factory.mktemp("log") / "log.json"
    path.write_text(family([seconds] * lines))
    speed = of_log(path, Facts(model="m", batch_size=batch, num_gpus=cards, precision="fp32"))
    assert speed.images_per_second == pytest.approx(batch * cards / seconds, rel=1e-9)
    assert speed.document()["FINAL_RESULT"] == pytest.approx(batch * cards / seconds, rel=1e-5)
    assert speed.mode is (Mode.mp if cards > 1 else Mode.sp)


@settings(max_examples=150, deadline=None)
@given(
    content=st.binary(max_size=400)
    | st.text(alphabet='Iter(train)[0123456789/]: time,.enaf{}"\n\r\\', max_size=300).map(
        str.encode
    )
)
def test_no_file_is_anything_but_a_figure_a_failure_or_no_log(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("log") / "any.log"
    path.write_bytes(content)
    try:
        document = of_log(path, KNOWN).document()
    except UserError as error:
        assert "is not a training log" in str(error)
        return
    assert math.isfinite(document["FINAL_RESULT"])
    assert (document["FINAL_RESULT"] == 0) == (document["JOB_FAIL_FLAG"] == 1)


# what is not steps


def test_lines_timing_a_validation_or_checkpoint_are_left_out(log):
    lines = writing.mmengine_iter([0.5, *[0.25] * 9, 3.0, *[0.25] * 10]).splitlines(keepends=True)
    val = (
        "05/01 10:03:00 - mmengine - INFO - Iter(val) [500/500]    aAcc: 90.1  mIoU: 70.2  "
        "data_time: 0.01  time: 0.2\n"
    )
    saved = "05/01 10:03:00 - mmengine - INFO - Saving checkpoint at 500 iterations\n"
    for between in (val, saved, saved + val):
        speed = of_log(log("".join([*lines[:10], between, *lines[10:]])), KNOWN)
        assert speed.images_per_second == pytest.approx(8.0)
        assert "1 left out" in speed.remark


def test_mmcv_json_line_after_a_validation_is_left_out(log):
    lines = writing.mmcv_json([0.25] * 6 + [6.77] + [0.25] * 5).splitlines(keepends=True)
    val = '{"mode": "val", "epoch": 1, "iter": 500, "lr": 0.004, "mIoU": 0.187, "time": 9.9}\n'
    speed = of_log(log("".join([*lines[:6], val, *lines[6:]])), KNOWN)
    assert speed.images_per_second == pytest.approx(8.0)


def test_an_epochs_first_line_is_left_out(log):
    text = writing.mmcv_epoch([0.25] * 8) + writing.mmcv_epoch([2.25, *[0.25] * 7], epoch=2)
    speed = of_log(log(text), KNOWN)
    assert speed.images_per_second == pytest.approx(8.0)
    assert "1 left out" in speed.remark


def test_an_epoch_of_one_line_each_is_better_than_none(log):
    text = "".join(writing.mmcv_epoch([0.5], epoch=epoch) for epoch in range(1, 6))
    assert of_log(log(text), KNOWN, skip=1).images_per_second == pytest.approx(4.0)


def test_tests_after_the_training_are_no_steps(log):
    tested = writing.mmengine_head() + (
        "05/01 11:00:00 - mmengine - INFO - Iter(test) [ 50/500]    eta: 0:01:00  time: 9.0000  data_time: 0.0021  \n"
    )
    text = writing.mmengine_head() + writing.mmengine_iter([0.25] * 10) + tested
    speed = of_log(log(text))
    assert (speed.images_per_second, speed.failed) == (pytest.approx(8.0), False)


# several trainings in a log


@any_family
def test_last_of_two_trainings_in_a_log_counts_with_a_remark(family, log):
    speed = of_log(log(family([1.0] * 8) + family([0.25] * 8)), KNOWN)
    assert speed.images_per_second == pytest.approx(8.0)
    assert speed.remark.endswith("the last of 2 trainings in the log")


def test_training_resumed_after_a_crash_is_good_again(log):
    crash = "Traceback (most recent call last):\n  File 'x.py', line 1, in <module>\nRuntimeError: NCCL error\n"
    first = writing.mmengine_head(batch=2, cards=1) + writing.mmengine_iter([1.0] * 8) + crash
    second = writing.mmengine_head(batch=4, cards=2) + writing.mmengine_iter([0.25] * 8, first=450)
    speed = of_log(log(first + second))
    assert (speed.batch_size, speed.num_gpus, speed.failed) == (4, 2, False)
    assert speed.images_per_second == pytest.approx(32.0)
    assert "the last of 2" in speed.remark


def test_crash_before_the_first_step_counts_if_last(log):
    text = writing.mmcv_head() + writing.mmcv_iter([1.0] * 8) + writing.mmcv_head()
    speed = of_log(log(text))
    assert (speed.failed, speed.remark) == (
        True,
        "no steps of a training in it; the last of 2 trainings in the log",
    )


# failures


@pytest.mark.parametrize(
    ("said", "remark"),
    [
        (
            "Traceback (most recent call last):\n  File 't.py', line 3\nKeyError: 'x'\n",
            "a traceback: KeyError: 'x'",
        ),
        (
            "[rank3]: Traceback (most recent call last):\n[rank3]: ValueError: bad\n",
            "a traceback: [rank3]: ValueError",
        ),
        (
            "Traceback (most recent call last):\n  File 't.py'\n"
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.75 GiB)\n",
            "out of memory: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried",
        ),
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 128.00 MiB\n",
            "out of memory: RuntimeError",
        ),
        ("RuntimeError: HIP out of memory.\n", "out of memory"),
        ("RuntimeError: CUDA error: out of memory\n", "out of memory"),
        ("MemoryError\n", "out of memory: MemoryError"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory\n", "out of memory"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n", "out of memory"),
        ("Killed\n", "killed: Killed"),
        (
            "tools/dist_train.sh: line 9: 12345 Killed                  python tools/train.py\n",
            "killed",
        ),
        ("[>>>>>>> ] 3217/3849, 4.0 task/s, elapsed: 799s, ETA: 157s已杀死\n", "killed"),
        ("  traceback : Signal 9 (SIGKILL) received by PID 12345\n", "killed"),
    ],
)
@any_family
def test_training_with_a_logged_error_at_its_end_is_a_failure(family, said, remark, log):
    speed = of_log(log(family([0.25] * 10) + said), KNOWN)
    assert (speed.images_per_second, speed.failed) == (0, True)
    assert speed.remark.startswith(remark)


def test_a_crash_right_after_the_configuration_is_seen(log):
    head = writing.mmcv_head()
    config_only = head[: head.index("2022-05-01 10:00:02")]
    crash = (
        "Traceback (most recent call last):\n  File 'x.py'\nFileNotFoundError: data/cityscapes\n"
    )
    speed = of_log(log(config_only + crash))
    assert (speed.batch_size, speed.model, speed.failed) == (2, "ocrnet_hr48", True)
    assert speed.remark == "a traceback: FileNotFoundError: data/cityscapes"


def test_exception_ignored_by_python_at_exit_is_not_a_failure(log):
    ignored = (
        "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\n"
        "Traceback (most recent call last):\n  File 'dataloader.py', line 1466\nAssertionError: can only test a child\n"
    )
    assert not of_log(log(writing.mmcv_iter([0.25] * 8) + ignored), KNOWN).failed


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", "NaN"])
@pytest.mark.parametrize("family", [writing.mmengine_iter, writing.mmcv_iter])
def test_a_loss_that_is_no_number_makes_it_a_failure(family, loss, log):
    speed = of_log(log(family([0.25] * 8, loss=loss)), KNOWN)
    assert (speed.failed, speed.remark) == (True, "the loss is not finite, first at iteration 50")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("family", [writing.mmengine_json, writing.mmcv_json])
def test_so_it_does_in_json(family, loss, log):
    assert of_log(log(family([0.25] * 8, loss=loss)), KNOWN).failed


def test_nan_gradient_norm_is_not_a_failure(log):
    text = writing.mmengine_iter([0.25] * 8).replace(
        "loss: 1.2345  decode", "loss: 1.2345  grad_norm: nan  decode"
    )
    assert not of_log(log(text), KNOWN).failed


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"\n\n",
            b"\x00" * 5000,
            b"hello\n",
            b"[1, 2]\n",
            b"{}\n",
            b"{" * 3000,
            b"\x1f\x8b\x08",
        ),
        *(b'{"a": 1}\n', b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", b"model,time\nfastscnn,0.25\n"),
        b"import sys\n\nworld_size = 8\n\n\ndef train():\n    print('time: 0.25')\n",
        b"2024-05-01 10:00:00,0.25\n2024-05-01 10:00:01,0.24\n",
    ],
)
def test_a_file_without_a_sign_of_a_training_is_refused(content, log):
    with pytest.raises(UserError, match=r"train\.log is not a training log of mmengine or mmcv"):
        of_log(log(content), KNOWN)


@pytest.mark.parametrize(
    "content",
    [
        "2024/05/01 10:00:00 - mmengine - INFO - Distributed training is not used.\n",
        "05/01 10:00:00 - mmengine - \x1b[33mWARNING\x1b[0m - The prefix is not set in metric class IoUMetric.\n",
        "2022-05-01 10:00:00,001 - mmseg - INFO - Loaded 2975 images\n",
        "2019-05-01 10:01:00,408 - INFO - Distributed training: False\n",
        "2022-05-01 10:00:00,001 - myproject - INFO - Start running, host: me@node1, work_dir: /work\n",
        "System environment:\n    sys.platform: linux\n",
        "Config:\nmodel = dict(type='EncoderDecoder')\n",
        "Traceback (most recent call last):\n  File 't.py', line 3\nKeyError: 'x'\n",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
        "Killed\n",
        writing.mmengine_head(),
        writing.mmcv_head(),
        writing.mmcv_meta(),
    ],
)
def test_a_log_that_broke_off_before_its_first_step_is_a_failure(content, log):
    speed = of_log(log(content), KNOWN)
    assert (speed.images_per_second, speed.failed) == (0, True)


_NAMED = "2022-05-01 10:00:00,001 - root - INFO - "


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (_NAMED + "epoch 1 step 10 loss 0.5\n", "no line has the time of a step"),
        (
            _NAMED + "Config:\nbatch_size: 8\n" + _NAMED + "start\n",
            "no line has the time of a step",
        ),
        (
            "2019-05-01 10:01:00,408 - INFO - load model from: resnet50.pth\n",
            "no line has the time of a step",
        ),
        (
            _NAMED + "start\nTraceback (most recent call last):\nKeyError: 'x'\n",
            "no line has the time of a step",
        ),
        (
            "[05/01 10:00:00 detectron2]: Environment info:\n---- \n",
            "no line has the time of a step",
        ),
        ("[05/01 10:00:00 d2.utils.events]: eta: 0:01\nKilled\n", "no line has the time of a step"),
        ('{"config": {"lr": 0.1}}\n{"epoch": 1, "loss": 0.5}\n', "no line has the time of a step"),
        ('{"step": 5, "eval_loss": 0.5}\n', "only tests, validations or checkpoints"),
        ("Epoch [1/5], Step [100/600], Loss: 0.5\n", "no line has the time of a step"),
        ("Epoch [1/5], Step [100/600], Loss: nan\n", "no line has the time of a step"),
        ("Epoch [1/5], Step [100/600], Loss: 0.5\nKilled\n", "no line has the time of a step"),
        ("Epoch [1/50], Time: 35.21s, Train Loss G: 0.5\n" * 9, "no line has the time of a step"),
        (
            "Epoch [1/5], Step [1000/6000], Loss: 0.5, Time: 62.1\n" * 9,
            "no line has the time of a step",
        ),
        (
            "Epoch [1/5], Iter [100/600] Loss: 0.5, Time: 10.0\n" * 9,
            "no line has the time of a step",
        ),
        (
            "Iter [100/600]  loss: 0.5, time: 10.0 mins\n" * 9,
            "no line about its steps has a usable time",
        ),
        (
            '{"step": 5, "train_loss": 0.5, "lr": 0.1, "time": 9.5}\n' * 9,
            "no line has the time of a step",
        ),
        ('{"epoch": 1, "iter": 5, "loss": NaN}\n', "no line about its steps has a usable time"),
        (
            "2024/05/01 10:00:01 - mmengine - INFO - Epoch(val) [1][50/500]  eta: 0:01  time: 0.2\n",
            "only tests, validations or checkpoints",
        ),
    ],
)
def test_foreign_or_empty_logs_are_refused_not_failed_jobs(content, refusal, log):
    with pytest.raises(UserError, match=refusal):
        of_log(log(content), KNOWN)


def test_a_logger_of_any_name_with_steps_of_mmcv_is_accepted(log):
    text = _NAMED + "start\n" + writing.mmcv_iter([0.25] * 8).replace("mmseg", "myproject")
    assert of_log(log(text), KNOWN).images_per_second == pytest.approx(8.0)
    assert of_log(log(text + "Killed\n"), KNOWN).failed


def test_lines_of_json_that_can_not_be_read_are_counted(log):
    lines = writing.mmcv_json([0.25] * 10).splitlines(keepends=True)
    whole = of_log(log("".join(lines)), KNOWN)
    assert "can't be read" not in whole.remark
    lines[3], lines[6] = lines[3][:40] + "\n", "\x00\x00\n"
    speed = of_log(log("".join(lines)), KNOWN)
    assert speed.images_per_second == pytest.approx(8.0)
    assert speed.remark.endswith("; 2 lines left out that can't be read as JSON")
    crash = "Traceback (most recent call last):\n  File 't.py', line 3\nKeyError: 'x'\n"
    assert "left out" not in of_log(log("".join(lines[:3]) + crash), KNOWN).remark


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_times_that_are_none_are_no_use(seconds, log):
    with pytest.raises(UserError, match="no line about its steps has a usable time"):
        of_log(log(writing.mmcv_json([seconds] * 8)), KNOWN)
    mixed = of_log(log(writing.mmcv_json([seconds, *[0.25] * 8])), KNOWN)
    assert mixed.images_per_second == pytest.approx(8.0)


@pytest.mark.parametrize("seconds", [0.0, 5e-324])
def test_a_time_too_short_for_a_finite_figure_is_a_failure(seconds, log):
    speed = of_log(log(writing.mmcv_json([seconds] * 8)), KNOWN)
    assert (speed.failed, speed.remark) == (True, "the time of its steps is zero")


def test_one_line_is_used_and_said_to_hold_the_warm_up(log):
    speed = of_log(log(writing.mmcv_iter([0.5])), KNOWN)
    assert speed.images_per_second == pytest.approx(4.0)
    assert "with the warm-up in it" in speed.remark


@pytest.mark.parametrize("make", [lambda path: path, lambda path: path.mkdir() or path])
def test_what_can_not_be_read_is_told(make, tmp_path):
    with pytest.raises(UserError, match=r"does not exist|is not a file"):
        of_log(make(tmp_path / "log"), KNOWN)


# facts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (writing.mmengine_head(), ("fast_scnn", 2, 1, "fp32", "sp")),
        (writing.mmengine_head(cards=8, batch=4), ("fast_scnn", 4, 8, "fp32", "mp")),
        (
            writing.mmengine_head(
                wrapper="AmpOptimWrapper",
                work_dir="segformer_mit-b0_8xb1-160k_cityscapes-1024x1024",
            ),
            ("segformer_mit-b0", 2, 1, "amp_fp16", "sp"),
        ),
        (
            writing.mmengine_head(
                wrapper="mmengine.optim.AmpOptimWrapper", amp="dtype='bfloat16',"
            ),
            ("fast_scnn", 2, 1, "amp_bf16", "sp"),
        ),
        (writing.mmcv_head(), ("ocrnet_hr48", 2, 1, "fp32", "sp")),
        (
            writing.mmcv_head(distributed=True, gpu_ids="range(0, 4)"),
            ("ocrnet_hr48", 2, 4, "fp32", "mp"),
        ),
        (writing.mmcv_head(gpu_ids="[0, 1]"), ("ocrnet_hr48", 2, 2, "fp32", "mp")),
        (
            writing.mmcv_head().replace("optimizer = ", "other = "),
            ("ocrnet_hr48", 2, 1, "fp32", "sp"),
        ),
        (
            writing.mmcv_head().replace(
                "optimizer = ", "fp16 = dict(loss_scale='dynamic')\nother = "
            ),
            ("ocrnet_hr48", 2, 1, "fp16", "sp"),
        ),
        (
            writing.mmcv_head(gpu_ids="[3]", batch_key="imgs_per_gpu"),
            ("ocrnet_hr48", 2, 1, "fp32", "sp"),
        ),
        (
            writing.mmcv_head(
                hook="type='Fp16OptimizerHook', loss_scale=512.",
                work_dir="fast_scnn_lr0.12_8x4_160k_cityscapes",
            ),
            ("fast_scnn", 2, 1, "fp16", "sp"),
        ),
    ],
)
def test_facts_are_those_of_the_head(text, expected, log):
    speed = of_log(log(text + writing.mmengine_iter([0.25] * 8)))
    assert (speed.model, speed.batch_size, speed.num_gpus, speed.precision, speed.mode) == expected


def test_the_experiments_name_counts_more_than_the_folders(log):
    text = writing.mmengine_head() + writing.mmengine_iter([0.25] * 8)
    named = (
        text
        + "05/01 10:09:00 - mmengine - INFO - Exp name: ocrnet_hr48_4xb2-80k_cityscapes-512x1024_20240501_100000\n"
    )
    assert of_log(log(named)).model == "ocrnet_hr48"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (writing.mmengine_iter([0.25] * 8), "--model NAME --batch-size N --gpus N --precision P"),
        (writing.mmengine_head(work_dir="run7"), "--model NAME"),
        (writing.mmengine_head(work_dir="8xb4_"), "--model NAME"),
        (writing.mmengine_head(batch="None"), "--batch-size N"),
        (writing.mmengine_head(batch="True"), "--batch-size N"),
        (writing.mmengine_head(batch="-2"), "--batch-size N"),
        (writing.mmengine_head(batch="(2"), "--batch-size N"),
        (writing.mmengine_head(wrapper="ApexOptimWrapper"), "--precision P"),
        (
            writing.mmcv_head().replace("optimizer_config = dict(", "optimizer_config = dict(("),
            "--precision P",
        ),
        (writing.mmcv_head(distributed=True), "--gpus N"),
    ],
)
def test_facts_missing_from_a_log_are_requested_by_option_name(text, missing, log):
    with pytest.raises(UserError, match=rf"lacks facts about the training; add {missing}\."):
        of_log(log(text + writing.mmengine_iter([0.25] * 8)))


def test_what_is_given_counts_more(log):
    text = writing.mmengine_head(cards=8) + writing.mmengine_iter([0.25] * 8)
    speed = of_log(log(text), Facts(model="fastscnn", batch_size=6, num_gpus=2))
    assert (speed.model, speed.batch_size, speed.num_gpus, speed.precision) == (
        "fastscnn",
        6,
        2,
        "fp32",
    )
    assert speed.images_per_second == pytest.approx(48.0)


def test_one_process_may_be_called_mp_but_several_cards_not_sp(log):
    path = log(writing.mmengine_iter([0.25] * 8))
    assert of_log(path, KNOWN, mode=Mode.mp).mode is Mode.mp
    assert (
        of_log(path, Facts(model="m", batch_size=2, precision="fp32"), mode=Mode.sp).num_gpus == 1
    )
    with pytest.raises(UserError, match="run mode sp is for one GPU, the training used 4"):
        of_log(path, Facts(model="m", batch_size=2, num_gpus=4, precision="fp32"), mode=Mode.sp)


def test_mmcvs_json_has_its_configuration_in_its_first_line(log):
    path = log(
        writing.mmcv_meta(gpu_ids="range(0, 8)") + writing.mmcv_json([0.25] * 8), "a.log.json"
    )
    speed = of_log(path)
    assert (speed.model, speed.batch_size, speed.num_gpus, speed.precision) == (
        "ocrnet_hr48",
        2,
        8,
        "fp32",
    )


def test_json_log_takes_missing_facts_from_neighboring_files(log):
    log(writing.mmcv_head(distributed=False), "old/20220501_100000.log")
    old = log(writing.mmcv_meta() + writing.mmcv_json([0.25] * 8), "old/20220501_100000.log.json")
    assert of_log(old).num_gpus == 1
    log(writing.mmengine_head(cards=4), "new/20240501_100000/20240501_100000.log")
    new = log(writing.mmengine_json([0.25] * 8), "new/20240501_100000/vis_data/scalars.json")
    speed = of_log(new)
    assert (speed.model, speed.num_gpus, speed.images_per_second) == (
        "fast_scnn",
        4,
        pytest.approx(32.0),
    )
    config = (
        "train_dataloader = dict(batch_size=3)\nwork_dir = './work_dirs/fast_scnn_8xb4-160k_x'\n"
    )
    log(config, "new/20240501_100000/vis_data/config.py")
    assert of_log(new).batch_size == 3


def test_a_configuration_is_read_and_never_run(log, tmp_path):
    harm = f"train_dataloader = dict(batch_size=__import__('pathlib').Path('{tmp_path}/harm').touch() or 2)\n"
    path = log(writing.mmengine_json([0.25] * 8), "r/vis_data/scalars.json")
    log(harm, "r/vis_data/config.py")
    with pytest.raises(UserError, match="--batch-size"):
        of_log(path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "statement",
    [
        "data = dict(" + "a=dict(" * 3000,
        "gpu_ids = range('a')",
        "gpu_ids = range(0, 10**9)",
        "gpu_ids = range(0, 99999999999999999999999)",
        "data: dict = 3",
        "data = ",
        "optim_wrapper = dict(type=3, dtype=[1])",
        "optim_wrapper = dict(type='AmpOptimWrapper', dtype=[1])",
    ],
)
def test_a_configuration_that_makes_no_sense_does_no_harm(statement, log):
    path = log(writing.mmengine_json([0.25] * 8), "r/vis_data/scalars.json")
    log(statement, "r/vis_data/config.py")
    assert of_log(path, KNOWN).images_per_second == pytest.approx(8.0)


# logs that the libraries themselves have written, of a toy that trained for a moment


@pytest.mark.parametrize(
    ("name", "given", "images_per_second"),
    [
        # the lines from the third on, without the one after the validation, by hand
        ("mmengine_iter.log", Facts(), 4 * 9 / 0.0409),
        ("mmcv_iter.log", Facts(), 2 * 7 / 0.045),
    ],
)
def test_real_text_logs(name, given, images_per_second):
    speed = of_log(DATA / name, given, skip=2)
    assert speed.images_per_second == pytest.approx(images_per_second)
    assert (speed.num_gpus, speed.precision) == (1, "fp32")
    assert speed.model == {"mmengine_iter.log": "fast_scnn", "mmcv_iter.log": "ocrnet_hr48"}[name]
    assert "1 left out" in speed.remark


@pytest.mark.parametrize(
    ("name", "time", "left_out"),
    [
        ("mmengine_epoch_scalars.json", "time", [(2, 42), (3, 74)]),  # the first of an epoch
        ("mmengine_hierarchy_scalars.json", "train/time", [(None, 70)]),  # after the validation
        (
            "mmcv_epoch.log.json",
            "time",
            [(2, 10)],
        ),  # the first of an epoch, which mmcv begins with a sleep of 2 s
    ],
)
def test_real_json_logs(name, time, left_out):
    lines = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    of_steps = [line for line in lines if "iter" in line and line.get("mode") != "val"]
    kept = [line[time] for line in of_steps if (line.get("epoch"), line["iter"]) not in left_out]
    assert len(kept) == len(of_steps) - len(left_out)
    speed = of_log(DATA / name, KNOWN, skip=0)
    assert speed.images_per_second == pytest.approx(2 * len(kept) / sum(kept))
    assert not speed.failed


def test_text_and_json_of_one_training_log_agree():
    text, values = (
        of_log(DATA / "mmcv_epoch.log", KNOWN),
        of_log(DATA / "mmcv_epoch.log.json", KNOWN),
    )
    mean_seconds = 2 / values.images_per_second
    assert text.images_per_second == pytest.approx(
        values.images_per_second, rel=0.5e-3 / mean_seconds
    )
    assert text.remark.split(",")[0] == values.remark.split(",")[0]


def test_json_log_before_mmengine_0_7_4_is_read_by_step(log):
    """The key `iter` came with mmengine 0.7.4; validations have no learning rate."""
    lines = []
    for step, seconds in enumerate([2.0, 0.9, 0.4, *[0.249, 0.251] * 10], start=1):
        training = {
            "lr": 0.01,
            "data_time": 0.01,
            "loss": 1.28,
            "time": seconds,
            "epoch": 1,
            "step": 100 * step,
        }
        lines.append(json.dumps(training))
        if step % 5 == 0:
            lines.append(
                json.dumps({"mIoU": 0.5, "data_time": 0.1, "time": 9.0, "step": 100 * step})
            )
    speed = of_log(log("\n".join(lines) + "\n", "scalars.json"), KNOWN)
    assert not speed.failed
    assert speed.images_per_second == pytest.approx(2 / 0.25, rel=2e-3)


def test_one_line_per_epoch_is_not_left_out_as_an_epochs_start(log):
    times = [0.9, 0.2, 0.2, 0.2, 0.2]
    lines = [f"2022-05-01 10:00:0{n},001 - mmseg - INFO - Epoch [{n}][50/50]\tlr: 1.0e-02, time: {seconds}, loss: 1.0"
             for n, seconds in enumerate(times, start=1)]  # fmt: skip
    speed = of_log(log("\n".join(lines) + "\n"), KNOWN)
    assert speed.images_per_second == pytest.approx(10)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            ["2022-05-01 10:00:01,001 - mmseg - INFO - Iter [50/100]\tlr: 1.0e-02, loss: 1.0"],
            "has a usable time",
        ),
        (
            [
                "2022-05-01 10:00:01,001 - mmseg - INFO - Iter [50/100]\tlr: 1.0e-02, eta: 1 day,",
                "time: 0.2, loss: 1.0",
            ],
            "its lines are wrapped",
        ),
        (
            ["2024/05/01 10:00:01 - mmengine - INFO - Epoch(test) [50/500]  eta: 0:01  time: 0.2"],
            "only tests, validations or checkpoints are logged",
        ),
    ],
)
def test_log_without_a_speed_is_refused_but_not_a_failure(log, lines, told):
    with pytest.raises(UserError, match=told):
        of_log(log("\n".join(lines) + "\n"), KNOWN)


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        (
            "RuntimeError                              Traceback (most recent call last)",
            "a traceback",
        ),
        (
            "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2022-05-01T10:00:00 DUE TO TIME LIMIT ***",
            "cancelled",
        ),
    ],
)
def test_how_notebooks_and_slurm_end_a_training_is_a_failure(log, line, remark):
    speed = of_log(log(writing.mmcv_iter(WARMING) + line + "\n"), KNOWN)
    assert speed.failed
    assert speed.remark.startswith(remark)


def test_a_validation_of_mmcv_1_0_is_a_pause(log):
    """It has neither `(val)` nor a time; the step after it waited for it."""

    def line(number, rest):
        return f"2022-05-01 10:00:01,001 - mmseg - INFO - Iter [{number}/900]\tlr: 1.0e-02, {rest}"

    lines = [
        line(n, f"eta: 1:00:00, time: {9.0 if n == 6 else 0.2}, loss: 1.0") for n in range(1, 21)
    ]
    lines.insert(5, line(5, "mIoU: 0.5, mAcc: 0.6, aAcc: 0.9"))
    speed = of_log(log("\n".join(lines) + "\n"), KNOWN)
    assert speed.images_per_second == pytest.approx(10)
    assert "1 left out" in speed.remark


@pytest.mark.parametrize(
    ("iteration", "values"),
    [
        (
            500,
            {"memory": 4718, "aAcc": 0.91, "mIoU": 0.52, "mAcc": 0.63},
        ),  # more images than steps so far
        (25, {"memory": 4718, "aAcc": 0.91, "mIoU": 0.52, "mAcc": 0.63}),
        (157, {"loss": 1.58, "acc_top1": 41.2}),
    ],
)
def test_a_validation_that_mmcvs_json_calls_training_is_a_pause(log, iteration, values):
    """Its `iter` counts the validation's own batches, and it has no time: no training that begins again."""
    lines = writing.mmcv_json([0.25] * 6 + [3.04] + [0.25] * 5).splitlines(keepends=True)
    val = json.dumps({"mode": "train", "epoch": 1, "iter": iteration, "lr": 5e-05} | values) + "\n"
    speed = of_log(log("".join([*lines[:6], val, *lines[6:], val])), KNOWN)
    assert speed.images_per_second == pytest.approx(8.0)
    assert "1 left out" in speed.remark
    assert "trainings in the log" not in speed.remark
