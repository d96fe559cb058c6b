// AdamW over many tensors: the norm of their gradients; then, with all gradients scaled down to a norm, one step.
//
// A block takes CHUNK numbers of one tensor. Which one it finds in the table, which is passed by value: pointers of a
// graph's gradients are known only while it is recorded, when nothing can be copied to the device.
//
// An optimiser's step is the end of an update, and everything waits for it. So a thread asks for all that it reads, 8
// numbers of each tensor in two pieces of 16 bytes, before it computes anything, in a tensor's last, partial chunk, too:
// four such blocks are on a multiprocessor at a time, with 128 KB on the way.
//
// What wants all blocks of a launch, or of a tensor, to have come so far is done by the last of them, which counters
// find (`done`). They wrap around, so that they are zero again whenever a kernel has ended. Sums are added in the order of
// blocks, not in that in which they came: the same gradients give the same bits.
//
// TENSORS of a table, of 64 bytes each: given by whoever compiles it, who knows how many arguments the device takes.

#define CHUNK 2048
#define THREADS 256
#define EACH (CHUNK / THREADS)

struct Table {
  float* parameter[TENSORS];
  const float* gradient[TENSORS];
  float* mean[TENSORS];    // of gradients
  float* square[TENSORS];  // mean of their squares
  const float* rate[TENSORS];
  float* step[TENSORS];
  long long size[TENSORS];
  float decay[TENSORS];
  int first[TENSORS];  // block
};

static __device__ __forceinline__ int tensor_of(const Table& table, int count) {
  int low = 0, high = count - 1;  // the last whose first block is not after this one
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first[middle] <= (int)blockIdx.x) low = middle; else high = middle - 1;
  }
  return low;
}

static __device__ __forceinline__ bool aligned(const void* place) { return ((unsigned long long)place & 15) == 0; }

// A thread's numbers of the `left` that are in this chunk, in fours; zeros where there are none. FULL: there are CHUNK, and
// they are aligned. Streaming, since nobody reads them again soon; but for gradients where the norm is computed.
template <bool FULL, bool STREAM = true>
static __device__ __forceinline__ void read(const float* from, int left, float (&to)[EACH]) {
#pragma unroll
  for (int j = 0; j < EACH; j += 4) {
    const int k = j * THREADS + 4 * threadIdx.x;
    if (FULL) {
      const float4 four = STREAM ? __ldcs((const float4*)(from + k)) : *(const float4*)(from + k);
      to[j] = four.x; to[j + 1] = four.y; to[j + 2] = four.z; to[j + 3] = four.w;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) to[j + c] = k + c < left ? from[k + c] : 0.0f;
    }
  }
}

template <bool FULL, bool STREAM = true>
static __device__ __forceinline__ void write(float* to, int left, const float (&from)[EACH]) {
#pragma unroll
  for (int j = 0; j < EACH; j += 4) {
    const int k = j * THREADS + 4 * threadIdx.x;
    if (FULL) {
      const float4 four = make_float4(from[j], from[j + 1], from[j + 2], from[j + 3]);
      if (STREAM) __stcs((float4*)(to + k), four); else *(float4*)(to + k) = four;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) if (k + c < left) to[k + c] = from[j + c];
    }
  }
}

// Of all threads, for the first.
static __device__ __forceinline__ float sum_of_block(float sum) {
  __shared__ float warps[THREADS / 32];
  for (int bit = 16; bit >= 1; bit /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) for (int w = 1; w < THREADS / 32; ++w) sum += warps[w];
  return sum;
}

// sums: one of each block, those of earlier tables before `from`; in all `total`. The last block of the last table writes
// the norm.
extern "C" __global__ void __launch_bounds__(THREADS) squares(
    const __grid_constant__ Table table, int count, float* sums, int from, int total, unsigned int* done, float* found) {
  const int i = tensor_of(table, count);
  const long long start = (long long)(blockIdx.x - table.first[i]) * CHUNK, rest = table.size[i] - start;
  const int left = rest < CHUNK ? (int)rest : CHUNK;
  const float* g = table.gradient[i] + start;
  float values[EACH];
  if (left == CHUNK && aligned(g)) read<true, false>(g, left, values); else read<false>(g, left, values);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < EACH; ++j) sum += values[j] * values[j];
  sum = sum_of_block(sum);
  __shared__ bool last;
  if (threadIdx.x == 0) {
    sums[from + blockIdx.x] = sum;
    __threadfence();
    last = atomicInc(done, total - 1) == total - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  sum = 0.0f;
#pragma unroll 8
  for (int k = threadIdx.x; k < total; k += THREADS) sum += __ldcg(sums + k);
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) *found = sqrtf(sum);
}

struct Rule {
  float scale, size, root, decay, beta1, beta2, eps;  // of gradients, of a step, 1 / sqrt(bias of squares), ...
  __device__ __forceinline__ void apply(float& p, float g, float& m, float& v) const {
    g *= scale;
    p -= decay * p;
    m = beta1 * m + (1.0f - beta1) * g;
    v = beta2 * v + (1.0f - beta2) * g * g;
    p -= size * m / (sqrtf(v) * root + eps);
  }
};

// done: one for each tensor of this table.
extern "C" __global__ void __launch_bounds__(THREADS, 4) adamw(
    const __grid_constant__ Table table, int count, unsigned int* done, const float* norm, float most, float beta1,
    float beta2, float log_beta1, float log_beta2, float eps) {
  const int i = tensor_of(table, count);
  const long long start = (long long)(blockIdx.x - table.first[i]) * CHUNK, rest = table.size[i] - start;
  const int left = rest < CHUNK ? (int)rest : CHUNK;
  float* p = table.parameter[i] + start; const float* g = table.gradient[i] + start;
  float* m = table.mean[i] + start; float* v = table.square[i] + start;
  const bool full = left == CHUNK && aligned(p) && aligned(g) && aligned(m) && aligned(v);
  float ps[EACH], gs[EACH], ms[EACH], vs[EACH];
  if (full) {
    read<true>(g, left, gs); read<true>(m, left, ms); read<true>(v, left, vs); read<true>(p, left, ps);
  } else {
    read<false>(g, left, gs); read<false>(m, left, ms); read<false>(v, left, vs); read<false>(p, left, ps);
  }
  __shared__ Rule shared;
  float step = 0.0f;
  if (threadIdx.x == 0) {
    const float rate = *table.rate[i], least = most / (*norm + 1e-6f);
    step = *table.step[i] + 1.0f;
    shared.scale = most < 0.0f || least >= 1.0f ? 1.0f : least;  // a norm that is no number makes all of them none, as torch's
    shared.size = rate / -expm1f(step * log_beta1);  // 1 - beta1^step, without its cancellation
    shared.root = rsqrtf(-expm1f(step * log_beta2));
    shared.decay = rate * table.decay[i];
    shared.beta1 = beta1; shared.beta2 = beta2; shared.eps = eps;
  }
  __syncthreads();
  const Rule rule = shared;
#pragma unroll
  for (int j = 0; j < EACH; ++j) rule.apply(ps[j], gs[j], ms[j], vs[j]);
  if (full) {
    write<true>(m, left, ms); write<true>(v, left, vs); write<true, false>(p, left, ps);
  } else {
    write<false>(m, left, ms); write<false>(v, left, vs); write<false>(p, left, ps);
  }
  if (threadIdx.x == 0) {  // whoever counts has had the step in hand, so that the last may change it
    const unsigned int blocks = (i + 1 < count ? table.first[i + 1] : (int)gridDim.x) - table.first[i];
    if (blocks == 1 || atomicInc(done + i, blocks - 1) == blocks - 1) *table.step[i] = step;
  }
}
