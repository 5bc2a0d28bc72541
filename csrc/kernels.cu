// The device's half of kernels.h: three passes over memory that torch would make in three to seven, and a barrier that
// the host can end. NVRTC compiles it at the first use (runtime/kernels.py). bfloat16 and float8 are their bits, so no
// header of CUDA's is needed and the code runs on every GPU that torch runs on.
#include "kernel_arguments.h"

using namespace zerocompile;

namespace {

constexpr int kThreads = kKernelThreads, kVector = kKernelVector, kRounds = kKernelRounds;

union Eight {
  uint4 bits;
  unsigned short narrow[kVector];
};

__device__ float widened(unsigned short x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }

// To nearest, ties to even.
__device__ unsigned short narrowed(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// To bfloat16 or half and back, to nearest: `through` is 1 or 2; 0: as it is.
__device__ float rounded(float x, int through) {
  if (through == 1) return widened(narrowed(x));
  if (through == 2) {
    asm("{ .reg .b16 half; cvt.rn.f16.f32 half, %1; cvt.f32.f16 %0, half; }" : "=f"(x) : "f"(x));
  }
  return x;
}

// To float8_e4m3fn, to nearest, ties to even, as torch does it (c10/util/Float8_e4m3fn.h). What is larger than 448
// becomes 448; what is no number stays none.
__device__ unsigned char float8_of(float x) {
  x = x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x;
  unsigned bits = __float_as_uint(x);
  const unsigned sign = bits & 0x80000000u;
  bits ^= sign;
  if (bits > 0x7f800000u) {
    bits = 0x7fu;
  } else if (bits < 0x3c800000u) {  // 2^-6, the smallest normal one
    bits = __float_as_uint(__uint_as_float(bits) + 16384.0f) - 0x46800000u;
  } else {
    bits = (bits + 0xc407ffffu + ((bits >> 20) & 1u)) >> 20;
  }
  return static_cast<unsigned char>(bits | sign >> 24);
}

// Which of the arrays this block works at, and where it begins there.
__device__ int found(const int* first_block, int count) {
  int k = 0;
  while (k + 1 < count && first_block[k + 1] <= static_cast<int>(blockIdx.x)) ++k;
  return k;
}

__device__ float mean_of(float sum, float divisor, float factor) {
  return factor != 0.0f ? sum * factor : sum / divisor;
}

}  // namespace

// to[k] = also[k] = from[k]
extern "C" __global__ void __launch_bounds__(kThreads) zerocompile_cast(const __grid_constant__ CastArguments casts) {
  const int k = found(casts.first_block, casts.count);
  const long long numel = casts.numel[k], start = (blockIdx.x - casts.first_block[k]) * kPerBlock;
  const float* from = casts.from[k] + start;
  unsigned short *to = casts.to[k] + start, *also = casts.also[k] + start;
  if (start + kPerBlock > numel) {  // the array's end
#pragma unroll 1
    for (long long i = threadIdx.x; i < numel - start; i += kThreads) to[i] = also[i] = narrowed(from[i]);
    return;
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int i = (round * kThreads + threadIdx.x) * kVector;
    const float4* in = reinterpret_cast<const float4*>(from + i);
    const float4 low = in[0], high = in[1];
    Eight out;
    out.narrow[0] = narrowed(low.x), out.narrow[1] = narrowed(low.y);
    out.narrow[2] = narrowed(low.z), out.narrow[3] = narrowed(low.w);
    out.narrow[4] = narrowed(high.x), out.narrow[5] = narrowed(high.y);
    out.narrow[6] = narrowed(high.z), out.narrow[7] = narrowed(high.w);
    *reinterpret_cast<uint4*>(to + i) = out.bits;
    *reinterpret_cast<uint4*>(also + i) = out.bits;
  }
}

// to[k] = also[k] = from[k] * scale[k]
extern "C" __global__ void __launch_bounds__(kThreads)
    zerocompile_float8(const __grid_constant__ Float8Arguments casts) {
  const int k = found(casts.first_block, casts.count), through = casts.through[k];
  const long long numel = casts.numel[k], start = (blockIdx.x - casts.first_block[k]) * kPerBlock;
  const float* from = casts.from[k] + start;
  const float scale = *casts.scale[k];
  unsigned char *to = casts.to[k] + start, *also = casts.also[k] + start;
  if (start + kPerBlock > numel) {  // the array's end
#pragma unroll 1
    for (long long i = threadIdx.x; i < numel - start; i += kThreads) {
      to[i] = also[i] = float8_of(__fmul_rn(rounded(from[i], through), scale));
    }
    return;
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int i = (round * kThreads + threadIdx.x) * kVector;
    union {
      uint2 bits;
      unsigned char narrow[kVector];
    } out;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = reinterpret_cast<const float4*>(from + i)[half];
      unsigned char* narrow = out.narrow + 4 * half;
      narrow[0] = float8_of(__fmul_rn(rounded(four.x, through), scale));
      narrow[1] = float8_of(__fmul_rn(rounded(four.y, through), scale));
      narrow[2] = float8_of(__fmul_rn(rounded(four.z, through), scale));
      narrow[3] = float8_of(__fmul_rn(rounded(four.w, through), scale));
    }
    *reinterpret_cast<uint2*>(to + i) = out.bits;
    *reinterpret_cast<uint2*>(also + i) = out.bits;
  }
}

// to[k] = (own[k] + the sum over peers of received[peer][place[k] ...]) / divisor, added to what is there if adds[k]
extern "C" __global__ void __launch_bounds__(kThreads) zerocompile_sum(const __grid_constant__ SumArguments sums) {
  const int k = found(sums.first_block, sums.count);
  const long long numel = sums.numel[k], start = (blockIdx.x - sums.first_block[k]) * kPerBlock;
  const long long place = sums.place[k] + start;
  const unsigned short* own = sums.own[k] + start;
  float* to = sums.to[k] + start;
  const bool adds = sums.adds[k];
  if (start + kPerBlock > numel) {  // the array's end
#pragma unroll 1
    for (long long i = threadIdx.x; i < numel - start; i += kThreads) {
      float sum = widened(own[i]);
#pragma unroll 1
      for (int peer = 0; peer < sums.peers; ++peer) sum += widened(sums.received[peer][place + i]);
      const float mean = mean_of(sum, sums.divisor, sums.factor);
      to[i] = adds ? to[i] + mean : mean;
    }
    return;
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int i = (round * kThreads + threadIdx.x) * kVector;
    Eight part;
    part.bits = *reinterpret_cast<const uint4*>(own + i);
    float sum[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] = widened(part.narrow[j]);
#pragma unroll 1
    for (int peer = 0; peer < sums.peers; ++peer) {
      part.bits = *reinterpret_cast<const uint4*>(sums.received[peer] + place + i);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += widened(part.narrow[j]);
    }
    float4* out = reinterpret_cast<float4*>(to + i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* four = sum + 4 * half;
      float4 mean;
      mean.x = mean_of(four[0], sums.divisor, sums.factor), mean.y = mean_of(four[1], sums.divisor, sums.factor);
      mean.z = mean_of(four[2], sums.divisor, sums.factor), mean.w = mean_of(four[3], sums.divisor, sums.factor);
      if (adds) {
        const float4 before = out[half];
        mean.x += before.x, mean.y += before.y, mean.z += before.z, mean.w += before.w;
      }
      out[half] = mean;
    }
  }
}

namespace {

constexpr unsigned kSpins = 256;                       // between looks at the host's memory, which is far
constexpr unsigned long long kLongestPush = 20000000;  // nanoseconds

__device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// What was written before on this device is seen by whoever takes the word.
__device__ void give(unsigned long long* place, unsigned long long word) {
  asm volatile("st.release.sys.u64 [%0], %1;" : : "l"(place), "l"(word) : "memory");
}

__device__ unsigned long long take(const unsigned long long* place) {
  unsigned long long word;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(word) : "l"(place) : "memory");
  return word;
}

// Whether a word is of an earlier barrier than another one. Numbers wrap around.
__device__ bool is_earlier(unsigned long long word, unsigned long long than) {
  return static_cast<int>(static_cast<unsigned>(word >> 32) - static_cast<unsigned>(than >> 32)) < 0;
}

// Whether the wait goes on: not if the host has ended it. A host that does not end it in time does not run any more.
__device__ bool waits_on(const BarrierArguments& barrier, unsigned spins, unsigned long long start) {
  if (spins % kSpins != 0) return true;
  if (now() - start > barrier.timeout) asm volatile("trap;");
  return barrier.words[kEnded] == 0;
}

// Whether another rank is in the same barrier as this one. It is waited for until it is in one.
__device__ bool meets(const BarrierArguments& barrier, int peer) {
  const auto word = static_cast<unsigned long long>(barrier.number) << 32 | static_cast<unsigned>(barrier.unit);
  const int half = barrier.half * barrier.world;
  give(barrier.pads[peer] + half + barrier.rank, word);
  const unsigned long long* place = barrier.pads[barrier.rank] + half + peer;
  const unsigned long long start = now();
  unsigned long long found = take(place);
  for (unsigned spins = 1; is_earlier(found, word); ++spins) {
    if (!waits_on(barrier, spins, start)) return false;
    found = take(place);
  }
  if (found != word) barrier.words[kOther] = static_cast<long long>(found);
  return found == word;
}

// See [Note: pulls after pushes] in peers.h.
__device__ void await_pushes(volatile int* state) {
  const unsigned long long start = now();
  while (state[kPushes] != 0 && state[kGaveUp] == 0) {
    if (now() - start > kLongestPush) state[kGaveUp] = 1;
  }
}

}  // namespace

// Thread k signals to rank k, and waits for its signal.
extern "C" __global__ void __launch_bounds__(kThreads)
    zerocompile_barrier(const __grid_constant__ BarrierArguments barrier) {
  if (__syncthreads_or(barrier.state[kNotPassed])) return;
  const int peer = threadIdx.x;
  if (peer == 0) {
    barrier.words[kUnit] = barrier.unit;
    __threadfence_system();
    barrier.words[kEntered] = barrier.number;
    if (barrier.after_pushes) await_pushes(barrier.state);
  }
  __syncthreads();
  const bool met = peer >= barrier.world || peer == barrier.rank || meets(barrier, peer);
  const bool all = __syncthreads_and(met);
  if (peer != 0) return;
  if (all) barrier.words[kPassed] = barrier.number;
  else barrier.state[kNotPassed] = 1;
}
