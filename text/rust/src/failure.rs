// SPDX-License-Identifier: Apache-2.0
//! Why a call failed, and in which words.

/// Why a call failed; the values are `ErrorKind` of text/ffi.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Kind {
    InvalidArgument = 1,
    ResourceExhausted = 2,
    NotFound = 3,
    Internal = 4,
    PermissionDenied = 5,
    Unavailable = 6,
    DeadlineExceeded = 7,
}

#[derive(Debug)]
pub struct Failure {
    pub kind: Kind,
    pub message: String,
}

impl Failure {
    pub fn invalid(message: impl Into<String>) -> Failure {
        Failure { kind: Kind::InvalidArgument, message: message.into() }
    }
}

pub type Outcome<T> = Result<T, Failure>;

/// Text from a file as part of a message: never long, never with controls.
pub fn shorten(text: &str) -> String {
    let mut out: String = text.chars().take(120).flat_map(|c| {
        if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] }
    }).collect();
    if text.chars().nth(120).is_some() {
        out.push_str("...");
    }
    out
}
