"""The command line: `r3 serve`, `demo`, `inspect`, `compare`, `report`, `show`, `verify`, `merge`,
`convert`, `doctor`.

Exit codes: 0 done, 2 the input is at fault, 1 anything else; an error is one line on stderr.
`r3 doctor` ends with 1 when capture would not start, `r3 verify` when something is lost, `r3
compare` and `r3 report` when their verdict is bad.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

import r3
from r3.cli.isolate import StageError
from r3.cli.text import is_one_of, write_text
from r3.errors import R3Error

_PATH = click.Path(path_type=Path)


@click.group()
@click.version_option(r3.__version__, prog_name="r3")
def app() -> None:
    """Capture, store, replay and inspect the expert routing of MoE rollouts."""


@app.command()
@click.option(
    "--out", type=_PATH, default=Path("r3-demo"), show_default=True, help="results folder"
)
@click.option("--model", type=_PATH, help="local Qwen3-MoE checkpoint (default: a tiny random one)")
@click.option(
    "--prompts",
    type=_PATH,
    help='JSON lines, each {"prompt": text} or {"prompt_token_ids": [...]} (default: random)',
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=96,
    show_default=True,
    help="tokens to sample per rollout",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**31),
    default=0,
    show_default=True,
    help="seed of the tiny model, the random prompts and the sampling",
)
@click.option(
    "--ray",
    "use_ray",
    is_flag=True,
    help="engine and trainer are Ray actors, batches go through its object store (RAY_ADDRESS, or "
    "a Ray of the demo's own)",
)
def demo(
    out: Path, model: Path | None, prompts: Path | None, max_tokens: int, seed: int, use_ray: bool
) -> None:
    """Sample with vLLM (bfloat16), store the routing, replay it in Megatron-core (float32).

    32 rollouts in all, several per prompt where there are fewer prompts. Leaves routing.r3,
    summary.json, report.html and demo.log in the results folder.
    """
    from r3.cli.demo import run_demo

    run_demo(
        out=out, model=model, prompts=prompts, max_tokens=max_tokens, seed=seed, use_ray=use_ray
    )


@app.command()
@click.argument("file", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def inspect(file: Path, as_json: bool) -> None:
    """Say what a .r3 FILE holds: traces, sizes, provenance, missing rows, expert load."""
    from rich.console import Console

    from r3.cli.inspect import render, summarize

    summary = summarize(file)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        render(summary, Console(emoji=False))
    sys.stdout.flush()  # here, where a full disk can still be reported


_TOKENIZER = click.option(
    "--tokenizer", type=_PATH, help="folder with the model's tokenizer.json: show tokens as text"
)


@app.command()
@click.argument("a", type=_PATH)
@click.argument("b", type=_PATH)
@click.option("--replay", type=_PATH, help="third file: the trainer's, recorded under replay")
@click.option("-o", "--out", type=_PATH, help="write the page to this HTML file")
@click.option("--json", "as_json", is_flag=True, help="print all figures as JSON")
@click.option(
    "--ordered",
    is_flag=True,
    help="experts were stored by falling weight, with keep_order: compare the first, too",
)
@_TOKENIZER
def compare(
    a: Path,
    b: Path,
    replay: Path | None,
    out: Path | None,
    as_json: bool,
    ordered: bool,
    tokenizer: Path | None,
) -> None:
    """Say where, how often and how much two captures of the same rollouts disagree.

    A and B are .r3 files with rollouts of the same ids and tokens: engine and trainer, two
    engines, two precisions. The log-ratio is log p(B) - log p(A). Exit code 1 if the verdict is
    bad, for scripts.
    """
    from rich.console import Console

    from r3.cli.compare import compare_files, render, token_texts
    from r3.page import check_installed, render_page

    if out:
        check_installed()  # before files are read, which may take long
    if out and is_one_of(out, (a, b, replay)):
        raise click.UsageError(f"--out {out}: is one of the files that are compared")
    texts = token_texts(tokenizer) if tokenizer else None
    with _reading() as show:
        document = compare_files(a, b, replay, ordered=ordered, texts=texts, on_progress=show)
    if out:
        write_text(out, render_page(document))
    if as_json:
        click.echo(json.dumps(document))
    else:
        render(document, Console(emoji=False))
        if out:
            click.echo(f"\nwrote {_plain(str(out))}")
    sys.stdout.flush()
    sys.exit(1 if document["verdict"]["level"] == "bad" else 0)


@app.command()
@click.argument("run", type=_PATH)
@click.option(
    "-o", "--out", type=_PATH, default=Path("report.html"), show_default=True, help="HTML file"
)
@click.option("--json", "as_json", is_flag=True, help="print all figures as JSON")
@_TOKENIZER
def report(run: Path, out: Path, as_json: bool, tokenizer: Path | None) -> None:
    """Write the page of a RUN: a folder, or a file of the step monitor.

    The folder has routing.r3 (the engine's capture) with native.r3 (the trainer's own routing),
    replay.r3 beside them (the trainer under replay) if there is one, and metrics.jsonl (the step
    monitor's) if there is one; that alone will do. Exit code 1 if the verdict is bad.
    """
    from rich.console import Console

    from r3.cli.compare import render_verdict, token_texts
    from r3.cli.run import RUN_FILES, read_run
    from r3.page import check_installed, render_page

    check_installed()
    if is_one_of(out, (run, *(run / name for name in RUN_FILES))):
        raise click.UsageError(f"--out {out}: is one of the run's files")
    texts = token_texts(tokenizer) if tokenizer else None
    with _reading() as show:
        document = read_run(run, texts=texts, on_progress=show)
    write_text(out, render_page(document))
    if as_json:
        click.echo(json.dumps(document))
    else:
        render_verdict(document, Console(emoji=False))
        click.echo(f"\nwrote {_plain(str(out))}")
    sys.stdout.flush()
    sys.exit(1 if document["verdict"]["level"] == "bad" else 0)


@app.command()
@click.argument("file", type=_PATH)
@click.argument("rollout", metavar="ID")
@click.option("--against", type=_PATH, help="file with the same rollout: show where it differs")
@click.option("--tokens", metavar="FROM:TO", help="positions to show (default: 64 that matter)")
@click.option("--layers", metavar="N,N,...", help="decoder layers of which to show all experts")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@_TOKENIZER
def show(
    file: Path,
    rollout: str,
    against: Path | None,
    tokens: str | None,
    layers: str | None,
    as_json: bool,
    tokenizer: Path | None,
) -> None:
    """Show one rollout of a .r3 FILE: its tokens, experts, and where another file differs.

    ID is the rollout's, run/group/sample/turn/attempt, or the number of its record.
    """
    from rich.console import Console

    from r3.cli.compare import token_texts
    from r3.cli.show import render, show_rollout

    document = show_rollout(
        file,
        rollout,
        against=against,
        tokens=_span(tokens),
        layers=_numbers(layers),
        texts=token_texts(tokenizer) if tokenizer else None,
    )
    if as_json:
        click.echo(json.dumps(document))
    else:
        render(document, Console(emoji=False))
    sys.stdout.flush()


def _span(text: str | None) -> slice | None:
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) != 2 or not all(p == "" or _is_number(p) for p in parts):
        raise click.UsageError(f"--tokens {text:.100}: expected FROM:TO, positions from 0")
    return slice(*(int(p) if p else None for p in parts))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(map(_is_number, parts)):
        raise click.UsageError(f"--layers {text:.100}: expected layer numbers from 0, as in 0,12")
    return [int(p) for p in parts]


@contextmanager
def _reading() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while rollouts are read, where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, emoji=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading rollouts", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command()
@click.argument("files", type=_PATH, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def verify(files: tuple[Path, ...], as_json: bool) -> None:
    """Read all of each .r3 FILE and say what is lost. Exit code 1 if anything is.

    2 if a FILE is no .r3 file at all, or its first bytes are damaged.
    """
    from dataclasses import asdict

    from r3.storage import verify as verify_file

    found, errors = [], []
    for file in files:
        try:
            found.append(verify_file(file))
        except R3Error as e:
            errors.append(str(e))
    if as_json:
        click.echo(json.dumps([asdict(f) | {"ok": f.ok} for f in found], indent=2))
    for f in () if as_json else found:
        click.echo(
            f"{_plain(f.path)}: records {f.records:,}, tokens {f.tokens:,}, bytes "
            f"{f.file_bytes:,}, losses {len(f.losses):,}"
            + (f", dropped after a crash {f.dropped:,}" if f.dropped else "")
            + ("" if f.closed else "; not closed by its writer, or still being written")
        )
        for loss in f.losses:
            click.echo(_plain(f"  bytes {loss.start:,} to {loss.stop:,}: {loss.reason}"))
    sys.stdout.flush()
    for error in errors:
        _say(error)
    sys.exit(2 if errors else 0 if all(f.ok for f in found) else 1)


@app.command()
@click.argument("out", type=_PATH)
@click.argument("files", type=_PATH, nargs=-1, required=True)
@click.option("--salvage", is_flag=True, help="leave out what is damaged, and say so")
def merge(out: Path, files: tuple[Path, ...], salvage: bool) -> None:
    """Write the traces of .r3 FILES into one new file OUT; equal ones once.

    Exit code 1 if --salvage had to leave something out.
    """
    from r3.storage import merge as merge_files

    merged = merge_files(out, files, salvage=salvage)
    click.echo(
        f"{_plain(str(out))}: records {merged.records:,}, files {len(files):,}, repeats "
        f"{merged.repeats:,}, losses {len(merged.losses):,}"
    )
    for path, loss in merged.losses:
        click.echo(_plain(f"  {path}: bytes {loss.start:,} to {loss.stop:,}: {loss.reason}"))
    sys.stdout.flush()
    sys.exit(1 if merged.losses else 0)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.argument("model")
@click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    help="folder: write records there, and put handles of them into the replies",
)
def serve(model: str, vllm_args: tuple[str, ...], store: Path | None) -> None:
    """Start vLLM's OpenAI server for MODEL, with capture on and any of vLLM's own flags.

    Replies carry choices[i].routed_experts; what a request can ask for is in docs/serving.md.
    """
    from r3.cli.serve import serve_command

    command = serve_command(model, vllm_args, store)
    sys.stdout.flush()
    os.execv(command[0], command)


@app.command()
@click.argument("source", metavar="IN", type=_PATH)
@click.argument("target", metavar="OUT", type=_PATH)
@click.option("--from", "read_as", metavar="FORMAT", help="format of IN, if it is JSON lines")
@click.option("--to", "write_as", metavar="FORMAT", help="format of OUT, if it is JSON lines")
@click.option("--model", type=_PATH, help="folder or config.json of the model, if IN is JSON lines")
def convert(
    source: Path, target: Path, read_as: str | None, write_as: str | None, model: Path | None
) -> None:
    """Convert rollouts between .r3 files and other frameworks' objects, one JSON line each.

    FORMAT is vllm, vllm-0.21, sglang, nemo-rl, prime-rl, skyrl or r3. OUT must not exist yet.
    """
    from r3.cli.convert import convert_file

    count = convert_file(source, target, read_as, write_as, model)
    click.echo(f"{_plain(str(target))}: rollouts {count:,}")
    sys.stdout.flush()


@app.command()
@click.argument("model", required=False)
@click.option(
    "--vllm-arg",
    "pairs",
    metavar="KEY=JSON",
    multiple=True,
    help="setting of vLLM's EngineArgs, such as tensor_parallel_size=2; may be repeated",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def doctor(model: str | None, pairs: tuple[str, ...], as_json: bool) -> None:
    """Say whether capture would start here, from which source of rows, and what is wrong.

    With MODEL (a folder or a name on the hub) for that model under these settings. No engine is
    started. Exit code 0 if capture would start, 1 if something stands in the way.
    """
    from rich.console import Console

    from r3.cli.doctor import diagnose, render

    if pairs and not model:
        raise click.UsageError("--vllm-arg needs a MODEL")
    settings = _settings(pairs)
    with Console(stderr=True, emoji=False).status("asking vLLM"):
        report = diagnose(model, settings)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        render(report, Console(emoji=False))
    sys.stdout.flush()
    sys.exit(0 if report["ok"] else 1)


def _settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.removeprefix("--").replace("-", "_")
        if not equals or not key.isidentifier() or key == "model" or key in settings:
            raise click.UsageError(f"--vllm-arg {pair}: expected KEY=JSON, each KEY once, no model")
        try:
            settings[key] = json.loads(text)
        except (ValueError, RecursionError):
            raise click.UsageError(
                f"--vllm-arg {pair:.200}: not JSON; text takes quotes, as in "
                "--vllm-arg 'dtype=\"bfloat16\"', and true and false are small"
            ) from None
    return settings


def main() -> None:
    """Console script `r3`."""
    warnings.showwarning = _show_warning
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as e:
        click.echo(e.format_message())
        sys.exit(2)
    except click.ClickException as e:
        _fail(e.format_message(), 2)
    except click.Abort:
        _fail("interrupted", 130)
    except R3Error as e:
        _fail(str(e), 2)
    except StageError as e:
        _fail(str(e), 1)
    except BrokenPipeError:  # `r3 inspect ... | head`
        os._exit(1)
    except OSError as e:
        name = f"{_plain(str(e.filename))}: " if e.filename else ""
        print(f"r3: {name}{e.strerror}", file=sys.stderr)
        os._exit(1)  # nothing is left to be flushed into a stream that does not take it


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _say(str(message))


def _say(text: str) -> None:
    print(f"r3: {_plain(' '.join(text.split()))}", file=sys.stderr)


def _fail(text: str, code: int) -> None:
    _say(text)
    sys.exit(code)


def _plain(text: str) -> str:
    # no control codes that a file may have brought
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
