# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What 8 and 4 bits cost a LaCT language model on a CPU: bits per byte, memory of the weights, time.

A small model is trained on CPython's documentation (or --model names a saved one with a byte tokenizer), and the last
tenth of the text is read by it in float32, in bfloat16, and with quantised projections: with the layers kept that
`hf_ttt.quantization` says and, in 8 bits, with all linear layers of the blocks quantised. If a layer that should be
quantised is not, or one that should not is, nothing is printed. Needs torchao.

    python benchmarks/bench_quantization.py            # writes benchmarks/results/quantization.csv
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

import torch
from common import interleaved, write_rows
from torch import nn
from transformers import AutoModelForCausalLM, ByT5Tokenizer, TorchAoConfig

from hf_ttt import LaCTConfig, LaCTForCausalLM
from hf_ttt.quantization import KEPT_LAYERS

ROW = 256  # tokens
BATCH = 8
HEAD = ["lm_head"]
FOUR_BITS = "4 bits, groups of 32"  # of layers with a multiple of 16 outputs, which the small ones do not have


def configurations() -> dict[str, Callable]:
    """torchao's configurations by name."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    return {
        "8 bits": Int8WeightOnlyConfig,
        "8 bits, also activations": Int8DynamicActivationInt8WeightConfig,
        FOUR_BITS: lambda: PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False),
    }


def text_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, ROW] of the documentation to train on, and of its last tenth, as bytes."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = torch.tensor(ByT5Tokenizer(extra_ids=0)(text, add_special_tokens=False)["input_ids"])
    rows = ids[: len(ids) // ROW * ROW].view(-1, ROW)
    cut = len(rows) - len(rows) // 10
    return rows[:cut], rows[cut:]


def train(rows: torch.Tensor, steps: int) -> LaCTForCausalLM:
    """A model of 0.9 million parameters after some steps of AdamW."""
    torch.manual_seed(0)
    config = LaCTConfig.variant(
        "variant2",
        vocab_size=259,
        hidden_size=128,
        num_hidden_layers=3,
        num_attn_heads=4,
        num_lact_heads=4,
        lact_chunk_size=64,
        window_size=64,
        eos_token_id=None,
    )
    model = LaCTForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        loss = model(batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.3f} nats", flush=True)
    return model.eval()


@torch.no_grad()
def bits_per_byte(model: LaCTForCausalLM, rows: torch.Tensor) -> float:
    """Of held-out rows, each read from its start: a token is a byte."""
    losses = [model(batch, labels=batch).loss.item() * len(batch) for batch in rows.split(BATCH)]
    return math.fsum(losses) / len(rows) / math.log(2)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, packed ones with their scales."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def check_layers(model: LaCTForCausalLM, quantised: bool, keep: bool) -> None:
    """Exactly the layers of the blocks are quantised, less those that are kept."""
    small = ("lr_proj", "momentum_proj.0", "ttt_scale_proj")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            expected = quantised and name != "lm_head" and not (keep and name.endswith(small))
            if (type(layer.weight) is not nn.Parameter) != expected:
                raise SystemExit(f"{name} is {'not ' if expected else ''}quantised; nothing was measured")


def load(folder: str, name: str, keep: bool) -> LaCTForCausalLM:
    """The saved model in a type, or with quantised layers."""
    if name in ("float32", "bfloat16"):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=name)
    config = TorchAoConfig(configurations()[name](), modules_to_not_convert=KEPT_LAYERS if keep else HEAD)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", quantization_config=config)


def measure(folder: str, held_out: torch.Tensor, repeats: int) -> list[dict[str, object]]:
    """A row for each number format."""
    names = [("float32", True), ("bfloat16", True)]
    names += [(name, keep) for name in configurations() for keep in (True, False) if keep or name != FOUR_BITS]
    models = {(name, keep): load(folder, name, keep) for name, keep in names}
    for (name, keep), model in models.items():
        check_layers(model, name not in ("float32", "bfloat16"), keep)
    token = held_out[:1, :1]
    with torch.no_grad():
        prefill = interleaved({key: lambda m=m: m(held_out[:2]) for key, m in models.items()}, repeats)
        step = interleaved({key: lambda m=m: m(token) for key, m in models.items()}, 5 * repeats)
    rows, base = [], bits_per_byte(models["float32", True], held_out)
    for key, model in models.items():
        bits = bits_per_byte(model, held_out)
        weights = sum(stored_bytes(p) for p in model.state_dict().values())
        blocks = sum(stored_bytes(p) for name, p in model.state_dict().items() if ".layers." in name)
        row = {
            "weights": key[0],
            "rates, momentum, scale": "quantised" if not key[1] else "as they are",
            "MiB": round(weights / 2**20, 3),
            "MiB of blocks": round(blocks / 2**20, 3),
            "bits per byte": round(bits, 5),
            "more": round(bits - base, 5),
            f"ms for 2 x {ROW} tokens": round(1e3 * prefill[key], 2),
            "ms for 1 token": round(1e3 * step[key], 2),
        }
        print(", ".join(f"{name} {value}" for name, value in row.items()))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a saved LaCT language model of bytes, instead of a new one")
    parser.add_argument("--steps", type=int, default=500, help="training steps of a new model")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of the time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    arguments = parser.parse_args()
    try:
        configurations()
    except ImportError as error:
        raise SystemExit("this needs torchao: pip install hf-ttt[quantization]") from error
    torch.set_num_threads(arguments.threads)
    start = time.perf_counter()
    train_rows, held_out = text_rows()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or folder
        if arguments.model is None:
            train(train_rows, arguments.steps).save_pretrained(folder)
            print(f"trained for {time.perf_counter() - start:.0f} s")
        elif not Path(path).is_dir():
            raise SystemExit(f"--model: there is no folder {path!r}")
        write_rows("quantization", measure(path, held_out, arguments.repeats))


if __name__ == "__main__":
    main()
