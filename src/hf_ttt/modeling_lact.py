# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""LaCT: a language model whose layers add sliding-window attention and a large-chunk TTT branch.

Architecture and parameter names: LaCT (Zhang et al., "Test-Time Training Done Right", arXiv 2505.23884; code
a1600012888/LaCT, whose state dicts load unchanged). The inner loop and its variants: `TTTRule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_ttt import CACHE_KEY, TTTCache, static_cache
from .configuration_lact import LaCTConfig
from .decoding_ttt import TTTDecodingMixin
from .modeling_ttt import TTTPreTrainedModel, accumulation_dtype, keep_unused
from .ttt_interface import CallSize
from .ttt_layout import (
    TTTLayout,
    document_boundaries,
    document_positions,
    make_layout,
    padding_mask,
    real_positions,
)
from .ttt_ops import TTT_FUNCTIONS, evaluate
from .ttt_state import ttt_init

logger = logging.get_logger(__name__)

INNER_NORM_EPS = 1e-5  # of the query, key and TTT-output norms and the l2 norm, as published
BASE_RATE = 0.001  # rate at a linear output of zero
AUTO_MAP = {
    "AutoConfig": "configuration_lact.LaCTConfig",
    "AutoModel": "modeling_lact.LaCTModel",
    "AutoModelForCausalLM": "modeling_lact.LaCTForCausalLM",
    "AutoModelForSequenceClassification": "modeling_lact.LaCTForSequenceClassification",
}


class LaCTRMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(accumulation_dtype(x))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.to(h.dtype)
        return h.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LaCTRotaryEmbedding(nn.Module):
    """Tables cos, sin [B, T, head width] of rotary position embeddings, of any type that `rope_parameters` names."""

    inv_freq: Tensor

    def __init__(self, config: LaCTConfig):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        compute = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = compute(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: LaCTConfig, device=None, **kwargs: Any) -> tuple[Tensor, float]:
        """Frequencies θ^(−2i/d) and the scaling 1.0 of the default type."""
        width = config.hidden_size // config.num_attn_heads
        exponents = torch.arange(0, width, 2, dtype=torch.float, device=device) / width
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device).float()
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half against half: x [B, T, heads, width], cos and sin [B, T, width]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[..., None, :] + torch.cat((-second, first), dim=-1) * sin[..., None, :]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads · width] → [B, T, heads, width]. Both sizes are given: with no elements, neither can be inferred."""
    return x.unflatten(-1, (heads, x.shape[-1] // heads))


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scaling + mask) v: [B, heads, T, width] → [B, T, heads, width] and the weights."""
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = F.softmax(weights, dim=-1, dtype=accumulation_dtype(weights)).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class LowRankFastWeight(nn.Module):
    """Initial fast weights w_left w_right + ½ I: [H, out, rank] × [H, rank, in]."""

    def __init__(self, heads: int, out_width: int, in_width: int, rank: int):
        super().__init__()
        self.w_left = nn.Parameter(torch.empty(heads, out_width, rank, dtype=torch.float32))
        self.w_right = nn.Parameter(torch.empty(heads, rank, in_width, dtype=torch.float32))

    def forward(self) -> Tensor:
        left = self.w_left.to(accumulation_dtype(self.w_left))
        eye = torch.eye(left.shape[1], self.w_right.shape[2], dtype=left.dtype, device=left.device)
        return left @ self.w_right.to(left.dtype) + 0.5 * eye


class LaCTAttention(nn.Module):
    """Window attention plus the TTT branch, which share queries, keys and values."""

    def __init__(self, config: LaCTConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        width, heads = config.hidden_size, config.num_lact_heads
        self.head_dim = width // config.num_attn_heads
        self.scaling = self.head_dim**-0.5
        self.sliding_window = config.window_size
        self.is_causal = True
        self.num_key_value_groups = 1
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        if config.attn_qk_norm:
            self.q_norm = LaCTRMSNorm(width, INNER_NORM_EPS)
            self.k_norm = LaCTRMSNorm(width, INNER_NORM_EPS)
        self.o_proj = nn.Linear(width, width, bias=False)

        key, hidden, rank = config.fast_head_dim, config.fast_hidden_dim, config.w0_w2_low_rank
        empty = lambda *shape: nn.Parameter(torch.empty(heads, *shape, dtype=torch.float32))  # noqa: E731
        self.w0 = LowRankFastWeight(heads, hidden, key, rank) if rank > 0 else empty(hidden, key)
        self.w1 = empty(key, hidden)
        self.w2 = LowRankFastWeight(heads, hidden, key, rank) if rank > 0 else empty(hidden, key)
        self.lr_proj = nn.Linear(width, 3 * config.lr_dim * heads)
        self.qk_scale = nn.Parameter(torch.ones(width, 2))
        self.qk_offset = nn.Parameter(torch.zeros(width, 2))
        self.ttt_norm = LaCTRMSNorm(key, INNER_NORM_EPS)
        if config.learnable_ttt_scale:
            self.ttt_scale_proj = nn.Linear(width, heads)
        if config.use_momentum:
            self.momentum_proj = nn.Sequential(nn.Linear(width, heads))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        layout: TTTLayout,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.qkv(hidden_states).chunk(3, dim=-1)
        if self.config.attn_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out, weights = self._window_attention(q, k, v, position_embeddings, attention_mask, cache, **kwargs)
        out = out + self._ttt(hidden_states, q, k, v, position_embeddings, layout, cache)
        return self.o_proj(out), weights

    def _window_attention(self, q, k, v, position_embeddings, attention_mask, cache, **kwargs):
        q, k, v = (split_heads(x, self.config.num_attn_heads) for x in (q, k, v))
        q, k = (rotate(x, *position_embeddings).to(v.dtype) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if not q.numel():  # no rows or no tokens, which transformers' functions do not accept
            return q.transpose(1, 2).flatten(2), None
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        settings = {"dropout": 0.0, "scaling": self.scaling, "sliding_window": self.sliding_window}
        out, weights = attend(self, q, k, v, attention_mask, **settings, **kwargs)
        return out.flatten(2), weights

    def _ttt(self, hidden_states, q, k, v, position_embeddings, layout: TTTLayout, cache: Cache | None) -> Tensor:
        config, rule = self.config, self.config.rule
        heads, dtype = config.num_lact_heads, v.dtype
        wide = accumulation_dtype(v)
        size = CallSize(v.device, max(config.fast_head_dim, config.fast_hidden_dim), v[..., 0].numel() * heads, wide)
        backend = TTT_FUNCTIONS.resolve(rule, config.ttt_implementation, config.ttt_backend, size)[1]
        q, k = (self._fast_input(x, i, position_embeddings, wide, backend).to(dtype) for i, x in enumerate((q, k)))
        v = split_heads(F.silu(v) if config.qkv_silu and not config.no_v_silu else v, heads)

        # bias such that a linear output of zero gives BASE_RATE: softplus⁻¹(y) = y + log(1 − e^−y)
        offset = BASE_RATE + math.log(-math.expm1(-BASE_RATE))
        if config.ttt_learnable_lr:
            rates = F.softplus(self.lr_proj(hidden_states).to(wide) + offset)
            lr0, lr1, lr2 = split_heads(rates, heads).chunk(3, dim=-1)
        else:
            lr0 = lr1 = lr2 = None
        momentum = None
        if config.use_momentum:
            momentum = torch.sigmoid(self.momentum_proj(hidden_states).to(wide))[..., None]

        layer = None if cache is None else cache.layers[self.layer_idx]
        w0, w2 = (w() if isinstance(w, LowRankFastWeight) else w for w in (self.w0, self.w2))
        if layer is None or layer.ttt is None:
            state = ttt_init(w0.to(wide), self.w1.to(wide), w2.to(wide), rule, layout.rows)
        else:
            state = layer.ttt
        out, state = evaluate(
            q,
            k,
            v,
            lr0,
            lr1,
            lr2,
            momentum,
            state,
            layout,
            rule=rule,
            implementation=config.ttt_implementation,
            backend=config.ttt_backend,
            in_place=True,
        )
        if layer is not None:
            layer.ttt = state
        out = self.ttt_norm(out)
        if config.learnable_ttt_scale:
            out = out * F.silu(self.ttt_scale_proj(hidden_states)).to(out.dtype)[..., None]
        if not config.ttt_learnable_lr and torch.is_grad_enabled():
            out = keep_unused(out, self.lr_proj.weight, self.lr_proj.bias)
        return out.flatten(2).to(dtype)

    def _fast_input(
        self, x: Tensor, column: int, position_embeddings, dtype: torch.dtype, backend: str = "torch"
    ) -> Tensor:
        """Queries (column 0) or keys (1) of the TTT branch [B, T, H, width]: scale, silu, l2 norm, rotation.

        The rotation takes the channels as attention heads, as published."""
        config, heads = self.config, self.config.num_lact_heads
        scale, offset = self.qk_scale[:, column], self.qk_offset[:, column]
        if backend == "triton":
            from .ttt_triton_norm import head_norm

            x = head_norm(x, scale, offset, heads=heads, eps=INNER_NORM_EPS, silu=config.qkv_silu, dtype=dtype)
        else:
            x = x.to(dtype) * scale.to(dtype) + offset.to(dtype)
            x = split_heads(F.silu(x) if config.qkv_silu else x, heads)
            x = x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + INNER_NORM_EPS)
        if not config.ttt_nope:
            cos, sin = position_embeddings
            x = rotate(split_heads(x.flatten(2), config.num_attn_heads), cos.to(dtype), sin.to(dtype))
        return split_heads(x.flatten(2), heads)


class LaCTMLP(nn.Module):
    """down(act(gate x) ⊙ up x)."""

    def __init__(self, config: LaCTConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LaCTDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: LaCTConfig, layer_idx: int):
        super().__init__()
        self.attn_norm = LaCTRMSNorm(config.hidden_size, config.norm_eps)
        self.attn = LaCTAttention(config, layer_idx)
        self.mlp_norm = LaCTRMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = LaCTMLP(config)

    def forward(
        self, hidden_states: Tensor, cache: Cache | None = None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> Tensor:
        cache = past_key_values if cache is None else cache
        hidden_states = hidden_states + self.attn(self.attn_norm(hidden_states), cache=cache, **kwargs)[0]
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class LaCTPreTrainedModel(TTTPreTrainedModel):
    """What the LaCT models share: see `TTTPreTrainedModel`."""

    config: LaCTConfig
    config_class = LaCTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embeddings"
    _no_split_modules = ["LaCTDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _is_stateful = True
    _can_record_outputs = {"hidden_states": LaCTDecoderLayer, "attentions": LaCTAttention}
    _keep_in_fp32_modules_strict = ["w0", "w1", "w2"]
    _ttt_functions = TTT_FUNCTIONS
    _ttt_auto_map = AUTO_MAP

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LaCTAttention):
            key, hidden = self.config.fast_head_dim, self.config.fast_hidden_dim
            for name, fan_in in (("w0", key), ("w1", hidden), ("w2", key)):
                w = getattr(module, name)
                if isinstance(w, nn.Parameter):
                    init.normal_(w, std=fan_in**-0.5)
            init.ones_(module.qk_scale)
            init.zeros_(module.qk_offset)
        elif isinstance(module, LowRankFastWeight):
            gain = self.config.fw_init_gain
            init.normal_(module.w_left, std=gain * module.w_left.shape[-1] ** -0.5)
            init.normal_(module.w_right, std=gain * module.w_right.shape[-1] ** -0.5)


class LaCTModel(LaCTPreTrainedModel):
    """The LaCT language model without a head: token ids → hidden states."""

    def __init__(self, config: LaCTConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([LaCTDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LaCTRMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = LaCTRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the tokens.

        Args:
            input_ids: [B, T]; or inputs_embeds: [B, T, D].
            attention_mask: [B, past + T], 1 at real tokens and 0 at padding on the left or right. Chunks and positions
                count from a row's first real token. With a `TTTStaticCache`, which remembers it, also [B, T].
            position_ids: [B, T]; where they restart, a packed document begins (without padding and cache).
            cache: `TTTCache`, `TTTStaticCache` (or an empty `DynamicCache`) with the tokens before; also
                `past_key_values`.
            use_cache: whether to return a cache.
            cu_seqlens: boundaries of packed documents in a batch of 1; also `cu_seq_lens_q`.

        Raises:
            ValueError: for arguments that contradict each other or a mask that is not two-dimensional.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "pass either input_ids or inputs_embeds" + (", not both" if inputs_embeds is not None else "")
            )
        hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        cu_seqlens = kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
        past = 0 if cache is None else cache.get_seq_length()
        only_new = attention_mask is not None and attention_mask.shape == hidden_states.shape[:2]
        covered = 0 if only_new and static_cache(cache) else past
        mask, new_mask = padding_mask(attention_mask, hidden_states, covered)
        cu_seqlens = document_boundaries(
            cu_seqlens, position_ids if mask is None and past == 0 else None, hidden_states
        )
        if cu_seqlens is not None:
            _check_empty(cache)
            cache, use_cache = None, False
            if mask is not None:
                raise ValueError("attention_mask has zeros and packed documents are given: pass one of them")
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            _check_empty(cache)
            cache, use_cache = None, False
        if cache is not None or use_cache:
            cache = TTTCache(self.config) if cache is None else TTTCache.adopt(cache, self.config)

        restarting = document_positions(cu_seqlens, hidden_states)
        static, layout = static_cache(cache), None
        if static is not None:
            mask, positions, layout = static.begin_call(hidden_states, new_mask)
        else:
            positions = real_positions(mask, hidden_states, past) if restarting is None else restarting
        position_ids = positions if position_ids is None else position_ids
        if layout is None:
            layout = self._layout(hidden_states, new_mask, cu_seqlens, cache)
        masks = {
            "config": self.config,
            "inputs_embeds": hidden_states,
            "attention_mask": mask,
            CACHE_KEY: cache if static is None else static.geometry,
            "position_ids": restarting,  # read only to find documents
        }
        make_mask = create_causal_mask if self.config.window_size is None else create_sliding_window_causal_mask
        causal_mask = make_mask(**masks) if hidden_states.numel() else None
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=causal_mask,
                layout=layout,
                position_ids=position_ids if restarting is None else restarting,
                use_cache=use_cache,
                **{CACHE_KEY: cache},
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), **{CACHE_KEY: cache if use_cache else None}
        )

    def _layout(self, hidden_states: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: Cache | None):
        state = None if cache is None else cache.layers[0].ttt
        counts = None if state is None or state.count is None else state.count.tolist()
        return make_layout(
            hidden_states.shape[0],
            hidden_states.shape[1],
            self.config.lact_chunk_size,
            attention_mask=mask,
            cu_seqlens=cu_seqlens,
            counts=counts,
            has_state=state is not None,
            return_state=cache is not None,
            device=hidden_states.device,
        )


def _check_empty(cache: Cache | None) -> None:
    """Refuse to go on without a cache that has tokens: that would change the numbers."""
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "a cache with tokens was passed together with packed documents or gradient checkpointing in training, "
            "which cannot continue from it: pass no cache"
        )


class LaCTForCausalLM(TTTDecodingMixin, LaCTPreTrainedModel, GenerationMixin):
    """The LaCT language model with a head that predicts the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: LaCTConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.model = LaCTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and the loss if there are labels. Arguments as in `LaCTModel.forward`, and

        Args:
            labels: [B, T]; shifted here, -100 is ignored. `num_items_in_batch` replaces the mean by a sum over it.
            logits_to_keep: compute logits of the last so many tokens, or of these indices; 0 for all.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_KEY: outputs.get(CACHE_KEY)},
        )


class LaCTForSequenceClassification(LaCTPreTrainedModel):
    """The LaCT language model with a linear head on the last real token of each row."""

    accepts_loss_kwargs = False  # the loss is a mean over rows, which `num_items_in_batch` does not change

    def __init__(self, config: LaCTConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.num_labels = config.num_labels
        self.model = LaCTModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Logits [B, num_labels], and the loss if there are labels. Arguments as in `LaCTModel.forward`, and

        Args:
            labels: [B] class indices, or [B] or [B, num_labels] targets of a regression or multi-label problem.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        last = self._last_token(input_ids, attention_mask, hidden_states)
        logits = self.score(hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_KEY: outputs.get(CACHE_KEY)},
        )

    def _last_token(self, input_ids: Tensor | None, attention_mask: Tensor | None, x: Tensor) -> Tensor:
        """Index of the last real token of each row, by the mask or, without one, by the padding id."""
        batch, length = x.shape[:2]
        if length == 0:
            raise ValueError(f"the input has shape [{batch}, 0]; a row needs at least one token to be classified")
        if attention_mask is not None:
            real = attention_mask[:, -length:] != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        elif batch == 1 or input_ids is None:
            return torch.full((batch,), length - 1, device=x.device)
        else:
            raise ValueError(
                f"a batch of {batch} without attention_mask needs config.pad_token_id to find each row's last token"
            )
        return (real * torch.arange(length, device=x.device)).argmax(-1)


__all__ = ["LaCTPreTrainedModel", "LaCTModel", "LaCTForCausalLM", "LaCTForSequenceClassification"]
