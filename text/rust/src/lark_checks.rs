// SPDX-License-Identifier: Apache-2.0
//! Bounds on Lark grammars. Above all, how large terminals become when all that
//! they name stands in them: what a compiler does before it can count. `A: B B`,
//! `B: C C` and so on are few bytes and a regex without bound.
//!
//! Not a parser of Lark, but it cuts text as llguidance's lexer does: a name
//! that was read otherwise here than there would hide what it stands for. Every
//! name in the line before a colon is taken for one that is defined there.

use std::collections::HashMap;

use crate::failure::{Failure, Outcome};
use crate::regex_checks::{check_nesting, check_patterns, MAX_REGEX_BYTES};

/// Rules may name each other in a chain, and compilers recurse along it.
const MAX_RULES: usize = 5000;

#[derive(Clone, Copy, PartialEq)]
enum Piece<'a> {
    Literal(usize),
    /// A value behind %json and the like, of so many bytes.
    Json(usize),
    Name(&'a str),
    Colon,
    Newline,
    Open,
    Close,
}

/// Of a name: bytes of its own, and names that stand in it.
type Definitions<'a> = HashMap<&'a str, (usize, Vec<&'a str>)>;

/// `text`, if it is not obviously in another language.
pub fn checked_lark(text: &str) -> Outcome<&str> {
    if text.contains("::=") {
        return Err(Failure::invalid(
            "this is GBNF or EBNF (\"::=\"); Lark is understood: rule: \"text\" OTHER | /regex/, \
             beginning with start",
        ));
    }
    check_nesting(text)?;
    check_size(text)?;
    Ok(text)
}

/// Refuses terminals of more than MAX_REGEX_BYTES, more than MAX_RULES
/// definitions, and braces that close what this text did not open: it may come
/// to stand between some.
pub fn check_size(text: &str) -> Outcome<()> {
    let mut definitions = Definitions::new();
    let mut current: Vec<&str> = Vec::new();
    let mut line: Vec<&str> = Vec::new();
    let (mut count, mut depth) = (0usize, 0usize);
    for piece in pieces(text)?.into_iter().chain([Piece::Newline]) {
        match piece {
            Piece::Literal(bytes) if bytes > MAX_REGEX_BYTES => {
                return Err(Failure::invalid(format!(
                    "a text or regex of {bytes} bytes; at most {MAX_REGEX_BYTES}"
                )));
            }
            Piece::Literal(bytes) | Piece::Json(bytes) => {
                for name in &current {
                    definitions.entry(name).or_default().0 += bytes + 1;
                }
            }
            Piece::Name(name) => line.push(name),
            Piece::Colon => {
                count += 1;
                current = std::mem::take(&mut line);
                current.sort_unstable();
                current.dedup();
                for name in &current {
                    definitions.entry(name).or_default();
                }
            }
            Piece::Newline => {
                for name in &current {
                    definitions.entry(name).or_default().1.extend(&line);
                }
                line.clear();
            }
            Piece::Open => depth += 1,
            Piece::Close => {
                depth = depth.checked_sub(1).ok_or_else(|| unbalanced("closed, not opened"))?;
            }
        }
    }
    if depth != 0 {
        return Err(unbalanced("not closed"));
    }
    if count > MAX_RULES {
        return Err(Failure::invalid(format!("{count} rules; at most {MAX_RULES}")));
    }
    let mut sizes = HashMap::new();
    for name in definitions.keys() {
        let size = expanded(name, &definitions, &mut sizes);
        if is_terminal(name) && size > MAX_REGEX_BYTES {
            return Err(Failure::invalid(format!(
                "{name} comes to {size} bytes with all that it names; at most {MAX_REGEX_BYTES}"
            )));
        }
    }
    Ok(())
}

fn unbalanced(how: &str) -> Failure {
    Failure::invalid(format!("a brace is {how}"))
}

fn is_terminal(name: &str) -> bool {
    name.chars().find(|c| c.is_alphabetic()).is_some_and(char::is_uppercase)
}

/// Of a definition; one that names itself, by whatever way, ends there. Rules
/// that a terminal names count once. Without recursion, which a chain of names
/// would drive.
fn expanded<'a>(
    name: &'a str,
    definitions: &Definitions<'a>,
    sizes: &mut HashMap<&'a str, usize>,
) -> usize {
    let mut open = vec![name];
    while let Some(&next) = open.last() {
        let Some((own, names)) = definitions.get(next) else {
            sizes.insert(next, 1);
            open.pop();
            continue;
        };
        if sizes.get(next).is_some_and(|size| *size != 0) {
            open.pop();
            continue;
        }
        let first = sizes.insert(next, 0).is_none();
        if first {
            open.extend(names.iter().filter(|used| is_terminal(used) && !sizes.contains_key(*used)));
            continue;
        }
        let sum = names.iter().fold(*own, |sum, used| {
            let size = if is_terminal(used) { sizes.get(used).copied().unwrap_or(1) } else { 1 };
            sum.saturating_add(size)
        });
        sizes.insert(next, sum.max(1));
        open.pop();
    }
    sizes.get(name).copied().unwrap_or(1)
}

/// Where the text or regex that begins at `at` has ended.
fn after_quoted(bytes: &[u8], mut at: usize) -> usize {
    let quote = bytes[at];
    at += 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// `!?[_?]?[a-z][_a-z0-9-]*` or `_?[A-Z][_A-Z0-9-]*` at the beginning.
fn name_length(text: &[u8]) -> Option<usize> {
    let first = text.iter().position(|c| !matches!(c, b'!' | b'?' | b'_'))?;
    let upper = text[first].is_ascii_uppercase();
    if first > 2 || !text[first].is_ascii_alphabetic() {
        return None;
    }
    let rest = text[first..].iter().position(|c| {
        let letter = if upper { c.is_ascii_uppercase() } else { c.is_ascii_lowercase() };
        !letter && !c.is_ascii_digit() && !matches!(c, b'_' | b'-')
    });
    Some(first + rest.unwrap_or(text.len() - first))
}

/// `<[^<>\s]+>` at the beginning.
fn special_length(text: &str) -> Option<usize> {
    let end = text[1..].find(|c: char| c == '<' || c == '>' || c.is_whitespace())? + 1;
    (end > 1 && text[end..].starts_with('>')).then_some(end + 1)
}

fn json_length(text: &str) -> Outcome<usize> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<serde_json::Value>();
    match values.next() {
        Some(Ok(value)) => {
            check_patterns(&value)?;
            Ok(values.byte_offset())
        }
        _ => Err(Failure::invalid("no JSON behind %json, %regex or %llguidance")),
    }
}

fn pieces(text: &str) -> Outcome<Vec<Piece<'_>>> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let begin = at;
        // Bytes of a character are no token, and slices begin at characters.
        if !text.is_char_boundary(at) {
            at += 1;
            continue;
        }
        let rest = &text[at..];
        if rest.starts_with("//") || rest.starts_with('#') {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if rest.starts_with('"') || rest.starts_with('/') {
            at = after_quoted(bytes, at);
            found.push(Piece::Literal(at - begin));
        } else if let Some(word) =
            ["%json", "%regex", "%llguidance"].into_iter().find(|word| rest.starts_with(word))
        {
            at += word.len() + json_length(&rest[word.len()..])?;
            // Substrings of a text are a regex as long as it is.
            let regex = word == "%regex";
            found.push(if regex { Piece::Literal(at - begin) } else { Piece::Json(at - begin) });
        } else if rest.starts_with("::") {
            at += 2;
        } else if let Some(length) = rest.starts_with('<').then(|| special_length(rest)).flatten() {
            at += length;
        } else if let Some(length) = name_length(rest.as_bytes()) {
            at += length;
            found.push(Piece::Name(&text[begin..at]));
        } else {
            at += 1;
            found.extend(match bytes[begin] {
                b':' => Some(Piece::Colon),
                b'\n' => Some(Piece::Newline),
                b'{' => Some(Piece::Open),
                b'}' => Some(Piece::Close),
                _ => None,
            });
        }
    }
    Ok(found)
}
