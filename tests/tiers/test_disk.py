"""The disk tier with real files: what is read is what was written, or a miss."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest

from windlass.errors import ConfigError
from windlass.tiers.disk import DiskStore
from windlass.tiers.disk_files import list_records, read_description, writers_of
from windlass.tiers.fingerprint import Fingerprint
from windlass.tiers.record import HEADER_BYTES, HITS_OFFSET

RECORD_BYTES = 5000
FILE_BYTES = 8192  # whole pages
MODEL = Fingerprint(
    model="tiny",
    weights="00ff",
    format="float32 on cpu",
    kv_dtype="float32",
    layout="full x 2",
    block_size=16,
)

Open = Callable[..., DiskStore]


def key_of(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16).digest()


def record_of(number: int, num_bytes: int = RECORD_BYTES) -> memoryview:
    return memoryview((b"%d|" % number * num_bytes)[:num_bytes])


def read(store: DiskStore, number: int) -> bytes | None:
    out = bytearray(RECORD_BYTES)
    return bytes(out) if store.get(key_of(number), memoryview(out)) else None


def put(store: DiskStore, *numbers: int) -> None:
    for number in numbers:
        assert store.put(key_of(number), record_of(number))


def file_of(root: Path, number: int, model: Fingerprint = MODEL) -> Path:
    return root / model.digest.hex() / f"{key_of(number).hex()}.kv"


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_store(root: Path) -> Iterator[Open]:
    stores: list[DiskStore] = []

    def make(fingerprint: Fingerprint = MODEL, num_records: int = 1000, **more: Clock) -> DiskStore:
        store = DiskStore(
            root,
            fingerprint=fingerprint,
            max_bytes=num_records * FILE_BYTES,
            record_bytes=RECORD_BYTES,
            **more,
        )
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def test_records_outlive_the_store(root: Path, open_store: Open) -> None:
    first = open_store()
    put(first, 1, 2)
    assert first.contains(key_of(1))
    assert not first.contains(key_of(3))
    first.close()
    again = open_store()
    assert again.contains(key_of(1))
    assert again.contains(key_of(2))
    assert read(again, 1) == record_of(1)
    assert read(again, 2) == record_of(2)
    assert read(again, 3) is None
    stats = again.stats()
    assert (stats.num_records, stats.num_bytes, stats.max_bytes) == (2, 16384, 8_192_000)
    assert (stats.hits, stats.misses, stats.writes, stats.corrupt) == (2, 1, 0, 0)
    assert read_description(root / MODEL.digest.hex())["model"] == "tiny"


def test_another_users_files_are_not_readable(root: Path, open_store: Open) -> None:
    put(open_store(), 1)
    assert root.stat().st_mode & 0o777 == 0o700
    assert file_of(root, 1).parent.stat().st_mode & 0o777 == 0o700
    assert file_of(root, 1).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "00fe"},
        {"format": "q4_1 on cpu"},
        {"kv_dtype": "int8"},
        {"layout": "full x 3"},
        {"block_size": 32},
        {"rank": 1},
        {"world": 2},
        {"version": "0.0.0"},
    ],
)
def test_a_record_of_another_fingerprint_is_a_miss(
    open_store: Open, change: dict[str, str | int]
) -> None:
    put(open_store(), 1)
    other = open_store(replace(MODEL, **change))  # type: ignore[arg-type]
    assert not other.contains(key_of(1))
    assert read(other, 1) is None


def test_the_name_of_a_model_does_not_count(open_store: Open) -> None:
    put(open_store(), 1)
    assert read(open_store(replace(MODEL, model="/moved/tiny")), 1) == record_of(1)


def test_a_file_at_the_wrong_place_is_a_miss(root: Path, open_store: Open) -> None:
    other = replace(MODEL, weights="00fe")
    put(open_store(other), 1)
    store = open_store()
    put(store, 2)
    file_of(root, 1, other).rename(file_of(root, 1))
    file_of(root, 2).rename(file_of(root, 3))
    store.refresh()
    assert store.contains(key_of(1))
    assert store.contains(key_of(3))
    assert read(store, 1) is None
    assert read(store, 3) is None
    assert store.stats().corrupt == 2
    assert not store.contains(key_of(1))
    assert not file_of(root, 1).exists()


def test_every_damaged_byte_is_a_miss(root: Path, open_store: Open) -> None:
    store = open_store()
    put(store, 1)
    path = file_of(root, 1)
    content = path.read_bytes()
    places = [*range(HITS_OFFSET), *range(HEADER_BYTES, len(content), 97), len(content) - 1]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert read(store, 1) is None, f"byte {place}"
        assert not path.exists()
    assert store.stats().corrupt == len(places)
    path.write_bytes(content[:HITS_OFFSET] + b"\xff" * 8 + content[HEADER_BYTES:])
    assert read(store, 1) == record_of(1)  # the number of hits is no part of the record
    put(store, 1)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, 4096, -1])
def test_a_truncated_file_is_a_miss(root: Path, open_store: Open, length: int) -> None:
    store = open_store()
    put(store, 1)
    content = file_of(root, 1).read_bytes()
    file_of(root, 1).write_bytes(content[:length])
    assert read(store, 1) is None
    put(store, 1)  # stored again
    assert file_of(root, 1).read_bytes() == content


@pytest.mark.parametrize("tail", [b"\0", b"more"])
def test_a_file_with_a_tail_is_a_miss(root: Path, open_store: Open, tail: bytes) -> None:
    store = open_store()
    put(store, 1)
    with file_of(root, 1).open("ab") as file:
        file.write(tail)
    assert read(store, 1) is None
    assert store.stats().corrupt == 1


def test_pages_of_zeros_are_a_miss(root: Path, open_store: Open) -> None:
    """A power failure can leave a file of the right length without its content."""
    store = open_store()
    put(store, 1, 2)
    for number, start in ((1, 0), (2, 4096)):
        with file_of(root, number).open("r+b") as file:
            file.seek(start)
            file.write(bytes(HEADER_BYTES + RECORD_BYTES - start))
        assert read(store, number) is None


def test_links_are_not_followed(root: Path, open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    put(store, 1)
    outside = tmp_path / "outside"
    file_of(root, 1).rename(outside)
    content = outside.read_bytes()
    file_of(root, 1).symlink_to(outside)
    assert read(store, 1) is None
    assert outside.read_bytes() == content
    assert not file_of(root, 1).is_symlink()
    file_of(root, 2).symlink_to(outside)
    put(store, 2)
    assert outside.read_bytes() == content
    assert not file_of(root, 2).is_symlink()


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_a_directory_in_place_of_a_record_costs_this_record_only(
    root: Path, open_store: Open
) -> None:
    store = open_store(clock=Clock())
    put(store, 1)
    replace_by_directory(file_of(root, 1))
    assert read(store, 1) is None
    assert store.stats().corrupt == 1
    assert not store.put(key_of(1), record_of(1))
    assert store.stats().refused == 1
    put(store, 2)  # at once: the disk is not at fault
    assert read(store, 2) == record_of(2)


def test_a_directory_in_place_of_a_record_is_evicted_from_the_index(
    root: Path, open_store: Open
) -> None:
    store = open_store(num_records=1)
    put(store, 1)
    replace_by_directory(file_of(root, 1))
    put(store, 2)
    assert store.stats().num_records == 1
    assert read(store, 2) == record_of(2)


def test_strange_files_do_not_keep_records_from_being_synced(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("windlass.tiers.disk.os.fsync", synced.append)
    monkeypatch.setattr("windlass.tiers.disk._TICK_S", 3600.0)
    store = open_store()
    put(store, 1, 2, 3)
    for number in (1, 2):
        file_of(root, number).unlink()
    file_of(root, 1).symlink_to(file_of(root, 1))
    os.mkfifo(file_of(root, 2))
    thread = threading.Thread(target=store._sync, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()  # no process writes into the pipe
    assert len(synced) == 1


def test_a_directory_that_others_can_write_is_refused(root: Path, open_store: Open) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(ConfigError, match=r"mode 0777.*--prefix-cache-dir"):
        open_store()


def test_a_file_instead_of_a_directory_is_refused(root: Path, open_store: Open) -> None:
    root.write_text("")
    with pytest.raises(ConfigError, match=r"--prefix-cache-dir .* File exists"):
        open_store()


def test_a_limit_below_one_record_is_refused(open_store: Open) -> None:
    with pytest.raises(ConfigError, match=r"--prefix-cache-gb allows 0 bytes.*8,192"):
        open_store(num_records=0)


# ---- the size limit --------------------------------------------------------------------------


def test_the_least_recently_used_record_goes_first(root: Path, open_store: Open) -> None:
    store = open_store(num_records=3)
    put(store, 1, 2, 3)
    assert read(store, 1) is not None
    put(store, 2)  # stored already: only its age changes
    put(store, 4)
    assert [store.contains(key_of(number)) for number in (1, 2, 3, 4)] == [True, True, False, True]
    assert len(list(list_records(root / MODEL.digest.hex()))) == 3
    stats = store.stats()
    assert (stats.evictions, stats.num_records, stats.num_bytes) == (1, 3, 3 * FILE_BYTES)


def test_the_order_of_use_survives_a_restart(root: Path, open_store: Open) -> None:
    first = open_store()
    put(first, 1, 2, 3)
    first.close()
    for age, number in enumerate((2, 3, 1)):
        os.utime(file_of(root, number), ns=(0, 10**18 - age * 10**9))
    again = open_store(num_records=3)
    put(again, 4)
    assert not again.contains(key_of(1))
    put(again, 5)
    assert not again.contains(key_of(3))
    assert again.contains(key_of(2))


def test_the_limit_counts_all_models_and_engines(root: Path, open_store: Open) -> None:
    old = replace(MODEL, version="0.0.0")
    put(open_store(old), 1, 2)
    store, other = open_store(num_records=3), open_store(num_records=3)
    put(store, 3)
    put(store, 4)
    assert not file_of(root, 1, old).exists()
    assert file_of(root, 2, old).exists()
    other.refresh()
    put(other, 5)
    assert not file_of(root, 2, old).exists()
    assert len([*root.glob("*/*.kv")]) == 3


def test_a_record_that_another_engine_uses_stays(open_store: Open) -> None:
    store = open_store(num_records=2)
    put(store, 1, 2)
    other = open_store(num_records=2)
    assert read(other, 1) is not None
    put(store, 3)
    assert read(other, 1) == record_of(1)
    assert read(other, 2) is None


# ---- several engines -------------------------------------------------------------------------


def test_engines_read_each_others_records(open_store: Open) -> None:
    store, other = open_store(), open_store()
    put(store, 1)
    assert read(other, 1) == record_of(1)  # also before it is known
    assert not other.contains(key_of(1))
    other.refresh()
    assert other.contains(key_of(1))
    file_gone = store._path(key_of(1))
    os.unlink(file_gone)  # evicted by a third engine
    assert read(other, 1) is None
    assert not other.contains(key_of(1))
    put(store, 1)  # the index of the writer still has it, its folder does not
    assert read(other, 1) == record_of(1)


def test_records_are_found_behind_the_engine(open_store: Open) -> None:
    store, other = open_store(), open_store()
    put(store, 1)
    other._look_for_others()
    assert other.contains(key_of(1))


def test_records_are_synced_behind_the_engine(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("windlass.tiers.disk.os.fsync", synced.append)
    store = open_store()
    put(store, 1, 2)
    store._sync()
    store.close()  # waits for the store's own thread, which may have been first
    assert len(synced) == 2


def test_records_of_an_engine_that_is_gone_are_found(open_store: Open) -> None:
    store, other = open_store(), open_store(clock=Clock())
    other._look_for_others()
    put(store, 1)
    store.close()
    other._look_for_others()
    assert other.contains(key_of(1))


def test_an_engine_alone_lists_nothing(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(clock=Clock())
    put(store, 1)
    store._look_for_others()
    put(store, 2)

    def refuse(**_: bool) -> None:
        raise AssertionError("a listing")

    monkeypatch.setattr(store, "refresh", refuse)
    store._look_for_others()


def test_a_removed_directory_is_made_again(root: Path, open_store: Open) -> None:
    store = open_store()
    put(store, 1)
    subprocess.run(["rm", "-r", root], check=True)
    assert read(store, 1) is None
    put(store, 1)
    assert read(store, 1) == record_of(1)


# ---- errors of the disk ----------------------------------------------------------------------


@pytest.fixture
def small_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (RECORD_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
def test_a_write_that_is_cut_short_is_refused(root: Path, open_store: Open) -> None:
    store = open_store()
    assert not store.put(key_of(1), record_of(1))
    assert store.stats().refused == 1
    assert not store.contains(key_of(1))
    assert not file_of(root, 1).exists()
    (writer,) = writers_of(root / MODEL.digest.hex())
    assert os.listdir(writer) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_or_read_only_disk_ends_writes_for_a_while(
    code: int,
    open_store: Open,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    put(store, 1)
    real_open, attempts = os.open, []

    def full(path: str, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            attempts.append(path)
            raise OSError(code, os.strerror(code))
        return real_open(path, flags, *mode)

    monkeypatch.setattr("windlass.tiers.disk.os.open", full)
    with caplog.at_level(logging.WARNING, logger="windlass.tiers"):
        for number in (2, 3, 4):
            assert not store.put(key_of(number), record_of(number))
        assert len(attempts) == 1  # the later ones were not tried
        clock.now = 61.0
        assert not store.put(key_of(2), record_of(2))
        assert len(attempts) == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"prefix cache: {store._directory} cannot be written ({os.strerror(code)}). Records are "
        "still read; a write is tried again every 60 s."
    ]
    assert store.stats().refused == 4
    if code in (errno.EROFS, errno.EACCES):
        assert read(store, 1) == record_of(1)
    monkeypatch.undo()
    assert read(store, 1) == record_of(1)
    clock.now = 122.0
    put(store, 2)
    assert read(store, 2) == record_of(2)


def test_a_read_error_is_a_miss(
    open_store: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    put(store, 1, 2)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("windlass.tiers.disk.os.preadv", broken)
    with caplog.at_level(logging.WARNING, logger="windlass.tiers"):
        assert read(store, 1) is None
        assert read(store, 2) is None
    assert len(caplog.records) == 1
    assert store.stats().corrupt == 2
    assert store.stats().misses == 2


def test_a_disk_that_hangs_does_not_hold_back_the_counters(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's loop reads them between two steps."""
    store = open_store(num_records=1)
    put(store, 1)
    is_hung, go, unlink = threading.Event(), threading.Event(), os.unlink

    def hang(path: str) -> None:
        is_hung.set()
        go.wait()
        unlink(path)

    monkeypatch.setattr("windlass.tiers.disk_index.os.unlink", hang)
    writer = threading.Thread(target=put, args=(store, 2))
    writer.start()
    is_hung.wait()
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.append(store.stats().writes))
    reader.start()
    reader.join(60)
    go.set()
    writer.join()
    reader.join()
    assert found == [1]
    assert store.stats().writes == 2


# ---- killed writers --------------------------------------------------------------------------

_KILLED_WRITERS = """
    import os, random, signal, sys
    from pathlib import Path
    from tests.tiers.test_disk import MODEL, RECORD_BYTES, key_of, record_of
    from windlass.tiers.disk import DiskStore

    real_writev, real_rename = os.writev, os.rename
    num_killed = 0
    for attempt in range(100):
        child = os.fork()
        if child:
            num_killed += os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
            continue
        chance = random.Random(attempt)
        survives = chance.randrange(3)  # records before the one in which it dies

        def die():
            os.kill(os.getpid(), signal.SIGKILL)

        def writev(descriptor, parts):
            global survives
            survives -= 1
            if survives < 0 and attempt % 3 == 0:
                data = b"".join(parts)
                os.write(descriptor, data[: chance.randrange(len(data))])
                die()
            return real_writev(descriptor, parts)

        def rename(old, new):
            if survives < 0 and attempt % 3 == 1:
                die()
            real_rename(old, new)
            if survives < 0 and attempt % 3 == 2:
                die()

        os.writev, os.rename = writev, rename
        store = DiskStore(
            sys.argv[1], fingerprint=MODEL, max_bytes=2**30, record_bytes=RECORD_BYTES
        )
        while True:
            number = chance.randrange(40)
            os.path.exists(store._path(key_of(number))) and os.unlink(store._path(key_of(number)))
            store.put(key_of(number), record_of(number))
    print(num_killed)
"""


def test_killed_writers_leave_no_wrong_record_and_no_files(root: Path, open_store: Open) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_KILLED_WRITERS), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "100\n"), done.stderr
    left = root / MODEL.digest.hex()
    assert len(writers_of(left)) == 1  # each writer removed that of the one before
    store = open_store()
    assert writers_of(left) == frozenset()
    found = [number for number in range(40) if store.contains(key_of(number))]
    assert len(found) > 10
    for number in found:
        assert read(store, number) == record_of(number)
    assert store.stats().corrupt == 0


def test_a_living_writers_files_stay(open_store: Open) -> None:
    store = open_store()
    put(store, 1)
    temporary, descriptor = store._create()
    os.close(descriptor)
    open_store()
    assert os.path.exists(temporary)


_OTHER_PROCESS = """
    import sys
    from tests.tiers.test_disk import MODEL, RECORD_BYTES, key_of, put, read, record_of
    from windlass.tiers.disk import DiskStore

    store = DiskStore(
        sys.argv[1], fingerprint=MODEL, max_bytes=20 * 8192, record_bytes=RECORD_BYTES
    )
    print("open", flush=True)
    for line in sys.stdin:
        for number in map(int, line.split()):
            found = read(store, number)
            assert found in (None, record_of(number)), number
            if found is None:
                put(store, number)
        print("done", flush=True)
    store.close()
"""


def test_two_processes_use_one_directory(root: Path, open_store: Open) -> None:
    """Both write more than the limit, so that records of one are evicted by the other."""
    command = [sys.executable, "-c", textwrap.dedent(_OTHER_PROCESS), str(root)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        store = open_store(num_records=20)
        numbers = [number % 31 for number in range(0, 700, 7)]
        for start in range(0, len(numbers), 10):
            part = numbers[start : start + 10]
            print(*reversed(part), file=process.stdin, flush=True)
            for number in part:
                found = read(store, number)
                assert found in (None, record_of(number))
                if found is None:
                    put(store, number)
            assert process.stdout.readline() == "done\n"
            store.refresh()
        process.stdin.close()
        assert process.wait(30) == 0
    assert store.stats().corrupt == 0
    # Either may have made the room for all records, or both for the same one. One process alone fills the
    # directory again.
    store.refresh()
    for number in range(100, 120):
        put(store, number)
        assert len([*root.glob("*/*.kv")]) <= 20
    assert len([*root.glob("*/*.kv")]) == 20
    assert store.stats().evictions > 0
