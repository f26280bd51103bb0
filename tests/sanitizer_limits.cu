// Two right programs that compute-sanitizer finds fault with, so that what it says of our kernels can be read.
// "two places": warps meet at one named barrier from two instructions (synccheck). "one lane": a stage is refilled by
// a bulk copy when one lane of each warp, after a warp barrier, has said that its warp has read it (racecheck).
// "each lane": every lane says so; nothing is found.
#include <cstdint>
#include <cstdio>
#include <cstring>

__global__ void two_places(int *out) {
  __shared__ int held[256];
  int t = threadIdx.x;
  if (t >= 256) return;
  held[t] = t;
  if (t < 128) {
    asm volatile("bar.sync 1, 256;" ::: "memory");
    out[t] = held[t + 128];
  } else {
    held[t] = 2 * t;
    asm volatile("bar.sync 1, 256;" ::: "memory");
    out[t] = 3 * held[t - 128];
  }
}

__device__ uint32_t at(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void wait(uint64_t *barrier, int parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again; }" ::"r"(
                   at(barrier)),
               "r"(parity)
               : "memory");
}

template <bool EACH>
__global__ void ring(const int *in, int *out, int steps) {
  __shared__ alignas(128) int stage[64];
  __shared__ alignas(8) uint64_t full, empty;
  int t = threadIdx.x;
  if (t == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at(&full)));
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(&empty)), "r"(EACH ? 64 : 2));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  if (t >= 64) {
    if (t == 64)
      for (int n = 0; n < steps; ++n) {
        if (n) wait(&empty, (n - 1) & 1);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 256;" ::"r"(at(&full)) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(
                         at(stage)),
                     "l"(in + 64 * n), "r"(at(&full))
                     : "memory");
      }
    return;
  }
  int sum = 0;
  for (int n = 0; n < steps; ++n) {
    wait(&full, n & 1);
    sum += stage[t];
    if (!EACH) __syncwarp();
    if (EACH || t % 32 == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(&empty)) : "memory");
  }
  out[t] = sum;
}

int main(int, char **arguments) {
  const int steps = 8;
  int host[64 * steps], back[256], *in, *out, bad = 0;
  for (int n = 0; n < 64 * steps; ++n) host[n] = n % 17;
  cudaMalloc(&in, sizeof host);
  cudaMalloc(&out, sizeof back);
  cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
  bool places = !strcmp(arguments[1], "two places");
  if (places) two_places<<<1, 288>>>(out);
  else if (!strcmp(arguments[1], "one lane")) ring<false><<<1, 96>>>(in, out, steps);
  else ring<true><<<1, 96>>>(in, out, steps);
  cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
  for (int t = 0; t < (places ? 256 : 64); ++t) {
    int want = 0;
    for (int n = 0; n < steps; ++n) want += host[64 * n + t % 64];
    if (places) want = t < 128 ? 2 * (t + 128) : 3 * (t - 128);
    bad += back[t] != want;
  }
  printf("%s: %d wrong, %s\n", arguments[1], bad, cudaGetErrorString(cudaGetLastError()));
  return bad != 0;
}
