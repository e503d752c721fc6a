"""A seeded generator of engine settings and loads that mix what could confuse a capture.

A scenario is a set of kinds, and all that a seed draws around them: family, block size, room for
KV, batch sizes, lengths, arrivals. Kinds of the engine say how it runs, kinds of the load what it
is asked; scenario_play.py runs one, routing_check.py judges what comes out. No vLLM in here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tiny_models import MOE_FAMILIES

ENGINE_KINDS = ("compiled", "multiprocess", "tensor_parallel", "async", "ngram", "draft")
LOAD_KINDS = (
    *("chunked", "prefix", "preemption", "samples", "stops", "aborts", "sleep", "priority"),
    "resets",
)
KINDS = (*ENGINE_KINDS, *LOAD_KINDS)

MAX_LEN = 256
KV_BYTES_PER_TOKEN = 2048  # of every family in tiny_models: 4 layers, 2 heads of 32, float32
SPECULATED = 3


@dataclass(frozen=True)
class Request:
    """One request: what is asked, when (in engine steps), and when it is given up."""

    name: str
    prompt: list[int]
    n: int
    max_tokens: int
    temperature: float
    output_kind: str  # of vLLM's RequestOutputKind
    arrives: int
    logprobs: bool = False
    priority: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    abort_after: int | None = None


@dataclass(frozen=True)
class Scenario:
    """What `scenario` drew; all of it follows from the arguments of that call."""

    seed: int
    kinds: frozenset[str]
    family: str
    turns: int
    requests: int
    block_size: int
    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.family}, {' '.join(sorted(self.kinds)) or 'plain'}"

    @property
    def multiprocess(self) -> bool:
        return bool(self.kinds & {"multiprocess", "tensor_parallel", "async"})

    def engine_settings(self, draft: str | None) -> dict[str, Any]:
        """Keyword arguments for vLLM's EngineArgs; draft: folder of the draft model."""
        kv_bytes = self.kv_tokens * KV_BYTES_PER_TOKEN
        settings: dict[str, Any] = {
            "enforce_eager": "compiled" not in self.kinds,
            "max_model_len": MAX_LEN,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
            "enable_prefix_caching": "prefix" in self.kinds,
            "skip_tokenizer_init": "stops" not in self.kinds,
            "scheduling_policy": "priority" if "priority" in self.kinds else "fcfs",
        }
        if "tensor_parallel" in self.kinds:
            settings["tensor_parallel_size"] = 2
            kv_bytes //= 2  # of each rank
        if "ngram" in self.kinds:
            settings["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": SPECULATED,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        if "draft" in self.kinds:
            kv_bytes *= 2  # the draft's own
            settings["speculative_config"] = {
                "method": "draft_model",
                "model": draft,
                "num_speculative_tokens": SPECULATED,
            }
        return settings | {"kv_cache_memory_bytes": kv_bytes}


def scenario(
    seed: int,
    kinds: set[str] | None = None,
    family: str | None = None,
    requests: int = 24,
    turns: int = 3,
) -> Scenario:
    """Draw a scenario; kinds and family too where they are not given."""
    rng = random.Random(f"scenario {seed}")
    drawn = {kind for kind in LOAD_KINDS if rng.random() < 0.6}
    drawn |= {"compiled"} if rng.random() < 0.3 else set()
    drawn.update(rng.choice(([], [], ["ngram"], ["draft"])))
    drawn.update(rng.choice(([], ["multiprocess"], ["async"], ["tensor_parallel"])))
    drawn_family = rng.choice(MOE_FAMILIES)
    family = family or drawn_family
    if family in ("glm4_moe", "gpt_oss"):
        # vLLM takes the one for the target's own MTP layers, and wants one kind of attention in all
        # layers of a draft, which the other has not
        drawn.discard("draft")
    kinds = drawn if kinds is None else kinds
    return Scenario(
        seed=seed,
        kinds=frozenset(kinds),
        family=family,
        turns=turns,
        requests=requests,
        block_size=rng.choice((32, 64)),
        kv_tokens=rng.choice((640, 768, 1024)) if "preemption" in kinds else 4096,
        max_num_seqs=rng.choice((12, 16)),
        max_num_batched_tokens=rng.choice((64, 80, 112)) if "chunked" in kinds else 512,
    )


def turn_requests(s: Scenario, turn: int, before: list[Request]) -> list[Request]:
    """The requests of one turn; before: those of the turn before, some of which are repeated."""
    rng = random.Random(f"{s.seed} turn {turn}")
    prefix = random.Random(f"{s.seed} prefix")
    shared = [prefix.randrange(4, 512) for _ in range(71)]

    def fresh(length: int) -> list[int]:
        return [rng.randrange(4, 512) for _ in range(length)]

    def prompt(i: int) -> list[int]:
        if before and i % 3 == 0:
            return rng.choice(before).prompt  # in full
        if s.kinds & {"ngram", "draft"} and i % 3 == 1:
            return fresh(rng.randrange(2, 9)) * rng.randrange(2, 12)
        return rng.choice(
            (
                shared + fresh(rng.randrange(1, 110)),
                shared[:40] + fresh(rng.randrange(1, 90)),
                fresh(rng.randrange(1, 190)),
                fresh(1),
            )
        )

    speculating = bool(s.kinds & {"ngram", "draft"})
    found = []
    for i in range(s.requests):
        stops = "stops" in s.kinds and i % 2 == 0
        # drafts are accepted the more often, the colder
        temperature = rng.choice((0.0, 0.1, 1.0)) if speculating else 1.0
        found.append(
            Request(
                name=f"{turn}.{i}",
                prompt=prompt(i),
                n=rng.randrange(1, 4) if "samples" in s.kinds and temperature else 1,
                max_tokens=1 if rng.random() < 0.08 else rng.randrange(20, 56),
                temperature=temperature,
                output_kind=rng.choice(("FINAL_ONLY", "CUMULATIVE", "DELTA")),
                arrives=rng.randrange(0, 60),
                # vLLM on a CPU has no finite ones for tokens that were speculated
                logprobs=not speculating and rng.random() < 0.5,
                # those that come late are more urgent, so that running ones must give way
                priority=rng.randrange(0, 5) if "priority" in s.kinds else 0,
                stop=[f"t{rng.randrange(10, 50)}" for _ in range(3)] if stops else [],
                stop_token_ids=[rng.randrange(4, 512) for _ in range(12)] if stops else [],
                abort_after=rng.randrange(1, 25)
                if "aborts" in s.kinds and rng.random() < 0.35
                else None,
            )
        )
    return sorted(found, key=lambda r: r.arrives)
