"""The prompts of token_digests.py: code, prose, repetition, other scripts, short and long ones."""

from __future__ import annotations

_CODE = (
    "def median(values: list[float]) -> float:\n"
    '    """The middle value, or the mean of the two middle values."""\n'
    "    ordered = sorted(values)\n"
    "    half = len(ordered) // 2\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
    "SELECT name, COUNT(*) FROM orders WHERE placed > '2024-01-01' GROUP BY",
    '{"name": "Ada", "age": 36, "tags": ["maths", "engines"], "address": {"city":',
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
)
_PROSE = (
    "The harbour was quiet in the morning. Two boats lay at the pier, and a gull walked along the rail,",
    "A windlass lifts a heavy load with a light lever, because",
    "Dear Ms Lindqvist,\n\nThank you for your letter of the third of May. We have looked into the delay, and",
    "Question: Why does the moon have phases?\nAnswer:",
    "Recipe for a simple bread\n\nIngredients:\n- 500 g flour\n- 320 g water\n- 10 g salt\n-",
    "In the year 1851 the first great exhibition opened in London. Visitors came from",
)
_REPETITION = (
    "no no no no no no no no no no no no no no no no no no no no",
    "one two three one two three one two three one two three one two",
    "- - - - - - - - - - - - - - - - - - - - - - - - - - - - - -",
    "Repeat this line: The gate is red and the door is blue.\n"
    "The gate is red and the door is blue.\nThe gate is red and the door is",
    "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
)
_UNICODE = (
    "Übersetze ins Englische: Die Brücke über den Fluß ist größer als die alte Mühle. 🙂",
    "東京は日本の首都です。人口は",
)
_SHORT = ("Hi",)
_LONG = (
    "Minutes of the meeting.\n\n"
    + "\n".join(
        f"Item {number}: the {thing} was {state}; {name} will report on it in week {number + 7}."
        for number, (thing, state, name) in enumerate(
            zip(
                ("budget", "roof", "lift", "garden", "fence", "boiler", "archive", "kitchen") * 3,
                ("approved", "repaired", "inspected", "postponed", "painted", "replaced") * 4,
                ("Anna", "Omar", "Li", "Petra") * 6,
                strict=True,
            ),
            start=1,
        )
    )
    + "\n\nSummary: the meeting",
)

# In an order that puts different kinds into one batch.
PROMPTS: tuple[str, ...] = tuple(
    prompt
    for group in zip((*_LONG, *_PROSE, *_SHORT, *_UNICODE), (*_CODE, *_REPETITION), strict=True)
    for prompt in group
)
