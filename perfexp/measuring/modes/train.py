"""Training: a whole step with data, forward, loss, backward and optimizer, and epoch settings.

The settings are the keys of `mode.train`, described in `plan/key_descriptions.yaml`. Most apply to
trainings in epochs only (`measuring.epochs`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfexp.data import Batches
from perfexp.errors import UserError
from perfexp.measuring.modes import State, Step
from perfexp.measuring.modes.schedules import Rates
from perfexp.models import Schedule, Session, Trainer

#: Settings in the configuration that only SGD has.
_OF_SGD = ("momentum", "nesterov")
#: Epoch settings that need no training state, so that any model can have them.
_OF_ANY_MODEL = ("mode.train.patience", "mode.train.eval_every", "mode.train.log_every")

#: The smallest float above 0 and the largest below 1, for open ends of a range.
_ABOVE_0, _BELOW_1 = math.ulp(0.0), math.nextafter(1.0, 0.0)
#: Smallest and largest values of settings that are not None, and a description.
_POSSIBLE = {
    "warmup_steps": (0, math.inf, "0 or more steps"),
    "warmup_epochs": (0, math.inf, "0 or more epochs"),
    "decay_epochs": (1, math.inf, "1 epoch or more"),
    "decay_factor": (_ABOVE_0, 1, "a number above 0, up to 1"),
    "label_smoothing": (0, _BELOW_1, "a number from 0, below 1"),
    "clip_grad_norm": (_ABOVE_0, sys.float_info.max, "a positive number"),
    "ema": (_ABOVE_0, _BELOW_1, "a decay between 0 and 1, for example 0.999"),
    "eval_every": (1, math.inf, "1 epoch or more, or null"),
    "patience": (1, math.inf, "1 evaluation or more, or null"),
    "target_accuracy": (_ABOVE_0, 1, "a share above 0, up to 1, such as 0.94"),
    "log_every": (1, math.inf, "1 step or more, or null"),
    "save_every": (1, math.inf, "1 epoch or more, or null"),
}


@dataclass(kw_only=True, eq=False)
class Train:
    """Training steps (mode=train).

    Raises:
        UserError: a setting is out of range, or two settings contradict each other.
    """

    optimizer: dict[str, Any]
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    warmup_epochs: int = 0
    decay_epochs: int = 30
    decay_factor: float = 0.1
    label_smoothing: float = 0.0
    clip_grad_norm: float | None = None
    ema: float | None = None
    eval_every: int | None = None
    patience: int | None = None
    target_accuracy: float | None = None
    log_every: int | None = None
    checkpoints: bool = False
    save_every: int | None = None
    resume_from: str | None = None
    batch_size: Any = None

    def __post_init__(self) -> None:
        """Check the settings."""
        self.optimizer = _check_optimizer(self.optimizer)
        self.schedule = Schedule(self.schedule)  # a plan contains its name
        for key, (least, most, allowed) in _POSSIBLE.items():
            if (value := getattr(self, key)) is not None and not least <= value <= most:
                raise UserError(f"mode.train.{key}={value}: set {allowed}.")
        self.eval_every = self.eval_every or (1 if self.patience or self.target_accuracy else None)
        if self.target_accuracy and self.resume_from:
            raise UserError(
                "mode.train.target_accuracy counts the time of a whole training: leave out "
                "mode.train.resume_from."
            )
        if self.save_every and not self.checkpoints:
            raise UserError(
                f"mode.train.save_every={self.save_every} needs mode.train.checkpoints=true."
            )
        if self.warmup_steps and self.warmup_epochs:
            raise UserError(
                "mode.train.warmup_steps and warmup_epochs are two forms of one setting: use one "
                "of them."
            )

    @property
    def of_epochs(self) -> list[str]:
        """Return the settings that are set and only apply to whole epochs, as `key=value`.

        The plan refuses them without epochs=N.
        """
        settings = {
            "schedule": self.schedule if self.schedule is not Schedule.constant else None,
            "warmup_steps": self.warmup_steps,
            "warmup_epochs": self.warmup_epochs,
            "patience": self.patience,
            "target_accuracy": self.target_accuracy,
            "eval_every": self.eval_every,
            "log_every": self.log_every,
            "checkpoints": str(self.checkpoints).lower() if self.checkpoints else None,
            "resume_from": self.resume_from,
        }
        return [f"mode.train.{key}={value}" for key, value in settings.items() if value]

    @property
    def of_trainer(self) -> list[str]:
        """Return the settings that are set and need a training state, as `key=value`.

        The plan chooses by them who updates the weights: the mode's optimizer, or the model's own.
        """
        others = {"clip_grad_norm": self.clip_grad_norm, "ema": self.ema}
        texts = [text for text in self.of_epochs if not text.startswith(_OF_ANY_MODEL)]
        return [*texts, *(f"mode.train.{key}={value}" for key, value in others.items() if value)]

    @property
    def is_scheduled(self) -> bool:
        """Return whether the learning rate changes."""
        return self.schedule is not Schedule.constant or self.warmup_steps + self.warmup_epochs > 0

    def rates(self, epochs: int, per_epoch: int) -> Rates:
        """Return each step's learning rate, for a training with `per_epoch` steps per epoch."""
        return Rates(
            schedule=self.schedule,
            total=epochs * per_epoch,
            per_epoch=per_epoch,
            warmup=self.warmup_steps + self.warmup_epochs * per_epoch,
            decay_epochs=self.decay_epochs,
            decay_factor=self.decay_factor,
        )

    def updating(
        self, session: Session, batch_size: int
    ) -> tuple[Callable[[], None], Trainer | None]:
        """Return the optimizer's part of a step, and the training state; None if there is none.

        Raises:
            UserError: the session does not accept a setting, or a checkpoint does not fit.
        """
        update = session.optimizer({**self.optimizer, **self._extra()})
        trainer = session.trainer(ema=self.ema, batch_size=batch_size, resume_from=self.resume_from)
        if trainer is None and self.of_trainer:
            raise UserError(
                f"{self.of_trainer[0]}: the model trains by its own settings, or has no state to "
                "save; leave it out."
            )
        return update, trainer

    def prepare(self, *, session: Session, batches: Batches, batch_size: int) -> Step:
        """See `Mode`; the phases are data, forward, loss, backward, optimizer, and what is set."""
        state = State(source=batches.next)
        update, trainer = self.updating(session, batch_size)
        loss_of = session.loss
        if self.label_smoothing:
            loss_of = partial(session.loss, label_smoothing=self.label_smoothing)

        def data() -> None:
            state.batch = state.source()

        def forward() -> None:
            assert state.batch is not None
            state.outputs = session.learn(state.batch)

        def loss() -> None:
            assert state.batch is not None
            state.loss = loss_of(state.outputs, state.batch.targets)

        def backward() -> None:
            session.backward(state.loss)

        parts: list[tuple[str, Callable[[], object]]] = [
            ("data", data),
            ("forward", forward),
            ("loss", loss),
            ("backward", backward),
            ("optimizer", update),
        ]
        if trainer is not None and self.is_scheduled:
            parts.append(("schedule", trainer.advance))
        if trainer is not None and self.ema:
            parts.append(("ema", trainer.average))
        further = [part for _, part in parts[5:]]

        def call() -> None:
            data()
            forward()
            loss()
            backward()
            update()
            for part in further:
                part()

        return Step(
            call=call,
            segments=tuple(parts),
            active=session.training,
            batch_size=batch_size,
            state=state,
            trains=True,
            trainer=trainer,
        )

    def _extra(self) -> dict[str, Any]:
        """Return the session's optimizer settings that torch does not have."""
        extra = {"clip_grad_norm": self.clip_grad_norm, "is_scheduled": self.is_scheduled}
        return {key: value for key, value in extra.items() if value}


def _check_optimizer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer settings to pass to torch.

    SGD's settings are dropped for other optimizers.

    Raises:
        UserError: a value is impossible.
    """
    is_sgd = settings.get("name", "sgd") == "sgd"
    settings = {key: value for key, value in settings.items() if is_sgd or key not in _OF_SGD}
    for key, least, most in (
        ("lr", 0.0, math.inf),
        ("momentum", 0.0, 1.0),
        ("weight_decay", 0.0, math.inf),
    ):
        value = settings.get(key, least)
        if not (isinstance(value, int | float) and least <= value < most):
            allowed = f"from 0, below {most:g}" if most == 1.0 else "of 0 or more"
            raise UserError(f"mode.train.optimizer.{key}={value}: set a number {allowed}.")
    if settings.get("nesterov") and not settings.get("momentum"):
        raise UserError(
            "mode.train.optimizer.nesterov=true needs mode.train.optimizer.momentum above 0."
        )
    # torch's default
    if not settings.get("nesterov", True):
        settings.pop("nesterov")
    return settings
