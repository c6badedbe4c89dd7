"""A tiny model, a server of it, and requests whose right answers are known: for chaos.py and soak.py.

The model has two layers with random weights. On a CPU its greedy outputs do not depend on the batch, so
the output of a request alone is the oracle for the same request among others.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

ADMIN_KEY = "admin-of-the-fault-load"
MODEL = "tiny"
ADAPTER = "tiny-adapter"
_HIDDEN, _MLP, _LAYERS = 64, 128, 2
_START_S = 300.0
HANG_S = 240.0  # a request without an answer for so long counts as hung

# What became of a request. "refused": a status or an event of an error; "dropped": the connection ended.
Outcome = Literal["right", "wrong", "refused", "dropped", "hung"]

MALFORMED: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[" * 5000,
    b"\xff\xfe",
    b"null",
    b'{"prompt": 5}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"prompt": "x", "logit_bias": {"no number": 1}}',
    b'{"prompt": "x", "n": 100000}',
    b'{"prompt": ["x", 5]}',
    b'{"prompt": "x", "stop": [[]]}',
    b'{"prompt": "x", "model": "no such model"}',
    b'{"prompt": "x", "structured_outputs": {"regex": "("}}',
    b'{"prompt": "x", "max_tokens": 1e999}',
)
BOMBS: tuple[dict[str, Any], ...] = (
    {"json": {"type": "integer", "multipleOf": 99999937}},  # hours and gigabytes to compile
    {"regex": "(((a{1,99}){1,99}){1,99}){1,99}"},
    {"grammar": "start: " + "(" * 400 + '"a"' + ")" * 400},
)


# ---- the model -----------------------------------------------------------------------------------


def write_model(folder: Path) -> Path:
    """Write the model's config and a tokenizer with one token per byte; weights are made at load."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(alphabet) + 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "eos_token_id": len(alphabet),
    }
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = {"eos_token": "</s>", "chat_template": template}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of the model's query projections."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        for matrix, shape in (("A", (4, _HIDDEN)), ("B", (_HIDDEN, 4))):
            tensors[f"{name}{matrix}.weight"] = torch.randn(*shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    return folder


# ---- the server ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """Resident memory and open file descriptors of a process."""

    rss_bytes: int
    num_fds: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        status = Path(f"/proc/{pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(1024 * int(line.split()[1]), len(list(Path(f"/proc/{pid}/fd").iterdir())))


@dataclass(slots=True)
class Served:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    def _children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        found = [child for task in tasks for child in (task / "children").read_text().split()]
        return [int(child) for child in found]

    def engine_pid(self) -> int | None:
        """The child that computes; None while it is being started."""
        return next((pid for pid in self._children() if "libtorch" in _read(pid, "maps")), None)

    def worker_pids(self) -> list[int]:
        """The HTTP workers. Not the template processes: their memory is limited."""
        return [
            pid
            for pid in self._children()
            if "spawn_main" in _read(pid, "cmdline")
            and "libtorch" not in _read(pid, "maps")
            and "Max address space         unlimited" in _read(pid, "limits")
        ]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


@asynccontextmanager
async def serving(work: Path, *flags: str, log: Path) -> AsyncIterator[Served]:
    """Run a server of the tiny model with an adapter folder below `work`."""
    model = write_model(work / MODEL)
    write_adapter(work / "adapters" / ADAPTER)
    arguments = (
        f"--load-format dummy --device cpu --dtype float32 --port 0 --max-model-len 512 "
        f"--num-blocks 512 --max-num-seqs 16 --enable-lora --lora-root {work / 'adapters'} "
        f"--admin-key {ADMIN_KEY} --served-model-name {MODEL} --log-stats-interval 0"
    )
    command = [sys.executable, "-m", "windlass.cli", "serve", str(model), *arguments.split()]
    with log.open("w") as file:
        process = subprocess.Popen([*command, *flags], stdout=file, stderr=file, text=True)
    try:
        yield Served(process, await _wait_for_url(process, log))
    finally:
        process.terminate()
        process.wait(120)


async def _wait_for_url(process: subprocess.Popen[str], log: Path) -> str:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://"):
                return word.rstrip("/")
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the server did not start; see {log}")


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels, in the text of /metrics."""
    total = 0.0
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        matches = all(f'{key}="{label}"' in head for key, label in labels.items())
        if head.partition("{")[0] == f"windlass:{name}" and matches:
            total += float(value)
    return total


async def account(http: httpx.AsyncClient) -> dict[str, Any]:
    """The server's own account after the last request, and its KV blocks."""
    for _ in range(100):
        text = (await http.get("/metrics")).text
        if metric(text, "requests_in_flight") == 0:
            break
        await asyncio.sleep(0.2)
    outcomes = {
        name: int(metric(text, "request_outcomes_total", outcome=name))
        for name in ("success", "error", "aborted", "rejected")
    }
    return {
        "received": int(metric(text, "requests_received_total")),
        "ended": int(metric(text, "request_outcomes_total")),
        "in_flight": int(metric(text, "requests_in_flight")),
        "kv_blocks_used": int(metric(text, "kv_cache_blocks", state="used")),
        **outcomes,
    }


# ---- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """A request; streamed or not, it has the same answer."""

    path: str
    body: Mapping[str, Any]


def make_jobs(num_jobs: int, seed: int = 0) -> list[Job]:
    """Completions of several lengths, with shared prefixes, several choices, grammars and chats."""
    dice = random.Random(seed)
    prefixes = ["".join(dice.choices("abcdef ", k=40)) for _ in range(4)]
    jobs = []
    for number in range(num_jobs):
        text = dice.choice(prefixes) + "".join(dice.choices("ghijkl ", k=dice.randint(1, 60)))
        body: dict[str, Any] = {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": dice.randint(1, 24),
            "ignore_eos": True,
        }
        match number % 4:
            case 0:
                body["n"] = 2
            case 1:
                del body["ignore_eos"]
                body["structured_outputs"] = {"regex": f"[a-{dice.choice('cdefgh')}]{{30}}"}
        if number % 4 == 3:
            jobs.append(
                Job(
                    "/v1/chat/completions",
                    {**body, "messages": [{"role": "user", "content": text}]},
                )
            )
        else:
            jobs.append(Job("/v1/completions", {**body, "prompt": text}))
    return jobs


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:300]}")
        self.status = status


class Dropped(Exception):
    """The connection ended before the answer was complete."""


async def ask(http: httpx.AsyncClient, job: Job, stream: bool = False) -> list[str]:
    """The texts of all choices."""
    try:
        if stream:
            return await _read_stream(http, job)
        response = await http.post(job.path, json=job.body)
    except httpx.TimeoutException:
        raise
    except httpx.TransportError as error:
        raise Dropped(repr(error)) from error
    if response.status_code != 200:
        raise Refused(response.status_code, response.text)
    choices = sorted(response.json()["choices"], key=lambda each: int(each["index"]))
    return [each["text"] if "text" in each else each["message"]["content"] for each in choices]


async def _read_stream(http: httpx.AsyncClient, job: Job) -> list[str]:
    texts: dict[int, str] = {}
    async with http.stream("POST", job.path, json={**job.body, "stream": True}) as response:
        if response.status_code != 200:
            raise Refused(response.status_code, (await response.aread()).decode())
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return [texts[index] for index in sorted(texts)]
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise Refused(200, json.dumps(event["error"]))
            for choice in event["choices"]:
                delta = choice.get("text") or choice.get("delta", {}).get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + delta
    raise Dropped("the stream ended without [DONE]")


async def disconnect(http: httpx.AsyncClient, job: Job, dice: random.Random) -> None:
    """Send a long request and disconnect: before the answer, or after some events of the stream."""
    num_events = dice.randint(0, 6)
    body = {**job.body, "stream": dice.random() < 0.7, "max_tokens": 300}
    try:
        async with http.stream(
            "POST", job.path, json=body, timeout=dice.uniform(0.005, 0.5)
        ) as response:
            async for _ in response.aiter_lines():
                num_events -= 1
                if num_events < 0:
                    return
    except httpx.TransportError:
        pass


async def send_malformed(http: httpx.AsyncClient, body: bytes) -> int:
    """The status of a body that is not a valid request."""
    headers = {"Content-Type": "application/json"}
    return (await http.post("/v1/completions", content=body, headers=headers)).status_code


@dataclass(slots=True)
class Tally:
    """What became of the requests whose answers are known."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)  # the first few, for the log

    def add(self, outcome: Outcome, problem: str = "") -> None:
        self.outcomes[outcome] += 1
        if problem and len(self.problems) < 50:
            self.problems.append(f"{outcome}: {problem}")


class Oracle:
    """Owns the right answers."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self._answers: list[list[str]] = []

    async def learn(self, http: httpx.AsyncClient) -> None:
        """Send every request alone."""
        self._answers = [await ask(http, job) for job in self.jobs]
        distinct = {tuple(answer) for answer in self._answers}
        assert len(distinct) > len(self.jobs) // 2, "the model says the same to everything"

    async def check(self, http: httpx.AsyncClient, dice: random.Random, tally: Tally) -> Outcome:
        """Send a random request, compare its answer, and count it."""
        number = dice.randrange(len(self.jobs))
        outcome, problem = await self._send(http, number, dice.random() < 0.5)
        tally.add(outcome, problem)
        return outcome

    async def _send(
        self, http: httpx.AsyncClient, number: int, stream: bool
    ) -> tuple[Outcome, str]:
        try:
            answer = await asyncio.wait_for(ask(http, self.jobs[number], stream), HANG_S)
        except Refused as error:
            return "refused", str(error)
        except Dropped as error:
            return "dropped", str(error)
        except (httpx.TimeoutException, TimeoutError) as error:
            return "hung", repr(error)
        if answer != self._answers[number]:
            return "wrong", f"job {number}: {answer} instead of {self._answers[number]}"
        return "right", ""
