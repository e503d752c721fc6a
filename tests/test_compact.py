"""Routing rows as text: round trips, the format written again by hand, and what is refused."""

from __future__ import annotations

import base64
import dataclasses
import string
import tracemalloc
import zlib
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import FormatError, RouterSpec, TraceError
from r3.storage import codec
from r3.storage.wire.compact import LABEL, decode_rows, encode_rows
from r3.storage.wire.npy import encode_npy
from storage_tools import random_ids

SPEC = RouterSpec(8, 2, (1, 2, 4), 5)
TOKENS = [5, 0, 7, 7, 2**31 - 1, 9]
QUICK = settings(max_examples=120, deadline=None)


@dataclasses.dataclass
class Case:
    """Rows start..start + len(ids) of a rollout with these tokens; a missing row is -1."""

    spec: RouterSpec
    tokens: np.ndarray
    start: int
    ids: np.ndarray
    versions: np.ndarray | None

    def text(self, first: int = 0, end: int | None = None) -> str:
        """Of rows first..end of these."""
        end = len(self.ids) if end is None else end
        at = self.start + first
        return encode_rows(
            self.ids[first:end],
            self.spec,
            tokens=self.tokens[at : at + end - first + 1],
            start=at,
            versions=None if self.versions is None else self.versions[first:end],
        )

    def assert_is(self, ids: np.ndarray, versions: np.ndarray | None) -> None:
        """The same rows; as sets, since order within a row is not kept."""
        assert ids.tolist() == np.sort(self.ids, axis=-1).tolist()
        assert (versions is None) == (self.versions is None)
        if versions is not None:
            missing = (self.ids == -1).all(axis=(1, 2))
            assert versions.dtype == np.int64
            assert versions.tolist() == np.where(missing, -1, self.versions).tolist()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    experts = draw(st.integers(1, 12) | st.integers(1, 400))
    layers = draw(st.integers(1, 5))
    moe = sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1)))
    spec = RouterSpec(experts, draw(st.integers(1, min(experts, 9))), tuple(moe), layers)
    rows, start, behind = (draw(st.integers(0, n)) for n in (12, 9, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = random_ids(rng, spec, rows).astype(np.int32)
    ids[rng.random(rows) < draw(st.sampled_from([0, 0.3, 1]))] = -1
    tokens = rng.integers(0, 2**31, start + rows + 1 + behind)
    versions = draw(st.none() | st.just(rng.integers(0, draw(st.integers(1, 2**40)), rows)))
    return Case(spec, tokens, start, ids, versions)


def case(rows: int = 5, spec: RouterSpec = SPEC) -> Case:
    """A small one that has everything: row 1 is missing, versions change."""
    ids = random_ids(np.random.default_rng(3), spec, rows).astype(np.int16)
    ids[1:2] = -1
    return Case(spec, np.array(TOKENS), 0, ids, np.array([4, 0, 4, 6, 6])[:rows])


def bare(ids: np.ndarray, spec: RouterSpec) -> bytes:
    """The sets of `ids` [rows, layers, top_k], none missing, on Python's integers."""
    from enumeration_tools import pack, set_limit, set_rank

    ranks = [set_rank(cell, spec.num_experts) for row in ids.tolist() for cell in row]
    return pack(ranks, set_limit(spec.num_experts, spec.top_k)[1])


def seal(header: Any, payload: bytes = b"", size: int | None = None) -> str:
    """The text of a header and sets as they are, with the right checksum."""
    head = header if isinstance(header, bytes) else msgpack.packb(header)
    data = (len(head) if size is None else size).to_bytes(4, "little") + head + payload
    return LABEL + base64.b64encode(data + zlib.crc32(data).to_bytes(4, "little")).decode()


def refused(text: Any, case: Case, *errors: type[Exception]) -> str:
    """What decoding `text` says, which must be an error of this package."""
    with pytest.raises(errors or (FormatError, TraceError)) as info:
        decode_rows(text, case.spec, case.tokens)
    return str(info.value)


@QUICK
@given(cases())
def test_rows_come_back(case):
    found = decode_rows(case.text(), case.spec, case.tokens.tolist())
    assert found.start == case.start
    assert found.ids.dtype == case.spec.dtype or (case.ids == -1).any()
    case.assert_is(found.ids, found.versions)


@QUICK
@given(cases(), st.lists(st.integers(0, 12), max_size=4))
def test_pieces_add_up_to_the_whole(case, cuts):
    cuts = [0, *sorted(min(c, len(case.ids)) for c in cuts), len(case.ids)]
    pieces = [decode_rows(case.text(a, b), case.spec, case.tokens) for a, b in pairwise(cuts)]
    assert [p.start - case.start for p in pieces] == cuts[:-1]
    versions = [p.versions for p in pieces]
    whole = None if versions[0] is None else np.concatenate(versions)
    case.assert_is(np.concatenate([p.ids for p in pieces]), whole)


@settings(QUICK, max_examples=60)
@given(cases())
def test_the_format_by_hand(case):
    """Byte for byte what the docstring says, with the codec written from docs/format.md."""
    missing = (case.ids == -1).all(axis=(1, 2)).tolist()
    gaps: list[int] = []
    for row, gone in enumerate(missing):
        if gone and row and missing[row - 1]:
            gaps[-1] += 1
        elif gone:
            gaps += [row, 1]
    runs: list[int] | None = None if case.versions is None else []
    for gone, version in zip(missing, () if runs is None else case.versions.tolist(), strict=False):
        if not gone and runs and runs[-1] == version:
            runs[-2] += 1
        elif not gone:
            runs += [1, version]
    spec, rows = case.spec, len(case.ids)
    tokens = case.tokens[case.start : case.start + rows + 1].astype("<i4")
    crc = zlib.crc32(tokens.tobytes())
    shape = [spec.num_experts, spec.top_k, len(spec.moe_layers)]
    header = [*shape, case.start, rows, crc, gaps, runs]
    kept = case.ids[np.logical_not(missing)]
    assert case.text() == seal(header, bare(kept, spec))


def test_numba_and_numpy_write_the_same(monkeypatch):
    kernels = pytest.importorskip("r3.storage.kernels")
    for spec in (SPEC, RouterSpec(300, 5, (0, 1), 2), RouterSpec(128, 8, (0,), 1)):
        whole = case(spec=spec)
        with monkeypatch.context() as patch:
            patch.setattr(codec, "_loaded", None)
            patch.setattr(codec, "_coded", -(1 << 40))
            plain = whole.text()
            patch.setattr(codec, "_loaded", kernels)
            assert whole.text() == plain
            found = decode_rows(plain, spec, whole.tokens)
        whole.assert_is(found.ids, found.versions)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000])
def test_two_thirds_of_an_npy_at_most(rows):
    """Against base64 of an .npy, 8 of 128 in 48 layers: from the first row on."""
    spec = RouterSpec(128, 8, tuple(range(48)), 48)
    rng = np.random.default_rng(rows)
    ids, tokens = random_ids(rng, spec, rows), rng.integers(0, 150_000, rows + 1)
    text = encode_rows(ids, spec, tokens=tokens, versions=np.full(rows, 10**6))
    assert len(text) <= 0.66 * len(encode_npy(ids))


def test_every_changed_character_is_refused():
    whole = case()
    characters = string.printable + "\0\x80\xff\u0141\U0001f600"
    for rows in (3, 4, 5):  # three lengths of what stands behind the last four characters
        text = whole.text(0, rows)
        for at in range(len(text)):
            for c in set(characters) - {text[at]}:
                refused(text[:at] + c + text[at + 1 :], whole)


def test_every_length_is_refused_but_one():
    whole = case()
    text = whole.text()
    for end in range(len(text)):
        refused(text[:end], whole, FormatError)
        refused(text[:end] + text[end + 1 :], whole, FormatError)
    for more in ("A", "AAAA", "=", "====", "\n", " ", text):
        refused(text + more, whole, FormatError)


def test_every_changed_byte_is_refused_or_read_as_what_it_says():
    """With a checksum that fits: errors of this package only, and ids that exist."""
    whole = case()
    data = base64.b64decode(whole.text().removeprefix(LABEL))[:-4]
    size = int.from_bytes(data[:4], "little")
    for at in range(4, len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            text = seal(bytes(changed[4 : 4 + size]), bytes(changed[4 + size :]))
            try:
                found = decode_rows(text, SPEC, whole.tokens)
            except (FormatError, TraceError):
                continue
            gone = (found.ids == -1).all(axis=(1, 2))
            assert ((found.ids[~gone] >= 0) & (found.ids[~gone] < 8)).all()
            assert (found.ids[~gone][..., 1:] > found.ids[~gone][..., :-1]).all()


NUMBERS = {"experts": 8, "top_k": 2, "layers": 3, "start": 1, "rows": 2, "crc": 0}
CELLS = np.tile([0, 1], (2, 3, 1))  # two rows


def header(**changes: Any) -> list[Any]:
    """That of two rows of SPEC behind the first, with other fields."""
    crc = zlib.crc32(np.array(TOKENS[1:4], "<i4").tobytes())
    fields = {**NUMBERS, "crc": crc, "missing": [], "versions": None}
    assert not set(changes) - set(fields)
    return list((fields | changes).values())


def test_headers_written_by_hand_are_read():
    """So that the refusals below are those of what was changed."""
    ids = np.array([[[0, 1], [2, 7], [6, 7]], [[3, 4], [0, 7], [1, 2]]])
    text = seal(header(), bare(ids, SPEC))
    assert decode_rows(text, SPEC, TOKENS).ids.tolist() == ids.tolist()
    text = seal(header(missing=[0, 1], versions=[1, 2**40]), bare(ids[1:], SPEC))
    found = decode_rows(text, SPEC, TOKENS)
    assert found.ids.tolist() == [[[-1, -1]] * 3, ids[1].tolist()]
    assert found.versions.tolist() == [-1, 2**40]
    found = decode_rows(seal(header(missing=[0, 2], versions=[])), SPEC, TOKENS)
    assert (found.ids == -1).all()
    assert found.ids.shape == (2, 3, 2)


ODD = [-1, 2**62, 2**63, 2**64 - 1, 1.0, float("nan"), True, False, None, "2", b"2", [], [2], {}]
LISTS = [[1], [2, 7, 2], [2, 1.0], [2, True], [None, None], [[2, 7]], [[2], [7]], [2, "7"], [-2, 7]]
LISTS += [{}, {0: 1}, {"0": 1}, "01", b"01", 0, 1, 1.0, True, [2, 2**62], [2, -1], [2, None]]
MISSING = [*LISTS, None, [0, 0], [0, 3], [2, 1], [0, 1, 0, 1], [1, 1, 0, 1], [0, 1, 1, 1]]
MISSING += [[0, 2**61], [2**62 - 1, 2**62 - 1], [0, 1] * 1000]
VERSIONS = [*LISTS, [], [1, 7], [3, 7], [1, 7, 2, 7], [0, 7, 2, 7], [2, 7, 0, 7], [2**61, 7] * 8]


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_that_cannot_be_are_refused(field):
    size = len(bare(CELLS, SPEC))
    for value in [*ODD, 0, 3, 1000]:
        if value != NUMBERS[field]:
            refused(seal(header(**{field: value}), bytes(size)), case())
        elif type(value) is not int:  # True is 1, and not a number here
            refused(seal(header(**{field: value}), bytes(size)), case(), FormatError)


@pytest.mark.parametrize("field", ["missing", "versions"])
def test_runs_that_cannot_be_are_refused(field):
    for value in MISSING if field == "missing" else VERSIONS:
        for rows in range(3):  # whatever size would fit
            sets = bare(CELLS[:rows], SPEC)
            refused(seal(header(**{field: value}), sets), case(), FormatError)


def test_frames_that_cannot_be_are_refused():
    good, sets = msgpack.packb(header()), bare(CELLS, SPEC)
    decode_rows(seal(good, sets), SPEC, TOKENS)
    for bad in (b"", b"\xc1", good[:-1], good + b"\0", b"\x91" * 2000, b"\xdd\xff\xff\xff\xff"):
        refused(seal(bad, sets), case(), FormatError)
    for other in (header()[:-1], [*header(), 0], dict(enumerate(header())), (), 8, None, "x"):
        refused(seal(other, sets), case(), FormatError)
    refused(seal(b"\xd6\xff\xff\xff\xff\xff", sets), case(), FormatError)  # a time
    refused(seal(b"\x98" + b"\xa1\xff" * 8, sets), case(), FormatError)  # text that is no UTF-8
    for size in (0, 1, len(good) - 1, len(good) + 1, len(good) + len(sets) + 1, 2**31, 2**32 - 1):
        refused(seal(good, sets, size), case(), FormatError)
    for wrong in (b"", sets[:-1], sets + b"\0", b"\xff" * len(sets), sets * 1000):
        refused(seal(good, wrong), case(), FormatError)
    # a header that takes the checksum for its own last number
    body = msgpack.packb(header(rows=0, versions=[0, 2**32 - 1]))
    data = len(body).to_bytes(4, "little") + body[:-4]
    text = LABEL + base64.b64encode(data + zlib.crc32(data).to_bytes(4, "little")).decode()
    refused(text, case(), FormatError)


def test_memory_is_that_of_the_rollout_whatever_is_declared():
    """With top_k == num_experts a set takes no bytes, so that no size betrays the count."""
    spec, tokens = RouterSpec(4, 4, (0,), 1), list(range(11))
    text = encode_rows(np.zeros((10, 1, 4), int) + range(4), spec, tokens=tokens)
    assert decode_rows(text, spec, tokens).ids.tolist() == [[[0, 1, 2, 3]]] * 10
    hostile = [
        [4, 4, 1, 0, 2**62 - 1, 0, [], None],
        [4, 4, 1, 2**62 - 1, 2**62 - 1, 0, [], None],
        [4, 4, 1, 0, 11, 0, [], None],
        [4, 4, 1, 0, 10, zlib.crc32(np.arange(11, dtype="<i4").tobytes()), [], [2**61, 1] * 1000],
        [4, 4, 1, 0, 10, zlib.crc32(np.arange(11, dtype="<i4").tobytes()), [0, 2**61], None],
        [4, 4, 1, 0, 10, 0, [0] * 100_000, None],
    ]
    tracemalloc.start()
    try:
        for fields in hostile:
            with pytest.raises((FormatError, TraceError)):
                decode_rows(seal(fields), spec, tokens)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_rows_of_others_are_refused():
    whole = case()
    text = whole.text(1, 4)
    for spec, found in [
        (RouterSpec(9, 2, (1, 2, 4), 5), "2 of 8 experts in 3 MoE layers, expected 2 of 9 in 3"),
        (RouterSpec(8, 3, (1, 2, 4), 5), "expected 3 of 8 in 3"),
        (RouterSpec(8, 2, (1, 2), 5), "expected 2 of 8 in 2"),
    ]:
        with pytest.raises(TraceError, match=found):
            decode_rows(text, spec, TOKENS)
    for at in range(1, 5):
        other = np.array(TOKENS)
        other[at] = 4
        with pytest.raises(TraceError, match="rows 1 to 4 are of other tokens"):
            decode_rows(text, SPEC, other)
    for outside in (0, 5):  # of the rows or not: these tokens say nothing of them
        other = np.array(TOKENS)
        other[outside] = 4
        decode_rows(text, SPEC, other)
    for shifted in (TOKENS[1:], [3, *TOKENS], TOKENS[::-1]):
        with pytest.raises(TraceError, match="are of other tokens"):
            decode_rows(text, SPEC, shifted)
    for tokens in ([], TOKENS[:1], TOKENS[:4]):
        rows = max(len(tokens) - 1, 0)
        with pytest.raises(TraceError, match=f"rows 1 to 4, expected at most {rows} rows for"):
            decode_rows(text, SPEC, tokens)
    for odd in (["a"] * 6, [1.5] * 6, [2**70] * 6):
        with pytest.raises(TraceError, match=r"token ids are .*, expected integers"):
            decode_rows(text, SPEC, odd)


def test_other_forms_of_the_same_bytes_are_refused():
    """A payload in another alphabet than its label says (field.md, 62), or not text at all."""
    whole = case()
    text = whole.text()
    data = base64.b64decode(text.removeprefix(LABEL))
    others = [base64.b85encode(data), base64.a85encode(data), base64.b32encode(data)]
    others += [data.hex().encode(), b"-_" + base64.urlsafe_b64encode(data)[2:], b""]
    for other in others:
        refused(LABEL + other.decode(), whole, FormatError)
    body = text.removeprefix(LABEL)
    for spoilt in (f" {text}", f"{text}\n", f"{LABEL} {body}", f"{LABEL}{body[:8]}\n{body[8:]}"):
        refused(spoilt, whole, FormatError)
    for label in ("", "r3.rows/2:", "r3.rows/1", "R3.rows/1:", "nrlre1:int8:5x3x2:"):
        assert "expected text that begins with 'r3.rows/1:'" in refused(label + body, whole)
    for odd in (None, 5, text.encode(), bytearray(text.encode()), [text], {"data": text}, data):
        assert "expected text that begins with" in refused(odd, whole, FormatError)


def test_text_of_another_class_is_text():
    class Text(str):
        __slots__ = ()

    whole = case()
    found = decode_rows(Text(whole.text()), SPEC, whole.tokens)
    whole.assert_is(found.ids, found.versions)


def test_rows_that_cannot_be_are_not_written():
    ids = random_ids(np.random.default_rng(0), SPEC, 5).astype(int)
    for cell, found in [
        ([3, 3], "row 2, layer 2: experts .3, 3. name one expert twice"),
        ([3, 8], "row 2, layer 2: expert id 8, expected 0..7"),
        ([3, -1], "row 2, layer 2: expert id -1, expected 0..7"),
        ([-1, -1], "row 2, layer 2: expert id -1"),
    ]:
        bad = ids.copy()
        bad[2, 1] = cell
        with pytest.raises(TraceError, match=f"rows from 0: {found}"):
            encode_rows(bad, SPEC, tokens=TOKENS)
    for shape in ((5, 2, 2), (5, 3, 1), (5, 6), (30,), (5, 3, 2, 1)):
        with pytest.raises(TraceError, match="routed_experts has shape"):
            encode_rows(np.zeros(shape, int), SPEC, tokens=TOKENS)
    with pytest.raises(TraceError, match="dtype float64, expected integers"):
        encode_rows(ids.astype(float), SPEC, tokens=TOKENS)
    with pytest.raises(TraceError, match="5 tokens for 5 rows, expected one more"):
        encode_rows(ids, SPEC, tokens=TOKENS[:5])
    with pytest.raises(TraceError, match="rows from -1: expected rows from 0"):
        encode_rows(ids, SPEC, tokens=TOKENS, start=-1)
    for versions in ([1, 2, 3, 4], [1, 2, 3, -1, 5]):
        with pytest.raises(TraceError, match="weight versions, the lowest"):
            encode_rows(ids, SPEC, tokens=TOKENS, versions=np.array(versions))
