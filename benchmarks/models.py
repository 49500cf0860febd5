# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Speed and cache of whole language models of equal size: LaCT beside Llama and Gated DeltaNet of transformers.

    python -m benchmarks models --device cpu --quick        # writes benchmarks/results/models.csv and models.png

Every model has the same vocabulary, depth and width, and the width of its MLP is chosen so that all have the same
number of parameters. Weights are random: speed does not depend on them. Measured at each length, for one sequence:

- prefill: tokens per second of one forward of the prompt that fills the cache;
- decode: tokens per second of greedy steps up to the length, with each LaCT update's time spread over its chunk. A step
  of LaCT takes torch operators whatever the backend, which evaluates whole chunks;
- cache_bytes: the most memory that the cache holds during these steps, weights of the model left out;
- train: tokens per second of forward, backward and AdamW, at one batch and length for each size.

A model whose cached decoding does not give the logits of its full forward is not measured. Models take turns; a time is
a median, after a warm-up: on one thread of a CPU of what the process computes, so that others do not count, else of the
wall. Rows that are there are not measured again without --overwrite, so an interrupted run can go on.
"""

from __future__ import annotations

import argparse
import copy
import csv
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_ttt import LaCTConfig, LaCTForCausalLM
from hf_ttt.modeling_lact import CACHE_KEY
from hf_ttt.ttt_triton import is_available

from .common import RESULTS, environment, merge_rows, peak_bytes, relative_error

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of the logits of cached decoding, relative to those of the full forward. Measured on a CPU, at most 3.0e-6 in float32
# and 1.4e-2 in bfloat16; times 10 and 4. Without the tokens before, the error is over 0.1.
TOLERANCES = {"fp32": 3e-5, "bf16": 6e-2}
KEY = ("model", "backend", "size", "measure", "batch", "length", "dtype", "device", "threads")


class Size(NamedTuple):
    """What the models of one size share."""

    hidden: int
    layers: int
    heads: int  # of softmax attention
    lact_heads: int
    delta_width: int  # of a head of Gated DeltaNet
    vocabulary: int
    chunk: int  # of LaCT, and its attention window
    low_rank: int  # of LaCT's initial w0 and w2; -1 for full matrices
    train: tuple[int, int]  # batch and length of a training step


SIZES = {
    "tiny": Size(64, 2, 2, 2, 16, 128, chunk=32, low_rank=-1, train=(2, 64)),
    "small": Size(256, 4, 4, 2, 64, 512, chunk=128, low_rank=-1, train=(2, 512)),
    "medium": Size(768, 12, 12, 2, 128, 32000, chunk=2048, low_rank=32, train=(2, 4096)),
    "760m": Size(1536, 24, 24, 4, 128, 32000, chunk=2048, low_rank=32, train=(1, 8192)),
}


class Effort(NamedTuple):
    """How much is measured where nothing else is said."""

    size: str
    lengths: tuple[int, ...]
    repeats: int
    steps: int  # of decoding, for each repeat


EFFORTS = {  # by device and --quick
    ("cuda", False): Effort("760m", (1024, 8192, 32768), repeats=10, steps=64),
    ("cuda", True): Effort("medium", (1024, 8192, 32768), repeats=3, steps=16),
    ("cpu", False): Effort("small", (1024, 8192, 32768), repeats=5, steps=32),
    ("cpu", True): Effort("small", (256, 512, 1024), repeats=5, steps=32),
}

# ---------------------------------------------------------------------------------------------------------- the models


def lact(variant: str, size: Size, width: int) -> LaCTForCausalLM:
    """LaCT with the inner loop of a row of the paper's Table 2."""
    config = LaCTConfig.variant(
        variant,
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=width,
        num_hidden_layers=size.layers,
        num_attn_heads=size.heads,
        num_lact_heads=size.lact_heads,
        lact_chunk_size=size.chunk,
        window_size=size.chunk,
        w0_w2_low_rank=size.low_rank,
        initializer_range=0.02,
        eos_token_id=None,
    )
    return LaCTForCausalLM(config)


def llama(size: Size, width: int) -> LlamaForCausalLM:
    """Softmax attention over all tokens before, through `scaled_dot_product_attention`."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=1 << 20,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def gated_deltanet(size: Size, width: int) -> Qwen3NextForCausalLM:
    """Gated DeltaNet in every layer, with dense MLPs; as many key channels as the width, and twice as many values."""
    heads = size.hidden // size.delta_width
    config = Qwen3NextConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=width,
        num_hidden_layers=size.layers,
        layer_types=["linear_attention"] * size.layers,
        num_experts=0,
        linear_num_key_heads=heads,
        linear_num_value_heads=2 * heads,
        linear_key_head_dim=size.delta_width,
        linear_value_head_dim=size.delta_width,
        eos_token_id=None,
    )
    return Qwen3NextForCausalLM(config)


MODELS: dict[str, Callable[[Size, int], PreTrainedModel]] = {
    "lact-baseline": lambda size, width: lact("baseline", size, width),
    "lact-variant2": lambda size, width: lact("variant2", size, width),
    "llama": llama,
    "gated-deltanet": gated_deltanet,
}


def parameters(model: torch.nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def mlp_width(name: str, size: Size) -> int:
    """The width of a model's MLP, a multiple of 16, that gives it as many parameters as Llama with 8/3 of its width."""

    def count(model: str, width: int) -> int:
        with torch.device("meta"):
            return parameters(MODELS[model](size, width))

    target = count("llama", 16 * round(size.hidden / 6))
    one, two = count(name, 16), count(name, 32)
    return 16 * (1 + round((target - one) / (two - one)))


def make_model(name: str, size: Size, dtype: torch.dtype, device: str, backend: str) -> PreTrainedModel:
    """A model with random weights; LaCT's fast weights stay float32."""
    torch.manual_seed(0)
    model = MODELS[name](size, mlp_width(name, size)).to(device)
    fast = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for path, parameter in model.named_parameters():
        if not set(path.split(".")) & set(fast):
            parameter.data = parameter.data.to(dtype)
    if isinstance(model, LaCTForCausalLM):
        model.set_ttt_implementation("auto", backend)
    return model.eval()


def evaluation(model: PreTrainedModel) -> str:
    """What evaluates the layers of a model: the part of it that decides its speed."""
    if isinstance(model, LaCTForCausalLM):
        return f"{model.get_ttt_implementation()} {model.config.ttt_backend}"
    if isinstance(model, LlamaForCausalLM):
        return model.config._attn_implementation
    parts = {"delta rule": "torch_chunk_gated_delta_rule", "convolution": "causal_conv1d_fn"}
    return ", ".join(f"{part} {package(getattr(modeling_qwen3_next, name))}" for part, name in parts.items())


def package(function: Callable) -> str:
    """The package whose code runs in a function that transformers takes from an optional package if it is there."""
    chosen = inspect.getclosurevars(inspect.unwrap(function, stop=_chooses)).nonlocals.get("implementation")
    name = "unknown" if chosen is None else chosen.__module__.split(".")[0]
    return "torch" if name == "transformers" else name


def _chooses(function: Callable) -> bool:
    return "implementation" in inspect.getclosurevars(function).nonlocals


def forward(model: PreTrainedModel, tokens: Tensor, past: int = 0, cache: Any = None, **kwargs: Any) -> Any:
    """The outputs for tokens [B, T] that come after `past` tokens in the cache."""
    if isinstance(model, Qwen3NextForCausalLM):  # without a layer of attention it cannot find these out
        kwargs["position_ids"] = torch.arange(past, past + tokens.shape[1], device=tokens.device)[None]
        kwargs["attention_mask"] = {"full_attention": None, "linear_attention": None}
    if cache is not None:
        kwargs[CACHE_KEY] = cache
    return model(tokens, **kwargs)


def random_tokens(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Random token ids [B, T] on the model's device."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


# --------------------------------------------------------------------------------------------------------- measurement


class Run(NamedTuple):
    """A model and how it is measured."""

    model: PreTrainedModel
    chunk: int
    repeats: int
    steps: int

    @property
    def device(self) -> str:
        return self.model.device.type

    def seconds(self, function: Callable[[], object]) -> float:
        """Time of a call, of what it started on the GPU too; on one thread, without the time of other processes."""
        synchronise = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        clock = time.process_time if self.clock == "process" else time.perf_counter
        synchronise()
        start = clock()
        function()
        synchronise()
        return clock() - start

    @property
    def clock(self) -> str:
        """What counts: "process", the time that this process computes, or "wall"."""
        return "process" if self.device == "cpu" and torch.get_num_threads() == 1 else "wall"


# A measurement yields before each of its timed repeats, so that models take turns, and returns the columns of a row.
Measurement = Generator[None, None, dict[str, object]]


def figures(seconds: list[float], tokens: int) -> dict[str, object]:
    """Tokens per second at the median, and the median and the 20 and 80 % quantiles of the milliseconds."""
    points = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    median, low, high = torch.tensor(seconds, dtype=torch.float64).quantile(points).tolist()
    times = {"ms": median, "ms_20": low, "ms_80": high}
    return {
        "tokens_per_second": round(tokens / median, 2),
        **{name: round(1e3 * value, 4) for name, value in times.items()},
    }


@torch.no_grad()
def decoding_error(run: Run) -> float:
    """Relative error of the logits after cached steps across the end of a chunk, against those of the full forward."""
    tokens = random_tokens(run.model, 1, 2 * run.chunk + 6)
    past = 2 * run.chunk - 6
    cache = forward(run.model, tokens[:, :past], use_cache=True, logits_to_keep=1)[CACHE_KEY]
    for position in range(past, tokens.shape[1]):
        out = forward(run.model, tokens[:, position : position + 1], position, cache, use_cache=True)
    full = forward(run.model, tokens, use_cache=False, logits_to_keep=1)
    return relative_error(out.logits, full.logits)


@torch.no_grad()
def measure_prefill(run: Run, batch: int, length: int) -> Measurement:
    """One forward of a prompt [batch, length]."""
    tokens = random_tokens(run.model, batch, length)

    def prefill() -> None:
        forward(run.model, tokens, use_cache=True, logits_to_keep=1)

    prefill()
    seconds = []
    for _ in range(run.repeats):
        yield
        seconds.append(run.seconds(prefill))
    return {**figures(seconds, batch * length), "peak_bytes": peak_bytes(prefill, run.device)}


@torch.no_grad()
def measure_decode(run: Run, batch: int, length: int) -> Measurement:
    """Steps of one token up to the length, after a prompt. At multiples of the chunk the last step updates LaCT."""
    tokens = random_tokens(run.model, batch, length)
    past = length - run.steps
    cache = forward(run.model, tokens[:, :past], use_cache=True, logits_to_keep=1)[CACHE_KEY]

    def step(cache: Any, position: int) -> None:
        forward(run.model, tokens[:, position : position + 1], position, cache, use_cache=True)

    times = []
    for _ in range(run.repeats + 1):
        yield
        used = copy.deepcopy(cache)
        times.append([run.seconds(lambda i=i, used=used: step(used, i)) for i in range(past, length)])
    del used
    held = []  # not before the first step: until then a window is a view of the whole prompt's keys
    for position in range(past, length - 1):
        step(cache, position)
        held.append(cache_bytes(cache, run.model))
    peak = peak_bytes(lambda: step(cache, length - 1), run.device)
    held.append(cache_bytes(cache, run.model))
    return {**figures(spread(times[1:], run, length), batch), "peak_bytes": peak, "cache_bytes": max(held) // batch}


def spread(times: list[list[float]], run: Run, length: int) -> list[float]:
    """Seconds of a token: of all steps but the last of each repeat, with the last one's extra time over the chunk."""
    steps = [seconds for repeat in times for seconds in repeat[:-1]]
    if not isinstance(run.model, LaCTForCausalLM) or length % run.chunk:
        return steps
    last = statistics.median(repeat[-1] for repeat in times)
    extra = (last - statistics.median(steps)) / run.chunk
    return [seconds + extra for seconds in steps]


def measure_training(run: Run, batch: int, length: int) -> Measurement:
    """Steps of forward, backward and AdamW on [batch, length]; the state of AdamW is there before."""
    model, tokens = run.model.train(), random_tokens(run.model, batch, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=run.device == "cuda")

    def step() -> None:
        loss = forward(model, tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    seconds = []
    for _ in range(run.repeats):
        yield
        seconds.append(run.seconds(step))
    return {**figures(seconds, batch * length), "peak_bytes": peak_bytes(step, run.device)}


MEASURES: dict[str, Callable[[Run, int, int], Measurement]] = {
    "prefill": measure_prefill,
    "decode": measure_decode,
    "train": measure_training,
}


def cache_bytes(cache: Any, model: PreTrainedModel) -> int:
    """Memory of all tensors that a cache reaches, each storage once, without what is the model's own."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in reachable_tensors(cache)}
    return sum(storage.nbytes() for place, storage in storages.items() if place not in own)


def reachable_tensors(thing: Any) -> Iterator[Tensor]:
    """The tensors in an object's attributes, in containers and in objects of the cache's packages."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from reachable_tensors(value)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from reachable_tensors(value)
    elif not isinstance(thing, type) and type(thing).__module__.split(".")[0] in ("transformers", "hf_ttt"):
        yield from reachable_tensors(vars(thing))


# ------------------------------------------------------------------------------------------------------------- the runs


class Case(NamedTuple):
    """A model to measure, and what its rows say of it."""

    title: str
    run: Run
    about: dict[str, object]


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """What names a row."""
    return tuple(str(row[name]) for name in KEY)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV; none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file, restval=""))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wanted(options: argparse.Namespace, here: dict[str, object], path: Path) -> dict[tuple, list[tuple[str, str]]]:
    """What to measure: {(measure, batch, length): [(model, backend), …]}, without the rows that are there."""
    there = set() if options.overwrite else {key(row) for row in rows_of(path)}
    sizes = [(measure, 1, length) for length in options.lengths for measure in ("prefill", "decode")]
    models = [
        (name, backend)
        for name in options.models
        for backend in (options.backends if name.startswith("lact") else [""])
    ]
    missing: dict[tuple, list[tuple[str, str]]] = {}
    for size in (*sizes, ("train", *SIZES[options.size].train)):
        for model in models:
            row = dict(zip(("measure", "batch", "length", "model", "backend"), (*size, *model), strict=True))
            if key({**row, "size": options.size, "dtype": options.dtype, **here}) not in there:
                missing.setdefault(size, []).append(model)
    return missing


def prepare(name: str, backend: str, options: argparse.Namespace) -> Case:
    """Build a model.

    Raises:
        SystemExit: if its cached decoding is wrong.
    """
    size = SIZES[options.size]
    model = make_model(name, size, DTYPES[options.dtype], options.device, backend)
    case = Case(
        f"{name} {backend}".rstrip(),
        Run(model, size.chunk, options.repeats, options.steps),
        {"model": name, "backend": backend, "evaluation": evaluation(model), "parameters": parameters(model)},
    )
    error, tolerance = decoding_error(case.run), TOLERANCES[options.dtype]
    if not error <= tolerance:
        raise SystemExit(f"{case.title} decodes wrongly: relative error {error:.2e} > {tolerance:.0e}; not measured")
    progress(f"{case.title}: {case.about['parameters']:,} parameters, decoding's relative error {error:.1e}")
    return case


def in_turns(measurements: dict[str, Measurement]) -> Iterator[tuple[str, dict[str, object]]]:
    """Advance measurements one repeat each, so that a slow moment of the machine meets all; their names and columns."""
    while measurements:
        for name, measurement in list(measurements.items()):
            try:
                next(measurement)
            except StopIteration as end:
                del measurements[name]
                yield name, end.value
            except torch.OutOfMemoryError:
                del measurements[name]
                progress(f"{name}: does not fit into memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks models`. What is left out depends on the device and --quick."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer repetitions; on a CPU, shorter")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(MODELS),
        default=list(MODELS),
        metavar="MODEL",
        help=f"default: {' '.join(MODELS)}",
    )
    parser.add_argument("--size", choices=list(SIZES), help="of all models")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens, multiples of the chunk or shorter than it")
    parser.add_argument("--backends", nargs="+", choices=("torch", "triton"), help="of LaCT; default: all there are")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--repeats", type=int, help="measurements, after one that does not count")
    parser.add_argument("--steps", type=int, help="steps of decoding in a measurement")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU (default: 1)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of models.csv and models.png")
    parser.add_argument("--overwrite", action="store_true", help="measure again what is there")


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """The options with everything decided.

    Raises:
        SystemExit: for lengths at which an update would fall in the middle of the measured steps.
    """
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    effort = EFFORTS[options.device, options.quick]
    for name, value in effort._asdict().items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    if options.backends is None:
        usable = options.device == "cuda" and is_available(options.device)
        options.backends = ["torch", "triton"] if usable else ["torch"]
    chunk = SIZES[options.size].chunk
    options.steps = min(options.steps, chunk - 1)
    for length in options.lengths:
        if length <= options.steps or (length > chunk and length % chunk):
            raise SystemExit(
                f"--lengths {length}: expected more than --steps {options.steps}, and at most the chunk ({chunk}) or a "
                "multiple of it"
            )
    return options


def main(options: argparse.Namespace) -> None:
    """Measure what is missing and draw the table.

    Raises:
        SystemExit: if a model decodes wrongly; the others are measured.
    """
    options = complete(options)
    torch.set_num_threads(options.threads)
    path = options.output / "models.csv"
    here = {**environment(options.device), "transformers": transformers.__version__}
    common = {"size": options.size, "dtype": options.dtype}
    missing = wanted(options, here, path)
    cases, wrong = {}, []
    for name, backend in dict.fromkeys(model for models in missing.values() for model in models):
        try:
            cases[name, backend] = prepare(name, backend, options)
        except SystemExit as error:
            wrong.append(str(error))
    for (measure, batch, length), models in missing.items():
        chosen = {cases[model].title: cases[model] for model in models if model in cases}
        measurements = {title: MEASURES[measure](case.run, batch, length) for title, case in chosen.items()}
        for title, columns in in_turns(measurements):
            columns["clock"] = chosen[title].run.clock
            row = {**common, "measure": measure, "batch": batch, "length": length, **columns}
            merge_rows(path, [{**chosen[title].about, **row, **here}], KEY)
            progress(f"{measure} {length}: {title}: {columns['tokens_per_second']} tokens/s")
    progress(f"wrote {path}")
    common["device"] = here["device"]
    plot([row for row in rows_of(path) if all(row[name] == common[name] for name in common)], path.with_suffix(".png"))
    if wrong:
        sys.exit("\n".join(wrong))


def plot(rows: list[dict[str, str]], path: Path) -> None:
    """Prefill, decoding and cache against the length, for rows of one size, type and device."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        progress("no picture: matplotlib is not installed")
        return
    panels = {
        "prefill, tokens/s": ("prefill", "tokens_per_second", 1.0),
        "decoding, tokens/s": ("decode", "tokens_per_second", 1.0),
        "cache of a sequence, MiB": ("decode", "cache_bytes", 2.0**20),
    }
    lines = dict.fromkeys(f"{row['model']} {row['backend']}".rstrip() for row in rows)
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for axes, (title, (measure, column, unit)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for line in lines:
            points = sorted(
                (int(row["length"]), float(row[column]) / unit)
                for row in rows
                if row["measure"] == measure and f"{row['model']} {row['backend']}".rstrip() == line
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=line) if points else None
        lengths = sorted({int(row["length"]) for row in rows if row["measure"] == measure})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_ylim(bottom=0)
        axes.set(title=title, xlabel="tokens")
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=max(1, len(lines)))
    about = {name: rows[0][name] for name in ("size", "dtype", "device", "commit")} if rows else {}
    figure.suptitle(", ".join(f"{name} {value}" for name, value in about.items()), fontsize=9)
    figure.savefig(path, dpi=120)
    progress(f"wrote {path}")
