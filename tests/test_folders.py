"""The cache folder holds code that is run: no other user may be able to change it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass import folders
from windlass.errors import ConfigError
from windlass.folders import cache_folder, check_private, make_private, write_atomically


def make_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` belong to another user than this process."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "cache"
    monkeypatch.setenv("WINDLASS_CACHE", str(made))
    return made


@pytest.fixture
def loose_umask() -> Iterator[None]:
    before = os.umask(0o000)
    yield
    os.umask(before)


@pytest.mark.usefixtures("loose_umask")
def test_new_folders_are_private_whatever_the_umask(root: Path) -> None:
    folder = cache_folder("native")
    assert folder == root / "native"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_folder("native") == folder


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
@pytest.mark.parametrize("loose", ["", "native"])
def test_folders_that_others_can_write_are_refused(root: Path, mode: int, loose: str) -> None:
    folder = cache_folder("native")
    (root / loose).chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode 0{mode:o}.*WINDLASS_CACHE.*chmod"):
        check_private(root, folder)


@pytest.mark.usefixtures("root")
def test_a_file_that_others_can_write_is_refused() -> None:
    file = cache_folder("native") / "library.so"
    file.touch()
    file.chmod(0o664)
    with pytest.raises(ConfigError, match=r"library\.so"):
        check_private(file)


@pytest.mark.usefixtures("root")
def test_folders_of_another_user_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_folder("native")
    make_foreign(folder, monkeypatch)
    with pytest.raises(ConfigError, match="belongs to user"):
        check_private(folder)


def test_a_link_to_a_folder_of_another_user_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_private(root)
    (root / "native").symlink_to(elsewhere)
    make_foreign(elsewhere, monkeypatch)
    with pytest.raises(ConfigError, match="belongs to user"):
        cache_folder("native")


@pytest.mark.usefixtures("root")
def test_a_folder_above_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """Another user could rename the cache, and put a folder with other code in its place."""
    folder = cache_folder("native")
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"{tmp_path} has mode 0777.*chmod go-w {tmp_path}`"):
        check_private(folder)
    tmp_path.chmod(0o1777)  # as /tmp: no other user can rename the cache
    check_private(folder)
    tmp_path.chmod(0o700)


def test_a_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could point it elsewhere after the check."""
    link, target = tmp_path / "link", tmp_path / "target"
    target.mkdir(mode=0o700)
    link.symlink_to(target)
    check_private(link)
    if os.geteuid() != 0:
        pytest.skip("only root can make a link of another user")
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.raises(ConfigError, match="is a link of user 12345"):
        check_private(link)
    monkeypatch.setenv("WINDLASS_CACHE", str(link / "cache"))
    with pytest.raises(ConfigError, match="is a link of user 12345"):
        cache_folder("native")


def test_folders_of_root_are_trusted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was filled when a container image was built."""
    folder = cache_folder("native")
    if os.geteuid() != 0:
        pytest.skip("only root can create a folder that root owns")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    check_private(root, folder)


def test_missing_paths_pass(root: Path) -> None:
    check_private(root / "native" / "library.so")


def test_a_folder_that_cannot_be_created(root: Path) -> None:
    root.write_text("where the folder should be")
    with pytest.raises(ConfigError, match="WINDLASS_CACHE"):
        cache_folder("native")


@pytest.mark.usefixtures("loose_umask")
def test_writes_are_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "notes.json"
    write_atomically(file, "first")
    assert file.read_text() == "first"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def full_disk(_from: str, _to: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "second")
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]
