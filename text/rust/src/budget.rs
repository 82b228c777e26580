// SPDX-License-Identifier: Apache-2.0
//! The bytes that one render of a template may spend. Thread-local: a render
//! stays on its thread.

use std::cell::Cell;

use minijinja::{Error, ErrorKind};

thread_local! {
    static BUDGET: Cell<u64> = const { Cell::new(0) };
}

/// Sets what the render on this thread may spend, in bytes.
pub fn set_budget(bytes: u64) {
    BUDGET.with(|left| left.set(bytes));
}

/// Takes `bytes` from it.
pub fn charge(bytes: usize) -> Result<(), Error> {
    BUDGET.with(|left| match left.get().checked_sub(bytes as u64) {
        Some(rest) => {
            left.set(rest);
            Ok(())
        }
        None => Err(Error::new(
            ErrorKind::OutOfFuel,
            "the template exceeded its memory budget",
        )),
    })
}
