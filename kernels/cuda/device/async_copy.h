// SPDX-License-Identifier: Apache-2.0
// What warps that copy and warps that compute share on sm_90 and later:
// barriers in shared memory, and copies that arrive at them by themselves.
//
// A barrier goes through phases. A phase ends when all its arrivals and all
// the bytes that were announced for it are there; its parity is 0 for the
// first, then 1, 0, and so on. AwaitPhase(b, parity) waits for the end of the
// latest phase of that parity; before the first phase has ended, parity 1
// counts as ended: a ring's places start out free.
//
// Bulk copies write shared memory through the asynchronous proxy, in which
// warpgroup matrix steps read: no ProxyFence between them. After CopyAsync16
// with CopyAsyncArrive, who reads fences once it has waited.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_ASYNC_COPY_H_
#define TANDEM_KERNELS_CUDA_DEVICE_ASYNC_COPY_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_map.h"

namespace tandem::kernels::cuda {

#ifdef __CUDACC__

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TANDEM_BULK_COPIES 1
#define TANDEM_SM90_ASM(text) asm volatile text
#else
#define TANDEM_BULK_COPIES 0
#define TANDEM_SM90_ASM(text) static_cast<void>(0)
#endif

// Made by one thread: InitBarrier for each, FenceBarriers,
// then a Barrier of the block.
TANDEM_DEVICE void InitBarrier(Grid& g, AsyncBarrier* b, int arrivals) {
  TANDEM_SM90_ASM(
      ("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(g, b)),
       "r"(arrivals)
       : "memory"));
}
TANDEM_DEVICE void FenceBarriers(Grid&) {
  TANDEM_SM90_ASM(("fence.mbarrier_init.release.cluster;" ::: "memory"));
}

TANDEM_DEVICE void Arrive(Grid& g, AsyncBarrier* b) {
  TANDEM_SM90_ASM(
      ("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(g, b))
       : "memory"));
}
// And announces copies of so many bytes.
TANDEM_DEVICE void ArriveExpecting(Grid& g, AsyncBarrier* b, int bytes) {
  TANDEM_SM90_ASM(
      ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
           SharedAddress(g, b)),
       "r"(bytes)
       : "memory"));
}
TANDEM_DEVICE void AwaitPhase(Grid& g, AsyncBarrier* b, int parity) {
  TANDEM_SM90_ASM(
      ("{.reg .pred p;\n"
       "again:\n"
       "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
       "@!p bra again;}" ::"r"(SharedAddress(g, b)),
       "r"(parity)
       : "memory"));
}
// One of the barrier's arrivals, once all CopyAsync16 of this thread so far
// have landed.
TANDEM_DEVICE void CopyAsyncArrive(Grid& g, AsyncBarrier* b) {
  TANDEM_SM90_ASM(("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                       SharedAddress(g, b))
                   : "memory"));
}

// Contiguous memory; addresses and size are multiples of 16. One thread.
TANDEM_DEVICE void CopyBulk(Grid& g, void* shared, const void* global,
                            int bytes, AsyncBarrier* b) {
  TANDEM_SM90_ASM(
      ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
       "[%0], [%1], %2, [%3];" ::"r"(SharedAddress(g, shared)),
       "l"(global), "r"(bytes), "r"(SharedAddress(g, b))
       : "memory"));
}

// The part of `map` that begins at (column, row), as its MakeTensorMap says;
// zeros outside of the matrix. One thread; `shared` is a multiple of 1024.
TANDEM_DEVICE void CopyTile(Grid& g, void* shared, const TensorMap& map,
                            int column, int row, AsyncBarrier* b) {
  TANDEM_SM90_ASM(
      ("cp.async.bulk.tensor.2d.shared::cluster.global.tile"
       ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
           SharedAddress(g, shared)),
       "l"(&map), "r"(column), "r"(row), "r"(SharedAddress(g, b))
       : "memory"));
}

#else

#define TANDEM_BULK_COPIES 1

#endif  // __CUDACC__

// A place in a ring of kStages, and the parity of the phase that it is in.
template <int kStages>
struct RingPlace {
  int slot = 0;
  int parity = 0;
  TANDEM_DEVICE void Next() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_ASYNC_COPY_H_
