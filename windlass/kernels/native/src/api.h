// What the library offers to others: plain C. pool.py and compiled.py call it.

#pragma once

#include <cstdint>

#include "commands.h"
#include "weight.h"

extern "C" {

typedef struct WindlassPool WindlassPool;

// Which instructions the library was compiled for.
const char* windlass_simd(void);

// Whether int4 weights round the inputs of prompts otherwise than others.
int32_t windlass_prompts_apart(void);

// Whether gemm show NaN and infinity in weights of 16-bit floats (float16). Where load_half is a
// shift they would become numbers from 65536 on.
int32_t windlass_takes_nonfinite_halves(void);

// Threads that compute with the caller, who counts as one. Null when there are no threads to have.
WindlassPool* windlass_pool_new(int32_t threads, int32_t spin_us);
void windlass_pool_free(WindlassPool* pool);

uint64_t windlass_packed_bytes(const WindlassWeight* weight);

// Codes as the packed forms have them, [outputs][inputs]; scales are halves, floats for table4.
void windlass_pack(WindlassPool* pool, const WindlassWeight* weight, const void* codes,
                   const void* scales, const uint16_t* offsets, const int8_t* sub_scales,
                   uint8_t* out);

// Runs commands in order. Returns 0, or 1 when there is no memory.
int32_t windlass_run(WindlassPool* pool, const WindlassCommand* commands, int32_t count,
                     const WindlassStep* step);

}  // extern "C"
