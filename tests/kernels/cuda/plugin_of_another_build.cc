// SPDX-License-Identifier: Apache-2.0
// A library whose table says that it is of another build. What follows the
// name in it is not there: the loader must not look at it.

struct Table {
  const char* abi;
};

extern "C" {
extern const Table tandem_cuda_plugin;
const Table tandem_cuda_plugin = {"0.0.9 another build"};
}
