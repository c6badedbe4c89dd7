// A step as a list of commands over fixed memory. commands.py mirrors the structs field by field.
//
// Arguments of each command; tensors are rows of float32 unless stated otherwise:
//
//             step_tensors                  model_tensors                  sizes; scalars
//   embed     out                           table, weight                  width, type, first, count
//   norm      x, out                        weight                         width, stride, column, groups; eps
//   add_norm  x, residual, out              weight                         width; eps
//   linear    x, y, normed, active, scales  weight, bias, norm             stride, column, flags; eps
//   quantise  x, out, scales                given scale or null            width
//   silu_mul  x, out                                                       width
//   rope      x, out                        cos_sin, q norm, k norm, kv    heads ..., rotary_dim, flags; eps
//   attention x, out                        kv, sinks                      heads ..., window, chunked; scale, soft cap
//   gather    x, out                                                       width
//   argmax    x, out (int32)                                               width
//   lora      x, y                          down, up, ranks, shape, scales
//   sample    x, out (int32)                params, keys                   width
//   experts   x, out, logits                experts (experts.h)            flags of linear
//   latent    x, q, out                     cos_sin, norm, kv              heads ..., rotary_dim, nope_dim,
//                                                                          x width, q width, interleaved; eps
//   per_head  x, y                          weight                         heads, inputs, outputs, strides of
//                                                                          x, y (row, head) and of the
//                                                                          weight's heads, layout
//   layer_norm      x, out                  weight, bias or null           width; eps
//   add_layer_norm  x, residual, out        weight, bias or null           width; eps
//   gelu_mul  x, out                                                       width
//   map       x, out                                                       width, function; constant
//   add       x, y, out                                                    width
//   sigmoid_gate    x, gate, out                                           width, gates per row: 1 or width; or any
//                                                                          number, and 1: the largest counts
//   sparse_mixer    x, out                                                 width; jitter, limit
//   causal_conv     x, out                  weight, bias or null, states   first column, channels, conv size, x width,
//                                                                          state ..., offset in a state
//   short_conv      x, out                  weight, bias or null, states   channels, conv size, state ...
//   selective_scan  x, mixed, out           decay, skip, dt bias, states   heads, head size, groups, state size,
//                                                                          x width, state ...
//   delta_rule      x, mixed, out           decay, dt bias, norm, states   heads, head size, groups, state size,
//                                                                          x width, state ..., tiled; eps
//   mul_columns     x, y, out                                              width, columns of y, the first of them
//   split_gates     x, out, gates                                          query heads, head size, other columns
//   all_reduce      x, out                  shared memory                  width, rank, ranks, floats of a chunk
//   all_gather      x, out                  shared memory, widths          sum of widths, rank, ranks, floats ...
//
// state ...: positions per page, offset of the layer's block tables, floats from one page to the next.
// embed gives zeros for tokens outside [first, first + count); a count of 0 is the whole table.
// kv: keys, values and, for int8 pages, their scales. heads ...: query heads, KV heads, head size,
// positions per page, type of the pages, offset of the layer's block tables, vectors from one page to the
// next. lora adds the adapters' output to y, with the matrices of kernels/lora.py. Its shape: inputs, parts (up to 3), maximum rank, stride between the ranks of two
// slots, outputs of each part. Its scales: null if down and up are float32, else those of int8 codes.
// latent reads the last columns of x, writes latents to the pages, and rotates the queries; per_head
// writes their other features. The layout of its weight: 0 if a row belongs to an input, 1 to an output.
// norm reads and writes `width` columns from `column` on, of rows that are `stride` apart; a stride of 0 is
// the width. With `groups` it does so for so many parts behind each other, whose weights are, too. Sinks and norms may be null; a soft cap of 0 is none.
// The order of a sum never depends on the number of rows.

#pragma once

#include <cstdint>

namespace windlass {

enum Op : int32_t {
  kEmbed = 0,
  kNorm,
  kAddNorm,
  kLinear,
  kQuantise,
  kSiluMul,
  kRope,
  kAttention,
  kGather,
  kArgmax,
  kLora,
  kSample,
  kExperts,
  kLatent,
  kPerHead,
  kLayerNormRows,
  kAddLayerNorm,
  kGeluMul,
  kMap,
  kAdd,
  kSigmoidGate,
  kSparseMixer,
  kCausalConv,
  kSelectiveScan,
  kAllReduce,
  kAllGather,
  kDeltaRule,
  kSplitGates,
  kMulColumns,
  kShortConv,
};

// Storage types.
enum Type : int32_t { kTypeF32 = 0, kTypeF16, kTypeBf16, kTypeInt8, kTypePacked };

// Functions of a map command. The last two have a constant.
enum MapFunction : int32_t {
  kMapGelu = 0,
  kMapGeluTanh,
  kMapRelu2,
  kMapSilu,
  kMapScale,
  kMapSoftCap,
};

// Row counts that come from the step.
constexpr int32_t kTokens = -1;
constexpr int32_t kSampled = -2;

// Flags of a linear command.
constexpr int32_t kAddToY = 1;
constexpr int32_t kNormFirst = 2;  // write RMSNorm(x) to `normed` and multiply that
constexpr int32_t kGated = 4;  // write silu(first half of y) * second half to `active`
constexpr int32_t kQuantisedInputs = 8;  // x holds int8 codes as floats, with `scales` per row
// The rows are the step's tokens, or its sampled ones: int4 weights quantise prompt rows
// differently.
constexpr int32_t kStepRows = 16;

// Flags of a rope command.
constexpr int32_t kInterleaved = 1;  // rotate the pairs (2i, 2i + 1), not (i, i + rotary_dim / 2)
constexpr int32_t kLayerNorm = 2;  // the norms subtract the mean
constexpr int32_t kNormPerHead = 4;  // every head has its own norm weight

}  // namespace windlass

struct WindlassCommand {
  int32_t op;
  int32_t rows;
  int32_t sizes[12];
  float scalars[2];
  void* step_tensors[5];
  const void* model_tensors[7];
};

// Tokens [first, first + count) of the step belong to one request, at positions from `start`.
struct WindlassRow {
  int32_t first, count, start, slot;
};

// Tokens [first, last) of the step belong to a prompt.
struct WindlassPrompt {
  int32_t first, last;
};

struct WindlassStep {
  int32_t num_tokens, num_rows, num_sampled, table_stride;
  const int32_t* ids;  // per token
  const int32_t* positions;  // per token
  const int32_t* slots;  // per token: the row of `tables`
  // [groups][slots][table_stride] pages. Entries behind a window are not valid.
  const int32_t* tables;
  const WindlassRow* rows;
  const int32_t* sampled;  // tokens whose rows go to the LM head
  const int32_t* adapters;  // per token: the adapter's slot, 0 for none
  const WindlassPrompt* prompts;  // sorted, disjoint
  int32_t num_prompts;
};
