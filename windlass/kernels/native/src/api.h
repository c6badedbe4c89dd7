// What the library offers to others: plain C. linear.py and library.py call it.

#pragma once

#include <cstdint>

#include "weight.h"

extern "C" {

typedef struct WindlassPool WindlassPool;

// Which instructions the library was compiled for.
const char* windlass_simd(void);

// Threads that compute with the caller, who counts as one. Null when there are no threads to have.
WindlassPool* windlass_pool_new(int32_t threads, int32_t spin_us);
void windlass_pool_free(WindlassPool* pool);

uint64_t windlass_packed_bytes(const WindlassWeight* weight);

// Codes as the packed forms have them, [outputs][inputs]; scales are halves, floats for table4.
void windlass_pack(const WindlassWeight* weight, const void* codes, const void* scales,
                   const uint16_t* mins, uint8_t* out);

// y[rows][outputs] = x[rows][inputs] times the weight, added to y if `add`. With x_scales (one a
// row; int4 and int8 only) x is whole numbers from -127 to 127 that are taken as they are, else the
// library rounds x by itself. Returns 0, or 1 when there is no memory.
int32_t windlass_linear(WindlassPool* pool, const WindlassWeight* weight, const float* x,
                        const float* x_scales, int32_t rows, float* y, int32_t add);

}  // extern "C"
