// SPDX-License-Identifier: Apache-2.0
//! Chat templates as `transformers` renders them: trim_blocks, lstrip_blocks,
//! loop controls, `tojson` without HTML escapes, `raise_exception`,
//! `strftime_now`, Python's string methods. Bounds are in sandbox.rs.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;

use minijinja::machinery::{self, CodeGenerator, Instructions, Vm, WhitespaceConfig};
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json};

use crate::failure::{shorten, Failure, Kind, Outcome};
use crate::{budget, python_filters, sandbox};

/// See ChatTemplateLimits in text/chat_template.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Limits {
    pub fuel: u64,
    pub max_output_bytes: u64,
    pub max_work_bytes: u64,
    pub max_template_bytes: u64,
}

/// Recursion of macros and loops; a macro call counts four times.
const MAX_RECURSION: usize = 200;
/// How often a template may use each byte of its input before the fixed
/// budgets are touched: long prompts are not an attack.
const WORK_PER_INPUT_BYTE: u64 = 64;
const OUTPUT_PER_INPUT_BYTE: u64 = 2;

pub const TOKEN_NAMES: [&str; 7] = [
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
];

pub struct RenderInput<'a> {
    pub messages: &'a str,
    pub tools: &'a str,
    pub extra: &'a str,
    pub now_unix_s: i64,
    pub add_generation_prompt: bool,
    pub continue_final_message: bool,
}

/// A compiled program and the source that it borrows from, freed after it.
struct Program {
    instructions: ManuallyDrop<Instructions<'static>>,
    source: *mut str,
}

// SAFETY: `source` is owned and never written; `Instructions` is Send + Sync.
unsafe impl Send for Program {}
// SAFETY: as above.
unsafe impl Sync for Program {}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: dropped once, here, before the source it borrows from;
        // `source` came from Box::into_raw.
        unsafe {
            ManuallyDrop::drop(&mut self.instructions);
            drop(Box::from_raw(self.source));
        }
    }
}

pub struct ChatTemplate {
    environment: Environment<'static>,
    programs: BTreeMap<String, Program>,
    tokens: Map<String, Json>,
    limits: Limits,
}

pub fn parse_object(json: &str, what: &str) -> Outcome<Map<String, Json>> {
    let prefix = if what.is_empty() { String::new() } else { format!("{what}: ") };
    serde_json::from_str(json)
        .map_err(|error| Failure::invalid(format!("{prefix}{}", shorten(&error.to_string()))))
}

/// A special token: a string, or an object with `content`; null is none.
pub fn special_token(config: &Map<String, Json>, name: &str) -> Outcome<Option<String>> {
    match config.get(name) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.clone())),
        Some(Json::Object(token)) => match token.get("content") {
            Some(Json::String(text)) => Ok(Some(text.clone())),
            _ => Err(Failure::invalid(format!("{name}.content: is not a string"))),
        },
        Some(_) => Err(Failure::invalid(format!("{name}: is neither a string nor an object"))),
    }
}

/// A model's files that say how it chats, each empty where there is none.
pub struct TemplateFiles<'a> {
    /// tokenizer_config.json
    pub config: &'a str,
    /// special_tokens_map.json
    pub special_map: &'a str,
    /// chat_template.jinja
    pub jinja: &'a str,
    /// chat_template.json, of models that see too
    pub processor: &'a str,
    /// additional_chat_templates/NAME.jinja, by name
    pub additional: Vec<(&'a str, &'a str)>,
}

impl ChatTemplate {
    pub fn new(files: &TemplateFiles, limits: Limits) -> Outcome<ChatTemplate> {
        let read = |json: &str, what: &str| match json {
            "" => Ok(Map::new()),
            json => parse_object(json, what),
        };
        let config = read(files.config, "tokenizer_config.json")?;
        let special_map = read(files.special_map, "special_tokens_map.json")?;
        let mut tokens = Map::new();
        for name in TOKEN_NAMES {
            let in_file = |map, file| {
                special_token(map, name).map_err(|failure| {
                    Failure::invalid(format!("{file}: {}", failure.message))
                })
            };
            let found = match in_file(&config, "tokenizer_config.json")? {
                Some(token) => Some(token),
                None => in_file(&special_map, "special_tokens_map.json")?,
            };
            if let Some(token) = found {
                tokens.insert(name.into(), token.into());
            }
        }
        let mut made = ChatTemplate {
            environment: environment(limits),
            programs: BTreeMap::new(),
            tokens,
            limits,
        };
        if files.jinja.is_empty() {
            let key = "chat_template";
            if config.get(key).is_some_and(|value| !value.is_null()) {
                made.add_given(config.get(key), "tokenizer_config.json: chat_template")?;
            } else {
                let processor = read(files.processor, "chat_template.json")?;
                made.add_given(processor.get(key), "chat_template.json: chat_template")?;
            }
        } else {
            made.add("default", files.jinja, "chat_template.jinja")?;
        }
        for (name, source) in &files.additional {
            made.add(name, source, &format!("additional_chat_templates/{name}.jinja"))?;
        }
        Ok(made)
    }

    /// A template, or a list of named ones.
    fn add_given(&mut self, found: Option<&Json>, field: &str) -> Outcome<()> {
        match found {
            None | Some(Json::Null) => {
                return Err(Failure {
                    kind: Kind::NotFound,
                    message: "the model has no chat template: neither chat_template.jinja nor \
                              chat_template in tokenizer_config.json or chat_template.json"
                        .into(),
                })
            }
            Some(Json::String(source)) => self.add("default", source, field)?,
            Some(Json::Array(list)) => {
                for (index, entry) in list.iter().enumerate() {
                    let (Some(name), Some(source)) =
                        (entry["name"].as_str(), entry["template"].as_str())
                    else {
                        return Err(Failure::invalid(format!(
                            "{field}[{index}]: needs the strings name and template"
                        )));
                    };
                    self.add(name, source, &format!("{field}[{index}]"))?;
                }
            }
            Some(_) => return Err(Failure::invalid(format!("{field}: is neither a string nor a list"))),
        }
        Ok(())
    }

    fn add(&mut self, name: &str, source: &str, field: &str) -> Outcome<()> {
        if source.len() as u64 > self.limits.max_template_bytes {
            return Err(Failure::invalid(format!(
                "{field}: {} bytes, the limit is {}",
                source.len(),
                self.limits.max_template_bytes
            )));
        }
        budget::set_budget(self.limits.max_work_bytes);
        let program = compile(source)
            .map_err(|error| Failure::invalid(format!("{field}: {}", describe(&error))))?;
        self.programs.insert(name.into(), program);
        Ok(())
    }

    /// The template that `transformers` would take.
    fn choose(&self, has_tools: bool) -> Outcome<&Program> {
        let tool_use = has_tools.then(|| self.programs.get("tool_use")).flatten();
        tool_use.or_else(|| self.programs.get("default")).ok_or_else(|| {
            Failure::invalid("tokenizer_config.json: chat_template has no entry named \"default\"")
        })
    }

    /// The source of the template for chats with or without tools; none where
    /// the model has none for them.
    pub fn source(&self, has_tools: bool) -> &str {
        // SAFETY: owned by the program, and nobody writes to it.
        self.choose(has_tools).map_or("", |program| unsafe { &*program.source })
    }

    pub fn render(&self, input: &RenderInput) -> Outcome<String> {
        let mut messages: Json = parse(input.messages, "messages")?;
        if !messages.as_array().is_some_and(|x| x.iter().all(Json::is_object)) {
            return Err(Failure::invalid("messages: must be a list of objects"));
        }
        if input.continue_final_message && input.add_generation_prompt {
            return Err(Failure::invalid(
                "continue_final_message: excludes add_generation_prompt",
            ));
        }
        let spaces = input.continue_final_message.then(|| mark_end(&mut messages)).transpose()?;
        let tools: Json = if input.tools.is_empty() { Json::Null } else { parse(input.tools, "tools")? };
        let has_tools = match &tools {
            Json::Null => false,
            Json::Array(list) => !list.is_empty(),
            _ => return Err(Failure::invalid("tools: must be a list")),
        };
        let mut variables = self.tokens.clone();
        variables.insert("documents".into(), Json::Null);
        if !input.extra.is_empty() {
            for (key, value) in parse_object(input.extra, "chat_template_kwargs")? {
                check_name(&key)?;
                variables.insert(key, value);
            }
        }
        variables.insert("messages".into(), messages);
        variables.insert("tools".into(), if has_tools { tools } else { Json::Null });
        variables.insert("add_generation_prompt".into(), input.add_generation_prompt.into());
        let program = self.choose(has_tools)?;
        let text = self.run(program, &variables, input)?;
        match spaces {
            Some(spaces) => cut_at_mark(text, &spaces),
            None => Ok(text),
        }
    }

    fn run(&self, program: &Program, variables: &Map<String, Json>, input: &RenderInput) -> Outcome<String> {
        let given = (input.messages.len() + input.tools.len() + input.extra.len()) as u64;
        budget::set_budget(self.limits.max_work_bytes + given * WORK_PER_INPUT_BYTE);
        python_filters::set_now(input.now_unix_s);
        let mut text = String::new();
        Vm::new(&self.environment)
            .eval(
                &program.instructions,
                Value::from_serialize(variables),
                &BTreeMap::new(),
                &mut machinery::make_string_output(&mut text),
                AutoEscape::None,
            )
            .map_err(|error| {
                let kind = match error.kind() {
                    ErrorKind::OutOfFuel => Kind::ResourceExhausted,
                    _ => Kind::InvalidArgument,
                };
                Failure { kind, message: format!("chat template: {}", describe(&error)) }
            })?;
        let limit = self.limits.max_output_bytes + given * OUTPUT_PER_INPUT_BYTE;
        if text.len() as u64 > limit {
            return Err(Failure {
                kind: Kind::ResourceExhausted,
                message: format!(
                    "chat template: made {} bytes of {given} bytes of input, the limit is {limit}",
                    text.len()
                ),
            });
        }
        Ok(text)
    }
}

fn parse(json: &str, what: &str) -> Outcome<Json> {
    serde_json::from_str(json)
        .map_err(|error| Failure::invalid(format!("{what}: {}", shorten(&error.to_string()))))
}

/// Extra variables must be names that a template can use, and no others: the
/// sandbox's functions live in the same space.
fn check_name(key: &str) -> Outcome<()> {
    let is_name = key.chars().all(|c| c == '_' || c.is_ascii_alphanumeric())
        && key.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic());
    let is_ours = matches!(key, "messages" | "tools" | "add_generation_prompt" | "raise_exception")
        || TOKEN_NAMES.contains(&key);
    if is_name && !is_ours {
        return Ok(());
    }
    Err(Failure::invalid(format!(
        "chat_template_kwargs: \"{}\" cannot be set",
        shorten(key)
    )))
}

fn environment(limits: Limits) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(limits.fuel));
    environment.set_recursion_limit(MAX_RECURSION);
    python_filters::install(&mut environment);
    sandbox::install(&mut environment);
    environment
}

fn compile(source: &str) -> Result<Program, Error> {
    let owned: *mut str = Box::into_raw(without_generation_tags(source).into_boxed_str());
    /// Frees the source unless a Program has taken it over.
    struct Unowned(*mut str);
    impl Drop for Unowned {
        fn drop(&mut self) {
            // SAFETY: from Box::into_raw above, and nothing borrows it any
            // more: whoever did was dropped before this guard.
            drop(unsafe { Box::from_raw(self.0) });
        }
    }
    let guard = Unowned(owned);
    // SAFETY: lives until the guard or the Program frees it, after the last
    // borrow; nobody writes to it.
    let text: &'static str = unsafe { &*owned };
    let spaces = WhitespaceConfig {
        keep_trailing_newline: false,
        lstrip_blocks: true,
        trim_blocks: true,
    };
    let program = {
        sandbox::check_chains(text, spaces)?;
        let parsed = machinery::parse(text, "chat_template", Default::default(), spaces)?;
        sandbox::check_constants(&parsed)?;
        let mut generator = CodeGenerator::new("chat_template", text);
        generator.compile_stmt(&parsed);
        let (instructions, _) = generator.finish();
        sandbox::bounded(&instructions)
    };
    std::mem::forget(guard);
    Ok(Program { instructions: ManuallyDrop::new(program), source: owned })
}

/// `{% generation %}` marks the assistant's text for training masks; here it
/// is a block that always runs.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        // `{%}` is one of them only once.
        let Some(end) = rest[start + 2..].find("%}").map(|x| start + 2 + x) else {
            break;
        };
        let inside = &rest[start + 2..end];
        let word = inside.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        out.push_str(&rest[..start + 2]);
        match word {
            "generation" => out.push_str(&inside.replace(word, " if true ")),
            "endgeneration" => out.push_str(&inside.replace(word, " endif ")),
            _ => out.push_str(inside),
        }
        out.push_str("%}");
        rest = &rest[end + 2..];
    }
    out.push_str(rest);
    out
}

/// The engine's message and line, without quotes of the template.
fn describe(error: &Error) -> String {
    let what = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, None) => "the template ran out of fuel (an endless loop?)".into(),
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_string(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    let mut text: String = what.chars().take(500).collect();
    if let Some(line) = error.line().filter(|line| *line > 0) {
        text.push_str(&format!(" (line {line})"));
    }
    text
}

/// Stands behind the last message's text while it is rendered, as in
/// `transformers`: the text itself may be found elsewhere too. Its space tells
/// whether the template keeps those at the end.
const END_MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Marks the end of the last message's text, which the prompt is to end with;
/// returns the spaces before it.
fn mark_end(messages: &mut Json) -> Outcome<String> {
    let last = messages.as_array_mut().and_then(|list| list.last_mut());
    let text = match last.and_then(|message| message.get_mut("content")) {
        Some(Json::String(text)) => Some(text),
        Some(Json::Array(parts)) => parts.iter_mut().rev().find_map(|part| {
            match part.get_mut("text") {
                Some(Json::String(text)) => Some(text),
                _ => None,
            }
        }),
        _ => None,
    };
    let text = text.ok_or_else(|| {
        Failure::invalid("continue_final_message: the last message has no text content")
    })?;
    let spaces = text[text.trim_end().len()..].to_string();
    text.push_str(END_MARK);
    Ok(spaces)
}

/// Cuts the mark and what the template puts behind it. A template that trims
/// the mark would have trimmed the text's own spaces too.
fn cut_at_mark(mut text: String, spaces: &str) -> Outcome<String> {
    let Some(end) = text.rfind(END_MARK.trim_end()) else {
        return Err(Failure::invalid(
            "continue_final_message: the template leaves out the last message",
        ));
    };
    let keeps_spaces = text[end..].starts_with(END_MARK);
    text.truncate(end);
    if !keeps_spaces && text.ends_with(spaces) {
        text.truncate(end - spaces.len());
    }
    Ok(text)
}
