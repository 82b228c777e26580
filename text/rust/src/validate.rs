// SPDX-License-Identifier: Apache-2.0
//! Checks a tokenizer.json before the `tokenizers` crate sees it. That crate
//! trusts its input: it takes the last of duplicate keys and ids, hands out
//! other ids than the file states, panics on short merges, retries nested
//! components exponentially and frees long tokens recursively. Here every such
//! file is an error that names the field, found in one pass over the bytes.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::panic::catch_unwind;

use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::Deserialize;
use serde_json::Value;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

use crate::added_tokens::Beside;
use crate::failure::{shorten, Failure, Outcome};
use crate::token_id::{Id, MAX_VOCAB};

const MAX_MERGES: usize = 1 << 21;
const MAX_ADDED: usize = 1 << 17;
/// Bytes of one token. Real ones end near 500 (runs of spaces).
const MAX_TOKEN_BYTES: usize = 4096;
/// Unigram's trie frees itself recursively, one frame for each byte.
const MAX_UNIGRAM_TOKEN_BYTES: usize = 1024;
/// Components: the crate tries variants of nested sequences in turn.
const MAX_COMPONENT_DEPTH: usize = 12;
const MAX_COMPONENT_NODES: usize = 200_000;
const MAX_COMPONENT_STRING: usize = 16 << 10;
/// How many times longer normalizers may make a text, all steps together.
const MAX_GROWTH: u64 = 64;

#[derive(Deserialize)]
pub struct Checked {
    #[serde(default)]
    version: Option<String>,
    #[serde(default)]
    #[allow(dead_code)]
    truncation: Option<IgnoredAny>,
    #[serde(default)]
    #[allow(dead_code)]
    padding: Option<IgnoredAny>,
    #[serde(default)]
    pub added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    pub decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
pub struct Added {
    pub id: Id,
    pub content: String,
    /// In another file.
    #[serde(skip)]
    place: Option<String>,
}

impl Added {
    /// Where it is named, of `added_tokens` at `index`.
    pub fn place(&self, index: usize) -> String {
        self.place.clone().unwrap_or_else(|| format!("added_tokens[{index}]"))
    }
}

#[derive(Deserialize)]
struct Model {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    vocab: Vocab,
    #[serde(default)]
    merges: Option<Merges>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    unk_id: Option<u64>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    dropout: Option<f64>,
}

enum Vocab {
    Ids(Vec<(String, Id)>),
    Scores(Vec<(String, f64)>),
}

impl Vocab {
    fn len(&self) -> usize {
        match self {
            Vocab::Ids(list) => list.len(),
            Vocab::Scores(list) => list.len(),
        }
    }
}

fn bounded<E: serde::de::Error>(len: usize, limit: usize, what: &str) -> Result<(), E> {
    if len < limit {
        return Ok(());
    }
    Err(E::custom(format!("more than {limit} {what}")))
}

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Vocab, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Vocab;
            fn expecting(&self, out: &mut fmt::Formatter) -> fmt::Result {
                out.write_str("an object of token: id, or a list of [token, score]")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    bounded(list.len(), MAX_VOCAB, "tokens")?;
                    list.push(entry);
                }
                Ok(Vocab::Ids(list))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vocab, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = seq.next_element()? {
                    bounded(list.len(), MAX_VOCAB, "tokens")?;
                    list.push(entry);
                }
                Ok(Vocab::Scores(list))
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

/// A list of "a b" or of ["a", "b"], never both.
struct Merges(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Merges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Merges, D::Error> {
        struct Pair(String, String);
        impl<'de> Deserialize<'de> for Pair {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Pair, D::Error> {
                struct Reader;
                impl<'de> Visitor<'de> for Reader {
                    type Value = Pair;
                    fn expecting(&self, out: &mut fmt::Formatter) -> fmt::Result {
                        out.write_str("\"a b\" or [\"a\", \"b\"]")
                    }
                    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Pair, E> {
                        let mut parts = text.split(' ');
                        match (parts.next(), parts.next(), parts.next()) {
                            (Some(a), Some(b), None) => Ok(Pair(a.into(), b.into())),
                            _ => Err(E::custom("a merge is two tokens with one space between")),
                        }
                    }
                    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Pair, A::Error> {
                        let two = (seq.next_element()?, seq.next_element()?);
                        match (two, seq.next_element::<IgnoredAny>()?) {
                            ((Some(a), Some(b)), None) => Ok(Pair(a, b)),
                            _ => Err(A::Error::custom("a merge is a list of two tokens")),
                        }
                    }
                }
                deserializer.deserialize_any(Reader)
            }
        }
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Merges;
            fn expecting(&self, out: &mut fmt::Formatter) -> fmt::Result {
                out.write_str("a list of merges")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Merges, A::Error> {
                let mut list = Vec::new();
                while let Some(Pair(a, b)) = seq.next_element()? {
                    bounded(list.len(), MAX_MERGES, "merges")?;
                    list.push((a, b));
                }
                Ok(Merges(list))
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

/// Reads and checks `json`, to whose tokens those `beside` come that have an id
/// and that it lacks. What passes is safe to give to the crate, apart from
/// panics on odd components, which the caller catches.
pub fn check(json: &str, beside: &[Beside]) -> Outcome<Checked> {
    let mut reader = serde_json::Deserializer::from_str(json);
    let mut checked: Checked = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let why = shorten(&error.inner().to_string());
        match error.path().to_string().as_str() {
            "." => Failure::invalid(why),  // the whole
            path => Failure::invalid(format!("{}: {why}", shorten(path))),
        }
    })?;
    reader.end().map_err(|error| Failure::invalid(format!("after the object: {error}")))?;
    match checked.version.as_deref() {
        None | Some("1.0") => {}
        Some(other) => {
            return Err(Failure::invalid(format!(
                "version: \"{}\" is not known, only \"1.0\"",
                shorten(other)
            )))
        }
    }
    check_model(&checked.model)?;
    merge(&mut checked.added_tokens, beside);
    check_added(&checked)?;
    for (name, value) in [
        ("normalizer", &checked.normalizer),
        ("pre_tokenizer", &checked.pre_tokenizer),
        ("post_processor", &checked.post_processor),
        ("decoder", &checked.decoder),
    ] {
        check_component(name, value)?;
    }
    build_components(&checked)?;
    let growth = growth(&checked.normalizer);
    if growth > MAX_GROWTH {
        return Err(Failure::invalid(format!(
            "normalizer: its steps may make a text {growth} times longer; the limit is {MAX_GROWTH}"
        )));
    }
    Ok(checked)
}

fn check_model(model: &Model) -> Outcome<()> {
    if model.vocab.len() == 0 {
        return Err(Failure::invalid("model.vocab: is empty"));
    }
    if model.dropout.is_some_and(|p| p != 0.0) {
        return Err(Failure::invalid(
            "model.dropout: must be null or 0; a random encoding cannot be served",
        ));
    }
    let kind = model.kind.as_deref().unwrap_or(match (&model.merges, &model.vocab) {
        (Some(_), _) => "BPE",
        (_, Vocab::Scores(_)) => "Unigram",
        _ => "",
    });
    match (kind, &model.vocab) {
        ("Unigram", Vocab::Scores(list)) => {
            if let Some(id) = model.unk_id.filter(|id| *id >= list.len() as u64) {
                return Err(Failure::invalid(format!(
                    "model.unk_id: {id} is outside model.vocab's {} tokens",
                    list.len()
                )));
            }
            check_tokens(list.iter().map(|x| x.0.as_str()), MAX_UNIGRAM_TOKEN_BYTES)
        }
        ("BPE" | "WordPiece" | "WordLevel", Vocab::Ids(list)) => {
            check_tokens(list.iter().map(|x| x.0.as_str()), MAX_TOKEN_BYTES)?;
            check_ids(list)?;
            if kind == "BPE" {
                check_merges(model, list)?;
            }
            Ok(())
        }
        ("Unigram", _) => Err(Failure::invalid("model.vocab: Unigram needs a list of [token, score]")),
        ("BPE" | "WordPiece" | "WordLevel", _) => {
            Err(Failure::invalid(format!("model.vocab: {kind} needs an object of token: id")))
        }
        _ => Err(Failure::invalid(format!(
            "model.type: \"{}\" is not one of BPE, Unigram, WordPiece, WordLevel",
            shorten(kind)
        ))),
    }
}

fn check_tokens<'a>(tokens: impl Iterator<Item = &'a str>, limit: usize) -> Outcome<()> {
    let mut seen = HashSet::new();
    for token in tokens {
        if token.len() > limit {
            return Err(Failure::invalid(format!(
                "model.vocab: token \"{}\" has {} bytes, the limit is {limit}",
                shorten(token),
                token.len()
            )));
        }
        if !seen.insert(token) {
            return Err(Failure::invalid(format!(
                "model.vocab: token \"{}\" is there twice",
                shorten(token)
            )));
        }
    }
    Ok(())
}

fn check_ids(list: &[(String, Id)]) -> Outcome<()> {
    let highest = list.iter().map(|x| x.1 .0).max().unwrap_or(0) as usize;
    // Gaps are legal, but tables are indexed by id: memory must stay in
    // proportion to the file.
    if highest > 4 * list.len() + 4096 {
        return Err(Failure::invalid(format!(
            "model.vocab: id {highest} with only {} tokens",
            list.len()
        )));
    }
    let mut owner: Vec<Option<&str>> = vec![None; highest + 1];
    for (token, id) in list {
        if let Some(other) = owner[id.0 as usize].replace(token) {
            return Err(Failure::invalid(format!(
                "model.vocab: id {} belongs to \"{}\" and to \"{}\"",
                id.0,
                shorten(other),
                shorten(token)
            )));
        }
    }
    Ok(())
}

fn check_merges(model: &Model, list: &[(String, Id)]) -> Outcome<()> {
    let Some(Merges(merges)) = &model.merges else {
        return Err(Failure::invalid("model.merges: BPE needs a list of merges"));
    };
    let ids: HashMap<&str, u32> = list.iter().map(|(t, id)| (t.as_str(), id.0)).collect();
    let prefix = model.continuing_subword_prefix.as_deref().unwrap_or("");
    if let Some(unk) = &model.unk_token {
        if !ids.contains_key(unk.as_str()) {
            return Err(Failure::invalid(format!(
                "model.unk_token: \"{}\" is not in model.vocab",
                shorten(unk)
            )));
        }
    }
    let mut seen = HashSet::with_capacity(merges.len());
    let mut joined = String::new();
    for (rank, (a, b)) in merges.iter().enumerate() {
        let fail = |why: String| Err(Failure::invalid(format!("model.merges[{rank}]: {why}")));
        let rest = b.strip_prefix(prefix);
        // A merge with an empty side would make a token out of itself.
        if a.is_empty() || rest.is_none_or(str::is_empty) {
            return fail("a side is empty or lacks continuing_subword_prefix".into());
        }
        joined.clear();
        joined.push_str(a);
        joined.push_str(rest.unwrap_or(b));
        for part in [a, b, &joined] {
            if !ids.contains_key(part.as_str()) {
                return fail(format!("\"{}\" is not in model.vocab", shorten(part)));
            }
        }
        if !seen.insert((ids[a.as_str()], ids[b.as_str()])) {
            return fail(format!("\"{}\" + \"{}\" is there twice", shorten(a), shorten(b)));
        }
    }
    Ok(())
}

fn merge(list: &mut Vec<Added>, beside: &[Beside]) {
    let known: HashSet<String> = list.iter().map(|token| token.content.clone()).collect();
    let missing = beside.iter().filter(|other| !known.contains(&other.token.content));
    list.extend(missing.filter_map(|other| {
        let (content, place) = (other.token.content.clone(), Some(other.place.clone()));
        other.id.map(|id| Added { id, content, place })
    }));
}

fn check_added(checked: &Checked) -> Outcome<()> {
    let list = &checked.added_tokens;
    if list.len() > MAX_ADDED {
        return Err(Failure::invalid(format!("added_tokens: more than {MAX_ADDED}")));
    }
    let mut contents = HashSet::new();
    let mut ids = HashSet::new();
    let most = 4 * (checked.model.vocab.len() + list.len()) + 4096;
    for (index, token) in list.iter().enumerate() {
        let fail = |why: String| Err(Failure::invalid(format!("{}{why}", token.place(index))));
        if token.content.is_empty() {
            return fail(".content: is empty".into());
        }
        if token.content.len() > MAX_TOKEN_BYTES {
            return fail(format!(".content: more than {MAX_TOKEN_BYTES} bytes"));
        }
        if !contents.insert(token.content.as_str()) {
            return fail(format!(".content: \"{}\" is there twice", shorten(&token.content)));
        }
        if !ids.insert(token.id) {
            return fail(format!(".id: {} is there twice", token.id.0));
        }
        if token.id.0 as usize > most {
            return fail(format!(".id: {} leaves too wide a gap", token.id.0));
        }
    }
    Ok(())
}

/// Builds each component alone, so that an error or a panic in one has a name.
fn build_components(checked: &Checked) -> Outcome<()> {
    fn build<T: for<'de> Deserialize<'de>>(name: &str, value: &Value) -> Outcome<()> {
        let built = catch_unwind(|| {
            serde_json::from_value::<Option<T>>(value.clone()).map(|_| ()).map_err(|e| e.to_string())
        });
        built
            .unwrap_or_else(|_| Err("its parser failed on this value".into()))
            .map_err(|why| Failure::invalid(format!("{name}: {}", shorten(&why))))
    }
    build::<NormalizerWrapper>("normalizer", &checked.normalizer)?;
    build::<PreTokenizerWrapper>("pre_tokenizer", &checked.pre_tokenizer)?;
    build::<PostProcessorWrapper>("post_processor", &checked.post_processor)?;
    build::<DecoderWrapper>("decoder", &checked.decoder)
}

fn check_component(name: &str, value: &Value) -> Outcome<()> {
    fn walk(value: &Value, depth: usize, nodes: &mut usize, key: &str) -> Result<(), String> {
        *nodes += 1;
        if depth > MAX_COMPONENT_DEPTH {
            return Err(format!("nested more than {MAX_COMPONENT_DEPTH} deep"));
        }
        if *nodes > MAX_COMPONENT_NODES {
            return Err(format!("more than {MAX_COMPONENT_NODES} values"));
        }
        match value {
            // A table in base64, megabytes long in some models.
            Value::String(text) if text.len() > MAX_COMPONENT_STRING && key != "precompiled_charsmap" => {
                Err(format!("{key}: a string of {} bytes", text.len()))
            }
            Value::Array(list) => list.iter().try_for_each(|x| walk(x, depth + 1, nodes, key)),
            Value::Object(map) => map.iter().try_for_each(|(k, x)| walk(x, depth + 1, nodes, k)),
            _ => Ok(()),
        }
    }
    walk(value, 0, &mut 0, name)
        .map_err(|why| Failure::invalid(format!("{name}: {}", shorten(&why))))
}

/// The most a normalizer multiplies the length of a text by; saturating.
fn growth(normalizer: &Value) -> u64 {
    let len = |value: &Value, key: &str| value[key].as_str().map_or(0, str::len) as u64;
    match normalizer["type"].as_str() {
        Some("Sequence") => normalizer["normalizers"]
            .as_array()
            .into_iter()
            .flatten()
            .fold(1u64, |product, step| product.saturating_mul(growth(step))),
        Some("Replace") => {
            let pattern = len(&normalizer["pattern"], "String").max(1);
            len(normalizer, "content").div_ceil(pattern).max(1)
        }
        _ => 1,
    }
}
