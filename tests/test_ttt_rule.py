# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The rule: its values, and where the parallel form is exact."""

import dataclasses

import pytest
from ttt_cases import every_rule

from hf_ttt import TTTRule


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("update", "first"),
        ("update", None),
        ("fast_weight", "glu"),
        ("loss", "dot"),
        ("direction", "up"),
        ("read_with", "value"),
        ("weight_norm", None),
        ("detach_norms", "yes"),
        ("muon", "jordan"),
        ("muon_dtype", "float16"),
        ("muon_steps", -1),
        ("muon_steps", 2.0),
        ("inner_steps", 0),
        ("inner_steps", True),
        ("inner_steps", "1"),
    ],
)
def test_a_wrong_value_is_named(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        TTTRule(**{field: value})


def test_lact_muon_has_five_steps():
    with pytest.raises(ValueError, match="muon_steps=3 .*muon='nvs'"):
        TTTRule(muon="lact", muon_steps=3)
    assert TTTRule(muon="nvs", muon_steps=0).muon_steps == 0


def test_frozen_keyword_only_hashable():
    rule = TTTRule(update="last", muon="nvs", muon_steps=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.update = "all"
    with pytest.raises(TypeError):
        TTTRule("last")
    assert TTTRule(**rule.to_dict()) == rule
    assert hash(TTTRule(**rule.to_dict())) == hash(rule)
    assert rule != TTTRule()


def test_parallelizable_for_every_combination():
    rules = every_rule()
    for rule in rules:
        last = rule.fast_weight == "linear" or rule.update == "last"
        exact = last and rule.loss == "dot_product" and rule.weight_norm in ("none", "pre")
        assert rule.parallelizable == exact
        assert rule.updated == ((1,) if last else (0, 1, 2))
        if exact:
            assert rule.why_not_parallel is None
        else:
            assert rule.why_not_parallel.endswith("in a model's config)")
    assert 0 < sum(rule.parallelizable for rule in rules) < len(rules)


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (TTTRule(), "set update='last'"),
        (TTTRule(update="last", loss="mse"), "set loss='dot_product'"),
        (TTTRule(update="last"), "set weight_norm='none'"),
        (TTTRule(fast_weight="linear"), "set weight_norm='none'"),
    ],
    ids=["update", "loss", "norm", "linear-norm"],
)
def test_the_reason_names_the_field_to_change(rule, field):
    assert field in rule.why_not_parallel


def test_all_equals_last_for_a_linear_network():
    rule = TTTRule(fast_weight="linear", update="all", weight_norm="none")
    assert rule.parallelizable
    assert rule.updated == (1,)


@pytest.mark.parametrize(("direction", "sign"), [("descent", 1), ("ascent", -1)])
def test_sign(direction, sign):
    assert TTTRule(direction=direction).sign == sign
