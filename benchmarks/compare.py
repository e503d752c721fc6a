"""What `r3 compare` costs beside reading its two files, how much memory it takes, and its page.

Makes two captures of the same rollouts: 48 layers, 8 of 128 experts, 3 % of the cells different,
log-probabilities on both sides. Then, each in a process of its own on one machine:
  read      opens both files and decodes every trace, all checks on
  compare   what `r3 compare A B -o page.html` does
and the ratio of their wall-clock times. Peak memory is the largest resident size that the kernel
saw, which includes the mapped pages of both files. Where playwright and Chromium are installed the
page is opened three times; a page is open when its second frame is drawn.

    python benchmarks/compare.py [--tokens N] [--length N] [--json] [--keep FOLDER]
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from r3 import Provenance, RolloutId, RouterSpec, RoutingTrace
from r3.storage import ShardReader, ShardWriter

LAYERS, TOP_K, EXPERTS = 48, 8, 128
DIFFERING = 0.03
SPEC = RouterSpec(EXPERTS, TOP_K, tuple(range(LAYERS)), LAYERS)
SIDES = {"a": ("vllm", "bfloat16", 3), "b": ("megatron-core", "float32", 4)}


def write_files(folder: Path, tokens: int, length: int) -> None:
    rng = np.random.default_rng(0)
    # drawing each set anew takes minutes; rows of 4,096 different sets a layer do as well
    noise = rng.random((4096, LAYERS, EXPERTS), np.float32)
    pool = np.sort(noise.argpartition(TOP_K, axis=-1)[..., :TOP_K], axis=-1).astype(np.uint8)
    shards = {side: ShardWriter(folder / f"{side}.r3", SPEC) for side in SIDES}
    for i in range(max(1, tokens // length)):
        ids = {"a": pool[rng.integers(0, len(pool), length - 1)]}
        ids["b"] = _nudged(rng, ids["a"])
        token_ids = rng.integers(0, 150_000, length)
        answers = length - length // 4
        logprobs = {"a": -rng.exponential(0.5, answers)}
        logprobs["b"] = np.minimum(logprobs["a"] + 0.01 * rng.standard_t(3, answers), 0)
        for side, (engine, dtype, version) in SIDES.items():
            shards[side].append(
                RoutingTrace.build(
                    spec=SPEC,
                    token_ids=token_ids,
                    routed_experts=ids[side],
                    prompt_len=length // 4,
                    logprobs=logprobs[side].astype(np.float32),
                    weight_versions=version,
                    rollout_id=RolloutId("benchmark", str(i // 8), sample=i % 8),
                    provenance=Provenance(engine=engine, dtype=dtype),
                )
            )
    for shard in shards.values():
        shard.close()


def _nudged(rng: np.random.Generator, ids: np.ndarray) -> np.ndarray:
    """`ids` with another expert in DIFFERING of the cells."""
    other = ids.copy()
    rows, layers = np.nonzero(rng.random(ids.shape[:2]) < DIFFERING)
    new = rng.integers(0, EXPERTS, len(rows))
    fits = (other[rows, layers] != new[:, None]).all(axis=1)
    other[rows[fits], layers[fits], rng.integers(0, TOP_K, int(fits.sum()))] = new[fits]
    return other


def read(folder: Path) -> dict[str, Any]:
    start = time.perf_counter()
    tokens = 0
    for side in SIDES:
        with ShardReader(folder / f"{side}.r3") as shard:
            for trace in shard:
                tokens += trace.num_tokens
    return {"seconds": time.perf_counter() - start, "tokens": tokens // 2}


def compare(folder: Path) -> dict[str, Any]:
    from r3.cli.compare import compare_files
    from r3.page import render_page

    start = time.perf_counter()
    document = compare_files(folder / "a.r3", folder / "b.r3")
    seconds = time.perf_counter() - start
    page = render_page(document).encode()
    (folder / "page.html").write_bytes(page)
    return {
        "seconds": seconds,
        "page_seconds": time.perf_counter() - start - seconds,
        "page_bytes": len(page),
        "cell_disagreement": document["routing"]["native"]["cell_disagreement"],
    }


def open_page(file: Path) -> list[float] | None:
    """Seconds until the page is drawn, three times; None without a browser."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if not chromium:
        return None
    frames = "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
    quiet = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    times = []
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=quiet)
        for _ in range(3):
            page = browser.new_page()
            start = time.perf_counter()
            page.goto(file.absolute().as_uri())
            page.evaluate(frames)
            times.append(time.perf_counter() - start)
            page.close()
        browser.close()
    return times


def warm_up(folder: Path) -> dict[str, Any]:
    """Compiled kernels are on the disk, and the files in the page cache, before anything counts."""
    return read(folder)


def _in_process(work: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (work, folder))


def _measured(work: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    result = work(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result | {"peak_bytes": peak}


@click.command()
@click.option("--tokens", default=1_000_000, show_default=True, help="in each file")
@click.option("--length", default=4000, show_default=True, help="tokens of a rollout")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--keep", type=click.Path(path_type=Path), help="make files and page here, keep them")
def main(tokens: int, length: int, as_json: bool, keep: Path | None) -> None:
    folder = keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_files(folder, tokens, length)
        sizes = sum((folder / f"{side}.r3").stat().st_size for side in SIDES)
        _in_process(warm_up, folder)
        results: dict[str, Any] = {
            work.__name__: _in_process(work, folder) for work in (read, compare)
        }
        results["page_opens_seconds"] = opened = open_page(folder / "page.html")
    finally:
        if keep is None:
            shutil.rmtree(folder)
    results["ratio"] = results["compare"]["seconds"] / results["read"]["seconds"]
    results["file_bytes"] = sizes
    if as_json:
        click.echo(json.dumps(results, indent=2))
        return
    r, c = results["read"], results["compare"]
    click.echo(
        f"{r['tokens']:,} tokens x {LAYERS} layers x top {TOP_K} of {EXPERTS}, twice, "
        f"{sizes / 1e6:.0f} MB"
    )
    for name, found in (("read and decode both files", r), ("compare them", c)):
        peak = found["peak_bytes"] / 2**20
        click.echo(f"{name:28} {found['seconds']:6.2f} s  peak {peak:.0f} MiB")
    click.echo(f"{'ratio':28} {results['ratio']:6.2f}")
    click.echo(f"{'make the page':28} {c['page_seconds']:6.2f} s  {c['page_bytes'] / 1e6:.2f} MB")
    if opened:
        click.echo(f"{'open it in Chromium':28} {max(opened):6.2f} s, the slowest of three")


if __name__ == "__main__":
    main()
