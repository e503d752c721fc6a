"""Two layers that Megatron-core takes from CUDA libraries, in plain torch: norm and attention.

Shape legend: s slots of a sequence, b sequences, t packed tokens, h query heads, g key/value heads
(h is a multiple of g), d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with the constructor that Megatron's layer specs call."""

    def __init__(self, config: Any, hidden_size: int, eps: float | None = None, **_: Any) -> None:
        super().__init__(hidden_size, eps=config.layernorm_epsilon if eps is None else eps)
        # read by Megatron's gradient reduction on each parameter
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(torch.nn.Module):
    """Causal grouped-query attention on one rank, for [s, b, h, d] and for packed [t, h, d].

    The mask follows from the layout: padding is at the end, where causality hides it from every
    token before it; packed tokens see their own sequence only.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        """query [s, b, h, d] or [t, h, d]; key and value with g heads. Returns [s, b, h * d] or
        [t, h * d]."""
        packed = query.dim() == 3
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        s, b = query.shape[:2]
        place = torch.arange(s)
        visible = place[:, None] >= place
        if packed:
            sequence = torch.bucketize(place, packed_seq_params.cu_seqlens_q[1:], right=True)
            visible &= sequence[:, None] == sequence
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out = out.permute(2, 0, 1, 3).reshape(s, b, -1)
        return out.squeeze(1) if packed else out
