"""Which of vLLM's KV-cache groups the rows are kept by: worker and scheduler must agree."""

from __future__ import annotations

from typing import Any

from r3.errors import UnsupportedError


def full_attention_group(kv_cache_config: Any) -> tuple[int, int]:
    """Index and block size of the first group that keeps the KV of every token of a sequence.

    Sliding-window, chunked and recurrent groups drop theirs as the sequence grows. Raises
    UnsupportedError if a model has no other.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    kinds = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        inner = (
            list(spec.kv_cache_specs.values())
            if isinstance(spec, UniformTypeKVCacheSpecs)
            else [spec]
        )
        if all(isinstance(s, FullAttentionSpec) for s in inner):
            return index, spec.block_size
        kinds.append(type(spec).__name__)
    raise UnsupportedError(
        "capture keeps rows by the KV slots of a full-attention group, found only "
        f"{', '.join(kinds) or 'no group at all'}"
    )
