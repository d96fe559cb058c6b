// Mamba-2's scan of a short window, forward and backward: the formulas of mamba2_triton.py, laid out by hand.
//
// A block has one head of one sequence, a warp sixteen of its steps. With w_ts = exp(S_t - S_s) Delta_s where s <= t, and
// else zero,
//
//     G = C B^T,  M = G w,   y = M x,            forward and again backward, by steps t
//     dM = dy x^T,           dC = (dM w) B       by steps t
//     dx = M^T dy,           dB = (dM w)^T C     by steps s: M^T and dM^T are made as such, so that nothing is transposed
//
// are products of the matrix unit, whose outputs are the first factor of the next one as they lie in registers, and half of
// which are left out, where s > t for sixteen steps and sixteen. What a warp reads of others (x, dy, B, C) is in shared
// memory. Triton's kernel holds whole tiles in one layout after another and takes 255 registers backward; this one 128.
//
// The logarithm of Delta_s is taken off S_s, so that a weight is one exponential, and steps past the end, of which Delta is
// zero, have none: exp(-inf).
//
// The matrix unit gives a thread two neighbours of every eight columns. Columns of x and dy are put in shared memory in an
// order in which these are sixteen channels side by side: so z, dy and all that is written is read and written in 16 bytes.
//
// Given by whoever compiles it: WARPS, and how many blocks are wanted on a multiprocessor, FORWARD_BLOCKS, BACKWARD_BLOCKS.

#define ROWS (16 * WARPS)
#define THREADS (32 * WARPS)
#define WIDTH 64  // channels of a head
#define TILES (WIDTH / 8)
#define N 16
#define LANE_ROWS ((ROWS + 31) / 32)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define ALL 0xffffffffu
#define TINY 1e-30f

typedef unsigned short bf16;

static __device__ __forceinline__ float ex2(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
static __device__ __forceinline__ float lg2(float v) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
static __device__ __forceinline__ float rcp(float v) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
static __device__ __forceinline__ float softplus(float v) { return v > 20.0f ? v : lg2(1.0f + ex2(v * LOG2E)) * LN2; }
static __device__ __forceinline__ float sigmoid(float v) { return rcp(1.0f + ex2(-v * LOG2E)); }

// Pairs, the first in the lower half.
static __device__ __forceinline__ float lower(unsigned v) { return __uint_as_float(v << 16); }
static __device__ __forceinline__ float upper(unsigned v) { return __uint_as_float(v & 0xffff0000u); }
static __device__ __forceinline__ unsigned pair(float a, float b) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}

// d (16 x 8) += a (16 x 16) b (16 x 8). Of d a thread has rows g and g + 8, g = lane / 4, columns 2 q and 2 q + 1, q = lane % 4.
typedef float Tile[4];
typedef unsigned Factor[4];
static __device__ __forceinline__ void multiply(Tile& d, const Factor& a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ void load(Factor& v, const bf16* p) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(p);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(place) : "memory");
}
static __device__ __forceinline__ void load_turned(Factor& v, const bf16* p) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(p);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(place) : "memory");
}

// Of 16 rows from `first` on and 16 columns: the first factor of a product that sums over columns; the second of one that
// sums over columns, or over rows, each for twice eight of the others.
template <typename M> static __device__ __forceinline__ void as_first(Factor& v, const M& m, int first, int column) {
  load(v, &m[first + threadIdx.x % 16][column + threadIdx.x % 32 / 16 * 8]);
}
template <typename M> static __device__ __forceinline__ void over_columns(Factor& v, const M& m, int first, int column) {
  load(v, &m[first + threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8][column + threadIdx.x % 16 / 8 * 8]);
}
template <typename M> static __device__ __forceinline__ void over_rows(Factor& v, const M& m, int first, int column) {
  load_turned(v, &m[first + threadIdx.x % 16][column + threadIdx.x % 32 / 16 * 8]);
}
// Two tiles side by side as the first factor of the next product.
static __device__ __forceinline__ void again(Factor& v, const Tile& a, const Tile& b) {
  v[0] = pair(a[0], a[1]); v[1] = pair(a[2], a[3]); v[2] = pair(b[0], b[1]); v[3] = pair(b[2], b[3]);
}

static __device__ __forceinline__ float over_quad(float v) {
  v += __shfl_xor_sync(ALL, v, 1);
  return v + __shfl_xor_sync(ALL, v, 2);
}
static __device__ __forceinline__ float over_warp(float v) {
#pragma unroll
  for (int bits = 16; bits; bits /= 2) v += __shfl_xor_sync(ALL, v, bits);
  return v;
}

// ---------------------------------------------------------------------------------------------------- shared memory

// Rows are padded so that eight of them lie in different banks.
typedef bf16 Channels[ROWS][WIDTH + 8];
typedef bf16 States[ROWS][N + 8];
struct Seen {
  Channels x;
  States B, C;
  float elapsed[ROWS], reduced[ROWS];  // S in powers of two, and that with Delta's logarithm taken off
};
struct SeenBack : Seen {
  Channels dy;
  float rows[ROWS], columns[ROWS], skip[WARPS];
};
extern __shared__ __align__(16) char memory[];

// What a block reads: places of its head and sequence.
struct Given {
  const bf16* x; const bf16* BC; const bf16* dt; const bf16* z;
  int u_row, dt_row, z_row, L;
};

// Of a lane's LANE_ROWS steps.
struct Steps { float delta[LANE_ROWS]; };

static __device__ __forceinline__ void make(Steps& steps, const Given& g, float bias) {
#pragma unroll
  for (int i = 0; i < LANE_ROWS; ++i) {
    const int t = threadIdx.x % 32 * LANE_ROWS + i;
    steps.delta[i] = t < g.L ? softplus(lower(g.dt[t * g.dt_row]) + bias) : 0.0f;
  }
}

// x in the order of a thread's columns: a pair of channels to where the matrix unit gives it to the thread q that has them.
static __device__ __forceinline__ void bring(Seen& to, const Given& g, const Steps& steps, float A) {
  constexpr int CHUNKS = WIDTH / 8, OWN = WIDTH / 4;
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int t = i / CHUNKS, c = i % CHUNKS * 8, q = c / OWN;
    const uint4 v = t < g.L ? *(const uint4*)(g.x + (t * g.u_row + c)) : make_uint4(0, 0, 0, 0);
    unsigned* row = (unsigned*)to.x[t];
    const int first = c % OWN / 2 * 4 + q;
    row[first] = v.x; row[first + 4] = v.y; row[first + 8] = v.z; row[first + 12] = v.w;
  }
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * 4; i += THREADS) {
    const int t = i / 4, c = i % 4 * 8;
    const uint4 v = t < g.L ? *(const uint4*)(g.BC + (t * g.u_row + c)) : make_uint4(0, 0, 0, 0);
    *(uint4*)(c < N ? &to.B[t][c] : &to.C[t][c - N]) = v;
  }
  if (threadIdx.x >= 32) return;
  float sum = 0.0f, kept[LANE_ROWS];
#pragma unroll
  for (int i = 0; i < LANE_ROWS; ++i) kept[i] = sum += steps.delta[i] * (A * LOG2E);
  float before = sum;
#pragma unroll
  for (int bits = 1; bits < 32; bits *= 2) {
    const float other = __shfl_up_sync(ALL, before, bits);
    if (threadIdx.x >= bits) before += other;
  }
  before -= sum;
#pragma unroll
  for (int i = 0; i < LANE_ROWS; ++i) {
    const int t = threadIdx.x * LANE_ROWS + i;
    if (t < ROWS) {
      to.elapsed[t] = before + kept[i];
      to.reduced[t] = before + kept[i] - lg2(steps.delta[i]);
    }
  }
}

// ------------------------------------------------------------------------------------------------------ by steps t

// w of 16 steps t and, of the 16 steps from `first` on, the `half`-th eight; `own`: t of a thread, elapsed at t and t + 8.
template <bool TURNED>
static __device__ __forceinline__ void weigh(Tile& v, const Seen& seen, int first, int half, int own, bool edge,
                                             float here, float there) {
  const int at = first + 8 * half + 2 * (threadIdx.x % 4);
  const float2 other = *(const float2*)&(TURNED ? seen.elapsed : seen.reduced)[at];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float mine = i < 2 ? here : there, theirs = i % 2 ? other.y : other.x;
    const float w = ex2(TURNED ? theirs - mine : mine - theirs);
    const int row = own + i / 2 * 8, column = at + i % 2;
    v[i] = edge && (TURNED ? column < row : column > row) ? 0.0f : v[i] * w;
  }
}

// The gradients of scores, or these, of 16 steps and 16, with their weights, as the first factor of the next product.
template <bool TURNED>
static __device__ __forceinline__ void weighed(Factor& v, Tile& a, Tile& b, const Seen& seen, int first, int own, bool edge,
                                               float here, float there) {
  weigh<TURNED>(a, seen, first, 0, own, edge, here, there);
  weigh<TURNED>(b, seen, first, 1, own, edge, here, there);
  again(v, a, b);
}
// M of these steps, or its transpose: C or B of the warp's own, B or C of the others.
template <bool TURNED>
static __device__ __forceinline__ void scores(Factor& M, const Factor& mine, const States& others, const Seen& seen, int first,
                                              int own, bool edge, float here, float there) {
  Factor other;
  over_columns(other, others, first, 0);
  Tile a = {}, b = {};
  multiply(a, mine, other[0], other[1]);
  multiply(b, mine, other[2], other[3]);
  weighed<TURNED>(M, a, b, seen, first, own, edge, here, there);
}

// y without the skip, of the warp's steps.
static __device__ __forceinline__ void mix(Tile (&y)[TILES], const Seen& seen, int mine) {
  const int own = mine + threadIdx.x % 32 / 4;
  const float here = seen.elapsed[own], there = seen.elapsed[own + 8];
  Factor C;
  as_first(C, seen.C, mine, 0);
#pragma unroll 1
  for (int first = 0; first <= mine; first += 16) {
    Factor M;
    scores<false>(M, C, seen.B, seen, first, own, first == mine, here, there);
#pragma unroll
    for (int i = 0; i < TILES; i += 2) {
      Factor x;
      over_rows(x, seen.x, first, 8 * i);
      multiply(y[i], M, x[0], x[1]);
      multiply(y[i + 1], M, x[2], x[3]);
    }
  }
}

// A thread's pairs of channels of one step, in memory: WIDTH / 4 channels side by side.
typedef unsigned Row[TILES];
static __device__ __forceinline__ void read(Row& v, const bf16* p, bool there) {
#pragma unroll
  for (int i = 0; i < TILES; i += 4) {
    const uint4 w = there ? *(const uint4*)(p + 2 * i) : make_uint4(0, 0, 0, 0);
    v[i] = w.x; v[i + 1] = w.y; v[i + 2] = w.z; v[i + 3] = w.w;
  }
}
static __device__ __forceinline__ void write(bf16* p, const Row& v) {
#pragma unroll
  for (int i = 0; i < TILES; i += 4) *(uint4*)(p + 2 * i) = make_uint4(v[i], v[i + 1], v[i + 2], v[i + 3]);
}
static __device__ __forceinline__ int channel() { return threadIdx.x % 4 * (WIDTH / 4); }

extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS) head_scan_forward(
    const bf16* u, const bf16* dt, const float* bias, const float* A, const float* D, const bf16* z, bf16* y, int L, int H,
    int u_batch, int u_row, int dt_batch, int dt_row, int z_batch, int z_row) {
  Seen& seen = *(Seen*)memory;
  const int h = blockIdx.x, E = H * WIDTH, mine = threadIdx.x / 32 * 16;
  const long long b = blockIdx.y;
  u += b * u_batch;
  const Given given = {u + h * WIDTH, u + E, dt + b * dt_batch + h, z + b * z_batch + h * WIDTH, u_row, dt_row, z_row, L};
  Steps steps;
  make(steps, given, bias[h]);
  bring(seen, given, steps, A[h]);
  const int own = mine + threadIdx.x % 32 / 4;
  Row gate[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) read(gate[r], given.z + ((own + 8 * r) * z_row + channel()), own + 8 * r < L);
  __syncthreads();
  if (mine >= L) return;
  Tile out[TILES] = {};
  mix(out, seen, mine);
  const float skip = D[h];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = own + 8 * r;
    const unsigned* x = (const unsigned*)seen.x[t] + threadIdx.x % 4;
    Row row;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const float z0 = lower(gate[r][i]), z1 = upper(gate[r][i]);
      row[i] = pair((out[i][2 * r] + skip * lower(x[4 * i])) * (z0 * sigmoid(z0)),
                    (out[i][2 * r + 1] + skip * upper(x[4 * i])) * (z1 * sigmoid(z1)));
    }
    if (t < L) write(y + ((b * L + t) * E + h * WIDTH + channel()), row);
  }
}

// -------------------------------------------------------------------------------------------------------- backward

// The gate backward, of one number: dz and, passed through the gate, dy.
static __device__ __forceinline__ float2 gated(float y, float z, float dy) {
  const float s = sigmoid(z), open = z * s;
  return make_float2(dy * y * (s + open * (1.0f - s)), dy * open);
}

// The gradients of B or C of the warp's steps, to where that of all heads is added up.
static __device__ __forceinline__ void put_states(float* p, const Tile (&v)[2], int own, int L) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (own + 8 * r < L)
        *(float2*)(p + ((own + 8 * r) * (2 * N) + 8 * i + 2 * (threadIdx.x % 4))) = make_float2(v[i][2 * r], v[i][2 * r + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS) head_scan_backward(
    const bf16* u, const bf16* dt, const float* bias, const float* A, const float* D, const bf16* z, const bf16* dy,
    bf16* du, bf16* dz, bf16* ddt,
    float* dBC, float* dparameter,  // parts of a head: (H, B, L, 2 N), of a sequence: (B, 3, H) of bias, A_log and D
    int L, int H, int batch, int u_batch, int u_row, int dt_batch, int dt_row, int z_batch, int z_row, int dy_batch, int dy_row,
    int du_batch, int du_row, int dz_batch, int dz_row, int ddt_batch, int ddt_row) {
  SeenBack& seen = *(SeenBack*)memory;
  const int h = blockIdx.x, E = H * WIDTH, warp = threadIdx.x / 32, mine = 16 * warp;
  const long long b = blockIdx.y;
  u += b * u_batch;
  const Given given = {u + h * WIDTH, u + E, dt + b * dt_batch + h, z + b * z_batch + h * WIDTH, u_row, dt_row, z_row, L};
  const float decay = A[h], skip = D[h];
  Steps steps;
  make(steps, given, bias[h]);
  bring(seen, given, steps, decay);
  __syncthreads();
  const bool some = mine < L;
  const int own = mine + threadIdx.x % 32 / 4;
  Factor x[TILES / 2], low[TILES / 2];  // of the warp's steps: rows g and g + 8 of a tile, and of the next one
#pragma unroll
  for (int i = 0; i < TILES / 2; ++i) as_first(x[i], seen.x, mine, 16 * i);
  float dskip = 0.0f;
  dBC += (h * (long long)batch + b) * L * (2 * N);
  if (some) {
    Tile y[TILES] = {};
    mix(y, seen, mine);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = own + 8 * r;
      Row gate, grad;
      read(gate, given.z + (t * z_row + channel()), t < L);
      read(grad, dy + (b * dy_batch + t * dy_row + h * WIDTH + channel()), t < L);
      unsigned* to = (unsigned*)seen.dy[t] + threadIdx.x % 4;
      float row = 0.0f;
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const unsigned xs = x[i / 2][i % 2 * 2 + r];
        const float x0 = lower(xs), x1 = upper(xs), y0 = y[i][2 * r], y1 = y[i][2 * r + 1];
        const float2 first = gated(y0 + skip * x0, lower(gate[i]), lower(grad[i]));
        const float2 second = gated(y1 + skip * x1, upper(gate[i]), upper(grad[i]));
        gate[i] = pair(first.x, second.x);
        dskip += first.y * x0 + second.y * x1;
        const unsigned passed = pair(first.y, second.y);
        low[i / 2][i % 2 * 2 + r] = to[4 * i] = passed;
        row += lower(passed) * y0 + upper(passed) * y1;
      }
      if (t < L) write(dz + (b * dz_batch + t * dz_row + h * WIDTH + channel()), gate);
      row = over_quad(row);
      if (threadIdx.x % 4 == 0) seen.rows[t] = row;
    }
    const float here = seen.elapsed[own], there = seen.elapsed[own + 8];
    Tile dC[2] = {};
#pragma unroll 1
    for (int first = 0; first <= mine; first += 16) {
      Tile a = {}, c = {};
#pragma unroll
      for (int i = 0; i < TILES / 2; ++i) {
        Factor other;
        over_columns(other, seen.x, first, 16 * i);
        multiply(a, low[i], other[0], other[1]);
        multiply(c, low[i], other[2], other[3]);
      }
      Factor dG, B;
      weighed<false>(dG, a, c, seen, first, own, first == mine, here, there);
      over_rows(B, seen.B, first, 0);
      multiply(dC[0], dG, B[0], B[1]);
      multiply(dC[1], dG, B[2], B[3]);
    }
    put_states(dBC + N, dC, own, L);
  }
  dskip = over_warp(dskip);
  if (threadIdx.x % 32 == 0) seen.skip[warp] = dskip;
  __syncthreads();
  if (some) {
    const float here = seen.reduced[own], there = seen.reduced[own + 8];
    Factor B;
    as_first(B, seen.B, mine, 0);
    Tile dx[TILES] = {}, dB[2] = {};
#pragma unroll 1
    for (int first = mine; first < L; first += 16) {
      Factor C, M;
      scores<true>(M, B, seen.C, seen, first, own, first == mine, here, there);
      Tile d = {}, e = {};
#pragma unroll
      for (int i = 0; i < TILES; i += 2) {
        Factor other;
        over_rows(other, seen.dy, first, 8 * i);
        multiply(dx[i], M, other[0], other[1]);
        multiply(dx[i + 1], M, other[2], other[3]);
        over_columns(other, seen.dy, first, 8 * i);
        multiply(d, x[i / 2], other[0], other[1]);
        multiply(e, x[i / 2], other[2], other[3]);
      }
      weighed<true>(M, d, e, seen, first, own, first == mine, here, there);
      over_rows(C, seen.C, first, 0);
      multiply(dB[0], M, C[0], C[1]);
      multiply(dB[1], M, C[2], C[3]);
    }
    put_states(dBC, dB, own, L);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int s = own + 8 * r;
      float column = 0.0f;
      Row row;
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const unsigned xs = x[i / 2][i % 2 * 2 + r], passed = low[i / 2][i % 2 * 2 + r];
        const float d0 = dx[i][2 * r], d1 = dx[i][2 * r + 1];
        column += d0 * lower(xs) + d1 * upper(xs);
        row[i] = pair(d0 + skip * lower(passed), d1 + skip * upper(passed));
      }
      if (s < L) write(du + (b * du_batch + s * du_row + h * WIDTH + channel()), row);
      column = over_quad(column);
      if (threadIdx.x % 4 == 0) seen.columns[s] = column;
    }
  }
  __syncthreads();
  if (warp) return;
  // Delta: of what its step brings in, and of all that has decayed since. What comes later is summed from the end.
  float after = 0.0f, later[LANE_ROWS], own_sum = 0.0f;
#pragma unroll
  for (int i = LANE_ROWS - 1; i >= 0; --i) {
    const int t = threadIdx.x * LANE_ROWS + i;
    if (t < L) own_sum += seen.rows[t] - seen.columns[t];
    later[i] = own_sum;
  }
  after = own_sum;
#pragma unroll
  for (int bits = 1; bits < 32; bits *= 2) {
    const float other = __shfl_down_sync(ALL, after, bits);
    if (threadIdx.x + bits < 32) after += other;
  }
  after -= own_sum;
  float dbias = 0.0f, ddecay = 0.0f;
#pragma unroll
  for (int i = 0; i < LANE_ROWS; ++i) {
    const int t = threadIdx.x * LANE_ROWS + i;
    if (t >= L) continue;
    const float delta = steps.delta[i], all = later[i] + after;
    // softplus' is 1 - exp(-softplus)
    const float found = (seen.columns[t] * rcp(delta + TINY) + decay * all) * (1.0f - ex2(-delta * LOG2E));
    const unsigned low_bits = pair(found, found);
    ddt[b * ddt_batch + t * ddt_row + h] = (bf16)low_bits;
    dbias += found;
    ddecay += delta * all;
  }
  dbias = over_warp(dbias);
  ddecay = over_warp(ddecay);
  if (threadIdx.x) return;
  float all = 0.0f;
  for (int i = 0; i < WARPS; ++i) all += seen.skip[i];
  dparameter += b * 3 * H + h;
  dparameter[0] = dbias;
  dparameter[H] = decay * ddecay;
  dparameter[2 * H] = all;
}
