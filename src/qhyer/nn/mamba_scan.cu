// The selective scan, forward and backward: the formulas of mamba_triton.py, laid out by hand.
//
// A thread has two neighbouring channels of a sequence with all N states of both, so that sums over states need no
// other thread. A block has up to 512 channels of one sequence; B and C lie in shared memory, where its threads read
// the same numbers. Sums over channels (dB, dC) meet first in a warp, then in the block, in a fixed order.
//
// Four warps share a scheduler (more would need threads of fewer than 128 registers), so what a warp waits for counts as
// much as what it computes. Each sends for what it will read a few steps later (cp.async), and meets the others only where
// B, C and sums are exchanged. A, which never changes, lies in shared memory backward, and a sum over the warp begins with
// the first four states that are there. Triton's kernel takes 255 registers, for two warps.
//
// Backward a thread has its states, four after another, in an order of its own: what it keeps of a sum over the warp is
// always first, and nothing has to be selected. A is read in this order, and B and C lie there in all four.
//
// Given by whoever compiles it: X_T, DT_T, BC_T, Z_T, DY_T, DBC_T (float or bf16), N (4, 8 or 16), SOFTPLUS, GATE (0 or 1),
// THREADS of a block, STAGE and STEPS: how many steps are sent for at a time, and lie between two meetings; and the bytes of
// shared memory that a block is given.

#define WARPS (THREADS / 32)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define ALL 0xffffffffu

struct bf16 { unsigned short bits; };

static __device__ __forceinline__ float ex2(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
static __device__ __forceinline__ float lg2(float v) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
static __device__ __forceinline__ float rcp(float v) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
static __device__ __forceinline__ float softplus(float v) { return v > 20.0f ? v : lg2(1.0f + ex2(v * LOG2E)) * LN2; }
static __device__ __forceinline__ float sigmoid(float v) { return rcp(1.0f + ex2(-v * LOG2E)); }

static __device__ __forceinline__ float one(const float* p) { return *p; }
static __device__ __forceinline__ float one(const bf16* p) { return __uint_as_float((unsigned)p->bits << 16); }

// Two neighbours.
static __device__ __forceinline__ float2 two(const float* p) { return *(const float2*)p; }
static __device__ __forceinline__ float2 two(const bf16* p) {
  const unsigned v = *(const unsigned*)p;
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
static __device__ __forceinline__ void put(float* p, float a, float b) { *(float2*)p = make_float2(a, b); }
static __device__ __forceinline__ void put(bf16* p, float a, float b) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  *(unsigned*)p = r;
}
static __device__ __forceinline__ void put(float* p, float a) { *p = a; }
static __device__ __forceinline__ void put(bf16* p, float a) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(p->bits) : "f"(a));
}
static __device__ __forceinline__ int lane2() { return 2 * (threadIdx.x % 32); }  // of a warp's channels, a thread's first
static __device__ __forceinline__ void four(float (&v)[4], const float* p) {
  const float4 q = *(const float4*)p;
  v[0] = q.x; v[1] = q.y; v[2] = q.z; v[3] = q.w;
}

// ---------------------------------------------------------------------------------------------------- inputs

// Of a few steps, in shared memory: all that has channels, of a warp's. Each sends for its own, and waits for no other.
struct Seen {
  X_T x[STAGE][64];
  DT_T dt[STAGE][64];
  Z_T z[STAGE][64];
};
struct SeenBack : Seen {
  DY_T dy[STAGE][64];
  float between[STAGE][64];
};

// What a warp reads in memory.
struct Given {
  const X_T* x; const DT_T* dt; const Z_T* z; const DY_T* dy; const float* between; const BC_T* B; const BC_T* C;
  int x_row, dt_row, z_row, dy_row, E, B_row, C_row, L;
};

// Sends for rows from `first` on, 16 bytes at a time.
template <typename T> static __device__ __forceinline__ void send(T (*to)[64], const T* from, int row, int first, int L) {
  constexpr int CHUNK = 16 / sizeof(T), CHUNKS = 64 / CHUNK;
#pragma unroll
  for (int i = 0; i < STAGE * CHUNKS; i += 32) {
    const int at = i + threadIdx.x % 32, r = at / CHUNKS, c = at % CHUNKS * CHUNK;
    if (at < STAGE * CHUNKS && first + r < L) {
      const unsigned place = (unsigned)__cvta_generic_to_shared(&to[r][c]);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from + ((first + r) * row + c)) : "memory");
    }
  }
}
static __device__ __forceinline__ void arrived() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

template <bool PASSED> static __device__ __forceinline__ void send_all(SeenBack& to, const Given& g, int first) {
  send_all<PASSED>((Seen&)to, g, first);
  send(to.dy, g.dy, g.dy_row, first, g.L);
  if constexpr (PASSED) send(to.between, g.between, g.E, first, g.L);
}
template <bool PASSED> static __device__ __forceinline__ void send_all(Seen& to, const Given& g, int first) {
  send(to.x, g.x, g.x_row, first, g.L);
  send(to.dt, g.dt, g.dt_row, first, g.L);
  if constexpr (GATE) send(to.z, g.z, g.z_row, first, g.L);
}

// B and C of STEPS steps as rows [B; C], for the block: four bytes at a time, which whoever sent for them makes float. In
// several orders, whose n-th state is n ^ order.
template <int ORDERS> struct Rows {
  static constexpr int PAIR = 4 / sizeof(BC_T), ALL_OF_THEM = STEPS * 2 * N / PAIR;
  unsigned raw[ALL_OF_THEM];
  float rows[2][STEPS][ORDERS][2 * N];
  __device__ __forceinline__ void send(const Given& g, int first) {
#pragma unroll
    for (int from = 0; from < ALL_OF_THEM; from += THREADS) {
      const int i = from + threadIdx.x, t = first + PAIR * i / (2 * N), n = PAIR * i % (2 * N);
      if (i < ALL_OF_THEM && t < g.L) {
        const BC_T* p = n < N ? g.B + (t * g.B_row + n) : g.C + (t * g.C_row + n - N);
        const unsigned place = (unsigned)__cvta_generic_to_shared(raw + i);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place), "l"(p) : "memory");
      }
    }
  }
  __device__ __forceinline__ void make(int which) {
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int from = 0; from < ALL_OF_THEM; from += THREADS) {
      const int i = from + threadIdx.x;
      if (i < ALL_OF_THEM) {
        const BC_T* p = (const BC_T*)(raw + i);
#pragma unroll
        for (int k = 0; k < PAIR; ++k) {
          const float v = one(p + k);
          const int t = PAIR * i / (2 * N), n = PAIR * i % (2 * N) + k;
#pragma unroll
          for (int order = 0; order < ORDERS; ++order) rows[which][t][order][n ^ order] = v;
        }
      }
    }
  }
};

// All steps in turn, forward or backward in time: step(inputs, its place there, its B and C, its place among the sums), while
// the next few are on their way. The block meets every STEPS steps: then after(the first, how many, which half of the sums).
template <bool BACKWARD, typename Inputs, int ORDERS, typename Step, typename After>
static __device__ __forceinline__ void walk(
    Inputs (&seen)[2], Rows<ORDERS>& there, const Given& g, int order, Step step, After after) {
  constexpr int EACH = STEPS / STAGE;  // stages between two meetings
  const int stages = (g.L + STAGE - 1) / STAGE, meetings = (stages + EACH - 1) / EACH;
  auto place = [&](int m) { return BACKWARD ? meetings - 1 - m : m; };
  auto met = [&](int m) { after(place(m) * STEPS, min(STEPS, g.L - place(m) * STEPS), m & 1); };
  send_all<BACKWARD>(seen[BACKWARD ? (stages - 1) & 1 : 0], g, BACKWARD ? (stages - 1) * STAGE : 0);
  there.send(g, place(0) * STEPS);
  there.make(0);
#pragma unroll 1
  for (int m = 0; m < meetings; ++m) {
    const int low = place(m) * EACH, count = min(EACH, stages - low);
    __syncthreads();  // B and C are there, and sums; those of the meeting before last have been read
    if (m > 0) met(m - 1);
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const int stage = low + (BACKWARD ? count - 1 - k : k), next = BACKWARD ? stage - 1 : stage + 1;
      const int steps = min(STAGE, g.L - stage * STAGE);
      arrived();
      if (BACKWARD ? next >= 0 : next < stages) send_all<BACKWARD>(seen[next & 1], g, next * STAGE);
      if (k == count - 1 && m + 1 < meetings) there.send(g, place(m + 1) * STEPS);
#pragma unroll 1
      for (int i = 0; i < steps; ++i) {
        const int s = BACKWARD ? steps - 1 - i : i, at = (stage - low) * STAGE + s;
        step(seen[stage & 1], s, there.rows[m & 1][at][order], (m & 1) * STEPS + at);
      }
    }
    if (m + 1 < meetings) there.make((m + 1) & 1);
  }
  __syncthreads();
  met(meetings - 1);
}

// What is made of a step's inputs: x, Delta; forward g = silu(z); backward g = dy silu(z), the gradient by what the gate
// multiplies, and k = dy silu'(z), which times what the gate multiplies is dz.
struct Ready {
  float2 x, d, g, k;
  __device__ __forceinline__ void common(const Seen& from, int s, float2 bias) {
    x = two(&from.x[s][lane2()]);
    d = two(&from.dt[s][lane2()]);
    if constexpr (SOFTPLUS) { d.x = softplus(d.x + bias.x); d.y = softplus(d.y + bias.y); }
  }
  __device__ __forceinline__ void make(const Seen& from, int s, float2 bias) {
    common(from, s, bias);
    if constexpr (GATE) {
      const float2 z = two(&from.z[s][lane2()]);
      g.x = z.x * sigmoid(z.x); g.y = z.y * sigmoid(z.y);
    }
  }
  __device__ __forceinline__ void make(const SeenBack& from, int s, float2 bias) {
    common(from, s, bias);
    g = two(&from.dy[s][lane2()]);
    if constexpr (GATE) {
      const float2 z = two(&from.z[s][lane2()]);
      const float sx = sigmoid(z.x), sy = sigmoid(z.y);
      k.x = g.x * sx * (1.0f + z.x * (1.0f - sx)); k.y = g.y * sy * (1.0f + z.y * (1.0f - sy));
      g.x *= z.x * sx; g.y *= z.y * sy;
    }
  }
};

// ---------------------------------------------------------------------------------------------------- sums over channels

// Sums over the warp of SIZE values a lane: half of the values go to each half of the lanes, and so on; once a lane has
// one value left, it is added up over the lanes that have the same. BIT: of the lanes' number, that halves them first.
template <int SIZE, int BIT, int M> static __device__ __forceinline__ void halve(float (&v)[M], int lane) {
  if constexpr (BIT > 0) {
    if constexpr (SIZE > 1) {
      const bool upper = lane & BIT;
#pragma unroll
      for (int i = 0; i < SIZE / 2; ++i) {
        const float keep = upper ? v[i + SIZE / 2] : v[i], give = upper ? v[i] : v[i + SIZE / 2];
        v[i] = keep + __shfl_xor_sync(ALL, give, BIT);
      }
    } else {
      v[0] += __shfl_xor_sync(ALL, v[0], BIT);
    }
    halve<(SIZE > 1 ? SIZE / 2 : 1), BIT / 2>(v, lane);
  }
}

// v[n] <- v[n ^ order]
static __device__ __forceinline__ void swap_if(bool so, float& a, float& b) {
  const float c = so ? b : a;
  b = so ? a : b;
  a = c;
}
static __device__ __forceinline__ void reorder(float (&v)[4], int order) {
  swap_if(order & 1, v[0], v[1]);
  swap_if(order & 1, v[2], v[3]);
  swap_if(order & 2, v[0], v[2]);
  swap_if(order & 2, v[1], v[3]);
}

// Over the warp, of all states: four after another, as they come, then what is left of each four. A lane ends with the sum
// of `state`, as do the other lanes that differ in the bits below N's; one of these leads.
struct Sums {
  float v[N / 4];
  // Of four, a lane is given those first that it keeps (its order): half of them, then half of these.
  static __device__ __forceinline__ int order(int lane) { return lane >> 3 & 3; }
  __device__ __forceinline__ void four_more(int q, float (&d)[4]) {
    d[0] += __shfl_xor_sync(ALL, d[2], 16);
    d[1] += __shfl_xor_sync(ALL, d[3], 16);
    v[q] = d[0] + __shfl_xor_sync(ALL, d[1], 8);
  }
  __device__ __forceinline__ float all(int lane) { halve<N / 4, 4>(v, lane); return v[0]; }
  static __device__ __forceinline__ int state(int lane) { return (lane & 7) / (32 / N) * 4 + order(lane); }
  static __device__ __forceinline__ bool leads(int lane) { return (lane & (32 / N - 1)) == 0; }
};

// The sums of all warps, of `count` steps, into rows of N.
static __device__ __forceinline__ void meet(DBC_T* to, const float (*sums)[WARPS][N], int count, int row) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count * N; i += THREADS) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += sums[i / N][w][i % N];
    put(to + ((i / N) * row + i % N), total);
  }
}

// ---------------------------------------------------------------------------------------------------- the kernels

extern __shared__ __align__(16) char memory[];

struct Forward {
  Seen seen[WARPS][2];
  Rows<1> rows;
};
struct Backward {
  SeenBack seen[WARPS][2];
  Rows<4> rows;
  float4 a[2 * N / 4][THREADS];
  float sums[2 * STEPS][WARPS][N];
};
static_assert(sizeof(Forward) <= FORWARD_BYTES && sizeof(Backward) <= BACKWARD_BYTES, "whoever launches gives less");

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) scan_forward(
    const X_T* x, const DT_T* dt, const float* bias, const float* A, const BC_T* B, const BC_T* C, const float* D, const Z_T* z,
    X_T* y, float* last,  // (batch, L, E), (batch, E, N) or nowhere
    int L, int E, int x_batch, int x_row, int dt_batch, int dt_row, int B_batch, int B_row, int C_batch, int C_row,
    int z_batch, int z_row) {
  Forward& shared = *(Forward*)memory;
  const long long b = blockIdx.y;
  const int warp = threadIdx.x / 32, from = 2 * THREADS * blockIdx.x + 64 * warp, e = from + lane2();
  const Given given{
      x + b * x_batch + from, dt + b * dt_batch + from, z + b * z_batch + from, nullptr, nullptr, B + b * B_batch, C + b * C_batch,
      x_row, dt_row, z_row, 0, E, B_row, C_row, L};
  float a[2][N], h[2][N];
#pragma unroll
  for (int n = 0; n < 2 * N; n += 4) {
    float v[4];
    four(v, A + e * N + n);
#pragma unroll
    for (int i = 0; i < 4; ++i) { a[n / N][n % N + i] = v[i] * LOG2E; h[n / N][n % N + i] = 0.0f; }
  }
  const float2 skip = *(const float2*)(D + e), shift = SOFTPLUS ? *(const float2*)(bias + e) : make_float2(0.0f, 0.0f);
  y += b * L * E + e;
  auto step = [&](const Seen& in, int s, const float (&row)[2 * N], int) {
    Ready now;
    now.make(in, s, shift);
    const float u0 = now.d.x * now.x.x, u1 = now.d.y * now.x.y;
    float y0 = skip.x * now.x.x, y1 = skip.y * now.x.y;
#pragma unroll
    for (int q = 0; q < N; q += 4) {
      float Bs[4], Cs[4];
      four(Bs, row + q);
      four(Cs, row + N + q);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = q + i;
        h[0][n] = ex2(now.d.x * a[0][n]) * h[0][n] + u0 * Bs[i];
        h[1][n] = ex2(now.d.y * a[1][n]) * h[1][n] + u1 * Bs[i];
        y0 += h[0][n] * Cs[i];
        y1 += h[1][n] * Cs[i];
      }
    }
    if constexpr (GATE) { y0 *= now.g.x; y1 *= now.g.y; }
    put(y, y0, y1);
    y += E;
  };
  walk<false>(shared.seen[warp], shared.rows, given, 0, step, [](int, int, int) {});
  if (last == nullptr) return;
  float4* out = (float4*)(last + (b * E + e) * N);
#pragma unroll
  for (int n = 0; n < 2 * N; n += 4) {
    const float* v = h[n / N] + n % N;
    *out++ = make_float4(v[0], v[1], v[2], v[3]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) scan_backward(
    const X_T* x, const DT_T* dt, const float* bias, const float* A, const BC_T* B, const BC_T* C, const float* D, const Z_T* z,
    const DY_T* dy,
    X_T* dx, DT_T* ddt, Z_T* dz,               // (batch, L, E)
    DBC_T* dBC,                                // (blocks, batch, L, 2 N): sums over a block's channels
    float* dparameter, float* between,         // per sequence: (batch, (N + 2) E) of A (E, N), bias and D, (batch, L, E)
    int L, int E, int batch, int x_batch, int x_row, int dt_batch, int dt_row, int B_batch, int B_row, int C_batch, int C_row,
    int z_batch, int z_row, int dy_batch, int dy_row, int dz_batch, int dz_row, int dBC_batch, int dBC_row) {
  Backward& shared = *(Backward*)memory;
  const long long b = blockIdx.y, own = b * L * E;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, from = 2 * THREADS * blockIdx.x + 64 * warp, e = from + lane2();
  const Given given{
      x + b * x_batch + from, dt + b * dt_batch + from, z + b * z_batch + from, dy + b * dy_batch + from, between + own + from,
      B + b * B_batch, C + b * C_batch, x_row, dt_row, z_row, dy_row, E, B_row, C_row, L};
  const int order = Sums::order(lane);
  float h[2][N], da[2][N];
#pragma unroll
  for (int n = 0; n < 2 * N; n += 4) {
    float v[4];
    four(v, A + e * N + n);
    reorder(v, order);
    shared.a[n / 4][threadIdx.x] = make_float4(v[0] * LOG2E, v[1] * LOG2E, v[2] * LOG2E, v[3] * LOG2E);
#pragma unroll
    for (int i = 0; i < 4; ++i) h[n / N][n % N + i] = da[n / N][n % N + i] = 0.0f;
  }
  const float2 skip = *(const float2*)(D + e), shift = SOFTPLUS ? *(const float2*)(bias + e) : make_float2(0.0f, 0.0f);
  dx += own + e; ddt += own + e; between += own + e; dz += b * dz_batch + e;
  dBC += (blockIdx.x * (long long)batch + b) * dBC_batch;
  float elapsed0 = 0.0f, elapsed1 = 0.0f;  // sums of Delta up to here

  auto forward = [&](const SeenBack& in, int s, const float (&row)[2 * N], int at) {  // in time, with h
    Ready now;
    now.make(in, s, shift);
    elapsed0 += now.d.x; elapsed1 += now.d.y;
    const float u0 = now.d.x * now.x.x, u1 = now.d.y * now.x.y, w0 = elapsed0 * now.g.x, w1 = elapsed1 * now.g.y;
    float y0 = skip.x * now.x.x, y1 = skip.y * now.x.y, o0 = 0.0f, o1 = 0.0f;
    Sums sums;
#pragma unroll
    for (int q = 0; q < N; q += 4) {
      float Bs[4], Cs[4], a0[4], a1[4], dC[4];
      four(Bs, row + q);
      four(Cs, row + N + q);
      four(a0, (const float*)&shared.a[q / 4][threadIdx.x]);
      four(a1, (const float*)&shared.a[(N + q) / 4][threadIdx.x]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = q + i;
        h[0][n] = ex2(now.d.x * a0[i]) * h[0][n] + u0 * Bs[i];
        h[1][n] = ex2(now.d.y * a1[i]) * h[1][n] + u1 * Bs[i];
        const float c0 = h[0][n] * Cs[i], c1 = h[1][n] * Cs[i];
        o0 += c0 * a0[i]; o1 += c1 * a1[i];
        if constexpr (GATE) { y0 += c0; y1 += c1; }
        da[0][n] += w0 * c0; da[1][n] += w1 * c1;
        dC[i] = now.g.x * h[0][n] + now.g.y * h[1][n];
      }
      sums.four_more(q / 4, dC);
    }
    put(between, now.g.x * o0, now.g.y * o1);  // sum_n A_n out_t
    between += E;
    if constexpr (GATE) {
      put(dz, now.k.x * y0, now.k.y * y1);
      dz += dz_row;
    }
    const float all = sums.all(lane);
    if (Sums::leads(lane)) shared.sums[at][warp][Sums::state(lane)] = all;
  };
  walk<false>(shared.seen[warp], shared.rows, given, order, forward, [&](int first, int count, int which) {
    meet(dBC + (first * dBC_row + N), shared.sums + which * STEPS, count, dBC_row);
  });

#pragma unroll
  for (int n = 0; n < N; ++n) h[0][n] = h[1][n] = 0.0f;  // from now on the adjoint
  float through0 = 0.0f, through1 = 0.0f;                 // sum over n and over all that is to come of A (out - in)
  float dD0 = 0.0f, dD1 = 0.0f, dbias0 = 0.0f, dbias1 = 0.0f;
  dx += (L - 1) * E; ddt += (L - 1) * E;
  auto backward = [&](const SeenBack& in, int s, const float (&row)[2 * N], int at) {  // in time, with the adjoint
    Ready now;
    now.make(in, s, shift);
    const float2 out = two(&in.between[s][lane2()]);
    const float u0 = now.d.x * now.x.x, u1 = now.d.y * now.x.y, w0 = -elapsed0 * u0, w1 = -elapsed1 * u1;
    float r0 = 0.0f, r1 = 0.0f, q0 = 0.0f, q1 = 0.0f;
    Sums sums;
#pragma unroll
    for (int q = 0; q < N; q += 4) {
      float Bs[4], Cs[4], a0[4], a1[4], dB[4];
      four(Bs, row + q);
      four(Cs, row + N + q);
      four(a0, (const float*)&shared.a[q / 4][threadIdx.x]);
      four(a1, (const float*)&shared.a[(N + q) / 4][threadIdx.x]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = q + i;
        const float g0 = h[0][n] + now.g.x * Cs[i], g1 = h[1][n] + now.g.y * Cs[i];
        const float b0 = g0 * Bs[i], b1 = g1 * Bs[i];
        r0 += b0 * a0[i]; r1 += b1 * a1[i];
        q0 += b0; q1 += b1;
        da[0][n] += w0 * b0; da[1][n] += w1 * b1;
        dB[i] = u0 * g0 + u1 * g1;
        h[0][n] = g0 * ex2(now.d.x * a0[i]); h[1][n] = g1 * ex2(now.d.y * a1[i]);
      }
      sums.four_more(q / 4, dB);
    }
    through0 += out.x - u0 * r0; through1 += out.y - u1 * r1;
    elapsed0 -= now.d.x; elapsed1 -= now.d.y;
    float dd0 = through0 * LN2 + q0 * now.x.x, dd1 = through1 * LN2 + q1 * now.x.y;
    put(dx, q0 * now.d.x + skip.x * now.g.x, q1 * now.d.y + skip.y * now.g.y);
    dx -= E;
    dD0 += now.g.x * now.x.x; dD1 += now.g.y * now.x.y;
    if constexpr (SOFTPLUS) {  // its derivative is sigmoid = 1 - exp(-softplus)
      dd0 *= 1.0f - ex2(-now.d.x * LOG2E); dd1 *= 1.0f - ex2(-now.d.y * LOG2E);
      dbias0 += dd0; dbias1 += dd1;
    }
    put(ddt, dd0, dd1);
    ddt -= E;
    const float all = sums.all(lane);
    if (Sums::leads(lane)) shared.sums[at][warp][Sums::state(lane)] = all;
  };
  walk<true>(shared.seen[warp], shared.rows, given, order, backward, [&](int first, int count, int which) {
    meet(dBC + first * dBC_row, shared.sums + which * STEPS, count, dBC_row);
  });
  dparameter += b * (N + 2) * E;
  float4* to = (float4*)(dparameter + e * N);
#pragma unroll
  for (int n = 0; n < 2 * N; n += 4) {
    float v[4] = {da[n / N][n % N], da[n / N][n % N + 1], da[n / N][n % N + 2], da[n / N][n % N + 3]};
    reorder(v, order);
    *to++ = make_float4(v[0], v[1], v[2], v[3]);
  }
  put(dparameter + N * E + e, dbias0, dbias1);
  put(dparameter + (N + 1) * E + e, dD0, dD1);
}
