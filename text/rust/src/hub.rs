// SPDX-License-Identifier: Apache-2.0
//! Brings a model from a Hugging Face hub into its cache: of one commit the
//! files that are served from, nothing twice, and what was cut off goes on
//! where it ended.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use openssl::sha::Sha256;

use crate::failure::{Failure, Kind, Outcome};
use crate::hub_cache::{disk_failure, settle, Cache};
use crate::hub_http::{check_repo_id, is_plain, Client, Content, Trouble};

/// What the model's shape and formats are read from.
const CONFIGS: [&str; 3] = ["config.json", "quantize_config.json", "hf_quant_config.json"];
/// Beside the weights.
const SMALL_FILES: [&str; 10] = [
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];
/// Named templates, of which a model has few.
const TEMPLATES: &str = "additional_chat_templates/";
const MAX_TEMPLATES: usize = 64;
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Of the hub, before the cache must do.
const ASKS: u32 = 3;
/// Attempts in a row that bring nothing.
const ATTEMPTS: u32 = 5;
/// What the system needs besides.
const SPARE_BYTES: u64 = 64 << 20;

pub struct Request<'a> {
    pub repo: &'a str,
    pub revision: &'a str,
    pub endpoint: &'a str,
    pub cache: &'a str,
    pub token: &'a str,
    pub offline: bool,
    /// CONFIGS alone.
    pub config_only: bool,
}

/// Hears what goes on: a line to show, or bytes that are there of all.
pub trait Listener {
    fn say(&mut self, line: &str);
    fn bytes(&mut self, done: u64, total: u64);
}

/// A path to the snapshot's folder, which holds all that was asked for.
pub fn fetch(request: &Request, listener: &mut dyn Listener) -> Outcome<String> {
    check_repo_id(request.repo)?;
    let revision_parts = || request.revision.split('/');
    if !revision_parts().all(is_plain) || request.revision.contains("..") {
        return Err(Failure::invalid(format!(
            "--revision '{}' is neither a branch, a tag nor a commit",
            request.revision
        )));
    }
    let cache = Cache::new(request.cache, request.repo);
    if request.offline {
        return from_cache(request, &cache, "HF_HUB_OFFLINE is set");
    }
    let client = Client::new(request.endpoint, request.token);
    let repository = match retried(|| client.repository(request.repo, request.revision)) {
        Ok(repository) => repository,
        // Only what may pass: a model that is gone is not to be served on.
        Err(Trouble::Passing(why)) => {
            let path = from_cache(request, &cache, &format!("no answer ({why})"))?;
            listener.say(&format!("no answer from {}, using the cache", client.endpoint()));
            return Ok(path);
        }
        Err(Trouble::Final(failure)) => return Err(failure),
    };
    let commit = &repository.commit;
    let mut download = Download { request, client: &client, cache: &cache, commit, listener };
    let mut files: Vec<String> = SMALL_FILES
        .iter()
        .filter(|name| !request.config_only || CONFIGS.contains(name))
        .filter(|name| repository.files.iter().any(|file| file == *name))
        .map(|name| name.to_string())
        .collect();
    if !files.iter().any(|file| file == "config.json") {
        return Err(Failure {
            kind: Kind::NotFound,
            message: format!("'{}' holds no config.json: is it a model?", request.repo),
        });
    }
    if !request.config_only {
        files.extend(templates(&repository.files));
        files.extend(download.weight_files(&repository.files)?);
    }
    download.all(&files)?;
    cache.remember(request.revision, commit)?;
    path_text(&cache.snapshot(commit))
}

fn path_text(path: &Path) -> Outcome<String> {
    let text = path.to_str().map(str::to_string);
    text.ok_or_else(|| Failure::invalid("the cache's path is not UTF-8"))
}

/// What an earlier run left, whole.
fn from_cache(request: &Request, cache: &Cache, why: &str) -> Outcome<String> {
    let missing = |what: &str| Failure {
        kind: Kind::Unavailable,
        message: format!(
            "{why}, and {what} of '{}' is not in {}: run once with a connection, or give a \
             directory",
            request.repo, request.cache
        ),
    };
    let commit = cache.commit_of(request.revision);
    let commit = commit.ok_or_else(|| missing(&format!("revision {}", request.revision)))?;
    if !cache.has(&commit, "config.json") {
        return Err(missing("config.json"));
    }
    if !request.config_only && !cache.has(&commit, WEIGHTS) {
        if !cache.has(&commit, INDEX) {
            let names = file_names(&cache.snapshot(&commit));
            return match only_weights(&names) {
                Some(name) if cache.has(&commit, name) => path_text(&cache.snapshot(&commit)),
                _ => Err(missing(WEIGHTS)),
            };
        }
        let shards = shards_of(&cache.snapshot(&commit).join(INDEX))?;
        if let Some(absent) = shards.iter().find(|shard| !cache.has(&commit, shard)) {
            return Err(missing(absent));
        }
    }
    path_text(&cache.snapshot(&commit))
}

fn templates(files: &[String]) -> impl Iterator<Item = String> + '_ {
    let is_template = |file: &&String| {
        file.strip_prefix(TEMPLATES).is_some_and(|name| is_plain(name) && name.ends_with(".jinja"))
    };
    files.iter().filter(is_template).take(MAX_TEMPLATES).cloned()
}

/// The one file of all weights that has a name of its own, as AutoGPTQ wrote
/// them: no shard of an index that is missing, no adapter, and not Mistral's own
/// format.
fn only_weights(files: &[String]) -> Option<&String> {
    let mut whole = files.iter().filter(|file| {
        is_plain(file)
            && file.ends_with(".safetensors")
            && !file.starts_with("adapter_")
            && !file.starts_with("consolidated")
            && !file.contains("-of-")
    });
    let first = whole.next();
    if whole.next().is_some() { None } else { first }
}

fn file_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Files that an index names, each once.
fn shards_of(index: &Path) -> Outcome<Vec<String>> {
    let wrong = |what: &str| Failure::invalid(format!("{}: {what}", index.display()));
    let size = fs::metadata(index).map_err(|error| disk_failure(index, &error))?.len();
    if size > MAX_INDEX_BYTES {
        return Err(wrong("too large for an index"));
    }
    let text = fs::read(index).map_err(|error| disk_failure(index, &error))?;
    let json: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| wrong(&error.to_string()))?;
    let map = json.get("weight_map").and_then(serde_json::Value::as_object);
    let map = map.ok_or_else(|| wrong("weight_map is missing"))?;
    let mut shards = Vec::new();
    for value in map.values() {
        let name = value.as_str().unwrap_or("");
        if !is_plain(name) || !name.ends_with(".safetensors") {
            return Err(wrong("weight_map names a file that is no safetensors of this folder"));
        }
        shards.push(name.to_string());
    }
    shards.sort();
    shards.dedup();
    Ok(shards)
}

/// Tries again what may pass, with longer and longer pauses.
fn retried<T>(mut attempt: impl FnMut() -> Result<T, Trouble>) -> Result<T, Trouble> {
    let mut pause = Duration::from_millis(250);
    for _ in 1..ASKS {
        match attempt() {
            Err(Trouble::Passing(_)) => std::thread::sleep(pause),
            other => return other,
        }
        pause *= 2;
    }
    attempt()
}

struct Download<'a> {
    request: &'a Request<'a>,
    client: &'a Client,
    cache: &'a Cache,
    commit: &'a str,
    listener: &'a mut dyn Listener,
}

impl Download<'_> {
    /// One file, or those of the index; other formats of the same weights stay
    /// where they are.
    fn weight_files(&mut self, files: &[String]) -> Outcome<Vec<String>> {
        let holds = |name: &str| files.iter().any(|file| file == name);
        if holds(WEIGHTS) {
            return Ok(vec![WEIGHTS.to_string()]);
        }
        if !holds(INDEX) {
            if let Some(only) = only_weights(files) {
                return Ok(vec![only.clone()]);
            }
            return Err(Failure {
                kind: Kind::NotFound,
                message: format!(
                    "'{}' has no {WEIGHTS}: Tandem reads safetensors, not .bin, .pth or .gguf",
                    self.request.repo
                ),
            });
        }
        self.all(&[INDEX.to_string()])?;
        let shards = shards_of(&self.cache.snapshot(self.commit).join(INDEX))?;
        if let Some(absent) = shards.iter().find(|shard| !holds(shard)) {
            return Err(Failure::invalid(format!(
                "'{}' holds no {absent}, which {INDEX} names",
                self.request.repo
            )));
        }
        Ok(shards)
    }

    fn all(&mut self, files: &[String]) -> Outcome<()> {
        let mut missing = Vec::new();
        for file in files.iter().filter(|file| !self.cache.has(self.commit, file)) {
            let content = retried(|| self.client.content(self.request.repo, self.commit, file))
                .map_err(Trouble::into_failure)?;
            missing.push((file, content));
        }
        let have = |content: &Content| {
            let size = |path| fs::metadata(path).map_or(0, |figures| figures.len());
            size(self.cache.blob(&content.etag))
                .max(size(self.cache.incomplete(&content.etag)))
                .min(content.bytes)
        };
        let total: u64 = missing.iter().map(|(_, content)| content.bytes).sum();
        let there: u64 = missing.iter().map(|(_, content)| have(content)).sum();
        let free = self.cache.free_bytes();
        if free < (total - there).saturating_add(SPARE_BYTES) && total > there {
            return Err(Failure {
                kind: Kind::ResourceExhausted,
                message: format!(
                    "{}: {} MiB are free and {} MiB are to come; free some space or set HF_HOME \
                     to another disk",
                    self.request.cache,
                    free >> 20,
                    (total - there) >> 20
                ),
            });
        }
        let mut done = 0;
        for (file, content) in &missing {
            self.one(file, content, done, total)?;
            done += content.bytes;
            self.listener.bytes(done, total);
        }
        Ok(())
    }

    fn one(&mut self, file: &str, content: &Content, before: u64, total: u64) -> Outcome<()> {
        let listener = &mut *self.listener;
        let mut said = false;
        let _lock = self.cache.lock(&content.etag, || {
            if !std::mem::replace(&mut said, true) {
                listener.say(&format!("waiting for another process that fetches {file}"));
            }
        })?;
        let blob = self.cache.blob(&content.etag);
        let whole = fs::metadata(&blob).is_ok_and(|figures| figures.len() == content.bytes);
        if !whole {
            let incomplete = self.cache.incomplete(&content.etag);
            let mut fruitless = 0;
            while !self.attempt(file, content, &incomplete, before, total, &mut fruitless)? {}
            check_hash(&incomplete, content)?;
            settle(&incomplete, &blob)?;
        }
        self.cache.link(self.commit, file, &content.etag)
    }

    /// One connection's worth. True: all of it is there.
    fn attempt(
        &mut self,
        file: &str,
        content: &Content,
        path: &Path,
        before: u64,
        total: u64,
        fruitless: &mut u32,
    ) -> Outcome<bool> {
        let failed = |error: &std::io::Error| disk_failure(path, error);
        let mut output =
            OpenOptions::new().create(true).append(true).open(path).map_err(|e| failed(&e))?;
        let mut have = output.metadata().map_err(|e| failed(&e))?.len();
        if have > content.bytes {
            output.set_len(0).map_err(|e| failed(&e))?;
            have = 0;
        }
        if have == content.bytes {
            return Ok(true);
        }
        let begin = have;
        let why = match self.client.open(self.request.repo, self.commit, file, have) {
            Err(Trouble::Final(failure)) => return Err(failure),
            Err(Trouble::Passing(why)) => why,
            Ok((at, mut body)) => {
                if at != have {
                    output.set_len(0).map_err(|e| failed(&e))?;
                    have = 0;
                }
                let mut buffer = vec![0; 256 << 10];
                loop {
                    match body.read(&mut buffer) {
                        Ok(0) if have == content.bytes => return Ok(true),
                        Ok(0) => break "the connection ended early".to_string(),
                        Err(error) => break error.to_string(),
                        Ok(count) if have + count as u64 > content.bytes => {
                            output.set_len(0).map_err(|e| failed(&e))?;
                            have = 0;
                            break "more bytes than announced".to_string();
                        }
                        Ok(count) => {
                            output.write_all(&buffer[..count]).map_err(|e| failed(&e))?;
                            have += count as u64;
                            self.listener.bytes(before + have, total);
                        }
                    }
                }
            }
        };
        *fruitless = if have > begin { 0 } else { *fruitless + 1 };
        if *fruitless >= ATTEMPTS {
            return Err(Failure {
                kind: Kind::Unavailable,
                message: format!(
                    "{file} stopped at {have} of {} bytes: {why}. What has come is kept, the \
                     next run goes on from there",
                    content.bytes
                ),
            });
        }
        self.listener.say(&format!("{file}: {why}; going on at byte {have}"));
        std::thread::sleep(Duration::from_millis(250 << *fruitless));
        Ok(false)
    }
}

/// Large files are named by the SHA-256 of their content.
fn check_hash(path: &Path, content: &Content) -> Outcome<()> {
    if content.etag.len() != 64 || !content.etag.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(());
    }
    let mut file = fs::File::open(path).map_err(|error| disk_failure(path, &error))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(|error| disk_failure(path, &error))? {
            0 => break,
            count => hasher.update(&buffer[..count]),
        }
    }
    let hex: String = hasher.finish().iter().map(|byte| format!("{byte:02x}")).collect();
    if hex == content.etag {
        return Ok(());
    }
    let _ = fs::remove_file(path);
    Err(Failure::invalid(format!(
        "{}: the bytes that came are not those of the file (SHA-256 {hex}); they are removed, run \
         again",
        path.display()
    )))
}
