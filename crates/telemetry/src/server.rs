//! The HTTP endpoints: `/metrics`, `/healthz`, `/readyz`, `/debug/state`.

use std::collections::VecDeque;
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
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio::time::{Instant, sleep_until, timeout};

use crate::{MetricsRegistry, Readiness};

/// Limits of what strangers take of the process: the endpoints are open to every pod of the
/// cluster, and prepares need file descriptors, too.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at once. A further one ends the oldest, which was open for [`LEAST`].
    pub connections: usize,
    /// Time for the head of a request to arrive.
    pub head: Duration,
    /// Time for a connection, which serves one request.
    pub connection: Duration,
}

const LIMITS: Limits = Limits {
    connections: 32,
    head: Duration::from_secs(5),
    connection: Duration::from_secs(30),
};

/// Time that every connection has, however many there are. A client that sends its request at once,
/// as the kubelet's probes do, is answered in a small part of it; and 32 connections for each of
/// these spans let a probe pass a thousand others within its timeout of five seconds.
const LEAST: Duration = Duration::from_millis(100);

/// Pause after a connection could not be accepted: the process has no file descriptors left, say.
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
        f.debug_struct("HttpServer")
            .field("readiness", &self.readiness)
            .finish_non_exhaustive()
    }
}

impl HttpServer {
    /// Makes endpoints over a registry and a readiness set; without `/debug/state`, which
    /// [`debug_state`](Self::debug_state) adds.
    pub fn new(metrics: MetricsRegistry, readiness: Readiness) -> Self {
        Self {
            metrics,
            readiness,
            debug: None,
            limits: LIMITS,
        }
    }

    /// Adds `/debug/state` with this answer: called for each request, on a thread that may block.
    #[must_use]
    pub fn debug_state(mut self, state: impl Fn() -> Value + Send + Sync + 'static) -> Self {
        self.debug = Some(Arc::new(state));
        self
    }

    /// Returns whether there is a `/debug/state`.
    pub fn serves_state(&self) -> bool {
        self.debug.is_some()
    }

    /// Serves until `shutdown` is done, and then until open requests are answered.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) {
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

/// Serves routes until `shutdown` is done, and then until open requests are answered. A connection
/// serves one request, within bounds of time and number, so that idle connections cost the process
/// nothing that it needs.
///
/// Where all places are taken, a new connection gets that of the oldest. It does not wait for one
/// to end: clients that never finish their requests, and open a new connection for each that is
/// ended, would keep the kubelet's probes out, and the kubelet would kill the process.
pub async fn serve(
    routes: Router,
    limits: Limits,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .keep_alive(false);
    let service = TowerToHyperService::new(routes);
    let mut open = Connections::default();
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                // Room first: never more than the limit are served at once. New clients wait in the
                // kernel's backlog meanwhile.
                open.make_room(limits.connections).await;
                let connection = http.serve_connection(TokioIo::new(stream), service.clone());
                open.spawn(async move {
                    // A client that hangs or goes away is its own matter: there is no one to report
                    // it to.
                    drop(timeout(limits.connection, connection).await);
                });
            }
            Err(error) => {
                // Out of file descriptors, for example: trying again at once would fail again and
                // fill the log.
                tracing::warn!(%error, "a connection to the HTTP endpoints cannot be accepted");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
    // No connection is accepted any more; each open one ends by its own time limit.
    while open.tasks.join_next().await.is_some() {}
}

/// The connections of a server.
#[derive(Default)]
struct Connections {
    tasks: JoinSet<()>,
    /// The same, the oldest first, since when they are open.
    by_age: VecDeque<(Instant, AbortHandle)>,
}

impl Connections {
    fn spawn(&mut self, connection: impl Future<Output = ()> + Send + 'static) {
        let task = self.tasks.spawn(connection);
        self.by_age.push_back((Instant::now(), task));
    }

    /// Waits until less than `most` connections are open, and ends the oldest for that.
    async fn make_room(&mut self, most: usize) {
        while self.is_full(most) {
            let Some((since, _)) = self.by_age.front() else {
                return;
            };
            tokio::select! {
                // Another one ends by itself.
                _ = self.tasks.join_next() => continue,
                () = sleep_until(*since + LEAST) => {}
            }
            // After the process got no processor time for long, connections that have their
            // requests by now come first.
            yield_now().await;
            if self.is_full(most)
                && let Some((_, oldest)) = self.by_age.pop_front()
            {
                oldest.abort();
            }
        }
    }

    /// Forgets the connections that have ended, and returns whether `most` are left.
    fn is_full(&mut self, most: usize) -> bool {
        // Both lists: tasks that have ended are collected, and the handles kept for their age are
        // dropped.
        while self.tasks.try_join_next().is_some() {}
        self.by_age.retain(|(_, task)| !task.is_finished());
        self.by_age.len() >= most
    }
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
        (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("not ready\n{}\n", missing.join("\n")),
        )
    }
}

async fn debug(State(server): State<HttpServer>) -> impl IntoResponse {
    let Some(state) = server.debug else {
        return StatusCode::NOT_FOUND.into_response();
    };
    // The closure may take locks that a step holds for seconds.
    match tokio::task::spawn_blocking(move || state()).await {
        Ok(state) => Json(state).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
        let serving = tokio::spawn(
            server
                .clone()
                .serve(listener, async { drop(stopped.await) }),
        );
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        stop.send(()).unwrap();
        serving.await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (
            head.split(' ').nth(1).unwrap().parse().unwrap(),
            body.to_owned(),
        )
    }

    /// A pod that opens connections and sends nothing does not block other clients of the
    /// endpoints.
    #[tokio::test]
    async fn idle_connections_give_their_places_back() {
        let limits = Limits {
            connections: 2,
            head: Duration::from_millis(20),
            connection: LIMITS.connection,
        };
        let server = HttpServer {
            limits,
            ..HttpServer::new(MetricsRegistry::new(), Readiness::new())
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(server.serve(listener, std::future::pending()));
        let mut idle = Vec::new();
        for _ in 0..8 {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        // A connection whose head never ends is cut, too.
        for stream in &mut idle {
            let mut left = Vec::new();
            drop(stream.read_to_end(&mut left).await);
        }
        serving.abort();
    }

    /// Sends a request and returns what is answered until the connection ends.
    async fn ask(address: SocketAddr, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    /// 300 clients that send a request, and again as soon as the server has ended the connection;
    /// probes beside them. Nothing ends by itself.
    async fn probes_are_answered_beside(request: &'static str) {
        let hour = Duration::from_hours(1);
        let limits = Limits {
            connections: LIMITS.connections,
            head: hour,
            connection: hour,
        };
        let routes = Router::new()
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/never", get(std::future::pending::<&'static str>));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut others = JoinSet::new();
        others.spawn(serve(routes, limits, listener, std::future::pending()));
        let ended = Arc::new(AtomicUsize::new(0));
        for _ in 0..300 {
            let ended = ended.clone();
            others.spawn(async move {
                loop {
                    drop(ask(address, request).await);
                    ended.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let probe = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
        let probes = async {
            // All places are taken.
            while ended.load(Ordering::Relaxed) == 0 {
                yield_now().await;
            }
            for _ in 0..5 {
                let answer = ask(address, probe).await.unwrap();
                assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            }
        };
        let answered = timeout(Duration::from_mins(1), probes).await;
        answered.expect("a probe was never answered");
        others.abort_all();
    }

    #[tokio::test]
    async fn clients_that_never_finish_their_heads_do_not_keep_probes_out() {
        probes_are_answered_beside("GET /metrics HTTP/1.1\r\nHost: x\r\nX: ").await;
    }

    #[tokio::test]
    async fn clients_whose_requests_are_never_answered_do_not_keep_probes_out() {
        probes_are_answered_beside("GET /never HTTP/1.1\r\nHost: x\r\n\r\n").await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_ended_only_for_another_and_not_before_its_least_time() {
        let mut open = Connections::default();
        let began = Instant::now();
        for _ in 0..2 {
            open.make_room(2).await;
            open.spawn(std::future::pending());
        }
        assert_eq!(began.elapsed(), Duration::ZERO, "there is room");
        let oldest = open.by_age[0].1.clone();
        open.make_room(2).await;
        assert!(began.elapsed() >= LEAST);
        assert!(
            open.tasks
                .join_next()
                .await
                .unwrap()
                .unwrap_err()
                .is_cancelled()
        );
        assert!(oldest.is_finished() && open.by_age.len() == 1);
        // A connection that ends by itself costs no other its place.
        open.spawn(async {});
        let kept = open.by_age[0].1.clone();
        open.make_room(2).await;
        assert!(!kept.is_finished() && open.by_age.len() == 1);
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
        assert_eq!(
            (
                server.serves_state(),
                fetch(&server, "/debug/state").await.0
            ),
            (false, 404)
        );
        let server = server.debug_state(|| json!({"claims": []}));
        metrics.counter("calls", "Calls").inc();
        let (status, body) = fetch(&server, "/metrics").await;
        assert_eq!(
            (status, body.contains("divvy_calls_total 1\n")),
            (200, true),
            "{body}"
        );
        assert_eq!(
            fetch(&server, "/debug/state").await,
            (200, "{\"claims\":[]}".into())
        );
        assert_eq!(fetch(&server, "/nothing").await.0, 404);
    }
}
