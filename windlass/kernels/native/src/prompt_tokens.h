// Which rows of a command belong to prompts.

#pragma once

#include "gemm_inputs.h"

namespace windlass {

// Tells which rows of a command are quantised as prompt rows; rows must be queried in order.
class PromptTokens {
 public:
  PromptTokens(const Run& run, bool applies)
      : step_(run.step),
        of_all_(run.command.rows == kTokens || run.rows == run.step.num_tokens),
        left_(applies ? run.step.num_prompts : 0),
        next_(run.step.prompts) {}

  bool has(int row) {
    if (left_ == 0) return false;
    const int token = of_all_ ? row : step_.sampled[row];
    for (; left_ > 0 && next_->last <= token; --left_) ++next_;
    return left_ > 0 && next_->first <= token;
  }

 private:
  const WindlassStep& step_;
  bool of_all_;
  int left_;
  const WindlassPrompt* next_;
};

}  // namespace windlass
