# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Speed and memory of ViTTT-S on a CPU, at two resolutions.

The model beside the same model with two other blocks in the place of its own: the TTT block written down literally in
plain torch, as the published code has it, and softmax attention of the same width. Features of the two TTT blocks are
compared first; if they differ, nothing is printed.

    python benchmarks/bench_vittt.py            # writes benchmarks/results/vittt.csv
"""

import argparse
import gc

import torch
from common import check_close, interleaved, peak_memory, write_rows
from torch import nn
from torch.nn import functional as F

from hf_ttt import ViTTTConfig, ViTTTModel


class LiteralBlock(nn.Module):
    """The block of `ttt` in plain torch: a step per branch, one convolution kernel per image and channel."""

    def __init__(self, ttt: nn.Module):
        super().__init__()
        self.ttt = ttt

    def forward(self, x: torch.Tensor, rotary: None = None) -> torch.Tensor:
        ttt, (batch, height, width, channels) = self.ttt, x.shape
        head, count = ttt.head_dim, height * width
        parts = ttt.qkv(x.flatten(1, 2)).split([channels] * 3 + [head] * 3, -1)
        q, k, v = (part.reshape(batch, count, -1, head).transpose(1, 2) for part in parts[:3])
        maps = [part.mT.reshape(batch, head, height, width) for part in parts[3:]]
        w1, w2 = self.gated_step(k, v, ttt.w1, ttt.w2)
        gated = ((q @ w1) * F.silu(q @ w2)).transpose(1, 2).reshape(batch, count, channels)
        kernels = self.depthwise_step(*maps[1:], ttt.w3)
        depthwise = F.conv2d(maps[0].reshape(1, batch * head, height, width), kernels, padding=1, groups=batch * head)
        depthwise = depthwise.reshape(batch, head, count).mT
        return ttt.proj(torch.cat([gated, depthwise], -1)).reshape(x.shape)

    @staticmethod
    def gated_step(k, v, w1, w2):
        z1, z2 = k @ w1, k @ w2
        s = torch.sigmoid(z2)
        error = -v / v.shape[2] / 3
        g1, g2 = k.mT @ (error * z2 * s), k.mT @ (error * z1 * (s * (1 + z2 * (1 - s))))
        return w1 - g1 / (g1.norm(dim=-2, keepdim=True) + 1), w2 - g2 / (g2.norm(dim=-2, keepdim=True) + 1)

    @staticmethod
    def depthwise_step(k, v, w):
        batch, channels, height, width = k.shape
        padded, error = F.pad(k, (1, 1, 1, 1)), -v / (height * width) / 3
        gradient = torch.stack(
            [(padded[:, :, i : i + height, j : j + width] * error).sum((-2, -1)) for i in range(3) for j in range(3)],
            -1,
        ).reshape(batch * channels, 1, 3, 3)
        return w.repeat(batch, 1, 1, 1) - gradient / (gradient.norm(dim=(-2, -1), keepdim=True) + 1)


class SoftmaxBlock(nn.Module):
    """Softmax attention of the same width and heads."""

    def __init__(self, ttt: nn.Module):
        super().__init__()
        self.heads, width = ttt.heads, ttt.proj.out_features
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, rotary: None = None) -> torch.Tensor:
        q, k, v = self.qkv(x.flatten(1, 2)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj(out).unflatten(1, x.shape[1:3])


def make_models() -> dict[str, ViTTTModel]:
    """ViTTT-S with each kind of block, and the same weights where they have the same parameters."""
    models = {}
    for name in ("parallel", "recurrent", "literal", "softmax"):
        torch.manual_seed(0)
        model = ViTTTModel(ViTTTConfig.size("small", drop_path_rate=0.0)).eval()
        if name in ("literal", "softmax"):
            for block in model.blocks:
                block.attn = (LiteralBlock if name == "literal" else SoftmaxBlock)(block.attn)
        else:
            model.set_ttt_implementation(name)
        models[name] = model
    return models


def train_step(model: ViTTTModel, images: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(images).pooler_output.square().sum().backward()


@torch.no_grad()
def infer(model: ViTTTModel, images: torch.Tensor) -> torch.Tensor:
    return model(images).last_hidden_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 768], help="sides of the images")
    parser.add_argument("--batch", type=int, default=2, help="images at a time")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    models, rows = make_models(), []
    for size in arguments.sizes:
        images = torch.randn(arguments.batch, 3, size, size)
        tokens = arguments.batch * (size // 16) ** 2
        features = {name: infer(model, images) for name, model in models.items()}
        for name in ("parallel", "recurrent"):
            check_close(f"{name} at {size}", features[name], features["literal"], 1e-4)
        for mode, function in (("forward", infer), ("forward and backward", train_step)):
            calls = {name: lambda f=function, m=model, x=images: f(m, x) for name, model in models.items()}
            seconds = interleaved(calls, arguments.repeats)
            for name, call in calls.items():
                gc.collect()
                row = {
                    "size": size,
                    "mode": mode,
                    "block": name,
                    "milliseconds": round(1e3 * seconds[name], 1),
                    "over literal": round(seconds[name] / seconds["literal"], 3),
                    "microseconds per token": round(1e6 * seconds[name] / tokens, 2),
                    "MiB": round(peak_memory(call) / 2**20, 1),
                }
                print(", ".join(f"{key} {value}" for key, value in row.items()))
                rows.append(row)
    write_rows("vittt", rows)


if __name__ == "__main__":
    main()
