# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Configurations of the vision models ViTTT and H-ViTTT."""

from typing import Any

from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig

from .configuration_ttt import resolve_inner_loop, variant_fields
from .ttt_vision import VisionRule

_INNER_LOOP_DEFAULTS: dict[str, Any] = {
    "ttt_loss_type": "dot_product",
    "ttt_update": "all",
    "ttt_fast_weight": "swiglu",
    "ttt_direction": "descent",
    "ttt_read_with": "query",
    "use_muon": True,
    "ttt_implementation": "auto",
}
_ABSENT = ("ttt_weight_norm", "ttt_prenorm", "ttt_learnable_lr", "use_momentum", "ttt_muon_dtype")
_SIZES = {
    "tiny": {"hidden_size": 192, "num_attention_heads": 6, "drop_path_rate": 0.0},
    "small": {"hidden_size": 384, "num_attention_heads": 6, "drop_path_rate": 0.1},
    "base": {"hidden_size": 768, "num_attention_heads": 12, "drop_path_rate": 0.4},
}
_HIERARCHICAL_SIZES = {
    "tiny": {"hidden_sizes": (64, 128, 320, 512), "depths": (1, 3, 9, 4), "drop_path_rate": 0.2},
    "small": {"hidden_sizes": (64, 128, 320, 512), "depths": (2, 6, 18, 8), "drop_path_rate": 0.4},
    "base": {"hidden_sizes": (96, 192, 448, 640), "depths": (2, 6, 18, 8), "drop_path_rate": 0.6},
}


class _VisionConfig(BackboneConfigMixin, PreTrainedConfig):
    """What both configurations share: most fields, those of the inner loop among them. A subclass has `_sizes`."""

    image_size: int | list[int] | tuple[int, int] = 224
    num_channels: int = 3
    mlp_ratio: int | float = 4
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    drop_path_rate: int | float = 0.0
    initializer_range: float = 0.02
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    ttt_loss_type: str = "dot_product"
    ttt_update: str | None = None
    ttt_fast_weight: str | None = None
    ttt_direction: str | None = None
    ttt_read_with: str | None = None
    use_muon: bool | None = None
    ttt_inner_steps: int = 1
    ttt_implementation: str | None = None
    ttt_backend: str = "auto"

    def _resolve(self, kwargs: dict[str, Any], stages: int) -> None:
        """Check the fields of the inner loop, and set what a backbone returns."""
        for name in _ABSENT:
            value = kwargs.pop(name, None)
            if value not in (None, False, "none"):
                raise ValueError(f"{name}={value!r} does not apply: {self.model_type!r} has no such part; leave it out")
        resolve_inner_loop(self, defaults=_INNER_LOOP_DEFAULTS)
        self.rule  # noqa: B018  the values of its fields are checked here
        if self.ttt_read_with not in ("query", "key"):
            raise ValueError(f"ttt_read_with={self.ttt_read_with!r} is not one of 'query', 'key'")
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(f"drop_path_rate={self.drop_path_rate} must be in [0, 1)")
        self.stage_names = ["stem", *(f"stage{i}" for i in range(1, stages + 1))]
        self.set_output_features_output_indices(
            out_features=kwargs.pop("out_features", None), out_indices=kwargs.pop("out_indices", None)
        )

    @classmethod
    def variant(cls, name: str, **fields: Any) -> "_VisionConfig":
        """The inner loop of a row of the paper's Table 2, "baseline" or "variant1" to "variant6".

        What the architecture lacks is skipped: variant 2 equals variant 1, and variants 4 and 5 equal variant 3.

        Args:
            name: the variant.
            fields: any fields of the configuration; they win over those of the variant.

        Raises:
            ValueError: for a name that is not known.
        """
        inner = {key: value for key, value in variant_fields(name, momentum=False).items() if key not in _ABSENT}
        return cls(**{**inner, **fields})

    @classmethod
    def size(cls, name: str, **fields: Any) -> "_VisionConfig":
        """A published size, "tiny", "small" or "base".

        Args:
            name: the size.
            fields: any fields of the configuration; they win over those of the size.

        Raises:
            ValueError: for a name that is not known.
        """
        if name not in cls._sizes:
            raise ValueError(f"size {name!r} is not known; expected one of {', '.join(map(repr, cls._sizes))}")
        return cls(**{**cls._sizes[name], **fields})

    @property
    def rule(self) -> VisionRule:
        """The inner step as a `VisionRule`."""
        return VisionRule(
            update=self.ttt_update,
            fast_weight=self.ttt_fast_weight,
            loss=self.ttt_loss_type,
            direction=self.ttt_direction,
            normalise=self.use_muon,
            inner_steps=self.ttt_inner_steps,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary, without `ttt_backend`, which belongs to a machine."""
        output = super().to_dict()
        output.pop("ttt_backend", None)
        return output


def _check_heads(width: int, heads: int, where: str) -> None:
    if heads < 1 or width < 1 or width % heads:
        raise ValueError(f"num_attention_heads={heads} does not divide {where}={width}")


class ViTTTConfig(_VisionConfig):
    r"""Configuration of ViTTT, a plain vision transformer whose attention is a TTT block.

    Defaults are those of the published ViTTT-S (LeapLabTHU/ViTTT).

    Args:
        image_size: side of the images in training, or their height and width, for image processors; models take any
            size.
        patch_size: side of a patch.
        num_channels: channels of an image.
        hidden_size: width.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads of the gated branch; its fast weights are as wide as one head.
        mlp_ratio: width of the MLP over hidden_size.
        hidden_act: activation of the MLP.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0.
        layer_norm_eps: of the layer norms.
        initializer_range: standard deviation of the initial linear weights and fast weights.
        apply_layernorm: whether the backbone's feature maps go through the final norm.
        out_features, out_indices: which of "stem", "stage1", … (one per block) a backbone returns; the last if None.
        ttt_loss_type: inner loss of the gated branch, "dot_product" or "mse". Names of the published ablations, such as
            "only_w1_straight_qk", are read and become the fields below.
        ttt_update: which weights of the gated branch a step updates: "all" or "last" (w1).
        ttt_fast_weight: "swiglu"; "linear" (as published, values carry a factor k w1); or "linear_plain".
        ttt_direction: "descent" or "ascent" (gated branch only).
        ttt_read_with: "query" or "key".
        use_muon: whether the gated branch divides the columns of its step by 1 + their norm.
        ttt_inner_steps: steps on each image.
        ttt_implementation: "recurrent", "parallel" (with one inner step), or "auto".
        ttt_backend: "auto", "torch" or "triton"; belongs to a machine and is not written to config.json.

    `ttt_weight_norm`, `ttt_learnable_lr` and `use_momentum`, which other models of this package have, do not apply:
    setting one is an error.

    Raises:
        ValueError: for values that are not known or contradict each other.
    """

    model_type = "vittt"
    _sizes = _SIZES

    patch_size: int = 16
    hidden_size: int = 384
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    layer_norm_eps: float = 1e-6
    apply_layernorm: bool = True

    def __post_init__(self, **kwargs):
        self._resolve(kwargs, self.num_hidden_layers)
        super().__post_init__(**kwargs)

    def check_buildable(self) -> None:
        """Raise a `ValueError` that says why no model can be built with this configuration, if so."""
        _check_heads(self.hidden_size, self.num_attention_heads, "hidden_size")
        for name in ("patch_size", "num_channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


class HViTTTConfig(_VisionConfig):
    r"""Configuration of H-ViTTT, a vision model of stages with halving resolution.

    Defaults are those of the published H-ViTTT-T (LeapLabTHU/ViTTT).

    Args:
        image_size: side of the images in training, or their height and width, for image processors; models take any
            size.
        num_channels: channels of an image.
        hidden_sizes: width of each stage.
        depths: blocks of each stage.
        num_attention_heads: heads of each stage; one for 32 channels if None.
        mlp_ratio: width of an MLP over its stage's.
        hidden_act: activation of the MLPs.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0.
        layer_norm_eps: of the layer norms.
        initializer_range: standard deviation of the initial linear weights and fast weights.
        rope_theta: base of the two-dimensional rotary embedding.
        out_features, out_indices: which of "stem", "stage1", … a backbone returns; the last if None.

    The fields of the inner loop are those of `ViTTTConfig`.

    Raises:
        ValueError: for values that are not known or contradict each other.
    """

    model_type = "h_vittt"
    _sizes = _HIERARCHICAL_SIZES

    hidden_sizes: list[int] | tuple[int, ...] = (64, 128, 320, 512)
    depths: list[int] | tuple[int, ...] = (1, 3, 9, 4)
    num_attention_heads: list[int] | tuple[int, ...] | None = None
    layer_norm_eps: float = 1e-5
    rope_theta: int | float = 10000.0

    def __post_init__(self, **kwargs):
        self.hidden_sizes, self.depths = list(self.hidden_sizes), list(self.depths)
        if self.num_attention_heads is None:
            self.num_attention_heads = [max(1, width // 32) for width in self.hidden_sizes]
        self.num_attention_heads = list(self.num_attention_heads)
        if not len(self.hidden_sizes) == len(self.depths) == len(self.num_attention_heads) >= 1:
            raise ValueError(
                f"hidden_sizes={self.hidden_sizes}, depths={self.depths} and num_attention_heads="
                f"{self.num_attention_heads} must have one entry for each stage"
            )
        self._resolve(kwargs, len(self.depths))
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        """Width of the last stage."""
        return self.hidden_sizes[-1]

    @property
    def num_hidden_layers(self) -> int:
        """Number of stages."""
        return len(self.depths)

    def check_buildable(self) -> None:
        """Raise a `ValueError` that says why no model can be built with this configuration, if so."""
        for width, heads in zip(self.hidden_sizes, self.num_attention_heads, strict=True):
            _check_heads(width, heads, "hidden_sizes")
            if width % 4:
                raise ValueError(
                    f"hidden_sizes has {width}, which the rotary embedding of rows and columns needs to be "
                    "a multiple of 4"
                )
        if self.num_channels < 1:
            raise ValueError(f"num_channels={self.num_channels} must be at least 1")


__all__ = ["HViTTTConfig", "ViTTTConfig"]
