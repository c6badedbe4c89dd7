"""Runs the commands of records again, so that tables of several records are of one commit.

    python benchmarks/scripts/rerun.py h200-llama-3.1-8b h200-llama-3.1-8b-fp8 --output new
    python benchmarks/scripts/rerun.py 'h200-*' --list

Each record has the command that made it. New records go to --output under the same names. A command that
fails is named at the end, and the others still run. Only commands of `windlass` are run.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from windlass.tools.common.record import read_record

RECORDS = Path(__file__).parent.parent
_OUTPUT_FLAGS = ("-o", "--output")


def command_of(record: Path, output: Path) -> list[str] | None:
    """The command of a record, writing to `output`; None: it is not one command of `windlass`."""
    text = read_record(record).command
    words = shlex.split(text)
    if not words or words[0] != "windlass" or ";" in text:
        return None
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if word not in _OUTPUT_FLAGS and before not in _OUTPUT_FLAGS:
            kept.append(word)
    return [sys.executable, "-m", "windlass.cli", *kept[1:], "-o", str(output)]


def rerun(records: Sequence[Path], folder: Path, timeout_s: float | None) -> list[str]:
    """Run the commands one after the other; returns what failed, and why."""
    failed = []
    for record in records:
        command = command_of(record, folder / record.name)
        if command is None:
            failed.append(f"{record.stem}: not made by one command of windlass")
            continue
        print(f"{record.stem}: {shlex.join(command[3:])}", flush=True)
        began = time.monotonic()
        try:
            code = subprocess.run(command, timeout=timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:
            failed.append(f"{record.stem}: not done after {timeout_s:g} s")
            continue
        print(f"{record.stem}: {time.monotonic() - began:.0f} s", flush=True)
        if code:
            failed.append(f"{record.stem}: exit {code}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="+", help="names or patterns of records")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--output", type=Path, default=Path("rerun"), help="folder of new records")
    parser.add_argument("--timeout", type=float, help="seconds for each command")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    args = parser.parse_args()
    records = []
    for name in args.names:
        found = sorted(args.records.glob(f"{name.removesuffix('.json')}.json"))
        if not found:
            parser.error(f"no record {name} in {args.records}")
        records += [each for each in found if each not in records]
    if args.list:
        for record in records:
            command = command_of(record, args.output / record.name)
            print(f"{record.stem}: {'-' if command is None else shlex.join(command[3:])}")
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    failed = rerun(records, args.output, args.timeout)
    for each in failed:
        print(f"failed: {each}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
