# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The command line `hf-ttt`.

A command is a function with `@app.command()` and `@errors_in_one_line()`. The result goes to stdout, everything else to
stderr. Exit codes: 0, 1 for an error in one line, 2 for a wrong call.
"""

import ast
import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from transformers.modeling_utils import PreTrainedModel

app = typer.Typer(name="hf-ttt", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Folder = Annotated[Path, typer.Argument(help="What save_pretrained or a Trainer wrote.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def report(text: str) -> None:
    """Say on stderr what is being done."""
    typer.echo(text, err=True)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Warnings and expected errors as one line on stderr; after an error, exit code 1."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: report(f"Warning: {message}")
        try:
            yield
        except (ValueError, OSError, ImportError) as error:
            report(f"Error: {' '.join(str(error).split())}")
            raise typer.Exit(1) from None


def print_version(wanted: bool) -> None:
    """Print the version and stop, if it is wanted."""
    if wanted:
        import hf_ttt

        typer.echo(f"hf-ttt {hf_ttt.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Test-time-training models for transformers."""


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows of cells as lines of columns that stand below one another."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Arguments out of "key=value", with values as in JSON or Python, and names of JSON files that hold several.

    Raises:
        ValueError: for anything else.
        OSError: for a file that cannot be read.
    """
    arguments: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if equals and key.isidentifier():
            arguments[key] = _parse_value(value)
        elif setting.endswith(".json"):
            fields = json.loads(Path(setting).read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise ValueError(f"--config {setting} must hold an object of fields")
            arguments.update(fields)
        else:
            raise ValueError(f"--config {setting!r} is neither key=value nor the name of a .json file")
    return arguments


def parse_sides(text: str) -> list[int]:
    """Height and width out of "SIDE" or "HEIGHTxWIDTH".

    Raises:
        ValueError: for anything else.
    """
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"--image-size {text!r} is neither a side nor HEIGHTxWIDTH, such as 144x256")
    return [int(sides[0]), int(sides[-1])]


def _parse_value(text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return parse(text)
    return text


@app.command()
@errors_in_one_line()
def convert(
    source: Annotated[
        str, typer.Argument(help="Checkpoint: a .pt, .pth or .safetensors file, or 'hub-id/file'.", show_default=False)
    ],
    output_dir: Annotated[Path, typer.Argument(help="Folder for the model.", show_default=False)],
    architecture: Annotated[
        Literal["vittt", "h_vittt", "lact", "lact_nvs"],
        typer.Option("--architecture", "-a", help="What the checkpoint is.", show_default=False),
    ],
    weights: Annotated[
        Literal["auto", "ema", "raw"],
        typer.Option(help="Averaged or raw weights, where there are both; 'auto' is 'ema' for h_vittt, else 'raw'."),
    ] = "auto",
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="A constructor argument of the published code or a field of the configuration, as key=value, or a "
            ".json file of them. Repeatable. Sizes of all models but lact are read from the weights.",
            show_default=False,
        ),
    ] = None,
    num_labels: Annotated[
        int | None, typer.Option(help="Number of classes; must be that of the weights.", show_default=False)
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(
            help="Side, or HEIGHTxWIDTH, of the images that the processor makes; models take any. If not given, that "
            "of training where the checkpoint has it, else 224, or 256 for lact_nvs.",
            show_default=False,
        ),
    ] = None,
    normalize_scene: Annotated[
        bool,
        typer.Option(
            "--normalize-scene",
            help="Of lact_nvs: the processor moves each scene to its own coordinates, as in the training of the "
            "published checkpoints of scenes (scene_res…), not of objects (obj_res…).",
        ),
    ] = False,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license",
            help="Licence of the weights, such as mit, for the card; if not given, 'other'.",
            show_default=False,
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Read checkpoints with Python objects, which runs code from the file."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model in OUTPUT_DIR.")] = False,
) -> None:
    """Convert a checkpoint of the published code to a folder that `from_pretrained` loads.

    The folder holds weights, configuration, processor, code and a model card. It is written whole or not at all.
    """
    from .conversion import from_official, read_state_dict
    from .conversion.folder import check_free, new_folder

    check_free(output_dir, overwrite)
    arguments = parse_settings(config or [])
    of_processor = architecture == "lact_nvs"  # whose model knows no size of images
    if normalize_scene and not of_processor:
        raise ValueError(f"--normalize-scene is of lact_nvs, which {architecture} is not; leave it out")
    sides = None if image_size is None else parse_sides(image_size)
    of_model = None if of_processor or sides is None else sides[0] if len(set(sides)) == 1 else sides
    for name, value in (("num_labels", num_labels), ("image_size", of_model)):
        if value is not None:
            arguments[name] = value
    report(f"Reading {source}")
    state_dict = read_state_dict(source, architecture, weights=weights, allow_pickle=allow_pickle)
    model = from_official(architecture, state_dict, **arguments)
    report(f"Converted to {type(model).__name__}, {model.num_parameters():,} parameters")
    with new_folder(output_dir, overwrite) as folder:
        save(model, folder, architecture, source, licence, sides, normalize_scene)
    report("Wrote the model to")
    typer.echo(output_dir)


def save(
    model: PreTrainedModel,
    folder: Path,
    architecture: str,
    source: str,
    licence: str | None,
    image_size: list[int] | None = None,
    normalize_scene: bool = False,
) -> None:
    """Write a converted model with its processor and a card.

    Args:
        model: the model.
        folder: where to.
        architecture, source, licence, normalize_scene: as in `convert`.
        image_size: height and width.
    """
    from .hub import model_card, save_card

    if architecture == "lact_nvs":
        from .processing_lact_nvs import LaCTNVSProcessor

        size, patch = image_size or [256, 256], model.config.patch_size
        for side in size:
            if side < 1 or side % patch:
                raise ValueError(f"image_size={side} must be a multiple of patch_size={patch}")
        LaCTNVSProcessor(size=size, normalize_scene=normalize_scene).save_pretrained(folder)
    elif model.main_input_name == "pixel_values":
        from .image_processing_vittt import ViTTTImageProcessor

        size = model.config.image_size
        height, width = size if isinstance(size, list) else (size, size)
        ViTTTImageProcessor(crop_size={"height": height, "width": width}).save_pretrained(folder)
    model.save_pretrained(folder)
    name = source if not Path(source).exists() else Path(source).name
    save_card(model_card(model, license=licence, converted_from=name), folder / "README.md")


@app.command()
@errors_in_one_line()
def env(as_json: AsJson = False) -> None:
    """Show versions, devices, and which evaluation "auto" takes for each model and rule, and why."""
    from .environment import environment

    found = environment()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    versions = {"hf-ttt": found["hf-ttt"], "python": found["python"], "platform": found["platform"]}
    versions |= {name: version or "not installed" for name, version in found["packages"].items()}
    typer.echo(table(list(versions.items())))
    typer.echo("\n" + table([("device", device) for device in found["devices"]] + [("kernels", found["triton"])]))
    reasons = list(dict.fromkeys(row["why"] for row in found["evaluations"]))
    rows = [[*list(row.values())[:-1], f"[{reasons.index(row['why']) + 1}]"] for row in found["evaluations"]]
    typer.echo("\n" + table([("model", "rule", "evaluation", "backend", "why"), *rows]) + "\n")
    for number, reason in enumerate(reasons, start=1):
        typer.echo(f"[{number}] {reason}")


@app.command()
@errors_in_one_line()
def card(
    folder: Folder,
    output: Annotated[
        Path | None, typer.Option(help="The file to write, README.md in FOLDER if not given.", show_default=False)
    ] = None,
    repo_id: Annotated[
        str | None, typer.Option(help="Where the model will be: 'owner/name'.", show_default=False)
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", help="Licence of the weights, such as mit.", show_default=False)
    ] = None,
    language: Annotated[str | None, typer.Option(help="Of the texts, such as en.", show_default=False)] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the model that this one was trained from.", show_default=False)
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Hub id of a data set. Repeatable.", show_default=False)
    ] = None,
    dataset_name: Annotated[str | None, typer.Option(help="How the card names the data.", show_default=False)] = None,
    revision: Annotated[
        str | None, typer.Option(help="A tag that the card tells users to pin.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a card that was edited by hand.")] = False,
) -> None:
    """Write the model card of a folder, from its configuration, training state and measured metrics."""
    from .hub import model_card, save_card

    path = folder / "README.md" if output is None else output
    made = model_card(
        folder,
        repo_id=repo_id,
        revision=revision,
        license=licence,
        language=language,
        base_model=base_model,
        datasets=dataset or [],
        dataset_name=dataset_name,
    )
    save_card(made, path, overwrite)
    report("Wrote the card to")
    typer.echo(path)


@app.command()
@errors_in_one_line()
def push(
    folder: Folder,
    repo_id: Annotated[
        str, typer.Argument(help="'name' or 'owner/name'; made if it is not there.", show_default=False)
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, made if it is not there; main if not given.", show_default=False)
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload model",
) -> None:
    """Push a folder to the Hub in one commit, after checking that it loads anywhere and has a card.

    Needs a token: `hf auth login`, or HF_TOKEN.
    """
    from .hub import push as push_folder

    report(f"Checking {folder}")
    options: dict[str, Any] = {"revision": revision, "create_pr": create_pr, "commit_message": message}
    try:
        info = push_folder(folder, repo_id, private=private or None, **options)
    except OSError:
        report("")  # ends the line of a progress bar
        raise
    report("Pushed to")
    typer.echo(info.pr_url or info.commit_url)


@app.command()
@errors_in_one_line()
def bench(
    folder: Annotated[
        Path | None, typer.Argument(help="A saved model; without one, the op is measured.", show_default=False)
    ] = None,
    variant: Annotated[str, typer.Option(help="Op: row of the paper's Table 2, baseline to variant6.")] = "variant2",
    tokens: Annotated[int, typer.Option(help="Op: tokens.")] = 4096,
    heads: Annotated[int, typer.Option(help="Op: heads.")] = 4,
    width: Annotated[int, typer.Option(help="Op: channels of a head.")] = 64,
    chunk: Annotated[int, typer.Option(help="Op: tokens of a chunk.")] = 256,
    backward: Annotated[bool, typer.Option("--backward", help="Op: with gradients of all inputs.")] = False,
    length: Annotated[int, typer.Option(help="Model: tokens of a prompt, or pixels of the side of an image.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences, images or scenes at once.")] = 1,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the tokens, or the model.")] = (
        "float32"
    ),
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where; a GPU if there is one.")] = "auto",
    seconds: Annotated[float, typer.Option(help="To measure for, each evaluation.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Time the op, or a saved model, in each evaluation that is exact here; a wrong result is an error."""
    import torch

    from .timing import OpSize, time_model, time_op

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    report(f"Measuring on {device}, {dtype}, {torch.get_num_threads()} threads")
    common_options: dict[str, Any] = {"dtype": dtype, "device": device, "seconds": seconds}
    if folder is None:
        rows = time_op(variant, OpSize(batch, tokens, heads, width, chunk), backward=backward, **common_options)
    else:
        rows = time_model(folder, batch=batch, length=length, **common_options)
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
        return
    cells = [(row.what, f"{row.milliseconds:.3g}", f"{row.rate:,.4g}", row.unit, f"{row.error:.1e}") for row in rows]
    typer.echo(table([("what", "ms", "rate", "", "error"), *cells]))


def main() -> None:
    """Run the command line."""
    app(prog_name="hf-ttt")


if __name__ == "__main__":
    main()
