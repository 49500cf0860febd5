# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""ViTTT and H-ViTTT: vision models whose attention is a test-time-training block, for images of any size.

Architectures and parameter names: ViTTT (arXiv 2512.01643; code LeapLabTHU/ViTTT, MIT, whose state dicts load
unchanged but for `rope.rotations`, which is computed here). The block and its variants: `VisionRule`.

Hidden states are maps with the channels last, [B, h, w, C]; nothing takes an image to be square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
)
from transformers.utils import can_return_tuple

from .configuration_vittt import HViTTTConfig, ViTTTConfig
from .modeling_ttt import TTTPreTrainedModel, accumulation_dtype, keep_unused
from .ttt_interface import CallSize
from .ttt_vision import VISION_FUNCTIONS, VisionTokens

STEM_STRIDE = 4  # of H-ViTTT
STEM_EXPANSION = DOWNSAMPLE_EXPANSION = 4
AUTO_MAP = {
    "AutoConfig": "configuration_vittt.ViTTTConfig",
    "AutoModel": "modeling_vittt.ViTTTModel",
    "AutoModelForImageClassification": "modeling_vittt.ViTTTForImageClassification",
    "AutoBackbone": "modeling_vittt.ViTTTBackbone",
}
HIERARCHICAL_AUTO_MAP = {key: value.replace(".ViTTT", ".HViTTT") for key, value in AUTO_MAP.items()}


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    """Stochastic depth: zero for a share `rate` of the images in training, the others scaled up by 1 / (1 − rate)."""
    if rate == 0 or not training:
        return x
    keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) >= rate
    return x * keep.to(x.dtype) / (1 - rate)


def drop_path_rates(greatest: float, depth: int) -> list[float]:
    """Rates of the blocks, growing linearly from 0."""
    return [greatest * i / max(depth - 1, 1) for i in range(depth)]


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Zeros on the right and at the bottom of a map [B, h, w, C], up to multiples."""
    # not -side % multiple, which torch.compile has no code for where sizes are dynamic
    bottom, right = ((side + multiple - 1) // multiple * multiple - side for side in x.shape[1:3])
    return F.pad(x, (0, 0, 0, right, 0, bottom))


def conv(layer: nn.Module, x: Tensor) -> Tensor:
    """A module for maps with channels first at a map with channels last."""
    return layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def check_pixels(pixel_values: Tensor | None, channels: int, least: int) -> Tensor:
    """The images with channels last [B, h, w, C].

    Raises:
        ValueError: for another rank or number of channels, or a side below `least`.
    """
    if pixel_values is None or pixel_values.dim() != 4:
        came = None if pixel_values is None else list(pixel_values.shape)
        raise ValueError(f"pixel_values of shape {came} must have four dimensions [batch, channels, height, width]")
    if pixel_values.shape[1] != channels:
        raise ValueError(
            f"pixel_values of shape {list(pixel_values.shape)} has {pixel_values.shape[1]} channels where the model "
            f"has num_channels={channels}"
        )
    if min(pixel_values.shape[2:]) < least:
        raise ValueError(
            f"pixel_values of shape {list(pixel_values.shape)} is smaller than one patch of {least} × {least}"
        )
    return pixel_values.permute(0, 2, 3, 1)


def rotary_tables(height: int, width: int, channels: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [height, width, channels / 2] of a rotary embedding of rows (first half) and columns, in at least
    float32."""
    dtype, count = accumulation_dtype(like), channels // 4
    frequencies = theta ** (-torch.arange(count, device=like.device, dtype=dtype) / count)
    rows, columns = (torch.arange(n, device=like.device, dtype=dtype)[:, None] * frequencies for n in (height, width))
    angles = torch.cat([rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of interleaved pairs of channels: x [..., h, w, C], cos and sin [h, w, C / 2]."""
    a, b = x.unflatten(-1, (x.shape[-1] // 2, 2)).to(cos.dtype).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


class ViTTTAttention(nn.Module):
    """The TTT block: queries, keys and values of a gated and a depthwise branch, which share nothing else."""

    def __init__(self, config: ViTTTConfig | HViTTTConfig, width: int, heads: int):
        super().__init__()
        self.config, self.heads, self.head_dim = config, heads, width // heads
        head = self.head_dim
        self.w1 = nn.Parameter(torch.empty(1, heads, head, head, dtype=torch.float32))
        self.w2 = nn.Parameter(torch.empty(1, heads, head, head, dtype=torch.float32))
        self.w3 = nn.Parameter(torch.empty(head, 1, 3, 3, dtype=torch.float32))
        self.qkv = nn.Linear(width, 3 * width + 3 * head, bias=config.qkv_bias)
        self.proj = nn.Linear(width + head, width)

    def tokens(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> VisionTokens:
        """What the branches take of hidden states [B, h, w, C]; `rotary` is applied to the gated branch's q and k."""
        width, head = self.heads * self.head_dim, self.head_dim
        q, k, v, q_map, k_map, v_map = self.qkv(hidden_states).split([width] * 3 + [head] * 3, -1)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.config.ttt_read_with == "key":
            q, q_map = k, k_map
        q, k, v = (x.unflatten(-1, (self.heads, head)).flatten(1, 2) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # once: products would copy them each time
        return VisionTokens(q, k, v, q_map, k_map, v_map)

    def forward(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        config, rule = self.config, self.config.rule
        tokens = self.tokens(hidden_states, rotary)
        batch, heads, length, width = tokens.k.shape
        dtype = torch.promote_types(tokens.k.dtype, self.w1.dtype)
        size = CallSize(tokens.k.device, width, batch * heads * length, dtype)
        attend: Callable = VISION_FUNCTIONS.get(rule, config.ttt_implementation, config.ttt_backend, size)
        gated, depthwise = attend(tokens, self.w1, self.w2, self.w3, rule=rule)
        gated = gated.transpose(1, 2).flatten(2).unflatten(1, hidden_states.shape[1:3])
        out = self.proj(torch.cat([gated, depthwise], -1))
        return out if config.ttt_fast_weight == "swiglu" else keep_unused(out, self.w2)


class ViTTTMLP(nn.Module):
    """fc2(act(fc1 x)); with a depthwise convolution fc2(act(u + conv u)) of u = act(fc1 x)."""

    def __init__(self, config: ViTTTConfig | HViTTTConfig, width: int, depthwise: bool):
        super().__init__()
        hidden = int(width * config.mlp_ratio)
        self.act_fn = ACT2FN[config.hidden_act]
        self.fc1 = nn.Linear(width, hidden)
        self.dwc = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden) if depthwise else None
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act_fn(self.fc1(x))
        if self.dwc is not None:
            x = self.act_fn(x + conv(self.dwc, x))
        return self.fc2(x)


class ViTTTBlock(GradientCheckpointingLayer):
    """x + cpe(x), then x + attention(norm1 x), then x + mlp(norm2 x)."""

    def __init__(self, config: ViTTTConfig | HViTTTConfig, width: int, heads: int, rate: float, depthwise: bool):
        super().__init__()
        self.rate = rate
        self.cpe = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attn = ViTTTAttention(config, width, heads)
        self.norm2 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = ViTTTMLP(config, width, depthwise)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + conv(self.cpe, x)
        x = x + drop_path(self.attn(self.norm1(x), rotary), self.rate, self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.rate, self.training)


class ViTTTPatchEmbeddings(nn.Module):
    """Patches of an image, projected; an image that they do not fill is padded with zeros."""

    def __init__(self, config: ViTTTConfig):
        super().__init__()
        self.proj = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size, stride=config.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        return conv(self.proj, pad_to_multiple(pixels.to(next(self.parameters()).dtype), self.proj.kernel_size[0]))


class ConvNorm(nn.Module):
    """Convolution, then batch norm and ReLU, where it has them."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride=1, groups=1, bias=False, norm=True, act=True):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=bias)
        if norm:
            self.norm = nn.BatchNorm2d(outputs)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.norm(x) if hasattr(self, "norm") else x
        return F.relu(x) if self.act else x


class HViTTTStem(nn.Module):
    """An image at a quarter of its resolution, padded with zeros to a multiple of 4."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        half, wide = width // 2, STEM_EXPANSION * width
        self.conv = nn.Sequential(
            ConvNorm(channels, half, 3, stride=2),
            ConvNorm(half, half, 3),
            ConvNorm(half, half, 3),
            ConvNorm(half, wide, 3, stride=2),
            ConvNorm(wide, width, 1, act=False),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return conv(self.conv, pad_to_multiple(pixels.to(next(self.parameters()).dtype), STEM_STRIDE))


class HViTTTDownsample(nn.Module):
    """Half the resolution at another width, after padding with zeros to an even size."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        wide = DOWNSAMPLE_EXPANSION * outputs
        self.conv = nn.Sequential(
            ConvNorm(inputs, wide, 1, bias=True, norm=False),
            ConvNorm(wide, wide, 3, stride=2, groups=wide, bias=True, norm=False),
            ConvNorm(wide, outputs, 1, bias=True, act=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return conv(self.conv, pad_to_multiple(x, 2))


class HViTTTStage(nn.Module):
    """Blocks of one resolution; `downsample` leads to the next stage."""

    def __init__(self, config: HViTTTConfig, index: int, rates: list[float]):
        super().__init__()
        width, heads = config.hidden_sizes[index], config.num_attention_heads[index]
        self.theta = config.rope_theta
        self.blocks = nn.ModuleList([ViTTTBlock(config, width, heads, rate, depthwise=True) for rate in rates])
        last = index + 1 == len(config.depths)
        self.downsample = nn.Identity() if last else HViTTTDownsample(width, config.hidden_sizes[index + 1])

    def forward(self, x: Tensor) -> Tensor:
        _, height, width, channels = x.shape
        rotary = rotary_tables(height, width, channels, self.theta, x)
        for block in self.blocks:
            x = block(x, rotary)
        return x


class ViTTTPreTrainedModel(TTTPreTrainedModel):
    """What the vision models share: initialisation, and flags."""

    config: ViTTTConfig
    config_class = ViTTTConfig
    base_model_prefix = ""
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _input_embed_layer = "patch_embed"
    _no_split_modules = ["ViTTTBlock"]
    _keys_to_ignore_on_load_unexpected = [r"rope\.rotations$"]
    _keep_in_fp32_modules_strict = ["w1", "w2", "w3"]
    _ttt_functions = VISION_FUNCTIONS
    _ttt_auto_map = AUTO_MAP
    patch_embed: nn.Module
    norm: nn.Module

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):  # torch's own default
            init.kaiming_uniform_(module.weight, a=5**0.5)
            if module.bias is not None:
                bound = module.weight[0].numel() ** -0.5
                init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, ViTTTAttention):
            for w in (module.w1, module.w2, module.w3):
                init.trunc_normal_(w, std=std)
        else:
            super()._init_weights(module)

    def _build(self) -> None:
        """Make the modules that all classes have, at the top level as in published checkpoints."""
        config = self.config
        self.patch_embed = ViTTTPatchEmbeddings(config)
        rates = drop_path_rates(config.drop_path_rate, config.num_hidden_layers)
        self.blocks = nn.ModuleList(
            [
                ViTTTBlock(config, config.hidden_size, config.num_attention_heads, rate, depthwise=False)
                for rate in rates
            ]
        )
        self.gradient_checkpointing = False

    def _build_norm(self) -> None:
        self.norm = nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)

    @property
    def _least_side(self) -> int:
        """The smallest image side that the model takes."""
        return self.config.patch_size

    def _stage(self, index: int, x: Tensor) -> Tensor:
        """The map [B, h, w, C] of stage `index` of `config.stage_names`, from that of the one before or the image."""
        return self.blocks[index - 1](x) if index else self.patch_embed(x)

    def _normalised(self, x: Tensor) -> Tensor:
        """Tokens [B, N, C] of the last map after the final norm."""
        return self.norm(x).flatten(1, 2)

    def _expose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A map as `hidden_states` has it, tokens [B, N, C] here, and the map read from it, to give it gradients."""
        tokens = x.flatten(1, 2)
        return tokens, tokens.unflatten(1, x.shape[1:3])

    def _run(
        self, pixel_values: Tensor | None, output_hidden_states: bool | None, chosen: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...] | None]:
        """The last map [B, h, w, C], those of chosen stages, and the hidden states if they are wanted."""
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        x = check_pixels(pixel_values, self.config.num_channels, self._least_side)
        maps, states = [], []
        for index in range(len(self.config.stage_names)):
            state, x = self._expose(self._stage(index, x))
            if index in chosen:
                maps.append(x)
            if wanted:
                states.append(state)
        return x, maps, tuple(states) if wanted else None

    def _encode(self, pixel_values: Tensor | None, output_hidden_states: bool | None) -> BaseModelOutputWithPooling:
        x, _, states = self._run(pixel_values, output_hidden_states)
        tokens = self._normalised(x)
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=tokens.mean(1), hidden_states=states)


class ViTTTModel(ViTTTPreTrainedModel):
    """ViTTT without a head: tokens after the final norm, and their mean."""

    _keys_to_ignore_on_load_unexpected = [r"rope\.rotations$", r"^head\."]

    def __init__(self, config: ViTTTConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self._build()
        self._build_norm()
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, output_hidden_states: bool | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Features of images.

        Args:
            pixel_values: [B, channels, height, width], of any size from one patch on; padded with zeros on the right
                and at the bottom to whole patches.
            output_hidden_states: whether to return the hidden states of all blocks (of all stages for H-ViTTT).

        Returns:
            `last_hidden_state` [B, N, C], the tokens row by row after the final norm; `pooler_output` [B, C], their
            mean; `hidden_states`: for ViTTT the embedded patches and the tokens after each block [B, N, C]; for H-ViTTT
            the stem and each stage as maps [B, C, h, w].

        Raises:
            ValueError: for another number of channels or an image smaller than a patch.
        """
        return self._encode(pixel_values, output_hidden_states)


class ViTTTForImageClassification(ViTTTPreTrainedModel):
    """ViTTT with a linear classifier on the mean of its tokens."""

    accepts_loss_kwargs = False  # `num_items_in_batch` changes the loss of classes only, not those of other labels

    def __init__(self, config: ViTTTConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self._build()
        self._build_norm()
        self.head = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Logits of images.

        Args:
            pixel_values, output_hidden_states: as in `ViTTTModel`.
            labels: classes [B], or as `config.problem_type` has them; adds a loss.
            kwargs: `num_items_in_batch` replaces the mean over classes [B] by their sum over it.

        Returns:
            `logits` [B, num_labels], and `loss` and `hidden_states` if asked for.

        Raises:
            ValueError: for another number of channels or an image smaller than a patch.
        """
        output = self._encode(pixel_values, output_hidden_states)
        logits = self.head(output.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=output.hidden_states)


class ViTTTBackbone(BackboneMixin, ViTTTPreTrainedModel):
    """ViTTT as a backbone: maps [B, C, h, w] of chosen layers, "stem" (the embedded patches) and "stage1" to "stageL".

    With `config.apply_layernorm` they go through the final norm.
    """

    has_attentions = False
    _keys_to_ignore_on_load_unexpected = [r"rope\.rotations$", r"^head\."]

    def __init__(self, config: ViTTTConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self._build()
        self._build_norm()
        self.num_features = self._features()
        self.post_init()

    def _features(self) -> list[int]:
        """Channels of each of `stage_names`."""
        return [self.config.hidden_size] * len(self.stage_names)

    def _feature(self, x: Tensor, index: int) -> Tensor:
        """The feature map [B, h, w, C] of a stage."""
        return self.norm(x) if self.config.apply_layernorm else x

    @can_return_tuple
    def forward(self, pixel_values: Tensor, output_hidden_states: bool | None = None, **kwargs: Any) -> BackboneOutput:
        """Feature maps of images.

        Args:
            pixel_values, output_hidden_states: as in `ViTTTModel`.

        Returns:
            `feature_maps`, one [B, C, h, w] for each of `out_features`.

        Raises:
            ValueError: for another number of channels or an image smaller than a patch.
        """
        chosen = [i for i, name in enumerate(self.stage_names) if name in self.out_features]
        _, maps, states = self._run(pixel_values, output_hidden_states, chosen)
        maps = [self._feature(x, i).permute(0, 3, 1, 2) for i, x in zip(chosen, maps, strict=True)]
        return BackboneOutput(feature_maps=tuple(maps), hidden_states=states)


class HViTTTPreTrainedModel(ViTTTPreTrainedModel):
    """What the H-ViTTT models share: stages instead of blocks."""

    config: HViTTTConfig
    config_class = HViTTTConfig
    _no_split_modules = ["ViTTTBlock", "HViTTTDownsample", "HViTTTStem"]
    _ttt_auto_map = HIERARCHICAL_AUTO_MAP

    def _build(self) -> None:
        config = self.config
        self.patch_embed = HViTTTStem(config.num_channels, config.hidden_sizes[0])
        rates, stages = drop_path_rates(config.drop_path_rate, sum(config.depths)), []
        for index, depth in enumerate(config.depths):
            stages.append(HViTTTStage(config, index, rates[:depth]))
            rates = rates[depth:]
        self.layers = nn.ModuleList(stages)
        self.gradient_checkpointing = False

    def _build_norm(self) -> None:
        self.norm = nn.BatchNorm1d(self.config.hidden_size)

    @property
    def _least_side(self) -> int:
        return STEM_STRIDE

    def _stage(self, index: int, x: Tensor) -> Tensor:
        """Stages keep their resolution: a map leads to the next one through the former's `downsample`."""
        if index == 0:
            return self.patch_embed(x)
        x = x if index == 1 else self.layers[index - 2].get_submodule("downsample")(x)
        return self.layers[index - 1](x)

    def _normalised(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 2)).unflatten(0, x.shape[:3]).flatten(1, 2)

    def _expose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = x.permute(0, 3, 1, 2)
        return features, features.permute(0, 2, 3, 1)


class HViTTTModel(HViTTTPreTrainedModel, ViTTTModel):
    """H-ViTTT without a head: tokens of the last stage after the final norm, and their mean."""


class HViTTTForImageClassification(HViTTTPreTrainedModel, ViTTTForImageClassification):
    """H-ViTTT with a linear classifier on the mean of its tokens."""


class HViTTTBackbone(HViTTTPreTrainedModel, ViTTTBackbone):
    """H-ViTTT as a backbone: maps [B, C, h, w] of chosen stages, each after a layer norm of its own ("stem" without).

    The strides are 4, 4, 8, 16, 32 for "stem", "stage1" to "stage4".
    """

    _keys_to_ignore_on_load_unexpected = [r"rope\.rotations$", r"^head\.", r"^norm\."]

    def _build_norm(self) -> None:
        for index, width in enumerate(self.config.hidden_sizes):
            if f"stage{index + 1}" in self.out_features:
                self.add_module(f"norm{index}", nn.LayerNorm(width, eps=self.config.layer_norm_eps))

    def _features(self) -> list[int]:
        return [self.config.hidden_sizes[0], *self.config.hidden_sizes]

    def _feature(self, x: Tensor, index: int) -> Tensor:
        return self.get_submodule(f"norm{index - 1}")(x) if index else x


__all__ = [
    "HViTTTBackbone",
    "HViTTTForImageClassification",
    "HViTTTModel",
    "ViTTTBackbone",
    "ViTTTForImageClassification",
    "ViTTTModel",
]
