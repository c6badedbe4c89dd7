"""The heads' modules: unrolled training equals drafting, and the state dict is the public layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windlass.kernels.batch import Heads
from windlass.tools.train_draft.eagle import EagleModule, EagleShape, UnrolledKV, initialise
from windlass.tools.train_draft.medusa import MedusaModule

SHAPE = EagleShape(
    hidden=24, inner=32, heads=Heads(4, 2, 6), norm_eps=1e-5, vocab=40, draft_vocab=10
)


def make_module() -> EagleModule:
    module = EagleModule(SHAPE, torch.arange(3, 33, 3))
    initialise(module, 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)
    return module


def angles(count: int) -> Tensor:
    """[positions, cos and sin]"""
    angle = torch.outer(torch.arange(count).float(), 100.0 ** -(torch.arange(3) / 3))
    return torch.cat([angle.cos(), angle.sin()], -1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """One token's heads [heads, dim]."""
    cos, sin = cos_sin.chunk(2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def naive_step(
    tensors: dict[str, Tensor],
    hidden: Tensor,
    embedded: Tensor,
    cos_sin: Tensor,
    kv: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """One token through the public tensors; appends to the keys and values before it."""
    own = {name.removeprefix("midlayer."): value for name, value in tensors.items()}
    both = torch.cat(
        [
            norm(embedded, own["input_layernorm.weight"]),
            norm(hidden, own["hidden_norm.weight"]),
        ]
    )
    q = rotated((own["self_attn.q_proj.weight"] @ both).view(4, 6), cos_sin)
    k = rotated((own["self_attn.k_proj.weight"] @ both).view(2, 6), cos_sin)
    kv.append((k, (own["self_attn.v_proj.weight"] @ both).view(2, 6)))
    outs = []
    for head in range(4):
        keys = torch.stack([k[head // 2] for k, _ in kv])
        values = torch.stack([v[head // 2] for _, v in kv])
        outs.append((keys @ q[head] / 6**0.5).softmax(0) @ values)
    hidden = hidden + own["self_attn.o_proj.weight"] @ torch.cat(outs)
    x = norm(hidden, own["post_attention_layernorm.weight"])
    gate = F.silu(own["mlp.gate_proj.weight"] @ x) * (own["mlp.up_proj.weight"] @ x)
    return hidden + own["mlp.down_proj.weight"] @ gate


def test_unrolled_attention_equals_step_by_step_drafting() -> None:
    module, generator = make_module(), torch.Generator().manual_seed(0)
    texts, count, num_drafts = 2, 7, 4
    aux_hidden_states = torch.randn(texts, count, 3 * SHAPE.hidden, generator=generator)
    embedded = torch.randn(num_drafts, texts, count, SHAPE.hidden, generator=generator)
    table = angles(count + num_drafts)
    unrolled, hidden, found = UnrolledKV(), module.from_target(aux_hidden_states), []
    with torch.no_grad():
        for j in range(num_drafts):
            hidden = module.step(hidden, embedded[j], table[j : j + count], unrolled)
            found.append((hidden, module.logits(hidden)))
        tensors = module.state_dict()
        for text in range(texts):
            for root in range(count):
                kv: list[tuple[Tensor, Tensor]] = []
                for at in range(root + 1):  # positions with target states
                    known = tensors["fc.weight"] @ aux_hidden_states[text, at]
                    out = naive_step(tensors, known, embedded[0, text, at], table[at], kv)
                for j in range(num_drafts):
                    if j:
                        inputs = (out, embedded[j, text, root], table[root + j])
                        out = naive_step(tensors, *inputs, kv)
                    torch.testing.assert_close(found[j][0][text, root], out, rtol=1e-4, atol=1e-4)
                    logits = tensors["lm_head.weight"] @ norm(out, tensors["norm.weight"])
                    torch.testing.assert_close(
                        found[j][1][text, root], logits, rtol=1e-4, atol=1e-4
                    )


def test_eagle_tensors_have_the_public_names_and_shapes() -> None:
    found = {name: tuple(value.shape) for name, value in make_module().state_dict().items()}
    assert found == {
        "fc.weight": (24, 72),
        "midlayer.hidden_norm.weight": (24,),
        "midlayer.input_layernorm.weight": (24,),
        "midlayer.post_attention_layernorm.weight": (24,),
        "midlayer.self_attn.q_proj.weight": (24, 48),
        "midlayer.self_attn.k_proj.weight": (12, 48),
        "midlayer.self_attn.v_proj.weight": (12, 48),
        "midlayer.self_attn.o_proj.weight": (24, 24),
        "midlayer.mlp.gate_proj.weight": (32, 24),
        "midlayer.mlp.up_proj.weight": (32, 24),
        "midlayer.mlp.down_proj.weight": (24, 32),
        "norm.weight": (24,),
        "lm_head.weight": (10, 24),
        "d2t": (10,),
        "t2d": (40,),
    }


def test_d2t_and_t2d_agree() -> None:
    module = make_module()
    assert (torch.arange(10) + module.d2t).tolist() == list(range(3, 33, 3))
    assert module.t2d.nonzero().flatten().tolist() == list(range(3, 33, 3))


def test_medusa_starts_as_the_models_lm_head() -> None:
    matrix = torch.randn(50, 12)
    shared, own = (MedusaModule(2, matrix, share=share) for share in (True, False))
    x = torch.randn(3, 12)
    for module in (shared, own):
        torch.testing.assert_close(module.logits(1, x), x @ matrix.T)
    blocks = {f"{i}.0.linear.{what}" for i in range(2) for what in ("weight", "bias")}
    assert shared.state_dict().keys() == blocks
    assert own.state_dict().keys() == blocks | {"0.1.weight", "1.1.weight"}
    with torch.no_grad():
        shared.get_parameter("1.0.linear.weight").normal_()
    weight = shared.state_dict()["1.0.linear.weight"]
    torch.testing.assert_close(shared.logits(1, x), (x + F.silu(x @ weight.T)) @ matrix.T)
