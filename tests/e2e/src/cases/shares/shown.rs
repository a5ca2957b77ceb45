//! Views of the use that [`super::usage`] scripts: `kubectl divvy top` and the page of `divvy ui`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;

use super::usage::{GIB, SCRIPTED};
use super::{Context, Env, Result, Value, at, ensure, poll};
use crate::case::PATIENCE;
use crate::config::Layout;
use crate::process::{Daemon, Signal};

/// All show what was scripted, of the GPUs of the shares and of the partitions.
pub(super) fn agree(env: &Env, gpus: (&str, &str)) -> Result<()> {
    let page = Page::open(env)?;
    let mut wrong = Vec::new();
    poll(
        "`kubectl divvy top` and `divvy ui` that agree with what was scripted",
        PATIENCE,
        || {
            wrong = of_top(env, gpus)?;
            wrong.extend(of_page(env, gpus, &page.view()?));
            Ok(wrong.is_empty())
        },
    )
    .with_context(|| format!("{wrong:#?}"))?;
    page.refuses_others()
}

/// Returns what is not as scripted in the answers of `top`.
fn of_top(env: &Env, (shared, cut): (&str, &str)) -> Result<Vec<String>> {
    let of = |by: &str| {
        let args = ["top", by, "--namespace", &env.namespace, "--output", "json"];
        let (code, said) = env.driver.kubectl_divvy(&args)?;
        ensure!(code == Some(0), "top {by} ends with {code:?}: {said}");
        let answer: Value = serde_json::from_str(&said).with_context(|| said.clone())?;
        ensure!(
            at(&answer, "unread").as_array().is_some_and(Vec::is_empty),
            "{said}"
        );
        Ok(at(&answer, by).as_array().cloned().unwrap_or_default())
    };
    let claims = of("claims")?;
    let mut wrong = of_claims("top claims", &claims);
    if claims.len() != SCRIPTED.len() {
        wrong.push(format!("top claims: {} lines", claims.len()));
    }
    // Of the shares' GPU the memory of one process is not known.
    let of_both = [
        ("top nodes", "nodes", Layout::NODE),
        ("top namespaces", "namespaces", &*env.namespace),
    ];
    for (what, by, name) in of_both {
        let lines = of(by)?;
        wrong.extend(of_sum(what, line(&lines, "name", name), (6, 30, 1)));
    }
    let gpus = of("gpus")?;
    wrong.extend(of_sum(
        "top gpus: shares",
        line(&gpus, "uuid", shared),
        (4, 22, 1),
    ));
    wrong.extend(of_sum(
        "top gpus: partitions",
        line(&gpus, "uuid", cut),
        (2, 8, 0),
    ));
    Ok(wrong)
}

/// Returns what is not as scripted in the page's data.
fn of_page(env: &Env, (shared, cut): (&str, &str), view: &Value) -> Vec<String> {
    let nodes = at(view, "nodes").as_array().into_iter().flatten();
    let gpus: Vec<Value> = nodes
        .filter_map(|node| at(node, "gpus").as_array())
        .flatten()
        .cloned()
        .collect();
    let mut wrong = Vec::new();
    let mut holds = Vec::new();
    for (uuid, mode, used) in [(shared, "time-sliced", 22), (cut, "partitioned", 8)] {
        let gpu = line(&gpus, "uuid", uuid);
        let total = at(gpu, "memoryUsed").as_u64();
        if at(gpu, "mode") != mode || total != Some(used * GIB) {
            wrong.push(format!(
                "page: GPU {uuid}: {} with {total:?} bytes used",
                at(gpu, "mode")
            ));
        }
        holds.extend(at(gpu, "holds").as_array().into_iter().flatten().cloned());
    }
    holds.retain(|hold| at(hold, "namespace") == &*env.namespace);
    wrong.extend(of_claims("page", &holds));
    wrong
}

/// The line about something, or null.
fn line<'a>(lines: &'a [Value], key: &str, wanted: &str) -> &'a Value {
    lines
        .iter()
        .find(|line| at(line, key) == wanted)
        .unwrap_or(&Value::Null)
}

/// Returns what is not as scripted in the claims' parts of GPUs.
fn of_claims(what: &str, holds: &[Value]) -> Vec<String> {
    let differs = |(pod, gib, percent, source): &(&str, Option<u32>, u32, &str)| {
        let hold = line(holds, "claim", pod);
        let is_share = *source == "process";
        let used = at(hold, "memoryUsed").as_u64() == gib.map(|gib| u64::from(gib) * GIB);
        let ratio = at(hold, "utilization").as_f64();
        let busy = ratio.is_some_and(|ratio| (ratio - f64::from(*percent) / 100.0).abs() < 1e-6);
        let granted = !is_share || at(hold, "memoryGranted").as_u64() == Some(10 * GIB);
        // What is not known is no overuse, and what cannot be exceeded has none.
        let over = at(hold, "overGrant").as_bool() == gib.filter(|_| is_share).map(|gib| gib > 10);
        let fine = used
            && busy
            && granted
            && over
            && at(hold, "source") == *source
            && at(hold, "part") == if is_share { "share" } else { "1g.10gb" }
            && at(hold, "pods.0") == *pod;
        (!fine).then(|| format!("{what}: claim {pod}: {hold}"))
    };
    SCRIPTED.iter().filter_map(differs).collect()
}

/// Returns a sum that is not so: parts of GPUs, GiB that they use as far as it is known, and of how
/// many it is not.
fn of_sum(what: &str, line: &Value, (held, gib, unknown): (u64, u64, u64)) -> Option<String> {
    let number = |path: &str| at(line, path).as_u64();
    let fine = number("held") == Some(held)
        && number("usedTotal.bytes") == Some(gib * GIB)
        && number("usedTotal.unknown") == Some(unknown);
    (!fine).then(|| format!("{what}: {line}"))
}

/// A running `divvy ui` of the cluster's admin, opened by its link; ended when dropped.
struct Page<'a> {
    env: &'a Env<'a>,
    port: u16,
    /// With the token.
    link: String,
    cookie: String,
    /// Path of the folder that the page is in.
    folder: String,
}

impl<'a> Page<'a> {
    fn open(env: &'a Env<'a>) -> Result<Self> {
        let program = env.cluster.state().join("bin/divvy").display().to_string();
        let args = [program, "ui".to_owned(), "--no-open".to_owned()];
        let kubeconfig = env.cluster.layout().kubeconfig("admin");
        let daemon = env.cluster.daemon("ui");
        if daemon.log().exists() {
            // Its links are of earlier programs.
            fs_err::remove_file(daemon.log())?;
        }
        daemon.define(&args, &[("KUBECONFIG".to_owned(), kubeconfig)])?;
        daemon.start()?;
        let mut page = Self {
            env,
            port: 0,
            link: String::new(),
            cookie: String::new(),
            folder: String::new(),
        };
        let said = || fs_err::read_to_string(daemon.log()).unwrap_or_default();
        poll("the link to the page", PATIENCE, || {
            ensure!(
                daemon.is_running(),
                "divvy ui has ended\n{}",
                daemon.log_tail()
            );
            let said = said();
            let link = said
                .lines()
                .find_map(|line| line.trim().strip_prefix("http://127.0.0.1:"));
            let Some((port, path)) = link.and_then(|link| link.split_once('/')) else {
                return Ok(false);
            };
            (page.port, page.link) = (port.parse()?, format!("/{path}"));
            Ok(true)
        })?;
        let entered = page.ask(&page.link, &page.host(), "")?;
        let lines = entered
            .lines()
            .find_map(|line| line.strip_prefix("set-cookie: "));
        let cookie = lines
            .and_then(|line| line.split(';').next())
            .context(entered.clone())?;
        cookie.clone_into(&mut page.cookie);
        let folder = lines.and_then(|line| line.rsplit_once("; Path="));
        let (_, folder) = folder.context(entered.clone())?;
        folder.trim().clone_into(&mut page.folder);
        Ok(page)
    }

    fn daemon(&self) -> Daemon<'a> {
        self.env.cluster.daemon("ui")
    }

    fn events(&self) -> String {
        format!("{}events", self.folder)
    }

    fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// A request on its way.
    fn request(&self, path: &str, host: &str, cookie: &str) -> Result<TcpStream> {
        let mut stream = self.env.cluster.connect_to(self.port)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(
            stream,
            "GET {path} HTTP/1.0\r\nHost: {host}\r\nCookie: {cookie}\r\n\r\n"
        )?;
        Ok(stream)
    }

    /// The whole answer.
    fn ask(&self, path: &str, host: &str, cookie: &str) -> Result<String> {
        let mut answer = String::new();
        self.request(path, host, cookie)?
            .read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Returns what a tab that is opened now shows first.
    fn view(&self) -> Result<Value> {
        let answer = BufReader::new(self.request(&self.events(), &self.host(), &self.cookie)?);
        for line in answer.lines() {
            let line = line?;
            if let Some(event) = line.strip_prefix("data: ") {
                let event: Value = serde_json::from_str(event)?;
                ensure!(
                    at(&event, "problem").is_null(),
                    "the page has a problem: {event}"
                );
                return Ok(at(&event, "view").clone());
            }
        }
        anyhow::bail!("the page shows nothing\n{}", self.daemon().log_tail())
    }

    /// On a real socket: no cookie, another name, and the link a second time.
    fn refuses_others(&self) -> Result<()> {
        let (host, foreign) = (self.host(), format!("evil.example.com:{}", self.port));
        let events = self.events();
        let others = [
            (&*events, &host, "", " 403 "),
            (&*events, &foreign, &*self.cookie, " 421 "),
            ("/events", &host, &*self.cookie, " 403 "),
            (&*self.link, &host, "", " 403 "),
        ];
        for (path, host, cookie, status) in others {
            let answer = self.ask(path, host, cookie)?;
            let first = answer.lines().next().unwrap_or_default();
            ensure!(
                first.contains(status),
                "GET {path} of {host} is answered with {first}"
            );
        }
        Ok(())
    }
}

impl Drop for Page<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.daemon().stop(Signal::Term) {
            crate::process::say(&format!("divvy ui still runs: {error:#}"));
        }
    }
}
