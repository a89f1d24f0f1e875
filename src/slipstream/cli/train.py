"""`slipstream train`: the target writes answers, a head learns to guess them."""

from __future__ import annotations

import json as json_format
import math
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.app import app
from slipstream.core.errors import InputError, ModelError, install_hint

if TYPE_CHECKING:
    from slipstream.train.build import Design, Material
    from slipstream.train.run import Options, Point, Training

commands = typer.Typer(
    help="Make draft heads: the target writes answers (answers), a head learns from them (eagle3, medusa).",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(commands, name="train")

Target = Annotated[str, typer.Option("--target", help="Model to train for: name, GGUF file or folder.")]
Data = Annotated[list[Path], typer.Option("--data", help="Files of answers; repeatable.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run; the head is in it in the end.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads of torch; all cores when not given.")]
Layers = Annotated[
    str, typer.Option("--feature-layers", help="Layers an EAGLE-3 head reads, as 2,15,27; three by default.")
]

TRAINING: o.Group = {
    "minutes": o.option(float | None, "--minutes", "Time limit."),
    "steps": o.option(int | None, "--steps", "Optimizer steps; the same steps give the same weights."),
    "draft_vocab": o.option(int, "--draft-vocab", "Tokens it can draft: the answers' most frequent.", 8192),
    "objective": o.option(str, "--objective", "ce, kl, tv, accept or greedy; join several by +.", "ce"),
    "learning_rate": o.option(float, "--learning-rate", "At its peak.", 1.5e-3),
    "batch": o.option(int, "--batch", "Answer tokens per step.", 640),
    "seed": o.option(int, "--seed", "Weights and order of the data.", 0),
    "threads": (Threads, None),
    "device": o.option(str, "--device", "cpu, cuda or mps.", "cpu"),
    "storage": o.option(str, "--storage", "How weights are written: F32, F16, BF16 or Q8_0.", "F16"),
    "resume": o.option(bool, "--resume", "Go on from the checkpoint in --out.", False),
    "features": o.option(Path | None, "--features", "Folder of features; beside the data by default."),
    "full_precision": o.option(bool, "--full-precision", "Compute in float32 instead of bfloat16.", False),
}
"""Options of every kind of head."""


@commands.command("prompts")
def prompts(
    out: Annotated[Path, typer.Option("--out", help="File to write, a prompt per line.")],
    count: Annotated[int, typer.Option("--count", help="How many.")] = 8000,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same prompts.")] = 0,
) -> None:
    """Write varied prompts: chat, questions, writing, translation, summaries, code, extraction, reasoning."""
    from slipstream.train.prompts import make_prompts

    rows = [json_format.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in make_prompts(count, seed)]
    try:
        out.write_text("".join(rows), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from None
    typer.echo(f"{len(rows)} prompts in {out}")


@commands.command("answers")
def answers(
    target: Target,
    prompts: Annotated[list[Path], typer.Option("--prompts", help="JSONL with messages, turns, prompt or question.")],
    out: Annotated[Path, typer.Option("--out", help="File of answers; an earlier run is gone on with.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer at most.")] = 200,
    sampled: Annotated[float, typer.Option("--sampled", help="Share of answers drawn, the others greedy.")] = 0.25,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the answers that are drawn.")] = 0.8,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Answers written side by side.")] = 32,
    threads: Threads = None,
    feature_layers: Layers = "",
    medusa: Annotated[bool, typer.Option("--medusa", help="Keep the features Medusa reads, not EAGLE-3's.")] = False,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Time after which none are begun.")] = None,
) -> None:
    """The target answers prompts, and its hidden states are kept on the way. Killed, it goes on where it was."""
    if minutes is not None and not minutes > 0:
        raise InputError(f"--minutes is {minutes}; it must be above 0")
    require_training()
    until = time.perf_counter() + 60 * (minutes or math.inf)
    from slipstream.build import open_named
    from slipstream.kernels import measure, native
    from slipstream.models.fingerprint import weights_fingerprint
    from slipstream.train.answers import Author, Progress, Settings, prompt_key, read_prompts, write_answers
    from slipstream.train.build import Design, head_config, load_target, store_folder, stored_layers
    from slipstream.train.features import FeatureStore

    settings = Settings(max_tokens, temperature, sampled, max_batch)
    asked = sorted(read_prompts(prompts), key=prompt_key)
    file = open_named(target)
    if threads is None:
        measure.settle_threads()
    else:
        native.set_threads(threads)
    kind = "medusa" if medusa else "eagle3"
    config = head_config(file, Design(kind, min(8192, file.config.vocab_size), feature_layers=numbers(feature_layers)))
    layers = stored_layers(config, file.config.num_layers)
    width = len(layers) * file.config.hidden_size
    header = {"weights": weights_fingerprint(file.path), "layers": list(layers)}

    def report(progress: Progress) -> None:
        left = (progress.total - progress.done) * progress.seconds / max(1, progress.done - begun)
        left = min(left, max(0.0, until - time.perf_counter()))
        say(f"{progress.done}/{progress.total} answers, {progress.rate:.0f} tokens/s, {clock(left)} left")

    model = {"model": file.name, "tokenizer": config.fingerprint, "vocab_size": file.config.vocab_size}
    begun = known_before(out)
    say(f"{len(asked)} prompts, answered {max_batch} at a time; stopped by Ctrl-C, the same command goes on")
    try:
        with writing(out), FeatureStore(store_folder(out), header, width) as store:
            author = Author(load_target(file, layers, max_batch + 8), file, max_batch, store)
            done = write_answers(author, asked, out, model, settings, report, lambda: time.perf_counter() >= until)
    except KeyboardInterrupt:
        say(f"stopped; {known_before(out)} answers in {out}")
        raise
    typer.echo(f"{done.done} answers in {out}; {done.tokens} tokens in {clock(done.seconds)}")


@commands.command("eagle3")
@o.shared(TRAINING)
def eagle3(
    context: typer.Context,
    target: Target,
    data: Data,
    out: Out,
    unroll: Annotated[int, typer.Option("--unroll", help="Tokens drafted in a row, in training and after.")] = 3,
    alone: Annotated[float, typer.Option("--alone", help="Share of the run with the first guess only.")] = 0.5,
    feature_layers: Layers = "",
    layers: Annotated[int, typer.Option("--layers", help="Decoder layers of the head.")] = 1,
    intermediate: Annotated[int, typer.Option("--intermediate", min=0, help="Width of its MLP; 0: the target's.")] = 0,
    markov: Annotated[int, typer.Option("--markov", min=0, help="Rank of a bias by the token before; 0: none.")] = 0,
    feature_norm: Annotated[bool, typer.Option(help="Norm each feature before they are joined.")] = True,
    embedding_residual: Annotated[bool, typer.Option(help="Add the embedding to the residual.")] = True,
    **options: Any,
) -> None:
    """Train an EAGLE-3 head on answers of the target."""
    require_training()
    from slipstream.train.build import Design

    design = Design(
        "eagle3",
        options["draft_vocab"],
        unroll,
        layers,
        intermediate,
        numbers(feature_layers),
        feature_norm=feature_norm,
        embedding_residual=embedding_residual,
        markov_rank=markov,
    )
    carry_out(design, context.params)


@commands.command("medusa")
@o.shared(TRAINING)
def medusa(
    context: typer.Context,
    target: Target,
    data: Data,
    out: Out,
    heads: Annotated[int, typer.Option("--heads", help="Tokens drafted: a head for each.")] = 3,
    layers: Annotated[int, typer.Option("--layers", help="Residual blocks of each head.")] = 1,
    **options: Any,
) -> None:
    """Train Medusa heads on answers of the target."""
    require_training()
    from slipstream.train.build import Design

    carry_out(Design("medusa", options["draft_vocab"], heads, medusa_layers=layers), context.params)


@commands.command("measure")
def measure(
    target: Target,
    head: Annotated[Path, typer.Option("--head", help="Folder of a head.")],
    data: Data,
    threads: Threads = None,
) -> None:
    """How often a head guesses right on files of answers: its first guess, and each next one after right ones."""
    require_training()
    from slipstream.build import open_named
    from slipstream.models.heads.formats import read_head
    from slipstream.train.measure import measure_head

    set_threads(threads)
    for name, tokens, shares in measure_head(open_named(target), read_head(head), data, report_features):
        typer.echo(f"{name}: {tokens} tokens, acceptance {' '.join(f'{share:.3f}' for share in shares)}")


def carry_out(design: Design, given: dict[str, Any]) -> None:
    """Gather, train, write."""
    import torch

    from slipstream.build import open_named
    from slipstream.train.build import gather

    set_threads(given["threads"])
    torch.use_deterministic_algorithms(given["steps"] is not None)
    options, folder = options_of(given), given["out"]
    check_device(given["device"])
    check_storage(given["storage"])
    check_folder(folder, given["resume"])
    file = open_named(given["target"])
    with writing(given["features"] or given["data"][0]):
        material = gather(file, given["data"], design, given["features"], report_features)
    with writing(folder), closing(material.shelf):
        train_on(material, facts_of(design, options), options, given)
    typer.echo(f"head in {folder}; use it with --draft head:{folder},suffix,recycling")


def train_on(material: Material, facts: dict[str, Any], options: Options, given: dict[str, Any]) -> None:
    """Run, and write the head of wherever it came to; an interrupt leaves a head too once anything was measured."""
    import torch

    from slipstream.train.build import start
    from slipstream.train.result import draw_curve, write_result

    folder = given["out"]
    keep_facts(folder, {**material.provenance, **facts}, given["resume"])
    training = start(material, options, torch.device(given["device"]))
    if given["resume"]:
        training.resume(folder)
    announce(material, training)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill saves as Ctrl-C does
    try:
        training.run(folder, report_point)
    finally:
        signal.signal(signal.SIGTERM, before)
        if training.state.points:
            write_result(folder, training, material, given["storage"], {**facts, "command": command_line()})
            draw_curve(folder, training.state.points, f"{material.config.kind} head for {material.file.name}")


def options_of(given: dict[str, Any]) -> Options:
    """Options of a run out of the command's."""
    from slipstream.train.run import Options
    from slipstream.train.schedule import Schedule

    return Options(
        steps=given["steps"],
        minutes=given["minutes"],
        positions=given["batch"],
        objective=given["objective"],
        schedule=Schedule(given["learning_rate"], given.get("unroll", 1), given.get("alone", 0.0)),
        seed=given["seed"],
        autocast=not given["full_precision"],
    )


def check_storage(name: str) -> None:
    """Raise InputError for a storage that is not known, before anything is computed."""
    from slipstream.models.heads.head import STORAGE

    if name not in STORAGE:
        raise InputError(f"--storage is {name}; choose one of {', '.join(STORAGE)}")


def set_threads(count: int | None) -> None:
    """Threads of torch. Raises InputError."""
    import torch

    if count is not None and not 1 <= count <= 256:
        raise InputError(f"--threads is {count}; it must be from 1 to 256")
    if count is not None:
        torch.set_num_threads(count)


def check_device(name: str) -> None:
    """Raise InputError for a device that torch does not have here."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError):
        raise InputError(f"--device {name} is not there for torch {torch.__version__}; use cpu") from None


def check_folder(folder: Path, resume: bool) -> None:
    """Raise InputError where a run would be written over, or one to resume is not there."""
    from slipstream.train.run import CHECKPOINT

    there = (folder / CHECKPOINT).exists()
    if there and not resume:
        raise InputError(f"{folder} holds a run already; add --resume to go on, or name another folder")
    if resume and not there:
        raise InputError(f"{folder} holds no run to resume; leave out --resume to begin one")


def facts_of(design: Design, options: Options) -> dict[str, Any]:
    """Design, options and versions, as provenance keeps them."""
    from importlib.metadata import version

    versions = {name: version(name) for name in ("slipstream", "torch", "numpy")}
    return {"design": asdict(design), "options": asdict(options), "versions": versions}


CHANGEABLE = ("minutes", "save_every", "measure_every")
"""Options that a resumed run may have differently."""


def keep_facts(folder: Path, facts: dict[str, Any], resume: bool) -> None:
    """Note what the run is started with. Raises InputError when it is resumed with something else."""
    from slipstream.train.result import note_run, noted_run

    def essence(table: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in table.get("options", {}).items() if name not in CHANGEABLE}
        return {"options": options, **{name: table.get(name) for name in ("weights", "data", "design")}}

    before = json_format.loads(json_format.dumps(essence(noted_run(folder)))) if resume else {}
    now = json_format.loads(json_format.dumps(essence(facts)))
    for name, value in now.items():
        if resume and before.get(name) != value:
            raise InputError(f"the run in {folder} had other {name} ({before.get(name)}); resume it with the same")
    note_run(folder, facts)


def announce(material: Material, training: Training) -> None:
    """What is trained on what."""
    config, rows = material.config, material.examples
    count = sum(value.numel() for value in training.module.parameters())
    tokens = sum(example.answer for example in rows[0])
    say(f"{config.kind} head, {count / 1e6:.1f} M parameters, {config.draft_vocab} tokens to draft")
    say(f"{len(rows[0])} answers ({tokens} tokens), {len(rows[1])} held out; step {training.state.step}")


def report_point(training: Training, point: Point) -> None:
    """One line per measurement."""
    shares = " ".join(f"{share:.3f}" for share in point.acceptance)
    say(
        f"{clock(point.seconds)} step {point.step} loss {point.loss:.3f} held-out acceptance {shares}, "
        f"{clock(training.seconds_left)} left"
    )


def report_features(done: int, total: int) -> None:
    """Now and then, while features are computed."""
    if done % 50 == 0:
        say(f"features of {done}/{total} answers")


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers joined by commas."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--feature-layers is {text!r}; write layers as 2,15,27") from None


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise InputError naming the place where something cannot be written; what was written before is whole."""
    try:
        yield
    except OSError as error:
        reason = f"cannot write {error.filename or place}: {error.strerror}"
        raise InputError(f"{reason}; once it can be written the same command goes on") from None


def say(text: str) -> None:
    """Progress goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Minutes and seconds, and hours before them where there are any."""
    hours, rest = divmod(int(max(0, seconds)), 3600)
    return (f"{hours}:{rest // 60:02d}" if hours else f"{rest // 60}") + f":{rest % 60:02d}"


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["slipstream", *sys.argv[1:]])


def known_before(out: Path) -> int:
    """Answers that a file holds already."""
    return max(0, len(out.read_bytes().splitlines()) - 1) if out.exists() else 0


def require_training() -> None:
    """Raise ModelError naming the extra when torch is missing."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ModelError(f"training needs torch, which is not installed: {install_hint('train')}") from None
