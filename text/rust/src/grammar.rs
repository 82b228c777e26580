// SPDX-License-Identifier: Apache-2.0
//! Which tokens may come next, so that a text matches a JSON schema, a regex, a
//! grammar or one of some choices: `llguidance` over a trie of the model's own
//! token bytes (decode_table.rs).
//!
//! - A token stands for the bytes that decoding makes of it behind other text.
//!   Byte tokens stand for their byte. Special tokens stand for no text: only a
//!   grammar that names one (`<|tool|>`) lets it through.
//! - End tokens are never text. One more id than the vocabulary has stands for
//!   all of them in the trie: its bit says that the text may end.
//! - A state is a function of the grammar and the tokens so far.
//!
//! What comes from clients is bounded in size by the caller, in nesting here
//! (these parsers recurse), and in work and memory by `limits`; compiling runs
//! on a thread of its own, whose stack is large and which the caller does not
//! wait for without end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{mpsc, Arc};
use std::time::Duration;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{
    ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{Matcher, ParserFactory};
use serde_json::{json, Value};

use crate::failure::{shorten, Failure, Kind, Outcome};
use crate::lark_checks::checked_lark;
use crate::regex_checks::{anchored, check_patterns, check_regex};
use crate::structural_tag;
use crate::tokenizer::TextTokenizer;

/// Longer tokens match nothing: the trie has ten bits for a token's depth.
const MAX_TOKEN_BYTES: usize = 1000;
/// Of address space; a chain of as many references as fit a schema takes some
/// 100 MB.
const COMPILE_STACK_BYTES: usize = 512 << 20;
/// First tokens behind which a new grammar is tried.
const TRIED_TOKENS: usize = 3;
/// Tokens behind which a mask is made that nobody asked for: only masks renew
/// the lexer's fuel, which a replay of a long output would else use up.
const REFUEL_TOKENS: usize = 32;
/// Compilations at once, those that nobody waits for any more included.
const MAX_COMPILING: usize = 8;
/// What rules and their parse come to, of a source's byte.
const RULE_BYTES: usize = 16;

/// A quarter of a second of compiling at most and, of a sequence, some 50 MB
/// and 20 ms for a mask at the very worst; real schemas stay far below. Big
/// ones of FHIR need half of the fuel.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1000,
        max_lexer_states: 30_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// A model's tokens, as grammars need them; shared by all of its grammars.
pub struct Vocabulary {
    factory: ParserFactory,
    vocab_size: usize,
}

/// What a constraint is written in; the values are `GrammarKind` of
/// text/grammar.h.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Source {
    JsonSchema = 0,
    JsonObject = 1,
    Regex = 2,
    Lark = 3,
    /// Text is a JSON list of strings.
    Choice = 4,
    StructuralTag = 5,
}

impl Source {
    pub fn from_code(code: i32) -> Outcome<Source> {
        Ok(match code {
            0 => Source::JsonSchema,
            1 => Source::JsonObject,
            2 => Source::Regex,
            3 => Source::Lark,
            4 => Source::Choice,
            5 => Source::StructuralTag,
            _ => return Err(Failure::invalid(format!("{code} is no kind of grammar"))),
        })
    }
}

// Others may copy it at the same time.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Grammar>();
};

/// One sequence's state.
pub struct Grammar {
    matcher: Matcher,
    vocab_size: usize,
    /// Tokens since the last mask.
    unmasked: usize,
    /// About what it took when it was new.
    new_bytes: usize,
}

impl Vocabulary {
    /// Of a model with `vocab_size` ids, of which the tokenizer may know fewer.
    pub fn new(tokenizer: &TextTokenizer, vocab_size: usize) -> Outcome<Vocabulary> {
        if vocab_size == 0 || vocab_size >= 1 << 22 {
            return Err(Failure::invalid(format!(
                "a vocabulary of {vocab_size} ids, expected 1 to {}",
                (1 << 22) - 1
            )));
        }
        let mut words = Vec::with_capacity(vocab_size + 1);
        for id in 0..vocab_size {
            let special = tokenizer.special_token(id as u32);
            let bytes = match &special {
                Some(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat(),
                None => tokenizer.table.bytes(id).to_vec(),
            };
            // Text never has the marker's byte, nor does a token alone.
            let is_text = special.is_some() || !bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER);
            words.push(if is_text && bytes.len() <= MAX_TOKEN_BYTES { bytes } else { Vec::new() });
        }
        words.push(b"\xff<|end of text|>".to_vec());
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, vocab_size as u32), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| Failure { kind: Kind::Internal, message: format!("{error:#}") })?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Vocabulary { factory, vocab_size })
    }

    /// Compiles `text` within `budget`; `vocabulary` must be shared, since a
    /// compilation that takes longer goes on to its end, unheard.
    pub fn compile(
        vocabulary: &Arc<Vocabulary>,
        source: Source,
        text: &str,
        budget: Duration,
    ) -> Outcome<Grammar> {
        static COMPILING: AtomicUsize = AtomicUsize::new(0);
        if COMPILING.fetch_add(1, Ordering::AcqRel) >= MAX_COMPILING {
            COMPILING.fetch_sub(1, Ordering::AcqRel);
            return Err(Failure {
                kind: Kind::ResourceExhausted,
                message: format!("{MAX_COMPILING} grammars are being compiled already: try again"),
            });
        }
        let (send, receive) = mpsc::sync_channel(1);
        let (owned, text) = (vocabulary.clone(), text.to_owned());
        let spawned = std::thread::Builder::new()
            .name("grammar".into())
            .stack_size(COMPILE_STACK_BYTES)
            .spawn(move || {
                let made = crate::quietly(|| owned.compile_here(source, &text));
                COMPILING.fetch_sub(1, Ordering::AcqRel);
                // Whoever stopped waiting hears nothing.
                let _ = send.send(made);
            });
        if spawned.is_err() {
            COMPILING.fetch_sub(1, Ordering::AcqRel);
            return Err(Failure {
                kind: Kind::ResourceExhausted,
                message: "no thread to compile the grammar on".into(),
            });
        }
        receive.recv_timeout(budget).unwrap_or_else(|_| {
            Err(Failure {
                kind: Kind::DeadlineExceeded,
                message: format!(
                    "compiling takes more than {} ms: make it simpler",
                    budget.as_millis()
                ),
            })
        })
    }

    fn compile_here(&self, source: Source, text: &str) -> Outcome<Grammar> {
        let grammar = match source {
            Source::JsonSchema => {
                let schema: Value = serde_json::from_str(text)
                    .map_err(|error| Failure::invalid(format!("not JSON: {error}")))?;
                if !schema.is_object() && !schema.is_boolean() {
                    return Err(Failure::invalid("a schema is an object or a boolean"));
                }
                check_patterns(&schema)?;
                TopLevelGrammar::from_json_schema(schema)
            }
            Source::JsonObject => TopLevelGrammar::from_json_schema(json!({"type": "object"})),
            Source::Regex => {
                check_regex(text)?;
                TopLevelGrammar::from_regex(anchored(text))
            }
            Source::Lark => TopLevelGrammar::from_lark(checked_lark(text)?.to_owned()),
            Source::Choice => TopLevelGrammar::from_lark(choices(text)?),
            Source::StructuralTag => TopLevelGrammar::from_lark(structural_tag::to_lark(text)?),
        };
        let mut parser = self.factory.create_parser(grammar).map_err(reason)?;
        // What the first mask brings along is part of every copy.
        parser.start_without_prompt();
        parser.compute_mask().map_err(reason)?;
        let new_bytes = parser.parser.lexer_stats().num_bytes + RULE_BYTES * text.len();
        let mut made = Grammar {
            matcher: Matcher::new(Ok(parser)),
            vocab_size: self.vocab_size,
            unmasked: 0,
            new_bytes,
        };
        let mut mask = vec![0; self.vocab_size.div_ceil(32)];
        made.mask(&mut mask)?;
        if mask.iter().all(|word| *word == 0) {
            return Err(Failure::invalid(
                "no text with a character matches, or none that this model's tokens can write",
            ));
        }
        made.try_first(&mask)?;
        Ok(made)
    }
}

/// One terminal: alternatives of which one begins another stay apart.
fn choices(text: &str) -> Outcome<String> {
    let values: Vec<String> = serde_json::from_str(text)
        .map_err(|error| Failure::invalid(format!("not a list of texts: {error}")))?;
    if values.iter().all(|value| value.is_empty()) {
        return Err(Failure::invalid("a text that is not empty is needed"));
    }
    let quoted: Vec<String> = values.iter().map(|value| structural_tag::quoted(value)).collect();
    Ok(format!("start: CHOICE\nCHOICE: {}\n", quoted.join(" | ")))
}

/// The compiler's own words, without what it says of its state.
fn reason(error: impl std::fmt::Display) -> Failure {
    let text = format!("{error:#}");
    let text = text.split("\n<").next().unwrap_or("");
    Failure::invalid(shorten(text.trim()))
}

impl Grammar {
    /// Clears `words` and sets the bits of ids that may come next; says
    /// whether the text may end here. A text that can only end has none.
    pub fn mask(&mut self, words: &mut [u32]) -> Outcome<bool> {
        words.fill(0);
        if self.ended() {
            return Ok(true);
        }
        self.unmasked = 0;
        let allowed: SimpleVob = self.matcher.compute_mask().map_err(reason)?;
        for (to, from) in words.iter_mut().zip(allowed.as_slice()) {
            *to = *from;
        }
        let may_end = allowed.is_allowed(self.vocab_size as u32);
        let end = self.vocab_size;
        if end / 32 < words.len() {
            words[end / 32] &= !(1 << (end % 32));
        }
        Ok(may_end)
    }

    /// What the first tokens come to, on a copy: some grammars cost too much
    /// only behind them.
    fn try_first(&self, mask: &[u32]) -> Outcome<()> {
        let ids = (0..self.vocab_size as u32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 != 0);
        for id in ids.take(TRIED_TOKENS) {
            let mut copy = self.copy();
            copy.consume(&[id])?;
            copy.mask(&mut mask.to_vec())?;
        }
        Ok(())
    }

    /// Goes on by `tokens`; those before the first one that may not come
    /// there. The state is behind these.
    pub fn consume(&mut self, tokens: &[u32]) -> Outcome<usize> {
        for (at, token) in tokens.iter().enumerate() {
            if *token as usize >= self.vocab_size || self.ended() {
                return Ok(at);
            }
            if self.unmasked >= REFUEL_TOKENS {
                self.unmasked = 0;
                self.matcher.compute_mask().map_err(reason)?;
            }
            if self.matcher.try_consume_tokens(&[*token]).map_err(reason)? == 0 {
                return Ok(at);
            }
            self.unmasked += 1;
        }
        Ok(tokens.len())
    }

    /// A state of its own, as this one is now, that shares nothing: a lexer that
    /// errs once errs for good, for all that have it in common.
    pub fn copy(&self) -> Grammar {
        Grammar { matcher: self.matcher.deep_clone(), ..*self }
    }

    pub fn new_bytes(&self) -> usize {
        self.new_bytes
    }

    /// No more token may come.
    pub fn ended(&self) -> bool {
        self.matcher.is_stopped()
    }
}
