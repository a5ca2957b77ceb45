//! Chromium without a window, spoken to in its DevTools protocol over a pair of pipes: no port, no
//! other program.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// Longest time for an answer or a condition: the pods of the demo arrive one after the other.
const PATIENCE: Duration = Duration::from_mins(1);

/// A browser with one page.
pub(super) struct Chromium {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    /// Events since the start, in order.
    events: Vec<Value>,
    session: Value,
    last: u64,
}

impl Chromium {
    /// Starts it; `profile` is an empty folder.
    pub(super) fn start(profile: &Path) -> Result<Self> {
        let found = ["chromium", "chromium-browser", "google-chrome"]
            .into_iter()
            .find(|name| {
                Command::new(name)
                    .arg("--version")
                    .stdout(Stdio::null())
                    .status()
                    .is_ok()
            });
        let name = found.context(
            "no Chromium is on this machine (Debian: apt-get install -y --no-install-recommends chromium)",
        )?;
        // The protocol is on the file descriptors 3 and 4.
        let mut child = Command::new("sh")
            .args([
                "-c",
                "exec \"$@\" 3<&0 4>&1 0</dev/null 1>/dev/null 2>/dev/null",
                "sh",
                name,
            ])
            .args([
                "--remote-debugging-pipe",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
            ])
            .args([
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
            ])
            .args([
                "--disable-sync",
                "--hide-scrollbars",
                "--force-renderer-accessibility",
            ])
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let input = child.stdin.take().context("no pipe to Chromium")?;
        let output = child.stdout.take().context("no pipe from Chromium")?;
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(output).split(0) {
                let Ok(bytes) = message else { return };
                let Ok(message) = serde_json::from_slice(&bytes) else {
                    continue;
                };
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser = Self {
            child,
            input,
            messages,
            events: Vec::new(),
            session: Value::Null,
            last: 0,
        };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": at(&target, "/targetId"), "flatten": true });
        let attached = browser.call("Target.attachToTarget", &attach)?;
        browser.session = at(&attached, "/sessionId").clone();
        for domain in ["Page", "Network", "Runtime", "Log", "Accessibility"] {
            browser.call(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Makes a call and returns its result.
    pub(super) fn call(&mut self, method: &str, parameters: &Value) -> Result<Value> {
        self.last += 1;
        let message = match &self.session {
            Value::Null => json!({ "id": self.last, "method": method, "params": parameters }),
            page => {
                json!({ "id": self.last, "method": method, "params": parameters, "sessionId": page })
            }
        };
        self.input
            .write_all(format!("{message}\0").as_bytes())
            .context("Chromium has ended")?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let message = self
                .messages
                .recv_timeout(left)
                .with_context(|| format!("{method}: no answer"))?;
            if *at(&message, "/id") == self.last {
                let error = at(&message, "/error");
                ensure!(error.is_null(), "{method}: {error}");
                return Ok(at(&message, "/result").clone());
            }
            self.events.push(message);
        }
    }

    /// Evaluates an expression on the page, promises awaited.
    pub(super) fn value(&mut self, expression: &str) -> Result<Value> {
        let parameters =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", &parameters)?;
        let thrown = at(&answer, "/exceptionDetails");
        ensure!(thrown.is_null(), "{expression}: {thrown}");
        Ok(at(&answer, "/result/value").clone())
    }

    /// Waits until an expression is true. A page that is being left has no answer.
    pub(super) fn until(&mut self, expression: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if self
                .value(expression)
                .is_ok_and(|value| value == json!(true))
            {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("the page did not get so far: {expression}");
    }

    /// Presses and releases a key.
    pub(super) fn press(&mut self, key: &str, code: u32, text: &str) -> Result<()> {
        let key = |kind: &str| json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text });
        self.call(
            "Input.dispatchKeyEvent",
            &key(if text.is_empty() {
                "rawKeyDown"
            } else {
                "keyDown"
            }),
        )?;
        self.call("Input.dispatchKeyEvent", &key("keyUp")).map(drop)
    }

    /// Returns the reports of a kind, such as `Network.responseReceived`.
    pub(super) fn events(&self, method: &str) -> impl Iterator<Item = &Value> {
        self.events
            .iter()
            .filter(move |event| *at(event, "/method") == method)
            .map(|event| at(event, "/params"))
    }
}

/// Returns the value at a place in a document; null if nothing is there.
pub(super) fn at<'v>(value: &'v Value, place: &str) -> &'v Value {
    value.pointer(place).unwrap_or(&Value::Null)
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
