"""Finds a model's special tokens for filling in the middle (FIM)."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer

from windlass.core.card import FimTokens

# The names under which models have these tokens, where their files do not say so: Qwen, StarCoder,
# DeepSeek (whose hole is followed by the suffix), Code Llama, Granite, GLM.
_NAMES = {
    "prefix": (
        "<|fim_prefix|>",
        "<fim_prefix>",
        "<fim-prefix>",
        "<\uff5cfim\u2581begin\uff5c>",
        "<PRE>",
        "\u2581<PRE>",
        "<|code_prefix|>",
    ),
    "suffix": (
        "<|fim_suffix|>",
        "<fim_suffix>",
        "<fim-suffix>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<SUF>",
        "\u2581<SUF>",
        "<|code_suffix|>",
    ),
    "middle": (
        "<|fim_middle|>",
        "<fim_middle>",
        "<fim-middle>",
        "<\uff5cfim\u2581end\uff5c>",
        "<MID>",
        "\u2581<MID>",
        "<|code_middle|>",
    ),
    "repo": ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>"),
    "file": ("<|file_sep|>", "<file_sep>", "<file-sep>"),
    "pad": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>"),
}
FIM_PARTS = ("prefix", "suffix", "middle")


def fim_tokens(backend: Tokenizer, named: Mapping[str, int | None]) -> FimTokens | None:
    """The FIM tokens of a vocabulary; `named`: ids that the model's files give for a part."""

    def find(part: str) -> int | None:
        found = named.get(part)
        if found is not None:
            return found
        ids = (backend.token_to_id(name) for name in _NAMES[part])
        return next((token for token in ids if token is not None), None)

    prefix, suffix, middle = (find(part) for part in FIM_PARTS)
    if prefix is None or suffix is None or middle is None:
        return None
    repo, file, pad = (find(part) for part in ("repo", "file", "pad"))
    stop = tuple(token for token in (repo, file, pad) if token is not None)
    return FimTokens(prefix=prefix, suffix=suffix, middle=middle, repo=repo, file=file, stop=stop)
