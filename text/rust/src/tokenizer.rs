// SPDX-License-Identifier: Apache-2.0
//! One loaded tokenizer: the `tokenizers` crate for encoding, our own table
//! for decoding (decode_table.rs says why).

use std::collections::HashSet;
use std::panic::{catch_unwind, AssertUnwindSafe};

use tokenizers::{AddedToken, Tokenizer};

use crate::added_tokens::{self, Beside, TokenizerFiles};
use crate::decode_table::DecodeTable;
use crate::failure::{shorten, Failure, Kind, Outcome};
use crate::quietly;
use crate::validate;

pub struct TextTokenizer {
    inner: Tokenizer,
    pub table: DecodeTable,
}

fn add(inner: &mut Tokenizer, tokens: impl IntoIterator<Item = AddedToken>) -> Outcome<()> {
    let added = inner.add_tokens(tokens);
    added.map(|_| ()).map_err(|error| Failure::invalid(shorten(&format!("{error}"))))
}

impl TextTokenizer {
    /// Errors begin with the name of the file that is wrong.
    pub fn from_files(files: &TokenizerFiles) -> Outcome<TextTokenizer> {
        let beside = added_tokens::read(files)?;
        quietly(|| TextTokenizer::new(files.tokenizer, &beside)).map_err(|failure| Failure {
            kind: failure.kind,
            message: format!("tokenizer.json: {}", failure.message),
        })
    }

    fn new(json: &str, beside: &[Beside]) -> Outcome<TextTokenizer> {
        let checked = validate::check(json, beside)?;
        let mut inner: Tokenizer = json
            .parse()
            .map_err(|error| Failure::invalid(shorten(&format!("{error}"))))?;
        // A file may cut or pad what it encodes; neither is the file's
        // business when a prompt is served whole.
        inner
            .with_truncation(None)
            .map_err(|error| Failure::invalid(format!("truncation: {error}")))?;
        inner.with_padding(None);
        let (numbered, listed): (Vec<_>, Vec<_>) = beside.iter().partition(|x| x.id.is_some());
        add(&mut inner, numbered.iter().map(|x| x.token.clone()))?;
        for (index, token) in checked.added_tokens.iter().enumerate() {
            // The crate gives unknown added tokens the next free id, whatever
            // the file says; the model was trained on what the file says.
            let given = inner.token_to_id(&token.content);
            if given != Some(token.id.0) {
                return Err(Failure::invalid(format!(
                    "{}.id: {} for \"{}\", but its place in the vocabulary gives it {}",
                    token.place(index),
                    token.id.0,
                    shorten(&token.content),
                    given.map_or("none".into(), |id| id.to_string()),
                )));
            }
        }
        let mut known: HashSet<&str> =
            checked.added_tokens.iter().map(|token| token.content.as_str()).collect();
        let mut special = Vec::new();
        for Beside { place, token, .. } in listed {
            let content = token.content.as_str();
            if !content.is_empty() && inner.token_to_id(content).is_none() {
                // `transformers` would give it an id that no file states.
                return Err(Failure::invalid(format!(
                    "lacks \"{}\", of {place}",
                    shorten(content)
                )));
            }
            if known.insert(content) {
                special.push(token.clone());
            }
        }
        add(&mut inner, special)?;
        // A template that names a token it does not have fails when applied.
        let applied = catch_unwind(AssertUnwindSafe(|| inner.encode_fast("", true).is_ok()));
        if !applied.unwrap_or(false) {
            return Err(Failure::invalid("post_processor: fails on an empty text"));
        }
        let table = DecodeTable::new(&inner, &checked.decoder)?;
        Ok(TextTokenizer { inner, table })
    }

    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Outcome<Vec<i32>> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            // The crate's message may quote the text.
            .map_err(|_| Failure {
                kind: Kind::InvalidArgument,
                message: "the tokenizer cannot encode this text (no unknown token?)".into(),
            })?;
        Ok(encoding.get_ids().iter().map(|id| *id as i32).collect())
    }

    /// The name of `id`, where it is a special token.
    pub fn special_token(&self, id: u32) -> Option<String> {
        if !self.table.is_special(id as usize) {
            return None;
        }
        self.inner.id_to_token(id)
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }
}
