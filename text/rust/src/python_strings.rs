// SPDX-License-Identifier: Apache-2.0
//! Methods of Python's str that the engine lacks or has otherwise, and Jinja2's
//! filters of that kind. Places are characters, as in Python.

use minijinja::value::{from_args, Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use crate::budget::charge;
use crate::python::Text;

/// `text.method(args)`; none of a method that the engine may answer.
pub fn call(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "isalnum" | "isalpha" | "isdigit" | "isnumeric" | "isspace" if text.is_empty() => {
            let () = from_args(args)?;
            Value::from(false)
        }
        "islower" | "isupper" => {
            let () = from_args(args)?;
            charge(text.len())?;
            let has_lower = text.chars().any(char::is_lowercase);
            let has_upper = text.chars().any(char::is_uppercase);
            let (wanted, other) =
                if method == "islower" { (has_lower, has_upper) } else { (has_upper, has_lower) };
            Value::from(wanted && !other)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, method, args)?,
        "split" | "rsplit" => split(text, method == "rsplit", args)?,
        "partition" | "rpartition" => partition(text, method == "rpartition", args)?,
        "removeprefix" | "removesuffix" => {
            let (affix,): (&str,) = from_args(args)?;
            let rest = if method == "removeprefix" {
                text.strip_prefix(affix)
            } else {
                text.strip_suffix(affix)
            };
            made(rest.unwrap_or(text))?
        }
        "ljust" | "rjust" | "center" | "zfill" => pad(text, method, args)?,
        "expandtabs" => expand_tabs(text, args)?,
        "swapcase" => {
            let () = from_args(args)?;
            change(text, |c, out| match c {
                c if c.is_uppercase() => out.extend(c.to_lowercase()),
                c if c.is_lowercase() => out.extend(c.to_uppercase()),
                c => out.push(c),
            })?
        }
        "casefold" => {
            let () = from_args(args)?;
            change(text, |c, out| match c {
                // Its upper case is that of `i`.
                'ı' => out.push(c),
                c => out.extend(c.to_uppercase().flat_map(char::to_lowercase)),
            })?
        }
        _ => return Ok(None),
    }))
}

fn refused<T>(what: &str) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, what.to_string()))
}

fn made(text: &str) -> Result<Value, Error> {
    charge(text.len())?;
    Ok(Value::from(text))
}

/// Each character as `one` writes it, at most three times as long.
fn change(text: &str, one: impl Fn(char, &mut String)) -> Result<Value, Error> {
    charge(text.len().saturating_mul(3))?;
    let mut out = String::with_capacity(text.len());
    text.chars().for_each(|c| one(c, &mut out));
    Ok(Value::from(out))
}

/// What `text[start:end]` names, and how many characters stand before it; none
/// where it would begin behind its end.
fn window(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    let length = text.chars().count() as i64;
    let place = |index: i64| if index < 0 { (index.saturating_add(length)).max(0) } else { index };
    let first = start.map_or(0, place);
    let last = end.map_or(length, place).min(length);
    if first > last {
        return None;
    }
    let byte = |place: i64| text.char_indices().nth(place as usize).map_or(text.len(), |x| x.0);
    Some((first as usize, &text[byte(first)..byte(last)]))
}

fn search(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    charge(text.len())?;
    let found = window(text, start, end);
    if method == "count" {
        return Ok(Value::from(found.map_or(0, |(_, part)| match what {
            "" => part.chars().count() + 1,
            what => part.matches(what).count(),
        })));
    }
    let place = found.and_then(|(before, part)| {
        let byte = if method.starts_with('r') { part.rfind(what) } else { part.find(what) };
        byte.map(|byte| (before + part[..byte].chars().count()) as i64)
    });
    match place {
        None if method.ends_with("index") => refused("substring not found"),
        place => Ok(Value::from(place.unwrap_or(-1))),
    }
}

fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Words, from one end or the other; the last one is all that `limit` splits
/// leave.
fn words(text: &str, from_end: bool, limit: usize) -> impl Iterator<Item = &str> {
    let (mut rest, mut splits) = (text, 0);
    std::iter::from_fn(move || {
        rest = if from_end {
            rest.trim_end_matches(is_space)
        } else {
            rest.trim_start_matches(is_space)
        };
        let cut = match splits == limit {
            true => None,
            false if from_end => rest.rfind(is_space),
            false => rest.find(is_space),
        };
        splits += 1;
        let word = match cut {
            None => std::mem::take(&mut rest),
            Some(space) if from_end => {
                let (before, word) = rest.split_at(space);
                rest = before;
                word.trim_start_matches(is_space)
            }
            Some(space) => {
                let (word, behind) = rest.split_at(space);
                rest = behind;
                word
            }
        };
        (!word.is_empty()).then_some(word)
    })
}

fn split(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = named.get::<Option<Value>>("sep")?.or(separator);
    let limit = named.get::<Option<i64>>("maxsplit")?.or(limit).unwrap_or(-1);
    named.assert_all_used()?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let most = limit.saturating_add(1);
    charge(text.len())?;
    let separator = match &separator {
        Some(value) if !value.is_none() => match value.as_str() {
            None => return refused("the separator of a split must be a string"),
            Some("") => return refused("the separator of a split is empty"),
            text => text,
        },
        _ => None,
    };
    let parts: Box<dyn Iterator<Item = &str>> = match separator {
        None => Box::new(words(text, from_end, limit)),
        Some(separator) if from_end => Box::new(text.rsplitn(most, separator)),
        Some(separator) => Box::new(text.splitn(most, separator)),
    };
    let mut list = parts
        .map(|part| {
            charge(32)?;
            Ok(Value::from(part))
        })
        .collect::<Result<Vec<Value>, Error>>()?;
    if from_end {
        list.reverse();
    }
    Ok(Value::from(list))
}

fn partition(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return refused("the separator of a partition is empty");
    }
    charge(text.len().saturating_add(96))?;
    let found =
        if from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match found {
        Some((before, behind)) => [before, separator, behind],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(parts.map(Value::from).to_vec()))
}

fn pad(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<&str>) = match method {
        "zfill" => (from_args::<(i64,)>(args)?.0, Some("0")),
        _ => from_args(args)?,
    };
    let fill = fill.unwrap_or(" ");
    if fill.chars().count() != 1 {
        return refused("the fill character must be exactly one character long");
    }
    let missing = width.saturating_sub(text.chars().count() as i64).max(0);
    let left = match method {
        "ljust" => 0,
        // Python's, which puts the odd one before a text of even length.
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    charge((missing as usize).saturating_mul(fill.len()).saturating_add(text.len()))?;
    let sign = match text.strip_prefix(['+', '-']) {
        Some(_) if method == "zfill" => &text[..1],
        _ => "",
    };
    let mut out = sign.to_string();
    out.push_str(&fill.repeat(left as usize));
    out.push_str(&text[sign.len()..]);
    out.push_str(&fill.repeat((missing - left) as usize));
    Ok(Value::from(out))
}

fn expand_tabs(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (size, named): (Option<i64>, Kwargs) = from_args(args)?;
    let size = named.get::<Option<i64>>("tabsize")?.or(size).unwrap_or(8);
    named.assert_all_used()?;
    let size = usize::try_from(size).unwrap_or(0);
    charge(text.matches('\t').count().saturating_mul(size).saturating_add(text.len()))?;
    let mut out = String::new();
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(Value::from(out))
}

// ------------------------------------------------------------------ filters

fn display(value: &Value) -> Result<String, Error> {
    let mut text = Text::default();
    text.display(value)?;
    Ok(text.into_string())
}

pub fn word_count(value: &Value) -> Result<usize, Error> {
    let text = display(value)?;
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    Ok(words.filter(|word| !word.is_empty()).count())
}

/// Jinja2's, which cuts only where that saves more than `leeway`.
pub fn truncate(value: &Value, args: Rest<Value>) -> Result<Value, Error> {
    type Given = (Option<usize>, Option<bool>, Option<String>, Option<usize>, Kwargs);
    let (length, kill_words, end, leeway, named): Given = from_args(&args)?;
    let length = named.get::<Option<usize>>("length")?.or(length).unwrap_or(255);
    let kill_words = named.get::<Option<bool>>("killwords")?.or(kill_words).unwrap_or(false);
    let end = named.get::<Option<String>>("end")?.or(end).unwrap_or_else(|| "...".into());
    let leeway = named.get::<Option<usize>>("leeway")?.or(leeway).unwrap_or(5);
    named.assert_all_used()?;
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return refused("truncate: the length must hold the end");
    };
    let text = display(value)?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(Value::from(text));
    }
    let Some((_, kept)) = window(&text, None, Some(kept as i64)) else {
        return Ok(Value::from(text));
    };
    let kept = match kept.rsplit_once(' ') {
        Some((words, _)) if !kill_words => words,
        _ => kept,
    };
    made(&[kept, &end].concat())
}

/// Of a text, all but unreserved characters and '/'; of a map or pairs, a query.
pub fn url_encode(value: &Value) -> Result<Value, Error> {
    let mut out = String::new();
    let pairs: Vec<(Value, Value)> = match value.kind() {
        ValueKind::Map => value
            .try_iter()?
            .map(|key| Ok((key.clone(), value.get_item(&key)?)))
            .collect::<Result<_, Error>>()?,
        ValueKind::Seq | ValueKind::Iterable => value
            .try_iter()?
            .map(|pair| Ok((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?)))
            .collect::<Result<_, Error>>()?,
        _ => {
            quote(&display(value)?, false, &mut out)?;
            return Ok(Value::from(out));
        }
    };
    for (index, (key, item)) in pairs.iter().enumerate() {
        out.push_str(if index > 0 { "&" } else { "" });
        quote(&display(key)?, true, &mut out)?;
        out.push('=');
        quote(&display(item)?, true, &mut out)?;
    }
    Ok(Value::from(out))
}

fn quote(text: &str, in_query: bool, out: &mut String) -> Result<(), Error> {
    charge(text.len().saturating_mul(3))?;
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                out.push(byte.into());
            }
            b'/' if !in_query => out.push('/'),
            b' ' if in_query => out.push('+'),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    Ok(())
}
