"""Texts and prompts that ship with the program: for rough perplexities and for bench levers speculation."""

from __future__ import annotations

TEXTS = (
    "The ferry left the island at six, while the lamps along the quay were still lit. Seven people "
    "were on board, and a dog that belonged to none of them. Halfway across, the engine coughed "
    "twice and fell silent, and the captain came down the ladder with a torch and a spanner.",
    "To change the filter, switch the pump off and wait until the gauge reads zero. Unscrew the four "
    "bolts at the cover, lift it straight up, and put it on a clean cloth. The old filter is held "
    "by a clip on its left side. Press the clip, pull the filter out, and wipe the seat dry.",
    "Our garden has three apple trees, and each of them ripens in its own week. The first is early "
    "and sour, good for cakes. The second keeps until Christmas if it lies in straw. The third bears "
    "only every other year, and then so heavily that its branches have to be propped.",
    "The committee met on Tuesday to discuss the new bridge. Two members asked for a survey of the "
    "river bed, one wanted a lower toll for farmers, and the treasurer warned that the loan would "
    "have to be paid back within nine years. A decision was put off until the end of March.",
    "When my grandmother was young, the mail came on horseback, once a week, if the pass was open. "
    "She told us that people would gather at the well long before the rider could be seen, and that "
    "nobody said aloud what they hoped for. Letters were read twice and then read to the neighbours.",
    "A good loaf needs time more than it needs work. Mix flour, water and salt in the evening, add a "
    "little yeast, and leave the bowl on the window sill. In the morning the dough has doubled. Fold "
    "it four times, let it rest for an hour, and bake it in a pot with the lid on.",
    "The museum keeps its clocks on the upper floor. Some of them strike, some only tick, and one has "
    "stood still since the flood. A retired teacher winds them every Friday, starting with the tall "
    "one by the door and ending with a watch that is no larger than a button.",
    "Before the storm reached the coast, the fishermen had pulled their boats up behind the wall. "
    "Nets were rolled and tied, shutters were nailed, and the school was opened for those who lived "
    "near the water. By midnight the wind had turned to the north, and the worst was over.",
)
QUESTIONS = (
    "Why is the sky blue?",
    "Tell me a story about a lighthouse.",
    "How do I learn to swim as an adult?",
    "What is the difference between weather and climate?",
    "Describe a day in a busy kitchen.",
    "Give me advice for a first job interview.",
    "How does a bicycle stay upright?",
    "Write a letter to a friend who moved away.",
)
