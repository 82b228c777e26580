// SPDX-License-Identifier: Apache-2.0
//! Filters, functions and methods that chat templates expect from Jinja2 and
//! Python, with the cost of each known before it is paid.

use std::borrow::Cow;
use std::cell::Cell;

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{filters, Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

use crate::budget::charge;
use crate::python::{JsonStyle, Text};
use crate::python_strings;

thread_local! {
    static NOW: Cell<i64> = const { Cell::new(0) };
}

/// Methods of a dict, and the functions that stand in for calls of them: Jinja2
/// takes a method before a key of its name (a tool may have a parameter
/// `items`), and the engine the key.
const DICT_METHODS: [(&str, &str); 4] =
    [("get", "%get"), ("items", "%items"), ("keys", "%keys"), ("values", "%values")];

/// What is called in place of a method of this name, if anything is.
pub fn stand_in(method: &str) -> Option<&'static str> {
    DICT_METHODS.iter().find(|(name, _)| *name == method).map(|(_, function)| *function)
}

/// The time that `strftime_now` tells on this thread, in Unix seconds.
pub fn set_now(unix_s: i64) {
    NOW.with(|now| now.set(unix_s));
}

pub fn install(environment: &mut Environment<'static>) {
    for name in ["chain", "zip", "pprint"] {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| display(value));
    environment.add_filter("join", join);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("trim", trim);
    environment.add_filter("truncate", python_strings::truncate);
    environment.add_filter("urlencode", python_strings::url_encode);
    environment.add_filter("wordcount", python_strings::word_count);
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    bounded(environment, "capitalize", Value::from_function(filters::capitalize));
    bounded(environment, "lower", Value::from_function(filters::lower));
    bounded(environment, "title", Value::from_function(filters::title));
    bounded(environment, "upper", Value::from_function(filters::upper));
    bounded(environment, "replace", Value::from_function(filters::replace));
    bounded(environment, "indent", Value::from_function(filters::indent));
    bounded(environment, "format", Value::from_function(filters::format));
    bounded(environment, "batch", Value::from_function(filters::batch));
    bounded(environment, "slice", Value::from_function(filters::slice));
    bounded(environment, "split", Value::from_function(filters::split));
    bounded(environment, "list", Value::from_function(filters::list));
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| {
        strftime(&format, NOW.with(Cell::get))
    });
    for (name, function) in DICT_METHODS {
        environment.add_function(function, move |state: &State, args: Rest<Value>| {
            let Some((value, args)) = args.split_first() else {
                return Err(Error::from(ErrorKind::MissingArgument));
            };
            match value.kind() {
                ValueKind::Map => pycompat::unknown_method_callback(state, value, name, args),
                _ => value.call_method(state, name, args),
            }
        });
    }
    environment.set_unknown_method_callback(|state, value, method, args| {
        if let Some(text) = value.as_str() {
            if let Some(answer) = python_strings::call(text, method, args)? {
                return Ok(answer);
            }
            let all: Vec<Value> = std::iter::once(value.clone()).chain(args.iter().cloned()).collect();
            charge(cost(method, &all))?;
            if method == "join" {
                return join(&args.first().cloned().unwrap_or_default(), Some(value.clone()), no_kwargs()?);
            }
        }
        pycompat::unknown_method_callback(state, value, method, args)
    });
}

fn no_kwargs() -> Result<Kwargs, Error> {
    Ok(std::iter::empty::<(&str, Value)>().collect())
}

/// Adds `original` under `name`, its cost charged before it runs.
fn bounded(environment: &mut Environment<'static>, name: &'static str, original: Value) {
    environment.add_filter(name, move |state: &State, mut args: Rest<Value>| {
        if let Some(value) = args.first_mut() {
            *value = argument(name, value)?;
        }
        charge(cost(name, &args))?;
        original.call(state, &args)
    });
}

/// What a filter takes for `value` where Jinja2's differs from the engine's.
fn argument(name: &str, value: &Value) -> Result<Value, Error> {
    match name {
        // Of str(value), whatever it is: a schema's type may be a list.
        "capitalize" | "lower" | "replace" | "title" | "upper" => display(value),
        // The engine's drops a line break at the end, Jinja2's keeps it.
        "indent" => Ok(match value.as_str() {
            Some(text) if text.ends_with('\n') => Value::from([text, "\n"].concat()),
            _ => value.clone(),
        }),
        _ => Ok(value.clone()),
    }
}

/// An upper bound in bytes of what a call makes; saturating.
fn cost(name: &str, args: &[Value]) -> usize {
    let text = |index: usize| args.get(index).and_then(Value::as_str).unwrap_or("");
    let input = text(0);
    match name {
        "replace" => {
            let matches = match text(1) {
                "" => input.chars().count() + 1,
                old => input.matches(old).count(),
            };
            matches.saturating_mul(text(2).len()).saturating_add(input.len())
        }
        "split" | "splitlines" => {
            let parts = match text(1) {
                "" => input.split_whitespace().count(),
                separator => input.matches(separator).count(),
            };
            (parts + 1).saturating_mul(32).saturating_add(input.len())
        }
        "list" => input.len().saturating_mul(32),
        "indent" => (input.matches('\n').count() + 1).saturating_mul(largest(args)),
        "batch" | "slice" => largest(args).saturating_mul(32),
        "format" => {
            // Each placeholder may name any argument; a width is a number in
            // the format, or by '*' one of the arguments.
            let places = input.matches(['%', '{']).count();
            let longest = args.iter().map(|x| x.as_str().map_or(64, str::len)).max();
            let widths = input
                .split(|c: char| !c.is_ascii_digit())
                .filter(|run| !run.is_empty())
                .map(|run| run.parse::<usize>().unwrap_or(usize::MAX))
                .fold(0usize, usize::saturating_add);
            let star = if input.contains('*') { largest(args) } else { 0 };
            places
                .saturating_mul(longest.unwrap_or(0).saturating_add(star))
                .saturating_add(widths)
                .saturating_add(input.len())
        }
        _ => input.len().saturating_mul(3),
    }
}

/// The largest integer among arguments, keyword arguments included.
fn largest(args: &[Value]) -> usize {
    let number = |value: &Value| match value.kind() {
        ValueKind::Number => i64::try_from(value.clone()).ok().map_or(0, |n| n.max(0) as usize),
        _ => 0,
    };
    let named = args.iter().filter(|x| x.kind() == ValueKind::Map).flat_map(|map| {
        let keys: Vec<Value> = map.try_iter().into_iter().flatten().collect();
        keys.into_iter().filter_map(|key| map.get_item(&key).ok()).collect::<Vec<_>>()
    });
    args.iter().cloned().chain(named).map(|x| number(&x)).max().unwrap_or(0)
}

fn display(value: &Value) -> Result<Value, Error> {
    let mut text = Text::default();
    text.display(value)?;
    Ok(Value::from(text.into_string()))
}

/// len(value); undefined is empty, as Jinja2 has it.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    filters::length(value)
}

/// str(value).strip(chars)
fn trim(value: &Value, chars: Option<Cow<str>>) -> Result<String, Error> {
    let mut text = Text::default();
    text.display(value)?;
    Ok(filters::trim(text.into_string().into(), chars))
}

/// `value[start:stop:step]`, of a text or a list. A list's elements are shared,
/// so they cost their places in the new one and the walk through the old one.
/// Never lazy: a chain of lazy slices nests without a nested value.
pub fn slice(
    value: &Value,
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
) -> Result<Value, Error> {
    let refused = |what: &str| Err(Error::new(ErrorKind::InvalidOperation, what.to_string()));
    let bounds = (start, stop, step.unwrap_or(1));
    if bounds.2 == 0 {
        return refused("cannot slice by step size of 0");
    }
    if let Some(text) = value.as_str() {
        charge(text.len())?;
        let length = text.chars().count();
        return Ok(Value::from(cut::<_, String>(text.chars(), length, bounds)));
    }
    match value.kind() {
        ValueKind::Undefined | ValueKind::None | ValueKind::Seq | ValueKind::Iterable => {}
        kind => return refused(&format!("value of type {kind} cannot be sliced")),
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    let length = items.len();
    charge(length)?;
    let part: Vec<Value> = cut(items.into_iter(), length, bounds);
    charge(part.len() * 32)?;
    Ok(Value::from(part))
}

/// The items that Python's bounds name; a step below 0 walks from the end.
fn cut<T, All: FromIterator<T>>(
    items: impl DoubleEndedIterator<Item = T>,
    length: usize,
    (start, stop, step): (Option<i64>, Option<i64>, i64),
) -> All {
    let length = length as i64;
    // Steps from the end where the walk begins.
    let place = |index: i64| {
        let from_start = if index < 0 { index.saturating_add(length) } else { index };
        let walked = if step > 0 { from_start } else { (length - 1).saturating_sub(from_start) };
        walked.clamp(0, length) as usize
    };
    let first = start.map_or(0, place);
    let count = stop.map_or(length as usize, place).saturating_sub(first);
    let stride = step.unsigned_abs() as usize;
    if step > 0 {
        items.skip(first).take(count).step_by(stride).collect()
    } else {
        items.rev().skip(first).take(count).step_by(stride).collect()
    }
}

fn join(list: &Value, separator: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let attribute: Option<String> = kwargs.get("attribute")?;
    let named: Option<Value> = kwargs.get("d")?;
    kwargs.assert_all_used()?;
    let separator = named.or(separator);
    if list.is_undefined() {
        return Ok(Value::from(""));
    }
    let mut text = Text::default();
    for (index, item) in list.try_iter()?.enumerate() {
        if index > 0 {
            if let Some(separator) = &separator {
                text.display(separator)?;
            }
        }
        match &attribute {
            Some(name) => text.display(&item.get_attr(name)?)?,
            None => text.display(&item)?,
        }
    }
    Ok(Value::from(text.into_string()))
}

fn to_json(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")?.or(indent) {
        Some(n) if !n.is_none() => Some(usize::try_from(n).unwrap_or(0).min(1 << 16)),
        _ => None,
    };
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators must be two strings",
            ))
        }
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let style = JsonStyle {
        indent,
        item_separator: item,
        key_separator: key,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let mut text = Text::default();
    text.json(value, &style, 0)?;
    Ok(Value::from(text.into_string()))
}

const MONTHS: [&str; 12] = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
];
const DAYS: [&str; 7] = [
    "Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday",
];

/// C's strftime in UTC, the directives that templates use.
fn strftime(format: &str, unix_s: i64) -> Result<String, Error> {
    let (days, second) = (unix_s.div_euclid(86_400), unix_s.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let weekday = (days + 4).rem_euclid(7) as usize;
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let of_year = days - days_before(year, 1, 1) + 1;
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = rest.next();
        let is_bare = directive == Some('-');
        if is_bare {
            directive = rest.next();
        }
        let two = |n: i64| if is_bare { n.to_string() } else { format!("{n:02}") };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year.rem_euclid(100)),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('M') => two(minute),
            Some('S') => two(second % 60),
            Some('j') if is_bare => of_year.to_string(),
            Some('j') => format!("{of_year:03}"),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('B') => MONTHS[month as usize - 1].into(),
            Some('b' | 'h') => MONTHS[month as usize - 1][..3].into(),
            Some('A') => DAYS[weekday].into(),
            Some('a') => DAYS[weekday][..3].into(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('Z') => "UTC".into(),
            Some('z') => "+0000".into(),
            Some('%') => "%".into(),
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now: %{} is not known", other.unwrap_or(' ')),
                ))
            }
        });
    }
    Ok(out)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar.
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The date that is `days` after 1970-01-01.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days.clamp(-1 << 40, 1 << 40) + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}
