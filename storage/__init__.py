"""Routing traces as bytes: `.r3` shard files. docs/format.md is the format, statement by statement.

Imports the core and msgpack; knows nothing about engines, trainers or the command line.
"""

from r3.storage.background import RecordHandle
from r3.storage.reader import ShardReader
from r3.storage.rotation import RotatingWriter, shard_paths
from r3.storage.stored import RoutingSlice
from r3.storage.verify import merge, verify
from r3.storage.writer import ShardWriter

__all__ = [
    "RecordHandle",
    "RotatingWriter",
    "RoutingSlice",
    "ShardReader",
    "ShardWriter",
    "merge",
    "shard_paths",
    "verify",
]
