"""The command `info`: what a model or a head is, what it takes, and what passes of a model cost on this machine."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.app import app

if TYPE_CHECKING:
    from slipstream.models.files import ModelFile
    from slipstream.targets.runtime import Choice

ARCHITECTURE = (
    "architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
    "vocab_size",
)  # fmt: skip


@app.command("info")
@o.shared(o.LOADING)
def info(
    model: o.Named = o.DEFAULT_MODEL,
    target: Annotated[str | None, typer.Option(help="Of a head's folder: the model to try it on.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    measure: Annotated[bool, typer.Option(help="Time memory and passes (some seconds).")] = True,
    **options: Any,
) -> None:
    """Show a model's size, its cache, its runtime, and the measured cost of passes; of a head's folder what it is."""
    from slipstream.build import load_target, open_named
    from slipstream.core.errors import InputError
    from slipstream.models.heads.formats import is_head
    from slipstream.targets.runtime import choose

    if model.startswith("head:") or is_head(model):
        head_info(model.removeprefix("head:"), target, json, options)
        return
    if target is not None:
        raise InputError(f"--target is {target!r}, but {model} is no head's folder; leave it out")
    file = open_named(model)
    choice = choose(file, options["runtime"], options["device"], options["dtype"])
    loaded = load_target(file, options["max_context"], 1, options["threads"], choice)
    found = describe(file, loaded, choice)
    if measure:
        from slipstream.control.measure import pass_costs
        from slipstream.kernels.measure import read_bandwidth

        found["read_bandwidth_gb_s"] = round(read_bandwidth(), 1)
        found["pass_cost"] = pass_costs(loaded)
    typer.echo(json_format.dumps(found) if json else as_text(found))


def head_info(name: str, target: str | None, json: bool, options: dict[str, Any]) -> None:
    """Show a head by its folder or the name of a shipped one, and with a target how it does there.

    Raises ModelError where it does not fit.
    """
    from slipstream.build import load_target, open_named
    from slipstream.cli import head_info as shown
    from slipstream.drafters.heads.load import open_head, parts_for
    from slipstream.drafters.heads.tried import try_on
    from slipstream.models.heads.formats import read_head
    from slipstream.models.heads.shipped import place_of
    from slipstream.targets.runtime import choose

    folder, trial = str(place_of(name)), None
    head = read_head(folder)
    if target is not None:
        file = open_named(target)
        fitting = open_head(folder, file)
        choice = choose(file, options["runtime"], options["device"], options["dtype"])
        layers = fitting.config.feature_layers
        loaded = load_target(file, options["max_context"], 1, options["threads"], choice, layers)
        trial = try_on(fitting, parts_for(loaded, file), loaded, file)
    typer.echo(json_format.dumps(shown.describe(head, folder, trial)) if json else shown.as_text(head, folder, trial))


def describe(file: ModelFile, target: Any, choice: Choice) -> dict[str, Any]:
    """Everything that needs no clock."""
    from slipstream.kernels import native
    from slipstream.models.heads.shipped import shipped_for

    if choice.name == "native":
        kernels, threads = native.active(), native.threads()
    else:
        kernels, threads = target.kernels(), target.threads()
    return {
        "model": file.name,
        "path": str(file.path),
        "weight_types": file.weight_types,
        "weights_bytes": target.weights_bytes,
        "file_bytes": file.weights_bytes,
        "kv_bytes_per_token": target.kv_bytes_per_token,
        "max_context": target.max_context,
        **{name: getattr(file.config, name) for name in ARCHITECTURE},
        "chat_template": file.chat_template is not None,
        "licence": file.licence,
        "runtime": choice.name,
        "runtime_reason": choice.reason,
        "kernels": kernels,
        "threads": threads,
        "heads_on": f"the host's CPU, {native.active()} kernels",
        "shipped_head": shipped_for(file),
    }


def as_text(found: dict[str, Any]) -> str:
    """The same for people."""
    layers = f"{found['num_layers']} layers of width {found['hidden_size']}"
    heads = f"{found['num_heads']} heads ({found['num_kv_heads']} for keys and values) of {found['head_dim']}"
    lines = [
        ("model", f"{found['model']}  ({found['path']})"),
        ("licence", found["licence"] or "not stated in the file"),
        (
            "architecture",
            f"{found['architecture']}, {layers}, {heads}",
        ),
        ("vocabulary", f"{found['vocab_size']} tokens; chat template: {'yes' if found['chat_template'] else 'no'}"),
        ("weights", f"{found['weights_bytes'] / 1e6:.1f} MB in memory ({found['weight_types']})"),
        ("cache", f"{1000 * found['kv_bytes_per_token'] / 1e6:.1f} MB per 1000 tokens, context {found['max_context']}"),
        ("runtime", f"{found['runtime']}: {found['runtime_reason']}"),
        ("kernels", f"{found['kernels']}, {found['threads']} threads"),
        ("heads", f"on {found['heads_on']}; {found['shipped_head'] or 'none'} comes with the model"),
    ]
    if "pass_cost" in found:
        lines.append(("read speed", f"{found['read_bandwidth_gb_s']} GB/s"))
    width = max(len(name) for name, _ in lines)
    text = [f"{name.ljust(width)}  {value}" for name, value in lines]
    for cost in found.get("pass_cost", ()):
        ratio = cost["ms"] / found["pass_cost"][0]["ms"]
        text.append(f"{'pass'.ljust(width)}  {cost['rows']:>3} rows {cost['ms']:>9.2f} ms  {ratio:5.2f}x of one row")
    return "\n".join(text)
