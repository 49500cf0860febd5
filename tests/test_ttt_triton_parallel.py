# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The parallel evaluation's kernels against the definition in float64 and against the torch evaluation.

Where there is no GPU the kernels are interpreted. A bound is the error of the torch evaluations in the same type, which
is what rounding does to this problem (with Muon, which amplifies it, too), times a stated factor. Fresh memory holds
NaN.
"""

import copy
from functools import partial

import pytest
import torch
from lact_cases import tiny_config, token_ids
from safetensors.torch import load_file
from test_ttt_golden import FIXED_RATE, GOLDEN, INDEX, LLM_RULES, as_stored, files, language_model_inputs
from test_ttt_golden import check as check_stored
from ttt_cases import (
    assert_close,
    gradients,
    make_inputs,
    map_inputs,
    name,
    outputs_and_gradients,
    parallelizable,
    poisoned_allocations,
    reference,
    some_rules,
)

from hf_ttt import LaCTForCausalLM, TTTRule, ttt_attention, ttt_init, ttt_read, ttt_update
from hf_ttt.ttt_ops import _fast_weights
from hf_ttt.ttt_parallel import ttt_parallel
from hf_ttt.ttt_recurrent import ttt_recurrent

pytest.importorskip("triton", reason="Triton is not installed")  # it has no wheels for macOS and Windows

from hf_ttt import ttt_triton_features as features  # noqa: E402
from hf_ttt import ttt_triton_scan as scan  # noqa: E402
from hf_ttt.ttt_triton import jit, load_tile, store_tile, tl  # noqa: E402
from hf_ttt.ttt_triton_features import rows_of  # noqa: E402
from hf_ttt.ttt_triton_parallel import ttt_parallel_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES = parallelizable(some_rules())
LAST = TTTRule(update="last", weight_norm="none")
LINEAR = TTTRule(fast_weight="linear", weight_norm="none")
PRE = TTTRule(update="last", weight_norm="pre")
TWO_STEPS = TTTRule(update="last", weight_norm="pre", muon="lact", inner_steps=2)
NARROW = {"batch": 1, "heads": 2, "length": 17, "dk": 16, "dh": 24, "dv": 48}
WIDE = {"batch": 1, "length": 11, "heads": 1, "dk": 160, "dh": 144, "dv": 136}
FACTOR = 4  # the greatest ratio measured in these tests is 2.2
SAME = 4 * torch.finfo(torch.float32).eps  # the same kernels, in another order around them


def attend(rule, chunk_size, function=ttt_parallel_triton, updates=None, return_state=False):
    """An evaluation of whole rows as a function of the inputs of `ttt_attention`."""

    def attention(x):
        state = ttt_init(x["w0"], x["w1"], x["w2"], rule, x["k"].shape[0])
        tokens = [x[key] for key in ("q", "k", "v", "lr0", "lr1", "lr2", "momentum")]
        count = x["k"].shape[1] // chunk_size if updates is None else updates
        settings = {"rule": rule, "chunk_size": chunk_size, "updates": count, "return_state": return_state}
        out, fast = function(*tokens, _fast_weights(state), **settings)
        return (out, fast) if return_state else out

    return attention


def on_device(x):
    return {key: None if t is None else t.detach().to(DEVICE).requires_grad_() for key, t in x.items()}


def distance(got, want):
    """‖got − want‖ / ‖want‖, or the norm itself where there should be zeros."""
    got, want = got.detach().cpu().double(), want.detach().double()
    norm = want.norm()
    return ((got - want).norm() / torch.where(norm > 0, norm, 1.0)).item()


def assert_near(got, want, draws, dtype):
    """Each result as near to the wanted one as FACTOR times the worst of the torch evaluations' results `draws`, or a
    unit of the type if that is more."""
    assert got.keys() == want.keys()
    unit = torch.finfo(dtype).eps
    far = {}
    for key, t in want.items():
        limit = FACTOR * max(unit, *(distance(draw[key], t) for draw in draws))
        if not distance(got[key], t) <= limit:  # NaN, too
            far[key] = distance(got[key], t), limit
    assert not far, f"distances above their limits: {far}"


def check(x, rule, chunk_size):
    """Output and gradients of the kernels near the definition's."""
    with poisoned_allocations():
        got = outputs_and_gradients(attend(rule, chunk_size), on_device(x))
    exact = map_inputs(torch.Tensor.double, x)
    want = outputs_and_gradients(lambda y: reference(y, rule, chunk_size), exact, unused="zero")
    draws = [outputs_and_gradients(attend(rule, chunk_size, f), x) for f in (ttt_parallel, ttt_recurrent)]
    assert_near(got, want, draws, x["k"].dtype)


# ---- numbers ----


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_rules(rule):
    """Two chunks and a rest, float32; a rate for each channel in some of the rules."""
    rates = "channel" if rule.read_with == "key" else "scalar"
    check(make_inputs(rule, **NARROW, dtype=torch.float32, rates=rates), rule, 7)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("rule", [LAST, LINEAR], ids=name)
def test_types(rule, dtype):
    check(make_inputs(rule, **NARROW, dtype=dtype, rates="channel"), rule, 5)


@pytest.mark.parametrize(
    ("rates", "dtype"), [*zip(("scalar", "channel", None), TYPES, strict=True), ("channel", TYPES[0])], ids=str
)
def test_wide_heads(rates, dtype):
    """Above a width of 128 the products are batched ones, and a rest of 1 token is a chunk of its own."""
    check(make_inputs(LAST, **WIDE, dtype=dtype, rates=rates), LAST, 5)


@pytest.mark.parametrize(
    ("rule", "rates", "dtype"),
    [(LINEAR, "scalar", torch.bfloat16), (LINEAR, "channel", torch.float32), (TWO_STEPS, None, torch.float32)],
    ids=lambda x: name(x) or str(x),
)
def test_wide_heads_of_other_rules(rule, rates, dtype):
    check(make_inputs(rule, **WIDE, dtype=dtype, rates=rates), rule, 5)


@pytest.mark.parametrize("rule", [LAST, LINEAR], ids=name)
def test_widths_between_64_and_128(rule):
    """In 16 bits these are still narrow: other tiles, and several of hidden channels."""
    sizes = {"batch": 1, "heads": 1, "length": 70, "dk": 72, "dh": 100, "dv": 96}
    assert features.is_narrow(100, torch.bfloat16) and not features.is_narrow(100, torch.float32)
    check(make_inputs(rule, **sizes, dtype=torch.bfloat16), rule, 33)


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6], ids=lambda t: f"{t}-tokens")
@pytest.mark.parametrize(
    ("rule", "sizes"), [(PRE, NARROW), (LAST, WIDE), (LINEAR, WIDE)], ids=["narrow", "wide", "wide-linear"]
)
def test_lengths(rule, sizes, length):
    """Around a chunk of 5: no update, no rest, no token."""
    check(make_inputs(rule, **{**sizes, "length": length, "heads": 1}, dtype=torch.float32), rule, 5)


@pytest.mark.parametrize("sizes", [NARROW, WIDE], ids=["narrow", "wide"])
def test_no_rows(sizes):
    x = on_device(make_inputs(LAST, **{**sizes, "batch": 0}, dtype=torch.float32))
    got = outputs_and_gradients(attend(LAST, 5), x)
    assert got["out"].shape == x["v"].shape
    assert all(torch.equal(got[key], torch.zeros_like(t)) for key, t in x.items())


@pytest.mark.parametrize("momentum", [0.0, 1.0, None], ids=str)
def test_momentum(momentum):
    """At both ends of its range, and none; two steps on each chunk."""
    rule = TTTRule(update="last", weight_norm="none", inner_steps=2)
    check(make_inputs(rule, **NARROW, dtype=torch.float32, momentum=momentum), rule, 4)


@pytest.mark.parametrize(("rule", "splits"), [(LAST, 1), (LAST, 3), (LINEAR, 3)], ids=lambda x: name(x) or str(x))
def test_chunks_of_several_tiles(rule, splits, monkeypatch):
    """A chunk of 70 tokens is longer than a tile of 32, and no multiple of it; rows have weights of their own. On a
    device with more processors than states, programs share a chunk, and its parts add up."""
    monkeypatch.setattr(features, "processors", lambda device: 2 * splits)
    layer = features._Layer(1, 150, 1, 16, 16, 16, 1, False, 70, 140, 2, torch.float32)
    assert layer.splits(features._tiles(16, torch.float32), 2 * splits)[0] == splits
    sizes = {"length": 150, "batch": 1, "heads": 1, "dk": 16, "dh": 16, "dv": 16}
    check(make_inputs(rule, **sizes, per_row=True, dtype=torch.float32), rule, 70)


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [(LAST, torch.float32), (LAST, torch.bfloat16), (TTTRule(fast_weight="linear", weight_norm="pre"), torch.float32)],
    ids=lambda x: name(x) or str(x),
)
def test_states(rule, dtype):
    """The state after, and gradients through it, from a momentum buffer and other accumulated weights than the
    first."""
    x = make_inputs(rule, **NARROW, dtype=dtype)
    state = ttt_init(x["w0"], x["w1"], x["w2"], rule, 1)
    generator = torch.Generator().manual_seed(1)
    start = {"buffer": torch.randn(state.w1.shape, generator=generator).requires_grad_()}
    if rule.weight_norm == "pre":
        start["main"] = torch.randn(state.w1.shape, generator=generator).requires_grad_()

    def run(function, inputs, start):
        def continued(*tokens_and_fast, **settings):
            *tokens, fast = tokens_and_fast
            main = [None, start["main"], None] if "main" in start else fast.main
            return function(*tokens, fast._replace(main=main, buffer=[None, start["buffer"], None]), **settings)

        out, fast = attend(rule, 5, continued, return_state=True)(inputs)
        results = {"out": out, "work": fast.work[1], "buffer after": fast.buffer[1]}
        if rule.weight_norm == "pre":
            results["main after"] = fast.main[1]
        total = torch.cat([t.flatten().to(fast.work[1].dtype) for t in results.values()])
        return {**results, **gradients(total, {**inputs, **start})}

    exact = run(ttt_parallel, map_inputs(torch.Tensor.double, x), map_inputs(torch.Tensor.double, start, tuple(start)))
    with poisoned_allocations():
        got = run(ttt_parallel_triton, on_device(x), on_device(start))
    assert_near(got, exact, [run(function, x, start) for function in (ttt_parallel, ttt_recurrent)], dtype)


# ---- through the public function ----


@pytest.mark.parametrize("kind", ["mask", "documents"])
def test_rows_of_different_lengths(kind):
    """Padding on both sides, and packed documents, some shorter than a chunk: as by the torch evaluation."""
    batch = 3 if kind == "mask" else 1
    x = on_device(make_inputs(PRE, batch=batch, heads=1, length=17, dk=16, dh=24, dv=16, dtype=torch.float32))
    settings = {"cu_seqlens": torch.tensor([0, 2, 2, 13, 17], device=DEVICE)}
    if kind == "mask":
        mask = torch.ones(3, 17, dtype=torch.long, device=DEVICE)
        mask[0, :6], mask[1, 3:] = 0, 0
        settings = {"attention_mask": mask}
    results = []
    for backend in ("torch", "triton"):
        attention = partial(ttt_attention, rule=PRE, chunk_size=5, implementation="parallel", backend=backend)
        out, state = attention(**x, return_state=True, **settings)
        total = torch.cat([out.flatten(), state.w1.flatten(), state.main1.flatten()])
        states = {key: t for key, t in state.tensors().items() if t.is_floating_point()}
        results.append({"out": out, **states, **{f"grad_{key}": g for key, g in gradients(total, x).items()}})
    assert_close(results[1], results[0], 8 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("implementation", ["recurrent", "parallel"])
@pytest.mark.parametrize("rule", [LAST, TTTRule(fast_weight="linear", weight_norm="pre", read_with="key")], ids=name)
def test_update_then_read(rule, implementation):
    """One update with all tokens as the chunk, then reads of other tokens; the update alone gives q no gradient."""
    x = make_inputs(rule, **NARROW, dtype=torch.float32)
    tokens = ("k", "v", "lr0", "lr1", "lr2", "momentum")

    def run(x, **choice):
        state = ttt_init(x["w0"], x["w1"], x["w2"], rule, 1)
        state = ttt_update(state, *(x[key] for key in tokens), rule=rule, **choice)
        out = ttt_read(state, x["q"][:, :9], rule=rule, backend=choice["backend"])
        return {"out": out, "work": state.w1, **gradients(out, x)}

    with poisoned_allocations():
        got = run(on_device(x), implementation=implementation, backend="triton")
    exact = run(map_inputs(torch.Tensor.double, x), backend="torch")
    draws = [run(x, implementation=name, backend="torch") for name in ("recurrent", "parallel")]
    assert_near(got, exact, draws, torch.float32)


def test_auto_never_takes_float64(monkeypatch):
    """Neither by tokens nor by weights; and on a GPU, where kernels are known to be faster for float32."""
    from hf_ttt.ttt_ops import TTT_FUNCTIONS, _call_size

    monkeypatch.setitem(TTT_FUNCTIONS._faster, ("parallel", "triton"), {64: 0})
    monkeypatch.setattr("hf_ttt.ttt_triton.is_available", lambda device: True)
    k, w1 = torch.empty(2, 7, 3, 16, device="meta"), torch.empty(2, 3, 48, 24, device="meta")
    assert _call_size(k, w1)[1:] == (48, 42, torch.float32)
    for tokens, weights, backend in (
        (k, w1, "triton"),
        (k.double(), w1, "torch"),
        (k.bfloat16(), w1.double(), "torch"),
    ):
        size = _call_size(tokens, weights)._replace(device=torch.device("cuda"))
        assert TTT_FUNCTIONS.resolve(LAST, size=size) == ("parallel", backend)


def golden_cases():
    """The published ops' files whose rules are parallelizable. Of the two with one rule and the same inputs, one is for
    the recurrent evaluation; those of linear rules are for the parallel one, the last of them for both."""
    for variant, file in files("ops_").items():
        rule = LLM_RULES.get(variant)
        if rule is not None and rule.parallelizable:
            implementations = {"v2_only_w1_no_wn": ["recurrent"], "v6_linear_attention": ["parallel", "recurrent"]}
            for implementation in implementations.get(variant, ["parallel"]):
                yield pytest.param(file, rule, variant in FIXED_RATE, implementation, id=f"{variant}-{implementation}")


@pytest.mark.parametrize(("file", "rule", "fixed_rate", "implementation"), list(golden_cases()))
def test_published_numbers(file, rule, fixed_rate, implementation):
    """Outputs and gradients of the published code in the tolerances of its index, in float32; with Muon without its
    cast to bfloat16."""
    tensors = load_file(GOLDEN / f"{file}.safetensors")
    combos = sorted({tuple(key.split("/")[:2]) for key in tensors if "/mom" in key and "/in/" not in key})
    assert combos
    for case, combo in combos:
        chunk_size = INDEX["files"][file]["cases"][case]["chunk_size"]
        with_muon = TTTRule(**{**rule.to_dict(), "muon": "lact"}) if combo.endswith("muon1") else rule
        x, weights = language_model_inputs(tensors, case, torch.float32, fixed_rate, combo.startswith("mom1"))
        x = on_device(x)
        out = ttt_attention(**x, rule=with_muon, chunk_size=chunk_size, implementation=implementation, backend="triton")
        exact = f"{case}/{combo}/out_exact_muon" in tensors
        kind, suffix = ("exact_muon", "_exact_muon") if exact else ("no_muon", "")
        for key, t in {"out": out, **gradients(out, x, weights.to(DEVICE))}.items():
            label = f"{case}/{combo}/{key if key == 'out' else f'grad_{key}'}"
            check_stored(label, as_stored(key, t).cpu(), tensors[label + suffix], kind)


def test_training():
    """30 steps of a tiny model have equal losses with both backends."""
    config = tiny_config("variant2", num_lact_heads=1, num_hidden_layers=1, use_muon=False)
    assert (config.rule.update, config.rule.weight_norm, config.use_momentum) == ("last", "none", True)
    torch.manual_seed(0)
    model, ids = LaCTForCausalLM(config).to(DEVICE), token_ids(1, 19).to(DEVICE)
    losses = {}
    for backend in ("torch", "triton"):
        trained = copy.deepcopy(model)
        trained.set_ttt_implementation("parallel", backend=backend)
        optimizer, losses[backend] = torch.optim.AdamW(trained.parameters(), lr=3e-3), []
        for _ in range(30):
            loss = trained(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[backend].append(loss.item())
    assert losses["torch"][-1] < 0.5 * losses["torch"][0]
    torch.testing.assert_close(losses["triton"], losses["torch"], atol=1e-4, rtol=0)


# ---- operators ----


def operator_cases():
    """Each operator with arguments [B·H = 2, N = 2 chunks of 5 and a rest]."""
    random = lambda *shape: torch.randn(*shape, device=DEVICE, requires_grad=True)  # noqa: E731
    for width in (16, 136):
        k, v = random(1, 12, 2, width), random(1, 12, 2, 24)
        w0, w2, states, g = random(2, 32, width), random(2, 32, width), random(2, 3, 24, 32), random(2, 2, 24, 32)
        lr = random(1, 12, 2, 1 if width == 16 else 32)
        yield f"gradient-{width}", features.parallel_gradient, (k, v, lr, w0, w2, 32, 5, 2)
        yield f"gradient-backward-{width}", features._gradient_backward, (g, k, v, lr, w0, w2, 5)
        yield f"read-{width}", features.parallel_read, (k, w0, w2, states, 5)
        yield f"read-backward-{width}", features._read_backward, (v, k, w0, w2, states, 5)
    k, states, g = random(1, 12, 2, 16), random(2, 3, 24, 16), random(2, 2, 24, 16)
    v, m, moments, buffer = random(1, 12, 2, 24), random(2, 2), random(2, 6, 24, 16), random(2, 24, 16)
    yield "gradient-linear", features.parallel_gradient, (k, v, None, None, None, 16, 5, 2)
    yield "gradient-backward-linear", features._gradient_backward, (g, k, v, None, None, None, 5)
    yield "read-linear", features.parallel_read, (k, None, None, states, 5)
    yield "momentum", scan.scan_momentum, (g, m, None, 3)
    yield "momentum-buffer", scan.scan_momentum, (g, m, buffer, 3)
    yield "momentum-backward", scan._momentum_backward, (moments, moments, m, None, 3)
    yield "momentum-backward-buffer", scan._momentum_backward, (moments, moments, m, buffer, 3)
    yield "updates", scan.scan_updates, (moments, buffer, 3, -1)
    yield "updates-backward", scan._updates_backward, (states, 3, -1)


OPERATORS = [pytest.param(*case[1:], id=case[0]) for case in operator_cases()]
ONE_EACH = list({case.values[0]: case for case in reversed(OPERATORS)}.values())


@pytest.mark.parametrize(("operator", "arguments"), OPERATORS)
def test_operators(operator, arguments):
    """Schema and fake implementation; of those that autograd calls also its registration, and tracing with dynamic
    shapes."""
    if "backward" in operator._name:
        arguments = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    else:
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize(("operator", "arguments"), ONE_EACH)
def test_vmap(operator, arguments):
    """Of the first tensor; the others are shared."""
    first, *others = (x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    batched = torch.vmap(lambda x: operator(x, *others), in_dims=1)(torch.stack([first, -2 * first], 1))
    each = operator(first, *others), operator(-2 * first, *others)
    if isinstance(batched, torch.Tensor):
        batched, each = (batched,), [(x,) for x in each]
    assert all(torch.equal(got, torch.stack(want)) for got, *want in zip(batched, *each, strict=True))


def test_only_the_state_is_differentiated():
    """Inputs that the state does not depend on get zero gradients, as from the torch evaluation."""
    x = on_device(make_inputs(LAST, **NARROW, dtype=torch.float32))
    results = []
    for function in (ttt_parallel, ttt_parallel_triton):
        fast = attend(LAST, 5, function, return_state=True)(x)[1]
        results.append(gradients(fast.work[1], x))
    assert torch.equal(results[1]["q"], torch.zeros_like(x["q"]))
    assert_close(results[1], results[0], SAME)


def test_strided_inputs():
    """Views with other strides, and gradients that are expanded."""
    x = make_inputs(LAST, **NARROW, dtype=torch.float32)
    strided = map_inputs(lambda t: t.mT.contiguous().mT, x)
    results = []
    for inputs in (x, strided):
        inputs = on_device(inputs)
        out = attend(LAST, 5)(inputs)
        given = list(inputs.values())
        results.append(torch.autograd.grad(out, given, torch.ones(1, device=DEVICE).expand(out.shape)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_does_not_reach_inside():
    x = on_device(make_inputs(LAST, **WIDE, dtype=torch.float32))
    want = outputs_and_gradients(attend(LAST, 5), x)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = outputs_and_gradients(attend(LAST, 5), x)
    assert all(torch.equal(got[key], t) for key, t in want.items())


def test_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="not exact for this rule: .*set update='last'"):
        attend(TTTRule(), 5)(make_inputs(TTTRule(), **NARROW, dtype=torch.float32))
    x = make_inputs(LAST, **NARROW)
    with pytest.raises(ValueError, match="float64 tensor.*backend='torch'"):
        ttt_attention(**on_device(x), rule=LAST, chunk_size=5, backend="triton")


def test_no_second_derivative():
    x = on_device(make_inputs(LAST, **NARROW, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(attend(LAST, 5)(x).sum(), x["q"], create_graph=True)


@pytest.mark.slow
def test_compile():
    """One graph at two lengths, and its backward, of a rule with all operators."""
    rule = TTTRule(update="last", weight_norm="pre", muon="nvs")
    compiled = torch.compile(attend(rule, 5), backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (17, 23):
        x = on_device(make_inputs(rule, **{**NARROW, "length": length}, dtype=torch.float32))
        results = []
        for function in (attend(rule, 5), compiled):
            out = function(x)  # a compiled backward runs once
            results.append({"out": out, **dict(zip(x, torch.autograd.grad(out.sum(), list(x.values())), strict=True))})
        assert_close(results[1], results[0], SAME)


def test_meta_device():
    x = {key: t.detach().to("meta") for key, t in make_inputs(PRE, **NARROW, dtype=torch.bfloat16).items()}
    out = attend(PRE, 5)(x)
    assert (out.device.type, out.shape, out.dtype) == ("meta", x["v"].shape, torch.bfloat16)


# ---- offsets ----


@jit
def rows_kernel(out, T, H, BT: tl.constexpr):
    tokens = T - BT + tl.arange(0, BT)
    bh = tl.program_id(0).to(tl.int64) + 5 * H + 3
    tl.store(out + tl.arange(0, BT), rows_of(bh, tokens, T, H))


@jit
def copy_kernel(x, out, first, STRIDE: tl.constexpr, BT: tl.constexpr):
    rows, columns = tl.arange(0, BT), tl.arange(0, 16)
    tile = load_tile(x, first + rows, columns, rows < BT, columns < 16, STRIDE)
    store_tile(out, tile, rows, columns, rows < BT, columns < 16, 16)


def test_offsets_beyond_31_bits():
    """Rows of tokens from 2³⁴ on, and a tile whose last row is 2³¹ elements from the first one of its matrix; of that,
    no memory is touched but the tile."""
    length, heads = 2**29, 8
    rows = torch.empty(16, dtype=torch.int64, device=DEVICE)
    rows_kernel[(1,)](rows, length, heads, 16)
    assert torch.equal(rows.cpu(), (5 * length + torch.arange(length - 16, length)) * heads + 3)

    stride = 2**27
    x = torch.empty(2**31 + 16, dtype=torch.int8, device=DEVICE)
    tile = torch.arange(256, device=DEVICE).to(torch.int8).view(16, 16)
    x.as_strided((16, 16), (stride, 1), stride).copy_(tile)
    out = torch.empty_like(tile)
    copy_kernel[(1,)](x, out, 1, stride, 16)
    assert torch.equal(out, tile)
