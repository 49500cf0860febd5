# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The kernels of the Newton–Schulz iteration against its torch evaluation in float64; interpreted without a GPU.

Errors are ‖got − want‖ / ‖want‖. What rounding does to this problem is the error of the torch evaluation in the same
type, the greatest of 8 draws; that of the kernels is at most FACTOR times as great.
"""

from functools import partial

import pytest
import torch
from ttt_cases import poisoned_allocations

from hf_ttt import TTTRule
from hf_ttt.ttt_muon import muon_backward, muon_forward

pytest.importorskip("triton", reason="there is no Triton for this platform")

from hf_ttt import ttt_triton_muon as kernels  # noqa: E402
from hf_ttt.ttt_triton_muon import muon_backward_triton, muon_forward_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTOR = 1.5  # measured: at most 1.2, and mostly less than 1 in bfloat16
SHAPES = [(3, 17, 17), (1, 48, 16), (1, 16, 48), (1, 5, 3), (1, 1, 7), (2, 64, 33), (1, 96, 128), (1, 72, 48)]


def rule_of(muon="lact", steps=5, dtype="float32"):
    return TTTRule(muon=muon, muon_steps=steps, muon_dtype=dtype)


RULES = [rule_of(m, n, dtype) for dtype in ("float32", "bfloat16") for m, n in (("lact", 5), ("nvs", 5), ("nvs", 1))]
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.muon}{r.muon_steps}-{r.muon_dtype}")


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def both(forward, backward, g, grad, rule):
    return {"out": forward(g, rule), "grad": backward(g, grad, rule)}


by_torch = partial(both, muon_forward, muon_backward)
by_kernels = partial(both, muon_forward_triton, muon_backward_triton)


def error(got, want):
    assert got.shape == want.shape
    return ((got.cpu().double() - want).norm() / want.norm()).item()


def exact(g, grad, rule):
    return by_torch(g.double(), grad.double(), rule_of(rule.muon, rule.muon_steps))


def torch_errors(shape, rule):
    """Of both results, the greatest of 8 draws."""
    errors = {"out": 2**-24, "grad": 2**-24}
    for seed in range(8):
        g, grad = random(shape, 2 * seed), random(shape, 2 * seed + 1)
        got, want = by_torch(g, grad, rule), exact(g, grad, rule)
        errors = {name: max(e, error(got[name], want[name])) for name, e in errors.items()}
    return errors


@by_rule
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_as_near_as_torch(shape, rule):
    """Odd, wide and tall states; the greatest are evaluated by products, in bfloat16 only in the backward."""
    g, grad = random(shape), random(shape, 1)
    with poisoned_allocations():
        got = by_kernels(g.to(DEVICE), grad.to(DEVICE), rule)
    want = exact(g, grad, rule)
    for name, limit in torch_errors(shape, rule).items():
        assert got[name].dtype == torch.float32 and got[name].is_contiguous()
        ratio = error(got[name], want[name]) / limit
        print(f"{name}: {ratio:.2f} of the error of torch, {limit:.1e}")
        assert ratio <= FACTOR, f"{name}: {ratio:.2f} times the error of torch, {limit:.1e}"


@pytest.mark.parametrize(
    ("dtype", "shape", "forward", "backward"),
    [
        ("float32", (2, 64, 64), True, True),
        ("float32", (2, 16, 65), False, False),
        ("bfloat16", (2, 64, 64), True, True),
        ("bfloat16", (2, 128, 1), True, False),
        ("bfloat16", (2, 1, 129), False, False),
    ],
)
def test_which_states_a_program_holds(dtype, shape, forward, backward):
    g, rule = torch.empty(shape), rule_of(dtype=dtype)
    assert (kernels._fits(g, rule, False), kernels._fits(g, rule, True)) == (forward, backward)


@by_rule
def test_zeros(rule):
    """A matrix of zeros stays zero, and the norm's gradient there is finite: what torch gives, beside another state."""
    g, grad = random((2, 5, 6)), random((2, 5, 6), 1)
    g[0] = 0
    got = by_kernels(g.to(DEVICE), grad.to(DEVICE), rule)
    assert got["out"][0].count_nonzero() == 0
    want = exact(g[:1], grad[:1], rule)["grad"]
    unit = torch.finfo(getattr(torch, rule.muon_dtype)).eps / 2
    assert error(got["grad"][:1], want) < (rule.muon_steps + 3) * unit  # a rounding for each product that is left
    assert got["grad"][1].isfinite().all()


def test_no_steps():
    """Only the division by the norm, and its gradient."""
    rule, g, grad = rule_of("nvs", 0), random((2, 17, 5)), random((2, 17, 5), 1)
    got, want = by_kernels(g.to(DEVICE), grad.to(DEVICE), rule), exact(g, grad, rule)
    assert max(error(got[name], want[name]) for name in want) < 4 * 2**-24


def test_without_muon_nothing_happens():
    g = random((2, 4, 6))
    assert muon_forward_triton(g, TTTRule()) is g
    assert muon_backward_triton(g, g, TTTRule()) is g


@pytest.mark.parametrize("shape", [(0, 17, 5), (0, 200, 5), (2, 0, 5), (2, 5, 0)], ids=str)
def test_no_elements(shape):
    g = torch.empty(shape, device=DEVICE)
    for result in by_kernels(g, g, rule_of()).values():
        assert result.shape == shape


@pytest.mark.parametrize("rule", [rule_of(), rule_of(dtype="bfloat16")], ids=["float32", "bfloat16"])
def test_states_do_not_depend_on_each_other(rule):
    """Bit by bit the same alone and among others, whose programs may run in any order."""
    g, grad = (x.to(DEVICE) for x in (random((3, 20, 33)), random((3, 20, 33), 1)))
    together = by_kernels(g, grad, rule)
    alone = [by_kernels(x[None], y[None], rule) for x, y in zip(g.flip(0), grad.flip(0), strict=True)]
    for name, result in together.items():
        assert torch.equal(result.flip(0), torch.cat([one[name] for one in alone])), name


def test_strided_states():
    """A transposed view, and a gradient that is expanded."""
    g = random((2, 33, 20)).to(DEVICE)
    grad = torch.full((1, 1, 1), 0.5, device=DEVICE).expand(2, 20, 33)
    got, want = by_kernels(g.mT, grad, rule_of()), by_kernels(g.mT.contiguous(), grad.contiguous(), rule_of())
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("width", [20, 80])
def test_autograd(width):
    """The gradient is that of `muon_backward_triton`; autocast reaches neither."""
    g, grad = (x.to(DEVICE) for x in (random((2, width, 17)), random((2, width, 17), 1)))
    want = by_kernels(g, grad, rule_of())
    g.requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = muon_forward_triton(g, rule_of())
        (dg,) = torch.autograd.grad(out, g, grad)
    assert torch.equal(out, want["out"]) and torch.equal(dg, want["grad"])


def test_no_second_derivative():
    g = random((1, 4, 5)).to(DEVICE).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(muon_forward_triton(g, rule_of("nvs", 1)).sum(), g, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types_are_refused(dtype):
    g = random((1, 4, 5)).to(dtype)
    with pytest.raises(ValueError, match=f"float32.*{dtype}.*backend='torch'"):
        muon_forward_triton(g, rule_of())
    with pytest.raises(ValueError, match=f"float32.*{dtype}.*backend='torch'"):
        muon_backward_triton(g.float(), g, rule_of())


@pytest.mark.parametrize("shape", [(2, 17, 5), (2, 5, 70)], ids=str)
def test_operators(shape):
    """Schema, fake implementation, registration for autograd, and tracing with dynamic shapes."""
    g, grad, fields = random(shape).to(DEVICE), random(shape, 1).to(DEVICE), ("nvs", 1, "float32")
    torch.library.opcheck(kernels._muon, (g.clone().requires_grad_(), *fields))
    torch.library.opcheck(kernels._muon_backward, (g, grad, *fields))


def test_vmap():
    """Over states and their gradients, and over gradients alone."""
    rule, g, grad = rule_of("nvs", 1), random((2, 3, 4, 5)).to(DEVICE), random((2, 3, 4, 5), 1).to(DEVICE)
    out = torch.vmap(lambda x: muon_forward_triton(x, rule), 1, 1)(g)
    assert torch.equal(out, muon_forward_triton(g.flatten(0, 1), rule).view(g.shape))
    dg = torch.vmap(lambda y: muon_backward_triton(g[0], y, rule))(grad)
    assert torch.equal(dg, torch.stack([muon_backward_triton(g[0], y, rule) for y in grad]))


def test_meta_device():
    g = torch.empty(2, 17, 5, device="meta", requires_grad=True)
    out = muon_forward_triton(g, rule_of())
    (dg,) = torch.autograd.grad(out.sum(), g)
    assert (out.device.type, out.shape, dg.shape) == ("meta", g.shape, g.shape)


@pytest.mark.slow
def test_compile():
    """One graph for any number of states, and its backward."""
    rule = rule_of("nvs", 1)
    compiled = torch.compile(lambda x: muon_forward_triton(x, rule), backend="aot_eager", fullgraph=True, dynamic=True)
    for states in (2, 3):
        g, grad = (x.to(DEVICE) for x in (random((states, 17, 5)), random((states, 17, 5), 1)))
        g.requires_grad_()
        out = compiled(g)
        (dg,) = torch.autograd.grad(out, g, grad)
        want = by_kernels(g.detach(), grad, rule)
        assert torch.equal(out, want["out"]) and torch.equal(dg, want["grad"])
