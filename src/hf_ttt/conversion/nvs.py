# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Configurations of LaCT-NVS out of the arguments of the published code and out of the weights themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..configuration_lact_nvs import LaCTNVSConfig, read_entry
from .facts import Fact, check_facts, count_in, facts_in, own_names, ratio_of, size_in

_NAMES = {  # of the published constructor and of a published TTT layer
    "patch_size": "patch_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "block_config": "block_config",
    "no_query": "ttt_read_with",
}
_WITHOUT_EFFECT = ("grad_calc_method", "use_fused", "architectures", "auto_map", "model_type", "transformers_version")
_NOT_THERE = ("use_momentum",)
_OWN_PARAMETERS = {"ttt": r"(w[012]|lr_fc\.(weight|bias)|o_norm\.weight)", "mlp": r"c_fc\.weight"}
_MODULE = r"blocks\.\d+\.module_list\."


def nvs_config(state: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> LaCTNVSConfig:
    """The configuration of a published state dict of LaCT-NVS.

    Args:
        state: the state dict.
        arguments: of the published constructor, or fields of the configuration. What an entry of `block_config` leaves
            out is read from the weights, and a field of a TTT layer in it yields to an argument of the same name.

    Raises:
        ValueError: for arguments that are not known, contradict the weights or each other, or are needed.
    """
    given = own_names(
        LaCTNVSConfig,
        arguments,
        _NAMES,
        also=("ttt_prenorm",),
        ignored=_WITHOUT_EFFECT,
        absent=_NOT_THERE,
        own_value=_own_value,
    )
    facts = list(nvs_facts(state))
    check_facts(facts, given, arguments, state)
    fields = {fact.field: fact.value for fact in facts}
    fields |= {field: value for field, (_, value) in given.items()}
    if width := fields.get("hidden_size"):
        overridden = ["no_query"] if "ttt_read_with" in given else []
        entries = fields.get("block_config")
        fields["block_config"] = _merged_blocks(block_facts(state, width), entries, state, overridden)
    return LaCTNVSConfig(**fields)


def _own_value(name: str, field: str, value: Any) -> Any:
    return _read_with(value) if name == "no_query" else value


def _read_with(no_query: bool) -> str:
    return "key" if no_query else "query"


def nvs_facts(state: Mapping[str, Tensor]) -> Iterator[Fact]:
    """What a state dict of LaCT-NVS says of its configuration, but for the modules of a block."""
    norm = rf"(input_layernorm|image_token_decoder\.0|{_MODULE}\d+\.ln)\.weight"
    yield from facts_in(state, {"hidden_size": (norm, 0, 1)})
    if depth := count_in(state, r"blocks\.(\d+)\."):
        yield Fact("num_hidden_layers", *depth)
    for pattern, axis, channels in ((r"image_token_decoder\.1\.weight", 0, 3), (r"input_linear\.weight", 1, 12)):
        if found := size_in(state, pattern, axis, 2):
            yield Fact("patch_size", math.isqrt(found[0] // channels), found[1])
            break
    if width := size_in(state, norm, 0, 1):
        facts = [fact for _, facts in block_facts(state, width[0]) for fact in facts if fact.field == "no_query"]
        yield from (Fact("ttt_read_with", _read_with(fact.value), fact.key) for fact in facts[:1])


def _kinds(state: Mapping[str, Tensor]) -> list[str]:
    """The types of a block's modules, by the parameters that only they have."""
    count, _ = count_in(state, rf"{_MODULE}(\d+)\.") or (0, "")
    kinds = []
    for index in range(count):
        has_own = {kind: size_in(state, rf"{_MODULE}{index}\.f\.{own}", 0) for kind, own in _OWN_PARAMETERS.items()}
        kinds.append(next((kind for kind, found in has_own.items() if found), "attention"))
    return kinds


def block_facts(state: Mapping[str, Tensor], width: int) -> list[tuple[str, list[Fact]]]:
    """What a state dict of LaCT-NVS says of each module of a block: its type, and facts of the fields of its entry.

    Args:
        state: the state dict.
        width: the model's width.
    """
    blocks = []
    for index, kind in enumerate(_kinds(state)):
        prefix = rf"{_MODULE}{index}\.f\."
        facts = {"attention": _attention_facts, "ttt": _ttt_facts, "mlp": _mlp_facts}[kind]
        blocks.append((kind, list(facts(state, prefix, width))))
    return blocks


def _attention_facts(state: Mapping[str, Tensor], prefix: str, width: int) -> Iterator[Fact]:
    norm = size_in(state, rf"{prefix}[qk]_norm\.weight", 0, 1)
    if norm:
        yield Fact("head_dim", *norm)
    if shown := norm or size_in(state, rf"{prefix}(to_qkv|c_proj)\.weight", 0):
        yield Fact("use_qk_norm", norm is not None, shown[1])


def _ttt_facts(state: Mapping[str, Tensor], prefix: str, width: int) -> Iterator[Fact]:
    head, hidden = (size_in(state, rf"{prefix}w[02]", axis, 3) for axis in (1, 2))
    if head and hidden:
        yield Fact("head_dim", *head, same=lambda a, b: (a or width) == b)
        yield _inter_multi(head[0], *hidden)
    if rows := size_in(state, rf"{prefix}to_qkv\.weight", 0, 2):
        yield Fact("no_query", rows[0] == 2 * width, rows[1], lambda a, b: bool(a) == b)


def _mlp_facts(state: Mapping[str, Tensor], prefix: str, width: int) -> Iterator[Fact]:
    if hidden := size_in(state, rf"{prefix}c_fc\.weight", 0, 2):
        yield _inter_multi(width, *hidden)


def _inter_multi(width: int, hidden: int, key: str) -> Fact:
    return Fact("inter_multi", ratio_of([width], [hidden]), key, lambda a, b: int(width * a) == int(width * b))


def _merged_blocks(
    shown: Sequence[tuple[str, list[Fact]]],
    entries: Sequence[Mapping[str, Any]] | None,
    state: Mapping[str, Tensor],
    overridden: Sequence[str],
) -> list[dict[str, Any]]:
    """`block_config` out of the weights and of what was given of it, but for what arguments override."""
    kinds = [kind for kind, _ in shown]
    if entries is None:
        entries = [{"type": kind} for kind in kinds]
    read = [read_entry(entry, f"block_config[{i}]") for i, entry in enumerate(entries)]
    if [entry["type"] for entry, _ in read] != kinds:
        types = [entry["type"] for entry, _ in read]
        raise ValueError(f"block_config has modules {types} where the weights have {kinds}")
    blocks, contradictions = [], []
    for i, (entry, (_, facts)) in enumerate(zip(entries, shown, strict=True)):
        said = {**entry, **entry.get("params", {})}
        said.pop("params", None)
        contradictions += [
            fact.contradiction(f"block_config[{i}]: {fact.field}", said[fact.field], state)
            for fact in facts
            if fact.field in said and fact.field not in overridden
        ]
        blocks.append({**{fact.field: fact.value for fact in facts}, **said})
        if kinds[i] == "attention" and "head_dim" not in blocks[-1]:
            raise ValueError(
                f"block_config[{i}] must say head_dim: the weights have no q_norm, which would show the heads' width"
            )
    if any(contradictions):
        raise ValueError("; ".join(filter(None, contradictions)))
    return blocks
