"""Two layers that Megatron-core takes from CUDA libraries, in plain torch: norm and attention.

Shape legend: s slots of a sequence, b sequences, t packed tokens (s and t: those on this rank, S
those of all context-parallel ranks), h query heads, g key/value heads (h is a multiple of g), d
head size.
"""

from __future__ import annotations

import itertools
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
    """Causal grouped-query attention for [s, b, h, d] and for packed [t, h, d].

    A token sees itself and what lies before it in its own sequence, less what an attention mask
    hides; padding at the end needs none. Under context parallelism a rank holds its zig-zag share
    of the queries, and keys and values are gathered.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        """query [s, b, h, d] or [t, h, d]; key and value with g heads. Returns [s, b, h * d] or
        [t, h * d].

        attention_mask: bool [b or 1, 1, s, S], true where a key is hidden from a query.
        """
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        packed = query.dim() == 3
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        s, b = query.shape[:2]
        group = parallel_state.get_context_parallel_group()
        cp = group.size()
        ends = [0, s * cp] if packed_seq_params is None else _boundaries(packed_seq_params)
        positions = zigzag_positions(ends, cp, group.rank()) if cp > 1 else torch.arange(s)
        if cp > 1:
            order = torch.cat([zigzag_positions(ends, cp, r) for r in range(cp)]).argsort()
            key, value = (
                gather_from_sequence_parallel_region(x, group=group)[order] for x in (key, value)
            )
        keys = torch.arange(len(key))
        visible = positions[:, None] >= keys  # [s, S]
        if packed:
            starts = torch.tensor(ends[1:])
            sequence = torch.bucketize(keys, starts, right=True)
            visible &= sequence[positions, None] == sequence
        if attention_mask is not None:
            # a row without anything to see would be NaN, and is of padding
            visible = (visible & ~attention_mask) | (positions[:, None] == keys)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out = out.permute(2, 0, 1, 3).reshape(s, b, -1)
        return out.squeeze(1) if packed else out


def zigzag_positions(ends: list[int], cp: int, rank: int) -> torch.Tensor:
    """Which of the S tokens lie on a context-parallel rank, int64 [S / cp], in its order.

    Every sequence, from ends[i] to ends[i + 1], is cut into 2 * cp chunks of the same length; rank
    r holds chunks r and 2 * cp - 1 - r, so that all ranks have as much before them to attend to.
    """
    return torch.cat(
        [
            torch.arange(start, end).view(2 * cp, -1)[[rank, 2 * cp - 1 - rank]].flatten()
            for start, end in itertools.pairwise(ends)
        ]
    )


def _boundaries(packed_seq_params: Any) -> list[int]:
    """Where sequences start and end among all packed tokens, with the padding they may have"""
    ends = packed_seq_params.cu_seqlens_q_padded
    return (packed_seq_params.cu_seqlens_q if ends is None else ends).tolist()
