"""Megatron-core on a CPU, on one rank: for the demo, the tests and small experiments.

Megatron-core is written for CUDA. This package holds what it lacks on a machine without: see
`shim`, `modules` and `qwen3_moe`. On a GPU none of it is needed or imported.
"""
