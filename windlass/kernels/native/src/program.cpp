// Runs commands one after another. Threads stay awake between them.

#include <new>

#include "api.h"
#include "lost.h"
#include "run.h"

using namespace windlass;

namespace {

int num_rows(const WindlassCommand& command, const WindlassStep& step) {
  if (command.rows == kTokens) return step.num_tokens;
  return command.rows == kSampled ? step.num_sampled : command.rows;
}

bool execute(const Run& run) {
  switch (run.command.op) {
    case kEmbed:
      return run_embed(run);
    case kNorm:
      return run_norm(run);
    case kAddNorm:
      return run_add_norm(run);
    case kLinear:
      return run_linear(run);
    case kQuantise:
      return run_quantise(run);
    case kSiluMul:
      return run_silu_mul(run);
    case kRope:
      return run_rope(run);
    case kAttention:
      return run_attention(run);
    case kGather:
      return run_gather(run);
    case kArgmax:
      return run_argmax(run);
    case kLora:
      return run_lora(run);
    case kSample:
      return run_sample(run);
    case kExperts:
      return run_experts(run);
    case kLatent:
      return run_latent(run);
    case kPerHead:
      return run_per_head(run);
    case kLayerNormRows:
      return run_layer_norm(run);
    case kAddLayerNorm:
      return run_add_layer_norm(run);
    case kGeluMul:
      return run_gelu_mul(run);
    case kMap:
      return run_map(run);
    case kAdd:
      return run_add(run);
    case kSigmoidGate:
      return run_sigmoid_gate(run);
    case kCausalConv:
      return run_causal_conv(run);
    case kShortConv:
      return run_short_conv(run);
    case kSelectiveScan:
      return run_selective_scan(run);
    case kDeltaRule:
      return run_delta_rule(run);
    case kMulColumns:
      return run_mul_columns(run);
    case kSplitGates:
      return run_split_gates(run);
    case kSparseMixer:
      return run_sparse_mixer(run);
    case kAllReduce:
      return run_all_reduce(run);
    case kAllGather:
      return run_all_gather(run);
    default:
      return false;
  }
}

}  // namespace

extern "C" int32_t windlass_run(WindlassPool* pool, const WindlassCommand* commands, int32_t count,
                                const WindlassStep* step) {
  std::lock_guard<std::mutex> lock(pool->pool.mutex());
  try {
    for (int i = 0; i < count; ++i) {
      const Run run{pool->pool, commands[i], *step, num_rows(commands[i], *step)};
      if (run.rows > 0 && !execute(run)) return 1;
    }
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const LostRank&) {
    return 2;
  }
  return 0;
}
