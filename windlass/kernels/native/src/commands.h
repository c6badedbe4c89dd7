// A step as a list of commands over fixed memory. Mirrored field by field in commands.py.
//
// What each command means, with rows of floats unless something else is said:
//
//            moving                        fixed                          sizes; numbers
//   embed    out                           table, weight                  width, type
//   norm     x, out                        weight                         width; eps
//   add_norm x, residual, out              weight                         width; eps
//   linear   x, y, normed, active, scales  weight, bias, norm         stride, column, flags; eps
//   round    x, out, scales                given                          width
//   silu_mul x, out                                                       width
//   rope     x, out                        cos_sin, norms of q and k, kv  heads ..., rotated; eps
//   attend   x, out                        kv                             heads ..., window; scale
//   gather   x, out                                                       width
//   argmax   x, out (int32)                                               width
//   lora     x, y                          down, up, ranks, shape, scales
//   sample   x, out (int32)                wishes, keys                   width
//
// kv: keys, values and, where they are codes, their scales. heads ...: query heads, kv heads, size
// of a head, positions of a page, type of the pages. lora adds to y what adapters make of x, as
// kernels/lora.py has their matrices; shape: inputs, parts (up to 3), most ranks, how far the ranks
// of slots lie apart, outputs of each part; scales: none where down and up are floats, else codes.
// Sums never depend on how many rows there are.

#pragma once

#include <cstdint>

namespace windlass {

enum Op : int32_t {
  kEmbed = 0,
  kNorm,
  kAddNorm,
  kLinear,
  kRound,
  kSiluMul,
  kRope,
  kAttend,
  kGather,
  kArgmax,
  kLora,
  kSample,
};

// How numbers are stored.
enum Type : int32_t { kTypeFloat = 0, kTypeHalf, kTypeBf16, kTypeInt8, kTypePacked };

// Numbers of rows that the step knows.
constexpr int32_t kTokens = -1;
constexpr int32_t kSampled = -2;

// Of a linear command.
constexpr int32_t kAddToY = 1;
constexpr int32_t kNormFirst = 2;  // x is normalised into `normed`, which is multiplied
constexpr int32_t kGated = 4;      // silu of y's first half times the second goes to `active`
constexpr int32_t kGivenScales = 8;  // x is whole numbers, `scales` theirs
// Rows are the step's tokens, or the sampled ones: int4 weights round those of prompts otherwise.
constexpr int32_t kOfNetwork = 16;

}  // namespace windlass

struct WindlassCommand {
  int32_t op;
  int32_t rows;
  int32_t sizes[6];
  float numbers[2];
  void* moving[5];
  const void* fixed[7];
};

// A request's tokens [first, first + count) of the step, at positions from `start`.
struct WindlassRow {
  int32_t first, count, start, slot;
};

// Tokens [first, last) of the step that are of prompts.
struct WindlassPrompt {
  int32_t first, last;
};

struct WindlassStep {
  int32_t num_tokens, num_rows, num_sampled, table_stride;
  const int32_t* ids;        // of the tokens
  const int32_t* positions;  // of the tokens
  const int32_t* slots;      // of the tokens: the line of `tables`
  const int32_t* tables;     // [slots][table_stride] pages
  const WindlassRow* rows;
  const int32_t* sampled;  // tokens whose row goes on to the head
  const int32_t* adapters;  // of the tokens: their slots, 0 where there is none
  const WindlassPrompt* prompts;  // in order, apart from each other
  int32_t num_prompts;
};
