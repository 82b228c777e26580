// SPDX-License-Identifier: Apache-2.0
//! Structural tags, in both forms that vLLM takes, as a Lark grammar:
//!
//!   {"structures": [{"begin", "schema", "end"}], "triggers": [...]}
//!   {"type": "structural_tag", "format": F}
//!
//! where F is one of const_string, json_schema, regex, grammar, any_text, token,
//! tag, sequence, or, triggered_tags, token_triggered_tags, tags_with_separator,
//! as in XGrammar. Free text holds no trigger, so that whoever writes one has to
//! go on with a tag; special tokens are never in it.

use serde_json::{Map, Value};

use crate::failure::{Failure, Outcome};
use crate::lark_checks::{check_size, checked_lark};
use crate::regex_checks::{anchored, check_patterns, check_regex};

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
    check_size(&whole)?;
    Ok(whole)
}

#[derive(Default)]
struct Lark {
    rules: String,
    count: usize,
}

/// What a tag may begin with, or end with: text or a special token.
#[derive(Clone, PartialEq)]
enum Mark {
    Text(String),
    Token(u64),
}

impl Mark {
    /// How many bytes of it `trigger` is; none where it does not begin so.
    fn begun_by(&self, trigger: &Mark) -> Option<usize> {
        match (self, trigger) {
            (Mark::Text(text), Mark::Text(begin)) if text.starts_with(begin.as_str()) => {
                Some(begin.len())
            }
            (Mark::Token(mine), Mark::Token(other)) if mine == other => Some(0),
            _ => None,
        }
    }

    fn lark(&self) -> String {
        match self {
            Mark::Text(text) => quoted(text),
            Mark::Token(id) => format!("<[{id}]>"),
        }
    }
}

struct Tag {
    /// One of these.
    begin: Vec<Mark>,
    /// A rule for what is between begin and end.
    content: String,
    end: Vec<Mark>,
}

/// A Lark string; its escapes are JSON's, and it takes no raw DEL.
pub fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
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

/// Texts that are not empty, tokens, or ids of tokens.
fn triggers(values: &[Value], path: &str) -> Outcome<Vec<Mark>> {
    let mut all = Vec::new();
    for value in values {
        let trigger = match value {
            Value::Number(_) => Mark::Token(token(value, path)?),
            _ => mark(value, path)?,
        };
        if trigger == Mark::Text(String::new()) {
            return Err(Failure::invalid(format!("{path}: texts that are not empty are needed")));
        }
        all.push(trigger);
    }
    Ok(all)
}

fn token(value: &Value, path: &str) -> Outcome<u64> {
    value
        .as_u64()
        .filter(|id| u32::try_from(*id).is_ok())
        .ok_or_else(|| Failure::invalid(format!("{path}: the id of a token is needed")))
}

fn mark(value: &Value, path: &str) -> Outcome<Mark> {
    match (value.as_str(), value.get("type").and_then(Value::as_str)) {
        (Some(text), _) => Ok(Mark::Text(text.to_owned())),
        (None, Some("token")) => {
            let id = value.get("token").unwrap_or(&Value::Null);
            Ok(Mark::Token(token(id, &format!("{path}.token"))?))
        }
        _ => Err(Failure::invalid(format!("{path}: a string is needed, or a token"))),
    }
}

/// One, or a list of them.
fn marks(map: &Map<String, Value>, key: &str, path: &str) -> Outcome<Vec<Mark>> {
    let path = format!("{path}.{key}");
    match map.get(key) {
        Some(Value::Array(all)) if !all.is_empty() => {
            all.iter().map(|value| mark(value, &path)).collect()
        }
        value => Ok(vec![mark(value.unwrap_or(&Value::Null), &path)?]),
    }
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

    /// The same up to a token, which no text is.
    fn up_to_token(&mut self, id: u64, without: &[String]) -> String {
        let text = self.terminal(&format!("(/(.|\\n)+/ & {})", Self::free_text(without)));
        self.rule(&format!("{text}? <[{id}]>"))
    }

    fn legacy(&mut self, value: &Value) -> Outcome<String> {
        let map = object(value, "structural_tag")?;
        let triggers = triggers(list(map, "triggers", "structural_tag")?, "triggers")?;
        let mut tags = Vec::new();
        for (index, item) in list(map, "structures", "structural_tag")?.iter().enumerate() {
            let path = format!("structures[{index}]");
            let item = object(item, &path)?;
            let schema = item
                .get("schema")
                .ok_or_else(|| Failure::invalid(format!("{path}.schema: is needed")))?;
            check_patterns(schema)?;
            tags.push(Tag {
                begin: vec![Mark::Text(text(item, "begin", &path)?.to_owned())],
                content: self.rule(&format!("%json {schema}")),
                end: vec![Mark::Text(text(item, "end", &path)?.to_owned())],
            });
        }
        self.triggered(&triggers, &tags, (false, false), "structures")
    }

    /// Free text, and wherever a trigger begins, the rest of one of its tags.
    /// Flags: at least one, and nothing behind the first.
    fn triggered(
        &mut self,
        triggers: &[Mark],
        tags: &[Tag],
        flags: (bool, bool),
        path: &str,
    ) -> Outcome<String> {
        let mut texts = Vec::new();
        for trigger in triggers {
            if let Mark::Text(text) = trigger {
                texts.push(text.clone());
            }
        }
        let bytes: usize = texts.iter().map(String::len).sum();
        if triggers.len() > MAX_TRIGGERS || bytes > MAX_TRIGGER_BYTES {
            return Err(Failure::invalid(format!(
                "{path}: {} triggers of {bytes} bytes; at most {MAX_TRIGGERS} of \
                 {MAX_TRIGGER_BYTES}",
                triggers.len()
            )));
        }
        let mut options: Vec<Vec<String>> = vec![Vec::new(); triggers.len()];
        for (index, tag) in tags.iter().enumerate() {
            for begin in &tag.begin {
                let longest = (0..triggers.len())
                    .filter_map(|at| begin.begun_by(&triggers[at]).map(|begun| (begun, at)))
                    .max();
                let Some((begun, at)) = longest else {
                    return Err(Failure::invalid(format!(
                        "{path}[{index}].begin: {} begins with none of the triggers",
                        begin.lark()
                    )));
                };
                let rest = match begin {
                    Mark::Text(text) => Mark::Text(text[begun..].to_owned()),
                    Mark::Token(_) => Mark::Text(String::new()),
                };
                options[at].push(self.tag(&[rest], tag));
            }
        }
        let mut parts = Vec::new();
        for (at, tags) in options.iter().enumerate().filter(|(_, tags)| !tags.is_empty()) {
            let trigger = match &triggers[at] {
                Mark::Text(text) => self.up_to(text, &texts),
                Mark::Token(id) => self.up_to_token(*id, &texts),
            };
            parts.push(format!("{trigger} ({})", tags.join(" | ")));
        }
        let tag = self.rule(&parts.join(" | "));
        let rest = self.terminal(&Self::free_text(&texts));
        Ok(match flags {
            (false, false) => self.rule(&format!("{tag}* {rest}")),
            (true, false) => self.rule(&format!("{tag}+ {rest}")),
            (false, true) => self.rule(&format!("{tag} | {rest}")),
            (true, true) => tag,
        })
    }

    /// A rule for the tag, of which `begin` is still to be written.
    fn tag(&mut self, begin: &[Mark], tag: &Tag) -> String {
        let one_of = |marks: &[Mark]| {
            let all: Vec<String> = marks.iter().map(Mark::lark).collect();
            (all != ["\"\""]).then(|| format!("({})", all.join(" | ")))
        };
        let parts = [one_of(begin), Some(tag.content.clone()), one_of(&tag.end)];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        self.rule(&parts.join(" "))
    }

    /// Tags and nothing else, the separator between two.
    fn separated(&mut self, tags: &[Tag], between: &str, flags: (bool, bool)) -> Outcome<String> {
        let rules: Vec<String> = tags.iter().map(|tag| self.tag(&tag.begin, tag)).collect();
        let (at_least_one, stop_after_first) = flags;
        let any = self.rule(&rules.join(" | "));
        let more = match between {
            "" => any.clone(),
            text => format!("{} {any}", quoted(text)),
        };
        let all = if stop_after_first { any } else { self.rule(&format!("{any} ({more})*")) };
        Ok(if at_least_one { all } else { self.rule(&format!("{all}?")) })
    }

    fn read_tag(&mut self, value: &Value, path: &str, depth: usize) -> Outcome<Tag> {
        let map = object(value, path)?;
        let begin = marks(map, "begin", path)?;
        let end = marks(map, "end", path)?;
        let content = map
            .get("content")
            .ok_or_else(|| Failure::invalid(format!("{path}.content: is needed")))?;
        if content.get("type").and_then(Value::as_str) == Some("any_text") {
            match end.as_slice() {
                [Mark::Text(text)] if text.is_empty() => {}
                [Mark::Text(text)] => {
                    let content = self.up_to(text, std::slice::from_ref(text));
                    return Ok(Tag { begin, content, end: vec![Mark::Text(String::new())] });
                }
                [Mark::Token(id)] => {
                    let content = self.up_to_token(*id, &[]);
                    return Ok(Tag { begin, content, end: vec![Mark::Text(String::new())] });
                }
                _ => {
                    return Err(Failure::invalid(format!(
                        "{path}.end: any_text needs one end, not a list"
                    )))
                }
            }
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
                check_patterns(schema)?;
                Ok(self.rule(&format!("%json {schema}")))
            }
            "regex" => {
                let pattern = text(map, "pattern", path)?;
                check_regex(pattern)?;
                let pattern = anchored(pattern);
                let body = format!("/{}/", llguidance::regex_to_lark(pattern, ""));
                Ok(self.terminal(&body))
            }
            "grammar" => {
                let body = checked_lark(text(map, "grammar", path)?)?;
                Ok(self.rule(&format!("%lark {{\n{body}\n}}")))
            }
            "any_text" => Ok(self.terminal(&Self::free_text(&[]))),
            "tag" => {
                let tag = self.read_tag(value, path, depth)?;
                Ok(self.tag(&tag.begin, &tag))
            }
            kind @ ("sequence" | "or") => {
                let mut parts = Vec::new();
                for (index, part) in list(map, "elements", path)?.iter().enumerate() {
                    parts.push(self.format(part, &format!("{path}.elements[{index}]"), depth + 1)?);
                }
                let between = if kind == "or" { " | " } else { " " };
                Ok(self.rule(&parts.join(between)))
            }
            "token" => {
                let id = map.get("token").unwrap_or(&Value::Null);
                let id = token(id, &format!("{path}.token"))?;
                Ok(self.rule(&format!("<[{id}]>")))
            }
            kind @ ("triggered_tags" | "token_triggered_tags" | "tags_with_separator") => {
                let tags_path = format!("{path}.tags");
                let mut tags = Vec::new();
                for (index, tag) in list(map, "tags", path)?.iter().enumerate() {
                    tags.push(self.read_tag(tag, &format!("{tags_path}[{index}]"), depth + 1)?);
                }
                let flags = (flag(map, "at_least_one"), flag(map, "stop_after_first"));
                if kind == "tags_with_separator" {
                    return self.separated(&tags, text(map, "separator", path)?, flags);
                }
                let key = if kind == "triggered_tags" { "triggers" } else { "trigger_tokens" };
                let triggers = triggers(list(map, key, path)?, &format!("{path}.{key}"))?;
                self.triggered(&triggers, &tags, flags, &tags_path)
            }
            other => Err(Failure::invalid(format!(
                "{path}.type: \"{other}\" is not one of any_text, const_string, grammar, \
                 json_schema, or, regex, sequence, tag, tags_with_separator, token, \
                 token_triggered_tags and triggered_tags"
            ))),
        }
    }
}
