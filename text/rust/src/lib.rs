// SPDX-License-Identifier: Apache-2.0
//! The C face of the crate; text/ffi.h declares the same functions for C++.
//!
//! Rules that hold for every function here:
//! - Input pointers are borrowed for the call only. `(null, 0)` is an empty
//!   input. Results leave through a `Sink` that the caller passes, so nothing
//!   allocated here is ever freed elsewhere; only handles have owners
//!   (the C++ classes), who give them back to their `_free` function.
//! - A handle may be used from many threads at once, `_free` excepted, and a
//!   grammar's by one at a time.
//! - No panic leaves: it becomes `INTERNAL`. Its message may quote the text
//!   being worked on, so only its place in the source is reported.
#![deny(unsafe_op_in_unsafe_fn)]

mod added_tokens;
mod budget;
mod decode_table;
mod failure;
mod hub;
mod hub_cache;
mod hub_http;
mod grammar;
mod lark_checks;
mod python;
mod python_filters;
mod python_strings;
mod regex_checks;
mod sandbox;
mod structural_tag;
mod template;
mod token_id;
mod tokenizer;
mod validate;

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Once};
use std::time::Duration;

use added_tokens::TokenizerFiles;
use failure::{Failure, Kind, Outcome};
use grammar::{Grammar, Source, Vocabulary};
use template::{ChatTemplate, Limits, RenderInput, TemplateFiles};
use tokenizer::TextTokenizer;

/// Takes bytes that are borrowed for the duration of `put` only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sink {
    context: *mut c_void,
    put: extern "C" fn(context: *mut c_void, data: *const c_void, len: usize),
}

impl Sink {
    fn text(&self, text: &str) {
        (self.put)(self.context, text.as_ptr().cast(), text.len());
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Bytes {
    data: *const u8,
    len: usize,
}

impl Bytes {
    /// # Safety
    /// `data` points to `len` readable bytes that live for `'a`, or is null.
    unsafe fn get<'a>(self) -> &'a [u8] {
        if self.data.is_null() {
            return &[];
        }
        // SAFETY: the caller's promise above.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }
}

fn utf8<'a>(bytes: &'a [u8], what: &str) -> Outcome<&'a str> {
    std::str::from_utf8(bytes).map_err(|error| {
        Failure::invalid(format!(
            "{what} is not valid UTF-8 (byte {})",
            error.valid_up_to()
        ))
    })
}

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
    static PANIC_PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `body`; a panic becomes an error that tells its place alone.
fn quietly<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let outer = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !GUARDED.with(Cell::get) {
                return outer(info);
            }
            let place = info.location().map(|at| format!("{}:{}", at.file(), at.line()));
            PANIC_PLACE.with(|slot| *slot.borrow_mut() = place.unwrap_or_default());
        }));
    });
    let outer = GUARDED.with(|flag| flag.replace(true));
    let outcome = catch_unwind(AssertUnwindSafe(body));
    GUARDED.with(|flag| flag.set(outer));
    outcome.unwrap_or_else(|payload| {
        // Dropping a payload may itself panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(payload)));
        let place = PANIC_PLACE.with(|slot| slot.borrow().clone());
        // Only the crate's folder on: the rest is the builder's machine.
        let place = place.rsplit_once("/registry/src/").map_or(place.as_str(), |x| x.1);
        Err(Failure {
            kind: Kind::Internal,
            message: format!("a library failed on this input (panic at {place})"),
        })
    })
}

/// Runs `body`; an error or a panic goes to `error`, its kind is returned.
fn guard(error: Sink, body: impl FnOnce() -> Outcome<()>) -> i32 {
    match quietly(body) {
        Ok(()) => 0,
        Err(failure) => {
            error.text(&failure.message);
            failure.kind as i32
        }
    }
}

/// Parses `json` (tokenizer.json), with the added tokens of `config`
/// (tokenizer_config.json), `special_map` (special_tokens_map.json) and `added`
/// (added_tokens.json), each empty where the model has none, and gives a handle
/// through `out`, owned by the caller until `tandem_text_tokenizer_free`.
/// Errors begin with a file's name.
///
/// # Safety
/// Inputs are readable; `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_tokenizer_new(
    json: Bytes,
    config: Bytes,
    special_map: Bytes,
    added: Bytes,
    out: *mut *mut TextTokenizer,
    error: Sink,
) -> i32 {
    guard(error, || {
        let part = |bytes: Bytes, name: &str| {
            // SAFETY: borrowed for this call, see above.
            utf8(unsafe { bytes.get() }, &format!("{name}: the file"))
        };
        let files = TokenizerFiles {
            tokenizer: part(json, "tokenizer.json")?,
            config: part(config, "tokenizer_config.json")?,
            special_map: part(special_map, "special_tokens_map.json")?,
            added: part(added, "added_tokens.json")?,
        };
        let made = Box::new(TextTokenizer::from_files(&files)?);
        // SAFETY: `out` is writable by contract.
        unsafe { *out = Box::into_raw(made) };
        Ok(())
    })
}

/// Ends a handle; null is allowed.
///
/// # Safety
/// `handle` came from `tandem_text_tokenizer_new`, is given back once and is
/// in use nowhere.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_tokenizer_free(handle: *mut TextTokenizer) {
    if !handle.is_null() {
        // SAFETY: made by Box::into_raw, given back once.
        let owned = unsafe { Box::from_raw(handle) };
        let _ = catch_unwind(AssertUnwindSafe(|| drop(owned)));
    }
}

/// Lends the decode table; its pointers live as long as the handle.
///
/// # Safety
/// `handle` is live.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_tokenizer_table(
    handle: *const TextTokenizer,
) -> decode_table::TableView {
    // SAFETY: live by contract; only shared access.
    unsafe { &*handle }.table.view()
}

/// Encodes `text`; `ids` receives int32 ids, its length in ids.
///
/// # Safety
/// `handle` is live, `text` readable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_tokenizer_encode(
    handle: *const TextTokenizer,
    text: Bytes,
    add_special_tokens: bool,
    ids: Sink,
    error: Sink,
) -> i32 {
    guard(error, || {
        // SAFETY: live and borrowed for this call.
        let (tokenizer, text) = unsafe { (&*handle, text.get()) };
        let text = utf8(text, "the text to encode")?;
        let encoded = tokenizer.encode(text, add_special_tokens)?;
        (ids.put)(ids.context, encoded.as_ptr().cast(), encoded.len());
        Ok(())
    })
}

/// The id of exactly this token, or -1.
///
/// # Safety
/// `handle` is live, `token` readable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_tokenizer_token_to_id(
    handle: *const TextTokenizer,
    token: Bytes,
) -> i32 {
    // SAFETY: live and borrowed for this call.
    let (tokenizer, token) = unsafe { (&*handle, token.get()) };
    let find = || {
        let token = std::str::from_utf8(token).ok()?;
        tokenizer.token_to_id(token)
    };
    catch_unwind(AssertUnwindSafe(find)).ok().flatten().map_or(-1, |id| id as i32)
}

/// Reads special token `name` ("bos_token") of a tokenizer_config.json or a
/// special_tokens_map.json; `token` is not called where the file has none.
///
/// # Safety
/// `json` and `name` are readable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_config_token(
    json: Bytes,
    name: Bytes,
    token: Sink,
    error: Sink,
) -> i32 {
    guard(error, || {
        // SAFETY: borrowed for this call.
        let (json, name) = unsafe { (json.get(), name.get()) };
        let config = template::parse_object(utf8(json, "the file")?, "")?;
        if let Some(found) = template::special_token(&config, utf8(name, "the name")?)? {
            token.text(&found);
        }
        Ok(())
    })
}

/// A template and its file's name without ".jinja"; both borrowed for the call.
#[repr(C)]
pub struct NamedTemplate {
    name: Bytes,
    source: Bytes,
}

/// Compiles the chat templates of a model: `config` is tokenizer_config.json,
/// `special_map` special_tokens_map.json, `jinja` chat_template.jinja,
/// `processor` chat_template.json, each empty where the model has none;
/// `additional` [count] are those of additional_chat_templates. The handle is
/// the caller's.
///
/// # Safety
/// Inputs are readable, `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_template_new(
    config: Bytes,
    special_map: Bytes,
    jinja: Bytes,
    processor: Bytes,
    additional: *const NamedTemplate,
    count: usize,
    limits: Limits,
    out: *mut *mut ChatTemplate,
    error: Sink,
) -> i32 {
    guard(error, || {
        // SAFETY: borrowed for this call.
        let (config, map) = unsafe { (config.get(), special_map.get()) };
        // SAFETY: borrowed for this call.
        let (jinja, processor) = unsafe { (jinja.get(), processor.get()) };
        let named: &[NamedTemplate] = match count {
            0 => &[],
            // SAFETY: borrowed for this call.
            _ => unsafe { std::slice::from_raw_parts(additional, count) },
        };
        let mut additional = Vec::new();
        for template in named {
            // SAFETY: borrowed for this call.
            let (name, source) = unsafe { (template.name.get(), template.source.get()) };
            let name = utf8(name, "a name in additional_chat_templates")?;
            let place = format!("additional_chat_templates/{name}.jinja");
            additional.push((name, utf8(source, &place)?));
        }
        let files = TemplateFiles {
            additional,
            config: utf8(config, "tokenizer_config.json")?,
            special_map: utf8(map, "special_tokens_map.json")?,
            jinja: utf8(jinja, "chat_template.jinja")?,
            processor: utf8(processor, "chat_template.json")?,
        };
        let made = Box::new(ChatTemplate::new(&files, limits)?);
        // SAFETY: `out` is writable by contract.
        unsafe { *out = Box::into_raw(made) };
        Ok(())
    })
}

/// Ends a handle; null is allowed.
///
/// # Safety
/// As for `tandem_text_tokenizer_free`.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_template_free(handle: *mut ChatTemplate) {
    if !handle.is_null() {
        // SAFETY: made by Box::into_raw, given back once.
        let owned = unsafe { Box::from_raw(handle) };
        let _ = catch_unwind(AssertUnwindSafe(|| drop(owned)));
    }
}

/// The source of the template for chats with or without tools, empty where
/// there is none for them.
///
/// # Safety
/// `handle` is live.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_template_source(
    handle: *const ChatTemplate,
    has_tools: bool,
    source: Sink,
) {
    // SAFETY: live and borrowed for this call.
    let template = unsafe { &*handle };
    source.text(template.source(has_tools));
}

/// What a render takes; all borrowed for the call, JSON where named so.
#[repr(C)]
pub struct RenderArguments {
    messages_json: Bytes,
    tools_json: Bytes,
    extra_json: Bytes,
    now_unix_s: i64,
    add_generation_prompt: bool,
    continue_final_message: bool,
}

/// Renders; `prompt` receives the text.
///
/// # Safety
/// `handle` is live, `arguments` and what it points to are readable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_template_render(
    handle: *const ChatTemplate,
    arguments: *const RenderArguments,
    prompt: Sink,
    error: Sink,
) -> i32 {
    guard(error, || {
        // SAFETY: live and borrowed for this call.
        let (template, arguments) = unsafe { (&*handle, &*arguments) };
        // SAFETY: as above.
        let (messages, tools, extra) = unsafe {
            (
                arguments.messages_json.get(),
                arguments.tools_json.get(),
                arguments.extra_json.get(),
            )
        };
        let text = template.render(&RenderInput {
            messages: utf8(messages, "messages")?,
            tools: utf8(tools, "tools")?,
            extra: utf8(extra, "chat_template_kwargs")?,
            now_unix_s: arguments.now_unix_s,
            add_generation_prompt: arguments.add_generation_prompt,
            continue_final_message: arguments.continue_final_message,
        })?;
        prompt.text(&text);
        Ok(())
    })
}

/// What to fetch; all borrowed for the call, UTF-8.
#[repr(C)]
pub struct FetchArguments {
    repo: Bytes,
    revision: Bytes,
    endpoint: Bytes,
    cache: Bytes,
    token: Bytes,
    offline: bool,
    config_only: bool,
}

/// Hears of a download, on the caller's thread: a line to show (`line` is not
/// null) or how many bytes are there of how many.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FetchListener {
    context: *mut c_void,
    hear: extern "C" fn(*mut c_void, line: *const u8, len: usize, done: u64, total: u64),
}

impl hub::Listener for FetchListener {
    fn say(&mut self, line: &str) {
        (self.hear)(self.context, line.as_ptr(), line.len(), 0, 0);
    }
    fn bytes(&mut self, done: u64, total: u64) {
        (self.hear)(self.context, std::ptr::null(), 0, done, total);
    }
}

/// Fetches a model from a hub into its cache; `path` receives the folder of
/// its snapshot. Blocks while it does.
///
/// # Safety
/// `arguments` and what it points to are readable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_hub_fetch(
    arguments: *const FetchArguments,
    mut listener: FetchListener,
    path: Sink,
    error: Sink,
) -> i32 {
    guard(error, || {
        // SAFETY: borrowed for this call.
        let arguments = unsafe { &*arguments };
        // SAFETY: as above.
        let part = |bytes: Bytes, what| utf8(unsafe { bytes.get() }, what);
        let found = hub::fetch(
            &hub::Request {
                repo: part(arguments.repo, "the model's id")?,
                revision: part(arguments.revision, "the revision")?,
                endpoint: part(arguments.endpoint, "HF_ENDPOINT")?,
                cache: part(arguments.cache, "the cache's path")?,
                token: part(arguments.token, "the token")?,
                offline: arguments.offline,
                config_only: arguments.config_only,
            },
            &mut listener,
        )?;
        path.text(&found);
        Ok(())
    })
}
/// Makes the trie of a model with `vocab_size` ids; the handle is the caller's.
///
/// # Safety
/// `tokenizer` is live, `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_vocabulary_new(
    tokenizer: *const TextTokenizer,
    vocab_size: usize,
    out: *mut *const Vocabulary,
    error: Sink,
) -> i32 {
    guard(error, || {
        // SAFETY: live by contract; only shared access.
        let made = Vocabulary::new(unsafe { &*tokenizer }, vocab_size)?;
        // SAFETY: `out` is writable by contract.
        unsafe { *out = Arc::into_raw(Arc::new(made)) };
        Ok(())
    })
}

/// Ends a handle; null is allowed. Grammars made of it stay.
///
/// # Safety
/// `handle` came from `tandem_text_vocabulary_new`, is given back once and is
/// in use nowhere.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_vocabulary_free(handle: *const Vocabulary) {
    if !handle.is_null() {
        // SAFETY: made by Arc::into_raw, given back once.
        let owned = unsafe { Arc::from_raw(handle) };
        let _ = catch_unwind(AssertUnwindSafe(|| drop(owned)));
    }
}

/// Compiles `text`, of a kind of `grammar::Source`, within `budget_ms`; the
/// handle is the caller's.
///
/// # Safety
/// `vocabulary` is live, `text` readable, `out` writable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_grammar_new(
    vocabulary: *const Vocabulary,
    source: i32,
    text: Bytes,
    budget_ms: u64,
    out: *mut *mut Grammar,
    error: Sink,
) -> i32 {
    guard(error, || {
        // SAFETY: made by Arc::into_raw and live; the count is taken for a
        // reference of its own.
        let vocabulary = unsafe {
            Arc::increment_strong_count(vocabulary);
            Arc::from_raw(vocabulary)
        };
        // SAFETY: borrowed for this call.
        let text = utf8(unsafe { text.get() }, "the text")?;
        let budget = Duration::from_millis(budget_ms);
        let made = Vocabulary::compile(&vocabulary, Source::from_code(source)?, text, budget)?;
        // SAFETY: `out` is writable by contract.
        unsafe { *out = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

/// Gives a state of its own, equal to `handle`'s, through `out`; the handle is
/// the caller's.
///
/// # Safety
/// `handle` is live, and at most copied by others; `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_grammar_copy(
    handle: *const Grammar,
    out: *mut *mut Grammar,
    error: Sink,
) -> i32 {
    guard(error, || {
        // SAFETY: live by contract; only shared access.
        let grammar = unsafe { &*handle };
        let made = grammar.copy();
        // SAFETY: `out` is writable by contract.
        unsafe { *out = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

/// Ends a handle; null is allowed.
///
/// # Safety
/// `handle` came from `tandem_text_grammar_new` or `_copy`, is given back once and is in
/// use nowhere.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_grammar_free(handle: *mut Grammar) {
    if !handle.is_null() {
        // SAFETY: made by Box::into_raw, given back once.
        let owned = unsafe { Box::from_raw(handle) };
        let _ = catch_unwind(AssertUnwindSafe(|| drop(owned)));
    }
}

/// Fills `words` [count] with the bits of the ids that may come next, and says
/// in `may_end` whether the text may end.
///
/// # Safety
/// `handle` is live and used by nobody else; `words` and `may_end` are writable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_grammar_mask(
    handle: *mut Grammar,
    words: *mut u32,
    count: usize,
    may_end: *mut bool,
    error: Sink,
) -> i32 {
    guard(error, || {
        // SAFETY: live, and the caller's alone for this call.
        let (grammar, words) = unsafe { (&mut *handle, std::slice::from_raw_parts_mut(words, count)) };
        let ends = grammar.mask(words)?;
        // SAFETY: writable by contract.
        unsafe { *may_end = ends };
        Ok(())
    })
}

/// Goes on by `tokens` [count] up to the first that may not come; `consumed`
/// receives how many.
///
/// # Safety
/// `handle` is live and used by nobody else; `tokens` is readable, `consumed`
/// writable.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_grammar_consume(
    handle: *mut Grammar,
    tokens: *const u32,
    count: usize,
    consumed: *mut usize,
    error: Sink,
) -> i32 {
    guard(error, || {
        if count == 0 {
            // SAFETY: writable by contract.
            unsafe { *consumed = 0 };
            return Ok(());
        }
        // SAFETY: live, and the caller's alone for this call.
        let (grammar, tokens) = unsafe { (&mut *handle, std::slice::from_raw_parts(tokens, count)) };
        let done = grammar.consume(tokens)?;
        // SAFETY: writable by contract.
        unsafe { *consumed = done };
        Ok(())
    })
}

/// About how many bytes it took when it was new.
///
/// # Safety
/// `handle` is live.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_grammar_new_bytes(handle: *const Grammar) -> usize {
    // SAFETY: live by contract, and it does not change.
    unsafe { &*handle }.new_bytes()
}

/// Whether no more token may come.
///
/// # Safety
/// `handle` is live and used by nobody else.
#[no_mangle]
pub unsafe extern "C" fn tandem_text_grammar_ended(handle: *const Grammar) -> bool {
    // SAFETY: live by contract.
    catch_unwind(AssertUnwindSafe(|| unsafe { &*handle }.ended())).unwrap_or(true)
}
