# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Sequences split over processes: each rank of a group runs a LaCT language model on a slice of the tokens.

    with sequence_parallel(model, group) as shard:
        loss = model(**shard(batch)).loss
        loss.backward()

Ranks hold contiguous slices of whole chunks. A layer exchanges states of its TTT branch, see `ttt_sequence_parallel`,
and of its window attention the last `window_size` − 1 keys and values, each rank with the next one alone; backward it
is their gradients. None of it grows with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_lact import LaCTConfig
from .ttt_recurrent import no_second_derivative
from .ttt_sequence_parallel import ttt_sequence_parallel

IGNORED = -100  # label of a token without a loss
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def _shift(x: Tensor, group: ProcessGroup, by: int) -> Tensor:
    """Send x to the rank `by` further and return that of the one `by` before; zeros where there is none."""
    rank, received = dist.get_rank(group), torch.zeros_like(x, memory_format=torch.contiguous_format)
    messages = [
        dist.P2POp(operation, tensor, dist.get_global_rank(group, other), group)
        for operation, tensor, other in ((dist.isend, x.contiguous(), rank + by), (dist.irecv, received, rank - by))
        if 0 <= other < dist.get_world_size(group)
    ]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    return received


class _Halo(torch.autograd.Function):
    """k and v [B, h, T, D] behind the last `size` ones of the rank before, or zeros [B, h, size + T, D]."""

    @staticmethod
    def forward(ctx, group, size, k, v):
        ctx.group, ctx.size = group, size
        last = torch.stack([x.new_zeros(*x.shape[:2], size, x.shape[-1]) for x in (k, v)])
        if dist.get_rank(group) + 1 < dist.get_world_size(group):
            last = torch.stack([x[:, :, x.shape[2] - size :] for x in (k, v)])
        return tuple(torch.cat([part, x], 2) for part, x in zip(_shift(last, group, 1), (k, v), strict=True))

    @staticmethod
    @no_second_derivative
    def backward(ctx, dk, dv):
        group, size = ctx.group, ctx.size
        last = _shift(torch.stack([x[:, :, :size] for x in (dk, dv)]), group, -1)
        grads = [x[:, :, size:].clone() for x in (dk, dv)]
        if dist.get_rank(group) + 1 < dist.get_world_size(group):
            for grad, part in zip(grads, last, strict=True):
                grad[:, :, grad.shape[2] - size :] += part
        return None, None, *grads


def _window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scaling: float, has_halo: bool) -> Tensor:
    """Attention of q [B, h, T, D] over the `window` keys up to each, k, v [B, h, window − 1 + T, D]: blocks of `window`
    queries with twice as many keys, so that time and memory grow with T. → [B, h, T, D]"""
    batch, heads, length, width = q.shape
    blocks, rest = -(-length // window), -length % window
    q, k, v = (F.pad(x, (0, 0, 0, rest)) for x in (q, k, v))
    fold = lambda x: x.transpose(1, 2).flatten(0, 1)  # noqa: E731  [B, h, blocks, ·, D] → [B · blocks, h, ·, D]
    k, v = (fold(x.unfold(2, 2 * window - 1, window).transpose(-1, -2)) for x in (k, v))
    row, column = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window - 1, device=q.device)
    mask = ((row <= column) & (column < row + window)).repeat(blocks, 1, 1, 1)
    if not has_halo:
        mask[0, ..., : window - 1] = False
    mask = mask.repeat(batch, 1, 1, 1)
    out = F.scaled_dot_product_attention(fold(q.unflatten(2, (blocks, window))), k, v, attn_mask=mask, scale=scaling)
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    sliding_window: int,
    group: ProcessGroup,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A function of transformers' attention interface: [B, h, T, D] → [B, T, h, D]."""
    key, value = _Halo.apply(group, sliding_window - 1, key, value)
    out = _window_attention(query, key, value, sliding_window, scaling, dist.get_rank(group) > 0)
    return out.transpose(1, 2).contiguous(), None


def _group(group: ProcessGroup | None) -> ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group first, in a script that `torchrun` "
            "starts"
        )
    return dist.group.WORLD if group is None else group


def shard_sequence(
    batch: Mapping[str, Any], config: LaCTConfig, group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """This rank's slice of a batch whose rows are whole sequences, the same batch on all ranks.

    Args:
        batch: `input_ids` [B, T] or `inputs_embeds` [B, T, D]; and, where there are, `labels` [B, T], `position_ids`
            [1 or B, T], `attention_mask` [B, T] without zeros, `num_items_in_batch` (labels over several batches whose
            gradients are accumulated; those of this batch if left out).
        config: says chunk and window.
        group: the processes that share a sequence; None for all.

    Returns:
        Arguments of the model. Chunks are spread evenly; only the last rank's slice may end within one. Labels are
        shifted before they are cut, and `num_items_in_batch` is divided by the number of ranks: then the *mean* of the
        ranks' losses and gradients, which is what DDP and FSDP compute, is that of the whole batch.

    Raises:
        ValueError: for padding, packed documents, another entry, or fewer tokens than the ranks need.
    """
    group = _group(group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    known = ("input_ids", "inputs_embeds", "labels", "position_ids", "attention_mask", "num_items_in_batch")
    for name in batch.keys() - set(known):
        raise ValueError(f"{name!r} is in the batch, of which no slice can be taken: expected {', '.join(known)}")
    tokens = batch["inputs_embeds"] if batch.get("input_ids") is None else batch["input_ids"]
    length, device = tokens.shape[1], tokens.device
    positions = batch.get("position_ids")
    positions = torch.arange(length, device=device)[None] if positions is None else positions
    _check_rows(batch.get("attention_mask"), positions)
    start, stop = slice_bounds(length, config, ranks)[rank]
    out = {name: batch[name][:, start:stop] for name in known[:2] if batch.get(name) is not None}
    out["position_ids"] = positions[:, start:stop]
    if batch.get("labels") is not None:
        labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        items = batch.get("num_items_in_batch")
        items = (labels != IGNORED).sum() if items is None else items
        out["labels"] = out["shift_labels"] = labels[:, start:stop].contiguous()
        out["num_items_in_batch"] = torch.as_tensor(items, device=device) / ranks
    return out


def slice_bounds(length: int, config: LaCTConfig, ranks: int) -> list[tuple[int, int]]:
    """First token of each rank's slice, and the one after its last: chunks spread evenly, the rest to the last rank.

    Raises:
        ValueError: for fewer tokens than the ranks need: a chunk and the window of the next rank each.
    """
    chunk_size = config.lact_chunk_size
    chunks = -(-length // chunk_size)
    first = [chunk_size * (rank * chunks // ranks) for rank in range(ranks)] + [length]
    least = max(chunk_size, config.window_size - 1)
    shortest = min((b - a for a, b in zip(first[:-2], first[1:-1], strict=True)), default=least)
    if shortest < least or first[-2] >= length:
        raise ValueError(
            f"a sequence of {length} tokens has {chunks} chunks, too few for {ranks} ranks of {least} tokens and more "
            f"(lact_chunk_size={chunk_size}, window_size={config.window_size}): take longer sequences or fewer ranks"
        )
    return list(zip(first[:-1], first[1:], strict=True))


def _check_rows(mask: Tensor | None, positions: Tensor) -> None:
    if mask is not None and not (mask != 0).all():
        raise ValueError(
            "attention_mask has zeros, but padded sequences cannot be split over ranks: cut the batch to one length, "
            "or pad it on the right, set the labels there to -100 and leave the mask out"
        )
    if (positions.diff(dim=1) != 1).any():
        raise ValueError(
            "position_ids restart, but packed documents cannot be split over ranks: pass one document a row, or leave "
            "position_ids out to read the row as one"
        )


def _check_model(model: nn.Module) -> Any:
    """The LaCTModel in `model`, also where its code came with a checkpoint, or a wrapper holds it."""
    kinds = [(module, [kind.__name__ for kind in type(module).__mro__]) for module in model.modules()]
    cores = [module for module, names in kinds if "LaCTModel" in names]
    if len(cores) != 1 or any("LaCTForSequenceClassification" in names for _, names in kinds):
        raise ValueError(
            f"{type(model).__name__} cannot be split over ranks: expected a LaCTForCausalLM or a LaCTModel, whose "
            "outputs belong to single tokens"
        )
    core: Any = cores[0]
    config = core.config
    if config.window_size is None:
        raise ValueError("window_size=None attends to all tokens, of which a rank has a slice: set window_size")
    if config.rope_parameters["rope_type"] in LENGTH_DEPENDENT_ROPE:
        raise ValueError(
            f"rope_type={config.rope_parameters['rope_type']!r} depends on the length, which a rank does not see: "
            "set another, such as 'default' or 'yarn'"
        )
    return core


def _check_call(config: LaCTConfig, group: ProcessGroup, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Before each forward pass: refuse what a slice cannot be, and keep no cache."""
    names = ("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache", "past_key_values")
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    given = lambda *names: any(kwargs.get(name) is not None for name in names)  # noqa: E731
    if given("cache", "past_key_values") or kwargs.get("use_cache"):
        raise ValueError("sequence parallelism has no cache: pass none and use_cache=False")
    if given("cu_seqlens", "cu_seq_lens_q"):
        raise ValueError("packed documents cannot be split over ranks: pass one document a row")
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    positions, rank = kwargs.get("position_ids"), dist.get_rank(group)
    if positions is None or bool((positions[:, 0] == 0).all()) != (rank == 0):
        raise ValueError("position_ids do not say where this rank's slice begins: pass what `shard_sequence` returns")
    _check_rows(kwargs.get("attention_mask"), positions)
    least = max(config.window_size - 1, 1)
    if rank + 1 < dist.get_world_size(group) and (tokens.shape[1] % config.lact_chunk_size or tokens.shape[1] < least):
        raise ValueError(
            f"rank {rank} has {tokens.shape[1]} tokens; expected whole chunks of {config.lact_chunk_size}, "
            f"and at least the {least} that the next rank attends to (window_size={config.window_size}), as "
            "`shard_sequence` cuts"
        )
    return (), {**kwargs, "attention_mask": None, "use_cache": False}


@contextmanager
def sequence_parallel(
    model: nn.Module, group: ProcessGroup | None = None
) -> Iterator[Callable[[Mapping[str, Any]], dict[str, Tensor]]]:
    """Within this context a LaCT language model takes slices of sequences, one for each rank of a group.

    The backward pass belongs into it too. Average the gradients over the ranks: wrap the model in
    `DistributedDataParallel` or `fully_shard`, over the group or over all processes (groups then hold different data).

    Args:
        model: a `LaCTForCausalLM` or `LaCTModel`, also wrapped; its rule must be parallelizable. Its attention is
            computed by `scaled_dot_product_attention` in blocks of the window.
        group: the processes that share a sequence, in its order; None for all.

    Yields:
        `shard_sequence` for this model and group: a batch of whole sequences → this rank's arguments of the model.

    Raises:
        ValueError: for another model, a rule that is not parallelizable, or without a process group. Calls of the model
            raise one for a cache, padding, packed documents, or tokens that are no slice.
    """
    group = _group(group)
    core = _check_model(model)
    config, name = core.config, f"sequence_parallel_{group.group_name}"
    before = config.ttt_implementation, config.ttt_backend, config._attn_implementation
    core._ttt_functions.register("parallel", name, partial(ttt_sequence_parallel, group=group))
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention, group=group))
    core.set_ttt_implementation("parallel", name)
    core.set_attn_implementation(name)
    hook = core.register_forward_pre_hook(partial(_check_call, config, group), with_kwargs=True)
    try:
        yield partial(shard_sequence, config=config, group=group)
    finally:
        hook.remove()
        core.set_ttt_implementation(*before[:2])
        core.set_attn_implementation(before[2])
