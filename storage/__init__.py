"""Routing traces as bytes: `.r3` shard files. docs/format.md is the format, statement by statement.

Imports the core and msgpack; knows nothing about engines, trainers or the command line.
"""

from r3.storage.shard import ShardReader, ShardWriter

__all__ = ["ShardReader", "ShardWriter"]
