// AdamW over many tensors: the squares of their gradients, summed; then, with all gradients scaled down to a norm, one step.
//
// A block takes CHUNK numbers of one tensor. Which one it finds in the table, which is passed by value: pointers of a
// graph's gradients are known only while it is recorded, when nothing can be copied to the device.
//
// TENSORS of a table, given by whoever compiles it: 56 of 64 bytes each keep arguments below 4096 bytes, which all GPUs take.

#define CHUNK 8192
#define THREADS 256

struct Table {
  float* parameter[TENSORS];
  const float* gradient[TENSORS];
  float* mean[TENSORS];    // of gradients
  float* square[TENSORS];  // mean of their squares
  const float* rate[TENSORS];
  const float* step[TENSORS];
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

extern "C" __global__ void __launch_bounds__(THREADS) squares(const __grid_constant__ Table table, int count, float* sums) {
  const int i = tensor_of(table, count);
  const long long from = (long long)(blockIdx.x - table.first[i]) * CHUNK;
  const long long left = table.size[i] - from;
  const float* g = table.gradient[i] + from;
  float sum = 0.0f;
  if (left >= CHUNK && ((unsigned long long)g & 15) == 0) {
#pragma unroll
    for (int k = 0; k < CHUNK / 4 / THREADS; ++k) {
      const float4 v = ((const float4*)g)[k * THREADS + threadIdx.x];
      sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
  } else {
    for (int k = threadIdx.x; k < CHUNK && k < left; k += THREADS) sum += g[k] * g[k];
  }
  __shared__ float warps[THREADS / 32];
  for (int bit = 16; bit >= 1; bit /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < THREADS / 32; ++w) sum += warps[w];
    sums[blockIdx.x] = sum;
  }
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

extern "C" __global__ void __launch_bounds__(THREADS) adamw(
    const __grid_constant__ Table table, int count, const float* norm, float most, float beta1, float beta2, float log_beta1,
    float log_beta2, float eps) {
  const int i = tensor_of(table, count);
  const long long from = (long long)(blockIdx.x - table.first[i]) * CHUNK;
  const long long left = table.size[i] - from;
  const float rate = *table.rate[i], step = *table.step[i];
  Rule rule;
  const float least = most / (*norm + 1e-6f);
  rule.scale = most < 0.0f || least >= 1.0f ? 1.0f : least;  // a norm that is no number makes all of them none, as torch's
  rule.size = rate / -expm1f(step * log_beta1);  // 1 - beta1^step, without its cancellation
  rule.root = rsqrtf(-expm1f(step * log_beta2));
  rule.decay = rate * table.decay[i];
  rule.beta1 = beta1; rule.beta2 = beta2; rule.eps = eps;
  float* p = table.parameter[i] + from; const float* g = table.gradient[i] + from;
  float* m = table.mean[i] + from; float* v = table.square[i] + from;
  const unsigned long long places = (unsigned long long)p | (unsigned long long)g | (unsigned long long)m | (unsigned long long)v;
  if (left >= CHUNK && (places & 15) == 0) {
#pragma unroll 2
    for (int k = threadIdx.x; k < CHUNK / 4; k += THREADS) {
      float4 p4 = ((float4*)p)[k], m4 = ((float4*)m)[k], v4 = ((float4*)v)[k];
      const float4 g4 = ((const float4*)g)[k];
      rule.apply(p4.x, g4.x, m4.x, v4.x);
      rule.apply(p4.y, g4.y, m4.y, v4.y);
      rule.apply(p4.z, g4.z, m4.z, v4.z);
      rule.apply(p4.w, g4.w, m4.w, v4.w);
      ((float4*)p)[k] = p4; ((float4*)m)[k] = m4; ((float4*)v)[k] = v4;
    }
  } else {
    for (int k = threadIdx.x; k < CHUNK && k < left; k += THREADS) rule.apply(p[k], g[k], m[k], v[k]);
  }
}
