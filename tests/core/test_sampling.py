"""SamplingParams: what people pass is accepted, what cannot mean anything is refused by name."""

import pytest

from windlass.core.sampling import SamplingParams
from windlass.errors import RequestError


def test_lists_strings_and_none_are_normalised() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1, 2], bad_words=None, logit_bias={"5": 1})
    assert params.stop == ("x",)
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ()
    assert params.logit_bias == {5: 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("n", 0),
        ("n", 1000),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop", 5),
        ("bad_words", [""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("allowed_token_ids", []),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: 101}),
        ("logit_bias", [1]),
    ],
)
def test_invalid_values_are_rejected_with_the_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="larger than max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_children_have_their_own_seeds() -> None:
    params = SamplingParams(n=3, seed=7)
    assert [params.child(i).seed for i in range(3)] == [7, 8, 9]
    assert params.child(1).n == 1
    assert SamplingParams(n=2).child(1).seed is None


def test_children_are_not_validated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long logit_bias would be read n times."""
    params = SamplingParams(n=3, logit_bias={5: 1.0}, stop=["a"])
    expected = SamplingParams(n=1, logit_bias={5: 1.0}, stop=["a"])

    def refuse(_params: SamplingParams) -> None:
        raise AssertionError("validated again")

    monkeypatch.setattr(SamplingParams, "__post_init__", refuse)
    assert [params.child(i) for i in range(3)] == [expected] * 3
    assert params.n == 3


def test_seeds_of_children_stay_within_64_bits() -> None:
    seeds = [SamplingParams(n=3, seed=2**63 - 2).child(i).seed for i in range(3)]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
