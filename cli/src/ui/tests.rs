//! The page's server over real connections: what attackers get, and what tabs get.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::bail;
use futures::FutureExt as _;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::guard::{Guard, Secrets};
use super::server;
use super::{Page, Reading, Source};
use crate::view::tests::{usage, world};

const EVIL: &str = "<img src=x onerror=alert(1)>\u{1b}[2J";

struct Server {
    address: SocketAddr,
    reads: Arc<AtomicU32>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves the made-up fleet, with markup where a tenant could put it. The second of its readings
/// fails.
async fn served(every: Duration) -> Server {
    let reads = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&reads);
    let source: Source = Box::new(move || {
        let number = count.fetch_add(1, Ordering::SeqCst);
        async move {
            if number == 1 {
                bail!("the API server does not answer");
            }
            let mut snapshot = world();
            let node = snapshot.reports.get_mut("n1").unwrap();
            node.gpus[0].holders[0].pods = vec![EVIL.to_owned()];
            Ok(Reading {
                snapshot,
                usage: usage(),
                caption: None,
                cluster: None,
            })
        }
        .boxed()
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let secrets = Secrets {
        token: "t0ken".to_owned(),
        cookie: "c00kie".to_owned(),
        folder: "f0lder".to_owned(),
    };
    let guard = Guard::new(address, &[], secrets);
    let task = tokio::spawn(server::serve(
        Page::new(source, every),
        guard,
        listener,
        std::future::pending(),
    ));
    Server {
        address,
        reads,
        task,
    }
}

impl Server {
    async fn open(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let mut request = format!("{method} {path} HTTP/1.1\r\n");
        if !headers.iter().any(|(name, _)| *name == "host") {
            request += &format!("host: {}\r\n", self.address);
        }
        for (name, value) in headers {
            request += &format!("{name}: {value}\r\n");
        }
        stream
            .write_all(format!("{request}\r\n").as_bytes())
            .await
            .unwrap();
        stream
    }

    /// The whole answer.
    async fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> String {
        let mut answer = String::new();
        self.open(method, path, headers)
            .await
            .read_to_string(&mut answer)
            .await
            .unwrap();
        answer
    }

    fn cookie(&self) -> String {
        format!("divvy-{}=c00kie", self.address.port())
    }

    async fn get(&self, path: &str) -> String {
        let path = format!("/f0lder{path}");
        self.ask("GET", &path, &[("cookie", &self.cookie())]).await
    }

    /// The events of a tab.
    async fn tab(&self) -> tokio::io::Lines<BufReader<TcpStream>> {
        BufReader::new(
            self.open("GET", "/f0lder/events", &[("cookie", &self.cookie())])
                .await,
        )
        .lines()
    }
}

async fn event(tab: &mut tokio::io::Lines<BufReader<TcpStream>>) -> serde_json::Value {
    loop {
        let line = tab.next_line().await.unwrap().expect("the stream goes on");
        if let Some(data) = line.strip_prefix("data: ") {
            return serde_json::from_str(data).unwrap();
        }
    }
}

#[tokio::test]
async fn strangers_are_refused_on_every_path_and_learn_nothing() {
    let server = served(Duration::from_mins(1)).await;
    let port = server.address.port();
    let (cookie, foreign) = (server.cookie(), format!("evil.example.com:{port}"));
    for path in [
        "/",
        "/f0lder/",
        "/f0lder/app.js",
        "/f0lder/style.css",
        "/f0lder/events",
        "/f0lder/about?gpu/n1/gpu-0",
        "/f0lder/about?claim/lab/train",
        "/f0lder/view.json",
        "/f0lder/none",
        // Without the folder the cookie is worth nothing.
        "/events",
        "/about?gpu/n1/gpu-0",
    ] {
        if !path.starts_with("/f0lder/") {
            let answer = server.ask("GET", path, &[("cookie", &cookie)]).await;
            assert!(answer.starts_with("HTTP/1.1 403 "), "{path}: {answer}");
        }
        for (method, headers, expected) in [
            ("GET", &[][..], "403"),
            ("GET", &[("cookie", "divvy-1=c00kie")], "403"),
            (
                "GET",
                &[("host", foreign.as_str()), ("cookie", &cookie)],
                "421",
            ),
            ("GET", &[("host", "localhost"), ("cookie", &cookie)], "421"),
            (
                "GET",
                &[("origin", "https://evil.example.com"), ("cookie", &cookie)],
                "403",
            ),
            ("POST", &[("cookie", &cookie)], "405"),
            (
                "OPTIONS",
                &[("cookie", &cookie), ("origin", "https://evil.example.com")],
                "405",
            ),
            ("DELETE", &[("cookie", &cookie)], "405"),
        ] {
            let answer = server.ask(method, path, headers).await;
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {expected} ")),
                "{method} {path} {headers:?}: {answer}"
            );
            assert!(
                !answer.contains("train") && !answer.contains("<html"),
                "{answer}"
            );
            assert!(
                !answer.to_lowercase().contains("access-control-"),
                "{answer}"
            );
            assert!(
                ["c00kie", "t0ken", "f0lder"]
                    .iter()
                    .all(|secret| !answer.contains(secret)),
                "{answer}"
            );
        }
    }
    assert_eq!(
        server.reads.load(Ordering::SeqCst),
        0,
        "strangers cost the cluster nothing"
    );
}

#[tokio::test]
async fn the_link_leads_to_the_page_once_and_every_answer_binds_the_browser() {
    let server = served(Duration::from_mins(1)).await;
    let entered = server.ask("GET", "/?token=t0ken", &[]).await;
    let cookie = format!(
        "set-cookie: {}; HttpOnly; SameSite=Strict; Path=/f0lder/\r\n",
        server.cookie()
    );
    assert!(
        entered.starts_with("HTTP/1.1 200 ") && entered.contains(&cookie),
        "{entered}"
    );
    let again = server.ask("GET", "/?token=t0ken", &[]).await;
    assert!(
        again.starts_with("HTTP/1.1 403 ") && again.contains("works once"),
        "{again}"
    );
    let page = server.get("/").await;
    assert!(page.contains("<h1 ") && !page.contains("t0ken"), "{page}");
    for answer in [
        entered,
        again,
        page,
        server.get("/none").await,
        server.get("/app.js").await,
    ] {
        for header in [
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; ",
            "frame-ancestors 'none'",
            "x-content-type-options: nosniff\r\n",
            "referrer-policy: no-referrer\r\n",
            "cache-control: no-store\r\n",
            "cross-origin-resource-policy: same-origin\r\n",
        ] {
            assert!(answer.contains(header), "{header} is not in {answer}");
        }
    }
    let head = server
        .ask("HEAD", "/f0lder/", &[("cookie", &server.cookie())])
        .await;
    assert!(
        head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"),
        "{head}"
    );
}

#[tokio::test]
async fn all_tabs_share_one_reading_and_see_when_there_is_none() {
    let server = served(Duration::from_millis(300)).await;
    let mut one = server.tab().await;
    let first = event(&mut one).await;
    assert_eq!(
        (&first["problem"], &first["view"]["nodes"][0]["name"]),
        (&().into(), &"n1".into())
    );
    // One that comes later gets what is known at once, and after it the same as the first.
    let mut other = server.tab().await;
    assert_eq!(event(&mut other).await, first);
    let (failed, seen) = (event(&mut one).await, event(&mut other).await);
    assert_eq!(failed, seen);
    assert_eq!(failed["problem"], "the API server does not answer");
    assert_eq!(failed["view"], first["view"], "the last view stays");
    assert_eq!(server.reads.load(Ordering::SeqCst), 2);
    assert!(event(&mut one).await["problem"].is_null());
}

#[tokio::test]
async fn a_view_that_was_saved_is_shown_again() {
    let server = served(Duration::from_mins(1)).await;
    let early = server.get("/view.json").await;
    assert!(early.starts_with("HTTP/1.1 503 "), "{early}");
    let live = event(&mut server.tab().await).await;
    let answer = server.get("/view.json").await;
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("view.json");
    fs_err::write(&file, body).unwrap();
    let mut again = super::saved::read(&file).unwrap();
    assert_eq!(again["saved"], true);
    again.as_object_mut().unwrap().remove("saved");
    assert_eq!(again, live["view"]);
}

#[test]
fn a_file_that_is_no_view_is_refused_by_the_place_that_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let said = |content: &str| {
        let file = folder.path().join("view.json");
        fs_err::write(&file, content).unwrap();
        format!("{:#}", super::saved::read(&file).unwrap_err())
    };
    let lists = r#""troubles": [], "refused": [], "waiting": [], "unread": [], "now": "x""#;
    for (content, wanted) in [
        ("apiVersion: v1", "expected value at line 1"),
        ("[]", "it has no list \"nodes\""),
        (r#"{"nodes": {}}"#, "it has no list \"nodes\""),
        (
            &format!(r#"{{"nodes": [{{}}], {lists}}}"#),
            "nodes[0]: it has no text \"name\"",
        ),
        (
            &format!(r#"{{"nodes": [{{"name": "n", "gpus": [{{"name": 7}}]}}], {lists}}}"#),
            "nodes[0].gpus[0]: it has no text \"name\"",
        ),
    ] {
        let text = said(content);
        assert!(text.contains(wanted), "{content}: {text}");
        assert!(text.contains("no view that `divvy ui` has saved"), "{text}");
    }
    let none = super::saved::read(&folder.path().join("none.json")).unwrap_err();
    assert!(format!("{none:#}").contains("none.json"), "{none:#}");
}

#[tokio::test]
async fn what_status_says_of_a_gpu_or_claim_is_plain_text_and_harmless() {
    let server = served(Duration::from_mins(1)).await;
    let early = server.get("/about?gpu/n1/gpu-0").await;
    assert!(early.starts_with("HTTP/1.1 503 "), "{early}");
    let view = event(&mut server.tab().await).await;
    assert_eq!(
        view["view"]["nodes"][0]["gpus"][0]["holds"][0]["pods"][0], EVIL,
        "as data, in JSON"
    );
    let gpu = server.get("/about?gpu/n1/gpu-0").await;
    assert!(
        gpu.starts_with("HTTP/1.1 200 ") && gpu.contains("content-type: text/plain"),
        "{gpu}"
    );
    assert!(
        gpu.contains("gpu-0 of node n1") && gpu.contains(r"onerror=alert(1)>\u{1b}[2J"),
        "{gpu}"
    );
    let claim = server.get("/about?claim/lab/train").await;
    assert!(claim.contains("claim lab/train, pods train-0"), "{claim}");
    let node = server.get("/about?node/n1").await;
    assert!(node.contains("node n1: 4 GPUs"), "{node}");
    for path in [
        "/about?claim/lab/none",
        "/about?gpu/n1/gpu-77",
        "/about?node/none",
        "/about",
        "/about?claim/x",
    ] {
        assert!(
            server.get(path).await.starts_with("HTTP/1.1 404 "),
            "{path}"
        );
    }
}

#[tokio::test]
async fn without_a_tab_the_cluster_is_left_alone() {
    let server = served(Duration::from_millis(1)).await;
    drop(server.get("/").await);
    assert_eq!(server.reads.load(Ordering::SeqCst), 0);
    let mut tab = server.tab().await;
    event(&mut tab).await;
    assert!(server.reads.load(Ordering::SeqCst) > 0);
}
