# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Tiny LaCT-NVS configurations, models and posed images that the tests share, and the published schedule."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from hf_ttt.configuration_lact_nvs import LaCTNVSConfig
from hf_ttt.modeling_lact_nvs import LaCTNVSFastWeight, LaCTNVSModel, from_patches
from hf_ttt.ttt_ops import ttt_read, ttt_update

GOLDEN = Path(__file__).with_name("golden") / "lact"
INDEX = json.loads((GOLDEN / "nvs.json").read_text())
VARIANTS = ("baseline", "variant1", "variant2", "variant3", "variant4", "variant5", "variant6")
OTHER_RULES = {  # what no variant of the paper has
    "ascent": {"ttt_direction": "ascent"},
    "no_query": {"ttt_read_with": "key"},
    "mse": {"ttt_loss_type": "mse"},
    "prenorm": {"ttt_weight_norm": "pre"},
    "prenorm_last": {"ttt_weight_norm": "pre", "ttt_update": "last"},
    "two_steps": {"ttt_inner_steps": 2},
    "fixed_rate": {"ttt_learnable_lr": False},
    "no_muon_steps": {"muon_update_steps": 0},
}
RULES = (*VARIANTS, *OTHER_RULES)
BLOCK = [
    {"type": "attention", "head_dim": 8, "use_qk_norm": True},
    {"type": "ttt", "head_dim": 12, "inter_multi": 1},
    {"type": "mlp", "inter_multi": 2},
]
TINY = {"patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "block_config": BLOCK}


def tiny_config(rule: str = "baseline", **fields) -> LaCTNVSConfig:
    """Two blocks, patches of 4, two fast heads; `rule` is a variant of the paper or one of `OTHER_RULES`."""
    if rule in OTHER_RULES:
        return LaCTNVSConfig(**{**TINY, **OTHER_RULES[rule], **fields})
    return LaCTNVSConfig.variant(rule, **{**TINY, **fields})


def busy_model(config: LaCTNVSConfig, seed: int = 0, **arguments) -> LaCTNVSModel:
    """A model in evaluation in which every part matters: larger weights than fresh ones, norms other than one."""
    torch.manual_seed(seed)
    model = LaCTNVSModel(config, **arguments)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.2))
            if name.endswith("lr_fc.bias"):
                parameter.add_(2)
    return model.eval()


def cameras(batch: int, views: int, height: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    """Cameras around the origin that look at it, with focal lengths that differ and principal points off centre."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.randn(batch, views, 3, generator=generator, dtype=torch.float64)
    position = 2 * position / position.norm(dim=-1, keepdim=True)
    forward = -position / 2
    right = torch.linalg.cross(forward, forward.new_tensor([0.1, 1.0, 0.2]).expand_as(forward))
    right = right / right.norm(dim=-1, keepdim=True)
    rotation = torch.stack([right, torch.linalg.cross(forward, right), forward], -1)
    pose = torch.eye(4, dtype=torch.float64).repeat(batch, views, 1, 1)
    pose[..., :3, :3], pose[..., :3, 3] = rotation, position
    intrinsics = torch.tensor([1.1 * width, 1.2 * height, 0.45 * width, 0.55 * height]).repeat(batch, views, 1)
    return {"intrinsics": intrinsics, "camera_to_world": pose.float()}


def colours(batch: int, views: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Random images in [0, 1]."""
    return torch.rand(batch, views, 3, height, width, generator=torch.Generator().manual_seed(seed))


def input_views(batch: int = 2, views: int = 3, height: int = 12, width: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """What `reconstruct` takes."""
    return {
        "pixel_values": colours(batch, views, height, width, seed),
        **cameras(batch, views, height, width, seed),
    }


def all_views(
    batch: int = 2, views: int = 3, targets: int = 2, height: int = 12, width: int = 16, seed: int = 0
) -> dict[str, Tensor]:
    """What `forward` takes, with target images."""
    target = cameras(batch, targets, height, width, seed + 1)
    return {
        **input_views(batch, views, height, width, seed),
        **{f"target_{name}": value for name, value in target.items()},
        "target_pixel_values": colours(batch, targets, height, width, seed + 1),
    }


def to_double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs in float64."""
    return {name: value.double() for name, value in inputs.items()}


def target_cameras(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What `render` takes of what `forward` takes."""
    return inputs["target_intrinsics"], inputs["target_camera_to_world"]


def gradients(model) -> dict[str, Tensor | None]:
    """The gradients of the parameters, by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# ---- the published code ----


def published_config(file: str) -> dict:
    """Constructor arguments of a golden model."""
    return copy.deepcopy(INDEX["models"][file]["config"])


def variant_config(name: str) -> dict:
    """Constructor arguments of a variant of the golden file of all variants."""
    config = copy.deepcopy(INDEX["variants"]["config"])
    config["block_config"][1]["params"].update(INDEX["variants"]["variants"][name])
    return config


def config_of(arguments: dict, **fields) -> LaCTNVSConfig:
    """A configuration out of published constructor arguments."""
    sizes = {"patch_size": arguments["patch_size"], "hidden_size": arguments["dim"]}
    return LaCTNVSConfig(
        **sizes, num_hidden_layers=arguments["layers"], block_config=arguments["block_config"], **fields
    )


def golden_tensors(file: str) -> dict[str, Tensor]:
    """The tensors of a golden file."""
    return load_file(GOLDEN / file)


def golden_state(tensors: dict[str, Tensor], no_query: bool = False) -> dict[str, Tensor]:
    """The state dict in a golden file; that of a model without queries lacks their rows."""
    state = {k.removeprefix("state_dict/"): v for k, v in tensors.items() if k.startswith("state_dict/")}
    if no_query:
        projections = [name for name in state if name.endswith("module_list.1.f.to_qkv.weight")]
        state |= {name: state[name][state[name].shape[1] :].clone() for name in projections}
    return state


def golden_inputs(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `forward` takes, in a golden file."""
    names = {"image": "pixel_values", "fxfycxcy": "intrinsics", "c2w": "camera_to_world"}
    given = {own: tensors[f"input/{name}"] for name, own in names.items()}
    return given | {f"target_{own}": tensors[f"target/{name}"] for name, own in names.items()}


def published_schedule(model: LaCTNVSModel, inputs: dict[str, Tensor]) -> Tensor:
    """Target views as the published code computes them: each layer on the tokens of all views at once."""
    views, size = inputs["pixel_values"].shape[1], inputs["pixel_values"].shape[-2:]
    colours = inputs["pixel_values"].permute(0, 1, 3, 4, 2) * 2 - 1
    given = model._embed(inputs["intrinsics"], inputs["camera_to_world"], *size, colours)
    x = torch.cat([given, model._embed(*target_cameras(inputs), *size)], 1)
    count = given.shape[1] * given.shape[2]
    for block in model.blocks:
        for module in block.module_list:
            normed = module.ln(x)
            if isinstance(module.f, LaCTNVSFastWeight):
                x = x + _published_layer(module.f, normed.flatten(1, 2), count).unflatten(1, x.shape[1:3])
            else:
                x = x + module.f(normed)
    colours = torch.sigmoid(model.image_token_decoder(x[:, views:]))
    return from_patches(colours, model.config.patch_size, *size)


def _published_layer(layer: LaCTNVSFastWeight, x: Tensor, count: int) -> Tensor:
    """Update on the first tokens, apply to all; projections and rates of all."""
    q, k, v = F.silu(layer.to_qkv(x)).unflatten(-1, (3, layer.heads, layer.head_dim)).unbind(2)
    q, k = (t / (t.norm(dim=-1, keepdim=True) + 1e-5) for t in (q, k))
    base = torch.tensor(layer.config.base_lr, dtype=torch.float64)
    rates = F.softplus(layer.lr_fc(x) + base.expm1().log().item()).unflatten(-1, (3, layer.heads, 1)).unbind(2)
    state = layer.initial_state(x.shape[0])
    state = ttt_update(state, *(t[:, :count] for t in (k, v, *rates)), rule=layer.config.rule)
    return layer.c_proj(layer.o_norm(ttt_read(state, q, rule=layer.config.rule)).flatten(2))
