"""API keys: their sources, and refused keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starlette.requests import Request

from tests.serve.conftest import running
from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.serve.keys import Keys
from windlass.serve.problems import InvalidKey
from windlass.serve.tenants import NO_TENANT, Tenant


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys.txt"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def request(authorization: str | None) -> Request:
    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    return Request({"type": "http", "headers": headers})


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
@pytest.mark.parametrize("key", ["", " ", "\t\n", "two words", "tail ", "nul\0"])
def test_empty_keys_and_keys_with_spaces_are_refused(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        ServeConfig(**{name: ("good", key)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer  ", "Basic one", "Bearer on", "Bearer one1"]
)
def test_requests_without_a_valid_key_are_refused(header: str | None) -> None:
    keys = Keys.of(ServeConfig(api_key=("one",)))
    with pytest.raises(InvalidKey):
        keys.sender_of(request(header))
    assert keys.sender_of(request("Bearer one"))
    assert not keys.is_admin(request("Bearer one"))


def test_without_admin_keys_there_is_no_admin() -> None:
    keys = Keys.of(ServeConfig())
    assert not keys.is_admin(request(None))
    assert not keys.is_admin(request("Bearer "))


def test_keys_may_contain_non_ascii_characters() -> None:
    keys = Keys.of(ServeConfig(api_key=("schlüssel",)))
    assert keys.sender_of(request("bearer schlüssel"))


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = key_file(tmp_path, "# for the shop\nfirst\n\n  second \n")
    with running(api_key_file=(path,), api_key=("third",)) as server:
        for key, status in {"first": 200, "second": 200, "third": 200, "# for": 401}.items():
            headers = {"Authorization": f"Bearer {key}"}
            assert server.http.get("/v1/models", headers=headers).status_code == status
        assert server.http.get("/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("", 0o600, "has no key"),
        ("# nothing\n\n", 0o600, "has no key"),
        ("two words\n", 0o600, "line 1 .*space"),
        ("one\n", 0o620, "chmod"),
        ("one\n", 0o602, "chmod"),
        ("one\n" * 100_000, 0o600, "larger than"),
    ],
)
def test_a_bad_key_file_is_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    path = key_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=f"--admin-key-file.*{message}"):
        Keys.of(ServeConfig(admin_key_file=(path,)))


def test_a_key_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = key_file(tmp_path, "one", 0o600)
    if os.geteuid() == 0:  # files of root are trusted
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(
        ConfigError, match=rf"--api-key-file.*belongs to user.*Run: chown \d+ {path}"
    ):
        Keys.of(ServeConfig(api_key_file=(path,)))


def test_a_key_file_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    path = key_file(folder, "one", 0o600)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=f"--api-key-file.*Run: chmod go-w {folder}"):
        Keys.of(ServeConfig(api_key_file=(path,)))
    folder.chmod(0o1777)  # in a sticky folder, files are renamed by their owners only
    Keys.of(ServeConfig(api_key_file=(path,)))


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file.*No such file"):
        Keys.of(ServeConfig(api_key_file=(str(tmp_path / "none"),)))


def test_a_world_readable_key_file_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Keys.of(ServeConfig(api_key_file=(key_file(tmp_path, "one", 0o644),)))
    assert "can be read by other users" in caplog.text


def test_the_tenant_of_a_flags_key_has_the_name_of_the_key() -> None:
    keys = Keys.of(ServeConfig(api_key=("one", "two"), admin_key=("boss",)))
    one, two, boss = (keys.tenant_of(request(f"Bearer {key}")) for key in ("one", "two", "boss"))
    assert len({one.name, two.name, boss.name}) == 3
    assert one == keys.tenant_of(request("bearer one"))
    assert [each.admin for each in (one, two, boss)] == [False, False, True]
    assert "one" not in one.name


def test_without_keys_there_is_one_tenant() -> None:
    assert Keys.of(ServeConfig()).tenant_of(request("Bearer any")) == NO_TENANT
    keys = Keys.of(ServeConfig(admin_key=("boss",)))
    assert keys.tenant_of(request(None)) == NO_TENANT
    assert keys.tenant_of(request("Bearer boss")).admin


def test_salts_of_tenants_differ_also_for_equal_salts_of_clients() -> None:
    one, two = Tenant(name="one"), Tenant(name="two")
    salts = {each.cache_salt(salt) for each in (one, two) for salt in ("", "ours", "one", "two")}
    assert len(salts) == 8
    assert one.cache_salt(None) == one.cache_salt("")
