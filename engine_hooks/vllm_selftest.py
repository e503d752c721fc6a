"""The self-test of capture: after loading, a few tokens are run and every layer's rows looked at.

A hook that was bound too late, or a kernel that routes inside, leaves rows as they were; in a
running engine that would show only in training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from r3.errors import UnsupportedError
from r3.spec import RouterSpec

_TOKENS = 48


def run_tokens(config: Any, runner: Any = None) -> int:
    """Number of tokens of the self-test; with a model runner, random ones are run through it."""
    tokens = min(_TOKENS, config.scheduler_config.max_num_batched_tokens)
    if runner is None:
        return tokens
    with _random_state_kept():
        _run(config, runner, tokens)
    return tokens


def _run(config: Any, runner: Any, tokens: int) -> None:
    if config.use_v2_model_runner:
        runner._dummy_run(tokens, randomize_inputs=True)
        return
    rng = torch.Generator().manual_seed(0)
    vocabulary = config.model_config.get_vocab_size()
    # dummy runs take what lies in the input buffers
    runner.input_ids.cpu[:tokens] = torch.randint(0, vocabulary, (tokens,), generator=rng)
    runner.input_ids.copy_to_gpu(tokens)
    if runner.supports_mm_inputs:
        runner.inputs_embeds.gpu[:tokens].normal_()
    runner._dummy_run(tokens, force_attention=True)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM seeds everything before this; what it samples must not depend on the self-test."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        yield
    random.setstate(python)
    np.random.set_state(array)


def check_self_test(ids: np.ndarray, spec: RouterSpec) -> None:
    """ids: integers [tokens, layers, top_k] of random tokens, -1 where nothing was written.

    Raises UnsupportedError, naming the layer, if it was not written, holds what no router can
    have chosen or does not depend on the tokens.
    """
    for plane, layer in enumerate(spec.moe_layers):
        rows = np.sort(ids[:, plane], axis=-1)
        found = f"self-test of capture over {len(ids)} random tokens: layer {layer}: "
        if rows.size and (rows[:, 0].min() < 0 or rows[:, -1].max() >= spec.num_experts):
            raise UnsupportedError(
                f"{found}ids from {rows.min()} to {rows.max()}, expected 0..{spec.num_experts - 1}"
                "; -1 is what the router left unwritten (was the hook bound after the model was "
                "compiled, or does the kernel route inside?)"
            )
        twice = (rows[:, 1:] == rows[:, :-1]).any(axis=-1)
        if twice.any():
            raise UnsupportedError(
                f"{found}row {twice.argmax()} is {rows[twice.argmax()].tolist()}, expected "
                f"{spec.top_k} experts, each once"
            )
        if spec.top_k < spec.num_experts and len(rows) >= 16 and (rows == rows[0]).all():
            raise UnsupportedError(
                f"{found}all rows are {rows[0].tolist()}, expected rows that depend on the token"
            )
