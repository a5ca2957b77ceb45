//! Rules for requests that are answered. A page on loopback is reachable by every user of the
//! machine and,
//! through the browser, by every page that its user visits: a page can have its own name resolve to
//! 127.0.0.1 (the `Host` then shows that name), and send requests to other origins. A request
//! passes only with a known `Host`, no foreign `Origin`, and the cookie that the link of the
//! terminal was exchanged for. Browsers send a cookie to all ports of a host, where other users
//! of the machine may serve pages: it is for a folder whose name is as secret as the cookie, and
//! goes to no other.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use http::request::Parts;
use http::{HeaderName, Method, StatusCode, header};

/// Headers of every answer: nothing but our own files, no frames, no guesses, no
/// traces.
pub(super) const HEADERS: [(HeaderName, &str); 7] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::CACHE_CONTROL, "no-store"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
];

/// Decision about a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Answer,
    /// It has the link's token: give it this cookie, and lead it to the page.
    Enter {
        cookie: String,
    },
    Refuse(StatusCode, &'static str),
}

/// The rules of one server.
#[derive(Debug)]
pub(super) struct Guard {
    /// Allowed values of `Host`.
    hosts: Vec<String>,
    /// In the link that is printed; good for one request.
    token: String,
    used: AtomicBool,
    /// `NAME=VALUE` of the cookie.
    cookie: String,
    /// Path of the folder with all that is served, `/SECRET/`.
    folder: String,
}

/// The secrets of one server.
#[derive(Debug)]
pub(super) struct Secrets {
    pub(super) token: String,
    /// Value of the cookie.
    pub(super) cookie: String,
    /// Name of the folder.
    pub(super) folder: String,
}

impl Secrets {
    /// Draws them.
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            token: secret()?,
            cookie: secret()?,
            folder: secret()?,
        })
    }
}

impl Guard {
    pub(super) fn new(address: SocketAddr, allowed: &[String], secrets: Secrets) -> Self {
        let Secrets {
            token,
            cookie,
            folder,
        } = secrets;
        let port = address.port();
        let mut hosts: Vec<String> = Vec::new();
        if address.ip().is_loopback() {
            hosts.extend(["127.0.0.1", "localhost", "[::1]"].map(|host| format!("{host}:{port}")));
        }
        for host in allowed.iter().map(|host| host.to_ascii_lowercase()) {
            hosts.push(format!("{host}:{port}"));
            hosts.push(host);
        }
        // Of several servers on one host each has its own.
        let cookie = format!("divvy-{port}={cookie}");
        Self {
            hosts,
            token,
            used: AtomicBool::new(false),
            cookie,
            folder: format!("/{folder}/"),
        }
    }

    /// Returns the path of the folder with all that is served, with a slash at both ends.
    pub(super) fn folder(&self) -> &str {
        &self.folder
    }

    /// The link to the page.
    pub(super) fn url(&self) -> String {
        let host = self.hosts.first().map(String::as_str).unwrap_or_default();
        format!("http://{host}/?token={}", self.token)
    }

    pub(super) fn judge(&self, request: &Parts) -> Verdict {
        let header = |name: HeaderName| {
            let mut values = request.headers.get_all(name).iter();
            let first = values
                .next()
                .map(|value| value.to_str().unwrap_or("?").to_ascii_lowercase());
            // One that is there twice is none of ours.
            if values.next().is_some() {
                Some("?".to_owned())
            } else {
                first
            }
        };
        let known = |host: &str| self.hosts.iter().any(|known| known == host);
        let authority = request
            .uri
            .authority()
            .map(|authority| authority.as_str().to_ascii_lowercase());
        let hosts = [header(header::HOST), authority];
        if hosts.iter().all(Option::is_none) || !hosts.iter().flatten().all(|host| known(host)) {
            return Verdict::Refuse(
                StatusCode::MISDIRECTED_REQUEST,
                "this server does not have that name: use the link that it printed, or start it with --allow-host",
            );
        }
        if ![Method::GET, Method::HEAD].contains(&request.method) {
            return Verdict::Refuse(StatusCode::METHOD_NOT_ALLOWED, "this page can only be read");
        }
        let ours = |origin: &str| {
            origin
                .strip_prefix("http://")
                .or(origin.strip_prefix("https://"))
                .is_some_and(known)
        };
        if header(header::ORIGIN).is_some_and(|origin| !ours(&origin)) {
            return Verdict::Refuse(StatusCode::FORBIDDEN, "this page is not for other sites");
        }
        let path = request.uri.path();
        let start = path.get(..self.folder.len()).unwrap_or_default();
        if same(start, &self.folder) && self.has_cookie(request) {
            return Verdict::Answer;
        }
        let given = request
            .uri
            .query()
            .and_then(|query| query.strip_prefix("token="));
        let right = path == "/" && given.is_some_and(|given| same(given, &self.token));
        if right && !self.used.swap(true, Ordering::SeqCst) {
            return Verdict::Enter {
                cookie: format!(
                    "{}; HttpOnly; SameSite=Strict; Path={}",
                    self.cookie, self.folder
                ),
            };
        }
        let why = if right {
            "this link was used already: it works once, in one browser; go on in the tab that it opened, or start the program again"
        } else {
            "open the link that the program printed in the terminal"
        };
        Verdict::Refuse(StatusCode::FORBIDDEN, why)
    }

    fn has_cookie(&self, request: &Parts) -> bool {
        let lines = request
            .headers
            .get_all(header::COOKIE)
            .iter()
            .filter_map(|line| line.to_str().ok());
        let mut cookies = lines.flat_map(|line| line.split(';')).map(str::trim);
        cookies.any(|cookie| same(cookie, &self.cookie))
    }
}

/// Compares in a time that does not depend on where the two differ.
fn same(a: &str, b: &str) -> bool {
    let pairs = a.bytes().zip(b.bytes());
    a.len() == b.len() && pairs.fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// 256 random bits in hexadecimal digits.
fn secret() -> Result<String> {
    let mut halves = [[0_u8; 16]; 2];
    let random = rustls::crypto::ring::default_provider().secure_random;
    for half in &mut halves {
        random
            .fill(half)
            .ok()
            .context("the system has no random numbers")?;
    }
    let [one, other] = halves.map(u128::from_be_bytes);
    Ok(format!("{one:032x}{other:032x}"))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn guard(listen: &str, allowed: &[&str]) -> Guard {
        let allowed: Vec<String> = allowed.iter().map(|host| (*host).to_owned()).collect();
        Guard::new(
            listen.parse().unwrap(),
            &allowed,
            Secrets {
                token: "t0ken".to_owned(),
                cookie: "c00kie".to_owned(),
                folder: "f0lder".to_owned(),
            },
        )
    }

    fn judge(guard: &Guard, method: &str, uri: &str, headers: &[(&str, &str)]) -> Verdict {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        guard.judge(&request.body(()).unwrap().into_parts().0)
    }

    fn status(verdict: &Verdict) -> u16 {
        match verdict {
            Verdict::Answer => 200,
            Verdict::Enter { .. } => 303,
            Verdict::Refuse(status, _) => status.as_u16(),
        }
    }

    const COOKIE: (&str, &str) = ("cookie", "a=b; divvy-80=x; divvy-7000=c00kie");

    #[test]
    fn only_hosts_of_the_list_are_answered_and_only_with_the_port() {
        let guard = guard("127.0.0.1:7000", &["Gpus.Example.com"]);
        for (host, expected) in [
            ("127.0.0.1:7000", 200),
            ("localhost:7000", 200),
            ("LOCALHOST:7000", 200),
            ("[::1]:7000", 200),
            ("gpus.example.com", 200),
            ("gpus.example.com:7000", 200),
            ("127.0.0.1", 421),
            ("127.0.0.1:7001", 421),
            ("localhost.:7000", 421),
            ("evil.example.com:7000", 421),
            ("localhost:7000.evil.example.com", 421),
            ("127.1:7000", 421),
            ("", 421),
        ] {
            assert_eq!(
                status(&judge(&guard, "GET", "/f0lder/", &[("host", host), COOKIE])),
                expected,
                "{host}"
            );
        }
        let twice = [("host", "localhost:7000"), ("host", "evil:7000"), COOKIE];
        assert_eq!(status(&judge(&guard, "GET", "/f0lder/", &twice)), 421);
        assert_eq!(
            status(&judge(&guard, "GET", "/f0lder/", &[COOKIE])),
            421,
            "no Host at all"
        );
        let absolute = judge(
            &guard,
            "GET",
            "http://evil:7000/",
            &[("host", "localhost:7000"), COOKIE],
        );
        assert_eq!(status(&absolute), 421);
    }

    #[test]
    fn beyond_loopback_only_the_named_hosts_are_answered() {
        let guard = guard("0.0.0.0:7000", &["gpus"]);
        for (host, expected) in [
            ("gpus:7000", 200),
            ("gpus", 200),
            ("localhost:7000", 421),
            ("0.0.0.0:7000", 421),
        ] {
            assert_eq!(
                status(&judge(&guard, "GET", "/f0lder/", &[("host", host), COOKIE])),
                expected,
                "{host}"
            );
        }
        assert_eq!(guard.url(), "http://gpus:7000/?token=t0ken");
    }

    #[test]
    fn foreign_origins_and_methods_that_change_are_refused_in_any_case() {
        let guard = guard("127.0.0.1:7000", &[]);
        let host = ("host", "localhost:7000");
        for method in [
            "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND",
        ] {
            assert_eq!(
                status(&judge(&guard, method, "/f0lder/", &[host, COOKIE])),
                405,
                "{method}"
            );
        }
        assert_eq!(
            status(&judge(&guard, "HEAD", "/f0lder/", &[host, COOKIE])),
            200
        );
        for (origin, expected) in [
            ("http://localhost:7000", 200),
            ("http://127.0.0.1:7000", 200),
            ("http://localhost:7001", 403),
            ("http://evil.example.com", 403),
            ("null", 403),
        ] {
            let headers = [host, COOKIE, ("origin", origin)];
            assert_eq!(
                status(&judge(&guard, "GET", "/f0lder/events", &headers)),
                expected,
                "{origin}"
            );
        }
    }

    #[test]
    fn the_link_works_once_and_gives_a_cookie_that_others_do_not_have() {
        let guard = guard("127.0.0.1:7000", &[]);
        let host = ("host", "127.0.0.1:7000");
        assert_eq!(guard.url(), "http://127.0.0.1:7000/?token=t0ken");
        for uri in [
            "/",
            "/events",
            "/f0lder/",
            "/f0lder/app.js",
            "/?token=t0keN",
            "/?token=",
            "/?token=t0ken2",
            "/events?token=t0ken",
        ] {
            assert_eq!(status(&judge(&guard, "GET", uri, &[host])), 403, "{uri}");
        }
        for cookie in [
            "divvy-7000=",
            "divvy-7000=c00kiE",
            "c00kie",
            "divvy-7000=t0ken",
            "xdivvy-7000=c00kie",
        ] {
            assert_eq!(
                status(&judge(
                    &guard,
                    "GET",
                    "/f0lder/",
                    &[host, ("cookie", cookie)]
                )),
                403,
                "{cookie}"
            );
        }
        let cookie = "divvy-7000=c00kie; HttpOnly; SameSite=Strict; Path=/f0lder/".to_owned();
        assert_eq!(
            judge(&guard, "GET", "/?token=t0ken", &[host]),
            Verdict::Enter { cookie }
        );
        assert_eq!(status(&judge(&guard, "GET", "/?token=t0ken", &[host])), 403);
    }

    /// A page that another user of the machine serves on another port of 127.0.0.1 gets the cookies
    /// of all ports: but for those of a folder that it does not have.
    #[test]
    fn the_cookie_goes_to_no_other_port_and_does_not_open_the_page_alone() {
        let guard = guard("127.0.0.1:7000", &[]);
        let host = ("host", "127.0.0.1:7000");
        let Verdict::Enter { cookie } = judge(&guard, "GET", "/?token=t0ken", &[host]) else {
            panic!("the link is good");
        };
        // A browser sends a cookie to paths below its own, whatever the port (RFC 6265, 5.1.4).
        let (_, path) = cookie.rsplit_once("Path=").unwrap();
        assert_eq!(path, guard.folder());
        for other in ["/", "/index.html", "/f0lde/", "/F0LDER/"] {
            assert!(!other.starts_with(path), "{other}");
            // Nor does a cookie that was found out open the page without its folder.
            let uri = if other == "/" { "/events" } else { other };
            let found = judge(&guard, "GET", uri, &[host, COOKIE]);
            assert_eq!(status(&found), 403, "{uri}");
        }
        assert_eq!(guard.folder().len(), "/f0lder/".len());
        let secrets = Secrets::new().unwrap();
        assert_eq!(secrets.folder.len(), 64, "too long to be guessed");
        assert_ne!(secrets.folder, secrets.cookie);
    }

    #[test]
    fn secrets_are_long_and_never_the_same() {
        let (one, other) = (secret().unwrap(), secret().unwrap());
        assert!(one.len() == 64 && one != other);
    }
}
