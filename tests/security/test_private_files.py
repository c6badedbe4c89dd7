"""What other users of the machine could read, write or connect to."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.security.processes import server_process
from tests.serve.fakes import CARD
from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.folders import triton_cache_dir
from windlass.kernels import triton
from windlass.serve.batch.store import Store
from windlass.serve.listener import bind
from windlass.serve.live_config import LiveConfig
from windlass.serve.record import make_recorder

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_sockets_are_private_and_only_the_stated_port_listens(tmp_path: Path) -> None:
    own = tmp_path / "server.sock"
    with server_process(tmp_path, http_workers=2, uds=str(own)) as server:
        main = psutil.Process(server.process.pid)
        processes = [main, *main.children(recursive=True)]
        assert len(processes) >= 4
        paths, listening = set(), set()
        for process in processes:
            for each in process.net_connections("unix"):
                if each.laddr and each.laddr.startswith("/"):
                    paths.add(Path(each.laddr))
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    listening.add(each.laddr)
        assert listening == set()
        assert mode_of(own) == 0o600
        others = paths - {own}
        assert len(others) >= 2, "the engine's and the HTTP workers'"
        for path in others:
            assert mode_of(path.parent) == 0o700, path
            assert path.parent.stat().st_uid == os.geteuid()
            assert all(mode_of(each) & 0o022 == 0 for each in path.parent.glob("*.journal"))


@pytest.mark.parametrize(("given", "mode"), [("600", 0o600), ("660", 0o660)])
def test_the_mode_of_a_unix_socket_does_not_depend_on_the_umask(
    tmp_path: Path, given: str, mode: int
) -> None:
    before = os.umask(0)
    try:
        with bind(ServeConfig(uds=str(tmp_path / "s"), uds_mode=given)):
            assert mode_of(tmp_path / "s") == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", ["0x1", "rw", "999", "6000", ""])
def test_a_bad_mode_is_an_error(mode: str) -> None:
    with pytest.raises(ConfigError, match="--uds-mode is octal"):
        ServeConfig(uds_mode=mode)


def test_traffic_is_not_recorded_into_a_file_that_others_can_read(tmp_path: Path) -> None:
    planted = tmp_path / "traffic.jsonl"
    planted.touch()
    planted.chmod(0o666)
    config = LiveConfig(ServeConfig(record_traffic=str(planted)))
    with pytest.raises(ConfigError, match="chmod 600"):
        make_recorder(config, CARD.tokenizer)
    planted.unlink()
    os.mkfifo(planted, 0o600)
    with pytest.raises(ConfigError, match="record-traffic"):
        make_recorder(config, CARD.tokenizer)


@as_root
def test_files_of_other_users_are_refused(tmp_path: Path) -> None:
    planted = tmp_path / "traffic.jsonl"
    planted.touch(mode=0o600)
    os.chown(planted, 12345, -1)
    with pytest.raises(ConfigError, match="owner 12345"):
        make_recorder(LiveConfig(ServeConfig(record_traffic=str(planted))), CARD.tokenizer)
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        Store(folder)


def test_tritons_cache_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    assert triton_cache_dir() == cache
    triton.check_cache()
    assert mode_of(cache) == 0o700
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match=r"mode 0777.*TRITON_CACHE_DIR"):
        triton.check_cache()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert triton_cache_dir() == tmp_path / ".triton" / "cache"


_RANKS = """
import sys, threading, psutil
from windlass.config import ParallelConfig
from windlass.parallel.groups import connect
from windlass.parallel.place import Place, StoreFile

parallel = ParallelConfig(tensor_parallel_size=2, distributed_backend="gloo")
meshes = []
def run(rank):
    meshes.append(connect(Place(rank, parallel, StoreFile(sys.argv[1]))))
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for each in psutil.Process().net_connections("inet"):
    if each.status == psutil.CONN_LISTEN:
        print(each.laddr.ip)
"""


def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path: Path) -> None:
    outside = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    if not outside:
        pytest.skip("this machine has no address but loopback")
    done = subprocess.run(
        [sys.executable, "-c", _RANKS, str(tmp_path / "store")],
        env={**os.environ, "GLOO_SOCKET_IFNAME": outside[0]},
        capture_output=True,
        text=True,
    )
    assert set(done.stdout.split()) == {"127.0.0.1"}, done.stderr
