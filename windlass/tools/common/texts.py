"""Generates prose and code of a given number of tokens from a small vocabulary, without a download.

Tokens per word are measured by tokenizing two samples of different length. The difference cancels
what a chat template adds, so the same tokenizer always gives the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal["prose", "code"]
KINDS: tuple[Kind, ...] = ("prose", "code")

# Common words, which most tokenizers encode as one token.
_COMMON = """
time year people way day man thing world life hand part place case week company system program
question work government number night point home water room mother area money novel fact month
lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information
school face door reason history party result change morning research girl guy moment air teacher
force education foot boy age policy music market sense nation plan college interest death course
someone experience behind reach local six seven light voice field later drug former soon action
price table land form river garden window letter engine bridge island winter summer stone paper
small large early young important few public bad same able old new good high long little own other
great different open strong free clear simple real whole certain late hard low white black red green
makes takes finds gives tells works calls needs feels becomes leaves puts means keeps begins helps
shows hears plays runs moves lives believes brings happens writes sits stands loses pays meets
includes continues learns leads understands watches follows stops creates speaks reads spends grows
the of and to in that it for on with as at this but from they we say her she or will my one all
would there their what so up out if about who get which go when can like no just him know take into
your some could them see than then now look only come its over think also back after use two how
"""
_NOUNS = """total count value index limit buffer items result offset length width height score price
order user table field key node state token cache queue batch block page line file path name"""
_VERBS = ("load", "store", "parse", "build", "merge", "split", "check", "count", "find", "update")
_WORDS, _NAMES = _COMMON.split(), _NOUNS.split()
LABELS = ("sport", "politics", "business", "science", "weather", "music")

_SAMPLE_WORDS = (64, 1064)


@dataclass(frozen=True, slots=True)
class Scale:
    """Tokens per whitespace-separated word of each kind of text."""

    prose: float = 1.1
    code: float = 2.4


def samples(kind: Kind) -> tuple[str, str]:
    """A short and a long text to tokenize."""
    make = _prose if kind == "prose" else _code
    short, long = (make(Random("sample"), num_words) for num_words in _SAMPLE_WORDS)
    return short, long


def scale_of(counts: Mapping[Kind, tuple[int, int]]) -> Scale:
    """Compute the scale from the token counts of the two samples of each kind."""
    ratios = {}
    for kind, (low, high) in counts.items():
        short, long = (len(text.split()) for text in samples(kind))
        # Rounded to six digits, so that the last bit of a division does not change the texts.
        ratios[kind] = round(max(0.1, (high - low) / (long - short)), 6)
    return Scale(**ratios)


def measure_scale(count: Callable[[str], int]) -> Scale:
    """Measure the scale with a local tokenizer; `count` returns the tokens of a text."""
    counts: dict[Kind, tuple[int, int]] = {}
    for kind in KINDS:
        short, long = samples(kind)
        counts[kind] = count(short), count(long)
    return scale_of(counts)


class Writer:
    """Writes texts of about a given number of tokens. The same `random` gives the same text."""

    def __init__(self, scale: Scale = Scale()) -> None:  # noqa: B008 - frozen
        self._scale = scale

    def prose(self, random: Random, num_tokens: int) -> str:
        return _prose(random, max(1, round(num_tokens / self._scale.prose)))

    def code(self, random: Random, num_tokens: int) -> str:
        return _code(random, max(1, round(num_tokens / self._scale.code)))

    def num_tokens(self, text: str) -> int:
        """Estimate the tokens of a text of prose."""
        return max(1, round(len(text.split()) * self._scale.prose))


def _prose(random: Random, num_words: int) -> str:
    """Sentences of 6 to 14 words in paragraphs of five sentences."""
    sentences: list[str] = []
    left = num_words
    while left > 0:
        words = random.choices(_WORDS, k=min(left, random.randint(6, 14)))
        left -= len(words)
        end = ".\n\n" if len(sentences) % 5 == 4 else "."
        sentences.append(" ".join(words).capitalize() + end)
    return " ".join(sentences).replace("\n\n ", "\n\n").strip()


def _code(random: Random, num_words: int) -> str:
    """Small Python functions, cut after the line with the last word."""
    lines: list[str] = []
    left = num_words
    while left > 0:
        for line in _function(random):
            lines.append(line)
            left -= len(line.split())
            if left <= 0:
                break
    return "\n".join(lines)


def _function(random: Random) -> list[str]:
    verb, noun = random.choice(_VERBS), random.choice(_NAMES)
    one, two, three = random.sample(_NAMES, 3)
    number = random.randint(1, 9)
    return [
        f"def {verb}_{noun}({one}, {two}):",
        f"    {three} = {number}",
        f"    for {noun} in {one}:",
        f"        if {noun} > {two}:",
        f"            {three} += {noun} * {number}",
        "        else:",
        f"            {three} -= {two}",
        f"    return {three}",
        "",
    ]


def random_identifier(random: Random) -> str:
    """A variable name that the generated code uses."""
    return random.choice(_NAMES)
