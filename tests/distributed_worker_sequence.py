# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What `test_sequence_parallel.py` runs on 2 and 4 processes: each check gives figures, which it judges.

The module is imported once and forked: `python distributed_worker_sequence.py folder` writes `folder/<ranks>.json`.
"""

import itertools
import json
import sys
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from lact_cases import busy_model, gradients, tiny_config, token_ids
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from ttt_cases import attend, error, every_rule, make_inputs, map_inputs, name, outputs_and_gradients, readout
from ttt_cases import gradients as input_gradients
from ttt_cases import parallelizable as parallelizable_of

from hf_ttt import LaCTModel, TTTRule
from hf_ttt.sequence_parallel import sequence_parallel, shard_sequence, slice_bounds
from hf_ttt.ttt_ops import TTT_FUNCTIONS
from hf_ttt.ttt_sequence_parallel import ttt_sequence_parallel

BACKEND = "over_ranks"
FEW = (
    TTTRule(update="last", weight_norm="none"),
    TTTRule(update="last", weight_norm="none", muon="lact"),
    TTTRule(fast_weight="linear", weight_norm="none"),
    TTTRule(update="last", weight_norm="pre", muon="lact"),
    TTTRule(fast_weight="linear", weight_norm="pre", muon="nvs"),
    TTTRule(update="last", weight_norm="pre", inner_steps=2),
)
MODELS = {  # name: fields of the configuration, batch, tokens per rank of 2
    "variant2": ({"variant": "variant2"}, 2, 45),
    "variant3": ({"variant": "variant3"}, 1, 48),
    "variant4": ({"variant": "variant4"}, 2, 41),
    "variant5": ({"variant": "variant5"}, 1, 56),
    "variant6": ({"variant": "variant6"}, 3, 63),
    "variant2 without Muon": ({"variant": "variant2", "use_muon": False}, 2, 45),
    "variant3 without Muon": ({"variant": "variant3", "use_muon": False, "window_size": 1}, 2, 43),
    "variant2 without momentum": ({"variant": "variant2", "use_momentum": False, "window_size": 5}, 1, 49),
    "pre-norm": ({"variant": "prenorm_last"}, 2, 45),
    "pre-norm without Muon": ({"variant": "prenorm_last", "use_muon": False, "window_size": 9}, 1, 47),
    "pre-norm without momentum": ({"variant": "prenorm_last", "use_momentum": False}, 1, 47),
    "reads keys, two steps": ({"variant": "variant2", "ttt_read_with": "key", "ttt_inner_steps": 2}, 1, 42),
    "low rank, no rates": ({"variant": "variant2", "ttt_learnable_lr": False, "w0_w2_low_rank": 4}, 1, 42),
    "one head, one row": ({"variant": "variant6", "num_attn_heads": 1, "num_lact_heads": 1}, 1, 42),
    "published parts": ({"variant": "variant2", "attn_qk_norm": True, "qkv_bias": True, "ttt_nope": True}, 1, 42),
}


def bounds(length: int, chunk_size: int) -> tuple[int, int]:
    config = SimpleNamespace(lact_chunk_size=chunk_size, window_size=1)
    return slice_bounds(length, config, dist.get_world_size())[dist.get_rank()]


def joined(part: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """The whole [B, length, ...] of the ranks' parts."""
    whole = part.new_zeros(part.shape[0], length, *part.shape[2:])
    whole[:, start : start + part.shape[1]] = part.detach()
    dist.all_reduce(whole)
    return whole


def op_over_ranks(x, rule: TTTRule, chunk_size: int) -> dict[str, torch.Tensor]:
    """Output and gradients of the op over all ranks; leaves of `x` are whole sequences on each rank."""
    length = x["k"].shape[1]
    start, stop = bounds(length, chunk_size)
    part = {key: t if t is None or key[0] == "w" else t[:, start:stop] for key, t in x.items()}
    out = attend(rule, chunk_size, implementation="parallel", backend=BACKEND)(part)
    whole = joined(out, start, length)
    grads = input_gradients(out, x, readout(whole)[:, start:stop])
    for grad in grads.values():
        dist.all_reduce(grad)
    return {"out": whole, **grads}


def op_error(rule: TTTRule, chunk_size: int, length: int, **fields) -> float:
    """The greatest error of output and gradients, over those of one process."""
    x = make_inputs(rule, length=length, **fields)
    want = outputs_and_gradients(attend(rule, chunk_size, implementation="parallel", backend="torch"), x)
    got = op_over_ranks(x, rule, chunk_size)
    return max(error(got[key], value) for key, value in want.items())


def op_every_rule() -> dict[str, float]:
    """A rest of 3 tokens, and one chunk at least for each of the ranks; on 4 ranks every fifth rule."""
    rules, ranks = parallelizable_of(every_rule()), dist.get_world_size()
    return {name(rule): op_error(rule, 4, 9 * ranks + 1) for rule in rules[:: 1 if ranks == 2 else 5]}


def op_lengths() -> dict[str, float]:
    """The last rank has one token, a chunk, a chunk and one; others have one chunk and several."""
    ranks, results = dist.get_world_size(), {}
    momenta = itertools.cycle([(None, "random"), (0.0, "random"), (1.0,)])
    for rule in FEW:
        for length in (4 * ranks - 3, 4 * ranks, 4 * ranks + 1, 8 * ranks + 1, 13 * ranks):
            for momentum in next(momenta):
                fields = {"momentum": momentum, "rates": None if length % 2 else "channel", "batch": 1 + length % 2}
                results[f"{name(rule)}, {length} tokens, momentum {momentum}"] = op_error(rule, 4, length, **fields)
    return results


def op_many_chunks() -> dict[str, float]:
    """More chunks on each rank than a block of the scan has, with a momentum that is exactly 0 and 1 in some."""
    ranks, results = dist.get_world_size(), {}
    for rule in FEW:
        x = make_inputs(rule, length=2 * 37 * ranks + 1)
        m = x["momentum"].detach().clone()
        m[:, 8:10], m[:, 30:34], m[:, 70:90] = 0.0, 0.0, 1.0
        x["momentum"] = m.requires_grad_()
        want = outputs_and_gradients(attend(rule, 2, implementation="parallel", backend="torch"), x)
        got = op_over_ranks(x, rule, 2)
        results[name(rule)] = max(error(got[key], value) for key, value in want.items())
    return results


def op_float32() -> dict[str, list[float]]:
    """2,048 chunks of one token: errors over float64 of the ranks and of one process."""
    results = {}
    for rule in (FEW[0], FEW[2]):
        for momentum in (0.0, 1.0, "random"):
            x = make_inputs(rule, batch=1, heads=1, length=2049, momentum=momentum, dtype=torch.float32)
            one = attend(rule, 1, implementation="parallel", backend="torch")
            want = outputs_and_gradients(one, map_inputs(torch.Tensor.double, x))
            both = op_over_ranks(x, rule, 1), outputs_and_gradients(one, x)
            assert all(t.isfinite().all() for t in both[0].values())
            results[f"{name(rule)}, momentum {momentum}"] = [
                max(error(got[key], value) for key, value in want.items()) for got in both
            ]
    return results


def cross_entropy(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **kwargs):
    """`ForCausalLMLoss` without its cast to float32."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction="sum")
    return loss / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def make_model(dtype=torch.float32, seed: int = 0, **fields):
    model = busy_model(tiny_config(**fields), seed=seed).to(dtype).train()
    if dtype == torch.float64:
        model.loss_function = cross_entropy
    return model


def make_batch(batch: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens, and labels of which some are ignored, unequally many on each rank."""
    ids = token_ids(batch, length, seed)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) % 5 < (torch.arange(length) < 20), -100)}


def one_process(model, batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return {"logits": output.logits, "loss": output.loss, **{k: v.clone() for k, v in gradients(model).items()}}


def over_ranks(model, batch, wrap=lambda model: model) -> dict[str, torch.Tensor]:
    """Logits, and the means over ranks of loss and gradients."""
    model.zero_grad()
    wrapped = wrap(model)
    with sequence_parallel(wrapped) as shard:
        part = shard(batch)
        output = wrapped(**part)
        output.loss.backward()
    start, length = int(part["position_ids"][0, 0]), batch["input_ids"].shape[1]
    results = {"logits": joined(output.logits, start, length), "loss": output.loss.detach().clone()}
    results |= {key: grad.clone() for key, grad in gradients(model).items()}
    for key, value in results.items():
        if key != "logits":
            dist.all_reduce(value)
            value /= dist.get_world_size()
    return results


def model_length(length: int) -> int:
    return length * dist.get_world_size() // 2


def model_errors() -> dict[str, float]:
    results = {}
    for key, (fields, batch, length) in MODELS.items():
        model, data = make_model(torch.float64, **fields), make_batch(batch, model_length(length))
        want, got = one_process(model, data), over_ranks(model, data)
        results[key] = max(error(got[k], v) for k, v in want.items())
    return results


def model_float32() -> dict[str, list[float]]:
    """Errors over float64, of the ranks and of one process; also under bfloat16 autocast."""
    results = {}
    for key in ("variant2", "variant6", "variant2 without Muon", "pre-norm"):
        fields, batch, length = MODELS[key]
        data = make_batch(batch, model_length(length))
        want = one_process(make_model(torch.float64, **fields), data)
        model = make_model(**fields)
        both = over_ranks(model, data), one_process(model, data)
        results[key] = [max(error(got[k], v) for k, v in want.items()) for got in both]
        if key == "variant6":
            with torch.autocast("cpu", torch.bfloat16):
                both = over_ranks(model, data), one_process(model, data)
            results[f"{key}, autocast"] = [max(error(got[k], v) for k, v in want.items()) for got in both]
    return results


def model_wrapped() -> dict[str, float]:
    """DDP, which averages by itself; gradient checkpointing, which exchanges again in the backward pass."""
    results = {}
    for variant in ("variant2", "variant6"):
        model, data = make_model(torch.float64, variant=variant), make_batch(2, model_length(45))
        want = one_process(model, data)
        got = over_ranks(model, data, DistributedDataParallel)  # its gradients are the same on all ranks
        results[f"DDP, {variant}"] = max(error(got[k], v) for k, v in want.items())
        for reentrant in (True, False):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            got = over_ranks(model, data)
            results[f"checkpointing, reentrant {reentrant}, {variant}"] = max(error(got[k], v) for k, v in want.items())
    return results


def model_accumulated() -> dict[str, float]:
    """Two batches of unequally many labels, accumulated: `num_items_in_batch` counts those of both."""
    model, batches = make_model(torch.float64, variant="variant2"), [make_batch(1, model_length(45), i) for i in (0, 1)]
    batches[1]["labels"] = batches[1]["labels"].masked_fill(torch.arange(model_length(45)) < 30, -100)
    items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    model.zero_grad()
    for batch in batches:
        model(**batch, num_items_in_batch=items).loss.backward()
    want = {key: grad.clone() for key, grad in gradients(model).items()}
    model.zero_grad()
    with sequence_parallel(model) as shard:
        for batch in batches:
            model(**shard({**batch, "num_items_in_batch": items})).loss.backward()
    for grad in gradients(model).values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return {"gradients": max(error(grad, want[key]) for key, grad in gradients(model).items())}


def model_groups() -> dict[str, float]:
    """Groups of half the ranks with different data each, and DDP over all: the mean of both batches."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(list(range(i * ranks // 2, (i + 1) * ranks // 2))) for i in range(2)]
    mine = rank * 2 // ranks
    batches = [make_batch(1, 45 * ranks // 4, seed) for seed in range(2)]
    model = make_model(torch.float64, variant="variant2")
    want = [one_process(model, batch) for batch in batches]
    model.zero_grad()
    wrapped = DistributedDataParallel(model)
    with sequence_parallel(wrapped, groups[mine]) as shard:
        wrapped(**shard(batches[mine])).loss.backward()
    grads = gradients(model)
    return {"gradients": max(error(grad, (want[0][k] + want[1][k]) / 2) for k, grad in grads.items())}


@contextmanager
def counted_bytes():
    """Bytes that this rank gives to others, by operation."""
    sent, gather, messages = {}, dist.all_gather, dist.batch_isend_irecv

    def counted_gather(outputs, given, **kwargs):
        sent["all_gather"] = sent.get("all_gather", 0) + given.nbytes
        return gather(outputs, given, **kwargs)

    def counted_messages(operations):
        for operation in operations:
            if operation.op is dist.isend:
                sent["send"] = sent.get("send", 0) + operation.tensor.nbytes
        return messages(operations)

    dist.all_gather, dist.batch_isend_irecv = counted_gather, counted_messages
    try:
        yield sent
    finally:
        dist.all_gather, dist.batch_isend_irecv = gather, messages


def exchanged_bytes() -> dict[str, list[dict[str, int]]]:
    """Of a forward and a backward pass of one layer, at two lengths."""
    results = {}
    for key in ("variant6", "variant5", "variant2", "variant2 without Muon"):
        fields = {**MODELS[key][0], "num_hidden_layers": 1}
        model, results[key] = make_model(**fields), []
        for length in (64, 192):
            with sequence_parallel(model) as shard, counted_bytes() as forward:
                loss = model(**shard(make_batch(2, length))).loss
                with counted_bytes() as backward:
                    loss.backward()
            halves = [{k: part.get(k, 0) for k in ("all_gather", "send")} for part in (forward, backward)]
            halves[0] = {k: v - halves[1][k] for k, v in halves[0].items()}
            everyone: list = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, halves)
            results[key].append(everyone)
    return results


def message(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except ValueError as e:
        return str(e)
    return "no error"


def errors() -> dict[str, str]:
    """Messages of what is refused; all ranks refuse it, before they exchange anything."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, batch = make_model(variant="variant2"), make_batch(2, 24 * ranks)
    config, results = model.config, {}

    def enter(*args):
        with sequence_parallel(*args):
            pass

    results["rule"] = message(enter, make_model(variant="variant1"))
    results["window"] = message(enter, make_model(variant="variant2", window_size=None))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    results["rope"] = message(enter, make_model(variant="variant2", rope_parameters=rope))
    results["model"] = message(enter, torch.nn.Linear(2, 2))
    mask = torch.ones(2, 24 * ranks, dtype=torch.long)
    assert shard_sequence({**batch, "attention_mask": mask}, config).keys() == shard_sequence(batch, config).keys()
    mask[0, 0] = 0
    results["padding"] = message(shard_sequence, {**batch, "attention_mask": mask}, config)
    packed = (torch.arange(24 * ranks) % 20)[None]
    results["packed"] = message(shard_sequence, {**batch, "position_ids": packed}, config)
    results["entry"] = message(shard_sequence, {**batch, "token_type_ids": packed}, config)
    results["short"] = message(shard_sequence, make_batch(1, 8 * ranks - 8), config)
    results["wide window"] = message(shard_sequence, batch, tiny_config("variant2", window_size=34))
    before = config._attn_implementation, config.ttt_implementation, config.ttt_backend
    with sequence_parallel(model) as shard:
        part = shard(batch)
        results["whole"] = message(model, **(batch if rank else {**part, "position_ids": part["position_ids"] + 1}))
        results["cache"] = message(model, **part, use_cache=True)
        results["documents"] = message(model, **part, cu_seqlens=torch.tensor([0, 3]))
        cut = {k: v[:, :-1] if v.dim() == 2 else v for k, v in part.items()}
        results["no chunk"] = message(model, **cut) if rank + 1 < ranks else ""
        shorter = {k: v[:, :5] if v.dim() == 2 else v for k, v in part.items()}
        results["next window"] = message(model, **shorter) if rank + 1 < ranks else ""
    assert (config._attn_implementation, config.ttt_implementation, config.ttt_backend) == before
    assert message(model, **batch) == "no error"
    everyone: list = [None] * ranks
    dist.all_gather_object(everyone, results)
    assert len({text for part in everyone for key, text in part.items() if key == "rule"}) == 1
    return everyone[0]


def base_model() -> dict[str, float]:
    """`LaCTModel` by itself, called with positional arguments and in evaluation mode, where it would keep a cache."""
    ids = token_ids(2, model_length(45))
    model = busy_model(tiny_config("variant2"), LaCTModel).double()
    with torch.no_grad():
        want = model(ids).last_hidden_state
        with sequence_parallel(model) as shard:
            part = shard({"input_ids": ids})
            got = model(part["input_ids"], None, part["position_ids"]).last_hidden_state
    return {"hidden states": error(joined(got, int(part["position_ids"][0, 0]), ids.shape[1]), want)}


def peak(function) -> int:
    """Bytes of tensors that a call holds at most, over those from before it; every allocation is counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    held = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def memory() -> dict[str, list[float]]:
    """Peak of a training step on 4,096 tokens, and its loss: of a group of one rank, and of one of all."""
    if dist.get_world_size() > 2:
        return {}
    sizes = {"hidden_size": 64, "num_attn_heads": 2, "num_lact_heads": 2, "intermediate_size": 128}
    model = busy_model(tiny_config("variant2", **sizes, lact_chunk_size=128, window_size=128, use_muon=False)).train()
    batch, alone = make_batch(1, 4096), [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    results = {}
    for key, group in (("one", alone), ("both", dist.group.WORLD)):
        losses = []

        def step(group=group, losses=losses):
            model.zero_grad()
            with sequence_parallel(model, group) as shard:
                losses.append(model(**shard(batch)).loss)
                losses[-1].backward()

        results[key] = [peak(step)]
        loss = losses[0].detach()
        dist.all_reduce(loss, group=group)
        results[key].append(loss.item() / dist.get_world_size(group))
    return results


CHECKS = {
    check.__name__: check
    for check in (
        op_every_rule, op_lengths, op_many_chunks, op_float32, model_errors, model_float32, model_wrapped,
        model_accumulated, model_groups, base_model, exchanged_bytes, errors, memory,
    )
}  # fmt: skip


def process(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    evaluation = partial(ttt_sequence_parallel, group=dist.group.WORLD)
    TTT_FUNCTIONS.register("parallel", BACKEND, evaluation)
    results = {key: check() for key, check in CHECKS.items()}
    everyone: list = [None] * ranks
    dist.all_gather_object(everyone, results)
    if rank == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    for count in (2, 4):
        torch.multiprocessing.start_processes(process, (count, sys.argv[1]), nprocs=count, start_method="fork")
