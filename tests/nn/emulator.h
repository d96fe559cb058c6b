// Runs a kernel's CUDA C++ on a CPU, slowly, and stricter than a GPU would. Each thread of a block is a fiber with a stack
// of its own, which runs until it meets others; then another one is drawn, by chance. So a barrier that is missing shows,
// as different results in different orders:
//
//   - shared memory begins as not-a-number, and what cp.async was asked to bring is not-a-number until it was waited for;
//   - a warp's lanes are not in step with one another, except where they exchange values or wait;
//   - what is copied or streamed must lie at multiples of its size.
//
// Blocks run one after the other. Inline PTX is replaced by functions of the namespace ptx before this is compiled
// (emulated.py), which also says how many bytes of shared memory there are.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static uint3 threadIdx, blockIdx, gridDim;
alignas(16) static char memory[SHARED];  // of the one block that runs

namespace emulator {

constexpr size_t STACK = 256 * 1024;
constexpr int WARP = 32;
enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Copy { char* to; const char* from; int bytes; };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  State state;
  std::vector<Copy> sent;
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned running;
static uint32_t offered[1024][6];  // by each thread, in an exchange
static std::string failure;
static void (*kernel)(void**);
static void** arguments;
static uint64_t chance;

static unsigned draw(unsigned below) {  // xorshift
  chance ^= chance << 13; chance ^= chance >> 7; chance ^= chance << 17;
  return unsigned(chance >> 11) % below;
}
static void fail(const char* what) {
  if (failure.empty()) failure = std::string(what) + " in thread " + std::to_string(running) + " of block " +
                                 std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y);
}
static void aligned(const void* place, int bytes, const char* what) { if ((uintptr_t)place % bytes) fail(what); }

static void wait(State state) {
  const unsigned me = running;
  fibers[me].state = state;
  swapcontext(&fibers[me].context, &scheduler);
}
static void entry() {
  kernel(arguments);
  if (!fibers[running].sent.empty()) fail("a copy was never waited for");
  fibers[running].state = DONE;
}

// Those of a group that waits for all of its own go on together.
static bool release(unsigned from, unsigned to, State state) {
  unsigned waiting = 0, alive = 0;
  for (unsigned t = from; t < to; ++t) { alive += fibers[t].state != DONE; waiting += fibers[t].state == state; }
  if (!waiting || waiting != alive) return false;
  for (unsigned t = from; t < to; ++t) if (fibers[t].state == state) fibers[t].state = READY;
  return true;
}

static void run_block(unsigned threads) {
  memset(memory, 0xff, sizeof memory);
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(STACK);
    fiber.sent.clear();
    fiber.state = READY;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, entry, 0);
  }
  unsigned favourite = 0;  // a warp that is chosen as long as it can go on: others fall far behind
  std::vector<unsigned> ready, favoured;
  while (failure.empty()) {
    ready.clear(); favoured.clear();
    for (unsigned t = 0; t < threads; ++t)
      if (fibers[t].state == READY) { ready.push_back(t); if (t / WARP == favourite) favoured.push_back(t); }
    if (ready.empty()) {
      bool any = release(0, threads, AT_BLOCK), over = true;
      for (unsigned w = 0; w < threads; w += WARP) any |= release(w, w + WARP < threads ? w + WARP : threads, AT_WARP);
      for (const Fiber& fiber : fibers) over &= fiber.state == DONE;
      if (over) return;
      if (!any) fail("threads wait for others that never come");
      continue;
    }
    if (favoured.empty()) { favourite = ready[draw(ready.size())] / WARP; continue; }
    // A round of the warp, from a lane by chance; then its own meeting, if all are there.
    const unsigned start = draw(favoured.size());
    for (size_t i = 0; i < favoured.size(); ++i) {
      running = favoured[(start + i) % favoured.size()];
      threadIdx = {running, 0, 0};
      swapcontext(&scheduler, &fibers[running].context);
    }
    const unsigned first = favourite * WARP;
    release(first, first + WARP < threads ? first + WARP : threads, AT_WARP);
    if (draw(8) == 0) favourite = draw((threads + WARP - 1) / WARP);
  }
}

template <typename... A, size_t... I> static void call(void (*f)(A...), void** p, std::index_sequence<I...>) {
  f(*(std::remove_const_t<A>*)p[I]...);
}
template <typename... A> static void call(void (*f)(A...), void** p) { call(f, p, std::index_sequence_for<A...>()); }

// -> what went wrong, or an empty text
static const char* launch(void (*f)(void**), const unsigned* grid, unsigned threads, void** p, uint64_t seed) {
  kernel = f; arguments = p; chance = 0x9e3779b97f4a7c15ull ^ (seed * 0xbf58476d1ce4e5b9ull + 1);
  failure.clear();
  gridDim = {grid[0], grid[1], grid[2]};
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0] && failure.empty(); ++x) { blockIdx = {x, y, z}; run_block(threads); }
  return failure.c_str();
}

}  // namespace emulator

// ---------------------------------------------------------------------------------------------------- what kernels call

static inline void __syncthreads() { emulator::wait(emulator::AT_BLOCK); }
static inline void __syncwarp() { emulator::wait(emulator::AT_WARP); }
static inline float __uint_as_float(unsigned v) { float r; memcpy(&r, &v, 4); return r; }
static inline unsigned __float_as_uint(float v) { unsigned r; memcpy(&r, &v, 4); return r; }
static inline float exchange(unsigned mask, float value, unsigned from) {  // what another lane of the warp offers
  if (mask != 0xffffffffu) emulator::fail("an exchange of a part of a warp");
  emulator::offered[emulator::running][0] = __float_as_uint(value);
  __syncwarp();
  const float found = __uint_as_float(emulator::offered[from][0]);
  __syncwarp();
  return found;
}
static inline float __shfl_xor_sync(unsigned mask, float value, int bits) { return exchange(mask, value, emulator::running ^ bits); }
static inline float __shfl_up_sync(unsigned mask, float value, unsigned lanes) {  // one's own, where there is none
  const unsigned me = emulator::running;
  return exchange(mask, value, me % emulator::WARP < lanes ? me : me - lanes);
}
static inline float __shfl_down_sync(unsigned mask, float value, unsigned lanes) {
  const unsigned me = emulator::running;
  return exchange(mask, value, me % emulator::WARP + lanes < emulator::WARP ? me + lanes : me);
}
static inline unsigned atomicInc(unsigned* place, unsigned last) {
  const unsigned before = *place;
  *place = before >= last ? 0 : before + 1;
  return before;
}
static inline void __threadfence() {}
template <typename T> static inline T __ldcs(const T* p) { emulator::aligned(p, sizeof(T), "a load that is not aligned"); return *p; }
template <typename T> static inline T __ldcg(const T* p) { return *p; }
template <typename T> static inline void __stcs(T* p, T v) { emulator::aligned(p, sizeof(T), "a store that is not aligned"); *p = v; }
static inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline size_t __cvta_generic_to_shared(const void* p) {
  const size_t place = (const char*)p - memory;
  if (place >= SHARED) emulator::fail("an address outside of shared memory");
  return place;
}

namespace ptx {

static inline void ex2_approx_ftz_f32(float& r, float v) { r = std::exp2(v); }
static inline void lg2_approx_ftz_f32(float& r, float v) { r = std::log2(v); }
static inline void rcp_approx_ftz_f32(float& r, float v) { r = 1.0f / v; }
static inline void cvt_rn_bf16_f32(unsigned short& r, float v) {  // to the nearest, of two the even one
  const unsigned bits = __float_as_uint(v);
  r = std::isnan(v) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline void cvt_rn_bf16x2_f32(unsigned& r, float upper, float lower) {
  unsigned short a, b;
  cvt_rn_bf16_f32(a, upper);
  cvt_rn_bf16_f32(b, lower);
  r = (unsigned)a << 16 | b;
}
static inline void copy(unsigned place, const void* from, int bytes) {
  char* to = memory + place;
  emulator::aligned(from, bytes, "a copy from where it is not aligned");
  emulator::aligned(to, bytes, "a copy to where it is not aligned");
  if (place + bytes > SHARED) return emulator::fail("a copy beyond shared memory");
  memset(to, 0xff, bytes);
  emulator::fibers[emulator::running].sent.push_back({to, (const char*)from, bytes});
}
static inline void cp_async_cg_shared_global(unsigned place, const void* from, int bytes) { copy(place, from, bytes); }
static inline void cp_async_ca_shared_global(unsigned place, const void* from, int bytes) { copy(place, from, bytes); }
// Four matrices of 8 x 8 from rows that the lanes name, eight lanes a matrix; a lane has two neighbours of each.
static inline void matrices(unsigned* const (&r)[4], unsigned place, bool turned) {
  const unsigned me = emulator::running, lane = me % emulator::WARP, first = me - lane;
  emulator::aligned(memory + place, 16, "a row of a matrix that is not aligned");
  if (place + 16 > SHARED) return emulator::fail("a matrix beyond shared memory");
  emulator::offered[me][0] = place;
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    unsigned short found[2];
    for (int k = 0; k < 2; ++k) {
      const unsigned row = turned ? lane % 4 * 2 + k : lane / 4, column = turned ? lane / 4 : lane % 4 * 2 + k;
      memcpy(&found[k], memory + emulator::offered[first + 8 * i + row][0] + 2 * column, 2);
    }
    *r[i] = (unsigned)found[1] << 16 | found[0];
  }
  __syncwarp();
}
static inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned place) {
  unsigned* const r[4] = {&a, &b, &c, &d};
  matrices(r, place, false);
}
static inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned place) {
  unsigned* const r[4] = {&a, &b, &c, &d};
  matrices(r, place, true);
}
// d (16 x 8) = a (16 x 16) b (16 x 8) + c, spread over a warp as the matrix unit has it.
static inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
    float c0, float c1, float c2, float c3) {
  const unsigned me = emulator::running, lane = me % emulator::WARP, first = me - lane;
  const unsigned given[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(emulator::offered[me], given, sizeof given);
  __syncwarp();
  const auto half = [](unsigned v, int k) { return __uint_as_float(k ? v & 0xffff0000u : v << 16); };
  float sums[4] = {c0, c1, c2, c3};
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      const unsigned column = lane % 4 * 2 + i % 2, of = k % 8 / 2;
      const float a = half(emulator::offered[first + lane / 4 * 4 + of][i / 2 + k / 8 * 2], k % 2);
      sums[i] += a * half(emulator::offered[first + column * 4 + of][4 + k / 8], k % 2);
    }
  __syncwarp();
  d0 = sums[0]; d1 = sums[1]; d2 = sums[2]; d3 = sums[3];
}
static inline void cp_async_wait_all() {
  for (const emulator::Copy& each : emulator::fibers[emulator::running].sent) memcpy(each.to, each.from, each.bytes);
  emulator::fibers[emulator::running].sent.clear();
}

}  // namespace ptx
