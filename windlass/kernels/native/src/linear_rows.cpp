// The inputs and the GEMM arguments of some rows of a linear command.

#include "linear_rows.h"

namespace windlass {

const float* LinearRows::inputs(int row, int rows) const {
  const float* x = row_of(run.step_tensor(0), first + row, w.num_in);
  if (!(run.size(2) & kNormFirst)) return x;
  float* normed = row_of(run.step_tensor(2), first + row, w.num_in);
  for (int m = 0; m < rows; ++m) {
    rms_norm(row_of(x, m, w.num_in), run.model_tensor<float>(2), w.num_in, run.command.scalars[0],
             row_of(normed, m, w.num_in));
  }
  return normed;
}

GemmArgs LinearRows::gemm(const uint8_t* panels, size_t panel_bytes, int panels_per_chunk,
                          int planes) const {
  const int flags = run.size(2);
  GemmArgs job{run.pool, w, panels, panel_bytes};
  job.panels_per_chunk = panels_per_chunk;
  job.planes = planes;
  job.rows = count * planes;
  job.gain = has_f16(w) ? w.gain * kF16Gain : w.gain;
  job.stride = run.size(0);
  job.y = row_of(run.step_tensor(1), first, job.stride) + run.size(1);
  job.add = (flags & kAddToY) != 0;
  job.bias = run.model_tensor<float>(1);
  if (flags & kGated) job.active = row_of(run.step_tensor(3), first, w.num_out / 2);
  return job;
}

}  // namespace windlass
