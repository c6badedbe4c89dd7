"""Text that needs no download: prose and code from a small vocabulary, of a wanted number of tokens.

How many tokens a word has is the tokenizer's affair. It is found by counting two samples, so that
whoever counts, and whatever a chat template adds, the same tokenizer gives the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal["prose", "code"]
KINDS: tuple[Kind, ...] = ("prose", "code")

# Common words, which most tokenizers know whole.
_COMMON = """
time year people way day man thing world life hand part place case week company system program
question work government number night point home water room mother area money story fact month
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
    """Tokens per word of each kind of text; code's words are what spaces and line ends divide."""

    prose: float = 1.1
    code: float = 2.4


def samples(kind: Kind) -> tuple[str, str]:
    """A short and a long text, whose tokens are to be counted."""
    make = _prose if kind == "prose" else _code
    short, long = (make(Random("sample"), num_words) for num_words in _SAMPLE_WORDS)
    return short, long


def scale_of(counts: Mapping[Kind, tuple[int, int]]) -> Scale:
    """From the tokens of the two samples of each kind; what both have beside text cancels out."""
    ratios = {}
    for kind, (low, high) in counts.items():
        short, long = (len(text.split()) for text in samples(kind))
        # Six digits: a tokenizer's own ratio, and not the last bit of a division.
        ratios[kind] = round(max(0.1, (high - low) / (long - short)), 6)
    return Scale(**ratios)


def measure_scale(count: Callable[[str], int]) -> Scale:
    """With a tokenizer at hand."""
    return scale_of({kind: _both(count, samples(kind)) for kind in KINDS})


def _both(count: Callable[[str], int], pair: tuple[str, str]) -> tuple[int, int]:
    return count(pair[0]), count(pair[1])


class Writer:
    """Writes texts of about so many tokens. The same `random` gives the same text."""

    def __init__(self, scale: Scale = Scale()) -> None:  # noqa: B008 - frozen
        self._scale = scale

    def prose(self, random: Random, num_tokens: int) -> str:
        return _prose(random, max(1, round(num_tokens / self._scale.prose)))

    def code(self, random: Random, num_tokens: int) -> str:
        return _code(random, max(1, round(num_tokens / self._scale.code)))

    def num_tokens(self, text: str) -> int:
        """About how many a text of prose has."""
        return max(1, round(len(text.split()) * self._scale.prose))


def _prose(random: Random, num_words: int) -> str:
    """Sentences of six to fourteen words; a paragraph has five."""
    pieces: list[str] = []
    left, sentence = num_words, 0
    while left > 0:
        words = random.choices(_WORDS, k=min(left, random.randint(6, 14)))
        left -= len(words)
        sentence += 1
        pieces.append(" ".join(words).capitalize() + ("." if sentence % 5 else ".\n\n"))
    return " ".join(pieces).replace("\n\n ", "\n\n").strip()


def _code(random: Random, num_words: int) -> str:
    """Small functions of Python, cut after the line that holds the last word."""
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


def a_name(random: Random) -> str:
    """One of the words that code calls things by."""
    return random.choice(_NAMES)
