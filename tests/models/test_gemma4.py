"""Gemma 4 against transformers: heads of two sizes, shared keys and values, per-layer embeddings, experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from tests.models.comparison import TINY, our_logits, save_tiny
from tests.models.dense_gguf import TOKENIZER
from tests.models.hybrids import check_llama_cpp, needs_llama_cpp
from tests.models.test_deepseek import COUNT, PROMPTS, run
from tests.models.tiny import add_value
from tests.quant.folders import loaded
from tests.runner.test_windows import make, transformers_tokens
from tests.steps import generate
from windlass import LLM, SamplingParams
from windlass.cli.model_report import examine
from windlass.config import EngineConfig
from windlass.errors import CheckpointError, ConfigError, UnsupportedError
from windlass.kernels.native.compiler import find_compilers
from windlass.lora.modules import linear_shapes
from windlass.models.families.registry import read_hparams
from windlass.models.network import kv_layout
from windlass.models.stages import check_stages

IDS = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2))
DENSE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
K_EQ_V = {**DENSE, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
PER_LAYER = {**DENSE, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 97}
SHARED = {**PER_LAYER, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
EXPERTS = {
    **K_EQ_V,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "26B-A4B": EXPERTS,
    "dense": DENSE,
    "31B": K_EQ_V,
    "per-layer embeddings": PER_LAYER,
    "E2B": SHARED,
}


def save(name: str, folder: Path, **changes: Any) -> torch.nn.Module:
    """A model of transformers with random weights and layer scales, saved to the folder."""
    model = save_tiny("Gemma4", CASES[name] | changes, folder)
    generator = torch.Generator().manual_seed(3)
    for key, buffer in model.named_buffers():
        if key.endswith("layer_scalar"):
            buffer.copy_(0.5 + torch.rand(1, generator=generator))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    for chunks in ([37], [5, 1, 1, 30], [1] * 37):
        got = our_logits(tmp_path, IDS.tolist(), chunks)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    got = our_logits(tmp_path, IDS.tolist(), [20, 17], plain=True)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert want.std() > 0.1, "the logits are too small for the comparison to mean anything"


@pytest.mark.parametrize("name", ["26B-A4B", "31B", "E2B"])
def test_tokens_equal_transformers_in_batches_after_preemption_and_with_prefixes(
    name: str, tmp_path: Path
) -> None:
    """Prompts are longer than the window."""
    model = save(name, tmp_path)
    want = [transformers_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    for options in ({}, {"plain_kernels": True, "max_num_batched_tokens": 7}):
        built = make(tmp_path, dtype="float32", num_blocks=200, **options)
        assert run(built, PROMPTS) == want
        assert run(built, PROMPTS[:1]) == want[:1]
        assert built.engine.stats().prefix_hits > 0
    short = [[3 + (5 + n) * i % 89 for i in range(9)] for n in range(4)]
    scarce = make(tmp_path, dtype="float32", num_blocks=30)
    growing = generate(scarce.engine, short, SamplingParams(temperature=0.0, max_tokens=30))
    assert growing == [transformers_tokens(model, prompt, 30) for prompt in short]
    assert scarce.engine.stats().num_preemptions > 0


def test_layers_that_share_keys_and_values_need_no_memory(tmp_path: Path) -> None:
    save("E2B", tmp_path)
    layout = make(tmp_path, num_blocks=10, dtype="float32").report.capacity.layout
    assert layout.num_layers == 3  # of 6
    windowed, full = (
        sum(len(group.layers) * group.layer_bytes for group in layout.groups if group.kind == kind)
        for kind in ("window", "full")
    )
    assert windowed == 2 * (2 * 2 * 4 * 8) * 4  # layers, keys and values of 2 heads, 4 tokens
    assert full == 2 * 2 * 4 * 16 * 4


def test_pages_of_different_shapes_come_back_from_host_memory(tmp_path: Path) -> None:
    model = save("E2B", tmp_path)
    built = make(tmp_path, dtype="float32", num_blocks=36, kv_offload_gb=0.01)
    other = [[5 + 7 * i % 83 for i in range(30)], [4 + 3 * i % 71 for i in range(29)]]
    want = [transformers_tokens(model, PROMPTS[0], COUNT)]
    assert run(built, PROMPTS[:1]) == want
    for prompt in other:
        run(built, [prompt])
    assert run(built, PROMPTS[:1]) == want
    (tier,) = built.engine.stats().tiers
    assert tier.num_loads > 0


@pytest.mark.skipif(not find_compilers()[0], reason="no C++ compiler")
@pytest.mark.parametrize("name", ["26B-A4B", "31B", "E2B"])
def test_the_recorded_program_gives_the_tokens_of_eager_steps(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    recorded, eager = (make(tmp_path, num_blocks=200, enforce_eager=flag) for flag in (False, True))
    how = next(choice for choice in recorded.report.choices if choice.what == "steps")
    assert how.value.startswith("one native call"), how.reason
    assert run(recorded, PROMPTS) == run(eager, PROMPTS)


def test_deterministic_requests_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    save("E2B", tmp_path)
    built = make(tmp_path, num_blocks=200, plain_kernels=True)
    alone = run(built, PROMPTS[:1], deterministic=True)
    other = make(tmp_path, num_blocks=200, plain_kernels=True, max_num_batched_tokens=23)
    assert run(other, PROMPTS, deterministic=True)[:1] == alone


def test_old_and_new_configs_agree(tmp_path: Path) -> None:
    """Published configs have common fields where transformers now writes per_layer_config."""
    save("31B", tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "per_layer_config"}
    old |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert "per_layer_config" in new
    assert read_hparams(old) == read_hparams(new)
    assert [heads.dim for heads in read_hparams(new).layer_kv_heads] == [8, 8, 16] * 2


def test_a_config_whose_layers_have_equal_heads(tmp_path: Path) -> None:
    """transformers writes an empty per_layer_config then, which is not an absent one."""
    model = save_tiny("Gemma4", {**DENSE, "global_head_dim": 8}, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["per_layer_config"] == {}
    assert {heads.dim for heads in read_hparams(written).layer_kv_heads} == {8}
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    torch.testing.assert_close(our_logits(tmp_path, IDS.tolist(), [37]), want, atol=1e-4, rtol=1e-4)


def test_the_text_model_of_a_model_with_images(tmp_path: Path) -> None:
    """Its tensors have a prefix, and others are skipped, also keys and values that nothing reads."""
    model = save("E2B", tmp_path)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    file = tmp_path / "model.safetensors"
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}": tensor
        for name, tensor in load_file(file).items()
    }
    tensors["model.vision_tower.patch_embedder.input_proj.weight"] = torch.ones(3)
    tensors["model.embed_audio.embedding_projection.weight"] = torch.ones(3)
    tensors["model.language_model.layers.5.self_attn.k_proj.weight"] = torch.ones(3, 3)
    save_file(tensors, file)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"eos_token_id": [1, 106]}))
    got = our_logits(tmp_path, IDS.tolist(), [30, 7])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_published_sizes() -> None:
    """E2B: 20 of 35 layers share; the fields that its config leaves out have transformers' defaults."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    text = {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "layer_types": kinds,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    }
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    hparams = read_hparams(config)
    assert hparams.kv_heads_of(0).dim == 256
    assert hparams.kv_heads_of(4).dim == 512
    assert [hparams.kv_layer_of(layer) for layer in (13, 14, 15, 19, 33, 34)] == [
        13,
        14,
        13,
        14,
        13,
        14,
    ]
    assert hparams.intermediate_size_of(14) == 6144
    assert hparams.intermediate_size_of(15) == 12_288
    layout = kv_layout(hparams, 16, torch.bfloat16)
    assert layout.num_layers == 15
    kept = {group.kind: 0 for group in layout.groups}
    for group in layout.groups:
        kept[group.kind] += group.num_bytes // 16
    assert kept == {"window": 12 * 2 * 256 * 2, "full": 3 * 2 * 512 * 2}


def test_adapters_change_the_projections_that_the_network_has(tmp_path: Path) -> None:
    for name in ("31B", "E2B"):
        folder = tmp_path / name
        folder.mkdir()
        save(name, folder)
        hparams = read_hparams(json.loads((folder / "config.json").read_text()))
        network, shapes = loaded(folder, device="cpu").network, linear_shapes(hparams)
        for layer in range(hparams.num_layers):
            attention = network.model.layers[layer].self_attn
            parts = {
                f"model.layers.{layer}.self_attn.{part}": (count, linear.num_in)
                for linear in (attention.qkv_proj, attention.o_proj)
                for part, count in linear.parts.items()
            }
            known = {key: shapes[key] for key in shapes if key in parts}
            assert known == {key: parts[key] for key in known}
            missing = {key.rpartition(".")[2] for key in parts.keys() - known.keys()}
            assert not missing


def test_what_several_head_sizes_do_not_allow_is_refused(tmp_path: Path) -> None:
    save("31B", tmp_path)
    for options, message in (
        (
            {"spec": "ngram"},
            "--spec ngram: the layers of Gemma4ForCausalLM have heads of different",
        ),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: the layers of Gemma4ForCausalLM"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(tmp_path), device="cpu", load_format="dummy", num_blocks=100, **options)
    hparams = read_hparams({**config(), **PER_LAYER})
    with pytest.raises(UnsupportedError, match="layers of Gemma4ForCausalLM read the token ids"):
        check_stages(hparams, 2)


def test_inspect_counts_the_kv_of_each_layer(tmp_path: Path) -> None:
    save("E2B", tmp_path)
    given = {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    found = examine(EngineConfig.of(**given, block_size=16))["estimate"]["kv_bytes_per_token"]
    assert found >= (2 * 2 * 2 * 8 + 2 * 2 * 16) * 4


def config(**changes: Any) -> dict[str, Any]:
    return {**TINY, **DENSE, "architectures": ["Gemma4ForCausalLM"], **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_bidirectional_attention": "all"}, UnsupportedError, "this is an embedding model"),
        ({"num_kv_shared_layers": 4}, CheckpointError, "num_kv_shared_layers is 4 of 6 layers"),
        ({"num_kv_shared_layers": 9}, CheckpointError, "num_kv_shared_layers is 9 of 6 layers"),
        ({"num_key_value_heads": 4}, CheckpointError, "num_key_value_heads is 4, which does not"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types has 1 layers"),
        (
            {"per_layer_config": {"2": {"head_dim": 16}, "5": {"head_dim": 32}}},
            UnsupportedError,
            "layers of the same type have different heads",
        ),
        (
            {**EXPERTS, "hidden_activation": "silu"},
            UnsupportedError,
            "activation silu is not supported for the experts of Gemma4ForCausalLM, only gelu_tanh",
        ),
        (
            {"per_layer_config": {"2": {"head_dim": 16, "sliding_window": 4}}},
            UnsupportedError,
            r"per_layer_config 2\): sliding_window cannot differ between layers",
        ),
    ],
)
def test_unsupported_variants_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_hparams(config(**changes))


# ---- GGUF -------------------------------------------------------------------------------------

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
}
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
ODD = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def write_gemma4(
    path: Path,
    model: torch.nn.Module,
    changes: dict[str, Any],
    kind: gguf.GGMLQuantizationType | None = None,
    packed: bool = False,
) -> Path:
    """The model as llama.cpp's converter stores it; `kind`: the per-layer embeddings are rounded so."""
    tensors: dict[str, torch.Tensor] = {"rope_freqs.weight": torch.tensor([1.0] * 2 + [1e30] * 6)}
    for name, value in model.state_dict().items():
        module = name.rpartition(".")[0]
        if module == "lm_head":
            continue
        if module in OUTER:
            tensors[f"{OUTER[module]}.weight"] = value
            continue
        _, _, layer, local = name.split(".", 3)
        block = f"blk.{layer}."
        if local in ODD:
            tensors[block + ODD[local]] = value
        else:
            tensors[f"{block}{GGUF_NAMES[local.removesuffix('.weight')]}.weight"] = value
    shared = changes.get("num_kv_shared_layers", 0)
    wide = [80] * (6 - shared) + [160] * shared
    values: dict[str, Any] = {
        "block_count": 6,
        "context_length": 128,
        "embedding_length": 48,
        "feed_forward_length": wide if changes.get("use_double_wide_mlp") else 80,
        "attention.head_count": 6,
        "attention.head_count_kv": [2, 2, 1] * 2 if changes.get("attention_k_eq_v") else 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.key_length_swa": 8,
        "attention.value_length_swa": 8,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, True, False] * 2,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": changes["hidden_size_per_layer_input"],
        "final_logit_softcapping": 3.0,
        "rope.dimension_count": 16,
        "rope.dimension_count_swa": 8,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    if changes.get("enable_moe_block"):
        values |= {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}
    writer = gguf.GGUFWriter(path, "gemma4")
    for key, value in (values | changes.get("gguf", {})).items():
        add_value(writer, f"gemma4.{key}", value)
    for key, value in changes.get("tokenizer", {}).items():
        add_value(writer, key, value)
    for key, tensor in tensors.items():
        array = tensor.contiguous().numpy()
        if kind is None or not key.startswith("per_layer_token_embd"):
            writer.add_tensor(key, array)
        elif packed:
            writer.add_tensor(key, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, dequantize(quantize(array, kind), kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", CASES)
def test_gguf_files_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    built = make(
        write_gemma4(tmp_path / "m.gguf", model, CASES[name]), num_blocks=200, dtype="float32"
    )
    (tokens,) = run(built, PROMPTS[:1])
    assert tokens == transformers_tokens(model, PROMPTS[0], COUNT)


@needs_llama_cpp
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    """All experts are used: scores that differ in the 16 bits of llama.cpp's KV cache would choose others."""
    all_used = {"top_k_experts": 6} if "num_experts" in CASES[name] else {}
    model = save(name, tmp_path, **all_used)
    header = {"gguf": {"expert_used_count": 6} if all_used else {}, "tokenizer": TOKENIZER}
    path = write_gemma4(tmp_path / "m.gguf", model, {**CASES[name], **header})
    check_llama_cpp(model, path, tolerance=0.02)


def test_a_file_without_the_pattern_of_windows_is_refused(tmp_path: Path) -> None:
    header = {"attention.sliding_window_pattern": [True]}
    model = save("dense", tmp_path)
    path = write_gemma4(tmp_path / "m.gguf", model, CASES["dense"] | {"gguf": header})
    with pytest.raises(CheckpointError, match="sliding_window_pattern has 1 entries for 6 layers"):
        make(path, num_blocks=20)


def test_the_table_of_per_layer_embeddings_stays_packed(tmp_path: Path) -> None:
    changes = {**SHARED, "hidden_size_per_layer_input": 16}
    model = save_tiny("Gemma4", changes, tmp_path)
    kind, found = gguf.GGMLQuantizationType.Q8_0, []
    for packed in (False, True):
        path = write_gemma4(tmp_path / f"{packed}.gguf", model, changes, kind, packed)
        built = make(path, num_blocks=200)
        found.append((run(built, PROMPTS), built.report.memory["weights"]))
    assert found[0][0] == found[1][0]
    assert found[0][1] - found[1][1] >= 97 * 6 * 16 * 2  # of 4 bytes per number, about 1.06 remain
