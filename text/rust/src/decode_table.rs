// SPDX-License-Identifier: Apache-2.0
//! What each id contributes to the decoded text, as bytes, so that decoding a
//! stream costs O(1) for each token and gives the same text as decoding the
//! whole: both are a walk over this table (text/stream_decoder.cc).
//!
//! The `tokenizers` crate decodes lists, and its stream decoder re-decodes a
//! window and compares prefixes. That waits without limit while bytes stay
//! broken, and fails where a later token changes earlier text. Every decoder
//! that generative models use is a map from (token, is it the first?) to
//! bytes, followed at most by dropping spaces at the start; a file whose
//! decoder is not of that form is refused at load, by name.
//!
//! One difference from the crate, on purpose: its ByteFallback turns a whole
//! run of byte tokens to U+FFFD if any byte in it is broken, which no stream
//! could have known when it emitted the good ones. Here only the broken bytes
//! are replaced, one U+FFFD each.

use serde_json::Value;
use tokenizers::decoders::wordpiece::cleanup;
use tokenizers::normalizers::replace::Replace;
use tokenizers::{Decoder, Tokenizer};

use crate::failure::{shorten, Failure, Outcome};

/// `SPECIAL`: left out when special tokens are skipped. `PRESENT`: the id has
/// a token; others (gaps) decode to nothing.
const SPECIAL: u8 = 1;
const PRESENT: u8 = 2;

pub struct DecodeTable {
    /// Piece i is bytes[ends[i-1]..ends[i]], for an id that is not the first.
    later: Pieces,
    /// The same for the first id of a text; absent where equal to `later`.
    first: Option<Pieces>,
    flags: Vec<u8>,
    strip: u32,
    strip_count: u32,
    one_mark_per_byte: bool,
}

#[derive(Default, PartialEq)]
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Pieces {
    fn push(&mut self, piece: &[u8]) -> Outcome<()> {
        self.bytes.extend_from_slice(piece);
        let end = u32::try_from(self.bytes.len())
            .map_err(|_| Failure::invalid("model.vocab: decodes to more than 4 GiB"))?;
        self.ends.push(end);
        Ok(())
    }
}

/// DecodeTable lent to C++ (text/ffi.h); pointers live as long as the handle.
#[repr(C)]
pub struct TableView {
    num_ids: usize,
    later_bytes: *const u8,
    later_ends: *const u32,
    first_bytes: *const u8,
    first_ends: *const u32,
    flags: *const u8,
    strip: u32,
    strip_count: u32,
    one_mark_per_byte: bool,
}

enum Step {
    Replace(Replace),
    ByteFallback,
    ByteLevel,
    Strip { content: char, start: usize, stop: usize },
    Metaspace { replacement: char, drops_first: bool },
    WordPiece { prefix: String, cleanup: bool },
    /// No decoder at all: tokens with a space between.
    Spaces,
}

#[derive(Default)]
struct Chain {
    steps: Vec<Step>,
    fused: bool,
    strip: Option<(char, usize)>,
    one_mark_per_byte: bool,
}

impl DecodeTable {
    pub fn new(tokenizer: &Tokenizer, decoder: &Value) -> Outcome<DecodeTable> {
        let mut chain = Chain::default();
        if decoder.is_null() {
            chain.steps.push(Step::Spaces);
        } else {
            chain.add(decoder, "decoder")?;
        }
        let vocabulary = tokenizer.get_vocab(true);
        let added = tokenizer.get_added_vocabulary();
        let num_ids = vocabulary.values().max().map_or(0, |id| *id as usize + 1);
        let mut table = DecodeTable {
            later: Pieces::default(),
            first: None,
            flags: vec![0; num_ids],
            strip: chain.strip.map_or(0, |x| x.0 as u32),
            strip_count: chain.strip.map_or(0, |x| x.1 as u32),
            one_mark_per_byte: chain.one_mark_per_byte,
        };
        let mut first = Pieces::default();
        for id in 0..num_ids {
            let Some(token) = tokenizer.id_to_token(id as u32) else {
                table.later.push(&[])?;
                first.push(&[])?;
                continue;
            };
            table.flags[id] = PRESENT;
            if added.is_special_token(&token) {
                table.flags[id] |= SPECIAL;
            }
            table.later.push(&chain.piece(&token, false)?)?;
            first.push(&chain.piece(&token, true)?)?;
        }
        table.first = (first != table.later).then_some(first);
        Ok(table)
    }

    /// What `id` adds to a text behind other text; nothing beyond the table.
    pub fn bytes(&self, id: usize) -> &[u8] {
        let Some(end) = self.later.ends.get(id) else { return &[] };
        let begin = if id == 0 { 0 } else { self.later.ends[id - 1] };
        &self.later.bytes[begin as usize..*end as usize]
    }

    pub fn is_special(&self, id: usize) -> bool {
        self.flags.get(id).is_some_and(|flags| flags & SPECIAL != 0)
    }

    pub fn view(&self) -> TableView {
        let first = self.first.as_ref().unwrap_or(&self.later);
        TableView {
            num_ids: self.flags.len(),
            later_bytes: self.later.bytes.as_ptr(),
            later_ends: self.later.ends.as_ptr(),
            first_bytes: first.bytes.as_ptr(),
            first_ends: first.ends.as_ptr(),
            flags: self.flags.as_ptr(),
            strip: self.strip,
            strip_count: self.strip_count,
            one_mark_per_byte: self.one_mark_per_byte,
        }
    }
}

impl Chain {
    /// Appends the steps of one decoder; `path` names it in errors.
    fn add(&mut self, decoder: &Value, path: &str) -> Outcome<()> {
        let fail = |why: &str| Err(Failure::invalid(format!("{path}: {why}")));
        let kind = decoder["type"].as_str().unwrap_or("");
        if self.fused && !matches!(kind, "Strip" | "Fuse") {
            return fail("nothing but Strip can follow once tokens are fused");
        }
        let character = |key: &str| decoder[key].as_str().and_then(|x| x.chars().next());
        let number = |key: &str| decoder[key].as_u64().unwrap_or(0) as usize;
        match kind {
            "Sequence" => {
                let list = decoder["decoders"].as_array();
                for (index, step) in list.into_iter().flatten().enumerate() {
                    self.add(step, &format!("{path}.decoders[{index}]"))?;
                }
            }
            "Replace" => match serde_json::from_value(decoder.clone()) {
                Ok(replace) => self.steps.push(Step::Replace(replace)),
                Err(error) => return fail(&shorten(&error.to_string())),
            },
            "ByteFallback" => {
                self.one_mark_per_byte = true;
                self.steps.push(Step::ByteFallback);
            }
            "ByteLevel" => {
                self.steps.push(Step::ByteLevel);
                self.fused = true;
            }
            "Fuse" => self.fused = true,
            "Strip" => {
                let Some(content) = character("content") else {
                    return fail("content is not a character");
                };
                let (start, stop) = (number("start"), number("stop"));
                if !self.fused {
                    self.steps.push(Step::Strip { content, start, stop });
                } else if stop > 0 || self.strip.is_some() {
                    return fail("text already streamed cannot be stripped at its end");
                } else {
                    self.strip = Some((content, start.min(1 << 20)));
                }
            }
            "Metaspace" => {
                let Some(replacement) = character("replacement") else {
                    return fail("replacement is not a character");
                };
                let never = decoder["prepend_scheme"].as_str() == Some("never")
                    || decoder["add_prefix_space"].as_bool() == Some(false);
                self.steps.push(Step::Metaspace { replacement, drops_first: !never });
            }
            "WordPiece" => self.steps.push(Step::WordPiece {
                prefix: decoder["prefix"].as_str().unwrap_or("##").into(),
                cleanup: decoder["cleanup"].as_bool().unwrap_or(true),
            }),
            other => {
                return fail(&format!(
                    "type \"{}\" is not supported; ByteLevel, ByteFallback, Fuse, Metaspace, \
                     Replace, Sequence, Strip and WordPiece are",
                    shorten(other)
                ))
            }
        }
        Ok(())
    }

    fn piece(&self, token: &str, is_first: bool) -> Outcome<Vec<u8>> {
        let mut text = token.to_owned();
        for step in &self.steps {
            text = match step {
                Step::ByteFallback => match fallback_byte(&text) {
                    // Later steps are about characters; a lone byte has none.
                    Some(byte) => return Ok(vec![byte]),
                    None => text,
                },
                Step::ByteLevel => return Ok(byte_level(&text)),
                Step::Replace(replace) => replace
                    .decode_chain(vec![text])
                    .map_err(|error| Failure::invalid(format!("decoder: {error}")))?
                    .concat(),
                Step::Strip { content, start, stop } => strip(&text, *content, *start, *stop),
                Step::Metaspace { replacement, drops_first } => {
                    let space = if is_first && *drops_first { "" } else { " " };
                    text.replace(*replacement, space)
                }
                Step::WordPiece { prefix, cleanup: clean } => {
                    let piece = match text.strip_prefix(prefix.as_str()) {
                        _ if is_first => text,
                        Some(rest) => rest.to_owned(),
                        None => format!(" {text}"),
                    };
                    if *clean { cleanup(&piece) } else { piece }
                }
                Step::Spaces if is_first => text,
                Step::Spaces => format!(" {text}"),
            };
        }
        Ok(text.into_bytes())
    }
}

/// The byte that a token "<0xE5>" stands for.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// GPT-2's alphabet back to bytes: printable bytes stand for themselves, the
/// others are numbered from U+0100. A token with any other character (an
/// added one, with a space in it) stands for its own UTF-8.
fn byte_level(token: &str) -> Vec<u8> {
    let is_printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let byte = |c: char| match c as u32 {
        b if is_printable(b) => Some(b as u8),
        n @ 0x100..=0x143 => (0..=255u32)
            .filter(|b| !is_printable(*b))
            .nth((n - 0x100) as usize)
            .map(|b| b as u8),
        _ => None,
    };
    token.chars().map(byte).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.into())
}

fn strip(text: &str, content: char, start: usize, stop: usize) -> String {
    let from_start = text.chars().take(start).take_while(|c| *c == content).count();
    let rest = &text[from_start * content.len_utf8()..];
    let from_end = rest.chars().rev().take(stop).take_while(|c| *c == content).count();
    rest[..rest.len() - from_end * content.len_utf8()].to_owned()
}
