# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Memory of a training step whose sequence is split over processes, and a context that fits two but not one.

A LaCT language model (variant 2 without Muon) takes a forward and a backward pass on one sequence, on one process and
on several that talk by gloo. Memory is what a process allocates for tensors in the step, at most; parameters are not in
it, their gradients are. Loss and gradients of several processes are compared with those of one first; if they differ,
nothing is written. Then each step runs again in processes that the system lets allocate no more than halfway between
what one and the greatest number of processes need (Linux): "fits" says whether it ends.

    python benchmarks/bench_sequence_parallel.py            # writes benchmarks/results/sequence_parallel.csv
"""

import argparse
import resource
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from common import check_close, peak_memory, write_rows

from hf_ttt import LaCTConfig, LaCTForCausalLM
from hf_ttt.sequence_parallel import sequence_parallel

WINDOW = 256  # also the chunk


def make_model() -> LaCTForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attn_heads": 4, "num_lact_heads": 4, "vocab_size": 256}
    config = LaCTConfig.variant(
        "variant2", use_muon=False, lact_chunk_size=WINDOW, window_size=WINDOW, initializer_range=0.05, **sizes
    )
    return LaCTForCausalLM(config).train()


def training_step(model: LaCTForCausalLM, tokens: int) -> torch.Tensor:
    """One forward and backward pass; returns this rank's part of the mean loss."""
    ids = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    model.zero_grad()
    with sequence_parallel(model) as shard:
        loss = model(**shard({"input_ids": ids, "labels": ids})).loss
        loss.backward()
    return loss.detach()


def allocated() -> int:
    """Bytes of memory that this process may write to, as the system counts them."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmData"))
    return 1024 * int(line.split()[1])


def process(rank: int, ranks: int, tokens: int, limit: int, folder: str) -> None:
    """A rank: with a limit (bytes) it leaves a file if the step ends; without one, what it measured."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{ranks}-{tokens}-{limit}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
    model = make_model()
    training_step(model, 2 * ranks * WINDOW)
    model.zero_grad()
    name = Path(folder, f"{ranks}-{tokens}-{rank}-{bool(limit)}.pt")
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (allocated() + limit, resource.RLIM_INFINITY))
        training_step(model, tokens)
        torch.save({}, name)
    else:
        losses = []
        peak = peak_memory(lambda: losses.append(training_step(model, tokens)))
        flat = torch.cat([losses[0].view(1), *(parameter.grad.flatten() for parameter in model.parameters())])
        dist.all_reduce(flat)
        torch.save({"peak": peak, "result": flat / ranks}, name)
    dist.destroy_process_group()


def run(ranks: int, tokens: int, limit: int, folder: str) -> list[dict] | None:
    """What each rank measured; None if one of them could not allocate what it needs."""
    try:
        arguments = (ranks, tokens, limit, folder)
        torch.multiprocessing.start_processes(process, arguments, nprocs=ranks, start_method="fork")
    except torch.multiprocessing.ProcessRaisedException as error:
        if not limit or not ("allocate memory" in str(error) or "closed by peer" in str(error)):
            raise
        return None
    return [torch.load(Path(folder, f"{ranks}-{tokens}-{rank}-{bool(limit)}.pt")) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192], help="lengths of the sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes, growing")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in arguments.tokens:
            found = {ranks: run(ranks, tokens, 0, folder) for ranks in arguments.ranks}
            first, *others = (found[ranks][0]["result"] for ranks in arguments.ranks)
            for ranks, other in zip(arguments.ranks[1:], others, strict=True):
                check_close(f"the step of {ranks} processes", other, first, 1e-4)
            peaks = {ranks: max(part["peak"] for part in parts) for ranks, parts in found.items()}
            limit = (max(peaks.values()) + min(peaks.values())) // 2 if sys.platform == "linux" else 0
            for ranks in found:
                fits = (run(ranks, tokens, limit, folder) is not None) if limit else ""
                row = {"tokens": tokens, "processes": ranks, "MiB of a process": round(peaks[ranks] / 2**20, 1)}
                row |= {"over one process": round(peaks[ranks] / peaks[arguments.ranks[0]], 3)}
                row |= {"limit in MiB": round(limit / 2**20, 1), "fits": fits}
                print(row, flush=True)
                rows.append(row)
    write_rows("sequence_parallel", rows)


if __name__ == "__main__":
    main()
