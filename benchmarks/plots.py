# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Pictures of the tables: for each one, a PNG per device and type."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

from .problems import DIRECTIONS  # noqa: E402
from .providers import PROVIDERS  # noqa: E402

Row = dict[str, str]
COLOURS = dict(zip(PROVIDERS, plt.get_cmap("tab10").colors, strict=True))  # of a provider, in every picture
MARKERS = dict(zip(PROVIDERS, "osDPv^<>xd", strict=True))
GROUP = ("device", "threads", "dtype")


SIZES = ("batch", "tokens", "heads", "width", "chunk")


def draw_all(folder: Path) -> Iterator[Path]:
    """Draw each table of a folder, beside it."""
    for op, draw in DRAWINGS.items():
        path = folder / f"{op}.csv"
        if not path.exists():
            continue
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        key: Callable[[Row], list[str]] = lambda row: [row[name] for name in GROUP]  # noqa: E731
        for values, group in itertools.groupby(sorted(rows, key=key), key):
            picture = folder / f"{op}_{file_name(*values)}.png"
            title = f"{op}: {values[0]}" + (f", {values[1]} thread(s)" if values[1] else "") + f", {values[2]}"
            draw(list(group), title).savefig(picture, dpi=110, bbox_inches="tight")
            plt.close("all")
            yield picture


def file_name(device: str, threads: str, dtype: str) -> str:
    """ "Intel(R) Xeon(R) Processor @ 2.60GHz", "1", "fp32" → "intel-xeon-1-thread-fp32"."""
    device = re.sub(r"\(\w+\)|@.*|\b(CPU|Processor)\b", " ", device)
    parts = (device, f"{threads}-thread" if threads else "", dtype)
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")


def draw_variants(rows: list[Row], title: str):
    """Tokens a second, a group of bars for each variant."""
    return draw_bars(latest(rows, SIZES), title, "variant", "tokens_per_s", "tokens / s", log=True)


def draw_floor(rows: list[Row], title: str):
    """The share of the least time, a group of bars for each variant at each width."""
    rows = latest(rows, ("tokens", "heads", "chunk", "peak_tflops", "bandwidth_tb_per_s"))
    rows = [{**row, "case": f"{row['variant']}\nD {row['width']}"} for row in rows]
    peaks = "{peak_tflops} TFLOP/s, {bandwidth_tb_per_s} TB/s".format_map(rows[-1])
    return draw_bars(rows, f"{title} (floor at {peaks})", "case", "fraction_of_floor", "least time / time")


def draw_bars(rows: list[Row], title: str, case: str, value: str, label: str, log: bool = False):
    directions, providers = present(rows, "direction", DIRECTIONS), present(rows, "provider", tuple(PROVIDERS))
    cases = list(dict.fromkeys(row[case] for row in rows))
    width = max(9.0, 0.16 * len(cases) * len(providers), 0.75 * len(cases))
    figure, axes = plt.subplots(len(directions), 1, figsize=(width, 3.2 * len(directions)), squeeze=False, sharex=True)
    for axis, direction in zip(axes[:, 0], directions, strict=True):
        for i, provider in enumerate(providers):
            here = [row for row in rows if (row["direction"], row["provider"]) == (direction, provider)]
            here = [row for row in here if row[value]]
            places = [cases.index(row[case]) + (i - (len(providers) - 1) / 2) * 0.8 / len(providers) for row in here]
            heights = [float(row[value]) for row in here]
            axis.bar(places, heights, 0.8 / len(providers), color=COLOURS[provider], label=provider)
        axis.set(title=direction, ylabel=label)
        axis.set_xticks(range(len(cases)), cases)
        if log:
            axis.set_yscale("log")
        axis.grid(axis="y", alpha=0.3)
    finish(figure, f"{title}\n{sizes(rows)}")
    return figure


def draw_lines(rows: list[Row], title: str, over: str):
    """Tokens a second over a size; a column for each variant, a row for each direction."""
    rows = latest(rows, ("heads", "chunk", "width" if over == "tokens" else "tokens"))
    directions, variants = present(rows, "direction", DIRECTIONS), list(dict.fromkeys(row["variant"] for row in rows))
    figure, axes = plt.subplots(
        len(directions), len(variants), figsize=(4.4 * len(variants), 3.2 * len(directions)), squeeze=False, sharex=True
    )
    ticks = sorted({int(row[over]) for row in rows})
    for (i, direction), (j, variant) in itertools.product(enumerate(directions), enumerate(variants)):
        axis, cell = axes[i, j], [row for row in rows if (row["direction"], row["variant"]) == (direction, variant)]
        for provider in present(cell, "provider", tuple(PROVIDERS)):
            points = sorted((int(row[over]), float(row["tokens_per_s"])) for row in cell if row["provider"] == provider)
            axis.plot(*zip(*points, strict=True), color=COLOURS[provider], marker=MARKERS[provider], label=provider)
        axis.set(title=f"{variant}, {direction}", ylabel="tokens / s" if j == 0 else "", xscale="log", yscale="log")
        axis.set_xlabel({"tokens": "tokens of a row", "width": "width D"}[over] if i == len(directions) - 1 else "")
        axis.set_xticks(ticks, [short(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    finish(figure, f"{title}\n{sizes(rows)}")
    return figure


def present(rows: list[Row], column: str, order: tuple[str, ...]) -> list[str]:
    """The values of a column that are there, in the given order."""
    there = {row[column] for row in rows}
    return [value for value in order if value in there]


def latest(rows: list[Row], columns: tuple[str, ...]) -> list[Row]:
    """The rows that have in these columns what the last one has, and its type of orthogonalisation if they have any:
    a table may also hold rows of earlier sizes."""
    muon = next((row["muon"] for row in reversed(rows) if row["muon"]), "")
    last = [rows[-1][name] for name in columns]
    return [row for row in rows if [row[name] for name in columns] == last and row["muon"] in ("", muon)]


def sizes(rows: list[Row]) -> str:
    """What all rows have in common."""
    same = {name: {row[name] for row in rows} for name in SIZES}
    return ", ".join(f"{name} {values.pop()}" for name, values in same.items() if len(values) == 1)


def short(number: int) -> str:
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return str(number)


def finish(figure: plt.Figure, title: str) -> None:
    """A title, and one legend for all parts."""
    labelled = {}
    for part in figure.axes:
        handles, labels = part.get_legend_handles_labels()
        labelled.update(zip(labels, handles, strict=True))
    names = [name for name in PROVIDERS if name in labelled]
    figure.legend([labelled[name] for name in names], names, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title)
    figure.tight_layout()


DRAWINGS: dict[str, Callable] = {
    "table2": draw_variants,
    "length": lambda rows, title: draw_lines(rows, title, "tokens"),
    "width": lambda rows, title: draw_lines(rows, title, "width"),
    "floor": draw_floor,
}
