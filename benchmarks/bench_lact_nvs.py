# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Speed and memory of LaCT-NVS on a CPU: rendering after few and many input views, and the whole against the published
schedule.

The published schedule computes every layer on the tokens of all views, here written down literally in plain torch: also
the last block's tokens of input views, which nobody reads, and keys and values of target views. Views of the two are
compared first; if they differ, nothing is printed.

    python benchmarks/bench_lact_nvs.py            # writes benchmarks/results/lact_nvs.csv
"""

import argparse
import functools
import gc
import math

import torch
from common import check_close, interleaved, peak_memory, write_rows
from torch import nn
from torch.nn import functional as F

from hf_ttt import LaCTNVSConfig, LaCTNVSModel, ttt_read, ttt_update
from hf_ttt.configuration_lact_nvs import SIZES
from hf_ttt.modeling_lact_nvs import from_patches


def posed_images(views: int, side: int) -> dict[str, torch.Tensor]:
    """Random images of cameras on a circle of radius 2 that look at its centre."""
    angles = torch.arange(views) * (2 * math.pi / views)
    pose = torch.eye(4).repeat(1, views, 1, 1)
    sin, cos, zero = angles.sin(), angles.cos(), torch.zeros(views)
    pose[0, :, :3, 0] = torch.stack([cos, zero, -sin], -1)
    pose[0, :, :3, 2] = torch.stack([sin, zero, cos], -1)
    pose[0, :, :3, 3] = -2 * pose[0, :, :3, 2]
    intrinsics = torch.tensor([side, side, side / 2, side / 2]).expand(1, views, 4).float()
    return {"pixel_values": torch.rand(1, views, 3, side, side), "intrinsics": intrinsics, "camera_to_world": pose}


def published_layer(layer: nn.Module, x: torch.Tensor, count: int) -> torch.Tensor:
    """Update a TTT layer on the first `count` tokens, apply it to all."""
    q, k, v = F.silu(layer.to_qkv(x)).unflatten(-1, (3, layer.heads, layer.head_dim)).unbind(2)
    q, k = (t / (t.norm(dim=-1, keepdim=True) + 1e-5) for t in (q, k))
    offset = math.log(math.expm1(layer.config.base_lr))
    rates = F.softplus(layer.lr_fc(x) + offset).unflatten(-1, (3, layer.heads, 1)).unbind(2)
    rule, state = layer.config.rule, layer.initial_state(x.shape[0])
    state = ttt_update(state, *(t[:, :count] for t in (k, v, *rates)), rule=rule)
    return layer.c_proj(layer.o_norm(ttt_read(state, q, rule=rule)).flatten(2))


@torch.no_grad()
def published_schedule(model: LaCTNVSModel, given: dict[str, torch.Tensor], target: dict[str, torch.Tensor]):
    """Target views, each layer on the tokens of all views at once."""
    views, side = given["pixel_values"].shape[1], given["pixel_values"].shape[-1]
    colours = given["pixel_values"].permute(0, 1, 3, 4, 2) * 2 - 1
    x = model._embed(given["intrinsics"], given["camera_to_world"], side, side, colours)
    count = x.shape[1] * x.shape[2]
    x = torch.cat([x, model._embed(target["intrinsics"], target["camera_to_world"], side, side)], 1)
    for block in model.blocks:
        for module, entry in zip(block.module_list, model.config.block_config, strict=True):
            normed = module.ln(x)
            if entry["type"] == "ttt":
                x = x + published_layer(module.f, normed.flatten(1, 2), count).unflatten(1, x.shape[1:3])
            else:
                x = x + module.f(normed)
    return from_patches(torch.sigmoid(model.image_token_decoder(x[:, views:])), model.config.patch_size, side, side)


@torch.no_grad()
def forward(model: LaCTNVSModel, given: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    cameras = {f"target_{name}": target[name] for name in ("intrinsics", "camera_to_world")}
    return model(**given, **cameras).rendered


@torch.no_grad()
def render(model: LaCTNVSModel, scene, target: dict[str, torch.Tensor], side: int) -> torch.Tensor:
    return model.render(scene, target["intrinsics"], target["camera_to_world"], (side, side))


def measured(calls: dict[str, functools.partial], repeats: int, baseline: str) -> list[dict[str, object]]:
    """Time and peak memory of calls, and time over that of one of them."""
    seconds, rows = interleaved(calls, repeats), []
    for name, call in calls.items():
        gc.collect()
        rows.append(
            {
                "call": name,
                "milliseconds": round(1e3 * seconds[name], 1),
                f"over {baseline}": round(seconds[name] / seconds[baseline], 3),
                "MiB": round(peak_memory(call) / 2**20, 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="l12_ttt1x", help="published size of the model")
    parser.add_argument("--side", type=int, default=64, help="side of the images")
    parser.add_argument("--views", type=int, nargs=2, default=[2, 32], help="few and many input views")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = LaCTNVSModel(LaCTNVSConfig.size(arguments.size)).eval()
    target, side, few = posed_images(1, arguments.side), arguments.side, f"after {arguments.views[0]} views"
    renders, rows = {}, []
    for views in arguments.views:
        given = posed_images(views, side)
        calls = {
            "published schedule": functools.partial(published_schedule, model, given, target),
            "forward": functools.partial(forward, model, given, target),
        }
        check_close(f"forward of {views} views", calls["forward"](), calls["published schedule"](), 1e-4)
        with torch.no_grad():
            scene = model.reconstruct(**given)
        size = sum(t.nbytes for state in scene.states for t in state.tensors().values())
        renders[f"after {views} views"] = functools.partial(render, model, scene, target, side)
        for row in measured(calls, arguments.repeats, "published schedule"):
            ratio = row.pop("over published schedule")
            rows.append({"views": views, **row, "ratio": ratio, "scene MiB": round(size / 2**20, 1)})
    for views, row in zip(arguments.views, measured(renders, arguments.repeats, few), strict=True):
        ratio, size = row.pop(f"over {few}"), next(r["scene MiB"] for r in rows if r["views"] == views)
        rows.append({"views": views, **row, "call": "render one view", "ratio": ratio, "scene MiB": size})
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in {"model": arguments.size, "side": side, **row}.items()))
    write_rows("lact_nvs", [{"model": arguments.size, "side": side, **row} for row in rows])


if __name__ == "__main__":
    main()
