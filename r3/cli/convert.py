"""`r3 convert`: rollouts from one format into another, `.r3` files and JSON lines.

A line is one object of a framework, as its server or its trainer has it. Lines are converted one by
one, and the new file appears under its name when it is whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import click

from r3.batch import RoutingBatch
from r3.errors import FormatError
from r3.files import open_regular
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage import ShardReader, ShardWriter
from r3.storage.wire import FORMATS, JSON_FORMATS, from_wire, to_wire
from r3.storage.wire.reading import naming

SUFFIX = ".r3"


def convert_file(
    source: Path, target: Path, read_as: str | None, write_as: str | None, model: Path | None
) -> int:
    """Write the rollouts of `source` into a new file `target`; returns how many these are.

    read_as, write_as: formats of JSON lines; None for a file whose name ends in .r3. model: what
    `read_routers` takes, for JSON lines, which do not tell the model's routers.

    Raises FormatError, naming the line, for a source that is malformed, and if `target` exists;
    what else `from_wire` and `to_wire` raise; click.UsageError for arguments that do not fit.
    """
    for path, name, option in ((source, read_as, "--from"), (target, write_as, "--to")):
        if name is None and path.suffix != SUFFIX:
            raise click.UsageError(f"{option} is missing: the format of {path}")
        if name is not None and path.suffix == SUFFIX:
            raise click.UsageError(f"{option} {name}: {path} is a {SUFFIX} file")
        if name is not None and name not in JSON_FORMATS:
            why = "its objects hold arrays: use r3.storage.wire" if name in FORMATS else "not known"
            raise click.UsageError(
                f"{option} {name}: {why}, expected one of {', '.join(JSON_FORMATS)}"
            )
    if read_as is None and write_as is None:
        raise click.UsageError(f"both are {SUFFIX} files: use r3 merge")
    if read_as is None and model is not None:
        raise click.UsageError(f"--model: {source} tells its routers")
    batches = _of_shard(source)
    if read_as is not None:
        if model is None:
            raise click.UsageError(f"--model is missing: {source} does not tell its routers")
        batches = _of_lines(source, read_as, read_routers(model))
    if target.exists() or not target.name:
        raise FormatError(f"{target}: exists, expected the name of a new file")
    if not target.parent.is_dir():
        raise FormatError(f"{target}: no such folder as {target.parent}")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        if write_as is None:
            count = _write_shard(temporary, batches)
        else:
            with open(temporary, "xb") as file:
                count = _write_lines(file, write_as, batches)
        if not count:
            raise FormatError(f"{source}: there is no rollout in it")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def read_routers(path: Path) -> RouterSpec:
    """The routers of a model: its folder, its config.json, or a RouterSpec as JSON.

    Raises FormatError for what is not JSON, SpecError or UnsupportedError for its content.
    """
    path = path / "config.json" if path.is_dir() else path
    with naming(str(path)):
        with open_regular(path, "r", "a model's config.json") as file:
            values = _parsed(file.read())
        if isinstance(values, dict) and "moe_layers" in values and "model_type" not in values:
            return RouterSpec.from_dict(values)
        return RouterSpec.from_hf_config(values)


def _of_shard(path: Path) -> Iterator[tuple[str, RoutingBatch]]:
    with ShardReader(path) as shard:
        for trace in shard:
            yield f"rollout {trace.rollout_id}", RoutingBatch.from_traces([trace])


def _of_lines(path: Path, name: str, spec: RouterSpec) -> Iterator[tuple[str, RoutingBatch]]:
    run = path.stem[:512]
    with open_regular(path, "r", "JSON lines") as raw, BufferedReader(raw) as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            with naming(f"{path}: line {number}"):
                batch = from_wire(_parsed(line), name, spec=spec)
            if name != "r3":  # the others have no place for a name
                names = tuple(RolloutId(run, str(number), i) for i in range(len(batch)))
                batch = dataclasses.replace(batch, rollout_ids=names)
            yield f"{path}: line {number}", batch


def _write_shard(path: Path, batches: Iterator[tuple[str, RoutingBatch]]) -> int:
    count, writer = 0, None
    try:
        for where, batch in batches:
            writer = writer or ShardWriter(path, batch.spec)
            with naming(where):
                for trace in batch.to_traces():
                    writer.append(trace)
                    count += 1
    finally:
        if writer:
            writer.close()
    return count


def _write_lines(file: BinaryIO, name: str, batches: Iterator[tuple[str, RoutingBatch]]) -> int:
    count = 0
    for where, batch in batches:
        with naming(where):
            for item in to_wire(batch, name):
                text = json.dumps(item, separators=(",", ":"), allow_nan=False)
                file.write(text.encode() + b"\n")
                count += 1
    return count


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(
            text.decode(), parse_constant=_no_constant, object_pairs_hook=_without_repeats
        )
    except (ValueError, RecursionError) as e:
        raise FormatError(f"not strict JSON: {e}") from None


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object has a key twice")
    return values
