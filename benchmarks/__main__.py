# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The command line of the benchmarks.

python -m benchmarks run --op table2 --backward      # measures; adds to benchmarks/results/table2.csv
python -m benchmarks plot                            # draws every table that is there
python -m benchmarks list                            # what can be measured on this machine
python -m benchmarks models                          # whole models
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

COMMANDS = {
    "run": "measure a table of the op",
    "list": "tables and providers, and what is available here",
    "plot": "draw the tables",
    "models": "measure whole models",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in arguments[:1]:  # the others need not be imported
            add_arguments(name, command)
    return parser.parse_args(arguments)


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    if name in ("run", "models"):
        module = importlib.import_module({"run": "benchmarks.ops", "models": "benchmarks.models"}[name])
        module.add_arguments(parser)
        parser.description = module.__doc__
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.set_defaults(main=module.main)
    elif name == "list":
        parser.set_defaults(main=list_all)
    else:
        results = Path(__file__).parent / "results"
        parser.add_argument("--results", type=Path, default=results, help="folder of the CSVs and of the pictures")
        parser.set_defaults(main=plot)


def list_all(options: argparse.Namespace) -> None:
    import torch

    from .ops import OPS
    from .providers import PROVIDERS

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    print("Tables (--op):")
    for name, op in OPS.items():
        print(f"  {name:20s}{op.text}")
    print("\nProviders (--providers):")
    for name, provider in PROVIDERS.items():
        print(f"  {name:20s}{provider.text}")
        for device in devices:
            print(f"  {'':20s}  {device}: {provider.missing(device) or 'available'}")
    if devices == ["cpu"]:
        print("\nThere is no GPU here.")


def plot(options: argparse.Namespace) -> None:
    from .plots import draw_all

    for path in draw_all(options.results):
        print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.main(options)


if __name__ == "__main__":
    main()
