# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The command line `hf-ttt`.

A command is a function with `@app.command()` and `@errors_in_one_line()`. What was made goes to stdout, everything else
to stderr.
"""

import ast
import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from transformers.modeling_utils import PreTrainedModel

app = typer.Typer(
    name="hf-ttt", help="Test-time-training models for transformers.", no_args_is_help=True, add_completion=False
)


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


@app.callback()
def common() -> None:
    """Test-time-training models for transformers."""


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
        int | None,
        typer.Option(
            help="Side of the images that the processor makes; models take any. If not given, that of training where "
            "the checkpoint has it, else 224, or 256 for lact_nvs.",
            show_default=False,
        ),
    ] = None,
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
    for name, value in (("num_labels", num_labels), ("image_size", None if of_processor else image_size)):
        if value is not None:
            arguments[name] = value
    report(f"Reading {source}")
    state_dict = read_state_dict(source, architecture, weights=weights, allow_pickle=allow_pickle)
    model = from_official(architecture, state_dict, **arguments)
    report(f"Converted to {type(model).__name__}, {model.num_parameters():,} parameters")
    with new_folder(output_dir, overwrite) as folder:
        save(model, folder, architecture, source, licence, image_size)
    report("Wrote the model to")
    typer.echo(output_dir)


def save(
    model: PreTrainedModel,
    folder: Path,
    architecture: str,
    source: str,
    licence: str | None,
    image_size: int | None = None,
) -> None:
    """Write a converted model with its processor and a card.

    Args:
        model: the model.
        folder: where to.
        architecture, source, licence, image_size: as in `convert`.
    """
    from .conversion.card import card_stub

    if architecture == "lact_nvs":
        from .processing_lact_nvs import LaCTNVSProcessor

        side, patch = 256 if image_size is None else image_size, model.config.patch_size
        if side < 1 or side % patch:
            raise ValueError(f"image_size={side} must be a multiple of patch_size={patch}")
        LaCTNVSProcessor(size=side).save_pretrained(folder)
    elif model.main_input_name == "pixel_values":
        from .image_processing_vittt import ViTTTImageProcessor

        size = model.config.image_size
        height, width = size if isinstance(size, list) else (size, size)
        ViTTTImageProcessor(crop_size={"height": height, "width": width}).save_pretrained(folder)
    model.save_pretrained(folder)
    name = source if not Path(source).exists() else Path(source).name
    card_stub(model, architecture, name, licence).save(folder / "README.md")


def main() -> None:
    """Run the command line."""
    app(prog_name="hf-ttt")


if __name__ == "__main__":
    main()
