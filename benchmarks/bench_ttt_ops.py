# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Speed and memory of the TTT op on a CPU.

Forward: the FLOP rate of the parallelizable variants 2 (without Muon) and 6, over the rate of `torch.bmm` on the same
sizes, measured in turns. Forward and backward: time and peak memory of the whole baseline rule over those of autograd
through a plain loop over chunks. Every function is first compared with another evaluation; if one is wrong, nothing is
printed.

    python benchmarks/bench_ttt_ops.py            # writes benchmarks/results/ttt_ops.csv
"""

import argparse

import torch
from common import check_close, interleaved, peak_memory, write_rows
from torch.nn.functional import silu

from hf_ttt import TTTRule, ttt_attention

HEADS = 4
FORWARD_SIZES = ((8192, 384, 2048), (16384, 64, 256))  # tokens, width, chunk
BACKWARD_SIZE = (8192, 384, 2048)
VARIANTS = {
    "variant2 without Muon": TTTRule(update="last", weight_norm="none"),
    "variant6": TTTRule(update="last", weight_norm="none", fast_weight="linear"),
}
LACT_TRIPLES = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def make_inputs(tokens: int, width: int, rates: bool, grad: bool = False) -> dict[str, torch.Tensor | None]:
    """Random inputs of the op: unit queries and keys, rates of some 0.005, momentum of some 0.5."""
    torch.manual_seed(0)
    unit = lambda: torch.nn.functional.normalize(torch.randn(1, tokens, HEADS, width), dim=-1)  # noqa: E731
    inputs = {"q": unit(), "k": unit(), "v": torch.randn(1, tokens, HEADS, width)}
    inputs |= {w: torch.randn(HEADS, width, width) / width**0.5 for w in ("w0", "w1", "w2")}
    if rates:
        inputs |= {rate: torch.rand(1, tokens, HEADS, 1) * 0.01 for rate in ("lr0", "lr1", "lr2")}
        inputs["momentum"] = torch.rand(1, tokens, HEADS, 1)
    return {name: x.requires_grad_(grad) for name, x in inputs.items()}


def bench_forward(repeats: int) -> list[dict[str, object]]:
    rows = []
    for tokens, width, chunk in FORWARD_SIZES:
        chunks = tokens // chunk
        a, b = torch.randn(chunks * HEADS, chunk, width), torch.randn(chunks * HEADS, width, width)
        preallocated = torch.empty(chunks * HEADS, chunk, width)
        bmm_flops = 2 * tokens * HEADS * width**2
        for variant, rule in VARIANTS.items():
            inputs = make_inputs(tokens, width, rates=rule.fast_weight == "swiglu")
            products = 2 if rule.fast_weight == "linear" else 6
            call = lambda implementation, x=inputs, r=rule, c=chunk: ttt_attention(  # noqa: E731
                **x, rule=r, chunk_size=c, implementation=implementation
            )
            with torch.no_grad():
                check_close(f"{variant}, D {width}", call("parallel"), call("recurrent"), 1e-4)
                seconds = interleaved(
                    {
                        "bmm": lambda a=a, b=b: torch.bmm(a, b),
                        "bmm, preallocated": lambda a=a, b=b, out=preallocated: torch.bmm(a, b, out=out),
                        "recurrent": lambda call=call: call("recurrent"),
                        "parallel": lambda call=call: call("parallel"),
                    },
                    repeats,
                )
            rate = {"bmm": bmm_flops / seconds["bmm"], "bmm, preallocated": bmm_flops / seconds["bmm, preallocated"]}
            for implementation in ("recurrent", "parallel"):
                flops = products * bmm_flops / seconds[implementation]
                row = {
                    "benchmark": "forward",
                    "variant": variant,
                    "implementation": implementation,
                    "tokens": tokens,
                    "width": width,
                    "chunk": chunk,
                    "milliseconds": round(1e3 * seconds[implementation], 2),
                    "GFLOP/s": round(flops / 1e9, 1),
                    "over bmm": round(flops / rate["bmm"], 3),
                    "over preallocated bmm": round(flops / rate["bmm, preallocated"], 3),
                }
                print(
                    f"forward {variant:22s} T {tokens} D {width} C {chunk} {implementation:9s} "
                    f"{row['milliseconds']:8.2f} ms {row['GFLOP/s']:6.1f} GFLOP/s = {row['over bmm']:.2f} bmm "
                    f"({row['over preallocated bmm']:.2f} of one with its result preallocated)"
                )
                rows.append(row)
    return rows


def plain_orthogonalise(g: torch.Tensor) -> torch.Tensor:
    x = g / (torch.linalg.matrix_norm(g, keepdim=True) + 1e-7)
    for a, b, c in LACT_TRIPLES:
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x


def plain_loop(q, k, v, w0, w1, w2, lr0, lr1, lr2, momentum, *, muon: bool, chunk_size: int) -> torch.Tensor:
    """The baseline rule as the published eager code writes it, for autograd: a loop that slices chunk after chunk."""
    q, k, v, lr0, lr1, lr2, momentum = (x[0].transpose(0, 1) for x in (q, k, v, lr0, lr1, lr2, momentum))
    norms = [torch.linalg.vector_norm(w, dim=-1, keepdim=True) for w in (w0, w1, w2)]
    buffers, out, length = [0.0, 0.0, 0.0], [], q.shape[1]
    for start in range(0, length, chunk_size):
        chunk = slice(start, start + chunk_size)
        out.append((silu(q[:, chunk] @ w0.mT) * (q[:, chunk] @ w2.mT)) @ w1.mT)
        if start + chunk_size >= length:
            break
        kc, vc = k[:, chunk], v[:, chunk]
        z, u = kc @ w0.mT, kc @ w2.mT
        s = torch.sigmoid(z)
        a, d = z * s, vc @ w1
        steps = [
            (d * u * s * (1 + z * (1 - s))).mT @ (lr0[:, chunk] * kc),
            vc.mT @ (lr1[:, chunk] * a * u),
            (d * a).mT @ (lr2[:, chunk] * kc),
        ]
        m = momentum[:, chunk].mean(1, keepdim=True)
        buffers = [step + m * b for step, b in zip(steps, buffers, strict=True)]
        moved = [w + (plain_orthogonalise(b) if muon else b) for w, b in zip((w0, w1, w2), buffers, strict=True)]
        lengths = [torch.linalg.vector_norm(w, dim=-1, keepdim=True) + 1e-5 for w in moved]
        w0, w1, w2 = (w / total * n for w, total, n in zip(moved, lengths, norms, strict=True))
    return torch.cat(out, 1).transpose(0, 1)[None]


def make_runs(muon: bool):
    """Inputs, and a forward and backward of the op and of the plain loop on them."""
    tokens, width, chunk = BACKWARD_SIZE
    inputs = make_inputs(tokens, width, rates=True, grad=True)
    rule = TTTRule(muon="lact" if muon else None)
    gradient = torch.randn(1, tokens, HEADS, width)

    def op() -> None:
        run(ttt_attention(**inputs, rule=rule, chunk_size=chunk, implementation="recurrent"))

    def loop() -> None:
        run(plain_loop(**inputs, muon=muon, chunk_size=chunk))

    def run(out: torch.Tensor) -> None:
        for x in inputs.values():
            x.grad = None
        out.backward(gradient)

    return inputs, {"op": op, "loop": loop}


def bench_backward(repeats: int) -> list[dict[str, object]]:
    tokens, width, chunk = BACKWARD_SIZE
    rows = []
    for muon in (False, True):
        variant = f"baseline {'with' if muon else 'without'} Muon"
        inputs, runs = make_runs(muon)
        grads, memory = {}, {}
        for name, run in runs.items():
            for x in inputs.values():
                x.grad = None
            memory[name] = peak_memory(run)
            grads[name] = {key: x.grad for key, x in inputs.items()}
        for key in inputs:  # orthogonalisation amplifies float32 rounding by up to 490
            check_close(f"{variant}, gradient of {key}", grads["op"][key], grads["loop"][key], 2e-2 if muon else 1e-3)
        seconds = interleaved(runs, repeats)
        row = {
            "benchmark": "forward and backward",
            "variant": variant,
            "implementation": "recurrent",
            "tokens": tokens,
            "width": width,
            "chunk": chunk,
            "milliseconds": round(1e3 * seconds["op"], 1),
            "time over plain loop": round(seconds["op"] / seconds["loop"], 3),
            "MiB": round(memory["op"] / 2**20, 1),
            "memory over plain loop": round(memory["op"] / memory["loop"], 3),
        }
        print(
            f"forward and backward, {variant}: {row['milliseconds']:.0f} ms = {row['time over plain loop']:.2f} of "
            f"autograd through a plain loop, {row['MiB']:.0f} MiB = {row['memory over plain loop']:.2f} of its memory"
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="forward measurements; a fifth of it with backward")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = bench_forward(arguments.repeats) + bench_backward(max(3, arguments.repeats // 5))
    keys = list(dict.fromkeys(key for row in rows for key in row))
    write_rows("ttt_ops", [{key: row.get(key, "") for key in keys} for row in rows])


if __name__ == "__main__":
    main()
