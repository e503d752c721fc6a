"""The digest of a trace's content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from r3.checks import sort_rows
from r3.columns import Column
from r3.spec import RouterSpec


def content_digest(
    spec: RouterSpec, prompt_len: int, columns: Mapping[str, Column], valid: np.ndarray
) -> str:
    """Hex digest (BLAKE2b, 128 bits) of a trace's content; see RoutingTrace.digest.

    valid: bool [rows].
    """
    h = hashlib.blake2b(digest_size=16)

    def put(*parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes | memoryview) else str(part).encode()
            h.update(len(data).to_bytes(8, "little"))
            h.update(data)

    routers = json.dumps(spec.to_dict(), sort_keys=True, separators=(",", ":"))
    put("r3-digest-1", routers, prompt_len)
    for name, column in sorted(columns.items()):
        data = column.data
        if name == "routed_experts":
            data = sort_rows(data, valid)
        data = np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("<"))
        put(name, column.align, column.version, data.dtype.str, data.shape)
        # its bytes, without a copy
        put(data.reshape(-1).view(np.uint8).data if data.nbytes else b"")
    return h.hexdigest()
