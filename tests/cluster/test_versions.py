"""What a changed fleet file does to a running fleet, and which version a request goes to."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from windlass.cluster.fleet import Fleet
from windlass.cluster.rollout import RolloutState, Target
from windlass.cluster.split import Outcomes, VersionedFront, goes_to_next
from windlass.cluster.versions import FleetState, ModelState, Version, first_state, next_state
from windlass.errors import ConfigError, RanTwice
from windlass.serve.metrics import Outcome
from windlass.serve.problems import problem_of
from windlass.serve.summary import RequestSummary


def fleet_of(*models: dict[str, Any], **fields: Any) -> Fleet:
    return Fleet.model_validate({"models": [*models], **fields})


def chat(**fields: Any) -> dict[str, Any]:
    return {"name": "chat", **fields}


def test_the_state_survives_as_json() -> None:
    """Serve's controller keeps it so."""
    state = first_state(fleet_of(chat(rollout={"canary": "10%"}, cpus=2)))
    model = state.models["chat"].begin(state.models["chat"].stable)
    state = state.with_model(
        "chat", model.model_copy(update={"rollout": RolloutState(phase="rolling", began=1.5)})
    )
    assert FleetState.model_validate(state.model_dump(mode="json")) == state


def test_only_changes_of_replicas_begin_an_update() -> None:
    state = first_state(fleet_of(chat(), {"name": "code"}))
    same = next_state(state, fleet_of(chat(), {"name": "code"}))
    assert same == state
    in_place = fleet_of(chat(replicas=3, autoscaling={"ttft_s": 2}), {"name": "code"})
    after = next_state(state, in_place)
    assert not after.is_updating
    assert after.models["chat"].stable.number == 1
    assert after.models["chat"].stable.model.replicas.max == 3
    for change in ({"options": {"max_num_seqs": 3}}, {"version": "2"}, {"cpus": 2}):
        after = next_state(state, fleet_of(chat(**change), {"name": "code"}))
        made = after.models["chat"].next
        assert made is not None
        assert made.deployment == "chat@2"
        assert after.models["code"].next is None
        assert after.ingress_key == state.ingress_key
    pool = fleet_of(chat(replicas={"min": 0, "max": 1}), warm_pool={"memory_gb": 1})
    assert next_state(state, pool).ingress_key == state.ingress_key
    other = next_state(state, fleet_of(chat(), serve={"max_num_queued_reqs": 3}))
    assert other.ingress_key != state.ingress_key
    assert set(other.models) == {"chat"}


def test_a_file_during_an_update() -> None:
    state = first_state(fleet_of(chat()))
    updating = next_state(state, fleet_of(chat(version="2")))
    assert next_state(updating, fleet_of(chat(version="2"))) == updating
    with pytest.raises(ConfigError, match="update to version 2 has not ended"):
        next_state(updating, fleet_of(chat(version="3")))
    back = next_state(updating, fleet_of(chat())).models["chat"]
    assert back.rollout is not None
    assert back.rollout.phase == "rollback"
    ended = back.end("rolled back", "x")
    assert ended.stable == state.models["chat"].stable
    again = next_state(
        FleetState(fleet=state.fleet, models={"chat": ended}), fleet_of(chat(cpus=2))
    )
    made = again.models["chat"].next
    assert made is not None
    assert made.deployment == "chat@3"  # names are not used again


def test_a_version_that_never_started_is_replaced_at_once() -> None:
    state = first_state(fleet_of(chat()))
    after = next_state(state, fleet_of(chat(version="2")), failed={"chat"}).models["chat"]
    assert (after.next, after.stable.number) == (None, 2)


def target(num_old: int, num_new: int, share: float, phase: Any) -> Target:
    return Target(num_old, num_new, share, phase=phase, reason="")


def test_the_last_replica_of_a_version_stops_after_its_share() -> None:
    model = next_state(first_state(fleet_of(chat())), fleet_of(chat(version="2"))).models["chat"]
    assert model.numbers() == {"chat@1": None}
    rollout = RolloutState()
    model = model.follow(target(1, 1, 0.0, "canary"), rollout, 1)
    assert model.numbers() == {"chat@1": None, "chat@2": 1}
    model = model.follow(target(1, 1, 0.5, "rolling"), rollout, 1)
    assert model.numbers() == {"chat@1": 1, "chat@2": 1}
    switched = model.follow(target(0, 1, 0.5, "rolling"), rollout, 1)
    assert (switched.numbers(), switched.share) == ({"chat@1": 1, "chat@2": 1}, 1.0)
    stopped = switched.follow(target(0, 1, 1.0, "rolling"), rollout, 1)
    assert (stopped.numbers(), stopped.share) == ({"chat@2": 1}, 1.0)
    back = model.follow(target(1, 0, 0.0, "rollback"), rollout, 1)
    assert (back.numbers(), back.share) == ({"chat@1": 1, "chat@2": 1}, 0.0)
    assert back.follow(target(1, 0, 0.0, "rollback"), rollout, 1).numbers() == {"chat@1": 1}


def body(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


def test_a_conversation_stays_with_one_version() -> None:
    first = {"role": "user", "content": "Hello"}
    one = body(messages=[{"role": "system", "content": "a"}, first])
    two = body(messages=[first, {"role": "assistant", "content": "b"}, {"role": "user"}])
    assert {goes_to_next(each, 2, 0.5) for each in (one, two)} in ({True}, {False})
    users = [body(user=f"user {number}", prompt="x") for number in range(2000)]
    share = sum(goes_to_next(each, 2, 0.1) for each in users) / len(users)
    assert 0.08 < share < 0.12
    assert not any(goes_to_next(each, 2, 0.0) for each in [*users, b"{", b"[1]", body(messages=1)])
    assert all(goes_to_next(each, 2, 1.0) for each in [*users, b"{"])


def ended(outcome: Outcome, status: int = 200) -> RequestSummary:
    summary = RequestSummary(path="/v1/completions", began=1.0)
    summary.outcome, summary.status, summary.ended = outcome, status, 3.0
    return summary


def test_outcomes() -> None:
    outcomes = Outcomes()
    for each in (
        ended("success"),
        ended("error", 503),
        ended("rejected", 400),
        ended("rejected", 429),  # the load
        ended("aborted", 499),  # the client
    ):
        outcomes.add(each)
    assert outcomes.samples().num_requests == 3
    assert outcomes.samples().num_errors == 2
    assert outcomes.samples().latencies_s == (2.0,)
    for _ in range(3000):
        outcomes.add(ended("success"))
    assert len(outcomes.samples().latencies_s) == 1000
    assert (outcomes.samples() + outcomes.samples()).num_requests == 6006


class FakeFront:
    """Answers with a status; the new version fails."""

    def __init__(self, version: Version, status: int, headers: Any = ()) -> None:
        self.version, self.status, self.headers = version, status, headers
        self.on_end: Any = None
        self.max_body_bytes = 1000
        self.names = {"chat"}
        self.bodies: list[bytes] = []
        self.is_closed = False

    def start(self) -> None: ...

    def knows(self, response_id: str) -> bool:
        return bool(response_id)

    async def score(self, prompt: str, answer: str) -> float:
        raise NotImplementedError(prompt, answer)

    async def close_when_idle(self) -> None:
        self.is_closed = True

    async def app(self) -> Any:
        async def answer(_scope: Any, receive: Any, send: Any) -> None:
            self.bodies.append((await receive())["body"])
            start = {"type": "http.response.start", "status": self.status, "headers": self.headers}
            await send(start)
            await send({"type": "http.response.body", "body": b"%d" % self.version.number})

        return answer


@pytest.mark.parametrize(("status", "answered_by"), [(200, 2), (503, 1), (400, 1)])
def test_the_old_version_answers_what_the_new_one_does_not(status: int, answered_by: int) -> None:
    asyncio.run(answer_once(status, [], answered_by))


def test_a_request_that_has_run_twice_is_not_sent_to_the_old_version() -> None:
    problem = problem_of(RanTwice("It has run twice."))
    headers = problem.response("/v1/completions").raw_headers
    asyncio.run(answer_once(problem.status, headers, answered_by=2))


async def answer_once(status: int, headers: list[tuple[bytes, bytes]], answered_by: int) -> None:
    fronts: dict[int, FakeFront] = {}

    def make(version: Version) -> FakeFront:
        is_old = version.number == 1
        front = FakeFront(version, 200) if is_old else FakeFront(version, status, headers)
        return fronts.setdefault(version.number, front)

    state = next_state(first_state(fleet_of(chat())), fleet_of(chat(version="2"))).models["chat"]
    front = VersionedFront(make)
    front.follow(state)
    assert set(fronts) == {1}  # no replica of the new version has been asked for
    front.follow(state.model_copy(update={"num_next": 1, "share": 1.0}))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    await (await front.app())({"method": "POST", "path": "/v1/completions"}, receive, send)
    assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == (status if answered_by == 2 else 200)
    assert sent[1]["body"] == b"%d" % answered_by
    assert fronts[2].bodies == [b"{}"]
    front.follow(ModelState(stable=fronts[2].version))
    await front.close()
    assert fronts[1].is_closed


def test_samples_begin_with_the_update() -> None:
    state = first_state(fleet_of(chat())).models["chat"]
    front = VersionedFront(lambda version: FakeFront(version, 200))
    front.follow(state)
    found: Any = front.front_of(1)
    found.on_end(ended("error", 500))
    assert front.samples()[1].num_errors == 1
    updating = next_state(first_state(fleet_of(chat())), fleet_of(chat(version="2")))
    front.follow(updating.models["chat"])
    assert front.samples()[1].num_errors == 0
