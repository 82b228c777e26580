// SPDX-License-Identifier: Apache-2.0
// A library whose factory says that it is of another build. What follows the
// name in its table is not there: the loader must not look at it.

extern "C" const void* tandem_cuda_plugin() {
  static const struct { const char* abi; } kTable = {"0.0.9 another build"};
  return &kTable;
}
