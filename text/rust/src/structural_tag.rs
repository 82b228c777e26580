// SPDX-License-Identifier: Apache-2.0
//! Structural tags, in both forms that vLLM takes, as a Lark grammar:
//!
//!   {"structures": [{"begin", "schema", "end"}], "triggers": [...]}
//!   {"type": "structural_tag", "format": F}
//!
//! where F is one of const_string, json_schema, regex, grammar, any_text, tag,
//! sequence, or, triggered_tags, as in XGrammar. Free text holds no trigger, so
//! that whoever writes one has to go on with a tag.

use serde_json::{Map, Value};

use crate::{Failure, Outcome};

/// Of formats within formats; the JSON parser bounds the rest.
const MAX_DEPTH: usize = 32;
/// Of one list. Each trigger's terminal speaks of all of them.
const MAX_TRIGGERS: usize = 64;
const MAX_TRIGGER_BYTES: usize = 2048;

/// The Lark grammar for `json`.
pub fn to_lark(json: &str) -> Outcome<String> {
    let value: Value = serde_json::from_str(json)
        .map_err(|error| Failure::invalid(format!("not JSON: {error}")))?;
    let mut lark = Lark::default();
    let start = if value.get("structures").is_some() {
        lark.legacy(&value)?
    } else {
        let format = value
            .get("format")
            .ok_or_else(|| Failure::invalid("needs \"format\", or \"structures\" and \"triggers\""))?;
        lark.format(format, "format", 0)?
    };
    let whole = format!("start: {start}\n{}", lark.rules);
    crate::grammar::check_size(&whole)?;
    Ok(whole)
}

#[derive(Default)]
struct Lark {
    rules: String,
    count: usize,
}

struct Tag {
    begin: String,
    /// A rule for what is between begin and end.
    content: String,
    end: String,
}

/// A Lark string; its escapes are JSON's.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// `text` itself, as a part of a regex between slashes.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if r"\.+*?()|[]{}^$/".contains(c) => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out
}

fn text<'a>(map: &'a Map<String, Value>, key: &str, path: &str) -> Outcome<&'a str> {
    map.get(key)
        .and_then(Value::as_str)
        .ok_or_else(|| Failure::invalid(format!("{path}.{key}: a string is needed")))
}

fn list<'a>(map: &'a Map<String, Value>, key: &str, path: &str) -> Outcome<&'a Vec<Value>> {
    match map.get(key).and_then(Value::as_array) {
        Some(list) if !list.is_empty() => Ok(list),
        _ => Err(Failure::invalid(format!("{path}.{key}: a list with an element is needed"))),
    }
}

fn object<'a>(value: &'a Value, path: &str) -> Outcome<&'a Map<String, Value>> {
    value
        .as_object()
        .ok_or_else(|| Failure::invalid(format!("{path}: an object is needed")))
}

fn strings(values: &[Value], path: &str) -> Outcome<Vec<String>> {
    let mut all = Vec::new();
    for value in values {
        match value.as_str() {
            Some(text) if !text.is_empty() => all.push(text.to_owned()),
            _ => return Err(Failure::invalid(format!("{path}: texts that are not empty are needed"))),
        }
    }
    Ok(all)
}

fn flag(map: &Map<String, Value>, key: &str) -> bool {
    map.get(key).and_then(Value::as_bool).unwrap_or(false)
}

impl Lark {
    fn rule(&mut self, body: &str) -> String {
        self.count += 1;
        let name = format!("rule_{}", self.count);
        self.rules.push_str(&format!("{name}: {body}\n"));
        name
    }

    fn terminal(&mut self, body: &str) -> String {
        self.count += 1;
        let name = format!("TEXT_{}", self.count);
        self.rules.push_str(&format!("{name}: {body}\n"));
        name
    }

    /// A terminal expression: any text in which none of `without` stands.
    fn free_text(without: &[String]) -> String {
        if without.is_empty() {
            return "/(.|\\n)*/".into();
        }
        let none: Vec<String> = without.iter().map(|text| escaped(text)).collect();
        format!("(/(.|\\n)*/ & ~/(.|\\n)*({})(.|\\n)*/)", none.join("|"))
    }

    /// Free text up to and with the first `end`: one terminal, since where a
    /// text of its own would stop, a lexer could only guess.
    fn up_to(&mut self, end: &str, without: &[String]) -> String {
        self.terminal(&format!("{} {}", Self::free_text(without), quoted(end)))
    }

    fn legacy(&mut self, value: &Value) -> Outcome<String> {
        let map = object(value, "structural_tag")?;
        let triggers = strings(list(map, "triggers", "structural_tag")?, "triggers")?;
        let mut tags = Vec::new();
        for (index, item) in list(map, "structures", "structural_tag")?.iter().enumerate() {
            let path = format!("structures[{index}]");
            let item = object(item, &path)?;
            let schema = item
                .get("schema")
                .ok_or_else(|| Failure::invalid(format!("{path}.schema: is needed")))?;
            crate::grammar::check_patterns(schema)?;
            tags.push(Tag {
                begin: text(item, "begin", &path)?.to_owned(),
                content: self.rule(&format!("%json {schema}")),
                end: text(item, "end", &path)?.to_owned(),
            });
        }
        self.triggered(&triggers, &tags, false, false, "structures")
    }

    /// Free text, and wherever a trigger begins, the rest of one of its tags.
    fn triggered(
        &mut self,
        triggers: &[String],
        tags: &[Tag],
        at_least_one: bool,
        stop_after_first: bool,
        path: &str,
    ) -> Outcome<String> {
        let bytes: usize = triggers.iter().map(String::len).sum();
        if triggers.len() > MAX_TRIGGERS || bytes > MAX_TRIGGER_BYTES {
            return Err(Failure::invalid(format!(
                "{path}: {} triggers of {bytes} bytes; at most {MAX_TRIGGERS} of \
                 {MAX_TRIGGER_BYTES}",
                triggers.len()
            )));
        }
        let mut options: Vec<Vec<String>> = vec![Vec::new(); triggers.len()];
        for (index, tag) in tags.iter().enumerate() {
            let begun = |at: &usize| tag.begin.starts_with(triggers[*at].as_str());
            let longest = (0..triggers.len()).filter(begun).max_by_key(|at| triggers[*at].len());
            let Some(at) = longest else {
                return Err(Failure::invalid(format!(
                    "{path}[{index}].begin: {} begins with none of the triggers",
                    quoted(&tag.begin)
                )));
            };
            options[at].push(self.tag(tag, triggers[at].len()));
        }
        let mut parts = Vec::new();
        for (at, tags) in options.iter().enumerate().filter(|(_, tags)| !tags.is_empty()) {
            let trigger = self.up_to(&triggers[at], triggers);
            parts.push(format!("{trigger} ({})", tags.join(" | ")));
        }
        let tag = self.rule(&parts.join(" | "));
        let rest = self.terminal(&Self::free_text(triggers));
        Ok(match (at_least_one, stop_after_first) {
            (false, false) => self.rule(&format!("{tag}* {rest}")),
            (true, false) => self.rule(&format!("{tag}+ {rest}")),
            (false, true) => self.rule(&format!("{tag} | {rest}")),
            (true, true) => tag,
        })
    }

    /// A rule for the tag, of which `begun` bytes stand already.
    fn tag(&mut self, tag: &Tag, begun: usize) -> String {
        let mut parts = Vec::new();
        if tag.begin.len() > begun {
            parts.push(quoted(&tag.begin[begun..]));
        }
        parts.push(tag.content.clone());
        if !tag.end.is_empty() {
            parts.push(quoted(&tag.end));
        }
        self.rule(&parts.join(" "))
    }

    fn read_tag(&mut self, value: &Value, path: &str, depth: usize) -> Outcome<Tag> {
        let map = object(value, path)?;
        let begin = text(map, "begin", path)?.to_owned();
        let end = text(map, "end", path)?.to_owned();
        let content = map
            .get("content")
            .ok_or_else(|| Failure::invalid(format!("{path}.content: is needed")))?;
        let free = content.get("type").and_then(Value::as_str) == Some("any_text");
        if free && !end.is_empty() {
            let content = self.up_to(&end, std::slice::from_ref(&end));
            return Ok(Tag { begin, content, end: String::new() });
        }
        let content = self.format(content, &format!("{path}.content"), depth + 1)?;
        Ok(Tag { begin, content, end })
    }

    /// The name of a rule or terminal for a format.
    fn format(&mut self, value: &Value, path: &str, depth: usize) -> Outcome<String> {
        if depth > MAX_DEPTH {
            return Err(Failure::invalid(format!("{path}: more than {MAX_DEPTH} deep")));
        }
        let map = object(value, path)?;
        match text(map, "type", path)? {
            "const_string" => {
                let body = quoted(text(map, "value", path)?);
                Ok(self.rule(&body))
            }
            "json_schema" => {
                let schema = map
                    .get("json_schema")
                    .ok_or_else(|| Failure::invalid(format!("{path}.json_schema: is needed")))?;
                crate::grammar::check_patterns(schema)?;
                Ok(self.rule(&format!("%json {schema}")))
            }
            "regex" => {
                let pattern = text(map, "pattern", path)?;
                crate::grammar::check_regex(pattern)?;
                let pattern = crate::grammar::anchored(pattern);
                let body = format!("/{}/", llguidance::regex_to_lark(pattern, ""));
                Ok(self.terminal(&body))
            }
            "grammar" => {
                let body = crate::grammar::checked_lark(text(map, "grammar", path)?)?;
                Ok(self.rule(&format!("%lark {{\n{body}\n}}")))
            }
            "any_text" => Ok(self.terminal(&Self::free_text(&[]))),
            "tag" => {
                let tag = self.read_tag(value, path, depth)?;
                Ok(self.tag(&tag, 0))
            }
            kind @ ("sequence" | "or") => {
                let mut parts = Vec::new();
                for (index, part) in list(map, "elements", path)?.iter().enumerate() {
                    parts.push(self.format(part, &format!("{path}.elements[{index}]"), depth + 1)?);
                }
                let between = if kind == "or" { " | " } else { " " };
                Ok(self.rule(&parts.join(between)))
            }
            "triggered_tags" => {
                let triggers = strings(list(map, "triggers", path)?, &format!("{path}.triggers"))?;
                let path = format!("{path}.tags");
                let mut tags = Vec::new();
                for (index, tag) in list(map, "tags", &path)?.iter().enumerate() {
                    tags.push(self.read_tag(tag, &format!("{path}[{index}]"), depth + 1)?);
                }
                let (one, first) = (flag(map, "at_least_one"), flag(map, "stop_after_first"));
                self.triggered(&triggers, &tags, one, first, &path)
            }
            other => Err(Failure::invalid(format!(
                "{path}.type: \"{other}\" is not one of any_text, const_string, grammar, \
                 json_schema, or, regex, sequence, tag and triggered_tags"
            ))),
        }
    }
}
