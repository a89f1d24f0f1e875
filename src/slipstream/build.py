"""From settings to a model that answers: checks what can be checked first, then loads and puts the parts together."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.control.base import Controller
from slipstream.core.errors import InputError, UnsupportedError
from slipstream.drafters import DraftSpec, Materials, build, drawing, ordered, parse
from slipstream.targets.runtime import Choice, choose, load

if TYPE_CHECKING:
    from slipstream.drafters.base import Drafter
    from slipstream.engine.engine import Engine
    from slipstream.models.files import ModelFile
    from slipstream.models.tokenizer import Tokenizer
    from slipstream.targets.base import Target

log = logging.getLogger(__name__)

CONTROLLERS = ("adaptive", "fixed")
KEPT_PREFIXES = 4
"""Finished answers whose cache rows stay for the next prompt that begins alike, such as the next turn of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an LLM is built from; see there."""

    draft: str = "auto"
    draft_model: str | None = None
    max_nodes: int = 8
    shape: str | None = None
    verifier: str = "coupled"
    controller: str = "adaptive"
    max_context: int | None = None
    max_batch: int = 8
    threads: int | None = None
    runtime: str | None = None
    device: str | None = None
    dtype: str | None = None
    recycling_table: str | Path | None = None

    @property
    def tree_shape(self) -> str:
        """chain or tree: a tree where the verifier takes trees and nothing else is said."""
        return self.shape or ("chain" if self.verifier == "block" else "tree")

    @property
    def slots(self) -> int:
        """Sequences the cache holds at once."""
        return self.max_batch + KEPT_PREFIXES


@dataclass(frozen=True, slots=True)
class Built:
    """A model with all that belongs to it."""

    file: ModelFile
    runtime: Choice
    target: Target
    tokenizer: Tokenizer
    engine: Engine
    specs: Sequence[DraftSpec]
    materials: Materials

    @property
    def draft(self) -> str:
        """The drafters as a setting says them."""
        return ",".join(map(str, self.specs)) or "none"

    def head_sizes(self) -> list[str]:
        """What heads among the drafters take, in words."""
        from slipstream.drafters.heads.base import HeadDrafter

        drafters = [guard.drafter for guard in self.engine.drafting.guards]
        return [drafter.takes() for drafter in drafters if isinstance(drafter, HeadDrafter)]

    def loaded(self) -> list[tuple[DraftSpec, Drafter]]:
        """What was asked for, with the drafter it became; what a grammar forces stands before them and is left out."""
        guards = self.engine.drafting.guards
        asked = guards[len(guards) - len(self.specs) :]
        return [(spec, guard.drafter) for spec, guard in zip(self.specs, asked, strict=True)]

    def drafter(self, name: str) -> Drafter:
        """A drafter of this name, loaded once more. Raises InputError when none was loaded before."""
        for spec, drafter in self.loaded():
            if drafter.name == name:
                return build([spec], self.materials)[-1]
        raise InputError(f"drafter {name!r} is not loaded; loaded: {', '.join(self.engine.drafting.names) or 'none'}")

    def beside(self, kinds: Collection[str], governor: Controller, max_batch: int) -> Engine:
        """Another engine over the same target, with the loaded drafters of these kinds; see `LLM.beside`."""
        from slipstream.engine.engine import Engine

        start_measured(governor, self.target, cost_key(self.file, self.runtime))
        chosen = [drafter for spec, drafter in self.loaded() if spec.kind in kinds]
        return Engine(self.target, self.tokenizer, self.engine.verifier, governor, chosen, max_batch=max_batch)


def build_model(model: str | Path, settings: Settings) -> Built:
    """Open, load and connect everything; what cannot work together is refused before any weight is read."""
    from slipstream.engine.engine import Engine
    from slipstream.verify import CLASSICAL, make_verifier

    specs = parse(settings.draft, settings.draft_model)
    governor = check(settings, specs)
    classical = settings.verifier in CLASSICAL
    file = open_named(model)
    draft_files = open_drafts(specs, file, classical)
    runtime = choose(file, settings.runtime, settings.device, settings.dtype)
    specs = with_shipped_head(settings.draft, specs, file, runtime)
    features = feature_layers(specs, file)
    target = load_target(file, settings.max_context, settings.slots, settings.threads, runtime, features)

    def load_draft(name: str) -> Target:
        drafted, _ = draft_files[name]
        context = min(target.max_context, drafted.config.max_context)
        if drafted.path == file.path:
            return target.share(context, settings.slots)
        choice = choose(drafted, settings.runtime, settings.device, settings.dtype)
        return load_target(drafted, context, settings.slots, settings.threads, choice)

    def load_head(argument: str) -> Drafter:
        from slipstream.drafters.heads.load import make_drafter, open_head, parts_for
        from slipstream.drafters.heads.tried import warn_if_useless

        head = open_head(argument, file)
        if head.config.feature_layers != features:
            raise InputError(f"head {argument} reads layers {head.config.feature_layers}, loaded are {features}")
        parts = parts_for(target, file)
        warn_if_useless(argument, head, parts, target, file)
        return make_drafter(head, parts, target.vocab_size, target.max_context)

    tokenizer = file.tokenizer()
    if specs and settings.max_nodes:
        start_measured(governor, target, cost_key(file, runtime))
    foreign = {name: drafted.tokenizer() for name, (drafted, differs) in draft_files.items() if differs}
    materials = Materials(
        target.vocab_size, load_draft, classical, tokenizer, foreign, settings.recycling_table, load_head
    )
    engine = Engine(
        target,
        tokenizer,
        make_verifier(settings.verifier, count_near_ties=not target.row_invariant),
        governor,
        build(specs, materials),
        max_batch=settings.max_batch,
        keep_prefixes=KEPT_PREFIXES,
    )
    return Built(file, runtime, target, tokenizer, engine, specs, materials)


def check(settings: Settings, specs: Sequence[DraftSpec]) -> Controller:
    """Refuse what is wrong in the settings alone; returns the controller they ask for."""
    check_drafts(settings.draft, specs, settings.draft_model, settings.recycling_table)
    governor = make_controller(settings.controller, settings.max_nodes, settings.tree_shape)
    check_numbers(max_batch=settings.max_batch, threads=settings.threads, max_context=settings.max_context)
    check_rules(settings.verifier, settings.tree_shape, specs)
    return governor


def make_controller(name: str, max_nodes: int, shape: str) -> Controller:
    """The controller of this name. Raises InputError for an unknown name, shape or number of nodes."""
    from slipstream.control.adaptive import Adaptive
    from slipstream.control.fixed import Fixed

    if name not in CONTROLLERS:
        raise InputError(f"unknown controller {name!r}; choose one of: {', '.join(CONTROLLERS)}")
    return Fixed(max_nodes, shape) if name == "fixed" else Adaptive(max_nodes, shape)


def check_drafts(
    draft: str, specs: Sequence[DraftSpec], draft_model: str | None, recycling_table: str | Path | None
) -> None:
    """Refuse settings of drafters that are not asked for."""
    if draft_model is not None and DraftSpec("model", draft_model) not in specs:
        raise InputError(f"draft_model is {draft_model!r} but draft is {draft!r}; say draft='auto'")
    if recycling_table is not None and DraftSpec("recycling") not in specs:
        raise InputError(f"recycling_table is given but draft is {draft!r}; add recycling to it")


def start_measured(governor: Controller, target: Target, key: Sequence[object]) -> None:
    """Let a controller that judges by costs know those of this target from the beginning."""
    from slipstream.control.adaptive import Adaptive
    from slipstream.control.measure import start_costs

    if isinstance(governor, Adaptive):
        governor.start_from(start_costs(target, key))


def cost_key(file: ModelFile, runtime: Choice) -> tuple[object, ...]:
    """What the cost of a pass depends on, the machine taken for granted."""
    from importlib.metadata import version

    from slipstream.kernels import native

    model = (file.name, str(file.config), file.weight_types, file.weights_bytes)
    return (
        *model,
        runtime.name,
        runtime.device,
        runtime.dtype,
        native.active(),
        native.threads(),
        version("slipstream"),
    )


def check_rules(verifier: str, shape: str, specs: Sequence[DraftSpec]) -> None:
    """Refuse what the verifier cannot do exactly."""
    from slipstream.verify import CLASSICAL, check_combination

    names = [spec.kind for spec in specs]
    check_combination(verifier, shape, names, drawing(specs, verifier in CLASSICAL))


def check_numbers(**settings: int | None) -> None:
    """Raise InputError unless each setting is None or a whole number of 1 or more."""
    for name, value in settings.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} is {value!r}; it must be a whole number, 1 or more")


def open_named(model: str | Path) -> ModelFile:
    """A model by name or path, opened but not loaded; short names that are not here yet are fetched."""
    from slipstream.models.files import open_model
    from slipstream.models.registry import ensure

    return open_model(ensure(model))


def load_target(
    file: ModelFile,
    max_context: int | None,
    slots: int,
    threads: int | None,
    choice: Choice | None = None,
    features: Sequence[int] = (),
) -> Target:
    """An opened model, loaded by the runtime chosen for it (None: chosen here)."""
    return load(file, choice or choose(file), max_context, slots, threads, features)


def with_shipped_head(setting: str, specs: list[DraftSpec], file: ModelFile, runtime: Choice) -> list[DraftSpec]:
    """What "auto" adds for a model that has a head in the package: it drafts where its target runs natively."""
    words = [word.strip() for word in setting.split(",")]
    if "auto" not in words or runtime.name != "native" or any(spec.kind == "head" for spec in specs):
        return specs
    from slipstream.models.heads.shipped import shipped_for

    name = shipped_for(file)
    return specs if name is None else ordered([*specs, DraftSpec("head", name)])


def feature_layers(specs: Sequence[DraftSpec], file: ModelFile) -> tuple[int, ...]:
    """The target's layers that the head among the drafters reads; none without one. Raises ModelError for a misfit."""
    for spec in specs:
        if spec.kind == "head":
            from slipstream.drafters.heads.load import open_head

            return open_head(spec.argument, file).config.feature_layers
    return ()


def open_drafts(specs: Sequence[DraftSpec], target: ModelFile, classical: bool) -> dict[str, tuple[ModelFile, bool]]:
    """The draft models by name, as `open_draft` gives them."""
    names = [spec.argument for spec in specs if spec.kind == "model"]
    return {name: open_draft(name, target, classical) for name in names}


def open_draft(name: str, target: ModelFile, classical: bool = False) -> tuple[ModelFile, bool]:
    """A draft model, opened, and whether its text must be translated because its tokens are not the target's.

    Raises InputError where translation is no option: the classical verifiers need the draft model's own distribution.
    """
    from slipstream.drafters.small_model import check_vocabulary

    file = open_named(name)
    ours, theirs = target.tokenizer(), file.tokenizer()
    if ours.fingerprint() == theirs.fingerprint():
        return file, False
    if classical:
        texts = [[maker.token_text(index) for index in range(maker.vocab_size)] for maker in (ours, theirs)]
        check_vocabulary(texts[0], texts[1], target.name, file.name)
        raise UnsupportedError(f"draft model {file.name} and target {target.name} differ in the bytes of some tokens")
    log.warning("%s and %s have different vocabularies: drafts are translated through text", file.name, target.name)
    return file, True
