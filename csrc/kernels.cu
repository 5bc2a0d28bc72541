// The device's half of kernels.h: three passes over memory that torch would make in three to seven, and a barrier that
// the host can end. bfloat16 and float8 are their bits, so no header is needed and the code runs on every GPU that
// torch runs on.
// kernels.ptx is made from this file by
//     nvcc -ptx -arch=compute_70 -o kernels.ptx kernels.cu
// or NVRTC with the same target (that of CUDA 11.8, whose PTX older drivers read, too). It begins with the SHA-256 of
// this file.

namespace {

constexpr int kThreads = 256, kVector = 8, kRounds = 2;
constexpr long long kPerBlock = kThreads * kVector * kRounds;  // elements: the same number in kernels.cpp
constexpr int kMost = 32, kPeers = 15;                         // as in kernels.cpp

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

struct Casts {
  int count, first_block[kMost];
  long long numel[kMost];
  const float* from[kMost];
  unsigned short* to[kMost];
  unsigned short* also[kMost];
};

// to[k] = also[k] = from[k]
extern "C" __global__ void __launch_bounds__(kThreads) zerocompile_cast(const __grid_constant__ Casts casts) {
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

struct Float8Casts {
  int count, first_block[kMost], through[kMost];
  long long numel[kMost];
  const float* from[kMost];
  const float* scale[kMost];
  unsigned char* to[kMost];
  unsigned char* also[kMost];
};

// to[k] = also[k] = from[k] * scale[k]
extern "C" __global__ void __launch_bounds__(kThreads) zerocompile_float8(const __grid_constant__ Float8Casts casts) {
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

struct Sums {
  int count, peers, first_block[kMost];
  float divisor, factor;  // `factor`: its inverse if that is exact, else 0
  long long numel[kMost], place[kMost];
  const unsigned short* own[kMost];
  float* to[kMost];
  bool adds[kMost];
  const unsigned short* received[kPeers];
};

// to[k] = (own[k] + the sum over peers of received[peer][place[k] ...]) / divisor, added to what is there if adds[k]
extern "C" __global__ void __launch_bounds__(kThreads) zerocompile_sum(const __grid_constant__ Sums sums) {
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

// See [Note: device barriers] in peers.h. The words are in the host's memory.
struct Barrier {
  unsigned* const* pads;  // [world], each of [world] words in the memory of that rank's device
  volatile long long* words;
  volatile int* pushing;  // in this device's memory; null: nothing is waited for
  long long number, unit;
  unsigned long long timeout;  // nanoseconds
  int rank, world;
};

namespace {

constexpr int kEnded = 0, kEntered = 1, kPassed = 2, kUnit = 3;  // as in runtime/peer_memory.py
constexpr unsigned kSpins = 256;                                 // between looks at the host's memory, which is far
constexpr int kPushes = 0, kGaveUp = 1;                          // of `pushing`
constexpr unsigned long long kLongestPush = 20000000;            // nanoseconds

__device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// What was written before on this device is seen by whoever takes the signal.
__device__ unsigned give(unsigned* word) {
  unsigned found;
  asm volatile("atom.release.sys.cas.b32 %0, [%1], 0, 1;" : "=r"(found) : "l"(word) : "memory");
  return found;
}

__device__ unsigned take(unsigned* word) {
  unsigned found;
  asm volatile("atom.acquire.sys.cas.b32 %0, [%1], 1, 0;" : "=r"(found) : "l"(word) : "memory");
  return found;
}

// Whether the wait goes on: not if the host has ended it. A host that does not end it in time does not run any more.
__device__ bool waits_on(const Barrier& barrier, unsigned spins, unsigned long long start) {
  if (spins % kSpins != 0) return true;
  if (now() - start > barrier.timeout) asm volatile("trap;");
  return barrier.words[kEnded] == 0;
}

// See [Note: pulls after pushes] in peers.h.
__device__ void await_pushes(volatile int* pushing) {
  const unsigned long long start = now();
  while (pushing[kPushes] != 0 && pushing[kGaveUp] == 0) {
    if (now() - start > kLongestPush) pushing[kGaveUp] = 1;
  }
}

}  // namespace

// Thread k signals to rank k, and waits for its signal.
extern "C" __global__ void __launch_bounds__(kThreads) zerocompile_barrier(const __grid_constant__ Barrier barrier) {
  const int peer = threadIdx.x;
  if (peer == 0) {
    barrier.words[kUnit] = barrier.unit;
    __threadfence_system();
    barrier.words[kEntered] = barrier.number;
    if (barrier.pushing != nullptr) await_pushes(barrier.pushing);
  }
  __syncthreads();
  bool met = true;
  if (peer < barrier.world && peer != barrier.rank) {
    const unsigned long long start = now();
    for (unsigned spins = 1; met && give(barrier.pads[peer] + barrier.rank) != 0; ++spins) {
      met = waits_on(barrier, spins, start);
    }
    for (unsigned spins = 1; met && take(barrier.pads[barrier.rank] + peer) != 1; ++spins) {
      met = waits_on(barrier, spins, start);
    }
  }
  if (__syncthreads_and(met) && peer == 0) barrier.words[kPassed] = barrier.number;
}
