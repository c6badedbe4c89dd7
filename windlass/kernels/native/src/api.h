// The C interface of the library. pool.py, linear.py and compiled.py call it.

#pragma once

#include <cstdint>

#include "commands.h"
#include "weight.h"

extern "C" {

typedef struct WindlassPool WindlassPool;

// Returns the name of the instruction set that the library was compiled for.
const char* windlass_simd(void);

// Whether a weight multiplies prompt tokens with a GEMM that rounds activations in another way.
int32_t windlass_has_prompt_gemm(const WindlassWeight* w);

// Whether GEMMs propagate NaN and infinity in weights of a kind. Where load_f16_fast is a shift, those of float16
// become numbers from 65536 on. Where inputs are split into two bfloat16 values, infinity times a residual of
// zero, or of another sign, is NaN.
int32_t windlass_reads_nonfinite(int32_t kind);

// Creates a pool of `threads` threads, the caller included. Returns null if the system refuses
// threads.
WindlassPool* windlass_pool_new(int32_t threads, int32_t spin_us);
void windlass_pool_free(WindlassPool* pool);

// Lets worker `thread` (from 1; 0 is the caller) run on `count` CPUs only. Returns 0 or an errno.
int32_t windlass_pool_bind(WindlassPool* pool, int32_t thread, const int32_t* cpus, int32_t count);

// Multiplies int8 codes in the L1 cache on all threads, in `rounds` rounds of a GEMM's inner loop. Returns the
// number of multiply-adds.
int64_t windlass_multiply_int8(WindlassPool* pool, int64_t rounds);

uint64_t windlass_packed_bytes(const WindlassWeight* weight);

// Packs codes [outputs][inputs]. Scales are float16, or float32 for table4.
void windlass_pack(WindlassPool* pool, const WindlassWeight* weight, const void* codes,
                   const void* scales, const uint16_t* offsets, const int8_t* sub_scales,
                   uint8_t* out);

// Runs commands in order. Returns 0, 1 if memory could not be allocated, or 2 if another rank is lost.
int32_t windlass_run(WindlassPool* pool, const WindlassCommand* commands, int32_t count,
                     const WindlassStep* step);

}  // extern "C"
