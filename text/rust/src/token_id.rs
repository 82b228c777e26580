// SPDX-License-Identifier: Apache-2.0
//! Ids of tokens as the files of a tokenizer give them.

use serde::de::{Deserializer, Error as _};
use serde::Deserialize;

pub const MAX_VOCAB: usize = 1 << 20;

/// An id in [0, MAX_VOCAB).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Id(pub u32);

impl Id {
    pub fn new(id: u64) -> Option<Id> {
        (id < MAX_VOCAB as u64).then_some(Id(id as u32))
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Id, D::Error> {
        let wide = i64::deserialize(deserializer)?;
        match u32::try_from(wide) {
            Ok(id) if (id as usize) < MAX_VOCAB => Ok(Id(id)),
            _ => Err(D::Error::custom(format!(
                "id {wide} is outside [0, {}]",
                MAX_VOCAB - 1
            ))),
        }
    }
}
