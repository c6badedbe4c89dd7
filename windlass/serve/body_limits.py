"""Limits on the contents of one request body. docs/serving.md lists these numbers for users.

Each limit bounds the work that a body causes before the engine sees it. Limits that depend on the
model (characters of a prompt, number of completions) are computed in prepare.py and admission.py.
"""

from __future__ import annotations

# Bodies up to this size are decoded and prepared on the event loop, larger ones in threads.
INLINE_BYTES = 16 * 2**10

# The JSON text. Building Python objects holds the GIL: these keep it under about 100 ms.
MAX_DEPTH = 64
MAX_VALUES = 262_144  # numbers, strings, arrays, objects
MAX_STRINGS = 65_536  # field names included
MAX_CONTAINERS = 32_768  # arrays and objects

# Conversations
MAX_MESSAGES = 4_096
MAX_CONTENT_PARTS = 4_096  # of one message
MAX_TOOL_CALLS = 128  # of one message
MAX_TOOLS = 256
MAX_TEMPLATE_CHARS = 65_536  # of a request's own chat template

# Sampling
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1_024  # of one stop string
MAX_STOP_TOKEN_IDS = 4_096
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIAS = 16_384
MAX_CACHE_SALT_CHARS = 256

# Embeddings, scores, reranking
MAX_INPUTS = 2_048
MAX_TOTAL_NUMBERS = 2**23  # of all vectors of one answer

# Structured outputs
MAX_FORM_CHARS = 65_536  # of a schema, a regex, a grammar, all choices together
MAX_CHOICES = 4_096
MAX_GBNF_RULES = 512  # converting GBNF takes time that grows with the square of this

# Totals over all completions of one body. The message to the engine is encoded and hashed on the
# event loop: 2**19 tokens take 50 ms, and so do 4 MiB of parameters.
MAX_TOTAL_PROMPT_TOKENS = 2**19
MAX_TOTAL_PARAMS_BYTES = 4 * 2**20
MAX_TOTAL_LOGPROBS = 2**22

# A field name that is longer is not compared with the known names.
MAX_COMPARED_NAME_CHARS = 64
MAX_UNKNOWN_FIELDS = 16  # of one body, unless --unknown-fields is error
