# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""LaCT-NVS: new views of a scene from posed images of it, which the fast weights of TTT layers hold.

Architecture and parameter names: LaCT-NVS (Zhang et al., "Test-Time Training Done Right", arXiv 2505.23884; code
a1600012888/LaCT, `lact_nvs`, whose state dicts load unchanged). The inner loop and its variants: `TTTRule`.

The input views' tokens update the fast weights of each TTT layer once; then they and the tokens of new views, which are
rays alone, read them. So a scene is these weights: their size does not depend on the number of views, and a new view
needs nothing else. Cameras are as in OpenCV: x to the right, y down, z forward; pixel (0, 0) has its centre at
(0.5, 0.5).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput, can_return_tuple

from .configuration_lact_nvs import LaCTNVSConfig
from .modeling_ttt import TTTPreTrainedModel, accumulation_dtype, keep_unused
from .scene_lact_nvs import LaCTNVSScene, to_states
from .ttt_ops import TTT_FUNCTIONS, ttt_read, ttt_update
from .ttt_state import TTTState, ttt_init

NORM_EPS = 1e-5  # of the l2 norm and the norm of the TTT output, as published
CHANNELS = 12  # of a pixel: origin, direction and moment of its ray, and its colour
FAST_WEIGHT_GAIN = math.sqrt(2)
AUTO_MAP = {
    "AutoConfig": "configuration_lact_nvs.LaCTNVSConfig",
    "AutoModel": "modeling_lact_nvs.LaCTNVSModel",
}


def to_scene(camera_to_world: Tensor, world_to_scene: Tensor | None, scene_scale: Tensor | None) -> Tensor:
    """Poses [B, V, 4, 4] in a scene's own coordinates: p ↦ scale · (world_to_scene p), for world_to_scene [B, 4, 4] and
    scene_scale [B]; None for the identity and 1."""
    pose = camera_to_world
    if world_to_scene is not None:  # a sum, since a product may be computed in fewer digits (TF32, bfloat16)
        matrix = world_to_scene[:, None].to(pose.dtype)
        pose = (matrix[..., :, :, None] * pose[..., None, :, :]).sum(-2)
    if scene_scale is not None:
        origin = pose[..., :3, 3:] * scene_scale.to(pose.dtype).view(-1, 1, 1, 1)
        pose = torch.cat([torch.cat([pose[..., :3, :3], origin], -1), pose[..., 3:, :]], -2)
    return pose


def pixel_rays(intrinsics: Tensor, camera_to_world: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Origins and unit directions [B, V, height, width, 3] of the rays through the pixels' centres.

    Args:
        intrinsics: [B, V, 4] with fx, fy, cx, cy in pixels, or [B, V, 3, 3], whose skew counts too.
        camera_to_world: [B, V, 4, 4].
    """
    if intrinsics.shape[-1] == 4:
        fx, fy, cx, cy = intrinsics[..., None, None, :].unbind(-1)
        skew = torch.zeros_like(fx)
    else:
        k = intrinsics[..., None, None, :, :]
        fx, fy, cx, cy, skew = k[..., 0, 0], k[..., 1, 1], k[..., 0, 2], k[..., 1, 2], k[..., 0, 1]
    rows, columns = (torch.arange(n, device=fx.device, dtype=fx.dtype) + 0.5 for n in (height, width))
    y = (rows[:, None] - cy) / fy
    x = (columns[None, :] - cx - skew * y) / fx
    right, down, forward, origin = camera_to_world[:, :, None, None, :3].unbind(-1)
    directions = x[..., None] * right + y[..., None] * down + forward
    directions = directions / torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    return origin.expand_as(directions), directions


def patches(x: Tensor, size: int) -> Tensor:
    """[B, V, h, w, C] → tokens [B, V, h/size · w/size, size · size · C], row by row, and so the pixels of each."""
    height, width = x.shape[2] // size, x.shape[3] // size
    x = x.unflatten(2, (height, size)).unflatten(4, (width, size))
    return x.permute(0, 1, 2, 4, 3, 5, 6).flatten(4).flatten(2, 3)


def from_patches(x: Tensor, size: int, height: int, width: int) -> Tensor:
    """The inverse of `patches`, with the channels first: [B, V, C, height, width]."""
    x = x.unflatten(-1, (size, size, x.shape[-1] // size**2)).unflatten(2, (height // size, width // size))
    return x.permute(0, 1, 6, 2, 4, 3, 5).flatten(5).flatten(3, 4)


def plain_weight(layer: nn.Module) -> Tensor | None:
    """The weight of a linear layer that may be computed in parts or in another type; None for a layer that has an
    adapter or a hook, or is quantised, sharded or offloaded, which must be called."""
    weight = getattr(layer, "weight", None)
    plain = type(layer) is nn.Linear and type(weight) is nn.Parameter
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks
    hooked = any(map(len, hooks)) or "forward" in layer.__dict__  # the last by accelerate
    return weight if plain and not hooked else None


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scaling) v over all tokens: [N, heads, T, width] → [N, T, heads, width] and the weights."""
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = F.softmax(weights, dim=-1, dtype=accumulation_dtype(weights)).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class LaCTNVSOutputLinear(nn.Linear):
    """A projection back into the hidden states, which is initialised smaller than others.

    A class of its own, since transformers does not initialise through modules without parameters in custom code.
    """


class LaCTNVSAttention(nn.Module):
    """Softmax attention within each image."""

    def __init__(self, config: LaCTNVSConfig, head_dim: int, use_qk_norm: bool):
        super().__init__()
        width = config.hidden_size
        self.config, self.head_dim, self.scaling = config, head_dim, head_dim**-0.5
        self.is_causal, self.num_key_value_groups = False, 1
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = LaCTNVSOutputLinear(width, width, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(head_dim) if use_qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, V, T, D] → [B, V, T, D]"""
        qkv = self.to_qkv(x.flatten(0, 1))
        heads = qkv.shape[-1] // (3 * self.head_dim)
        q, k, v = qkv.unflatten(-1, (3, heads, self.head_dim)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, _ = attend(self, q, k, v, None, dropout=0.0, scaling=self.scaling, is_causal=False)
        return self.c_proj(out.flatten(2)).unflatten(0, x.shape[:2])


class LaCTNVSTokens(NamedTuple):
    """What a TTT layer's update takes of tokens."""

    k: Tensor  # [B, T, H, width]
    v: Tensor
    lr0: Tensor | None  # [B, T, H, 1], or None for 1
    lr1: Tensor | None
    lr2: Tensor | None


class LaCTNVSFastWeight(nn.Module):
    """A TTT layer. Its weights w0, w2 [heads, in, hidden] and w1 [heads, hidden, out] are stored as published, which is
    transposed in comparison with `TTTState`."""

    def __init__(self, config: LaCTNVSConfig, head_dim: int | None, inter_multi: int | float):
        super().__init__()
        width = config.hidden_size
        self.config, self.width, self.head_dim = config, width, head_dim or width
        self.heads, hidden = width // self.head_dim, int(self.head_dim * inter_multi)
        self.projections = ("k", "v") if config.ttt_read_with == "key" else ("q", "k", "v")
        empty = lambda *shape: nn.Parameter(torch.empty(self.heads, *shape, dtype=torch.float32))  # noqa: E731
        self.w0, self.w1, self.w2 = (
            empty(self.head_dim, hidden),
            empty(hidden, self.head_dim),
            empty(self.head_dim, hidden),
        )
        self.to_qkv = nn.Linear(width, len(self.projections) * width, bias=False)
        self.c_proj = LaCTNVSOutputLinear(width, width, bias=False)
        self.lr_fc = nn.Linear(width, 3 * self.heads)
        self.o_norm = nn.RMSNorm(self.head_dim, eps=NORM_EPS)

    def _project(self, x: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Queries, keys or values [B, T, H, width] of tokens x [B, T, D]; queries and keys of length 1."""
        first = self.projections.index(names[0])  # the others are its neighbours
        rows = slice(first * self.width, (first + len(names)) * self.width)
        weight = plain_weight(self.to_qkv)
        out = self.to_qkv(x)[..., rows] if weight is None else F.linear(x, weight[rows])
        out = F.silu(out).unflatten(-1, (len(names), self.heads, self.head_dim)).unbind(2)
        return tuple(t if name == "v" else self._unit(t) for name, t in zip(names, out, strict=True))

    def _unit(self, x: Tensor) -> Tensor:
        wide = x.to(accumulation_dtype(x))
        return (wide / (torch.linalg.vector_norm(wide, dim=-1, keepdim=True) + NORM_EPS)).to(x.dtype)

    def tokens(self, x: Tensor) -> LaCTNVSTokens:
        """Keys, values and rates of tokens x [B, T, D]."""
        k, v = self._project(x, "k", "v")
        if not self.config.ttt_learnable_lr:
            return LaCTNVSTokens(k, v, None, None, None)
        dtype = accumulation_dtype(x)
        base = self.config.base_lr
        offset = base + math.log(-math.expm1(-base))  # softplus⁻¹(base)
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            weight = plain_weight(self.lr_fc)
            if weight is None:
                rates = self.lr_fc(x).to(dtype)
            else:
                rates = F.linear(x.to(dtype), weight.to(dtype), self.lr_fc.bias.to(dtype))
        return LaCTNVSTokens(k, v, *F.softplus(rates + offset).unflatten(-1, (3, self.heads, 1)).unbind(2))

    def reads(self, x: Tensor) -> Tensor:
        """What reads the fast weights [B, T, H, width]: queries, or keys, of tokens x [B, T, D].

        Raises:
            ValueError: if the model has no query projection.
        """
        name = "q" if self.config.ttt_read_with == "query" else "k"
        if name not in self.projections:
            raise ValueError(
                "ttt_read_with='query' was set on a model that has no query projection, since it was made with 'key': "
                "leave it at 'key'"
            )
        return self._project(x, name)[0]

    def initial_state(self, batch_size: int) -> TTTState:
        """The state before any view."""
        dtype = accumulation_dtype(self.w1)
        w0, w1, w2 = (w.mT.to(dtype) for w in (self.w0, self.w1, self.w2))
        return ttt_init(w0, w1, w2, self.config.rule, batch_size)

    def update(self, x: Tensor) -> TTTState:
        """The fast weights after an update with all tokens x [B, T, D]."""
        config, tokens = self.config, self.tokens(x)
        state = ttt_update(
            self.initial_state(x.shape[0]),
            *tokens,
            rule=config.rule,
            implementation=config.ttt_implementation,
            backend=config.ttt_backend,
        )
        w1 = state.w1 if config.ttt_learnable_lr else keep_unused(state.w1, self.lr_fc.weight, self.lr_fc.bias)
        return TTTState(state.w0, w1, state.w2)

    def forward(self, x: Tensor, state: TTTState | None = None) -> Tensor | TTTState:
        """Read the fast weights of a state: x [B, T, D] → [B, T, D]. Without one, `update`: adapters of the weights are
        active only within calls."""
        if state is None:
            return self.update(x)
        out = ttt_read(state, self.reads(x), rule=self.config.rule, backend=self.config.ttt_backend)
        return self.c_proj(self.o_norm(out).flatten(2))


class LaCTNVSMLP(nn.Module):
    """c_proj(gelu(c_fc x))."""

    def __init__(self, config: LaCTNVSConfig, inter_multi: int | float):
        super().__init__()
        hidden = int(config.hidden_size * inter_multi)
        self.c_fc = nn.Linear(config.hidden_size, hidden, bias=False)
        self.c_proj = LaCTNVSOutputLinear(hidden, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


_MODULES = {"attention": LaCTNVSAttention, "ttt": LaCTNVSFastWeight, "mlp": LaCTNVSMLP}


class LaCTNVSResidual(nn.Module):
    """A module and the norm before it."""

    def __init__(self, config: LaCTNVSConfig, entry: dict[str, Any]):
        super().__init__()
        settings = {name: value for name, value in entry.items() if name != "type"}
        self.ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=False)
        self.f = _MODULES[entry["type"]](config, **settings)


class LaCTNVSBlock(GradientCheckpointingLayer):
    """x + f(norm x) for each module of a block."""

    def __init__(self, config: LaCTNVSConfig):
        super().__init__()
        self.module_list = nn.ModuleList([LaCTNVSResidual(config, entry) for entry in config.block_config])
        self.ttt_places = [i for i, entry in enumerate(config.block_config) if entry["type"] == "ttt"]

    def forward(self, x: Tensor, *weights: Tensor, is_last: bool = False) -> tuple[Tensor, ...]:
        """Tokens of views x [B, V, T, D] → the same, and w0, w1, w2 of the block's TTT layers, one after another.

        These are tensors and not states, since reentrant gradient checkpointing looks into nothing else.

        Args:
            weights: what the TTT layers read; none for input views, which make them.
            is_last: whether nothing reads the tokens of the input views afterwards, so that they end as they are in
                the last TTT layer.
        """
        states = to_states(weights)
        module: Any
        for i, module in enumerate(self.module_list):
            normed = module.ln(x)
            if i not in self.ttt_places:
                x = x + module.f(normed)
                continue
            flat = normed.flatten(1, 2)
            if not weights:
                states.append(module.f(flat))
            if not weights and is_last and i == self.ttt_places[-1]:
                break
            x = x + module.f(flat, states[self.ttt_places.index(i)]).unflatten(1, x.shape[1:3])
        return x, *(w for state in states for w in state.weights)


@dataclass
class LaCTNVSOutput(ModelOutput):
    """Output of `LaCTNVSModel`.

    Attributes:
        loss: mean squared error of the colours, where target images were given.
        rendered: the target views [B, V, 3, h, w] in (0, 1).
    """

    loss: Tensor | None = None
    rendered: Tensor | None = None


class LaCTNVSPreTrainedModel(TTTPreTrainedModel):
    """What `LaCTNVSModel` needs of transformers: initialisation, and flags."""

    config: LaCTNVSConfig
    config_class = LaCTNVSConfig
    base_model_prefix = ""
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean over the batch's pixels
    _input_embed_layer = "input_linear"
    _no_split_modules = ["LaCTNVSBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["w0", "w1", "w2"]
    _ttt_functions = TTT_FUNCTIONS
    _ttt_auto_map = AUTO_MAP

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, LaCTNVSOutputLinear):
            modules = len(self.config.block_config) * self.config.num_hidden_layers
            init.normal_(module.weight, std=std * modules**-0.5)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            init.ones_(module.weight)
        elif isinstance(module, LaCTNVSFastWeight):
            for w in (module.w0, module.w1, module.w2):
                init.normal_(w, std=FAST_WEIGHT_GAIN * w.shape[-2] ** -0.5)


class LaCTNVSModel(LaCTNVSPreTrainedModel):
    """The LaCT novel-view model with its decoder: posed images and new cameras → images."""

    def __init__(self, config: LaCTNVSConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        width, pixels = config.hidden_size, config.patch_size**2
        norm = lambda: nn.LayerNorm(width, eps=config.layer_norm_eps, bias=False)  # noqa: E731
        self.input_linear = nn.Linear(CHANNELS * pixels, width, bias=False)
        self.input_layernorm = norm()
        self.blocks = nn.ModuleList([LaCTNVSBlock(config) for _ in range(config.num_hidden_layers)])
        self.image_token_decoder = nn.Sequential(norm(), nn.Linear(width, 3 * pixels, bias=False))
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        intrinsics: Tensor,
        camera_to_world: Tensor,
        target_intrinsics: Tensor,
        target_camera_to_world: Tensor,
        target_pixel_values: Tensor | None = None,
        size: Sequence[int] | None = None,
        world_to_scene: Tensor | None = None,
        scene_scale: Tensor | None = None,
    ) -> LaCTNVSOutput:
        """Target views of scenes: `reconstruct`, then `render`.

        Args:
            pixel_values, intrinsics, camera_to_world, world_to_scene, scene_scale: as in `reconstruct`.
            target_intrinsics, target_camera_to_world: as in `render`.
            target_pixel_values: the target views [B, V', 3, h', w'] in [0, 1], for the loss.
            size: height and width of the target views; that of `target_pixel_values`, or of the input views, if None.

        Raises:
            ValueError: for shapes that do not fit.
        """
        _check_views("pixel_values", pixel_values, self.config.patch_size)
        _check_cameras(target_intrinsics, target_camera_to_world, pixel_values.shape[0], None, "target_")
        if target_pixel_values is not None:
            _check_views("target_pixel_values", target_pixel_values, self.config.patch_size)
            size = tuple(target_pixel_values.shape[-2:]) if size is None else size
            views = (*target_camera_to_world.shape[:2], 3, *size)
            if target_pixel_values.shape != views:
                raise ValueError(
                    f"target_pixel_values has shape {list(target_pixel_values.shape)} where target_camera_to_world and "
                    f"size give {list(views)}"
                )
        scene = self.reconstruct(pixel_values, intrinsics, camera_to_world, world_to_scene, scene_scale)
        size = tuple(pixel_values.shape[-2:]) if size is None else size
        rendered = self.render(scene, target_intrinsics, target_camera_to_world, size)
        loss = None
        if target_pixel_values is not None:
            dtype = accumulation_dtype(rendered)
            loss = F.mse_loss(rendered.to(dtype), target_pixel_values.to(dtype))
        return LaCTNVSOutput(loss=loss, rendered=rendered)

    def reconstruct(
        self,
        pixel_values: Tensor,
        intrinsics: Tensor,
        camera_to_world: Tensor,
        world_to_scene: Tensor | None = None,
        scene_scale: Tensor | None = None,
    ) -> LaCTNVSScene:
        """Scenes from posed images.

        Args:
            pixel_values: the input views [B, V, 3, h, w] in [0, 1].
            intrinsics: [B, V, 4] with fx, fy, cx, cy in pixels, or [B, V, 3, 3].
            camera_to_world: [B, V, 4, 4], as in OpenCV, in the scene's coordinates.
            world_to_scene, scene_scale: [B, 4, 4] and [B], how other cameras get there; the scene keeps them.

        Raises:
            ValueError: for shapes that do not fit.
        """
        _check_views("pixel_values", pixel_values, self.config.patch_size)
        batch, views, _, height, width = pixel_values.shape
        _check_cameras(intrinsics, camera_to_world, batch, views)
        for name, given, shape in (
            ("world_to_scene", world_to_scene, (batch, 4, 4)),
            ("scene_scale", scene_scale, (batch,)),
        ):
            if given is not None and given.shape != shape:
                raise ValueError(f"{name} has shape {list(given.shape)}; expected {list(shape)}")
        colours = pixel_values.permute(0, 1, 3, 4, 2) * 2 - 1
        x, weights = self._embed(intrinsics, camera_to_world, height, width, colours), []
        for i, block in enumerate(self.blocks):
            x, *made = block(x, is_last=i + 1 == len(self.blocks))
            weights += made
        return LaCTNVSScene(to_states(weights), world_to_scene, scene_scale)

    def render(self, scene: LaCTNVSScene, intrinsics: Tensor, camera_to_world: Tensor, size: Sequence[int]) -> Tensor:
        """Views of scenes [B, V, 3, height, width] in (0, 1). What a view costs does not depend on the input views.

        Args:
            scene: of `reconstruct`.
            intrinsics: [B, V, 4] with fx, fy, cx, cy in pixels of `size`, or [B, V, 3, 3].
            camera_to_world: [B, V, 4, 4], as in OpenCV; in the world's coordinates where the scene has its own.
            size: height and width, multiples of the patch size.

        Raises:
            ValueError: for shapes that do not fit.
        """
        _check_cameras(intrinsics, camera_to_world, scene.batch_size)
        _check_size("size", size, self.config.patch_size)
        scene.check_fits(self.config)
        height, width = size
        count = len(scene.states) // len(self.blocks)
        pose = to_scene(camera_to_world, scene.world_to_scene, scene.scene_scale)
        x = self._embed(intrinsics, pose, height, width)
        for i, block in enumerate(self.blocks):
            states = scene.states[i * count : (i + 1) * count]
            x, *_ = block(x, *(w for state in states for w in state.weights))
        colours = torch.sigmoid(self.image_token_decoder(x))
        return from_patches(colours, self.config.patch_size, height, width)

    def load_scene(self, path: str | os.PathLike) -> LaCTNVSScene:
        """Read a scene that `LaCTNVSScene.save` wrote, onto the model's device.

        Raises:
            FileNotFoundError: for a file that is not there.
            ValueError: for one that holds something else, or the scene of another model.
        """
        device = "cpu" if self.device.type == "meta" else str(self.device)  # "meta" where weights are offloaded
        scene = LaCTNVSScene.load(path, device)
        scene.check_fits(self.config)
        return scene

    def _embed(
        self, intrinsics: Tensor, pose: Tensor, height: int, width: int, colours: Tensor | None = None
    ) -> Tensor:
        """Tokens [B, V, T, D] of views: their rays, computed in at least float32, and colours, zero for new views."""
        weight = next(self.input_linear.parameters())
        wide = accumulation_dtype(weight)
        with torch.autocast("cpu" if pose.is_meta else pose.device.type, enabled=False):
            origins, directions = pixel_rays(intrinsics.to(wide), pose.to(wide), height, width)
            moments = torch.linalg.cross(origins, directions)
        colours = torch.zeros_like(directions) if colours is None else colours.to(wide)
        x = patches(torch.cat([origins, directions, moments, colours], -1), self.config.patch_size)
        return self.input_layernorm(self.input_linear(x.to(weight.dtype)))


def _check_size(name: str, size: Sequence[int], patch: int) -> None:
    if not isinstance(size, Sequence) or len(size) != 2 or any(isinstance(side, float | str) for side in size):
        raise ValueError(f"{name}={size!r} must be (height, width), two integers")
    height, width = size
    if height < patch or width < patch or height % patch or width % patch:
        raise ValueError(
            f"{name} has height {height} and width {width}, which must be multiples of patch_size={patch}: resize or "
            "crop (`LaCTNVSProcessor` does both, and adjusts the intrinsics)"
        )


def _check_views(name: str, pixel_values: Tensor, patch: int) -> None:
    if pixel_values.dim() != 5 or pixel_values.shape[2] != 3 or not all(pixel_values.shape[:2]):
        raise ValueError(
            f"{name} has shape {list(pixel_values.shape)}; expected [batch, views, 3, height, width] with at least one "
            "scene and view"
        )
    if not pixel_values.is_floating_point():
        raise ValueError(f"{name} has dtype {pixel_values.dtype}; expected floating-point colours in [0, 1]")
    _check_size(name, pixel_values.shape[-2:], patch)


def _check_cameras(
    intrinsics: Tensor, camera_to_world: Tensor, batch: int, views: int | None = None, prefix: str = ""
) -> None:
    """Any number of views will do where none is given."""
    shape = tuple(camera_to_world.shape)
    count = shape[1] if views is None and len(shape) == 4 else views
    if shape != (batch, count, 4, 4) or count == 0:
        raise ValueError(
            f"{prefix}camera_to_world has shape {list(shape)}; expected [{batch}, {count or 'views'}, 4, 4], a pose "
            "for each view, of which there must be at least one"
        )
    if tuple(intrinsics.shape) not in ((batch, count, 4), (batch, count, 3, 3)):
        raise ValueError(
            f"{prefix}intrinsics has shape {list(intrinsics.shape)}; expected [{batch}, {count}, 4] (fx, fy, cx, cy in "
            f"pixels) or [{batch}, {count}, 3, 3]"
        )


__all__ = ["LaCTNVSModel", "LaCTNVSScene"]
