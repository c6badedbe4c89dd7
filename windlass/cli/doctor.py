"""`windlass doctor`: what the machine has, what Windlass will use, what is missing, and known problems."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.command import reported
from windlass.cli.flags import switch

if TYPE_CHECKING:
    from windlass.cli.report import Row
    from windlass.core.card import Choice
    from windlass.tools.doctor.findings import Findings, Folder
    from windlass.tools.doctor.problems import Problem

_LEVELS = {"stops": "stops", "slower": "slower", "risk": "may fail"}


def doctor(
    ctx: typer.Context, as_json: Annotated[bool, switch("Print JSON.", "--json")] = False
) -> None:
    """Show what this machine has, what Windlass will use, what is missing, and known problems.

    The output has no secrets, user names or host names: paste it into a bug report. The exit code is 1 if
    a problem keeps Windlass from running.
    """
    with reported(ctx):
        from windlass.tools.doctor.choices import choose
        from windlass.tools.doctor.findings import examine
        from windlass.tools.doctor.problems import find_problems

        found = examine()
        choices, problems = choose(found), find_problems(found)
        if as_json:
            typer.echo(json.dumps(as_object(found, choices, problems), indent=2))
        else:
            _print(found, choices, problems)
    raise typer.Exit(1 if any(problem.level == "stops" for problem in problems) else 0)


def as_object(found: Findings, choices: list[Choice], problems: list[Problem]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "runs": all(problem.level != "stops" for problem in problems),
        "problems": [asdict(problem) for problem in problems],
        "choices": [asdict(choice) for choice in choices],
        "missing_extras": {
            extra.name: _install(extra.name) for extra in found.packages.extras if extra.missing
        },
        "machine": asdict(found),
    }


def _print(found: Findings, choices: list[Choice], problems: list[Problem]) -> None:
    from windlass.cli.report import make_console, make_table

    console = make_console()
    machine = make_table("This machine has", "Value", "Details")
    for section in (_system_rows(found), _cpu_rows(found), _gpu_rows(found), _disk_rows(found)):
        for row in section:
            machine.add_row(*row)
        machine.add_section()
    console.print(machine)
    chosen = make_table("Windlass will use", "Value", "Why")
    for choice in choices:
        chosen.add_row(choice.what, choice.value, choice.reason)
    console.print(chosen)
    missing = [extra for extra in found.packages.extras if extra.missing]
    if missing:
        extras = make_table("Missing (optional)", "For", "Command")
        for extra in missing:
            extras.add_row(extra.name, _USES.get(extra.name, ""), _install(extra.name))
        console.print(extras)
    if not problems:
        console.print("No known problem applies.")
        return
    table = make_table("Problem", "Effect", "What", "Fix")
    for problem in problems:
        table.add_row(problem.name, _LEVELS[problem.level], problem.what, problem.fix)
    console.print(table)


_USES = {
    "cuda": "Triton kernels on GPUs",
    "eval": "lm-eval tasks, text in Parquet files",
    "cluster": "windlass cluster",
    "otel": "--otlp-traces-endpoint",
    "report": "pages of windlass bench serve",
    "tune": "windlass tune",
    "transformers": "architectures that Windlass does not have",
}


def _install(extra: str) -> str:
    from windlass.tools.doctor.findings import DISTRIBUTION

    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _system_rows(found: Findings) -> list[Row]:
    system = found.system
    where = "in a container" if system.is_container else "not in a container"
    torch = found.torch
    build = f"CUDA {torch.cuda}" if torch.cuda else "built for CPUs"
    return [
        ("system", f"{system.os} {system.release}", f"{system.machine}, {system.libc}, {where}"),
        ("Windlass", system.windlass, f"Python {system.python}"),
        ("torch", torch.version or "not usable", torch.error or build),
        ("Triton", found.packages.triton or "none", ""),
    ]


def _cpu_rows(found: Findings) -> list[Row]:
    from windlass.cli.report import counted, readable_bytes

    cpu, memory, native = found.cpu, found.memory, found.native
    topology = cpu.topology
    cores = (
        f"{counted(topology.num_machine_cores, 'core')}, {topology.num_machine_cpus} logical CPUs"
    )
    quota = "no CPU quota" if topology.quota is None else f"quota {topology.quota:g}"
    by_node = ", ".join(f"{len(cores)} on node {node}" for node, cores in topology.nodes.items())
    where = f" ({by_node})" if topology.num_machine_nodes > 1 else ""
    allowed = f"{counted(len(topology.cores), 'core')} allowed{where}, {quota}"
    nodes = counted(topology.num_machine_nodes, "NUMA node")
    limit = "no cgroup limit" if memory.limit is None else f"limit {readable_bytes(memory.limit)}"
    swap = f"swap {readable_bytes(memory.swap_free)} of {readable_bytes(memory.swap_total)} free"
    pages = f"transparent huge pages {cpu.huge_pages or 'unknown'}"
    governor = f", governor {cpu.governor}" if cpu.governor else ""
    hard = "unlimited" if memory.open_files_hard is None else f"{memory.open_files_hard:,}"
    soft = "unlimited" if memory.open_files_soft is None else f"{memory.open_files_soft:,}"
    shm = "none" if memory.shm is None else readable_bytes(memory.shm)
    return [
        ("CPU", cpu.model, " ".join(cpu.instructions)),
        ("cores", cores, f"{nodes}, {allowed}{governor}"),
        ("C++ compiler", native.compiler or "none", native.compiler_problem or ""),
        ("memory", readable_bytes(memory.total), f"{readable_bytes(memory.free)} free, {limit}"),
        ("swap", readable_bytes(memory.swap_total), f"{swap}; {pages}"),
        ("/dev/shm", shm, ""),
        ("open files", soft, f"at most {hard}"),
    ]


def _gpu_rows(found: Findings) -> list[Row]:
    from windlass.cli.report import readable_bytes

    driver = found.driver
    gpus = found.torch.gpus or driver.gpus
    if not gpus and driver.cuda is None:
        return [("GPU", "none", driver.error or "no NVIDIA driver")]
    cuda = "" if driver.cuda is None else f"CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    rows: list[Row] = [("GPU driver", driver.version or "found", cuda)]
    for index, gpu in enumerate(gpus):
        capability = (
            "" if gpu.capability is None else "compute capability {}.{}, ".format(*gpu.capability)
        )
        rows.append((f"GPU {index}", gpu.name, f"{capability}{readable_bytes(gpu.memory_bytes)}"))
    return rows


def _disk_rows(found: Findings) -> list[Row]:
    return [_folder_row(folder) for folder in found.folders]


def _folder_row(folder: Folder) -> Row:
    from windlass.cli.report import readable_bytes

    free = (
        "" if folder.free_bytes is None else f"{readable_bytes(folder.free_bytes)} free on its disk"
    )
    if not folder.exists:
        return f"{folder.name} cache", "none yet", f"{folder.path}, {free}"
    size = f"{'at least ' if folder.is_partial else ''}{readable_bytes(folder.num_bytes)}"
    owner = "" if folder.owner is None else f"owned by {folder.owner}, "
    return f"{folder.name} cache", size, f"{folder.path}, {owner}{free}"
