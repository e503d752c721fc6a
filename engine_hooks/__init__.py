"""Producers of routing traces. Nothing is imported here: each engine's hook is its own module."""
