//! The server as a function from requests to answers: a tower service.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{HeaderName, HeaderValue, Method, Request, Response, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body, Bytes};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;
use serde_json::{Value, json};

use super::call::{self, Path, Query};
use super::error::{ApiError, forbidden_by_budget};
use super::faults::{Effect, Fault};
use super::json::text;
use super::kinds::{Kind, Res};
use super::select::Selector;
use super::state::{Seen, State};
use super::store::{Key, Part, Preconditions, Written};
use super::{FakeApi, Shared, watch};

/// Body of an answer: a document, or a stream of watch events.
pub type FakeBody = UnsyncBoxBody<Bytes, io::Error>;

type Answer = Result<Response<FakeBody>, io::Error>;

impl<B> tower::Service<Request<B>> for FakeApi
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: std::fmt::Display,
{
    type Response = Response<FakeBody>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let shared = self.0.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let body = body
                .collect()
                .await
                .map_err(|e| io::Error::other(e.to_string()))?
                .to_bytes();
            let accepts = head.headers.get(http::header::ACCEPT);
            let accepts = accepts.and_then(|value| value.to_str().ok());
            let accepts = accepts.unwrap_or_default().to_owned();
            let media = head
                .headers
                .get(header::CONTENT_TYPE)
                .and_then(|v| v.to_str().ok())
                .unwrap_or_default();
            let query = call::query(head.uri.query().unwrap_or_default());
            let asked = Asked {
                method: head.method,
                query,
                media: media.to_owned(),
                metadata: accepts.contains("as=PartialObjectMetadataList"),
                body,
            };
            let mut answer = answer(&shared, head.uri.path(), &asked).await?;
            let date = dated(shared.lock().time());
            answer.headers_mut().extend(date);
            Ok(answer)
        })
    }
}

/// Returns the head that says when an answer is given.
fn dated(time: Timestamp) -> Option<(HeaderName, HeaderValue)> {
    let text = DateTimePrinter::new().timestamp_to_rfc9110_string(&time);
    let value = HeaderValue::try_from(text.ok()?).ok()?;
    Some((header::DATE, value))
}

/// The parts of a request that matter beyond its path.
struct Asked {
    method: Method,
    query: Query,
    media: String,
    /// Mark of a list that is to have metadata alone.
    metadata: bool,
    body: Bytes,
}

impl Asked {
    fn parameter(&self, name: &str) -> &str {
        self.query.get(name).map(String::as_str).unwrap_or_default()
    }

    /// True if the write is only to be tried.
    fn is_dry_run(&self) -> bool {
        self.parameter("dryRun") == "All"
    }

    fn json(&self) -> Result<Value, ApiError> {
        serde_json::from_slice(&self.body)
            .map_err(|e| ApiError::new(400, format!("the body is not JSON: {e}")))
    }
}

async fn answer(shared: &Arc<Shared>, path: &str, asked: &Asked) -> Answer {
    let epoch = {
        let state = shared.lock();
        if !state.running {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionRefused,
                "the fake API server is stopped",
            ));
        }
        state.epoch
    };
    let whole = path;
    let read = call::target(path)
        .and_then(|path| Ok((call::verb(&asked.method, &path, &asked.query)?, path)));
    let (verb, path) = match read {
        Ok(read) => read,
        Err(refusal) => return Ok(refused(&refusal)),
    };
    let resource = if path.subresource.is_empty() {
        path.plural.clone()
    } else {
        format!("{}/{}", path.plural, path.subresource)
    };
    // Counted and hit by faults apart from what is stored.
    let seen = if asked.is_dry_run() { "dry-run" } else { verb };
    let effect = {
        let mut state = shared.lock();
        let (namespace, name) = (path.namespace.clone(), path.name.clone());
        state.count(Seen {
            verb: seen.into(),
            resource: resource.clone(),
            namespace,
            name,
        });
        state.faults.take(seen, &resource)
    };
    shared.wake();
    let broken = || {
        Err(io::Error::new(
            io::ErrorKind::ConnectionReset,
            "injected: the connection broke",
        ))
    };
    let mut drop_after = false;
    match effect {
        None => {}
        Some(Effect::Fault(Fault::Status(code))) => {
            return Ok(refused(&ApiError::new(
                code,
                format!("injected: {verb} {resource} fails"),
            )));
        }
        Some(Effect::Fault(Fault::Budget)) => return Ok(document(429, &forbidden_by_budget())),
        Some(Effect::Fault(Fault::Hang)) => {
            stopped(shared, epoch).await;
            return broken();
        }
        Some(Effect::Fault(Fault::DropBefore)) => return broken(),
        Some(Effect::Fault(Fault::DropAfter)) => drop_after = true,
        Some(Effect::Hold(gate)) => tokio::select! {
            // Released by closing the gate.
            _ = gate.acquire() => {}
            () = stopped(shared, epoch) => return broken(),
        },
    }
    let result = if path.version.is_empty() {
        Ok(document(200, &version(&shared.lock().version)))
    } else if path.subresource == "proxy" {
        let text = shared.lock().behind_proxy.get(whole).cloned();
        text.map(|text| respond(200, body(text)))
            .ok_or_else(|| ApiError::not_found("pods", &path.name))
    } else {
        objects(shared, verb, &path, asked)
    };
    shared.wake();
    if drop_after {
        return broken();
    }
    Ok(result.unwrap_or_else(|refusal| refused(&refusal)))
}

/// Waits until the server is stopped, for requests that are never answered.
async fn stopped(shared: &Arc<Shared>, epoch: u64) {
    let mut wake = shared.changed.subscribe();
    loop {
        wake.borrow_and_update();
        let over = {
            let state = shared.lock();
            !state.running || state.epoch != epoch
        };
        if over || wake.changed().await.is_err() {
            return;
        }
    }
}

fn objects(
    shared: &Arc<Shared>,
    verb: &str,
    path: &Path,
    asked: &Asked,
) -> Result<Response<FakeBody>, ApiError> {
    let mut guard = shared.lock();
    guard.store.dry_run = asked.is_dry_run();
    let answer = of_objects(shared, &mut guard, verb, path, asked);
    guard.store.dry_run = false;
    answer
}

fn of_objects(
    shared: &Arc<Shared>,
    state: &mut State,
    verb: &str,
    path: &Path,
    asked: &Asked,
) -> Result<Response<FakeBody>, ApiError> {
    let res = Res {
        group: path.group.clone(),
        plural: path.plural.clone(),
    };
    let missing = || ApiError::new(404, "the server could not find the requested resource");
    let kind = state
        .store
        .kind(&res)
        .filter(|kind| kind.version == path.version)
        .ok_or_else(missing)?;
    let part = match path.subresource.as_str() {
        "eviction" if path.plural == "pods" => return evicted(state, &kind, path, asked),
        "" => Part::Main,
        "status" if kind.status => Part::Status,
        _ => return Err(missing()),
    };
    let key = Key {
        res,
        namespace: path.namespace.clone(),
        name: path.name.clone(),
    };
    let selector = Selector::parse(&path.plural, &asked.query, state.minor())?;
    let now = state.now();
    match verb {
        "get" => Ok(document(
            200,
            &state
                .store
                .get_at(&kind, &key, asked.parameter("resourceVersion"))?,
        )),
        "list" => {
            let items: Vec<&Value> = state
                .store
                .list_at(
                    &kind.res,
                    &path.namespace,
                    asked.parameter("resourceVersion"),
                )
                .filter(|o| selector.matches(o))
                .collect();
            let mut page = page(asked, items, state.store.version());
            let partial: Vec<Value>;
            if asked.metadata {
                partial = page.items.iter().copied().map(self::partial).collect();
                page.items = partial.iter().collect();
                let of = ("meta.k8s.io/v1", "PartialObjectMetadataList");
                return Ok(document(200, &list_of(of, &page)));
            }
            let of = (kind.api_version(), format!("{}List", kind.name));
            Ok(document(200, &list_of((&of.0, &of.1), &page)))
        }
        "watch" => {
            let mut selector_query = asked.query.clone();
            if !path.name.is_empty() {
                selector_query.insert(
                    "fieldSelector".into(),
                    format!("metadata.name={}", path.name),
                );
            }
            let selector = Selector::parse(&path.plural, &selector_query, state.minor())?;
            let events = watch::open(shared, state, kind, &path.namespace, &asked.query, selector)?;
            Ok(respond(200, StreamBody::new(events).boxed_unsync()))
        }
        "create" => Ok(document(
            201,
            &state.store.create(&kind, &key, asked.json()?, &now)?,
        )),
        "update" => Ok(document(
            200,
            &state.store.update(&kind, &key, asked.json()?, part, &now)?,
        )),
        "patch" => Ok(document(
            200,
            &patched(state, &kind, &key, part, asked, &now)?,
        )),
        "delete" => {
            let options = if asked.body.is_empty() {
                Value::Null
            } else {
                asked.json()?
            };
            let left = state
                .store
                .delete(&kind, &key, &preconditions(&options), &now)?;
            Ok(document(
                200,
                &left.unwrap_or_else(|| success(&kind, &path.name)),
            ))
        }
        other => Err(ApiError::new(405, format!("verb {other} is not served"))),
    }
}

fn preconditions(options: &Value) -> Preconditions {
    let given = |field: &str| {
        options
            .pointer(field)
            .and_then(Value::as_str)
            .map(str::to_owned)
    };
    Preconditions {
        uid: given("/preconditions/uid"),
        version: given("/preconditions/resourceVersion"),
    }
}

/// Deletes a pod, as the server does when no disruption budget forbids it.
fn evicted(
    state: &mut State,
    kind: &Kind,
    path: &Path,
    asked: &Asked,
) -> Result<Response<FakeBody>, ApiError> {
    let key = Key {
        res: kind.res.clone(),
        namespace: path.namespace.clone(),
        name: path.name.clone(),
    };
    let eviction = asked.json()?;
    let must = preconditions(eviction.get("deleteOptions").unwrap_or(&Value::Null));
    let now = state.now();
    state.store.delete(kind, &key, &must, &now)?;
    Ok(document(
        201,
        &json!({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}),
    ))
}

fn patched(
    state: &mut State,
    kind: &Kind,
    key: &Key,
    part: Part,
    asked: &Asked,
    now: &str,
) -> Result<Value, ApiError> {
    let change = asked.json()?;
    match asked.media.split(';').next().unwrap_or_default().trim() {
        "application/merge-patch+json" => state.store.merge(kind, key, &change, part, now),
        "application/apply-patch+yaml" => {
            if !text(&change, "/metadata/resourceVersion").is_empty() {
                return Err(ApiError::new(
                    409,
                    "an apply patch must not carry metadata.resourceVersion here",
                ));
            }
            let options = (
                asked.parameter("fieldManager"),
                asked.parameter("force") == "true",
            );
            state.store.apply(
                &Written {
                    kind,
                    key,
                    part,
                    now,
                },
                &change,
                options,
            )
        }
        other => Err(ApiError::new(
            415,
            format!("the body of the request was in an unknown format: {other}"),
        )),
    }
}

/// A part of a list.
struct Page<'p> {
    /// Version of the list when its first part was read: a watch from there misses nothing.
    version: String,
    items: Vec<&'p Value>,
    /// Token of the next part, and the number of objects in it and after it.
    rest: Option<(String, usize)>,
}

/// Takes the part of a list that `limit` and `continue` ask for. A read of any version is answered
/// as a whole, as by the API server's cache.
fn page<'p>(asked: &Asked, mut items: Vec<&'p Value>, version: u64) -> Page<'p> {
    let of = |object: &Value| {
        let field = |path| text(object, path).to_owned();
        (field("/metadata/namespace"), field("/metadata/name"))
    };
    let token = asked.parameter("continue");
    let version = match token.split_once(' ') {
        Some((version, last)) => {
            let last = last.split_once('/').unwrap_or_default();
            items.retain(|object| of(object) > (last.0.to_owned(), last.1.to_owned()));
            version.to_owned()
        }
        None => version.to_string(),
    };
    let limit = asked.parameter("limit").parse().unwrap_or(0);
    let mut rest = None;
    if limit > 0 && items.len() > limit && asked.parameter("resourceVersion") != "0" {
        let left = items.len() - limit;
        items.truncate(limit);
        rest = items.last().map(|last| {
            let (namespace, name) = of(last);
            (format!("{version} {namespace}/{name}"), left)
        });
    }
    Page {
        version,
        items,
        rest,
    }
}

/// Returns an object's metadata alone.
fn partial(object: &Value) -> Value {
    json!({
        "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
        "metadata": object.get("metadata"),
    })
}

fn list_of((api_version, kind): (&str, &str), page: &Page<'_>) -> Value {
    let mut metadata = json!({"resourceVersion": page.version});
    if let Some((token, left)) = &page.rest {
        metadata = json!({
            "resourceVersion": page.version, "continue": token, "remainingItemCount": left,
        });
    }
    json!({
        "apiVersion": api_version, "kind": kind,
        "metadata": metadata, "items": page.items,
    })
}

fn success(kind: &Kind, name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Success",
        "details": {"name": name, "group": kind.res.group, "kind": kind.res.plural},
    })
}

fn version(version: &str) -> Value {
    let mut parts = version.split('.');
    let (major, minor) = (parts.next().unwrap_or("1"), parts.next().unwrap_or("0"));
    json!({
        "major": major, "minor": minor, "gitVersion": format!("v{version}"), "gitCommit": "fake",
        "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "none", "compiler": "rustc",
        "platform": "fake/fake",
    })
}

fn refused(refusal: &ApiError) -> Response<FakeBody> {
    document(refusal.code, &refusal.status())
}

fn document(code: u16, body: &Value) -> Response<FakeBody> {
    respond(code, self::body(body.to_string()))
}

fn body(text: String) -> FakeBody {
    Full::new(Bytes::from(text))
        .map_err(|never| match never {})
        .boxed_unsync()
}

fn respond(code: u16, body: FakeBody) -> Response<FakeBody> {
    let mut response = Response::new(body);
    *response.status_mut() =
        http::StatusCode::from_u16(code).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    let json = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
