// SPDX-License-Identifier: Apache-2.0
//! Bounds on regexes, alone or in schemas, before any compiler recurses along
//! them.

use serde_json::Value;

use crate::failure::{Failure, Outcome};

/// Brackets within brackets, of regexes and grammars, and negations of these.
const MAX_NESTING: usize = 100;
/// Of a regex, or of a terminal with all that it names: states of a lexer may
/// come to the square of it.
pub const MAX_REGEX_BYTES: usize = 8 << 10;

/// Without anchors at its ends: it must match the whole text anyway.
pub fn anchored(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if (rest.len() - rest.trim_end_matches('\\').len()) % 2 == 0 => rest,
        _ => regex,
    }
}

/// Brackets that open, whatever they mean there, less those that close: an
/// upper bound, but for closing ones in strings, which is how real grammars
/// come out below it.
pub fn check_nesting(text: &str) -> Outcome<()> {
    let (mut depth, mut negations) = (0usize, 0usize);
    for c in text.chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            '~' => negations += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth.max(negations) > MAX_NESTING {
            return Err(Failure::invalid(format!(
                "brackets more than {MAX_NESTING} deep, or more negations (~)"
            )));
        }
    }
    Ok(())
}

pub fn check_regex(regex: &str) -> Outcome<()> {
    if regex.len() > MAX_REGEX_BYTES {
        return Err(Failure::invalid(format!(
            "a regex of {} bytes; at most {MAX_REGEX_BYTES}",
            regex.len()
        )));
    }
    check_nesting(regex)
}

/// Regexes in a schema, wherever they may stand.
pub fn check_patterns(schema: &Value) -> Outcome<()> {
    match schema {
        Value::Array(items) => items.iter().try_for_each(check_patterns),
        Value::Object(map) => map.iter().try_for_each(|(key, value)| {
            if let (true, Some(regex)) = (key == "pattern", value.as_str()) {
                check_regex(regex).map_err(|error| at("pattern", error))?;
            }
            if let (true, Some(patterns)) = (key == "patternProperties", value.as_object()) {
                for regex in patterns.keys() {
                    check_regex(regex).map_err(|error| at("patternProperties", error))?;
                }
            }
            check_patterns(value)
        }),
        _ => Ok(()),
    }
}

fn at(place: &str, error: Failure) -> Failure {
    Failure { message: format!("{place}: {}", error.message), ..error }
}
