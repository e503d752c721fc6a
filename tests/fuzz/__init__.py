"""Campaigns that try to break the storage format; `make fuzz` runs them all, at full scale.

Each campaign is a function of a seed and a range of inputs, and every input has a random generator
of its own, so that a finding can be repeated alone: `python -m tests.fuzz NAME --seed S --only I`.
"""
