"""A batch in Ray's object store: each trainer rank fetches its layers and rows, the driver nothing.

`put_batch` is called where the rollouts are (in an actor, say) and gives a `BatchHandle`, which is
small and goes through the driver to the trainers. What it stands for are the objects of
r3.storage.batch_objects, plain arrays that Ray keeps in shared memory: on the same node they are
read where they are, another node pulls those that it asks for. An index object refers to all of
them and the handle to the index, so they all go when the last handle does. No timeout is needed:
Ray itself says so when the process or node that put an object has died.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from r3.batch import RoutingBatch
from r3.errors import FormatError, MissingDependencyError, TransportError
from r3.files import Closing
from r3.storage.batch_objects import assemble, index_crc, make_index, make_objects, plan_of
from r3.storage.batch_plan import Plan, make_plan
from r3.storage.batch_shard import BatchRecords


@dataclass(eq=False)
class BatchHandle(Closing):
    """A batch that is in the object store; sent to other processes as an argument or result.

    label: first rollout and sizes, for messages. sequences, tokens: of the batch. crc32: of its
    index. records: where it can be read again; None if `put_batch` was not told. The objects live
    until every handle of the batch, in every process, is freed or gone; and no longer than the
    process that put them.
    """

    label: str
    sequences: int
    tokens: int
    crc32: int
    records: BatchRecords | None = field(repr=False)
    _ref: Any = field(repr=False)

    def fetch(
        self,
        *,
        layers: Iterable[int] | None = None,
        sequences: slice | range | None = None,
        logprobs: bool = False,
    ) -> RoutingBatch:
        """The batch, or part of it; what is not asked for is not fetched.

        layers: decoder layer indices, of spec.moe_layers; the result's spec has only these,
        ascending. sequences: those numbers, one behind the other; a slice is cut off at the ends,
        as for a list, a range is not. Both default to all. logprobs: whether to fetch them, too;
        otherwise they are NaN.

        What lies in one object (`layer_groups` and `sequence_groups` of `put_batch`) is not
        copied: routed_experts, token_ids and logprobs are read-only views of the store, which
        keep their objects there for as long as they are used.

        Checksums and content are checked. Raises TransportError, naming the object and what to do,
        if the batch was freed here or something is lost; FormatError for content that was changed
        on its way; SpecError for layers and IndexError for sequences that are not there.
        """
        ray = _running_ray()
        if self._ref is None:
            raise TransportError(f"{self.label}: was freed in this process; {self._again()}")
        with self._lost("its index"):
            index = ray.get(self._ref)
        if (found := index_crc(index)) != self.crc32:
            raise FormatError(
                f"{self.label}: index with checksum {found:08x}, expected {self.crc32:08x}"
            )
        get = partial(self._get, index)
        try:
            return assemble(index, get, layers=layers, sequences=sequences, logprobs=logprobs)
        except FormatError as e:
            raise FormatError(f"{self.label}: {e}") from None

    def read_shard(
        self, *, layers: Iterable[int] | None = None, sequences: slice | range | None = None
    ) -> RoutingBatch:
        """The same batch, or part of it, from the shard files that `put_batch` was given.

        Needs neither the store nor the process that put the batch. Log-probabilities are there;
        the experts of a row are ascending, unless the file keeps their order. Each record must
        have the digest that it had. Raises TransportError if the batch was put without files, or
        a record is gone or another; FormatError, SpecError and IndexError as `fetch`.
        """
        if self.records is None:
            raise TransportError(
                f"{self.label}: was put without `shard`, so it cannot be read again"
            )
        return self.records.read(layers, sequences)

    def free(self) -> None:
        """Give up the objects; doing so twice is allowed.

        They leave the store when the other handles of the batch, those in other processes, are
        freed or gone too, and arrays that were fetched.
        """
        self._ref = None

    def close(self) -> None:
        """As `free`, at the end of a `with` block."""
        self.free()

    def _get(self, index: Mapping[str, Any], numbers: list[int]) -> Sequence[Any]:
        """The objects with these numbers"""
        import ray

        plan, refs = plan_of(index), index["refs"]
        names = {refs[number].hex(): plan.name(number) for number in numbers}
        with self._lost("some of its objects", names):
            return ray.get([refs[number] for number in numbers])

    def _again(self) -> str:
        if self.records is None:
            return "it was put without `shard`: put it again"
        return f"read it again with read_shard(), from {', '.join(map(str, self.records.paths))}"

    @contextmanager
    def _lost(self, what: str, names: dict[str, str] | None = None) -> Iterator[None]:
        """What Ray raises while `what` is fetched, as a TransportError; names: by object id"""
        from ray.exceptions import OwnerDiedError, RayError

        try:
            yield
        except (RayError, ValueError) as e:  # the latter where the owner is of an earlier Ray
            lost = (names or {}).get(getattr(e, "object_ref_hex", ""), what)
            why = f"{type(e).__name__}"
            if isinstance(e, OwnerDiedError):
                why += ", the process that put it has ended"
            raise TransportError(
                f"{self.label}: {lost} cannot be fetched: {why}; {self._again()}"
            ) from e


def put_batch(
    batch: RoutingBatch,
    *,
    layer_groups: Iterable[Iterable[int]] | None = None,
    sequence_groups: Iterable[slice | range] | None = None,
    shard: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
) -> BatchHandle:
    """Put `batch` into the object store of the Ray that this process is connected to.

    layer_groups: decoder layers that are fetched together, such as those of each pipeline stage;
    each MoE layer in one of them. sequence_groups: sequences that are fetched together, such as
    those of each data-parallel rank, one behind the other. What is fetched from one group of each
    is not copied; what is fetched from several is, once. Default: each layer by itself, whole
    sequences of 32,768 tokens or more in all.
    shard: the `.r3` file or files that hold the batch's rollouts, for `BatchHandle.read_shard`.

    The process that calls this owns the objects: they are lost when it ends. If the call fails,
    nothing stays in the store. Raises TraceError for a batch that does not pass `check()`;
    SpecError, IndexError for groups that do not cover it; what `BatchRecords.find` raises;
    TransportError without a running Ray, or where the store has no room; MissingDependencyError.
    """
    ray = _running_ray()
    batch.check()
    plan = make_plan(batch, layer_groups, sequence_groups)
    records = None if shard is None else BatchRecords.find(batch, shard)
    index = make_index(batch, plan)
    label = (
        f"batch of {len(batch)} sequences and {batch.num_tokens} tokens from rollout "
        f"{batch.rollout_ids[0]} on"
    )
    return BatchHandle(
        label=label,
        sequences=len(batch),
        tokens=batch.num_tokens,
        crc32=index_crc(index),
        records=records,
        _ref=_put_all(ray, batch, plan, index, label),
    )


def _put_all(ray: Any, batch: RoutingBatch, plan: Plan, index: dict[str, Any], label: str) -> Any:
    """A reference to the index, which refers to all objects"""
    refs: list[Any] = []
    try:
        for item in make_objects(batch, plan):
            refs.append(ray.put(item))
        return ray.put({**index, "refs": refs})
    except BaseException as e:
        refs.clear()  # the traceback would keep them
        if isinstance(e, ray.exceptions.RayError):
            raise TransportError(f"{label}: cannot be put: {type(e).__name__}: {e}") from e
        raise


def _running_ray() -> Any:
    try:
        import ray
    except ImportError as e:
        raise MissingDependencyError(
            "ray is not installed: pip install 'rollout-routing-replay[ray]'"
        ) from e
    if not ray.is_initialized():
        raise TransportError("Ray is not running in this process: call ray.init() first")
    return ray
