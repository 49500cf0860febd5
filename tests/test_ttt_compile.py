# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The ops under torch.compile, torch.export and on meta tensors."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from ttt_cases import assert_close, attend, error, make_inputs, map_inputs, name, outputs_and_gradients

from hf_ttt import TTTRule, ttt_attention

C = 16
RECURRENT = ("recurrent", TTTRule(muon="nvs", muon_steps=1))
PARALLEL = ("parallel", TTTRule(update="last", weight_norm="pre"))
CASES = [RECURRENT, PARALLEL]
by_case = pytest.mark.parametrize(("implementation", "rule"), CASES, ids=name)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(rule, length, **options):
    return make_inputs(rule, length=length, dtype=torch.float32, **options)


@pytest.mark.slow
@by_case
def test_compile_without_graph_breaks(implementation, rule):
    """One graph, the same numbers forward and backward. Two updates, so that momentum and norms have a part."""
    attention = attend(rule, C, implementation=implementation)
    x = inputs(rule, 2 * C + 3)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_close(outputs_and_gradients(compiled, x), outputs_and_gradients(attention, x), 1e-6)


@pytest.mark.slow
@by_case
def test_few_compilations_over_lengths(implementation, rule):
    """At most two more compilations for 65 and 66 tokens after 64, and none for more tokens in the same chunk."""
    attention = attend(rule, 32, implementation=implementation)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    for length in (64, 65, 66, 67, 70):
        x = inputs(rule, length, requires_grad=False)
        assert error(compiled(x), attention(x)) < 1e-6
    assert counter.frame_count <= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mask", "state"])
def test_compile_with_padding_and_state(kind):
    """A padding mask is arranged without looking at it; a state keeps its place in the chunk."""
    implementation, rule = PARALLEL
    x = inputs(rule, C + 5)
    if kind == "mask":
        mask = torch.ones(2, C + 5, dtype=torch.long)
        mask[0, :3] = 0
        attention = attend(rule, C, implementation=implementation, attention_mask=mask)
        function = lambda x, mask: ttt_attention(**x, rule=rule, chunk_size=C, attention_mask=mask)  # noqa: E731
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        got = outputs_and_gradients(lambda x: compiled(x, mask), x)
    else:
        attention = lambda x: torch.cat([t.flatten() for t in with_state(x)])  # noqa: E731
        with_state = lambda x: flat(ttt_attention(**x, rule=rule, chunk_size=C, return_state=True))  # noqa: E731
        got = outputs_and_gradients(torch.compile(attention, fullgraph=True, backend="aot_eager"), x)
    assert_close(got, outputs_and_gradients(attention, x), 1e-6)


def flat(result):
    return [result[0], *(t for t in result[1].tensors().values() if t.is_floating_point())]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler")
def test_inductor():
    """The default backend, which also fuses and reorders: equal up to rounding."""
    rule = TTTRule(fast_weight="linear", weight_norm="none")
    attention = attend(rule, C, implementation="parallel")
    x = inputs(rule, C + 3, rates=None, momentum=None)
    got = outputs_and_gradients(torch.compile(attention, fullgraph=True), x)
    assert_close(got, outputs_and_gradients(attention, x), 1e-5)


class Layer(torch.nn.Module):
    """A layer whose fast weights are parameters, as in a model."""

    def __init__(self, implementation, rule):
        super().__init__()
        self.implementation, self.rule = implementation, rule
        x = inputs(rule, 1)
        self.w = torch.nn.ParameterList([x[key].detach() for key in ("w0", "w1", "w2")])

    def forward(self, q, k, v, lr0, lr1, lr2, momentum):
        settings = {"rule": self.rule, "chunk_size": C, "implementation": self.implementation}
        return ttt_attention(q, k, v, *self.w, lr0, lr1, lr2, momentum, **settings)


@by_case
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export(implementation, rule, strict):
    """torch.export of a layer, with a batch that may change."""
    layer = Layer(implementation, rule)
    tokens = lambda batch: tuple(  # noqa: E731
        t for key, t in inputs(rule, C + 5, batch=batch, requires_grad=False).items() if key[0] != "w"
    )
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(layer, tokens(2), dynamic_shapes=[{0: batch}] * 7, strict=strict)
    for size in (2, 3):
        assert error(program.module()(*tokens(size)), layer(*tokens(size))) < 1e-6


@by_case
def test_meta_tensors(implementation, rule):
    """Shapes and types of outputs, state and gradients without any memory."""
    x = inputs(rule, 2 * C + 3)
    settings = {"rule": rule, "chunk_size": C, "implementation": implementation, "return_state": True}
    out, state = ttt_attention(**x, **settings)
    meta = map_inputs(lambda t: t.to("meta"), x)
    meta_out, meta_state = ttt_attention(**meta, **settings)
    meta_out.sum().backward()
    shape = lambda t: (t.shape, t.dtype)  # noqa: E731
    assert shape(meta_out) == shape(out)
    assert {k: shape(t) for k, t in meta_state.tensors().items()} == {k: shape(t) for k, t in state.tensors().items()}
    assert all(meta[key].grad.shape == x[key].shape for key in x if not (key == "q" and rule.read_with == "key"))
