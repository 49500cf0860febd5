# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The whole way of a small language model in about four minutes on two cores.

1. Take the text of CPython's documentation that comes with Python (`pydoc_data.topics`), and hold out the last tenth.
2. Train a LaCT model on the bytes of the rest, with `train_lact_text.py`.
3. Load what was saved in a fresh process that cannot import hf_ttt, from the code that was saved beside the weights;
   compare its recurrent and parallel evaluation; generate with and without a cache; write some text.

Leaves the model, `loss_curve.png` and `demo_results.json` in the output directory.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VALIDATION_FRACTION = 0.1
PROMPT_BYTES = 512
RELOADED_FILE = "reloaded.json"
TRAINING = {
    "variant": "variant2",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attn_heads": 4,
    "num_lact_heads": 2,
    "lact_chunk_size": 64,
    "window_size": 64,
    "config_overrides": "use_muon=false,intermediate_size=256,tie_word_embeddings=true,initializer_range=0.02",
    "block_size": 256,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 8,
    "max_steps": 3000,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 300,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "logging_steps": 20,
    "eval_strategy": "steps",
    "eval_steps": 500,
    "save_strategy": "no",
    "seed": 42,
}


def documentation_text() -> str:
    """CPython's documentation of the language: all topics of `pydoc_data`, in the order of their names."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def compressed_bits_per_byte(text: str, before: str = "") -> dict[str, float]:
    """Bits per byte of a text under gzip -9 and xz -9e: alone, or what it adds to the compressed text before it."""
    compressors = {
        "gzip -9": lambda data: gzip.compress(data, 9, mtime=0),
        "xz -9e": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    added = {}
    for name, compress in compressors.items():
        base = len(compress(before.encode())) if before else 0
        added[name] = 8 * (len(compress((before + text).encode())) - base) / len(text.encode())
    return added


def train(output_dir: Path, settings: dict[str, Any], references: dict[str, float]) -> dict[str, float]:
    """Train on `text.txt` in the output directory: bits per byte of the held-out part before and after, seconds.

    The loss curve shows the `references`, in bits per byte, beside the model.
    """
    import train_lact_text

    options = {
        "train_file": output_dir / "text.txt",
        "validation_fraction": VALIDATION_FRACTION,
        "output_dir": output_dir,
        **settings,
    }
    arguments = ["--do_train", "--do_eval", "--eval_on_start"]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    metrics = train_lact_text.main(arguments)
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    train_lact_text.plot_history(history, output_dir / "loss_curve.png", references)
    before = next(log["eval_bits_per_byte"] for log in history if "eval_bits_per_byte" in log)
    return {"before": before, "after": metrics["eval_bits_per_byte"], "seconds": metrics["train_runtime"]}


def load_without_package(model_dir: Path):
    """Model and tokenizer from a folder, by the code in it; in this process hf_ttt cannot be imported from now on."""
    sys.modules["hf_ttt"] = None  # type: ignore[assignment]  # the import system's way to say: there is no such module
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=True)  # it reads the model's configuration
    model = AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=True).eval()
    return model, tokenizer


def encode(tokenizer, text: str):
    """Token ids [1, T] after an end-of-text token, as in training."""
    import torch

    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return torch.tensor([[tokenizer.eos_token_id, *ids]])


def bits_per_byte(model, tokenizer, text: str, block_size: int) -> float:
    """Bits per byte of a text of single-byte tokens, in rows of `block_size` that overlap by one token."""
    import torch

    ids, nats = encode(tokenizer, text)[0], 0.0
    for start in range(0, len(ids) - 1, block_size - 1):
        row = ids[start : start + block_size]
        with torch.no_grad():
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        nats += torch.nn.functional.cross_entropy(logits.double(), row[1:], reduction="sum").item()
    return nats / math.log(2) / len(text.encode())


def greatest_difference(model, ids) -> dict[str, float]:
    """The greatest difference between the logits of the two evaluations of the TTT layers, and the greatest logit."""
    import torch

    logits = {}
    for implementation in ("recurrent", "parallel"):
        model.set_ttt_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(input_ids=ids, use_cache=False).logits
    model.set_ttt_implementation("auto")
    difference = (logits["recurrent"] - logits["parallel"]).abs().max().item()
    return {"difference": difference, "greatest_logit": logits["recurrent"].abs().max().item()}


def generation_speed(model, ids, new_tokens: int) -> dict[str, Any]:
    """Tokens per second of greedy generation with and without the cache, and whether both give the same tokens."""
    import torch

    outputs, speed = [], {}
    for name, use_cache in (("with_cache", True), ("without_cache", False)):
        options = {"do_sample": False, "use_cache": use_cache, "attention_mask": torch.ones_like(ids)}
        model.generate(ids, max_new_tokens=2, **options)
        start = time.perf_counter()
        outputs.append(model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options))
        speed[name] = new_tokens / (time.perf_counter() - start)
    return {**speed, "same_tokens": torch.equal(*outputs)}


def sample(model, tokenizer, prompt: str, new_tokens: int) -> str:
    """A continuation of the prompt, drawn with a fixed seed."""
    import torch

    torch.manual_seed(0)
    ids = encode(tokenizer, prompt)
    options = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "attention_mask": torch.ones_like(ids)}
    output = model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def use_saved_model(output_dir: Path, new_tokens: int, block_size: int) -> dict[str, Any]:
    """What the fresh process does with the saved model and `held_out.txt`; everything here works without hf_ttt."""
    model, tokenizer = load_without_package(output_dir)
    held_out = (output_dir / "held_out.txt").read_text(encoding="utf-8")
    ids = encode(tokenizer, held_out)
    return {
        "model_class": f"{type(model).__module__}.{type(model).__name__}",
        "bits_per_byte": bits_per_byte(model, tokenizer, held_out, block_size),
        **greatest_difference(model, ids[:, : 8 * block_size]),
        **generation_speed(model, ids[:, :PROMPT_BYTES], new_tokens),
        "sample": sample(model, tokenizer, held_out[:PROMPT_BYTES], new_tokens),
    }


def run_in_fresh_process(output_dir: Path, new_tokens: int, block_size: int) -> dict[str, Any]:
    """Start this script again for `use_saved_model`, and read what it found."""
    options = {"--output_dir": output_dir, "--new_tokens": new_tokens, "--use_saved_model": block_size}
    command = [sys.executable, __file__, *(str(part) for option in options.items() for part in option)]
    subprocess.run(command, check=True)
    return json.loads((output_dir / RELOADED_FILE).read_text())


def report(results: dict[str, Any]) -> str:
    """The results as text."""
    trained, reloaded, (alone, after) = results["trained"], results["reloaded"], results["compressors"]
    rows = {
        "model before training": f"{trained['before']:.3f}",
        f"model after {trained['seconds']:.0f} s": f"{trained['after']:.3f}",
        **{name: f"{alone[name]:.3f}  ({after[name]:.3f} after the first nine tenths)" for name in alone},
    }
    same = "the same tokens" if reloaded["same_tokens"] else "OTHER TOKENS"
    reloaded_rows = {
        "bits per byte": f"{reloaded['bits_per_byte']:.3f}",
        "recurrent − parallel": f"{reloaded['difference']:.1e} at most (logits up to {reloaded['greatest_logit']:.1f})",
        "tokens/s with the cache": f"{reloaded['with_cache']:.0f}",
        "tokens/s without": f"{reloaded['without_cache']:.0f} ({same})",
    }
    lines = [
        "",
        f"Bits per byte of the held-out last tenth, {results['held_out_bytes']:,} bytes",
        *(f"  {name:24}{value}" for name, value in rows.items()),
        "",
        "In a fresh process without hf_ttt, loaded by the code that lies beside the weights",
        *(f"  {name:24}{value}" for name, value in reloaded_rows.items()),
        "",
        f"A sample, after held-out text that ends in {results['prompt_end']!r}",
        *(f"  | {line}" for line in reloaded["sample"].splitlines()),
        "",
        f"{results['seconds']:.0f} s in all. Model, loss_curve.png and demo_results.json: {results['output_dir']}",
    ]
    return "\n".join(lines)


def run(output_dir: Path, new_tokens: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The whole demo; returns what it writes to `demo_results.json`."""
    from train_lact_text import split_text

    start = time.perf_counter()
    output_dir.mkdir(parents=True, exist_ok=True)
    text = documentation_text()
    first, held_out = split_text(text, VALIDATION_FRACTION)
    (output_dir / "text.txt").write_text(text, encoding="utf-8")
    (output_dir / "held_out.txt").write_text(held_out, encoding="utf-8")
    compressors = [compressed_bits_per_byte(held_out), compressed_bits_per_byte(held_out, before=first)]
    results: dict[str, Any] = {
        "output_dir": str(output_dir),
        "held_out_bytes": len(held_out.encode()),
        "prompt_end": held_out[:PROMPT_BYTES][-40:],
        "compressors": compressors,
        "trained": train(output_dir, settings, references=compressors[0]),
        "reloaded": run_in_fresh_process(output_dir, new_tokens, settings["block_size"]),
    }
    results["seconds"] = time.perf_counter() - start
    (output_dir / "demo_results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def main() -> None:
    """Parse the command line and run the demo, or the part of it that wants a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("demo-output"), help="default: %(default)s")
    parser.add_argument("--max_steps", type=int, default=TRAINING["max_steps"], help="default: %(default)s")
    parser.add_argument("--new_tokens", type=int, default=256, help="bytes to generate, default: %(default)s")
    parser.add_argument("--use_saved_model", type=int, metavar="BLOCK_SIZE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.use_saved_model is None:
        settings = {**TRAINING, "max_steps": arguments.max_steps}
        print(report(run(arguments.output_dir, arguments.new_tokens, settings)))
    else:
        results = use_saved_model(arguments.output_dir, arguments.new_tokens, arguments.use_saved_model)
        (arguments.output_dir / RELOADED_FILE).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
