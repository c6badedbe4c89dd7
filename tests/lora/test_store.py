"""Adapters in host memory: background reads, eviction, and errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lora.folders import SPEC, write_adapter
from windlass.errors import AdapterConflict, AdapterNotFound, CheckpointError
from windlass.lora.base import Adapter
from windlass.lora.peft import CONFIG, WEIGHTS
from windlass.lora.store import AdapterStore

Make = Callable[..., AdapterStore]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[AdapterStore] = []

    def opened(max_host: int = 2, pack: Callable[[Adapter], Adapter] | None = None) -> AdapterStore:
        made.append(AdapterStore(SPEC, 8, max_host, pack))
        return made[-1]

    yield opened
    for store in made:
        store.close()


def wait(store: AdapterStore, name: str) -> None:
    end = time.monotonic() + 10
    while not store.ready(name):
        assert time.monotonic() < end
        time.sleep(0.001)


def fill(store: AdapterStore, folder: Path, *names: str) -> None:
    for name in names:
        store.register(name, write_adapter(folder / name))


def test_adapter_is_read_on_demand(make: Make, tmp_path: Path) -> None:
    store = make()
    fill(store, tmp_path, "a")
    assert store.num_in_memory == 0
    assert not store.ready("a")
    wait(store, "a")
    assert (store.get("a").name, store.num_in_memory, store.num_loads) == ("a", 1, 1)


def test_least_recently_used_is_evicted_and_read_again(make: Make, tmp_path: Path) -> None:
    store = make()
    fill(store, tmp_path, "a", "b", "c")
    for name in "abac":
        wait(store, name)
    assert store.num_in_memory == 2
    assert store.ready("a")
    assert not store.ready("b")
    wait(store, "b")
    assert store.num_loads == 4


def test_held_adapter_is_not_evicted(make: Make, tmp_path: Path) -> None:
    store = make(max_host=1)
    fill(store, tmp_path, "a", "b")
    wait(store, "a")
    store.hold("a")
    wait(store, "b")
    assert store.get("a").name == "a"
    store.drop("a")
    fill(store, tmp_path, "c")
    wait(store, "c")
    assert store.num_in_memory == 1


def test_failed_read_raises_once_and_is_retried(make: Make, tmp_path: Path) -> None:
    store = make()
    store.register("a", tmp_path / "late")
    with pytest.raises(CheckpointError, match=r"adapter 'a' could not be loaded.*no such folder"):
        wait(store, "a")
    write_adapter(tmp_path / "late")
    wait(store, "a")
    assert (store.num_failures, store.num_loads) == (1, 1)


def test_abandoned_reads_count_towards_the_limit(make: Make, tmp_path: Path) -> None:
    store = make(max_host=2)
    names = [f"a{number}" for number in range(6)]
    fill(store, tmp_path, *names)
    for name in names:
        assert not store.ready(name)  # and its request ends
        while not store._pending[name].done():
            time.sleep(0.001)
    assert store.num_in_memory + len(store._pending) <= 3
    wait(store, names[0])
    assert store.num_in_memory == 2


def test_replaced_files_are_rejected(make: Make, tmp_path: Path) -> None:
    store = make(max_host=1)
    fill(store, tmp_path, "a", "b")
    for name in "aba":
        wait(store, name)
    write_adapter(tmp_path / "other", seed=5)
    wait(store, "b")
    for file in (tmp_path / "other").iterdir():
        file.replace(tmp_path / "a" / file.name)
    with pytest.raises(CheckpointError, match=r"changed since it was first read.*Unload the adapt"):
        wait(store, "a")
    store.unregister("a")
    store.register("a", tmp_path / "a")
    wait(store, "a")


def test_version_identifies_weights(make: Make, tmp_path: Path) -> None:
    """Cached blocks of an adapter may outlive the engine, and its name and times may stay the same."""
    first, later, other = make(), make(), make()
    folders = [write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", seed=5)]
    for file in (CONFIG, WEIGHTS):
        for folder in folders:
            os.utime(folder / file, ns=(0, 0))
    first.register("a", folders[0])
    version = first.version("a")
    wait(first, "a")
    later.register("a", folders[0])
    assert later.version("a") == version
    other.register("a", folders[1])
    assert other.version("a") != version
    other.register("none", tmp_path / "none")
    assert other.version("none") != other.version("none")


def test_files_that_change_after_their_first_use_are_rejected(make: Make, tmp_path: Path) -> None:
    store = make()
    fill(store, tmp_path, "a")
    store.version("a")
    (tmp_path / "a" / CONFIG).write_text((tmp_path / "a" / CONFIG).read_text() + " ")
    with pytest.raises(CheckpointError, match="changed since it was first read"):
        wait(store, "a")


def test_pack_can_reject_an_adapter(make: Make, tmp_path: Path) -> None:
    def refuse(adapter: Adapter) -> Adapter:
        raise CheckpointError(f"{adapter.name} does not fit")

    store = make(pack=refuse)
    fill(store, tmp_path, "a")
    with pytest.raises(CheckpointError, match="a does not fit"):
        wait(store, "a")


def test_unexpected_error_in_a_reader_thread_is_wrapped(make: Make, tmp_path: Path) -> None:
    def break_down(_adapter: Adapter) -> Adapter:
        raise ZeroDivisionError("oh")

    store = make(pack=break_down)
    fill(store, tmp_path, "a")
    with pytest.raises(CheckpointError, match="ZeroDivisionError: oh"):
        wait(store, "a")


def test_names(make: Make, tmp_path: Path) -> None:
    store = make()
    fill(store, tmp_path, "a")
    with pytest.raises(AdapterConflict, match="'a' is already loaded"):
        store.register("a", tmp_path)
    store.ready("a")
    store.unregister("a")  # while it is being read
    assert list(store.names) == []
    with pytest.raises(AdapterNotFound):
        store.ready("a")
    store.register("a", tmp_path / "a")
    wait(store, "a")


def test_repeated_loads_leave_no_state(make: Make, tmp_path: Path) -> None:
    store = make()
    folder = write_adapter(tmp_path / "a", targets=["q_proj"])
    for number in range(300):
        store.register(f"a{number}", folder)
        wait(store, f"a{number}")
        store.unregister(f"a{number}")
    held = (store._folders, store._loaded, store._pending, store._held, store._versions)
    assert [len(part) for part in held] == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("on_many_hosts", [False, True])
def test_copies_of_an_adapter_have_one_version_on_many_hosts(
    on_many_hosts: bool, tmp_path: Path
) -> None:
    store = AdapterStore(SPEC, 8, 2, on_many_hosts=on_many_hosts)
    for number, seed in enumerate((1, 1, 2)):
        folder = write_adapter(tmp_path / str(number), seed=seed)
        for file in (CONFIG, WEIGHTS):
            os.utime(folder / file, ns=(number, number))
        store.register(str(number), folder)
    first, copy, other = (store.version(str(number)) for number in range(3))
    assert (first == copy) == on_many_hosts
    assert other not in (first, copy)
    store.close()
