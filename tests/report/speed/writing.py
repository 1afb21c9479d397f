"""Logs as mmengine and mmcv write them, with times that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Sequence

MMENGINE_HEAD = """\
2024/05/01 10:00:00 - mmengine - INFO -\x20
------------------------------------------------------------
System environment:
    sys.platform: linux
    CUDA available: True
    GPU 0,1,2,3,4,5,6,7: Tesla V100-SXM2-32GB

Runtime environment:
    cudnn_benchmark: True
    Distributed launcher: {launcher}
    Distributed training: {distributed}
    GPU number: {cards}
------------------------------------------------------------

2024/05/01 10:00:01 - mmengine - INFO - Config:
crop_size = (
    512,
    1024,
)
log_processor = dict(by_epoch=False)
optim_wrapper = dict({amp}
    optimizer=dict(lr=0.12, momentum=0.9, type='SGD', weight_decay=4e-05),
    type='{wrapper}')
optimizer = dict(lr=0.12, momentum=0.9, type='SGD', weight_decay=4e-05)
train_dataloader = dict(
    batch_size={batch},
    dataset=dict(type='CityscapesDataset'),
    num_workers=4)
val_dataloader = dict(
    batch_size=1, num_workers=4)
work_dir = './work_dirs/{work_dir}'

2024/05/01 10:00:05 - mmengine - WARNING - The prefix is not set in metric class IoUMetric.
"""

MMCV_HEAD = """\
2022-05-01 10:00:00,001 - mmseg - INFO - Environment info:
------------------------------------------------------------
sys.platform: linux
GPU 0: Tesla V100-SXM2-32GB
------------------------------------------------------------

2022-05-01 10:00:00,001 - mmseg - INFO - Distributed training: {distributed}
2022-05-01 10:00:00,301 - mmseg - INFO - Config:
{config}
2022-05-01 10:00:02,405 - mmseg - INFO - Loaded 2975 images
"""

MMCV_CONFIG = """\
norm_cfg = dict(type='SyncBN', requires_grad=True)
data = dict(
    {batch_key}={batch},
    workers_per_gpu=4,
    train=dict(type='CityscapesDataset'),
    val=dict(type='CityscapesDataset'))
optimizer = dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=0.0005)
optimizer_config = dict({hook})
work_dir = './work_dirs/{work_dir}'
gpu_ids = {gpu_ids}
"""


def mmengine_head(
    *,
    batch: object = 2,
    cards: int = 1,
    wrapper: str = "OptimWrapper",
    amp: str = "",
    work_dir: str = "fast_scnn_8xb4-160k_cityscapes-512x1024",
) -> str:
    launcher = "none" if cards == 1 else "pytorch"
    return MMENGINE_HEAD.format(
        batch=batch,
        cards=cards,
        wrapper=wrapper,
        amp=amp,
        work_dir=work_dir,
        launcher=launcher,
        distributed=cards > 1,
    )


def mmcv_config(
    *,
    batch: int = 2,
    batch_key: str = "samples_per_gpu",
    gpu_ids: str = "range(0, 1)",
    hook: str = "",
    work_dir: str = "ocrnet_hr48_512x1024_160k_cityscapes",
) -> str:
    return MMCV_CONFIG.format(
        batch=batch, batch_key=batch_key, gpu_ids=gpu_ids, hook=hook, work_dir=work_dir
    )


def mmcv_head(*, distributed: bool = False, **config: object) -> str:
    return MMCV_HEAD.format(distributed=distributed, config=mmcv_config(**config))


def mmengine_iter(times: Sequence[float], *, first: int = 50, loss: str = "1.2345") -> str:
    return "".join(
        f"05/01 10:01:{number % 60:02d} - mmengine - INFO - Iter(train) [{first + 50 * number:6d}/160000]  "
        f"lr: 1.0000e-02  eta: 1 day, 3:02:01  time: {seconds:.4f}  data_time: 0.0100  memory: 7123  "
        f"loss: {loss}  decode.loss_ce: {loss}  decode.acc_seg: 41.2345\n"
        for number, seconds in enumerate(times)
    )


def mmengine_epoch(times: Sequence[float], *, epoch: int = 1) -> str:
    return "".join(
        f"05/01 10:01:{number % 60:02d} - mmengine - INFO - Epoch(train)  [{epoch}][{50 * number + 50:4d}/1487]  "
        f"lr: 1.0000e-02  eta: 3:02:01  time: {seconds:.4f}  data_time: 0.0100  memory: 7123  loss: 1.2345\n"
        for number, seconds in enumerate(times)
    )


def mmengine_json(times: Sequence[float], *, loss: float = 1.2345) -> str:
    return "".join(
        json.dumps(
            {"lr": 0.01, "data_time": 0.01, "loss": loss, "decode.acc_seg": 41.2, "time": seconds}
            | {"iter": 50 * number + 50, "memory": 7123, "step": 50 * number + 50}
        )
        + "\n"
        for number, seconds in enumerate(times)
    )


def mmcv_iter(times: Sequence[float], *, loss: str = "1.2345") -> str:
    return "".join(
        f"2022-05-01 10:01:{number % 60:02d},408 - mmseg - INFO - Iter [{50 * number + 50}/160000]\t"
        f"lr: 9.998e-03, eta: 1 day, 3:02:01, time: {seconds:.3f}, data_time: 0.008, memory: 22159, "
        f"decode.loss_seg: {loss}, decode.acc_seg: 41.2345, aux.loss_seg: {loss}, loss: {loss}\n"
        for number, seconds in enumerate(times)
    )


def mmcv_epoch(times: Sequence[float], *, epoch: int = 1, mode: str = "") -> str:
    return "".join(
        f"2019-05-01 10:01:{number % 60:02d},408 - INFO - Epoch{mode} [{epoch}][{50 * number + 50}/7330]\t"
        f"lr: 0.02000, eta: 3:02:01, time: {seconds:.3f}, data_time: 0.008, memory: 3559, "
        f"loss_rpn_cls: 0.5532, loss: 1.2345\n"
        for number, seconds in enumerate(times)
    )


def mmcv_json(times: Sequence[float], *, epoch: int = 1, loss: float = 1.2345) -> str:
    return "".join(
        json.dumps(
            {"mode": "train", "epoch": epoch, "iter": 50 * number + 50, "lr": 0.01, "memory": 22159}
            | {"data_time": 0.008, "decode.loss_seg": loss, "loss": loss, "time": seconds}
        )
        + "\n"
        for number, seconds in enumerate(times)
    )


def mmcv_meta(**config: object) -> str:
    facts = {"env_info": "sys.platform: linux", "config": mmcv_config(**config), "seed": 0}
    return json.dumps(facts | {"exp_name": "ocrnet_hr48_512x1024_160k_cityscapes.py"}) + "\n"
