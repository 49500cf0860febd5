# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Speed of decoding with the TTT cache on a CPU.

Greedy generation after a prompt, with the cache over without; and the cost of a step far into a sequence over that of
an early one, each a mean over whole chunks, so that the updates of the fast weights are in it. If the tokens with and
without the cache differ, nothing is printed.

    python benchmarks/bench_decoding.py            # writes benchmarks/results/decoding.csv
"""

import argparse
import statistics
import time

import torch
from common import write_rows

from hf_ttt import LaCTConfig, LaCTForCausalLM, TTTCache


def make_model(variant: str) -> LaCTForCausalLM:
    torch.manual_seed(0)
    config = LaCTConfig.variant(
        variant,
        vocab_size=512,
        hidden_size=512,
        num_hidden_layers=8,
        num_attn_heads=8,
        num_lact_heads=4,
        lact_chunk_size=64,
        window_size=64,
        initializer_range=0.02,
        eos_token_id=None,
    )
    return LaCTForCausalLM(config).eval()


def generate(
    model: LaCTForCausalLM, prompt: torch.Tensor, new_tokens: int, use_cache: bool
) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
    )
    return tokens, time.perf_counter() - start


def step_times(model: LaCTForCausalLM, positions: list[int], steps: int, repeats: int) -> list[float]:
    """Median over repeats of the mean seconds of a step from each position on. The positions take turns."""
    chunk = model.config.lact_chunk_size
    caches = []
    for position in positions:
        prompt = torch.randint(1, 512, (1, position // chunk * chunk))
        caches.append(TTTCache(model.config))
        model(prompt, cache=caches[-1], use_cache=True, logits_to_keep=1)
    times: list[list[float]] = [[] for _ in positions]
    for _ in range(repeats + 1):
        for series, cache in zip(times, caches, strict=True):
            token = torch.randint(1, 512, (1, 1))
            start = time.perf_counter()
            for _ in range(steps):
                model(token, cache=cache, use_cache=True)
            series.append((time.perf_counter() - start) / steps)
    return [statistics.median(series[1:]) for series in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["variant2"], help="rows of the paper's table 2")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--new_tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("--positions", type=int, nargs=2, default=[500, 8000], help="early and late position of a step")
    parser.add_argument(
        "--repeats", type=int, default=9, help="measurements of a step, each of a whole chunk of tokens"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for variant in arguments.variants:
        model = make_model(variant)
        prompt = torch.randint(1, 512, (1, arguments.prompt))
        with torch.no_grad():
            generate(model, prompt, 4, True)
            cached, fast = generate(model, prompt, arguments.new_tokens, True)
            uncached, slow = generate(model, prompt, arguments.new_tokens, False)
            if not torch.equal(cached, uncached):
                raise SystemExit(f"{variant}: the tokens with and without the cache differ; nothing was measured")
            early, late = step_times(model, arguments.positions, model.config.lact_chunk_size, arguments.repeats)
        row = {
            "variant": variant,
            "prompt": arguments.prompt,
            "new tokens": arguments.new_tokens,
            "tokens/s with cache": round(arguments.new_tokens / fast, 1),
            "tokens/s without": round(arguments.new_tokens / slow, 2),
            "speed-up": round(slow / fast, 1),
            f"ms per step at {arguments.positions[0]}": round(1e3 * early, 2),
            f"ms per step at {arguments.positions[1]}": round(1e3 * late, 2),
            "late over early": round(late / early, 3),
        }
        print(", ".join(f"{key} {value}" for key, value in row.items()))
        rows.append(row)
    write_rows("decoding", rows)


if __name__ == "__main__":
    main()
