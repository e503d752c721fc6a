"""What storing expert routing costs: bits per cell, tokens per second, bytes that are read.

A cell is one token in one layer. Each codec is compared, in the same process and on one core, with
what engines send today, base64 of an .npy, and with the bound: log2 C(num_experts, top_k) bits per
cell if all sets are equally likely. Sizes are those of the column routed_experts with its entry in
the record's header and its checksums. Times are the best of several rounds in which all take turns.

    python benchmarks/storage.py [--json] [--quick] [--routing FILE:NUM_EXPERTS[:FIRST_ROW]]

Takes about six minutes, most of them for a file of a million records; --quick half a minute.

--routing takes recorded routing too: an .npy, or an .npz with `experts`, [tokens, layers, top_k].
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgpack
import numpy as np

from r3 import RolloutId, RouterSpec, RoutingTrace
from r3.storage import ShardReader, ShardWriter
from r3.storage.codec import CODECS, find_codec
from r3.storage.experts import ExpertsLayout

CASES = [(8, 2), (60, 4), (64, 8), (128, 8), (256, 8), (384, 8), (512, 22)]
MAIN = (128, 8)  # the one that is timed over 32,768 tokens and against other packers
LAYERS = 48


def uniform_sets(rng: np.random.Generator, spec: RouterSpec, rows: int) -> np.ndarray:
    """Ids [rows, layers, top_k], every set equally likely, in random order."""
    ids = np.empty((rows * len(spec.moe_layers), spec.top_k), spec.dtype)
    todo = np.arange(len(ids))
    while len(todo):  # draw again what names an expert twice
        drawn = rng.integers(0, spec.num_experts, (len(todo), spec.top_k), spec.dtype)
        ids[todo] = drawn
        ordered = np.sort(drawn, axis=1)
        todo = todo[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
    return ids.reshape(rows, len(spec.moe_layers), spec.top_k)


def spec_of(num_experts: int, top_k: int, layers: int = LAYERS) -> RouterSpec:
    return RouterSpec(num_experts, top_k, tuple(range(layers)), layers)


def best_of(rounds: int, functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    best = dict.fromkeys(functions, math.inf)
    for name in [*functions] * rounds:
        start = time.perf_counter()
        functions[name]()
        best[name] = min(best[name], time.perf_counter() - start)
    return best


# --- codecs


def npy_base64(ids: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue())


def section(ids: np.ndarray, spec: RouterSpec, codec: str) -> tuple[bytes, int, Callable[[], Any]]:
    """The column's bytes, how many they are with its entry in the header, and what decodes them."""
    layout = ExpertsLayout(find_codec(codec), spec, len(ids), 0, ())
    payload = layout.encode(ids, ())
    entry = {
        "name": "routed_experts",
        "align": "row",
        "version": 1,
        "dtype": ids.dtype.str[1:],
        "shape": list(ids.shape),
        "codec": codec,
        "stored": len(ids),
        "bytes": len(payload),
    }
    view, layers = memoryview(payload), range(len(spec.moe_layers))

    def decode() -> np.ndarray:
        out = np.empty_like(ids)
        layout.read(lambda at, size: view[at : at + size], layers, 0, out)
        return out

    return payload, len(payload) + len(msgpack.packb(entry)), decode


def codec_entry(
    source: str, ids: np.ndarray, spec: RouterSpec, rounds: int, codec: str = "enum"
) -> dict[str, Any]:
    _, size, decode = section(ids, spec, codec)
    found, expected = decode(), ids
    if not CODECS[codec].keeps_order:
        expected = np.sort(ids, axis=-1)
    assert np.array_equal(found, expected)
    layout = ExpertsLayout(find_codec(codec), spec, len(ids), 0, ())
    text = npy_base64(ids)
    seconds = best_of(
        rounds,
        {
            "encode": lambda: layout.encode(ids, ()),
            "base64_npy_encode": lambda: npy_base64(ids),
            "decode": decode,
            "base64_npy_decode": lambda: np.load(io.BytesIO(base64.b64decode(text))),
        },
    )
    bound = math.log2(math.comb(spec.num_experts, spec.top_k))
    if CODECS[codec].keeps_order:
        bound += math.log2(math.factorial(spec.top_k))
    return {
        "source": source,
        "codec": codec,
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "tokens": len(ids),
        "layers": len(spec.moe_layers),
        "bits_per_cell": 8 * size / (ids.shape[0] * ids.shape[1]),
        "bound_bits": bound,
        **{f"{name}_tokens_per_s": len(ids) / s for name, s in seconds.items()},
    }


def peers(ids: np.ndarray, rounds: int) -> list[dict[str, Any]]:
    """General packers on the same ids, sorted within each row, which helps them."""
    ordered = np.sort(ids, axis=-1)
    raw = ordered.tobytes()
    part = ids[: len(ids) // 16]  # nested lists take seconds
    nested = json.dumps(part.tolist())
    packers: dict[str, tuple[int, Callable[[], Any], Callable[[], Any], int]] = {
        "nested JSON": (
            len(nested),
            lambda: json.dumps(part.tolist()),
            lambda: np.array(json.loads(nested), np.uint8),
            len(part),
        )
    }
    try:
        import zstandard

        squeeze, expand = zstandard.ZstdCompressor(3), zstandard.ZstdDecompressor()
        zstd = squeeze.compress(raw)
        packers["zstd, level 3"] = (
            len(zstd),
            lambda: squeeze.compress(raw),
            lambda: expand.decompress(zstd),
            len(ids),
        )
    except ImportError:
        pass
    try:
        import blosc2

        options = {
            "codec": blosc2.Codec.ZSTD,
            "clevel": 5,
            "typesize": ids.shape[2],
            "filters": [blosc2.Filter.BITSHUFFLE],
            "nthreads": 1,
        }
        blosc = blosc2.compress2(raw, **options)
        packers["blosc2, zstd level 5, bitshuffle"] = (
            len(blosc),
            lambda: blosc2.compress2(raw, **options),
            lambda: blosc2.decompress2(blosc, nthreads=1),
            len(ids),
        )
    except ImportError:
        pass
    found = []
    for name, (size, encode, decode, tokens) in packers.items():
        seconds = best_of(max(1, rounds // 3), {"encode": encode, "decode": decode})
        found.append(
            {
                "name": name,
                "bits_per_cell": 8 * size / (tokens * ids.shape[1]),
                "encode_tokens_per_s": tokens / seconds["encode"],
                "decode_tokens_per_s": tokens / seconds["decode"],
            }
        )
    return found


def recorded(text: str) -> tuple[str, np.ndarray, RouterSpec]:
    file, num_experts, *first = text.rsplit(":", 2) if text.count(":") > 1 else text.split(":")
    loaded = np.load(file, allow_pickle=False)
    ids = loaded["experts"] if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    ids = ids[int(first[0]) if first else 0 :]
    spec = spec_of(int(num_experts), ids.shape[2], ids.shape[1])
    return Path(file).name, np.ascontiguousarray(ids, spec.dtype), spec


# --- files


def make_trace(
    rng: np.random.Generator, spec: RouterSpec, tokens: np.ndarray, ids: np.ndarray, prompt: int
) -> RoutingTrace:
    return RoutingTrace.build(
        spec=spec,
        token_ids=tokens,
        routed_experts=ids,
        prompt_len=prompt,
        logprobs=-rng.exponential(size=len(tokens) - prompt),
        weight_versions=3,
        rollout_id=RolloutId("benchmark", str(rng.integers(1 << 60))),
    )


class Counting(ShardReader):
    """Counts the bytes that are read of one part of the file."""

    part = range(0)
    count = 0

    def read(self, offset: int, size: int) -> Any:
        if offset in self.part:
            self.count += size
        return super().read(offset, size)


def slice_fraction(folder: Path, rng: np.random.Generator) -> float:
    """Share of the expert payload that a stage with 1 of 8 layer groups reads."""
    spec = spec_of(*MAIN)
    trace = make_trace(rng, spec, rng.integers(0, 150_000, 4097), uniform_sets(rng, spec, 4096), 1)
    with ShardWriter(folder / "slice.r3", spec) as writer:
        writer.append(trace)
    with Counting(folder / "slice.r3") as reader:
        column = reader.header(0).column("routed_experts")
        start = reader.record_at(int(reader.entries[0]["frame"])).offset + column.offset
        reader.part = range(start, start + column.size)
        stage = spec.moe_layers[12:18]
        found = reader.slice(0, layers=stage)
        expected = np.sort(trace.routed_experts, -1)[:, 12:18]
        assert np.array_equal(found.routed_experts[:-1], expected)
        return reader.count / column.size


def group_ratio(folder: Path, rng: np.random.Generator, differing: float) -> float:
    """Bytes of 16 rollouts with a prompt of 1,000 tokens in common, against a file for each."""
    spec = spec_of(*MAIN)
    prompt, prompt_ids = rng.integers(0, 150_000, 1000), uniform_sets(rng, spec, 1000)
    alone = 0
    with ShardWriter(folder / f"group-{differing}.r3", spec) as together:
        for i in range(16):
            ids = np.concatenate([prompt_ids, uniform_sets(rng, spec, 999)])
            changed = rng.random((1000, LAYERS)) < (differing if i else 0)
            ids[:1000][changed] = uniform_sets(rng, spec, 1000)[changed]
            tokens = np.concatenate([prompt, rng.integers(0, 150_000, 1000)])
            trace = make_trace(rng, spec, tokens, ids, 1000)
            together.append(trace)
            with ShardWriter(folder / f"alone-{differing}-{i}.r3", spec) as single:
                single.append(trace)
            alone += single.file_size
    return together.file_size / alone


def many_records(folder: Path, rng: np.random.Generator, count: int) -> dict[str, Any]:
    """Opening a file of so many records, and finding one by its id."""
    spec, path = RouterSpec(8, 2, (0,), 1), folder / "many.r3"
    ids = uniform_sets(rng, spec, 3)
    with ShardWriter(path, spec) as writer:
        for i in range(count):
            trace = RoutingTrace.build(
                spec=spec,
                token_ids=[1, 2, 3, 4],
                routed_experts=ids,
                prompt_len=1,
                rollout_id=RolloutId("benchmark", str(i)),
            )
            writer.append(trace)
    start = time.perf_counter()
    with ShardReader(path) as reader:
        opened = time.perf_counter()
        reader.get(RolloutId("benchmark", str(count // 2)))
        found = time.perf_counter()
    return {
        "records": count,
        "file_bytes": path.stat().st_size,
        "open_s": opened - start,
        "first_get_s": found - opened,
    }


_READ = """
import json, sys, time
from r3.storage import ShardReader
def peak():
    return 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
before, start = peak(), time.perf_counter()
with ShardReader(sys.argv[1]) as reader:
    opened, after_open = time.perf_counter(), peak()
    for i in range(len(reader)):
        reader.slice(i, layers=range(6))
    sliced, after_slices = time.perf_counter(), peak()
    for trace in reader:
        pass
print(json.dumps({"open_s": opened - start, "open_peak_bytes": after_open - before,
    "stage_of_8_s": sliced - opened, "stage_of_8_peak_bytes": after_slices - before,
    "all_s": time.perf_counter() - sliced, "all_peak_bytes": peak() - before}))
"""


def large_file(folder: Path, rng: np.random.Generator, tokens: int) -> dict[str, Any]:
    """Writing and reading so many tokens x 48 x 8 of 128, in rollouts of 8,000 tokens."""
    spec, path, each = spec_of(*MAIN), folder / "large.r3", 8000
    pool = uniform_sets(rng, spec, each - 1)
    writing = 0.0
    with ShardWriter(path, spec) as writer:
        for _ in range(tokens // each):
            ids = np.roll(pool, int(rng.integers(each)), axis=0)
            trace = make_trace(rng, spec, rng.integers(0, 150_000, each), ids, 500)
            start = time.perf_counter()
            writer.append(trace)
            writing += time.perf_counter() - start
    done = subprocess.run(
        [sys.executable, "-c", _READ, path], capture_output=True, text=True, check=True
    )
    return {
        "tokens": tokens // each * each,
        "layers": LAYERS,
        "top_k": MAIN[1],
        "file_bytes": path.stat().st_size,
        "append_s": writing,
        **json.loads(done.stdout),
    }


def measure(quick: bool, routing: tuple[str, ...]) -> dict[str, Any]:
    def say(what: str) -> None:
        click.echo(f"{what} ...", err=True)

    rng = np.random.default_rng(0)
    rounds = 5 if quick else 15
    say("codecs")
    result: dict[str, Any] = {"codec": []}
    spec = spec_of(*MAIN)
    ids = uniform_sets(rng, spec, 32768)  # first, since so many ids make the codec load numba
    result["codec"].append(codec_entry("uniform", ids, spec, rounds))
    for case in CASES:
        part = uniform_sets(rng, spec_of(*case), 4096)
        result["codec"].append(codec_entry("uniform", part, spec_of(*case), rounds))
    result["codec"].append(codec_entry("uniform", ids[:4096], spec, 3, "enum-ordered"))
    for text in routing:
        name, recorded_ids, recorded_spec = recorded(text)
        result["codec"].append(codec_entry(name, recorded_ids, recorded_spec, rounds))
    say("other packers")
    result["peers"] = peers(ids[:8192] if quick else ids, rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("files")
        result["slice_fraction"] = slice_fraction(folder, rng)
        result["shared_group_ratio"] = group_ratio(folder, rng, 0)
        result["shared_group_ratio_2_percent_differ"] = group_ratio(folder, rng, 0.02)
        result["large_file"] = large_file(folder, rng, 100_000 if quick else 1_000_000)
        say("many records")
        result["many_records"] = many_records(folder, rng, 20_000 if quick else 1_000_000)
    return result


def show(result: dict[str, Any]) -> None:
    click.echo(
        "source                  of E top K  tokens layers  bits/cell  x bound   encode  decode"
    )
    for c in result["codec"]:
        encode = c["encode_tokens_per_s"] / c["base64_npy_encode_tokens_per_s"]
        decode = c["decode_tokens_per_s"] / c["base64_npy_decode_tokens_per_s"]
        name = c["source"] + (", ordered" if c["codec"] == "enum-ordered" else "")
        click.echo(
            f"{name[:21]:21s}{c['num_experts']:6d}{c['top_k']:6d}{c['tokens']:8d}{c['layers']:7d}"
            f"{c['bits_per_cell']:11.3f}{c['bits_per_cell'] / c['bound_bits']:9.4f}"
            f"{encode:8.2f}x{decode:7.2f}x"
        )
    click.echo("encode, decode: tokens per second against base64 + npy\n")
    click.echo(f"other packers, {MAIN[1]} of {MAIN[0]}, ids sorted:")
    for p in result["peers"]:
        click.echo(
            f"  {p['name']:34s} {p['bits_per_cell']:7.2f} bits/cell, "
            f"{p['encode_tokens_per_s']:12,.0f} and {p['decode_tokens_per_s']:12,.0f} tokens/s"
        )
    main = max((c for c in result["codec"] if c["codec"] == "enum"), key=lambda c: c["tokens"])
    click.echo(
        f"  {'enum':34s} {main['bits_per_cell']:7.2f} bits/cell, "
        f"{main['encode_tokens_per_s']:12,.0f} and {main['decode_tokens_per_s']:12,.0f} tokens/s\n"
    )
    for name in ("slice_fraction", "shared_group_ratio", "shared_group_ratio_2_percent_differ"):
        click.echo(f"{name:36s} {result[name]:.4f}")
    for name in ("large_file", "many_records"):
        click.echo(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in result[name].items()))


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--quick", is_flag=True, help="under 40 seconds: fewer rounds, tokens and records")
@click.option("--routing", multiple=True, metavar="FILE:NUM_EXPERTS[:FIRST_ROW]")
def main(as_json: bool, quick: bool, routing: tuple[str, ...]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result = measure(quick, routing)
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
