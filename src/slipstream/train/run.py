"""One training run: the loop, what it measures, its checkpoints. The same run, killed and resumed, ends the same."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import InputError
from slipstream.drafters.heads.modules import EagleHead, MedusaHead
from slipstream.train.data import Example, in_order
from slipstream.train.evaluate import OwnTokens, TargetRows, count_right, measured
from slipstream.train.loss import Truth, batch_loss
from slipstream.train.objectives import objective
from slipstream.train.schedule import Schedule
from slipstream.train.unroll import Reader, Rows, collate

CHECKPOINT = "checkpoint.pt"
EVALUATED = 4096
"""Answer tokens measured on while training; the whole held-out part only at the end."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to train. steps or minutes must be given: a run ends after the first of them.

    With steps the schedule goes by steps, and minutes only stop it early; with minutes alone it goes by the clock, and
    a resumed run counts on from the seconds it had. positions: answer tokens per batch. save_every, measure_every:
    seconds.
    """

    steps: int | None = None
    minutes: float | None = None
    positions: int = 640
    objective: str = "ce"
    schedule: Schedule = field(default_factory=Schedule)
    weight_decay: float = 0.01
    clip: float = 0.5
    seed: int = 0
    autocast: bool = True
    save_every: float = 120.0
    measure_every: float = 60.0

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise InputError("neither steps nor minutes are given; say how long to train")
        for name in ("steps", "minutes", "positions", "weight_decay", "clip"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "weight_decay" else 1e-9):
                raise InputError(f"{name} is {value}; it must be positive")
        objective(self.objective)


@dataclass(slots=True)
class Point:
    """One measurement: acceptance holds the share of right guesses of each step, given that those before were right."""

    step: int
    seconds: float
    loss: float
    acceptance: list[float]


@dataclass(slots=True)
class State:
    """Where a run stands, beside weights and optimizer."""

    step: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    points: list[Point] = field(default_factory=list)


Report = Callable[["Training", Point], None]


class Training:
    """A module, the examples and the truth it learns from. width: columns of the stored features that it reads."""

    def __init__(
        self,
        module: EagleHead | MedusaHead,
        truth: Truth,
        examples: tuple[Sequence[Example], Sequence[Example]],
        read: Reader,
        width: int,
        options: Options,
    ) -> None:
        self.module, self.truth, self.options, self.width, self.read = module, truth, options, width, read
        self.train, self.held = examples
        self.state = State()
        self.target_rows: TargetRows | None = None
        """The target's LM head by ids; with it, measurements let heads draft the prompt's own tokens too."""
        decayed = [value for value in module.parameters() if value.ndim > 1]
        others = [value for value in module.parameters() if value.ndim == 1]
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.schedule.peak, betas=(0.9, 0.95))
        self._objective = objective(options.objective)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return next(self.module.parameters()).device

    @property
    def done(self) -> float:
        """Share of the run that is done, 0 to 1."""
        if self.options.steps is not None:
            return self.state.step / self.options.steps
        return self.state.seconds / (60 * (self.options.minutes or 1.0))

    @property
    def over(self) -> bool:
        """True when the run has all its steps or all its time."""
        minutes = self.options.minutes
        return self.done >= 1 or (minutes is not None and self.state.seconds >= 60 * minutes)

    @property
    def seconds_left(self) -> float:
        """Estimate from the pace so far."""
        by_steps = self.state.seconds * (1 / self.done - 1) if self.done else 0.0
        if self.options.minutes is None:
            return by_steps
        return min(60 * self.options.minutes - self.state.seconds, by_steps or float("inf"))

    def run(self, folder: Path, report: Report = lambda training, point: None) -> None:
        """Train to the end, or to an interrupt, which saves and is raised again."""
        self.save(folder)  # a folder that cannot be written is found out now
        started = time.perf_counter() - self.state.seconds
        saved = measured = time.perf_counter()
        order = in_order(self.train, self.options.positions, self.options.seed, self.state.step)
        try:
            for _, batch in order:
                if self.over:
                    break
                self._learn([self.train[index] for index in batch])
                now = time.perf_counter()
                self.state.seconds = now - started
                if now - measured > self.options.measure_every:
                    self._measure(EVALUATED, report)
                    measured = time.perf_counter()
                if now - saved > self.options.save_every:
                    self.save(folder)
                    saved = time.perf_counter()
        finally:
            self.save(folder)
        self._measure(None, report)
        self.save(folder)

    def _learn(self, examples: Sequence[Example]) -> None:
        """One step of the optimizer."""
        done, schedule = self.done, self.options.schedule
        for group in self.optimizer.param_groups:
            group["lr"] = schedule.rate(done)
        steps = self.steps_of(done)
        self.module.train()
        with self._arithmetic():
            loss, _ = batch_loss(self.module, self.rows(examples, steps), self.truth, steps, self._objective)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.options.clip)
        self.optimizer.step()
        self.state.step += 1
        self.state.loss = float(loss.detach())

    def steps_of(self, done: float) -> int:
        """Steps to unroll; all heads of Medusa are trained from the beginning."""
        if isinstance(self.module, MedusaHead):
            return self.module.config.medusa_heads
        return self.options.schedule.steps(done)

    def rows(self, examples: Sequence[Example], steps: int) -> Rows:
        """A batch as the head reads it."""
        rows = collate(examples, self.read, steps, self.width, self.device)
        if self.module.config.final_norm:
            rows.features = self.truth.normed(rows.features)
        return rows

    def _arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.autocast)

    def acceptance(self, examples: Sequence[Example], tokens: int | None = None) -> list[float]:
        """Share of right guesses by step over (about the first `tokens` answer tokens of) these examples."""
        steps = self.module.config.drafts or 1
        counts = torch.zeros(steps, 2, dtype=torch.int64)
        self.module.eval()
        for batch in measured(examples, tokens):
            own = OwnTokens(batch, self.truth, self.target_rows) if self.module.config.frozen_head else None
            with torch.no_grad(), self._arithmetic():
                counts += count_right(self.module, self.rows(batch, steps), self.truth, steps, own)
        return [right / max(1, there) for there, right in counts.tolist()]

    def _measure(self, tokens: int | None, report: Report) -> None:
        point = Point(self.state.step, self.state.seconds, self.state.loss, self.acceptance(self.held, tokens))
        self.state.points.append(point)
        report(self, point)

    def save(self, folder: Path) -> None:
        """Write the checkpoint, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": asdict(self.state),
        }
        packed = io.BytesIO()  # torch hides the reason when a file cannot be written
        torch.save(content, packed)
        partial = folder / f"{CHECKPOINT}.partial"
        with partial.open("wb") as file:
            file.write(packed.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / CHECKPOINT)

    def resume(self, folder: Path) -> None:
        """Go on from the checkpoint in a folder. Raises InputError when there is none that fits."""
        try:
            content: Mapping[str, Any] = torch.load(folder / CHECKPOINT, map_location=self.device, weights_only=True)
            self.module.load_state_dict(content["module"])
            self.optimizer.load_state_dict(content["optimizer"])
        except FileNotFoundError:
            raise InputError(f"{folder} holds no {CHECKPOINT} to resume from; leave out --resume") from None
        except (RuntimeError, KeyError, ValueError, EOFError) as error:
            reason = str(error).splitlines()[0][:120]
            raise InputError(f"{folder / CHECKPOINT} does not fit this run ({reason})") from None
        state = dict(content["state"])
        state["points"] = [Point(**point) for point in state["points"]]
        self.state = State(**state)
