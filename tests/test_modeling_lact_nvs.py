# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""LaCT-NVS: numbers of the published code, scenes, what a view costs, number types, and errors."""

import copy
import math

import pytest
import torch
from nvs_cases import (
    BLOCK,
    INDEX,
    all_views,
    busy_model,
    cameras,
    config_of,
    golden_inputs,
    golden_state,
    golden_tensors,
    gradients,
    input_views,
    published_config,
    published_schedule,
    target_cameras,
    tiny_config,
    to_double,
    variant_config,
)
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from hf_ttt.configuration_lact_nvs import LaCTNVSConfig
from hf_ttt.modeling_lact_nvs import LaCTNVSModel, from_patches, patches, pixel_rays, to_scene

TOLERANCE = INDEX["tolerance"]
EXACT = {"atol": 1e-10, "rtol": 1e-10}  # float64: 500 times the largest difference measured between two ways, 2e-13
CLOSE = {"atol": 1e-5, "rtol": 0}  # float32 with Muon: twice its own error in the golden models, 5.6e-6
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def flops(function, *args, **kwargs) -> int:
    """Of the products of a call."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


# ---- the published code ----


def check_golden(model, tensors, order, prefix=""):
    """Both ways to the views, loss, gradient norms and projections of the gradients, within the index's tolerances."""
    inputs = {name: value.to(model.dtype) for name, value in golden_inputs(tensors).items()}
    output, size = model(**inputs), inputs["pixel_values"].shape[-2:]
    want = {name: tensors[f"{prefix}{name}_exact_muon"].double() for name in ("rendered", "l2_loss")}
    assert_close(output.rendered.double(), want["rendered"], atol=TOLERANCE["rendered"], rtol=0)
    scene = model.reconstruct(*(inputs[name] for name in ("pixel_values", "intrinsics", "camera_to_world")))
    rendered = model.render(scene, *target_cameras(inputs), size).double()
    want = want | {"path": tensors.get(f"{prefix}rendered_reconstruct_path_exact_muon", want["rendered"]).double()}
    assert_close(rendered, want["path"], atol=TOLERANCE["rendered"], rtol=0)
    assert_close(output.loss.double(), want["l2_loss"][0], atol=TOLERANCE["loss"], rtol=0)
    output.loss.backward()
    grads = gradients(model)
    assert list(grads) == order
    norms, projections = (tensors[f"{prefix}{kind}_exact_muon"].double() for kind in ("grad_norms", "grad_cosproj"))
    for name, norm, projection in zip(order, norms, projections, strict=True):
        grad, bound = grads[name].double().flatten(), TOLERANCE["grad_norm_rel"][str(model.dtype)] * norm.item() + 1e-12
        assert abs(grad.norm().item() - norm.item()) <= bound, name
        cosines = torch.cos(0.37 * torch.arange(grad.numel(), dtype=torch.float64) + 0.1)
        assert abs((grad @ cosines).item() - projection.item()) <= bound, name


def published_model(file, **fields):
    model, tensors = LaCTNVSModel(config_of(published_config(file), **fields)), golden_tensors(file)
    model.load_state_dict(golden_state(tensors), strict=True)
    return model, tensors


@by_dtype
@pytest.mark.parametrize("file", INDEX["models"])
def test_published_model(file, dtype):
    """Views by both paths, loss and gradients of a published model, with exact Muon."""
    model, tensors = published_model(file)
    check_golden(model.to(dtype), tensors, INDEX["models"][file]["grad_param_order"])


@by_dtype
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        (name, implementation)
        for name in INDEX["variants"]["variants"]
        for implementation in ("recurrent", "parallel")
        if implementation == "recurrent" or config_of(variant_config(name)).rule.parallelizable
    ],
)
def test_published_variant(name, implementation, dtype):
    """The same of every published variant of the inner loop."""
    tensors, case = golden_tensors(INDEX["variants"]["file"]), INDEX["variants"]["variants"][name]
    model = LaCTNVSModel(config_of(variant_config(name)))
    model.load_state_dict(golden_state(tensors, case["no_query"]), strict=True)
    model.set_ttt_implementation(implementation)
    check_golden(model.to(dtype), tensors, INDEX["variants"]["grad_param_order"], f"variant/{name}/")


@pytest.mark.parametrize("file", INDEX["models"])
def test_published_muon_in_bfloat16(file):
    """As published. Only the loss can be compared: rounding differs between kernels and is amplified by hundreds."""
    model, tensors = published_model(file, ttt_muon_dtype="bfloat16")
    output = model(**golden_inputs(tensors))
    assert_close(output.loss, tensors["l2_loss"][0], atol=TOLERANCE["loss_bfloat16"], rtol=0)
    output.loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


@pytest.mark.parametrize("file", INDEX["models"])
def test_published_rays(file):
    """Origin and direction of every pixel of the target views."""
    tensors = golden_tensors(file)
    intrinsics, pose = target_cameras(golden_inputs(tensors))
    rays = pixel_rays(intrinsics, pose, *tensors["target/image"].shape[-2:])
    for got, name in zip(rays, ("target_ray_o", "target_ray_d"), strict=True):
        assert_close(got.permute(0, 1, 4, 2, 3), tensors[name], atol=TOLERANCE["ray"], rtol=0)


@pytest.mark.parametrize(
    ("size", "millions"), [("l12_ttt1x", 135.3), ("l14_ttt2x", 182.5), ("l24_ttt2x", 312.3), ("l24_ttt4x", 397.2)]
)
def test_published_sizes(size, millions):
    """The published numbers of parameters."""
    with torch.device("meta"):
        model = LaCTNVSModel(LaCTNVSConfig.size(size))
    assert round(model.num_parameters() / 1e6, 1) == millions


# ---- scenes ----


def test_forward_is_reconstruct_and_render():
    """All target views at once, or one at a time, from a scene in memory."""
    model, inputs = busy_model(tiny_config()), all_views()
    with torch.no_grad():
        want = model(**inputs).rendered
        scene = model.reconstruct(**input_views())
        intrinsics, pose = target_cameras(inputs)
        assert_close(model.render(scene, intrinsics, pose, (12, 16)), want, **CLOSE)
        for i in range(2):
            view = model.render(scene, intrinsics[:, i : i + 1], pose[:, i : i + 1], (12, 16))
            assert_close(view, want[:, i : i + 1], **CLOSE)
    assert want.shape == (2, 2, 3, 12, 16) and 0 < want.min() < want.max() < 1 and want.std() > 0.05


def test_gradients_flow_through_a_scene():
    """A loss on rendered views trains what made the scene; a detached scene trains the rendering alone."""
    model, inputs = busy_model(tiny_config()).double(), to_double(all_views())
    model(**inputs).loss.backward()
    want = {name: grad.clone() for name, grad in gradients(model).items()}

    def train(scene):
        model.zero_grad()
        rendered = model.render(scene, *target_cameras(inputs), (12, 16))
        (rendered - inputs["target_pixel_values"]).square().mean().backward()
        return gradients(model)

    given = {name: value for name, value in inputs.items() if not name.startswith("target_")}
    assert_close(train(model.reconstruct(**given)), want, **EXACT)
    grads = train(model.reconstruct(**given).detach())
    assert all(grads[f"blocks.0.module_list.1.f.{name}"] is None for name in ("w0", "w1", "w2", "lr_fc.weight"))
    assert grads["input_linear.weight"].abs().max() > 0


def test_inference_changes_nothing():
    """LaCT #7: the updated fast weights are the scene's; the parameters and the next call's views stay as they are."""
    model, inputs = busy_model(tiny_config(ttt_inner_steps=2)), all_views()
    state = copy.deepcopy(model.state_dict())
    first = model(**inputs).rendered
    scene = model.reconstruct(**input_views(seed=5))
    before = [w.clone() for one in scene.states for w in one.weights]
    model.render(scene, *target_cameras(inputs), (12, 16))
    assert all(torch.equal(w, old) for w, old in zip((w for s in scene.states for w in s.weights), before, strict=True))
    assert torch.equal(model(**inputs).rendered, first)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_order_of_the_input_views_does_not_matter():
    """A scene is what a sum over all tokens makes it."""
    model, given = busy_model(tiny_config()).double(), to_double(input_views(views=4))
    order = torch.tensor([2, 0, 3, 1])
    scenes = [model.reconstruct(**some) for some in (given, {name: t[:, order] for name, t in given.items()})]
    for a, b in zip(*(scene.states for scene in scenes), strict=True):
        assert_close(a.weights, b.weights, **EXACT)


@pytest.mark.parametrize("views", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize("targets", [1, 2, 3])
def test_other_resolutions_and_numbers_of_views(views, targets):
    """LaCT #8: other numbers of input and target views, images that are not square, views of another size."""
    model, inputs = busy_model(tiny_config()), all_views(views=views, targets=targets, height=16, width=24)
    with torch.no_grad():
        assert model(**inputs).rendered.shape == (2, targets, 3, 16, 24)
        scene = model.reconstruct(**input_views(views=views, height=16, width=24))
        for size in ((8, 24), (24, 8), (4, 4)):
            view = model.render(scene, *cameras(2, targets, *size).values(), size)
            assert view.shape == (2, targets, 3, *size) and view.isfinite().all()
        del inputs["target_pixel_values"]
        inputs |= {f"target_{name}": value for name, value in cameras(2, targets, 8, 12).items()}
        rendered = model(**inputs, size=(8, 12)).rendered
        assert_close(rendered, model.render(scene, *target_cameras(inputs), (8, 12)), **CLOSE)


def test_intrinsics_as_matrices():
    """3×3 matrices give what four numbers give."""
    model, inputs = busy_model(tiny_config()), all_views()
    matrices = dict(inputs)
    for name in ("intrinsics", "target_intrinsics"):
        fx, fy, cx, cy = inputs[name].unbind(-1)
        zero, one = torch.zeros_like(fx), torch.ones_like(fx)
        matrices[name] = torch.stack([fx, zero, cx, zero, fy, cy, zero, zero, one], -1).unflatten(-1, (3, 3))
    with torch.no_grad():
        assert torch.equal(model(**matrices).rendered, model(**inputs).rendered)


def test_height_and_width_are_not_swapped():
    """The published turntable gave a renderer width for height: the ray of row 1, column 6 of a wide image."""
    intrinsics = torch.tensor([[[10.0, 20.0, 3.0, 2.0]]])
    _, directions = pixel_rays(intrinsics, torch.eye(4)[None, None], 4, 8)
    assert directions.shape == (1, 1, 4, 8, 3)
    want = torch.tensor([(6.5 - 3) / 10, (1.5 - 2) / 20, 1])
    assert_close(directions[0, 0, 1, 6], want / want.norm())
    assert_close(directions.norm(dim=-1), torch.ones(1, 1, 4, 8))


def test_skewed_pixels():
    """K · direction is the pixel's centre, also where K has a skew."""
    k = torch.tensor([[10.0, 0.7, 3.0], [0, 20.0, 2.0], [0, 0, 1]])
    _, directions = pixel_rays(k[None, None], torch.eye(4)[None, None], 4, 8)
    projected = directions[0, 0, 1, 6] @ k.T
    assert_close(projected[:2] / projected[2], torch.tensor([6.5, 1.5]))


def test_rays_are_not_rounded():
    """On a GPU with TF32, as Trainer's tf32=True sets it, a matrix product has three digits, and rays were off by a
    pixel: they, and cameras on their way into a scene, are computed without one. The numbers are those of products."""
    given, own = cameras(2, 3, 12, 16), cameras(2, 1, 12, 16, 7)["camera_to_world"][:, 0]
    pose = given["camera_to_world"]
    assert flops(to_scene, pose, own, torch.ones(2)) == flops(pixel_rays, *given.values(), 12, 16) == 0
    assert_close(to_scene(pose, own, None), own[:, None] @ pose)
    _, directions = pixel_rays(given["intrinsics"], pose, 12, 16)
    _, local = pixel_rays(given["intrinsics"], torch.eye(4).expand(2, 3, 4, 4), 12, 16)
    assert_close(directions, torch.einsum("bvij,bvhwj->bvhwi", pose[..., :3, :3], local))


def test_patches():
    """Patches row by row, pixels of a patch row by row, channels last; and back."""
    x = torch.arange(2 * 3 * 8 * 12 * 3).view(2, 3, 8, 12, 3)
    tokens = patches(x, 4)
    assert tokens.shape == (2, 3, 6, 48)
    assert torch.equal(tokens[1, 2, 4], x[1, 2, 4:8, 4:8].flatten())
    assert torch.equal(from_patches(tokens, 4, 8, 12), x.movedim(-1, 2))


# ---- what it costs ----


def test_a_view_costs_the_same_after_any_number_of_input_views():
    """Products of rendering one view, and bytes of the scene, after 2 and 32 input views."""
    model, camera = busy_model(tiny_config(attn_implementation="eager")), cameras(1, 1, 12, 16)
    costs, sizes = [], []
    for views in (2, 32):
        scene = model.reconstruct(**input_views(batch=1, views=views)).detach()
        costs.append(flops(model.render, scene, *camera.values(), (12, 16)))
        sizes.append(sum(t.nbytes for state in scene.states for t in state.tensors().values()))
    assert costs[0] == costs[1] > 0
    assert sizes[0] == sizes[1] == 4 * 2 * 3 * 2 * 12 * 12  # layers, w0 w1 w2, heads


def test_tokens_that_nobody_reads_are_not_computed():
    """The published code computes the last block's input tokens to the end, and keys, values and rates of target
    tokens; here neither, with the same numbers."""
    model, inputs = busy_model(tiny_config(attn_implementation="eager")), all_views(views=3, targets=2)
    with torch.no_grad():
        assert_close(model(**inputs).rendered, published_schedule(model, inputs), **CLOSE)
    batch, given, targets = 2, 3 * 12, 2 * 12
    width, heads, head, blocks = 24, 2, 12, 2
    unread = width**2 + 3 * heads * head**2 + width**2 + 2 * (2 * width) * width  # query, reading, c_proj, MLP
    unused = 2 * width**2 + 3 * heads * width  # key and value, rates
    saved = 2 * batch * (given * unread + blocks * targets * unused)
    assert flops(published_schedule, model, inputs) - flops(model, **inputs) == saved


def test_blocks_in_another_order():
    """With two TTT layers in a block, one of them last: the same as the published schedule."""
    block = [BLOCK[1], BLOCK[0], BLOCK[2], {**BLOCK[1], "head_dim": None}]
    model, inputs = busy_model(tiny_config(block_config=block)), all_views()
    scene = model.reconstruct(**input_views())
    assert [state.w1.shape[1] for state in scene.states] == [2, 1, 2, 1]
    with torch.no_grad():
        assert_close(model(**inputs).rendered, published_schedule(model, inputs), **CLOSE)


def test_nothing_is_printed(capfd):
    """The published code printed a line for each layer and sample."""
    busy_model(tiny_config())(**all_views())
    assert capfd.readouterr() == ("", "")


# ---- number types ----


@pytest.mark.parametrize("rule", ["baseline", "variant4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_one_type(dtype, rule):
    """Whole models in bfloat16 and float64 crashed at the rates; they run, forward and backward."""
    model, inputs = busy_model(tiny_config(rule)), all_views()
    want = model(**inputs).loss.item()
    output = model.to(dtype)(**inputs)
    assert output.rendered.dtype == dtype
    assert output.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert output.loss.item() == pytest.approx(want, rel=0.1 if dtype == torch.bfloat16 else 1e-4)
    output.loss.backward()
    assert all(grad.isfinite().all() and grad.dtype == dtype for grad in gradients(model).values())


def test_fast_weights_and_rates_stay_float32(tmp_path):
    """Of a model loaded in bfloat16: rates of 0.01 ± 0.00004 would be rounded to one value, as updates would."""
    busy_model(tiny_config()).save_pretrained(tmp_path)
    model = LaCTNVSModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name.rsplit(".")[-1] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"w0", "w1", "w2"} and model.input_linear.weight.dtype == torch.bfloat16
    layer, x = model.blocks[0].module_list[1].f, torch.randn(2, 5, 24).bfloat16()
    k, v, *rates = layer.tokens(x)
    assert {k.dtype, v.dtype} == {torch.bfloat16} and {rate.dtype for rate in rates} == {torch.float32}
    linear = x.double() @ layer.lr_fc.weight.double().T + layer.lr_fc.bias.double()
    want = nn.functional.softplus(linear + math.log(math.expm1(0.01))).unflatten(-1, (3, 2, 1)).unbind(2)
    for got, expected in zip(rates, want, strict=True):
        assert_close(got.double(), expected, atol=1e-7, rtol=1e-5)
    with torch.no_grad():
        assert model(**all_views()).rendered.dtype == torch.bfloat16
        assert {w.dtype for state in model.reconstruct(**input_views()).states for w in state.weights} == {
            torch.float32
        }


def test_autocast():
    """Products in bfloat16, states and loss in float32, gradients near those of float32."""
    model, inputs = busy_model(tiny_config("variant6")), all_views()
    model(**inputs).loss.backward()
    want, loss = gradients(model), model(**inputs).loss.item()
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**inputs)
        scene = model.reconstruct(**input_views())
    output.loss.backward()
    assert output.rendered.dtype == torch.bfloat16 and output.loss.dtype == torch.float32
    assert all(w.dtype == torch.float32 for state in scene.states for w in state.weights)
    assert output.loss.item() == pytest.approx(loss, rel=0.02)
    got, want = (torch.cat([g.flatten() for g in grads.values()]) for grads in (gradients(model), want))
    assert torch.cosine_similarity(got, want, 0) > 0.99


def test_meta_tensors():
    """Shapes without values: no part of the model may look at numbers."""
    model = LaCTNVSModel(tiny_config()).to("meta")
    output = model(**{name: value.to("meta") for name, value in all_views().items()})
    assert output.rendered.shape == (2, 2, 3, 12, 16) and output.loss.is_meta
    output.loss.backward()


# ---- construction ----


def test_initialisation():
    """Linear weights N(0, 0.02²), those back into the hidden states smaller by √6, fast weights √2 / √fan-in."""
    torch.manual_seed(0)
    block = [BLOCK[0], {"type": "ttt", "inter_multi": 2}, BLOCK[2]]
    model = LaCTNVSModel(tiny_config(hidden_size=96, block_config=block))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = 0.02 / math.sqrt(6) if name.endswith("c_proj") else 0.02
            assert module.weight.std().item() == pytest.approx(std, rel=0.1), name
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            assert (module.weight == 1).all()
        elif name.endswith(".1.f"):
            for w, fan_in in ((module.w0, 96), (module.w1, 192), (module.w2, 96)):
                assert w.shape[-2] == fan_in and w.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.05)


def test_initial_rates_are_the_base_rate():
    """With zero weights and biases of the rates."""
    layer = LaCTNVSModel(tiny_config(base_lr=0.3)).blocks[0].module_list[1].f
    nn.init.zeros_(layer.lr_fc.weight)
    for rate in layer.tokens(torch.randn(2, 5, 24))[2:]:
        assert_close(rate, torch.full_like(rate, 0.3))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention):
    """Both give the same views, and only within an image: the last block's attention sees no other view."""
    model = busy_model(tiny_config(attn_implementation=attention)).double()
    reference = busy_model(tiny_config(attn_implementation="sdpa")).double()
    inputs = to_double(all_views())
    assert_close(model(**inputs).rendered, reference(**inputs).rendered, **EXACT)
    layer, x = model.blocks[0].module_list[0].f, torch.randn(2, 3, 12, 24, dtype=torch.float64)
    assert_close(layer(x), torch.stack([layer(x[:, i : i + 1])[:, 0] for i in range(3)], 1), **EXACT)


def test_save_and_load(tmp_path):
    """The published code could not be saved by transformers 5; and arguments of loading win over what was saved."""
    model, inputs = busy_model(tiny_config("variant2", ttt_implementation="parallel")), all_views()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert state.keys() == model.state_dict().keys()
    loaded = LaCTNVSModel.from_pretrained(tmp_path)
    assert loaded.get_ttt_implementation() == "parallel"
    other = LaCTNVSModel.from_pretrained(tmp_path, ttt_implementation="recurrent")
    assert other.get_ttt_implementation() == "recurrent"
    with torch.no_grad():
        for again in (loaded, other):
            assert_close(again(**inputs).rendered, model(**inputs).rendered, **CLOSE)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_offloaded_weights(offload, tmp_path):
    """accelerate brings weights when their module is called: those that were used past the call were not there."""
    accelerate = pytest.importorskip("accelerate", reason="it offloads the weights")
    model, inputs = busy_model(tiny_config("variant2")), all_views()
    with torch.no_grad():
        want = model(**inputs).rendered
        model.reconstruct(**input_views()).save(tmp_path / "scene.safetensors")
        folder = [tmp_path / "weights"] if offload == "disk_offload" else []
        getattr(accelerate, offload)(model, *folder, execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in model.parameters())
        assert_close(model(**inputs).rendered, want, **CLOSE)
        scene = model.load_scene(tmp_path / "scene.safetensors")
        assert_close(model.render(scene, *target_cameras(inputs), (12, 16)), want, **CLOSE)


def test_compiled():
    """One graph without breaks, with the same views, and gradients."""
    model, inputs = busy_model(tiny_config("variant6", num_hidden_layers=1)), all_views()
    output = torch.compile(model, fullgraph=True, backend="eager")(**inputs)
    assert_close(output.rendered, model(**inputs).rendered, **CLOSE)
    output.loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


def test_output_as_tuple():
    """Loss and views; without target images the views alone."""
    model, inputs = busy_model(tiny_config()), all_views()
    output = model(**inputs)
    loss, rendered = model(**inputs, return_dict=False)
    assert torch.equal(loss, output.loss) and torch.equal(rendered, output.rendered)
    assert_close(loss, (rendered - inputs.pop("target_pixel_values")).square().mean())
    output = model(**inputs)
    assert output.loss is None and torch.equal(output.rendered, rendered)


# ---- errors ----


def cut(inputs, name, *shape):
    return inputs | {name: torch.zeros(shape)}


BAD_INPUTS = {  # what is wrong → how inputs of forward become so, and what is said
    "rank": (
        lambda x: cut(x, "pixel_values", 3, 3, 12, 16),
        r"pixel_values has shape \[3, 3, 12, 16\]; expected \[batch, views, 3, height, width\] with at least one ",
    ),
    "no scenes": (lambda x: cut(x, "pixel_values", 0, 3, 3, 12, 16), r"pixel_values has shape \[0, 3, 3, 12, 16\]"),
    "no views": (lambda x: cut(x, "pixel_values", 2, 0, 3, 12, 16), r"pixel_values has shape \[2, 0, 3, 12, 16\]"),
    "alpha": (lambda x: cut(x, "pixel_values", 2, 3, 4, 12, 16), r"pixel_values has shape \[2, 3, 4, 12, 16\]"),
    "integers": (
        lambda x: x | {"pixel_values": torch.zeros(2, 3, 3, 12, 16, dtype=torch.uint8)},
        r"pixel_values has dtype torch.uint8; expected floating-point colours in \[0, 1\]",
    ),
    "height": (
        lambda x: cut(x, "pixel_values", 2, 3, 3, 13, 16),
        "pixel_values has height 13 and width 16, which must be multiples of patch_size=4.*LaCTNVSProcessor",
    ),
    "width": (lambda x: cut(x, "pixel_values", 2, 3, 3, 12, 15), "pixel_values has height 12 and width 15"),
    "small": (lambda x: cut(x, "pixel_values", 2, 3, 3, 0, 16), "pixel_values has height 0 and width 16"),
    "poses": (
        lambda x: cut(x, "camera_to_world", 2, 2, 4, 4),
        r"^camera_to_world has shape \[2, 2, 4, 4\]; expected \[2, 3, 4, 4\], a pose for each view",
    ),
    "pose": (
        lambda x: cut(x, "camera_to_world", 2, 3, 3, 4),
        r"^camera_to_world has shape \[2, 3, 3, 4\]; expected \[2, 3, 4, 4\]",
    ),
    "intrinsics": (
        lambda x: cut(x, "intrinsics", 2, 3, 5),
        r"^intrinsics has shape \[2, 3, 5\]; expected \[2, 3, 4\] \(fx, fy, cx, cy in pixels\) or \[2, 3, 3, 3\]",
    ),
    "target poses": (
        lambda x: cut(x, "target_camera_to_world", 1, 2, 4, 4),
        r"^target_camera_to_world has shape \[1, 2, 4, 4\]; expected \[2, 2, 4, 4\]",
    ),
    "no target views": (  # the published code's zero target views selected all views
        lambda x: cut(x, "target_camera_to_world", 2, 0, 4, 4),
        r"^target_camera_to_world has shape \[2, 0, 4, 4\]; expected \[2, views, 4, 4\].* at least one",
    ),
    "target pose": (
        lambda x: cut(x, "target_camera_to_world", 4, 4),
        r"^target_camera_to_world has shape \[4, 4\]; expected \[2, views, 4, 4\]",
    ),
    "target intrinsics": (
        lambda x: cut(x, "target_intrinsics", 2, 3, 4),
        r"^target_intrinsics has shape \[2, 3, 4\]; expected \[2, 2, 4\]",
    ),
    "target images": (
        lambda x: cut(x, "target_pixel_values", 2, 3, 3, 12, 16),
        r"target_pixel_values has shape \[2, 3, 3, 12, 16\] where target_camera_to_world and size give "
        r"\[2, 2, 3, 12, 16\]",
    ),
    "target size": (
        lambda x: x | {"size": (8, 16)},
        r"target_pixel_values has shape \[2, 2, 3, 12, 16\] where .* give \[2, 2, 3, 8, 16\]",
    ),
    "target height": (
        lambda x: cut(x, "target_pixel_values", 2, 2, 3, 10, 16),
        "target_pixel_values has height 10 and width 16",
    ),
    "transform": (
        lambda x: cut(x, "world_to_scene", 4, 4),
        r"world_to_scene has shape \[4, 4\]; expected \[2, 4, 4\]",
    ),
    "scale": (lambda x: cut(x, "scene_scale", 2, 1), r"scene_scale has shape \[2, 1\]; expected \[2\]"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_inputs_that_do_not_fit(case):
    """An error names the argument, what came, and what would do."""
    change, message = BAD_INPUTS[case]
    with pytest.raises(ValueError, match=message):
        busy_model(tiny_config())(**change(all_views()))


def test_what_cannot_be_rendered():
    """Cameras of another batch, sizes that patches do not fill, scenes of another model."""
    model = busy_model(tiny_config())
    scene, (intrinsics, pose) = model.reconstruct(**input_views()), cameras(2, 1, 12, 16).values()
    for size, message in (
        ((12, 15), "size has height 12 and width 15, which must be multiples of patch_size=4"),
        ((12.0, 16.0), r"size=\(12.0, 16.0\) must be \(height, width\), two integers"),
        (12, r"size=12 must be \(height, width\)"),
        ((12, 16, 3), r"size=\(12, 16, 3\) must be \(height, width\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model.render(scene, intrinsics, pose, size)
    with pytest.raises(ValueError, match=r"^camera_to_world has shape \[1, 1, 4, 4\]; expected \[2, 1, 4, 4\]"):
        model.render(scene, intrinsics[:1], pose[:1], (12, 16))
    with pytest.raises(ValueError, match=r"^intrinsics has shape \[2, 2, 4\]; expected \[2, 1, 4\]"):
        model.render(scene, intrinsics.repeat(1, 2, 1), pose, (12, 16))
    deeper = busy_model(tiny_config(num_hidden_layers=3))
    with pytest.raises(ValueError, match="scene has 2 states where this model has 3 TTT layers"):
        deeper.render(scene, intrinsics, pose, (12, 16))
    hidden = busy_model(tiny_config(block_config=[BLOCK[0], {**BLOCK[1], "inter_multi": 2}, BLOCK[2]]))
    with pytest.raises(ValueError, match=r"scene has w1 of shape \[2, 12, 12\] in state 0 .* model has \[2, 12, 24\]"):
        hidden.render(scene, intrinsics, pose, (12, 16))


def test_parallel_where_it_is_not_exact():
    """Refused when it is set and when the model is built, with the field to change."""
    with pytest.raises(ValueError, match="'parallel' is not exact for this rule: .*ttt_update in a model's config"):
        LaCTNVSModel(tiny_config(ttt_implementation="parallel"))
    model = LaCTNVSModel(tiny_config())
    with pytest.raises(ValueError, match="'parallel' is not exact"):
        model.set_ttt_implementation("parallel")
    assert model.get_ttt_implementation() == "recurrent"
