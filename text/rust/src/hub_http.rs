// SPDX-License-Identifier: Apache-2.0
//! Requests to a Hugging Face hub: what a repository holds, what a file is,
//! and its bytes from some place on. Every wait has a time-out; what the
//! server says is checked before anything is made of it.

use std::io::Read;
use std::time::Duration;

use serde::Deserialize;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, StatusCode};
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, Body};

use crate::failure::{Failure, Kind, Outcome};

const CONNECT: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(30);
/// A list of files; the hub's longest have some thousand.
const MAX_INFO_BYTES: u64 = 16 << 20;
const MAX_REDIRECTS: u32 = 5;

pub struct Client {
    endpoint: String,
    token: String,
    follow: Agent,
    stay: Agent,
}

/// A repository at one commit.
pub struct Repository {
    pub commit: String,
    pub files: Vec<String>,
}

/// A file by the name of its content, which is the blob's in the cache.
pub struct Content {
    pub etag: String,
    pub bytes: u64,
}

/// Why a request brought nothing.
pub enum Trouble {
    /// It may succeed another time: no connection, a broken one, an answer
    /// 429 or 5xx.
    Passing(String),
    Final(Failure),
}

impl Trouble {
    pub fn into_failure(self) -> Failure {
        match self {
            Trouble::Passing(message) => Failure { kind: Kind::Unavailable, message },
            Trouble::Final(failure) => failure,
        }
    }
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

/// Names that become paths: no way out of a folder, nothing hidden.
pub fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !name.starts_with('.')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-+".contains(&b))
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name).and_then(|value| value.to_str().ok())
}

fn passing(what: &str, error: &dyn std::fmt::Display) -> Trouble {
    Trouble::Passing(format!("{what}: {error}"))
}

impl Client {
    pub fn new(endpoint: &str, token: &str) -> Client {
        let config = || {
            Agent::config_builder()
                .tls_config(
                    TlsConfig::builder()
                        .provider(TlsProvider::NativeTls)
                        .root_certs(RootCerts::PlatformVerifier)
                        .build(),
                )
                .http_status_as_error(false)
                .redirect_auth_headers(RedirectAuthHeaders::SameHost)
                .user_agent(concat!("tandem/", env!("CARGO_PKG_VERSION")))
                .accept_encoding("identity")
                .timeout_resolve(Some(CONNECT))
                .timeout_connect(Some(CONNECT))
                .timeout_recv_response(Some(ANSWER))
                .timeout_per_read(Some(SILENCE))
        };
        Client {
            endpoint: endpoint.trim_end_matches('/').to_string(),
            token: token.to_string(),
            follow: config().max_redirects(MAX_REDIRECTS).build().into(),
            stay: config().max_redirects(0).max_redirects_will_error(false).build().into(),
        }
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Commit and files of `revision`.
    pub fn repository(&self, repo: &str, revision: &str) -> Result<Repository, Trouble> {
        let revision = revision.replace('/', "%2F");
        let url = format!("{}/api/models/{repo}/revision/{revision}", self.endpoint);
        let mut request = self.follow.get(&url);
        if !self.token.is_empty() {
            request = request.header("authorization", format!("Bearer {}", self.token));
        }
        let response = request.call().map_err(|error| passing(&url, &error))?;
        let mut response = self.check(response, repo, &url)?;
        let text = response
            .body_mut()
            .with_config()
            .limit(MAX_INFO_BYTES)
            .read_to_string()
            .map_err(|error| passing(&url, &error))?;
        let wrong = |what: &str| Trouble::Final(Failure::invalid(format!("{url}: {what}")));
        let info: Info = serde_json::from_str(&text)
            .map_err(|error| wrong(&format!("the answer is no list of files ({error})")))?;
        if !is_plain(&info.sha) {
            return Err(wrong("the commit's name is none"));
        }
        let files = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        Ok(Repository { commit: info.sha, files })
    }

    fn file_url(&self, repo: &str, commit: &str, file: &str) -> String {
        format!("{}/{repo}/resolve/{commit}/{}", self.endpoint, file.replace('+', "%2B"))
    }

    /// The name and size of a file's content. The hub says both beside a
    /// redirection to where large files lie, so that is not followed; one to
    /// another name of the repository is.
    pub fn content(&self, repo: &str, commit: &str, file: &str) -> Result<Content, Trouble> {
        let mut url = self.file_url(repo, commit, file);
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.stay.head(&url);
            if !self.token.is_empty() {
                request = request.header("authorization", format!("Bearer {}", self.token));
            }
            let response = request.call().map_err(|error| passing(&url, &error))?;
            if response.status().is_redirection() && header(&response, "x-linked-etag").is_none() {
                let to = header(&response, "location").unwrap_or("");
                if to.starts_with('/') && !to.starts_with("//") {
                    url = format!("{}{to}", origin(&url));
                    continue;
                }
            }
            let response = if response.status().is_redirection() {
                response
            } else {
                self.check(response, repo, &url)?
            };
            let wrong = |what: &str| Trouble::Final(Failure::invalid(format!("{url}: {what}")));
            let etag = header(&response, "x-linked-etag").or(header(&response, "etag"));
            let etag = etag.unwrap_or("").trim_start_matches("W/").trim_matches('"').to_string();
            if !is_plain(&etag) {
                return Err(wrong("the answer names no content (ETag)"));
            }
            let bytes = header(&response, "x-linked-size").or(header(&response, "content-length"));
            let bytes = bytes.and_then(|text| text.parse().ok());
            let bytes = bytes.ok_or_else(|| wrong("the answer tells no size"))?;
            return Ok(Content { etag, bytes });
        }
        Err(passing(&url, &"too many redirections"))
    }

    /// The file's bytes from `begin` on, and where they really begin: 0 where
    /// the server does not know ranges.
    pub fn open(
        &self,
        repo: &str,
        commit: &str,
        file: &str,
        begin: u64,
    ) -> Result<(u64, Box<dyn Read>), Trouble> {
        let url = self.file_url(repo, commit, file);
        let mut request = self.follow.get(&url);
        if !self.token.is_empty() {
            request = request.header("authorization", format!("Bearer {}", self.token));
        }
        if begin > 0 {
            request = request.header("range", format!("bytes={begin}-"));
        }
        let response = request.call().map_err(|error| passing(&url, &error))?;
        let response = self.check(response, repo, &url)?;
        let mut at = 0;
        if response.status() == StatusCode::PARTIAL_CONTENT {
            let range = header(&response, "content-range").unwrap_or("");
            let first = range.trim_start_matches("bytes ").split('-').next();
            at = first.and_then(|text| text.parse().ok()).unwrap_or(u64::MAX);
            if at != begin {
                return Err(passing(&url, &format!("asked from {begin}, got '{range}'")));
            }
        }
        Ok((at, Box::new(response.into_body().into_reader())))
    }

    /// The hub tells a missing from a private or gated repository by a header,
    /// as a status it hides both from strangers behind 401.
    fn check(
        &self,
        response: Response<Body>,
        repo: &str,
        url: &str,
    ) -> Result<Response<Body>, Trouble> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let code = header(&response, "x-error-code").unwrap_or("");
        let fail = |kind, message| Err(Trouble::Final(Failure { kind, message }));
        let page = format!("{}/{repo}", self.endpoint);
        if code == "GatedRepo" || (status == StatusCode::FORBIDDEN && code.is_empty()) {
            return fail(
                Kind::PermissionDenied,
                format!(
                    "'{repo}' is gated: accept its terms at {page}, and set HF_TOKEN to a token \
                     of that account{}",
                    if self.token.is_empty() { "" } else { " (the one in use may not read it)" }
                ),
            );
        }
        if code == "RevisionNotFound" {
            return fail(
                Kind::NotFound,
                format!("'{repo}' has no such revision ({url}): check --revision"),
            );
        }
        if code == "EntryNotFound" {
            return fail(Kind::NotFound, format!("there is no {url}"));
        }
        if status == StatusCode::UNAUTHORIZED && !self.token.is_empty() && code.is_empty() {
            return fail(
                Kind::PermissionDenied,
                format!("{} refuses the token: check HF_TOKEN", self.endpoint),
            );
        }
        if matches!(status, StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED) {
            return fail(
                Kind::NotFound,
                format!(
                    "{} has no model '{repo}', or it is private: check the name{}",
                    self.endpoint,
                    if self.token.is_empty() { ", or set HF_TOKEN" } else { " and the token" }
                ),
            );
        }
        let message = format!("{url}: answer {status}");
        if status.is_server_error()
            || status == StatusCode::TOO_MANY_REQUESTS
            || status == StatusCode::RANGE_NOT_SATISFIABLE
        {
            return Err(Trouble::Passing(message));
        }
        fail(Kind::Unavailable, message)
    }
}

/// "https://host:port" of a URL.
fn origin(url: &str) -> &str {
    let after_scheme = url.find("://").map_or(0, |at| at + 3);
    let end = url[after_scheme..].find('/').map_or(url.len(), |at| after_scheme + at);
    &url[..end]
}

/// A repository's id as the hub has them: "name" or "organisation/name".
pub fn check_repo_id(repo: &str) -> Outcome<()> {
    let parts: Vec<&str> = repo.split('/').collect();
    let fine = parts.len() <= 2
        && repo.len() <= 96
        && !repo.contains("--")
        && !repo.contains("..")
        && parts.iter().all(|part| is_plain(part) && !part.contains('+'));
    if fine {
        return Ok(());
    }
    Err(Failure::invalid(format!(
        "'{repo}' is no model id: expected ORGANISATION/NAME of letters, digits, '-', '_' and '.'"
    )))
}
