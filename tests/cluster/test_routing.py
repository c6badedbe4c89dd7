"""Where requests of a fleet go, without Ray."""

from __future__ import annotations

from windlass.cluster.routing import Call, FleetRouting
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.serve.routing import MAX_IMBALANCE

BLOCK = 16


def call(name: str, prompt: list[int], **fields: str) -> Call:
    return Call(NewRequest(name, prompt, SamplingParams(max_tokens=8)), **fields)  # type: ignore[arg-type]


def routing(*ids: str) -> FleetRouting:
    made = FleetRouting()
    made.configure(BLOCK, 1000)
    made.set_replicas(ids)
    return made


def prompt(first: int, length: int = 200) -> list[int]:
    return list(range(first, first + length))


def test_turns_of_a_conversation_stay_on_one_replica() -> None:
    made = routing("a", "b", "c")
    homes = {}
    for turn in range(4):
        for user in range(6):
            text = prompt(1000 * user, 200 + 64 * turn)
            name = f"{user}-{turn}"
            chosen = made.choose(call(name, text), ["a", "b", "c"])[0]
            assert homes.setdefault(user, chosen) == chosen
            made.ended(name, 8)
    assert sorted(homes.values()) == ["a", "a", "b", "b", "c", "c"]


def test_the_imbalance_for_a_cached_prefix_is_bounded() -> None:
    made = routing("a", "b")
    long = prompt(0, 4 * MAX_IMBALANCE)
    home = made.choose(call("first", long), ["a", "b"])[0]
    # All share the prefix, but its replica must not fall ever further behind.
    chosen = [made.choose(call(str(i), long), ["a", "b"])[0] for i in range(8)]
    assert set(chosen) == {"a", "b"}
    assert chosen[0] != home


def test_a_full_replica_is_passed_over() -> None:
    made = routing("a", "b")
    first = call("x", prompt(0))
    order = made.choose(first, ["a", "b"])
    made.routed(first.request, order[1])
    assert made.replica_of("x") == order[1]
    # The same prompt goes where it was really computed.
    made.ended("x", 8)
    assert made.choose(call("y", prompt(0)), ["a", "b"])[0] in order


def test_a_retry_avoids_the_replica_that_lost_it() -> None:
    made = routing("a", "b")
    home = made.choose(call("x", prompt(0)), ["a", "b"])[0]
    made.ended("x")
    assert home not in made.choose(call("x", prompt(0), avoid=home), ["a", "b"])
    # It may be the only one.
    assert made.choose(call("x", prompt(0), avoid="a"), ["a"]) == ["a"]


def test_a_replica_whose_engine_restarts_gets_nothing_while_others_are_up() -> None:
    made = routing("a", "b")
    made.observe("a", 0.0, is_up=False)
    assert {made.choose(call(str(i), prompt(i)), ["a", "b"])[0] for i in range(6)} == {"b"}
    made.observe("a", 0.0, is_up=True)
    assert made.choose(call("last", prompt(0)), ["a", "b"])[0] == "a"


def test_requests_of_other_ingresses_count() -> None:
    made = routing("a", "b")
    made.observe("a", 5000.0, is_up=True)
    assert {made.choose(call(str(i), prompt(i * 500)), ["a", "b"])[0] for i in range(4)} == {"b"}


def test_replicas_come_and_go_while_requests_run() -> None:
    made = routing("a", "b")
    home = made.choose(call("x", prompt(0)), ["a", "b"])[0]
    made.set_replicas(["c"])
    assert made.choose(call("y", prompt(0)), ["c"]) == ["c"]
    made.prompt_computed("x")
    made.ended("x", 8)  # of the replica that is gone
    made.set_replicas(["c", home])
    assert made.choose(call("z", prompt(0)), ["c", home])[0] == "c"  # it came back empty


def test_a_router_without_its_state_goes_on() -> None:
    """A new one knows no prefix and no request: it balances by what replicas report."""
    made = FleetRouting()
    made.set_replicas(["a", "b"])
    assert made.choose(call("early", prompt(0)), ["a", "b"])  # before any replica has reported
    made.configure(BLOCK, 1000)
    made.ended("early")
    made.observe("a", 900.0, is_up=True)
    assert made.choose(call("x", prompt(0)), ["a", "b"])[0] == "b"
    made.ended("x", 8)
    assert made.choose(call("y", prompt(0)), ["a", "b"])[0] == "b"
