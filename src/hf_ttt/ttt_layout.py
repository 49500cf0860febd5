# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Padding, packed documents and unfinished chunks ↔ aligned rows, in one place.

An op of this package sees rows whose first token opens a chunk and whose chunks are full but for the last. A layout
says how the tokens of a call, and those of unfinished chunks from before it, are arranged so: it is made once for a
forward pass and used by each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass
class RowGroup:
    """Rows that update equally often: positions `start` to `start + rows * length` of the arranged tokens."""

    start: int
    rows: int
    length: int
    updates: int
    state_rows: Tensor | None  # [rows] which rows of the state these are; None: all, in order

    def cut(self, x: Tensor | None) -> Tensor | None:
        """The group's rows [rows, length, H, D] of arranged positions [P, H, D]."""
        if x is None:
            return None
        return x[self.start : self.start + self.rows * self.length].unflatten(0, (self.rows, self.length))


@dataclass
class TTTLayout:
    """How tokens [B, T] become aligned rows.

    Attributes:
        batch, length: B and T of the call.
        chunk_size: C.
        rows: number of rows: B, or the number of documents.
        return_state: whether full chunks all update; otherwise only those that a later token reads.
        before, total: for aligned rows, the tokens in the unfinished chunk of each row, without and with the new ones.
        totals: the same with the new ones, per row, where rows differ and their lengths are known on the host.
        groups: the rows by number of updates.
        source: for each arranged position the token it holds: b T + t of a new token, B T + r C + s of slot s of row
            r's unfinished chunk; None where the rows are the call's rows as they are.
        valid: whether an arranged position holds a token.
        target: for each token of the call the arranged position that holds it [B T].
        real: whether a token of the call is not padding [B T].
        tail: like `source`, for the slots of the unfinished chunks after the call [rows, C]; `tail_valid` likewise.
        appended: where all tokens fit into their unfinished chunks: the real tokens, their rows and slots.
    """

    batch: int
    length: int
    chunk_size: int
    rows: int
    return_state: bool
    groups: list[RowGroup]
    has_counts: bool = False
    before: int = 0
    total: int = 0
    totals: list[int] | None = None
    source: Tensor | None = None
    valid: Tensor | None = None
    target: Tensor | None = None
    real: Tensor | None = None
    tail: Tensor | None = None
    tail_valid: Tensor | None = None
    appended: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def aligned(self) -> bool:
        """Whether the rows are the call's rows, each with the same number of tokens in its unfinished chunk."""
        return self.source is None

    @property
    def within_chunk(self) -> bool:
        """Whether no new token follows an update that this call makes, so that all read the same state."""
        if not self.has_counts:
            return False
        return (self.total if self.aligned else max(self.totals, default=0)) <= self.chunk_size

    def full_rows(self) -> list[int]:
        """Rows whose chunk is full after the call, where all tokens fit into the unfinished chunks."""
        totals = [self.total] * self.rows if self.aligned else self.totals
        return [row for row, total in enumerate(totals) if total == self.chunk_size]

    def new_counts(self, device: torch.device) -> Tensor:
        """Tokens in the unfinished chunk of each row after the call [rows]."""
        if self.aligned:
            return torch.full((self.rows,), self.total % self.chunk_size, device=device)
        return torch.tensor([total % self.chunk_size for total in self.totals], device=device, dtype=torch.long)

    def append(self, x: Tensor, slots: Tensor) -> Tensor:
        """Write new tokens [B, T, H, D] behind those of unfinished chunks [rows, C, H, D] that have room, in place."""
        if self.aligned:
            slots[:, self.before : self.total] = x
        else:
            token, row, slot = self.appended
            slots[row, slot] = x.flatten(0, 1)[token].to(slots.dtype)
        return slots

    def arrange(self, x: Tensor | None, pending: Tensor | None = None) -> Tensor | None:
        """Tokens [B, T, H, D], after unfinished chunks [rows, C, H, D], as arranged positions [P, H, D]; else zeros."""
        return None if x is None else _take(x, pending, self.source, self.valid)

    def arrange_tail(self, x: Tensor | None, pending: Tensor | None = None) -> Tensor | None:
        """The unfinished chunks [rows, C, H, D] after the call."""
        return None if x is None else _take(x, pending, self.tail, self.tail_valid)

    def restore(self, arranged: Tensor) -> Tensor:
        """Arranged positions [P, H, D] → tokens [B, T, H, D]; zeros at padding."""
        out = arranged.index_select(0, self.target).masked_fill(~self.real[:, None, None], 0)
        return out.unflatten(0, (self.batch, self.length))


def _take(x: Tensor, pending: Tensor | None, source: Tensor, valid: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    if pending is not None:
        flat = torch.cat([flat, pending.flatten(0, 1).to(flat.dtype)])
    elif flat.shape[0]:
        source, valid = source.clamp(max=flat.shape[0] - 1), valid & (source < flat.shape[0])
    else:
        return x.new_zeros(*source.shape, *x.shape[2:])
    taken = flat.index_select(0, source.flatten()).masked_fill(~valid.flatten()[:, None, None], 0)
    return taken.unflatten(0, source.shape)


def make_layout(
    batch: int,
    length: int,
    chunk_size: int,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    counts: list[int] | None = None,
    has_state: bool = False,
    return_state: bool = False,
    device: torch.device | str = "cpu",
) -> TTTLayout:
    """The layout of a call.

    Args:
        batch, length: B and T of the call's tokens.
        chunk_size: C.
        attention_mask: [B, T], not zero at real tokens; None where all are real.
        cu_seqlens: boundaries of packed documents in the flat tokens, from 0 to B·T; None without documents.
        counts: tokens in the unfinished chunk of each row, for a state that has one.
        has_state: whether a state is given, so that the rows do not share their weights.
        return_state: whether a state is asked for.
        device: where the tokens are.

    A mask without state is arranged without looking at its values, so that it can be traced; documents and states need
    their lengths on the host (one synchronisation).
    """
    if attention_mask is None and cu_seqlens is None and (counts is None or len(set(counts)) <= 1):
        first = counts[0] if counts else 0
        total = first + length
        updates = total // chunk_size if return_state else max(total - 1, 0) // chunk_size
        group = RowGroup(0, batch, total, updates, None)
        has_counts = counts is not None
        return TTTLayout(batch, length, chunk_size, batch, return_state, [group], has_counts, first, total)
    token = torch.arange(batch * length, device=device)
    if cu_seqlens is not None:
        lengths, row, rank, real = _document_rows(cu_seqlens, token)
    else:
        mask = torch.ones(batch, length, device=device) if attention_mask is None else attention_mask
        real = (mask != 0).flatten()
        row = token // max(length, 1)
        rank = (mask != 0).cumsum(1).flatten() - 1
        if counts is None and not return_state:
            return _masked_layout(batch, length, chunk_size, token, row, rank, real)
        lengths = (mask != 0).sum(1).tolist()
    counts = counts or ([0] * len(lengths) if has_state or return_state else None)
    totals = [p + t for p, t in zip(counts or [0] * len(lengths), lengths, strict=True)]
    groups, base = _group_rows(totals, chunk_size, return_state, not has_state and not return_state, device)
    layout = TTTLayout(batch, length, chunk_size, len(lengths), return_state, groups, counts is not None, totals=totals)
    layout.real = real
    if layout.rows:
        _arrange_rows(layout, counts or [0] * len(lengths), base, token, row, rank)
    else:
        layout.source = layout.target = token
        layout.valid = layout.real
        layout.tail, layout.tail_valid = token.view(0, chunk_size), real.view(0, chunk_size)
    return layout


def _arrange_rows(layout: TTTLayout, counts: list[int], base: list[int], token: Tensor, row: Tensor, rank: Tensor):
    """Fill in where tokens go: `base` is where each row starts, `row` and `rank` each token's row and place in it."""
    size, device, real = layout.chunk_size, token.device, layout.real
    before = torch.tensor(counts, device=device)
    starts = torch.tensor(base, device=device)
    position = rank + before[row]
    layout.target = torch.where(real, starts[row] + position, 0)
    slots = torch.arange(size, device=device)
    slot_token = token.shape[0] + torch.arange(layout.rows * size, device=device).view(layout.rows, size)
    slot_real = slots < before[:, None]
    parts = [(layout.target, token, real), (starts[:, None] + slots, slot_token, slot_real)]
    layout.source, layout.valid = _invert(sum(g.rows * g.length for g in layout.groups), parts)
    if layout.within_chunk:
        kept = real.nonzero()[:, 0]
        layout.appended = kept, row[kept], position[kept]
    if layout.return_state:
        done = torch.tensor([total - total % size for total in layout.totals], device=device)
        first = torch.arange(layout.rows, device=device) * size
        new_slot, old_slot = position - done[row], slots - done[:, None]
        parts = [
            (first[row] + new_slot, token, real & (new_slot >= 0)),
            (first[:, None] + old_slot, slot_token, slot_real & (old_slot >= 0)),
        ]
        layout.tail, layout.tail_valid = (x.view(layout.rows, size) for x in _invert(layout.rows * size, parts))


def _document_rows(cu_seqlens: Tensor, token: Tensor) -> tuple[list[int], Tensor, Tensor, Tensor]:
    starts = cu_seqlens.to(torch.long)
    lengths = starts.diff().tolist()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=token.device), starts.diff())
    return lengths, row, token - starts[row], torch.ones_like(token, dtype=torch.bool)


def _masked_layout(batch, length, chunk_size, token, row, rank, real) -> TTTLayout:
    """One row for each of the call's rows, real tokens first; shapes do not depend on the mask."""
    group = RowGroup(0, batch, length, max(length - 1, 0) // chunk_size, None)
    layout = TTTLayout(batch, length, chunk_size, batch, False, [group])
    layout.real = real
    layout.target = torch.where(real, row * length + rank, 0)
    layout.source, layout.valid = _invert(batch * length, [(layout.target, token, real)])
    return layout


def _group_rows(totals: list[int], chunk_size: int, return_state: bool, shared: bool, device):
    """Rows by number of updates, and where each row starts. Rows that never update and share the initial weights are
    laid end to end in one row: nothing tells them apart."""
    by_updates: dict[int, list[int]] = {}
    for r, total in enumerate(totals):
        updates = total // chunk_size if return_state else max(total - 1, 0) // chunk_size
        by_updates.setdefault(updates, []).append(r)
    groups, base, start = [], [0] * len(totals), 0
    for updates, rows in sorted(by_updates.items()):
        if updates == 0 and shared:
            group = RowGroup(start, 1, sum(totals[r] for r in rows), 0, torch.tensor(rows[:1], device=device))
            offset = start
            for r in rows:
                base[r], offset = offset, offset + totals[r]
        else:
            group = RowGroup(start, len(rows), max(totals[r] for r in rows), updates, torch.tensor(rows, device=device))
            for i, r in enumerate(rows):
                base[r] = start + i * group.length
        groups.append(group)
        start += group.rows * group.length
    return groups, base


def _invert(size: int, parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """source[target] = value where real; and which entries were written. One slot more takes what is not real."""
    device = parts[0][0].device
    source = torch.zeros(size + 1, dtype=torch.long, device=device)
    valid = torch.zeros(size + 1, dtype=torch.bool, device=device)
    for target, value, real in parts:
        at = torch.where(real, target, size).flatten()
        source = source.scatter(0, at, value.flatten())
        valid = valid.scatter(0, at, real.flatten())
    return source[:size], valid[:size]


def _is_plain(x: Tensor) -> bool:
    """Whether x has values to look at: no meta tensor, nor one that stands for another while a model is exported."""
    return not x.is_meta and type(x) in (Tensor, torch.nn.Parameter)


def padding_mask(attention_mask: Tensor | None, x: Tensor, past: int) -> tuple[Tensor | None, Tensor | None]:
    """The mask [B, past + T] and its part for the new tokens, each None where it has no zeros."""
    if attention_mask is None:
        return None, None
    expected = (x.shape[0], past + x.shape[1])
    if attention_mask.dim() != 2 or tuple(attention_mask.shape) != expected:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; expected a padding mask "
            f"[{expected[0]}, {expected[1]}] over the tokens before and the new ones"
        )
    if attention_mask.is_meta:  # without values, so that any will do
        return None, None
    new = attention_mask[:, past:]
    if torch.compiler.is_compiling() or not _is_plain(attention_mask):
        return attention_mask, new
    return None if attention_mask.all() else attention_mask, None if new.all() else new


def document_boundaries(cu_seqlens: Tensor | None, position_ids: Tensor | None, x: Tensor) -> Tensor | None:
    """Boundaries of packed documents in the flat tokens, if there are any."""
    batch, length = x.shape[:2]
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(
                f"cu_seqlens needs documents packed into one row, but the batch is {batch}: flatten it to 1"
            )
        return cu_seqlens.flatten()
    if position_ids is None or position_ids.dim() != 2 or length < 2 or not _is_plain(position_ids):
        return None
    starts = position_ids.diff(dim=1) != 1
    if not starts.any():
        return None
    starts = pad(starts, (1, 0), value=True).expand(batch, -1).flatten()
    return pad(starts.nonzero()[:, 0], (0, 1), value=batch * length)


def document_positions(cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    """Positions that restart at each document [B, T]."""
    if cu_seqlens is None:
        return None
    token = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    starts = cu_seqlens.to(device=x.device, dtype=torch.long)
    return (token - torch.repeat_interleave(starts[:-1], starts.diff())).view(x.shape[:2])


def real_positions(mask: Tensor | None, x: Tensor, past: int) -> Tensor:
    """Positions that count the real tokens of each row."""
    if mask is None:
        return torch.arange(past, past + x.shape[1], device=x.device)[None]
    return ((mask != 0).cumsum(1) - 1).clamp(min=0)[:, past:]
