"""What a run leaves behind: a head in slipstream's format, and the curve of its acceptance as a picture."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.core.errors import ModelError
from slipstream.drafters.heads.modules import arrays_of
from slipstream.models.heads.formats import write_head
from slipstream.models.heads.head import make_head
from slipstream.train.build import Material
from slipstream.train.run import Point, Training

CURVE = "curve.png"
RUN = "run.json"
"""Options and provenance of a run, beside its checkpoint."""


def write_result(
    folder: Path, training: Training, material: Material, storage: str, provenance: Mapping[str, Any]
) -> list[str]:
    """Put the head into the run's folder, where it takes the place of an earlier one; returns notices."""
    state = training.state
    facts = {
        **material.provenance,
        **provenance,
        "steps": state.step,
        "seconds": round(state.seconds),
        "held_out_acceptance": [round(share, 4) for share in state.points[-1].acceptance] if state.points else [],
    }
    head = make_head(material.config, arrays_of(training.module), material.ids, storage)
    partial = folder / "head.partial"
    shutil.rmtree(partial, ignore_errors=True)
    notices = write_head(partial, head, provenance=facts)
    for file in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
        os.replace(file, folder / file.name)
    partial.rmdir()
    return notices


def note_run(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write down what a run was started with, so that it can be resumed with the same."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN).write_text(json.dumps(dict(facts), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def noted_run(folder: Path) -> dict[str, Any]:
    """What `note_run` wrote; empty when there is nothing."""
    try:
        found = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ModelError(f"{folder / RUN} is damaged; begin again in a new folder") from None
    return dict(found) if isinstance(found, dict) else {}


def draw_curve(folder: Path, points: Sequence[Point], title: str) -> Path | None:
    """Acceptance by step and loss over time; None where matplotlib is not installed or nothing was measured."""
    if not points:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    minutes = [point.seconds / 60 for point in points]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.add_subplot()
    for step in range(len(points[-1].acceptance)):
        left.plot(minutes, [point.acceptance[step] for point in points], label=f"guess {step + 1}")
    left.set(xlabel="minutes of training", ylabel="held-out acceptance, given the guesses before", title=title)
    left.set_ylim(bottom=0)
    right = left.twinx()
    right.plot(minutes, [point.loss for point in points], color="grey", linewidth=0.6, label="loss")
    right.set(ylabel="loss")
    left.legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(str(folder / CURVE))
    return folder / CURVE
