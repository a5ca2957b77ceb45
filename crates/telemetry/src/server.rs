//! The HTTP endpoints: `/metrics`, `/healthz`, `/readyz`, `/debug/state`.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::{MetricsRegistry, Readiness};

/// What strangers may take of the process: the endpoints are open to every pod of the cluster, and file descriptors are
/// also what prepares need.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at once; further ones wait to be accepted.
    pub connections: usize,
    /// Time for the head of a request to arrive.
    pub head: Duration,
    /// Time for a connection, which serves one request.
    pub connection: Duration,
}

const LIMITS: Limits =
    Limits { connections: 32, head: Duration::from_secs(5), connection: Duration::from_secs(30) };

/// After a connection could not be accepted: the process has no file descriptors left, say.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

type DebugState = Arc<dyn Fn() -> Value + Send + Sync>;

/// The endpoints of one process.
#[derive(Clone)]
pub struct HttpServer {
    metrics: MetricsRegistry,
    readiness: Readiness,
    debug: Option<DebugState>,
    limits: Limits,
}

impl fmt::Debug for HttpServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpServer").field("readiness", &self.readiness).finish_non_exhaustive()
    }
}

impl HttpServer {
    /// Endpoints over a registry and a readiness set; without `/debug/state`, which [`debug_state`](Self::debug_state) adds.
    pub fn new(metrics: MetricsRegistry, readiness: Readiness) -> Self {
        Self { metrics, readiness, debug: None, limits: LIMITS }
    }

    /// What `/debug/state` answers: called for each request, on a thread that may block.
    #[must_use]
    pub fn debug_state(mut self, state: impl Fn() -> Value + Send + Sync + 'static) -> Self {
        self.debug = Some(Arc::new(state));
        self
    }

    /// Whether there is a `/debug/state`.
    pub fn serves_state(&self) -> bool {
        self.debug.is_some()
    }

    /// Serves until `shutdown` is done, and then until open requests are answered.
    pub async fn serve(self, listener: TcpListener, shutdown: impl Future<Output = ()> + Send + 'static) {
        let limits = self.limits;
        serve(self.router(), limits, listener, shutdown).await;
    }

    fn router(self) -> Router {
        Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .route("/debug/state", get(debug))
            .with_state(self)
    }
}

/// Serves routes until `shutdown` is done, and then until open requests are answered. A connection serves one request,
/// within bounds of time and number, so that idle connections cost the process nothing that it needs.
pub async fn serve(
    routes: Router,
    limits: Limits,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).keep_alive(false);
    let service = TowerToHyperService::new(routes);
    let places = Arc::new(Semaphore::new(limits.connections));
    let mut open = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = &mut shutdown => break,
            next = next => next,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = http.serve_connection(TokioIo::new(stream), service.clone());
                open.spawn(async move {
                    // The client's affair.
                    drop(timeout(limits.connection, connection).await);
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to the HTTP endpoints cannot be accepted");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
        while open.try_join_next().is_some() {}
    }
    while open.join_next().await.is_some() {}
}

async fn metrics(State(server): State<HttpServer>) -> impl IntoResponse {
    let media = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, media)], server.metrics.encode())
}

async fn ready(State(server): State<HttpServer>) -> impl IntoResponse {
    let missing = server.readiness.missing();
    if missing.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("not ready\n{}\n", missing.join("\n")))
    }
}

async fn debug(State(server): State<HttpServer>) -> impl IntoResponse {
    let Some(state) = server.debug else { return StatusCode::NOT_FOUND.into_response() };
    // The closure may take locks that a step holds for seconds.
    match tokio::task::spawn_blocking(move || state()).await {
        Ok(state) => Json(state).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::oneshot;

    use super::*;

    /// Status and body of a GET, over a real connection.
    async fn fetch(server: &HttpServer, path: &str) -> (u16, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(server.clone().serve(listener, async { drop(stopped.await) }));
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        stop.send(()).unwrap();
        serving.await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    /// A pod that opens connections and sends nothing does not block other clients of the endpoints.
    #[tokio::test]
    async fn idle_connections_give_their_places_back() {
        let limits =
            Limits { connections: 2, head: Duration::from_millis(20), connection: LIMITS.connection };
        let server = HttpServer { limits, ..HttpServer::new(MetricsRegistry::new(), Readiness::new()) };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(server.serve(listener, std::future::pending()));
        let mut idle = Vec::new();
        for _ in 0..8 {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        // One whose head never ends is cut, too.
        for stream in &mut idle {
            let mut left = Vec::new();
            drop(stream.read_to_end(&mut left).await);
        }
        serving.abort();
    }

    #[tokio::test]
    async fn readyz_lists_what_is_missing_until_every_part_is_ready() {
        let readiness = Readiness::new();
        let server = HttpServer::new(MetricsRegistry::new(), readiness.clone());
        assert_eq!(fetch(&server, "/readyz").await, (200, "ok\n".into()));
        let slices = readiness.handle("slices");
        let driver = readiness.handle("driver");
        driver.waiting("libnvidia-ml.so.1 is not there");
        let expected = "not ready\ndriver: libnvidia-ml.so.1 is not there\nslices: not yet\n";
        assert_eq!(fetch(&server, "/readyz").await, (503, expected.into()));
        assert_eq!(fetch(&server, "/healthz").await, (200, "ok\n".into()));
        slices.ready();
        driver.ready();
        assert_eq!(fetch(&server, "/readyz").await, (200, "ok\n".into()));
    }

    #[tokio::test]
    async fn metrics_and_state_are_read_at_the_time_of_the_request() {
        let metrics = MetricsRegistry::new();
        let server = HttpServer::new(metrics.clone(), Readiness::new());
        assert_eq!((server.serves_state(), fetch(&server, "/debug/state").await.0), (false, 404));
        let server = server.debug_state(|| json!({"claims": []}));
        metrics.counter("calls", "Calls").inc();
        let (status, body) = fetch(&server, "/metrics").await;
        assert_eq!((status, body.contains("divvy_calls_total 1\n")), (200, true), "{body}");
        assert_eq!(fetch(&server, "/debug/state").await, (200, "{\"claims\":[]}".into()));
        assert_eq!(fetch(&server, "/nothing").await.0, 404);
    }
}
