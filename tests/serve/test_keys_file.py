"""The keys file: what it may contain, and how it changes."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from starlette.requests import Request

from windlass.cli.main import app
from windlass.config import ServeConfig
from windlass.errors import ConfigError, RequestError
from windlass.serve.keys import BATCH_OWNER, Keys
from windlass.serve.problems import AdminOnly, InvalidKey, NotAllowed, ObjectNotFound
from windlass.serve.tenants import Budget, Tenant, TenantTable


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def write(folder: Path, content: Any, name: str = "keys.yaml") -> str:
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def tenants(**fields: Any) -> dict[str, Any]:
    return {"tenants": {"shop": {"keys": [{"sha256": digest("one")}], **fields}}}


def request(key: str | None = None, **scope: Any) -> Request:
    headers = [] if key is None else [(b"x-api-key", key.encode())]
    return Request({"type": "http", "headers": headers, **scope})


FULL = f"""
# Tenants of the shop
tenants:
  shop:
    keys:
      - {{id: new, sha256: {digest("new")}}}
      - {{id: old, sha256: {digest("old")}, expires: 2030-01-31}}
    weight: 2
    requests_per_minute: 600
    tokens_per_minute: 20000
    max_concurrent_requests: 8
    max_priority: -1
    models: [base]
    adapters: []
    budget: {{usd: 12.5, per: month}}
  lab:
    keys: [{{sha256: {digest("lab")}}}]
    admin: true
  gone:
    keys: [{{sha256: {digest("gone")}}}]
    disabled: true
"""


def full(folder: Path, clock: float = 0.0) -> Keys:
    config = ServeConfig(
        keys_file=write(folder, FULL), price_per_hour=1.0, usage_db=str(folder / "usage.sqlite")
    )
    keys = Keys.of(config)
    keys._clock = lambda: clock
    return keys


def test_keys_have_their_tenant(tmp_path: Path) -> None:
    keys = full(tmp_path)
    shop = Tenant(
        name="shop",
        weight=2.0,
        requests_per_minute=600,
        tokens_per_minute=20_000,
        max_concurrent_requests=8,
        max_priority=-1,
        models=("base",),
        adapters=(),
        budget=Budget(usd=12.5, per="month"),
    )
    for key in ("new", "old"):
        sender = keys.sender_of(request(key))
        assert (sender.tenant, sender.key_id) == (shop, key)
    lab = keys.sender_of(request("lab"))
    assert lab.tenant == Tenant(name="lab", admin=True)
    assert lab.key_id == digest("lab")[:12]
    keys.check_admin(request("lab"))
    with pytest.raises(AdminOnly):
        keys.check_admin(request("new"))


def test_disabled_expired_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    after = 1_896_048_000.0  # the start of 2030-01-31
    keys = full(tmp_path, after)
    with pytest.raises(InvalidKey, match="'old' has expired"):
        keys.sender_of(request("old"))
    assert full(tmp_path, after - 1).sender_of(request("old"))
    with pytest.raises(InvalidKey, match="'gone' is disabled"):
        keys.sender_of(request("gone"))
    for key in (None, "other", digest("new")):
        with pytest.raises(InvalidKey, match="a valid key is needed"):
            keys.sender_of(request(key))


def test_batches_keep_their_tenant(tmp_path: Path) -> None:
    keys = full(tmp_path)
    assert keys.tenant_of(request(**{BATCH_OWNER: "shop"})).tokens_per_minute == 20_000
    for owner in ("gone", "removed"):
        with pytest.raises(NotAllowed, match=owner):
            keys.tenant_of(request(**{BATCH_OWNER: owner}))
    for owner in ("0123456789ab", "none"):  # of a key from a flag, of a server without keys
        assert keys.tenant_of(request(**{BATCH_OWNER: owner})) == Tenant(name=owner)


def test_keys_of_flags_work_beside_the_file(tmp_path: Path) -> None:
    keys = Keys.of(ServeConfig(keys_file=write(tmp_path, tenants()), admin_key=("boss",)))
    assert keys.sender_of(request("boss")).tenant.admin
    assert keys.sender_of(request("one")).tenant.name == "shop"


def test_workers_get_the_table(tmp_path: Path) -> None:
    table = full(tmp_path).table
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=TenantTable) == table


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tenants: [", "line 1, column"),
        ("a: 1", "tenants"),
        ("", "tenants"),
        ({"tenants": {}}, "has no key"),
        ({"tenants": {"shop": None}}, "tenant 'shop'.*fields"),
        ({"tenants": {"shop": {"weight": 1}}}, "tenant 'shop': keys is missing"),
        ({"tenants": {"none": {"keys": []}}}, "tenant 'none'.*reserved"),
        ({"tenants": {"0123456789ab": {"keys": []}}}, "reserved"),
        ({"tenants": {"a b": {"keys": []}}}, "tenant 'a b': a name"),
        ("tenants: {1: {keys: []}}", "tenant 1: a name"),
        ({"tenants": {"shop": {"keys": ["hunter2"]}}}, r"keys\.0 has no sha256.*windlass keys"),
        ({"tenants": {"shop": {"keys": [{"key": "hunter2"}]}}}, r"keys\.0.*windlass keys"),
        ({"tenants": {"shop": {"keys": [{"sha256": "hunter2"}]}}}, r"keys\.0.*windlass keys"),
        (tenants(weigth=2), "unknown field 'weigth'. Did you mean 'weight'"),
        (tenants(weight=0), "weight: .*greater than or equal to 0.000001; got 0"),
        (tenants(weight="2"), "weight: "),
        (tenants(requests_per_minute=0), "requests_per_minute"),
        (tenants(tokens_per_minute=1.5), "tokens_per_minute"),
        (tenants(models="base"), "models"),
        (tenants(budget={"usd": 1}), r"budget\.per is missing"),
        (tenants(budget={"usd": 1, "per": "day"}), "--price-per-hour"),
        (tenants(keys=[{"sha256": digest("a"), "expires": "soon"}]), r"keys\.0\.expires"),
        (tenants(keys=[{"sha256": digest("a"), "expires": 5}]), r"keys\.0\.expires"),
        (tenants(keys=[{"sha256": digest("a")}] * 2), r"keys\.1: tenant 'shop' has the same key"),
        (
            tenants(keys=[{"sha256": digest(key), "id": "x"} for key in "ab"]),
            r"keys\.1: another key of this tenant has the id 'x'",
        ),
        ("tenants:\n  a: {keys: []}\n  a: {keys: []}\n", "line 3, column 3: 'a' is given twice"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Keys.of(ServeConfig(keys_file=write(tmp_path, content)))
    assert "--keys-file" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, tenants())
    Path(path).chmod(0o620)
    with pytest.raises(ConfigError, match="chmod"):
        Keys.of(ServeConfig(keys_file=path))


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
def test_changes_are_written_into_the_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, tenants(tokens_per_minute=5), name)
    config = ServeConfig(keys_file=path)
    keys = Keys.of(config)
    changes = {"weight": 3, "tokens_per_minute": None, "max_priority": 1}
    before = asyncio.run(keys.change("shop", changes))
    assert before == {"weight": None, "tokens_per_minute": 5, "max_priority": None}
    assert keys.tenant_of(request("one")) == Tenant(name="shop", weight=3.0, max_priority=1)
    assert Keys.of(config).table == keys.table
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [name]
    content = Path(path).read_text()
    for bad in ({"weight": -1}, {"wait": 1}, {"keys": []}, {"keys": None}, {"keys": ["hunter2"]}):
        with pytest.raises(RequestError):
            asyncio.run(keys.change("shop", bad))
    with pytest.raises(ObjectNotFound):
        asyncio.run(keys.change("other", {"weight": 1}))
    assert Path(path).read_text() == content


def test_the_last_admin_key_cannot_be_removed(tmp_path: Path) -> None:
    """No key could give the rights back."""
    file = tenants()
    file["tenants"]["ops"] = {"keys": [{"sha256": digest("ops")}], "admin": True}
    path = write(tmp_path, file)
    keys = Keys.of(ServeConfig(keys_file=path))
    content = Path(path).read_text()
    expired = [{"sha256": digest("ops"), "expires": "2020-01-31"}]
    for bad in ({"admin": False}, {"disabled": True}, {"keys": []}, {"keys": expired}):
        with pytest.raises(RequestError, match="would leave no key with admin rights"):
            asyncio.run(keys.change("ops", bad))
    assert Path(path).read_text() == content
    assert keys.sender_of(request("ops")).tenant.admin
    asyncio.run(keys.change("shop", {"admin": True}))
    asyncio.run(keys.change("ops", {"admin": False}))
    with_flag = Keys.of(ServeConfig(keys_file=path, admin_key=("boss",)))
    asyncio.run(with_flag.change("shop", {"admin": False}))


def test_a_bad_file_keeps_the_old_state_at_a_reload(tmp_path: Path) -> None:
    path = write(tmp_path, tenants())
    keys = Keys.of(ServeConfig(keys_file=path))
    write(tmp_path, "tenants: 5")
    with pytest.raises(ConfigError):
        asyncio.run(keys.reload())
    assert keys.tenant_of(request("one")).name == "shop"
    write(tmp_path, tenants(keys=[{"sha256": digest("two")}]))
    assert asyncio.run(keys.reload()) == "1 tenants with 1 keys"
    assert keys.tenant_of(request("two")).name == "shop"
    with pytest.raises(InvalidKey):
        keys.sender_of(request("one"))


def test_the_command_prints_a_line_for_the_file(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    made = CliRunner().invoke(app, ["keys", "--id", "first", "--expires", "2030-01-31"])
    key = made.stderr.split()[-1]
    (line,) = yaml.safe_load(made.stdout)
    assert line["sha256"] == digest(key)
    config = ServeConfig(keys_file=write(tmp_path, f"tenants:\n  a:\n    keys:\n    {made.stdout}"))
    assert Keys.of(config).table.keys[digest(key)].id == "first"  # type: ignore[union-attr]
    given = CliRunner().invoke(app, ["keys", "--stdin"], input="mine\n")
    assert given.stdout == f"- {{sha256: {digest('mine')}}}\n"
    assert CliRunner().invoke(app, ["keys", "--stdin"], input="two words\n").exit_code == 2
