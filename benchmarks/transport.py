"""What bringing routing from the engine to a trainer costs, each way against the others.

- reply: bytes per token of `choices[i].routed_experts`, 48 layers x 8 of 128 experts, by form;
  `compact_ratio` is compact over native.
- wire: bytes, and microseconds per token to encode and decode, of each framework's format, for
  the same rows (one core). Objects that are text are taken as JSON, with their token ids.
- server: CPU milliseconds per request (1,000 prompt tokens, 16 sampled, 48 layers x 4 of 16, a
  tiny model on the CPU) of the API server's process, with capture off and on, by form. The requests
  of all forms alternate; "off" is a server without capture. What capture costs the engine's process
  says benchmarks/capture.py.
- ray: bytes that 1 of 8 ranks fetches of a batch of 48 layers (`ray_slice_fraction`), and the
  driver's memory at two lengths of rollouts.

    python benchmarks/transport.py [--json] [--only reply|wire|server|ray]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

SPEC = {"num_experts": 128, "top_k": 8, "moe_layers": tuple(range(48)), "num_layers": 48}
TOKENS = 8192
PROMPT, SAMPLED = 1000, 16
_WARM = 25  # requests of each form; then the compiled codec has been loaded
_HZ = os.sysconf("SC_CLK_TCK")


def _batch(tokens: int) -> Any:
    from r3 import RolloutId, RouterSpec, RoutingBatch, RoutingTrace

    spec, rng = RouterSpec(**SPEC), np.random.default_rng(0)
    scores = rng.random((tokens - 1, len(spec.moe_layers), spec.num_experts), np.float32)
    ids = np.argpartition(scores, spec.top_k, axis=-1)[..., : spec.top_k]
    trace = RoutingTrace.build(
        spec=spec,
        token_ids=rng.integers(0, 150_000, tokens),
        routed_experts=ids,
        prompt_len=tokens // 4,
        logprobs=-rng.random(tokens - tokens // 4).astype(np.float32),
        weight_versions=0,
        rollout_id=RolloutId.unique(),
    )
    return RoutingBatch.from_traces([trace])


def reply() -> dict[str, Any]:
    """Bytes per token of the field alone, as JSON has it."""
    from r3.storage.wire.compact import encode_rows
    from r3.storage.wire.npy import encode_npy

    batch = _batch(TOKENS)
    rows = batch.routed_experts[:-1]
    versions = batch.weight_versions[:-1]
    forms = {
        "nested lists (vLLM 0.21)": rows.tolist(),
        "npy (native)": encode_npy(rows),
        "compact": encode_rows(rows, batch.spec, tokens=batch.token_ids, versions=versions),
        "reference": _handle(batch),
    }
    found = {
        name: len(json.dumps(form, separators=(",", ":"))) / TOKENS for name, form in forms.items()
    }
    return {
        "reply_bytes_per_token": {name: round(value, 2) for name, value in found.items()},
        "handle_bytes": round(found["reference"] * TOKENS),
        "compact_ratio": round(found["compact"] / found["npy (native)"], 4),
    }


def _handle(batch: Any) -> dict[str, str]:
    """What a server replies that has stored the batch's first sequence."""
    from r3.storage.background import BackgroundWriter

    async def stored() -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            writer = BackgroundWriter(folder, batch.spec)
            handle = await writer.append(lambda: batch.to_traces()[0], 0)
            writer.close()
            return handle.to_dict()

    return asyncio.run(stored())


def wire() -> dict[str, Any]:
    """Each format's bytes per token and microseconds per token, medians of five."""
    from r3.storage.wire import FORMATS, JSON_FORMATS, from_wire, to_wire

    batch = _batch(TOKENS)
    found = {}
    for name in FORMATS:
        given = (
            {"token_ids": [batch.token_ids.tolist()], "prompt_lens": batch.prompt_lens.tolist()}
            if name == "megatron"
            else {}
        )
        encode, decode = [], []
        for _ in range(6):  # the first loads compiled code
            start = time.perf_counter()
            obj = to_wire(batch, name)
            sent = json.dumps(obj, separators=(",", ":")) if name in JSON_FORMATS else obj
            middle = time.perf_counter()
            got = json.loads(sent) if name in JSON_FORMATS else sent
            back = from_wire(got, name, spec=batch.spec, **given)
            decode.append(time.perf_counter() - middle)
            encode.append(middle - start)
        assert np.array_equal(np.sort(back.routed_experts), np.sort(batch.routed_experts))
        size = len(sent) if isinstance(sent, str) else _nbytes(sent)
        found[name] = {
            "bytes_per_token": round(size / TOKENS, 1),
            "encode_us_per_token": round(1e6 * statistics.median(encode[1:]) / TOKENS, 2),
            "decode_us_per_token": round(1e6 * statistics.median(decode[1:]) / TOKENS, 2),
        }
    return {"wire": found}


def _nbytes(obj: Any) -> int:
    if isinstance(obj, dict):
        return sum(map(_nbytes, obj.values()))
    if isinstance(obj, list | tuple):
        if obj and isinstance(obj[0], int | float):
            return 8 * len(obj)
        return sum(map(_nbytes, obj))
    return getattr(obj, "nbytes", 8)


def server(rounds: int) -> dict[str, Any]:
    """CPU time per request of the API server's process, by what the request asks for."""
    from r3.cli.tiny_model import make_tiny_qwen3_moe

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_tiny_qwen3_moe(model, seed=0, num_layers=48)
        for name, forms in (("off", {"off": None}), ("on", _FORMS)):
            with _serving(model, Path(folder), capture=name == "on") as (url, pid):
                rng = random.Random(0)
                for _ in range(_WARM):  # of one prompt, which is in the prefix cache then
                    for field in forms.values():
                        _request(url, random.Random(1), field)
                spent: dict[str, list[float]] = {form: [] for form in forms}
                for _ in range(rounds):
                    for form, field in forms.items():
                        before = _seconds(pid)
                        _request(url, rng, field)
                        time.sleep(0.02)
                        spent[form].append(_seconds(pid) - before)
                for form, times in spent.items():
                    found[form] = round(1e3 * statistics.mean(times), 1)
    return {"server_cpu_ms_per_request": found}


_FORMS = {"npy (native)": "npy", "compact": "compact", "reference": "reference", "none": "none"}


@contextlib.contextmanager
def _serving(model: Path, folder: Path, capture: bool) -> Iterator[tuple[str, int]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    how = (
        ["r3.cli", "serve", str(model), "--store", str(folder / "store")]
        if capture
        else ["vllm.entrypoints.openai.api_server", "--model", str(model)]
    )
    flags = (
        "--dtype float32 --enforce-eager --max-model-len 2048 --max-num-seqs 4 --block-size 32 "
        "--kv-cache-memory-bytes 268435456 --skip-tokenizer-init --disable-uvicorn-access-log "
        f"--host 127.0.0.1 --port {port} --served-model-name tiny"
    ).split()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = folder / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *how, *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            time.sleep(0.5)
            if process.poll() is not None:
                raise click.ClickException(f"the server ended:\n{log.read_text()[-3000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url + "/health")
                break
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _request(url: str, rng: random.Random, form: str | None) -> None:
    body = {
        "model": "tiny",
        "prompt": [rng.randrange(4, 512) for _ in range(PROMPT)],
        "max_tokens": SAMPLED,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }
    if form is not None:
        body["routed_experts"] = form
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        choice = json.load(answer)["choices"][0]
    assert len(choice["token_ids"]) == SAMPLED
    assert (choice["routed_experts"] is None) == (form in (None, "none"))


def _seconds(pid: int) -> float:
    """CPU seconds of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _HZ


def ray() -> dict[str, Any]:
    """From benchmarks/_transport_ray.py, in a process of its own."""
    script = Path(__file__).with_name("_transport_ray.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{script.name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True)
@click.option("--rounds", default=20, show_default=True, help="requests per form")
@click.option("--only", type=click.Choice(["reply", "wire", "server", "ray"]))
def main(as_json: bool, rounds: int, only: str | None) -> None:
    parts = {"reply": reply, "wire": wire, "server": lambda: server(rounds), "ray": ray}
    result: dict[str, Any] = {}
    for name, part in parts.items():
        if only in (None, name):
            result |= part()
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, value in result.items():
        if not isinstance(value, dict):
            click.echo(f"{name}: {value}")
            continue
        click.echo(f"{name}:")
        for key, item in value.items():
            figures = item if isinstance(item, dict) else {"": item}
            text = "  ".join(f"{k} {v}".strip() for k, v in figures.items())
            click.echo(f"  {key:28s} {text}")


if __name__ == "__main__":
    main()
