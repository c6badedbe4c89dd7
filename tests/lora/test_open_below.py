"""Adapters that are confined to folders: no file outside of them is read, whenever a link appears."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lora.folders import SPEC, write_adapter
from windlass.errors import CheckpointError
from windlass.lora.open_below import open_below
from windlass.lora.store import AdapterStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "inner").mkdir(parents=True)
    (tmp_path / "root" / "inner" / "file").write_text("inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("outside")
    return tmp_path / "root"


def read(path: Path, *roots: Path) -> str:
    with open(path, opener=open_below(tuple(map(str, roots)))) as stream:
        return stream.read()


def test_files_and_links_inside_are_read(root: Path) -> None:
    (root / "link").symlink_to("inner/file")
    (root / "folder").symlink_to("inner")
    (root.parent / "alias").symlink_to(root)
    for path in ("inner/file", "link", "folder/file", "inner/../link"):
        assert read(root / path, root) == "inside"
    assert read(root.parent / "alias" / "link", root) == "inside"
    assert read(root / "link", root.parent / "alias") == "inside"
    assert read(root.parent / "outside" / "file", root, root.parent / "outside") == "outside"


@pytest.mark.parametrize(
    "path", ["../outside/file", "link", "folder/file", "inner/../../outside/file"]
)
def test_a_path_that_leads_outside_is_refused(root: Path, path: str) -> None:
    (root / "link").symlink_to(root.parent / "outside" / "file")
    (root / "folder").symlink_to("../outside")
    with pytest.raises(PermissionError, match="leads out of"):
        read(root / path, root)


@pytest.mark.parametrize("replaced", ["inner", "inner/file"])
def test_a_link_that_appears_after_the_check_is_not_followed(
    root: Path, replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener, path, resolve = open_below((str(root),)), root / "inner" / "file", Path.resolve

    def resolve_and_replace(checked: Path, strict: bool = False) -> Path:
        real = resolve(checked, strict)
        if not (root / replaced).is_symlink():
            os.rename(root / replaced, root / "moved")
            (root / replaced).symlink_to(
                root.parent / "outside" / Path(replaced).relative_to("inner")
            )
        return real

    monkeypatch.setattr(Path, "resolve", resolve_and_replace)
    with pytest.raises(OSError, match="a link has replaced it"):
        opener(str(path), os.O_RDONLY)
    assert path.read_text() == "outside"  # what a plain `open` reads now


def test_a_pipe_does_not_hold_up_the_reader(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(OSError, match="neither a file nor a folder"):
        read(root / "pipe", root)


def test_no_descriptor_is_left_open(root: Path) -> None:
    (root / "link").symlink_to("../outside/file")
    os.mkfifo(root / "pipe")
    before = len(os.listdir("/dev/fd"))
    for path in ("inner/file", "link", "pipe", "none", "inner/none", "none/none"):
        with contextlib.suppress(OSError):
            read(root / path, root)
    assert len(os.listdir("/dev/fd")) == before


@pytest.fixture
def store() -> Iterator[AdapterStore]:
    made = AdapterStore(SPEC, max_rank=8, max_host=1)
    yield made
    made.close()


def wait(store: AdapterStore, name: str) -> None:
    while not store.ready(name):
        time.sleep(0.001)


@pytest.mark.parametrize("replaced", ["a", "a/adapter_config.json", "a/adapter_model.safetensors"])
def test_an_adapter_that_a_link_replaces_is_not_read(
    store: AdapterStore, root: Path, replaced: str
) -> None:
    """The HTTP process has checked the path; the engine reads it later, and again after an eviction."""
    write_adapter(root / "a")
    outside = write_adapter(root.parent / "outside" / "a", seed=1)
    for name in ("a", "b"):
        store.register(name, root / "a", str(root))
    wait(store, "a")
    os.rename(root / replaced, root / "moved")
    (root / replaced).symlink_to(outside / Path(replaced).relative_to("a"))
    known = store.version("b")
    with pytest.raises(CheckpointError, match="leads out of"):
        wait(store, "b")
    assert store.version("b") != known  # nothing outside was hashed either
    store.unregister("b")
    store.register("b", root / "a")  # of the command line: the operator's own links are followed
    wait(store, "b")


def test_the_content_of_a_folder_outside_is_not_named(store: AdapterStore, root: Path) -> None:
    (root / "a").symlink_to(root.parent / "outside")
    store.register("a", root / "a", str(root))
    with pytest.raises(CheckpointError, match="leads out of") as error:
        wait(store, "a")
    assert "contains" not in str(error.value)
