// SPDX-License-Identifier: Apache-2.0
//! Added tokens that files beside tokenizer.json name, as `transformers` reads
//! them: `added_tokens_decoder` of tokenizer_config.json or, where that is not
//! there, added_tokens.json; and lists of special tokens, by their text alone.

use std::collections::HashSet;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use crate::failure::{shorten, Failure, Outcome};
use crate::template::{parse_object, special_token, TOKEN_NAMES};
use crate::token_id::Id;

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_MAP: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";
const DECODER: &str = "added_tokens_decoder";

/// A model's files that say what its tokens are; all but the first are empty
/// where there is none.
pub struct TokenizerFiles<'a> {
    pub tokenizer: &'a str,
    /// tokenizer_config.json
    pub config: &'a str,
    /// special_tokens_map.json
    pub special_map: &'a str,
    /// added_tokens.json
    pub added: &'a str,
}

/// A token, and the file and field that name it.
pub struct Beside {
    pub place: String,
    pub token: AddedToken,
    /// None: whatever id its text has.
    pub id: Option<Id>,
}

#[derive(Deserialize)]
struct Described {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

fn read_object(json: &str, file: &str) -> Outcome<Map<String, Value>> {
    if json.is_empty() { Ok(Map::new()) } else { parse_object(json, file) }
}

/// Tokens with ids in their order, then those without.
pub fn read(files: &TokenizerFiles) -> Outcome<Vec<Beside>> {
    let config = read_object(files.config, CONFIG)?;
    let special_map = read_object(files.special_map, SPECIAL_MAP)?;
    let mut listed = Vec::new();
    add_listed(&config, CONFIG, &mut listed)?;
    let decoder = config.get(DECODER).filter(|value| !value.is_null());
    if decoder.is_none() {
        add_listed(&special_map, SPECIAL_MAP, &mut listed)?;
    }
    // What has a role is special, whatever is said of it.
    let role = |name: &&str| {
        [&config, &special_map].into_iter().find_map(|map| special_token(map, name).ok().flatten())
    };
    let roles: HashSet<String> = TOKEN_NAMES.iter().filter_map(role).collect();
    let mut tokens = match decoder {
        Some(Value::Object(map)) => of_decoder(map, &roles)?,
        Some(_) => return Err(Failure::invalid(format!("{CONFIG}: {DECODER}: is not an object"))),
        None => {
            let special = roles.iter().chain(listed.iter().map(|x| &x.token.content));
            of_added(&read_object(files.added, ADDED)?, &special.map(String::as_str).collect())?
        }
    };
    tokens.sort_by_key(|token| token.id.map(|id| id.0));
    tokens.append(&mut listed);
    Ok(tokens)
}

fn of_decoder(map: &Map<String, Value>, roles: &HashSet<String>) -> Outcome<Vec<Beside>> {
    let mut tokens = Vec::new();
    for (key, value) in map {
        let place = format!("{CONFIG}: {DECODER}[\"{}\"]", shorten(key));
        let id = key.parse().ok().and_then(Id::new);
        let id = id.ok_or_else(|| Failure::invalid(format!("{place}: is no id")))?;
        let mut token = described(value, &place)?;
        token.special |= roles.contains(&token.content);
        tokens.push(Beside { place, token, id: Some(id) });
    }
    Ok(tokens)
}

fn of_added(map: &Map<String, Value>, special: &HashSet<&str>) -> Outcome<Vec<Beside>> {
    let mut tokens = Vec::new();
    for (content, value) in map {
        let place = format!("{ADDED}: \"{}\"", shorten(content));
        let id = value.as_u64().and_then(Id::new);
        let id = id.ok_or_else(|| Failure::invalid(format!("{place}: is given no id")))?;
        let token = AddedToken::from(content.clone(), special.contains(content.as_str()));
        tokens.push(Beside { place, token, id: Some(id) });
    }
    Ok(tokens)
}

fn described(value: &Value, place: &str) -> Outcome<AddedToken> {
    let read = Described::deserialize(value).map_err(|error| {
        Failure::invalid(format!("{place}: {}", shorten(&error.to_string())))
    })?;
    Ok(AddedToken {
        content: read.content,
        single_word: read.single_word,
        lstrip: read.lstrip,
        rstrip: read.rstrip,
        normalized: read.normalized.unwrap_or(!read.special),
        special: read.special,
    })
}

/// Special tokens beyond those with a role: in a list, or by names of the
/// model's own.
fn add_listed(map: &Map<String, Value>, file: &str, tokens: &mut Vec<Beside>) -> Outcome<()> {
    for field in ["additional_special_tokens", "extra_special_tokens"] {
        let values: Vec<&Value> = match map.get(field) {
            None | Some(Value::Null) => continue,
            Some(Value::Array(list)) => list.iter().collect(),
            Some(Value::Object(names)) => names.values().collect(),
            Some(_) => {
                let why = format!("{file}: {field}: is neither a list nor an object");
                return Err(Failure::invalid(why));
            }
        };
        for value in values {
            let place = format!("{file}: {field}");
            let token = match value {
                Value::String(content) => AddedToken::from(content.clone(), true),
                value => {
                    let mut token = described(value, &place)?;
                    token.special = true;
                    token
                }
            };
            tokens.push(Beside { place, token, id: None });
        }
    }
    Ok(())
}
