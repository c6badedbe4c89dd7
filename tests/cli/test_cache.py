"""`windlass cache` on directories that real stores have written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke
from tests.tiers.test_disk import MODEL, RECORD_BYTES, file_of, put, read
from windlass.tiers.disk import DiskStore
from windlass.tiers.fingerprint import Fingerprint

OLD = replace(MODEL, model="older", version="0.0.0")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Three records of one model, of which one was read twice, and one record of another."""
    root = tmp_path / "kv"
    stores = [_open(root, model) for model in (MODEL, OLD)]
    put(stores[0], 1, 2, 3)
    put(stores[1], 4)
    for _ in range(2):
        read(stores[0], 1)
    for store in stores:
        store.close()
    for number in (1, 2):
        os.utime(file_of(root, number), ns=(0, 10**18 + number * 10**9))
    return root


def _open(root: Path, model: Fingerprint) -> DiskStore:
    return DiskStore(root, fingerprint=model, max_bytes=2**30, record_bytes=RECORD_BYTES)


def test_ls_shows_each_model(windlass: Invoke, root: Path) -> None:
    shown = json.loads(windlass("cache", "ls", "--prefix-cache-dir", str(root), "--json").out)
    assert (shown["num_records"], shown["num_bytes"]) == (4, 4 * 8192)
    by_model = {item["model"]: item for item in shown["models"]}
    assert by_model["tiny"]["hits"] == 2
    assert by_model["tiny"]["num_records"] == 3
    assert by_model["tiny"]["oldest"] == "2001-09-09T01:46:41+00:00"
    assert by_model["tiny"]["kv_dtype"] == "float32"
    assert by_model["tiny"]["fingerprint"] == MODEL.digest.hex()
    assert by_model["older"]["version"] == "0.0.0"
    table = windlass("cache", "ls", "--prefix-cache-dir", str(root), "--model", "older").out
    assert "8.0 KiB" in table
    assert "tiny" not in table


def test_verify_reports_and_removes_bad_records(windlass: Invoke, root: Path) -> None:
    args = ("cache", "verify", "--prefix-cache-dir", str(root))
    assert windlass(*args).code == 0
    content = bytearray(file_of(root, 1).read_bytes())
    content[-1] ^= 1
    file_of(root, 1).write_bytes(content)
    os.truncate(file_of(root, 2), 100)
    file_of(root, 3).write_bytes(b"something else")
    file_of(root, 4, OLD).rename(file_of(root, 4))
    found = windlass(*args, "--json")
    assert found.code == 1
    report = json.loads(found.out)
    assert (report["num_records"], report["num_bad"], report["deleted"]) == (4, 4, False)
    reasons = {item["path"]: item["reason"] for item in report["bad"]}
    assert reasons[str(file_of(root, 1))] == "has a wrong checksum"
    assert reasons[str(file_of(root, 2))] == "has 100 bytes instead of 5,088"
    assert reasons[str(file_of(root, 3))] == "is no record, or of another version"
    assert reasons[str(file_of(root, 4))] == f"belongs to the fingerprint {OLD.digest.hex()}"
    removed = windlass(*args, "--delete")
    assert removed.code == 0
    assert "4 records, 4 bad, which were removed" in removed.err
    assert windlass(*args).err == "0 records, 0 bad\n"


def test_verify_finds_a_record_under_another_key(windlass: Invoke, root: Path) -> None:
    file_of(root, 1).rename(file_of(root, 5))
    args = ("cache", "verify", "--prefix-cache-dir", str(root), "--model", MODEL.digest.hex()[:8])
    assert "holds the key" in windlass(*args).out


def test_clear_by_age_and_model(windlass: Invoke, root: Path) -> None:
    args = ("cache", "clear", "--prefix-cache-dir", str(root))
    assert windlass(*args, "--older-than", "1d").err == "removed 2 records, 16.0 KiB\n"
    assert not file_of(root, 1).exists()
    assert file_of(root, 3).exists()
    assert windlass(*args, "--model", "older", "--json").out.startswith('{"num_records": 1')
    assert not file_of(root, 4, OLD).parent.exists()
    assert windlass(*args).err == "removed 1 records, 8.0 KiB\n"
    assert list(root.iterdir()) == []


def test_clear_under_a_running_engine(windlass: Invoke, root: Path) -> None:
    store = _open(root, MODEL)
    put(store, 6)
    assert windlass("cache", "clear", "--prefix-cache-dir", str(root)).code == 0
    assert read(store, 6) is None
    put(store, 6)
    assert read(store, 6) is not None
    store.close()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ls", "--prefix-cache-dir", "{root}/none"], "no such directory"),
        (["ls", "--prefix-cache-dir", "{root}", "--model", "large"], "It has: older, tiny."),
        (["clear", "--prefix-cache-dir", "{root}", "--older-than", "week"], "such as 90m or 7d"),
        (["ls"], "--prefix-cache-dir"),
    ],
)
def test_errors_state_what_to_do(
    windlass: Invoke, root: Path, args: list[str], message: str
) -> None:
    outcome = windlass("cache", *(arg.format(root=root) for arg in args))
    assert outcome.code == 2
    assert message in outcome.err
