# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Images of any size: models against the formulas of their papers, written out once more in float64.

The reference takes a state dict and functions of tensors only. Its rotary embedding is complex, its blocks come from
`ttt_vision_reference`, and it pads where the published dense backbone does.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ttt import HViTTTConfig, HViTTTModel, ViTTTConfig, ViTTTModel
from hf_ttt.ttt_vision import VisionTokens
from hf_ttt.ttt_vision_reference import reference_vision


class Reference:
    """ViTTT or H-ViTTT of a model's state dict, on maps with the channels first."""

    def __init__(self, model):
        self.config, self.state = model.config, {k: v.double() for k, v in model.state_dict().items()}

    def conv(self, name: str, x: Tensor, **settings) -> Tensor:
        return F.conv2d(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"), **settings)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, keepdim=True, unbiased=False) + self.config.layer_norm_eps
        ).sqrt() * weight + bias

    def batch_norm(self, name: str, x: Tensor) -> Tensor:
        mean, var, weight, bias = (
            self.state[f"{name}.{part}"].view(1, -1, *[1] * (x.dim() - 2))
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    def rotate(self, x: Tensor) -> Tensor:
        """[B, h, w, C], each pair of channels as a complex number: rows turn the first half, columns the second."""
        _, height, width, channels = x.shape
        frequencies = 10000.0 ** (-torch.arange(channels // 4, dtype=torch.float64) / (channels // 4))
        rows = torch.arange(height, dtype=torch.float64)[:, None, None] * frequencies
        columns = torch.arange(width, dtype=torch.float64)[None, :, None] * frequencies
        angles = torch.cat([rows.expand(height, width, -1), columns.expand(height, width, -1)], -1)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def attention(self, name: str, x: Tensor, rotary: bool) -> Tensor:
        """[B, h, w, C] → [B, h, w, C]."""
        w1, w2, w3 = (self.state[f"{name}.{w}"] for w in ("w1", "w2", "w3"))
        heads, head = w1.shape[1], w1.shape[-1]
        parts = self.linear(f"{name}.qkv", x).split([x.shape[-1]] * 3 + [head] * 3, -1)
        gated = [self.rotate(part) if rotary and i < 2 else part for i, part in enumerate(parts[:3])]
        gated = [part.flatten(1, 2).unflatten(-1, (heads, head)).transpose(1, 2) for part in gated]
        out, depthwise = reference_vision(VisionTokens(*gated, *parts[3:]), w1, w2, w3, rule=self.config.rule)
        out = out.transpose(1, 2).flatten(2).unflatten(1, x.shape[1:3])
        return self.linear(f"{name}.proj", torch.cat([out, depthwise], -1))

    def block(self, name: str, x: Tensor, hierarchical: bool) -> Tensor:
        x = x + self.conv(f"{name}.cpe", x, padding=1, groups=x.shape[1])
        x = x.permute(0, 2, 3, 1)
        x = x + self.attention(f"{name}.attn", self.layer_norm(f"{name}.norm1", x), hierarchical)
        u = F.gelu(self.linear(f"{name}.mlp.fc1", self.layer_norm(f"{name}.norm2", x)))
        if hierarchical:
            u = u.permute(0, 3, 1, 2)
            u = F.gelu(u + self.conv(f"{name}.mlp.dwc", u, padding=1, groups=u.shape[1])).permute(0, 2, 3, 1)
        return (x + self.linear(f"{name}.mlp.fc2", u)).permute(0, 3, 1, 2)

    def pad(self, x: Tensor, multiple: int) -> Tensor:
        height, width = x.shape[-2:]
        return F.pad(x, (0, -width % multiple, 0, -height % multiple))

    def plain(self, pixels: Tensor) -> Tensor:
        """Tokens [B, N, C] of ViTTT."""
        patch = self.config.patch_size
        x = self.conv("patch_embed.proj", self.pad(pixels.double(), patch), stride=patch)
        for i in range(self.config.num_hidden_layers):
            x = self.block(f"blocks.{i}", x, False)
        return self.layer_norm("norm", x.flatten(2).mT)

    def hierarchical(self, pixels: Tensor) -> Tensor:
        """Tokens [B, N, C] of H-ViTTT."""
        x = self.pad(pixels.double(), 4)
        for i, (stride, padding) in enumerate(((2, 1), (1, 1), (1, 1), (2, 1), (1, 0))):
            x = self.conv(f"patch_embed.conv.{i}.conv", x, stride=stride, padding=padding)
            x = self.batch_norm(f"patch_embed.conv.{i}.norm", x)
            x = x if i == 4 else x.relu()
        for i, depth in enumerate(self.config.depths):
            for j in range(depth):
                x = self.block(f"layers.{i}.blocks.{j}", x, True)
            if i + 1 < len(self.config.depths):
                name = f"layers.{i}.downsample.conv"
                x = self.conv(f"{name}.0.conv", self.pad(x, 2)).relu()
                x = self.conv(f"{name}.1.conv", x, stride=2, padding=1, groups=x.shape[1]).relu()
                x = self.batch_norm(f"{name}.2.norm", self.conv(f"{name}.2.conv", x))
        return self.batch_norm("norm", x.flatten(2)).mT


def trained(model, images):
    """A model whose every part matters: biases, fast weights and running statistics of one batch in training mode."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.rsplit(".", 1)[-1] in ("w1", "w2", "w3"):
                parameter.mul_(5)
        model.train()(images)
    return model.eval()


@pytest.fixture(scope="module", params=["vittt", "h_vittt"])
def checkpoint(request, tmp_path_factory):
    """A folder with a model of published size whose images were 224 × 224."""
    torch.manual_seed(0)
    model = ViTTTModel(ViTTTConfig.size("tiny")) if request.param == "vittt" else HViTTTModel(HViTTTConfig.size("tiny"))
    folder = tmp_path_factory.mktemp(request.param)
    trained(model, torch.randn(2, 3, 224, 224)).save_pretrained(folder)
    return type(model), folder


@pytest.mark.parametrize("size", [(96, 160), (75, 131)], ids=str)
def test_other_sizes_than_trained_at(checkpoint, size):
    """Features of a checkpoint at a size of its own against the formulas, in float32, bfloat16 and float16, by both
    evaluations. The second size is no multiple of anything, and is padded."""
    model_class, folder = checkpoint
    model = model_class.from_pretrained(folder).eval()
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    reference = Reference(model)
    with torch.no_grad():
        want = reference.plain(images) if model_class is ViTTTModel else reference.hierarchical(images)
        for implementation in ("recurrent", "parallel"):
            model.set_ttt_implementation(implementation)
            got = model(images).last_hidden_state
            torch.testing.assert_close(got.double(), want, atol=5e-5 * want.abs().max().item(), rtol=0)
        for dtype, limit in ((torch.bfloat16, 0.02), (torch.float16, 0.01)):
            narrow = model_class.from_pretrained(folder, dtype=dtype).eval()
            assert narrow.blocks[0].attn.w1.dtype == torch.float32 if model_class is ViTTTModel else True
            got = narrow(images.to(dtype)).last_hidden_state
            assert got.dtype == dtype
            error = ((got.double() - want).norm() / want.norm()).item()
            assert error <= limit, f"{dtype}: {error:.4f}"


def test_float64_models(checkpoint):
    """A float64 model is not rounded to float32 anywhere, as the published rotary embedding is."""
    model_class, folder = checkpoint
    model = model_class.from_pretrained(folder).double().eval()
    images = torch.randn(1, 3, 64, 96, dtype=torch.float64)
    reference = Reference(model)
    with torch.no_grad():
        want = reference.plain(images) if model_class is ViTTTModel else reference.hierarchical(images)
        torch.testing.assert_close(model(images).last_hidden_state, want, atol=1e-11, rtol=1e-11)
