// What the kernels (kernels.cu) and the host agree on. NVRTC compiles it, too, so it includes nothing.
#pragma once

namespace zerocompile {

constexpr int kKernelThreads = 256, kKernelVector = 8, kKernelRounds = 2;
constexpr long long kPerBlock = kKernelThreads * kKernelVector * kKernelRounds;  // elements
constexpr int kMostArrays = 32;  // of one launch
constexpr int kMostPeers = 15;   // that a sum can take

struct CastArguments {
  int count, first_block[kMostArrays];
  long long numel[kMostArrays];
  const float* from[kMostArrays];
  unsigned short* to[kMostArrays];
  unsigned short* also[kMostArrays];
};

struct Float8Arguments {
  int count, first_block[kMostArrays], through[kMostArrays];
  long long numel[kMostArrays];
  const float* from[kMostArrays];
  const float* scale[kMostArrays];
  unsigned char* to[kMostArrays];
  unsigned char* also[kMostArrays];
};

struct SumArguments {
  int count, peers, first_block[kMostArrays];
  float divisor, factor;  // `factor`: its inverse if that is exact, else 0
  long long numel[kMostArrays], place[kMostArrays];
  const unsigned short* own[kMostArrays];
  float* to[kMostArrays];
  bool adds[kMostArrays];
  const unsigned short* received[kMostPeers];
};

// See [Note: device barriers] in peers.h.
struct BarrierArguments {
  unsigned long long* const* pads;  // [world], each of [2, world] words in the memory of that rank's device
  volatile long long* words;        // in the host's memory, by `BarrierWord`
  volatile int* state;              // in this device's memory, by `BarrierState`
  long long number, unit;
  unsigned long long timeout;  // nanoseconds
  int rank, world, half;       // `half`: of the pads, in turn
  bool after_pushes;
};

enum BarrierWord : int { kEnded, kEntered, kPassed, kUnit, kOther, kBarrierWords };
// Whether this rank pushes; whether some barrier has given up to wait for that; whether some barrier was not passed.
enum BarrierState : int { kPushes, kGaveUp, kNotPassed, kBarrierStates };

}  // namespace zerocompile
