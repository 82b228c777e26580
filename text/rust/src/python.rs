// SPDX-License-Identifier: Apache-2.0
//! Values as Python prints them: chat templates were written against Jinja2,
//! where `{{ x }}` is `str(x)` and `tojson` is `json.dumps`. All text made here
//! is charged to the render's budget as it grows.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use crate::budget::charge;

const MAX_DEPTH: usize = 100;

#[derive(Default)]
pub struct Text {
    out: String,
}

/// json.dumps' options.
pub struct JsonStyle {
    pub indent: Option<usize>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
    pub ensure_ascii: bool,
}

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply to print")
}

/// Map entries in order; `get_item` finds what iteration named.
fn entries(map: &Value) -> Result<Vec<(Value, Value)>, Error> {
    map.try_iter()?.map(|key| Ok((key.clone(), map.get_item(&key)?))).collect()
}

impl Text {
    pub fn into_string(self) -> String {
        self.out
    }

    pub fn push(&mut self, text: &str) -> Result<(), Error> {
        charge(text.len())?;
        self.out.push_str(text);
        Ok(())
    }

    /// str(value); undefined is empty, as Jinja2 has it.
    pub fn display(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.push(text),
            None if value.is_undefined() => Ok(()),
            None => self.repr(value, 0),
        }
    }

    fn repr(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        match value.kind() {
            ValueKind::Undefined => self.push("Undefined"),
            ValueKind::None => self.push("None"),
            ValueKind::Bool => self.push(if value.is_true() { "True" } else { "False" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.quoted(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.push("[")?;
                for (index, item) in value.try_iter()?.enumerate() {
                    self.push(if index > 0 { ", " } else { "" })?;
                    self.repr(&item, depth + 1)?;
                }
                self.push("]")
            }
            ValueKind::Map => {
                self.push("{")?;
                for (index, (key, item)) in entries(value)?.into_iter().enumerate() {
                    self.push(if index > 0 { ", " } else { "" })?;
                    self.repr(&key, depth + 1)?;
                    self.push(": ")?;
                    self.repr(&item, depth + 1)?;
                }
                self.push("}")
            }
            _ => self.push(&value.to_string()),
        }
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            return self.push(&value.to_string());
        }
        self.push(&float(f64::try_from(value.clone())?))
    }

    /// repr of a str: single quotes unless only they occur inside.
    fn quoted(&mut self, text: &str) -> Result<(), Error> {
        let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
        let mut out = String::with_capacity(text.len() + 2);
        out.push(quote);
        for c in text.chars() {
            match c {
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\\' => out.push_str("\\\\"),
                c if c == quote => out.extend(['\\', c]),
                c if (c as u32) < 0x20 || (0x7f..0xa1).contains(&(c as u32)) || c == '\u{ad}' => {
                    out.push_str(&format!("\\x{:02x}", c as u32));
                }
                c => out.push(c),
            }
        }
        out.push(quote);
        self.push(&out)
    }

    pub fn json(&mut self, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        match value.kind() {
            ValueKind::None => self.push("null"),
            ValueKind::Bool => self.push(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => {
                self.json_string(value.as_str().unwrap_or_default(), style.ensure_ascii)
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let mut is_empty = true;
                self.push("[")?;
                for item in value.try_iter()? {
                    self.separate(style, depth + 1, is_empty)?;
                    is_empty = false;
                    self.json(&item, style, depth + 1)?;
                }
                self.close(style, depth, is_empty, "]")
            }
            ValueKind::Map => {
                let mut list = entries(value)?;
                if style.sort_keys {
                    list.sort_by(|a, b| a.0.cmp(&b.0));
                }
                let is_empty = list.is_empty();
                self.push("{")?;
                for (index, (key, item)) in list.into_iter().enumerate() {
                    self.separate(style, depth + 1, index == 0)?;
                    match key.as_str() {
                        Some(text) => self.json_string(text, style.ensure_ascii)?,
                        None => {
                            self.push("\"")?;
                            self.json(&key, style, depth + 1)?;
                            self.push("\"")?;
                        }
                    }
                    self.push(&style.key_separator)?;
                    self.json(&item, style, depth + 1)?;
                }
                self.close(style, depth, is_empty, "}")
            }
            kind => Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("{kind} cannot be written as JSON"),
            )),
        }
    }

    fn separate(&mut self, style: &JsonStyle, depth: usize, is_first: bool) -> Result<(), Error> {
        if !is_first {
            self.push(&style.item_separator)?;
        }
        self.new_line(style, depth)
    }

    fn close(
        &mut self,
        style: &JsonStyle,
        depth: usize,
        is_empty: bool,
        bracket: &str,
    ) -> Result<(), Error> {
        if !is_empty {
            self.new_line(style, depth)?;
        }
        self.push(bracket)
    }

    fn new_line(&mut self, style: &JsonStyle, depth: usize) -> Result<(), Error> {
        let Some(indent) = style.indent else {
            return Ok(());
        };
        let width = indent.saturating_mul(depth);
        charge(width.saturating_add(1))?;
        self.out.push('\n');
        self.out.extend(std::iter::repeat_n(' ', width));
        Ok(())
    }

    fn json_string(&mut self, text: &str, ensure_ascii: bool) -> Result<(), Error> {
        let mut out = String::with_capacity(text.len() + 2);
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
                c if ensure_ascii && !(' '..='~').contains(&c) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
        self.push(&out)
    }
}

/// repr(float): the shortest digits that read back the same, with an exponent
/// below 1e-4 and from 1e16 on.
pub fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let text = value.to_string();
    if text.contains('.') { text } else { text + ".0" }
}
