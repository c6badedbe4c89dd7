"""langchain and litellm: embeddings and reranking are those of the OpenAI client."""

import litellm
from common import TINY
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

litellm.telemetry = False
TEXTS = ["the first text", "a second, longer text", "x"]

client = OpenAI(base_url=f"{TINY}/v1", api_key="none")
WANT = [each.embedding for each in client.embeddings.create(model="tiny", input=TEXTS).data]


def same(got: list[float], want: list[float]) -> bool:
    return len(got) == len(want) and max(map(abs, map(float.__sub__, got, want))) < 1e-5


# Otherwise it sends ids of OpenAI's tokenizer.
embeddings = OpenAIEmbeddings(
    base_url=f"{TINY}/v1", api_key="none", model="tiny", check_embedding_ctx_length=False
)
assert all(map(same, embeddings.embed_documents(TEXTS), WANT))
assert same(embeddings.embed_query(TEXTS[1]), WANT[1])

for name in ("openai/tiny", "hosted_vllm/tiny"):
    print(name)
    made = litellm.embedding(model=name, input=TEXTS, api_base=f"{TINY}/v1", api_key="none")
    assert all(same(each["embedding"], want) for each, want in zip(made.data, WANT, strict=True))

for name, base in (
    ("hosted_vllm/tiny", TINY),
    ("jina_ai/tiny", f"{TINY}/v1/rerank"),
    ("cohere/tiny", f"{TINY}/v1/rerank"),
):
    print(name)
    ranked = litellm.rerank(
        model=name, query=TEXTS[1], documents=TEXTS, top_n=2, api_base=base, api_key="none"
    )
    best, second = ranked.results
    assert best["index"] == 1
    assert best["relevance_score"] > 0.999 > second["relevance_score"]
