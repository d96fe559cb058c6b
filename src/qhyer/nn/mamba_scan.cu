// The selective scan, forward and backward: the formulas of mamba_triton.py, laid out by hand.
//
// A thread has two neighbouring channels of a sequence with all N states of both, so that sums over states need no
// other thread. A block has up to 512 channels of one sequence; B and C lie in shared memory, where its threads read
// the same numbers. Sums over channels (dB, dC) meet first in a warp, then in the block, in a fixed order.
//
// It waits rather than computes (Nsight Compute: 2.6 instructions a cycle backward, of 4): the more warps there are, the
// less. 16 on a multiprocessor need threads of 128 registers, so A, which never changes, lies in shared memory backward,
// and a sum over the warp begins with the first four states that are there. Triton's kernel takes 255, for 8 warps.
//
// Given by whoever compiles it: X_T, DT_T, BC_T, Z_T, DY_T, DBC_T (float or bf16), N (4, 8 or 16), SOFTPLUS, GATE (0 or 1).

#define THREADS 256  // at most, in a block
#define STEPS 20     // whose B and C, and sums over channels, are in shared memory at a time
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

// Two neighbours, as they lie in memory.
template <typename T> struct Two;
template <> struct Two<float> {
  float2 v;
  __device__ __forceinline__ void load(const float* p) { v = *(const float2*)p; }
  __device__ __forceinline__ float2 get() const { return v; }
};
template <> struct Two<bf16> {
  unsigned v;
  __device__ __forceinline__ void load(const bf16* p) { v = *(const unsigned*)p; }
  __device__ __forceinline__ float2 get() const {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  }
};
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
static __device__ __forceinline__ void four(float (&v)[4], const float* p) {
  const float4 q = *(const float4*)p;
  v[0] = q.x; v[1] = q.y; v[2] = q.z; v[3] = q.w;
}

// B and C of `count` steps from `first` on, for the whole block, as rows [B; C].
static __device__ __forceinline__ void share(
    float (*rows)[2 * N], const BC_T* __restrict__ B, const BC_T* __restrict__ C, int B_row, int C_row, int first, int count) {
  constexpr int EACH = 4;  // on the way at once
  for (int from = threadIdx.x; from < count * 2 * N; from += EACH * blockDim.x) {
    float v[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const int i = min(from + k * (int)blockDim.x, count * 2 * N - 1), t = first + i / (2 * N), n = i % (2 * N);
      v[k] = n < N ? one(B + t * B_row + n) : one(C + t * C_row + n - N);
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const int i = from + k * blockDim.x;
      if (i < count * 2 * N) rows[i / (2 * N)][i % (2 * N)] = v[k];
    }
  }
}

// Sums over the warp of SIZE values a lane: half of the values go to each half of the lanes, and so on; once a lane has
// one value left, it is added up over the lanes that have the same. BIT: of the lanes' number, that halves them first.
template <int SIZE, int BIT, int END, int M> static __device__ __forceinline__ void halve(float (&v)[M], int lane) {
  if constexpr (BIT > END) {
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
    halve<(SIZE > 1 ? SIZE / 2 : 1), BIT / 2, END>(v, lane);
  }
}

// The sums of four states after another, then of all of them. A lane ends with the sum of state_of(lane), as do the other
// lanes that differ in the bits below N's.
static __device__ __forceinline__ float of_four(float (&v)[4], int lane) { halve<4, 16, 4>(v, lane); return v[0]; }
static __device__ __forceinline__ float of_all(float (&v)[N / 4], int lane) { halve<N / 4, 4, 0>(v, lane); return v[0]; }
static __device__ __forceinline__ int state_of(int lane) { return (lane & 7) / (32 / N) * 4 + (lane >> 3 & 3); }
static __device__ __forceinline__ bool leads(int lane) { return (lane & (32 / N - 1)) == 0; }

// The sums of all warps, of `count` steps, into rows of N.
static __device__ __forceinline__ void meet(DBC_T* to, const float (*sums)[STEPS][N], int count, int row) {
  const int warps = blockDim.x / 32;
  for (int i = threadIdx.x; i < count * N; i += blockDim.x) {
    float total = 0.0f;
    for (int w = 0; w < warps; ++w) total += sums[w][i / N][i % N];
    put(to + ((i / N) * row + i % N), total);
  }
}

struct Pointers {  // the sequence's, the same in all threads of a block
  const X_T* x; const DT_T* dt; const Z_T* z; const DY_T* dy;
  int x_row, dt_row, z_row, dy_row;
};

// What a step reads, as it lies in memory, asked for a step ahead.
struct Raw {
  Two<X_T> x; Two<DT_T> dt; Two<Z_T> z; Two<DY_T> dy;
  template <bool BACK> __device__ __forceinline__ void load(const Pointers& p, int t, int e) {
    x.load(p.x + (t * p.x_row + e));
    dt.load(p.dt + (t * p.dt_row + e));
    if constexpr (GATE) z.load(p.z + (t * p.z_row + e));
    if constexpr (BACK) dy.load(p.dy + (t * p.dy_row + e));
  }
};

// What is made of it: x, Delta; forward g = silu(z); backward g = dy silu(z), the gradient by what the gate multiplies,
// and k = dy silu'(z), which times what the gate multiplies is dz.
struct Ready {
  float2 x, d, g, k;
  template <bool BACK> __device__ __forceinline__ void make(const Raw& raw, float2 bias) {
    x = raw.x.get();
    d = raw.dt.get();
    if constexpr (SOFTPLUS) { d.x = softplus(d.x + bias.x); d.y = softplus(d.y + bias.y); }
    if constexpr (BACK) g = raw.dy.get();
    if constexpr (GATE) {
      const float2 z = raw.z.get();
      const float sx = sigmoid(z.x), sy = sigmoid(z.y);
      if constexpr (BACK) {
        k.x = g.x * sx * (1.0f + z.x * (1.0f - sx)); k.y = g.y * sy * (1.0f + z.y * (1.0f - sy));
        g.x *= z.x * sx; g.y *= z.y * sy;
      } else {
        g.x = z.x * sx; g.y = z.y * sy;
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) scan_forward(
    const X_T* x, const DT_T* dt, const float* bias, const float* A, const BC_T* B, const BC_T* C, const float* D, const Z_T* z,
    X_T* y, float* last,  // (batch, L, E), (batch, E, N) or nowhere
    int L, int E, int x_batch, int x_row, int dt_batch, int dt_row, int B_batch, int B_row, int C_batch, int C_row,
    int z_batch, int z_row) {
  __shared__ __align__(16) float rows[STEPS][2 * N];
  const long long b = blockIdx.y;
  const int e = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  const Pointers p{x + b * x_batch, dt + b * dt_batch, z + b * z_batch, nullptr, x_row, dt_row, z_row, 0};
  Raw raw;
  raw.load<false>(p, 0, e);
  float a[2][N], h[2][N];
#pragma unroll
  for (int n = 0; n < 2 * N; n += 4) {
    float v[4];
    four(v, A + e * N + n);
#pragma unroll
    for (int i = 0; i < 4; ++i) { a[n / N][n % N + i] = v[i] * LOG2E; h[n / N][n % N + i] = 0.0f; }
  }
  const float2 skip = *(const float2*)(D + e), shift = SOFTPLUS ? *(const float2*)(bias + e) : make_float2(0.0f, 0.0f);
  y += b * L * E;
  B += b * B_batch; C += b * C_batch;
  Ready now;
  for (int first = 0; first < L; first += STEPS) {
    const int count = min(STEPS, L - first);
    __syncthreads();
    share(rows, B, C, B_row, C_row, first, count);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < count; ++s) {
      now.make<false>(raw, shift);
      raw.load<false>(p, min(first + s + 1, L - 1), e);
      const float u0 = now.d.x * now.x.x, u1 = now.d.y * now.x.y;
      float y0 = skip.x * now.x.x, y1 = skip.y * now.x.y;
#pragma unroll
      for (int q = 0; q < N; q += 4) {
        float Bs[4], Cs[4];
        four(Bs, &rows[s][q]);
        four(Cs, &rows[s][N + q]);
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
      put(y + ((first + s) * E + e), y0, y1);
    }
  }
  if (last == nullptr) return;
  float4* out = (float4*)(last + (b * E + e) * N);
#pragma unroll
  for (int n = 0; n < 2 * N; n += 4) {
    const float* v = h[n / N] + n % N;
    *out++ = make_float4(v[0], v[1], v[2], v[3]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) scan_backward(
    const X_T* x, const DT_T* dt, const float* bias, const float* A, const BC_T* B, const BC_T* C, const float* D, const Z_T* z,
    const DY_T* dy,
    X_T* dx, DT_T* ddt, Z_T* dz,               // (batch, L, E)
    DBC_T* dBC,                                // (blocks, batch, L, 2 N): sums over a block's channels
    float* dparameter, float* between,         // per sequence: (batch, (N + 2) E) of A (E, N), bias and D, (batch, L, E)
    int L, int E, int batch, int x_batch, int x_row, int dt_batch, int dt_row, int B_batch, int B_row, int C_batch, int C_row,
    int z_batch, int z_row, int dy_batch, int dy_row, int dz_batch, int dz_row, int dBC_batch, int dBC_row) {
  __shared__ __align__(16) float rows[STEPS][2 * N];
  __shared__ float sums[THREADS / 32][STEPS][N];
  __shared__ float4 a[2 * N / 4][THREADS];
  const long long b = blockIdx.y;
  const int e = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Pointers p{x + b * x_batch, dt + b * dt_batch, z + b * z_batch, dy + b * dy_batch, x_row, dt_row, z_row, dy_row};
  Raw raw;
  raw.load<true>(p, 0, e);
  float h[2][N], da[2][N];
#pragma unroll
  for (int n = 0; n < 2 * N; n += 4) {
    float v[4];
    four(v, A + e * N + n);
    a[n / 4][threadIdx.x] = make_float4(v[0] * LOG2E, v[1] * LOG2E, v[2] * LOG2E, v[3] * LOG2E);
#pragma unroll
    for (int i = 0; i < 4; ++i) h[n / N][n % N + i] = da[n / N][n % N + i] = 0.0f;
  }
  const float2 skip = *(const float2*)(D + e), shift = SOFTPLUS ? *(const float2*)(bias + e) : make_float2(0.0f, 0.0f);
  const long long own = b * L * E;
  dx += own; ddt += own; dz += b * dz_batch; between += own;
  B += b * B_batch; C += b * C_batch;
  dBC += (blockIdx.x * (long long)batch + b) * dBC_batch;
  Ready now;
  float elapsed0 = 0.0f, elapsed1 = 0.0f;  // sums of Delta up to here

  for (int first = 0; first < L; first += STEPS) {  // forward in time, with h
    const int count = min(STEPS, L - first);
    __syncthreads();
    share(rows, B, C, B_row, C_row, first, count);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < count; ++s) {
      const int t = first + s;
      now.make<true>(raw, shift);
      raw.load<true>(p, min(t + 1, L - 1), e);
      elapsed0 += now.d.x; elapsed1 += now.d.y;
      const float u0 = now.d.x * now.x.x, u1 = now.d.y * now.x.y, w0 = elapsed0 * now.g.x, w1 = elapsed1 * now.g.y;
      float y0 = skip.x * now.x.x, y1 = skip.y * now.x.y, o0 = 0.0f, o1 = 0.0f, sum[N / 4];
#pragma unroll
      for (int q = 0; q < N; q += 4) {
        float Bs[4], Cs[4], a0[4], a1[4], dC[4];
        four(Bs, &rows[s][q]);
        four(Cs, &rows[s][N + q]);
        four(a0, (const float*)&a[q / 4][threadIdx.x]);
        four(a1, (const float*)&a[(N + q) / 4][threadIdx.x]);
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
        sum[q / 4] = of_four(dC, lane);
      }
      put(between + (t * E + e), now.g.x * o0, now.g.y * o1);  // sum_n A_n out_t
      if constexpr (GATE) put(dz + (t * dz_row + e), now.k.x * y0, now.k.y * y1);
      const float all = of_all(sum, lane);
      if (leads(lane)) sums[warp][s][state_of(lane)] = all;
    }
    __syncthreads();
    meet(dBC + (first * dBC_row + N), sums, count, dBC_row);
  }

#pragma unroll
  for (int n = 0; n < N; ++n) h[0][n] = h[1][n] = 0.0f;  // from now on the adjoint
  float through0 = 0.0f, through1 = 0.0f;                 // sum over n and over all that is to come of A (out - in)
  float dD0 = 0.0f, dD1 = 0.0f, dbias0 = 0.0f, dbias1 = 0.0f;
  Two<float> out_;
  out_.load(between + ((L - 1) * E + e));
  raw.load<true>(p, L - 1, e);
  for (int first = (L - 1) / STEPS * STEPS; first >= 0; first -= STEPS) {  // backward in time, with the adjoint
    const int count = min(STEPS, L - first);
    __syncthreads();
    if (first + STEPS < L || L <= STEPS) {  // the last rows are there already
      if (L > STEPS) share(rows, B, C, B_row, C_row, first, count);
      __syncthreads();
    }
#pragma unroll 1
    for (int s = count - 1; s >= 0; --s) {
      const int t = first + s;
      const float2 out = out_.get();
      now.make<true>(raw, shift);
      raw.load<true>(p, max(t - 1, 0), e);
      out_.load(between + (max(t - 1, 0) * E + e));
      const float u0 = now.d.x * now.x.x, u1 = now.d.y * now.x.y, w0 = -elapsed0 * u0, w1 = -elapsed1 * u1;
      float r0 = 0.0f, r1 = 0.0f, q0 = 0.0f, q1 = 0.0f, sum[N / 4];
#pragma unroll
      for (int q = 0; q < N; q += 4) {
        float Bs[4], Cs[4], a0[4], a1[4], dB[4];
        four(Bs, &rows[s][q]);
        four(Cs, &rows[s][N + q]);
        four(a0, (const float*)&a[q / 4][threadIdx.x]);
        four(a1, (const float*)&a[(N + q) / 4][threadIdx.x]);
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
        sum[q / 4] = of_four(dB, lane);
      }
      through0 += out.x - u0 * r0; through1 += out.y - u1 * r1;
      elapsed0 -= now.d.x; elapsed1 -= now.d.y;
      float dd0 = through0 * LN2 + q0 * now.x.x, dd1 = through1 * LN2 + q1 * now.x.y;
      put(dx + (t * E + e), q0 * now.d.x + skip.x * now.g.x, q1 * now.d.y + skip.y * now.g.y);
      dD0 += now.g.x * now.x.x; dD1 += now.g.y * now.x.y;
      if constexpr (SOFTPLUS) {  // its derivative is sigmoid = 1 - exp(-softplus)
        dd0 *= 1.0f - ex2(-now.d.x * LOG2E); dd1 *= 1.0f - ex2(-now.d.y * LOG2E);
        dbias0 += dd0; dbias1 += dd1;
      }
      put(ddt + (t * E + e), dd0, dd1);
      const float all = of_all(sum, lane);
      if (leads(lane)) sums[warp][s][state_of(lane)] = all;
    }
    __syncthreads();
    meet(dBC + first * dBC_row, sums, count, dBC_row);
  }
  dparameter += b * (N + 2) * E;
  float4* to = (float4*)(dparameter + e * N);
#pragma unroll
  for (int n = 0; n < 2 * N; n += 4) {
    const float* v = da[n / N] + n % N;
    *to++ = make_float4(v[0], v[1], v[2], v[3]);
  }
  put(dparameter + N * E + e, dbias0, dbias1);
  put(dparameter + (N + 1) * E + e, dD0, dD1);
}
