// SPDX-License-Identifier: Apache-2.0
//! How large a Lark grammar's terminals become when all that they name stands
//! in them: what a compiler does before it can count. `A: B B`, `B: C C` and so
//! on are few bytes and a regex without bound.
//!
//! Not a parser of Lark: text falls into literals, names and the rest, and a
//! name before a colon begins a definition. What this takes wrongly, the
//! compiler refuses.

use std::collections::HashMap;

use crate::{Failure, Outcome};

enum Piece<'a> {
    Literal(usize),
    Name(&'a str),
    Colon,
}

/// Refuses terminals of more than `max_bytes` and more than `max_rules`
/// definitions.
pub fn check(text: &str, max_bytes: usize, max_rules: usize) -> Outcome<()> {
    let mut definitions: HashMap<&str, (usize, Vec<&str>)> = HashMap::new();
    let mut current = "";
    let mut last = "";
    let mut count = 0usize;
    for piece in pieces(text) {
        match piece {
            Piece::Literal(bytes) => {
                if bytes > max_bytes {
                    return Err(Failure::invalid(format!(
                        "a text or regex of {bytes} bytes; at most {max_bytes}"
                    )));
                }
                definitions.entry(current).or_default().0 += bytes + 1;
            }
            Piece::Name(name) => {
                definitions.entry(current).or_default().1.push(name);
                last = name;
            }
            Piece::Colon => {
                // The name before it was no use of it.
                if let Some((_, names)) = definitions.get_mut(current) {
                    names.pop();
                }
                count += 1;
                current = last;
            }
        }
    }
    if count > max_rules {
        return Err(Failure::invalid(format!("{count} rules; at most {max_rules}")));
    }
    let mut sizes = HashMap::new();
    for name in definitions.keys() {
        let size = expanded(name, &definitions, &mut sizes);
        if is_terminal(name) && size > max_bytes {
            return Err(Failure::invalid(format!(
                "{name} comes to {size} bytes with all that it names; at most {max_bytes}"
            )));
        }
    }
    Ok(())
}

fn is_terminal(name: &str) -> bool {
    name.chars().find(|c| c.is_alphabetic()).is_some_and(char::is_uppercase)
}

/// Of a definition; one that names itself, by whatever way, ends there. Rules
/// that a terminal names count once. Without recursion, which a chain of names
/// would drive.
fn expanded<'a>(
    name: &'a str,
    definitions: &HashMap<&'a str, (usize, Vec<&'a str>)>,
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

fn pieces(text: &str) -> Vec<Piece<'_>> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let begin = at;
        match bytes[at] {
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at = text[at..].find('\n').map_or(bytes.len(), |line| at + line);
            }
            b'#' => at = text[at..].find('\n').map_or(bytes.len(), |line| at + line),
            quote @ (b'"' | b'/') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote && bytes[at] != b'\n' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at = (at + 1).min(bytes.len());
                found.push(Piece::Literal(at - begin));
            }
            b':' => {
                at += 1;
                found.push(Piece::Colon);
            }
            c if c.is_ascii_alphabetic() || c == b'_' => {
                while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_') {
                    at += 1;
                }
                found.push(Piece::Name(&text[begin..at]));
            }
            _ => at += 1,
        }
    }
    found
}
