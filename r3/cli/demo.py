"""`r3 demo`: the whole chain on this machine, with the real engines.

    vLLM samples in bfloat16  ->  routing.r3  ->  Megatron-core recomputes in float32
                                                  without replay  ->  native.r3
                                                  and with it     ->  replay.r3

Checks the input, runs the two halves (r3.cli.demo_stages) in processes of their own, which with
`--ray` are actors (r3.cli.demo_ray), then prints what `r3 compare` does and writes summary.json and
report.html, the page of `r3 report`.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from r3.cli.compare import render, token_texts
from r3.cli.isolate import Report, run_isolated
from r3.cli.run import read_run
from r3.cli.text import write_text
from r3.cli.tiny_model import VOCAB_SIZE as TINY_VOCAB
from r3.errors import MissingDependencyError, R3Error, SpecError, TraceError, UnsupportedError
from r3.spec import RouterSpec

_ROLLOUTS = 32
_SPECIAL = 4  # token ids below it are eos, bos and pad in the tiny model
_MAX_PROMPTS = 1 << 26  # bytes of a prompts file
_NEEDS = {"vllm": "cpu", "megatron": "megatron", "transformers": "megatron"} | dict.fromkeys(
    ("jinja2", "matplotlib"), "report"
)


def run_demo(
    *,
    out: Path,
    model: Path | None,
    prompts: Path | None,
    max_tokens: int,
    seed: int,
    use_ray: bool = False,
) -> None:
    """Run the demo; raises an R3Error, before anything is started, if the input is at fault.

    use_ray: the two halves are Ray actors, and batches go through its object store.
    """
    for module, extra in (_NEEDS | ({"ray": "ray"} if use_ray else {})).items():
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(
                f"the demo needs {module}: pip install 'rollout-routing-replay[{extra}]'"
            )
    vocab_size = TINY_VOCAB if model is None else _check_model(model)
    chosen = (
        _random_prompts(seed, vocab_size) if prompts is None else _read_prompts(prompts, vocab_size)
    )
    if any("prompt" in p for p in chosen) and not (model and _has_tokenizer(model)):
        raise UnsupportedError(
            f"--prompts {prompts}: text needs a tokenizer, and "
            f"{model or 'the tiny model'} has none; give prompt_token_ids"
        )
    file, log = out / "routing.r3", out / "demo.log"
    made = ("native.r3", "replay.r3", "metrics.jsonl", "summary.json", "report.html")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()) and not log.exists():
            raise R3Error(f"--out {out}: not empty and not the folder of an earlier demo")
        for old in (log, file, *(out / name for name in made)):
            old.unlink(missing_ok=True)
        log.touch()
    except OSError as e:
        raise R3Error(f"cannot write to {out}: {e.strerror}") from None

    console = Console(stderr=True)
    with _progress(console) as progress:
        show = _reporter(progress)
        if model is None:
            model = out / "tiny-qwen3-moe"
            run_isolated(_make_model, {"path": model, "seed": seed}, log, show)
        else:
            run_isolated(_check_trainer, {"model": model}, log, show)
        samples = max(1, _ROLLOUTS // len(chosen))
        sampling = {
            "model": model,
            "prompts": chosen,
            "samples": samples,
            "max_tokens": max_tokens,
            "seed": seed,
            "file": file,
        }
        if use_ray:
            from r3.cli.demo_ray import run_in_actors

            run_in_actors(sampling, log, show)
        else:
            run_isolated(_sample, sampling, log, show)
            run_isolated(_recompute, {"model": model, "file": file}, log, show)
        show("comparing", 0, 1)
        texts = token_texts(model) if (model / "tokenizer.json").exists() else None
        document = read_run(out, texts=texts)
        show("done", 1, 1)
    summary = _summary(document) | {
        "bytes_per_token_per_layer": file.stat().st_size
        / (document["pairs"]["tokens"] * len(document["spec"]["moe_layers"])),
        "model": model.name,
        "seed": seed,
    }
    write_text(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    from r3.page import render_page

    write_text(out / "report.html", render_page(document))
    render(document, Console(emoji=False))
    console.print(f"wrote {file}, {', '.join(made[:-1])} and {made[-1]} beside it")


def _summary(document: dict[str, Any]) -> dict[str, Any]:
    """The figures of the page that a script wants, flat."""
    routing, mismatch, spec = document["routing"], document["mismatch"], document["spec"]
    if not routing["native"]["rows"]:
        raise TraceError("no row was captured: nothing to replay or to compare")
    summary: dict[str, Any] = {k: document["pairs"][k] for k in _PAIRS}
    summary |= {
        "missing_rows": routing["native"]["rows_left_out"],
        "moe_layers": len(spec["moe_layers"]),
        "num_experts": spec["num_experts"],
        "top_k": spec["top_k"],
    }
    for side in ("native", "replay"):
        found = routing[side]
        summary |= {f"{k}_{side}": found[k] for k in _SHARES}
        summary[f"cell_disagreement_per_layer_{side}"] = {
            str(x["layer"]): x["cell_disagreement"] for x in found["layers"]
        }
        summary |= {f"{k}_{side}": mismatch[side]["metrics"][k] for k in _METRICS}
    return summary | {"verdict": document["verdict"]["level"], "versions": document["environment"]}


_PAIRS = ("rollouts", "tokens", "sampled_tokens")
_SHARES = ("cell_disagreement", "expert_disagreement", "token_disagreement")
_METRICS = ("kl_k3", "abs_logratio_p99", "abs_logratio_max")


# The stages are imported in their own process only: this one stays light.
def _make_model(report: Report, **kwargs: Any) -> None:
    from r3.cli.tiny_model import make_tiny_qwen3_moe

    report("making a tiny Qwen3-MoE", 0, 1)
    make_tiny_qwen3_moe(**kwargs)


def _check_trainer(report: Report, **kwargs: Any) -> None:
    from r3.cli.demo_stages import check_model

    check_model(report, **kwargs)


def _sample(report: Report, **kwargs: Any) -> None:
    from r3.cli.demo_stages import sample

    sample(report, **kwargs)


def _recompute(report: Report, **kwargs: Any) -> None:
    from r3.cli.demo_stages import recompute

    recompute(report, **kwargs)


def _check_model(model: Path) -> int:
    """The vocabulary size of a checkpoint that the demo can run."""
    if not model.is_dir():
        raise UnsupportedError(f"--model {model}: no such folder")
    try:
        config = json.loads((model / "config.json").read_text())
    except FileNotFoundError:
        raise UnsupportedError(
            f"--model {model}: no config.json, so not a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError, RecursionError) as e:
        raise UnsupportedError(f"--model {model}: config.json cannot be read: {e}") from None
    if not isinstance(config, dict):
        raise UnsupportedError(f"--model {model}: config.json is not a JSON object")
    try:
        RouterSpec.from_hf_config(config)
    except (UnsupportedError, SpecError) as e:
        raise type(e)(f"--model {model}: {e}") from None
    if config["model_type"] != "qwen3_moe":
        raise UnsupportedError(
            f"--model {model}: the demo's trainer can load qwen3_moe, found "
            f"{config['model_type']!r}"
        )
    if not any(model.glob("*.safetensors")):
        raise UnsupportedError(f"--model {model}: no *.safetensors weights in the folder")
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int or vocab_size <= _SPECIAL:
        raise UnsupportedError(
            f"--model {model}: vocab_size is {vocab_size!r}, expected more than {_SPECIAL}"
        )
    return vocab_size


def _has_tokenizer(model: Path) -> bool:
    return any((model / f"tokenizer{x}").exists() for x in (".json", "_config.json", ".model"))


def _random_prompts(seed: int, vocab_size: int) -> list[dict[str, Any]]:
    """Eight prompts of random tokens; pairs share a beginning."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(_SPECIAL, vocab_size) for _ in range(n)]

    shared = [tokens(40) for _ in range(4)]
    return [{"prompt_token_ids": shared[i // 2] + tokens(rng.randint(4, 32))} for i in range(8)]


def _read_prompts(path: Path, vocab_size: int) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_PROMPTS + 1)
        if len(data) > _MAX_PROMPTS:
            raise R3Error(f"--prompts {path}: more than {_MAX_PROMPTS} bytes")
        lines = data.decode("utf-8-sig").split("\n")
    except OSError as e:
        raise R3Error(f"--prompts {path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise R3Error(f"--prompts {path}: not UTF-8 text") from None
    prompts: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise R3Error(f"--prompts {path}, line {number}: not JSON: {e}") from None
        text = value.get("prompt") if isinstance(value, dict) else None
        ids = value.get("prompt_token_ids") if isinstance(value, dict) else None
        if isinstance(text, str) and text:
            prompts.append({"prompt": text})
        elif isinstance(ids, list) and ids and all(type(t) is int for t in ids):
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                raise R3Error(
                    f"--prompts {path}, line {number}: token ids {min(ids)}..{max(ids)}, expected "
                    f"0..{vocab_size - 1}"
                )
            prompts.append({"prompt_token_ids": ids})
        else:
            raise R3Error(
                f"--prompts {path}, line {number}: expected "
                '{"prompt": text} or {"prompt_token_ids": [token ids]}'
            )
    if not prompts:
        raise R3Error(f"--prompts {path}: no prompts in the file")
    return prompts


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    )


def _reporter(progress: Progress) -> Report:
    """Shows each new description as a line of its own and fills its bar."""
    tasks: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        what = what.split(", ")[0]
        for name, task in tasks.items():
            if name != what:
                progress.update(task, completed=1, total=1)
                progress.stop_task(task)
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=total)
            if not progress.console.is_terminal:
                progress.console.print(what)
        progress.update(tasks[what], completed=done, total=total)

    return show
