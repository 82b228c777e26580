// SPDX-License-Identifier: Apache-2.0
// A target needs a file; precompiled.h is what this one is for.
