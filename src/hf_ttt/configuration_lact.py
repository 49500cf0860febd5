# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the LaCT language model."""

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_ttt import make_rule, resolve_inner_loop, variant_fields
from .ttt_rule import TTTRule

_PUBLISHED = {
    "num_hidden_layers": 24,
    "num_attn_heads": 24,
    "num_lact_heads": 4,
    "lact_chunk_size": 2048,
    "window_size": 2048,
    "rope_theta": 1e6,
    "w0_w2_low_rank": 32,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "use_muon": True,
}
SIZES = {
    "760m": {**_PUBLISHED, "hidden_size": 1536, "intermediate_size": 4096},
    "3b": {**_PUBLISHED, "hidden_size": 3072, "intermediate_size": 8192},
}


class LaCTConfig(PreTrainedConfig):
    r"""Configuration of LaCT, a language model whose layers add sliding-window attention and a large-chunk TTT branch.

    Fields and defaults are those of the published code (a1600012888/LaCT), so that its JSON files load unchanged; the
    inner loop is described by fields that all models of this package share.

    Args:
        vocab_size: number of tokens.
        hidden_size: width D of the model.
        num_hidden_layers: number of layers.
        num_attn_heads: heads of the window attention (also `num_attention_heads`).
        num_lact_heads: heads H of the TTT branch; its keys and values have D/H channels.
        inter_multi: hidden width of the fast network over its input width.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        attn_qk_norm: whether queries and keys are normalised over all channels.
        lact_chunk_size: tokens per update of the fast weights.
        window_size: tokens that the attention sees, itself included (also `sliding_window`); None for all before.
        lr_dim: rates per token and head: 1, or the key width for one per channel (hidden and key width are then equal).
        lr_parameterization: "mamba": rate = softplus(linear(x) + c), 0.001 at a linear output of zero.
        qkv_silu, no_v_silu: whether the TTT branch applies silu to its queries, keys and values; not to its values.
        learnable_ttt_scale: whether the output of the TTT branch is scaled by silu(linear(x)), per head.
        ttt_nope: whether the TTT branch goes without rotary position embeddings.
        w0_w2_low_rank: rank of w0 and w2 over half the identity; -1 for full matrices.
        fw_init_gain: gain of the initialisation of low-rank weights.
        max_position_embeddings, rope_parameters: of the rotary embedding; `rope_theta` is read into it.
        hidden_ratio, intermediate_size: width of the MLP; if None, 2/3 hidden_ratio D rounded up to 256.
        hidden_act: activation of the MLP.
        norm_eps: of the RMS norms (also `rms_norm_eps`).
        initializer_range: standard deviation of the initial linear and embedding weights.
        use_cache, tie_word_embeddings, pad_token_id, bos_token_id, eos_token_id: as in transformers.
        ttt_loss_type: inner loss, "dot_product" or "mse". The suffixed names of the published variants, such as
            "only_w1_no_wn_parallel", are read and become the fields below.
        ttt_update: which fast weights a step updates: "all" or "last" (w1).
        ttt_weight_norm: "post", "pre" or "none"; `ttt_prenorm=True` means "pre".
        ttt_fast_weight: "swiglu" or "linear" (then inter_multi must be 1).
        ttt_learnable_lr: whether rates are learned; otherwise they are 1.
        use_momentum: whether updates have momentum, learned per token and head.
        use_muon: whether updates are orthogonalised by Newton–Schulz iteration.
        ttt_muon_dtype: "float32", or "bfloat16" as published (not reproducible between kernels).
        ttt_direction: "descent" or "ascent" on the inner loss.
        ttt_read_with: "query" or "key".
        ttt_inner_steps: gradient steps per chunk.
        ttt_implementation: "recurrent", "parallel" (where exact), or "auto".
        ttt_backend: "auto", "torch" or "triton"; belongs to a machine and is not written to config.json.
        use_fused_kernel: of the published code. Without Muon it is the same function up to a relative 1e-5 and is
            ignored; with Muon it is another function, and building a model is an error.
        fuse_norm, last_layer_fuse_norm, fuse_swiglu, fuse_cross_entropy, fp32_states: of the published code, ignored:
            they choose kernels, and fast weights are always float32 here.

    Raises:
        ValueError: for values that are not known or contradict each other. What only prevents a model from being built,
            such as heads that do not divide the width, is said when one is.
    """

    model_type = "lact_swiglu"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {
        "num_attention_heads": "num_attn_heads",
        "num_key_value_heads": "num_attn_heads",
        "sliding_window": "window_size",
        "rms_norm_eps": "norm_eps",
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_attn_heads: int = 32
    num_lact_heads: int = 4
    inter_multi: int | float = 1
    qkv_bias: bool = False
    attn_qk_norm: bool = False
    lact_chunk_size: int = 2048
    window_size: int | None = 2048
    lr_dim: int = 1
    lr_parameterization: str = "mamba"
    qkv_silu: bool = True
    no_v_silu: bool = False
    learnable_ttt_scale: bool = True
    ttt_nope: bool = False
    w0_w2_low_rank: int = -1
    fw_init_gain: float = 0.5
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    hidden_ratio: int | float = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    norm_eps: float = 1e-6
    initializer_range: float = 0.006
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    ttt_loss_type: str = "dot_product"
    ttt_update: str | None = None
    ttt_weight_norm: str | None = None
    ttt_fast_weight: str | None = None
    ttt_learnable_lr: bool | None = None
    use_momentum: bool = True
    use_muon: bool = False
    ttt_muon_dtype: str = "float32"
    ttt_direction: str | None = None
    ttt_read_with: str | None = None
    ttt_inner_steps: int = 1
    ttt_implementation: str | None = None
    ttt_backend: str = "auto"

    use_fused_kernel: bool = False
    fuse_norm: bool = True
    last_layer_fuse_norm: bool = True
    fuse_swiglu: bool = True
    fuse_cross_entropy: bool = True
    fp32_states: bool = False

    def __post_init__(self, **kwargs):
        resolve_inner_loop(self, prenorm=bool(kwargs.pop("ttt_prenorm", False)))
        if self.intermediate_size is None:
            width = int(self.hidden_size * self.hidden_ratio * 2 / 3)
            self.intermediate_size = 256 * ((width + 255) // 256)
        if self.lr_parameterization != "mamba":
            raise ValueError(f"lr_parameterization={self.lr_parameterization!r} is not known; expected 'mamba'")
        super().__post_init__(**kwargs)
        self.rule  # noqa: B018  the values of its fields are checked here

    @classmethod
    def variant(cls, name: str, **fields: Any) -> "LaCTConfig":
        """The inner loop of a row of the paper's Table 2, "baseline" or "variant1" to "variant6".

        Args:
            name: the variant.
            fields: any fields of the configuration; they win over those of the variant.

        Raises:
            ValueError: for a name that is not known.
        """
        return cls(**{**variant_fields(name, momentum=True), **fields})

    @classmethod
    def size(cls, name: str, **fields: Any) -> "LaCTConfig":
        """A published size, "760m" or "3b" (with 24 attention heads), with Muon and momentum as published.

        Args:
            name: the size.
            fields: any fields of the configuration; they win over those of the size.

        Raises:
            ValueError: for a name that is not known.
        """
        if name not in SIZES:
            raise ValueError(f"size {name!r} is not known; expected one of {', '.join(map(repr, SIZES))}")
        return cls(**{**SIZES[name], **fields})

    @property
    def rule(self) -> TTTRule:
        """The inner loop as a `TTTRule`."""
        return make_rule(self, muon="lact", detach_norms=False)

    @property
    def fast_head_dim(self) -> int:
        """Key and value width of a TTT head."""
        return self.hidden_size // self.num_lact_heads

    @property
    def fast_hidden_dim(self) -> int:
        """Hidden width of the fast network."""
        return int(self.fast_head_dim * self.inter_multi)

    def check_buildable(self) -> None:
        """Raise a `ValueError` that says why no model can be built with this configuration, if so."""
        for name in ("num_attn_heads", "num_lact_heads", "lact_chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("num_attn_heads", "num_lact_heads"):
            if self.hidden_size % getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} does not divide hidden_size={self.hidden_size}")
        if (self.hidden_size // self.num_attn_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over num_attn_heads={self.num_attn_heads} gives an odd head width, "
                "which rotary embeddings cannot rotate"
            )
        if self.window_size is not None and self.window_size < 1:
            raise ValueError(f"window_size={self.window_size} must be at least 1, or None for all tokens")
        widths = (self.fast_head_dim, self.fast_hidden_dim)
        if self.ttt_fast_weight == "linear" and widths[0] != widths[1]:
            raise ValueError(
                f"inter_multi={self.inter_multi} gives a hidden width of {widths[1]} for keys of {widths[0]}, but "
                "ttt_fast_weight='linear' needs them equal: set inter_multi=1"
            )
        if self.lr_dim != 1 and not (self.lr_dim == widths[0] == widths[1]):
            raise ValueError(f"lr_dim={self.lr_dim} must be 1, or equal to both the key and hidden widths {widths}")
        self._check_rope()
        if self.use_fused_kernel and self.use_muon:
            raise ValueError(
                "use_fused_kernel=True with use_muon=True is another function in the published code (w0 and w2 are "
                "orthogonalised as one matrix): set use_fused_kernel=False for the function of its eager code"
            )

    def _check_rope(self) -> None:
        rope_type = self.rope_parameters["rope_type"]
        known = ("default", *ROPE_INIT_FUNCTIONS)
        if rope_type not in known:
            raise ValueError(f"rope_type={rope_type!r} is not known; expected {', '.join(map(repr, known))}")
        part = self.rope_parameters.get("partial_rotary_factor", 1.0)
        if part != 1.0 and rope_type != "proportional":
            raise ValueError(
                f"partial_rotary_factor={part} does not fit: rope_type={rope_type!r} rotates whole heads here. Leave "
                "it out, or set rope_type='proportional'"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary, without `ttt_backend`, which belongs to a machine."""
        output = super().to_dict()
        output.pop("ttt_backend", None)
        return output


__all__ = ["LaCTConfig"]
