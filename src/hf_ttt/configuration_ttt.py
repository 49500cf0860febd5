# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The inner-loop fields that every configuration of this package has, and the paper's names for them."""

from __future__ import annotations

import re
from typing import Any, Literal

from .ttt_rule import TTTRule

VARIANTS = ("baseline", "variant1", "variant2", "variant3", "variant4", "variant5", "variant6")
IMPLEMENTATIONS = ("auto", "recurrent", "parallel")
BACKENDS = ("auto", "torch", "triton")

_LOSS_NAME = re.compile(  # of the published code; `_parallel` is read after any, and refused where it is not exact
    r"((?P<ascent>ga_)?dot_product|(?P<key>no_query_)dot_product|(?P<mse>mse)"
    r"|(?P<last>only_w1)((?P<linear>_straight_qk)(?P<no_rate>_no_lr1)?)?(?P<no_norm>_no_wn)?(?P<no_muon>_no_muon|(?<=_no_wn)_muon)?)"
    r"(?P<parallel>_parallel)?"
)
_LOSS_NAME_PARTS: dict[str, dict[str, Any]] = {
    "ascent": {"ttt_direction": "ascent"},
    "key": {"ttt_read_with": "key"},
    "mse": {"ttt_loss_type": "mse"},
    "last": {"ttt_update": "last"},
    "linear": {"ttt_fast_weight": "linear"},
    "no_rate": {"ttt_learnable_lr": False},
    "no_norm": {"ttt_weight_norm": "none"},
    "no_muon": {"use_muon": False},  # ViTTT and the novel-view model, which also writes "_no_wn_muon"
    "parallel": {"ttt_implementation": "parallel"},
}
INNER_LOOP_DEFAULTS: dict[str, Any] = {
    "ttt_loss_type": "dot_product",
    "ttt_update": "all",
    "ttt_weight_norm": "post",
    "ttt_fast_weight": "swiglu",
    "ttt_learnable_lr": True,
    "ttt_direction": "descent",
    "ttt_read_with": "query",
    "ttt_implementation": "auto",
}


def parse_loss_name(name: str) -> dict[str, Any]:
    """The fields that a published `ttt_loss_type` such as "only_w1_straight_qk_no_lr1_no_wn_parallel" stands for.

    Raises:
        ValueError: for a name that the published code does not have either, such as "dot_product_no_wn".
    """
    match = _LOSS_NAME.fullmatch(str(name))
    if match is None:
        raise ValueError(
            f"ttt_loss_type={name!r} is not known; expected 'dot_product', 'mse', or a published name: "
            "'ga_dot_product', 'no_query_dot_product', or 'only_w1' ['_straight_qk' ['_no_lr1']] ['_no_wn'] "
            "['_no_muon'] ['_parallel']. Other combinations are set by ttt_direction, ttt_read_with, ttt_update, "
            "ttt_weight_norm, use_muon and ttt_learnable_lr"
        )
    fields: dict[str, Any] = {"ttt_loss_type": "dot_product"}
    for part, text in match.groupdict().items():
        fields.update(_LOSS_NAME_PARTS[part] if text else {})
    return fields


def resolve_inner_loop(config: Any, prenorm: bool = False, defaults: dict[str, Any] = INNER_LOOP_DEFAULTS) -> None:
    """Turn the loss name into fields and fill in what was left open (None), on a configuration that is being made.

    Args:
        config: has the fields of the inner loop; those that were not given are None.
        prenorm: the published flag `ttt_prenorm`. True means `ttt_weight_norm="pre"`; False overrides nothing.
        defaults: the fields that the architecture has, with their values where nothing is said.

    Raises:
        ValueError: where two fields contradict each other, or for values that are not known.
    """
    named = parse_loss_name(config.ttt_loss_type)
    for field in named.keys() - defaults.keys():
        raise ValueError(
            f"ttt_loss_type={config.ttt_loss_type!r} means {field}={named[field]!r}, which {config.model_type!r} does "
            "not have as part of its loss"
        )
    for field, default in defaults.items():
        value = None if field == "ttt_loss_type" else getattr(config, field)
        if field in named:
            if value is not None and value != named[field]:
                raise ValueError(
                    f"{field}={value!r} contradicts ttt_loss_type={config.ttt_loss_type!r}, which means "
                    f"{field}={named[field]!r}: give one of them"
                )
            value = named[field]
        elif field == "ttt_weight_norm" and prenorm and value is None:
            value = "pre"
        named[field] = default if value is None else value
    if prenorm and named["ttt_weight_norm"] != "pre":
        raise ValueError(
            f"ttt_prenorm=True contradicts ttt_weight_norm={named['ttt_weight_norm']!r} "
            f"(ttt_loss_type={config.ttt_loss_type!r}): set ttt_prenorm=False"
        )
    for field, value in named.items():
        setattr(config, field, value)
    for field, allowed in (("ttt_implementation", IMPLEMENTATIONS), ("ttt_backend", BACKENDS)):
        if getattr(config, field) not in allowed:
            raise ValueError(f"{field}={getattr(config, field)!r} is not one of {', '.join(map(repr, allowed))}")


def make_rule(config: Any, muon: Literal["lact", "nvs"], detach_norms: bool, muon_steps: int = 5) -> TTTRule:
    """The `TTTRule` of a configuration; `muon` names the architecture's coefficients.

    Raises:
        ValueError: for a field with a value that is not known.
    """
    return TTTRule(
        update=config.ttt_update,
        fast_weight=config.ttt_fast_weight,
        loss=config.ttt_loss_type,
        direction=config.ttt_direction,
        read_with=config.ttt_read_with,
        weight_norm=config.ttt_weight_norm,
        detach_norms=detach_norms,
        muon=muon if config.use_muon else None,
        muon_steps=muon_steps,
        muon_dtype=config.ttt_muon_dtype,
        inner_steps=config.ttt_inner_steps,
    )


def variant_fields(name: str, *, momentum: bool) -> dict[str, Any]:
    """Inner-loop fields of a row of the paper's Table 2, each adding one simplification to the row above.

    Args:
        name: one of `VARIANTS`.
        momentum: whether the architecture has momentum.

    Raises:
        ValueError: for another name.
    """
    if name not in VARIANTS:
        raise ValueError(f"variant {name!r} is not known; expected one of {', '.join(map(repr, VARIANTS))}")
    step = VARIANTS.index(name)
    fields = {
        "ttt_loss_type": "dot_product",
        "ttt_direction": "descent",
        "ttt_read_with": "query",
        "ttt_inner_steps": 1,
        "ttt_update": "last" if step >= 1 else "all",
        "ttt_weight_norm": "none" if step >= 2 else "post",
        "ttt_fast_weight": "linear" if step >= 3 else "swiglu",
        "ttt_learnable_lr": step < 4,
        "use_muon": step < 6,
    }
    return {**fields, "use_momentum": step < 5} if momentum else fields
