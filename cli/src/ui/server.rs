//! The page over HTTP: its files, a stream of views, and the words of `divvy status` about one GPU
//! or claim.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use divvy_telemetry::{Chain, Limits};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use futures::stream;
use http::{HeaderValue, StatusCode, header};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};

use super::guard::{Guard, HEADERS, Verdict};
use crate::format::{docs_url, harmless};
use crate::status::snapshot::Snapshot;
use crate::status::{claim, render, report};
use crate::usage::Usage;
use crate::view;

/// Number of connections, many times more than one browser needs. A stream of views lasts.
const LIMITS: Limits = Limits {
    connections: 64,
    head: Duration::from_secs(5),
    connection: Duration::from_hours(24),
};
/// So many times longer than a reading took, the cluster is left alone.
const REST: u32 = 4;

const HTML: &str = "text/html; charset=utf-8";

/// The files of the page: name in its folder, media type, content.
const FILES: [(&str, &str, &str); 4] = [
    ("", HTML, include_str!("page/index.html")),
    (
        "style.css",
        "text/css; charset=utf-8",
        include_str!("page/style.css"),
    ),
    (
        "app.js",
        "text/javascript; charset=utf-8",
        include_str!("page/app.js"),
    ),
    ("icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
];

/// Returns the page behind the link: the cookie is `Strict`, so that a page of this server must
/// lead on, not the site with the link.
fn enter(folder: &str) -> String {
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>divvy</title>\
         <link rel=icon href={folder}icon.svg>\
         <meta http-equiv=refresh content=\"0;url={folder}\"><p><a href=\"{folder}\">Show the GPUs</a>"
    )
}

/// The cluster at one moment.
#[derive(Debug)]
pub struct Reading {
    pub snapshot: Snapshot,
    pub usage: Usage,
    /// Caption of what is being played; for the demo.
    pub caption: Option<String>,
    /// Name of the cluster for people: its context, or its address.
    pub cluster: Option<String>,
}

/// Where readings come from.
pub type Source = Box<dyn Fn() -> BoxFuture<'static, Result<Reading>> + Send + Sync>;

/// Content of the page: the last reading, and why there is no newer one.
#[derive(Debug, Default)]
struct Shown {
    snapshot: Option<Arc<Snapshot>>,
    /// The event for browsers: `{view, problem, docs, every}`.
    event: String,
    view: Option<Arc<Value>>,
}

/// Source of views, the same for all tabs.
#[derive(Clone)]
pub struct Page {
    source: Arc<Source>,
    every: Duration,
    shown: Arc<watch::Sender<Shown>>,
    /// A tab has come.
    wanted: Arc<Notify>,
}

impl Page {
    pub fn new(source: Source, every: Duration) -> Self {
        Self {
            source: Arc::new(source),
            every,
            shown: Arc::default(),
            wanted: Arc::default(),
        }
    }

    /// Returns a page of one view, which was saved before.
    pub(super) fn of_saved(view: Value) -> Self {
        let page = Self::new(Box::new(|| std::future::pending().boxed()), Duration::MAX);
        page.shown.send_modify(|shown| {
            shown.view = Some(Arc::new(view));
            shown.event = event(shown.view.as_deref(), None, Duration::ZERO);
        });
        page
    }

    /// Waits until a tab shows the page.
    pub async fn watched(&self) {
        while self.shown.receiver_count() == 0 {
            self.wanted.notified().await;
        }
        // For others who wait.
        self.wanted.notify_one();
    }

    /// Has all tabs show a reading, or why there is none.
    pub fn show(&self, reading: Result<Reading>) {
        self.shown.send_modify(|shown| {
            let problem = match reading {
                Ok(Reading {
                    snapshot,
                    usage,
                    caption,
                    cluster,
                }) => {
                    let view = view::View {
                        caption,
                        cluster,
                        ..view::of(&snapshot, &usage)
                    };
                    shown.view = Some(Arc::new(serde_json::json!(view)));
                    shown.snapshot = Some(Arc::new(snapshot));
                    None
                }
                Err(error) => Some(Chain(error.as_ref()).to_string()),
            };
            shown.event = event(shown.view.as_deref(), problem.as_deref(), self.every);
        });
    }

    /// Reads again and again, while there are tabs to show it.
    async fn refresh(self) {
        loop {
            self.watched().await;
            let began = Instant::now();
            let reading = (self.source)().await;
            self.show(reading);
            tokio::time::sleep(self.every.max(began.elapsed() * REST)).await;
        }
    }
}

/// Returns the event for browsers: what was read last, why there is nothing newer, and the pause
/// until it is read again.
fn event(view: Option<&Value>, problem: Option<&str>, every: Duration) -> String {
    let docs = docs_url().map(|url| url.trim_end_matches('/').to_owned());
    let docs = docs.filter(|url| url.starts_with("https://") || url.starts_with("http://"));
    serde_json::json!({ "view": view, "problem": problem, "docs": docs, "every": every.as_secs() })
        .to_string()
}

/// Serves the page until `shutdown` is done.
pub(super) async fn serve(
    page: Page,
    guard: Guard,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let at = |name: &str| format!("{}{name}", guard.folder());
    let mut routes = Router::new()
        .route(&at("events"), get(events))
        .route(&at("about"), get(about))
        .route(&at("view.json"), get(saved));
    for (name, media, content) in FILES {
        routes = routes.route(
            &at(name),
            get(move || async move { ([(header::CONTENT_TYPE, media)], content) }),
        );
    }
    let routes = routes
        .layer(from_fn_with_state(Arc::new(guard), check))
        .with_state(page.clone());
    tokio::select! {
        () = divvy_telemetry::serve(routes, LIMITS, listener, shutdown) => {}
        () = page.refresh() => {}
    }
}

/// Before everything else, for every path.
async fn check(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let mut response = match guard.judge(&parts) {
        Verdict::Answer => next.run(Request::from_parts(parts, body)).await,
        Verdict::Enter { cookie } => {
            let headers = [
                (header::CONTENT_TYPE, HTML),
                (header::SET_COOKIE, cookie.as_str()),
            ];
            (headers, enter(guard.folder())).into_response()
        }
        Verdict::Refuse(status, why) => (status, format!("{why}\n")).into_response(),
    };
    for (name, value) in HEADERS {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn events(State(page): State<Page>) -> impl IntoResponse {
    let mut views = page.shown.subscribe();
    page.wanted.notify_one();
    // What is known already comes at once.
    if !views.borrow().event.is_empty() {
        views.mark_changed();
    }
    Sse::new(stream::unfold(views, |mut views| async move {
        views.changed().await.ok()?;
        let event = Event::default().data(&views.borrow_and_update().event);
        Some((Ok::<_, Infallible>(event), views))
    }))
}

/// Answers with the view that is shown, as a file for `divvy ui --from`.
async fn saved(State(page): State<Page>) -> Response {
    match page.shown.borrow().view.as_deref() {
        Some(view) => (
            [(header::CONTENT_TYPE, "application/json")],
            view.to_string(),
        )
            .into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "nothing was read yet\n").into_response(),
    }
}

/// Answers as `divvy status gpu|node|claim NAME`, of the reading that is shown:
/// `about?gpu/NODE/gpu-0`.
async fn about(State(page): State<Page>, request: Request) -> Response {
    let (snapshot, view) = {
        let shown = page.shown.borrow();
        (shown.snapshot.clone(), shown.view.clone())
    };
    let Some(snapshot) = snapshot else {
        let text = match view {
            Some(_) => "a saved view has no more than the page shows\n",
            None => "nothing was read yet\n",
        };
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    let said = match request.uri().query().unwrap_or_default().split_once('/') {
        Some(("gpu", gpu)) => {
            report::gpu(&snapshot, gpu).map(|found| render::gpu(&snapshot, &found))
        }
        Some(("node", node)) => {
            report::node(&snapshot, node).map(|found| render::node(&snapshot, &found))
        }
        Some(("claim", claim)) => {
            let (namespace, name) = claim.split_once('/').unwrap_or_default();
            claim::claim(&snapshot, namespace, name)
                .map(|found| render::claim(&snapshot, &found, true))
        }
        _ => return (StatusCode::NOT_FOUND, "neither a GPU, a node nor a claim\n").into_response(),
    };
    match said {
        Ok(text) => harmless(&text).into_response(),
        Err(error) => (StatusCode::NOT_FOUND, harmless(&format!("{error:#}"))).into_response(),
    }
}
